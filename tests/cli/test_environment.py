"""The environment, read where the command starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import cyclopts
import pytest

from deepinfer.config.environment import Environment
from deepinfer_cli.environment import EnvironmentDefaults

from .conftest import Finished

pytestmark = pytest.mark.torchless

Run = Callable[..., Finished]


@cyclopts.Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    device: Annotated[str, cyclopts.Parameter()] = "cpu"
    backend: str = "auto"
    num_draft_tokens: int | None = None


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The options of a command that runs a model, for an environment and arguments."""
    from deepinfer.report import Platform

    devices = {"cpu": "cpu", "nvidia": "cuda", "ascend": "npu"}

    def choose(name: str) -> Platform:
        return Platform(name=name, device_type=devices[name], num_devices=1)

    monkeypatch.setattr("deepinfer.report.choose_platform", choose)

    def run(environment: Environment, *args: str) -> tuple[Options, str]:
        app = cyclopts.App(config=(EnvironmentDefaults(environment),), result_action="return_value")

        @app.command(name="go")
        def go(*, options: Options = Options()) -> Options:
            return options

        return app(["go", *args]), capsys.readouterr().err

    return run


def test_the_accelerator_decides_device_and_backend(resolve):
    options, warning = resolve(Environment(accelerator="nvidia"))
    assert (options.device, options.backend, warning) == ("cuda", "nvidia", "")
    options, _ = resolve(Environment(accelerator="cpu"))
    assert (options.device, options.backend) == ("cpu", "auto")
    options, _ = resolve(Environment())
    assert (options.device, options.backend) == ("cpu", "auto")


@pytest.mark.parametrize(
    ("args", "device", "backend"),
    [
        (["--device", "cpu"], "cpu", "auto"),
        (["--backend", "reference"], "cpu", "reference"),
        (["--device", "cuda:1", "--backend", "reference"], "cuda:1", "reference"),
    ],
)
def test_an_option_wins_over_the_accelerator(resolve, args, device, backend):
    options, _ = resolve(Environment(accelerator="ascend"), *args)
    assert (options.device, options.backend) == (device, backend)


def test_an_alias_fills_the_option_of_its_meaning_unless_that_is_given(resolve):
    environment = Environment(num_draft_tokens=3)
    assert resolve(environment)[0].num_draft_tokens == 3
    assert resolve(environment, "--num-draft-tokens", "1")[0].num_draft_tokens == 1


def test_names_without_effect_are_told_in_one_warning(resolve):
    environment = Environment(swa_replay="mask", without_effect=("DEEPINFER_GLOO_TIMEOUT",))
    _, warning = resolve(environment)
    assert warning == (
        "warning: DEEPINFER_GLOO_TIMEOUT, DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE have no effect "
        "here; unset what is meant for another engine\n"
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DEEPINFER_ACELERATOR", "cpu", "did you mean DEEPINFER_ACCELERATOR?"),
        ("DEEPINFER_ACCELERATOR", "nvidai", "did you mean nvidia?"),
        ("DEEPINFER_USE_NEXTN_DECODE", "x", "allowed: an integer of at least 0"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "info", "verify", "synth"])
def test_a_wrong_environment_is_wrong_usage_in_one_line(
    command, name, value, said, run_main: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, value)
    done = run_main(command, "x")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {name}: ")
    assert said in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["info", "--help"], []])
def test_help_is_there_whatever_the_environment_holds(
    args, run_main: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DEEPINFER_NOPE", "1")
    assert run_main(*args).code == 0


def test_a_command_that_runs_no_model_warns_as_well(
    run_main: Run, monkeypatch: pytest.MonkeyPatch, tmp_path
):
    monkeypatch.setenv("DEEPINFER_ENFORCE_EAGER", "1")
    done = run_main("info", str(tmp_path))
    assert done.err.startswith("warning: DEEPINFER_ENFORCE_EAGER has no effect here")
