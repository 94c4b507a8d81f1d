"""The troubles that users meet: one clear message each, which says what to do.

`TROUBLES` has a scenario for every row of the README's table of that name; a row is found by the
words of the message in its first column.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.core.config.published import published

from .conftest import Finished

ROOT = Path(__file__).parents[2]


@dataclass
class Scene:
    """What a scenario can use."""

    run: Callable[..., Finished]
    patch: pytest.MonkeyPatch
    folder: Path
    """Empty, and the current folder."""
    tiny: Path
    """A sound checkpoint; to be copied before it is changed."""
    tools: list[str] = field(default_factory=list)

    def build(self, **environ: str) -> Finished:
        """``./build.sh --dry-run`` with few programs on the path."""
        bare = self.folder / "bin"
        bare.mkdir(exist_ok=True)
        for name in ("bash", "dirname", "sort", "head", "tail", "grep", "cut", "ls", "uname"):
            link = bare / name
            if not link.exists():
                link.symlink_to(shutil.which(name) or f"/usr/bin/{name}")
        done = subprocess.run(
            [str(bare / "bash"), str(ROOT / "build.sh"), "--dry-run"],
            env={"PATH": str(bare), "PYTHON": sys.executable, **environ},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return Finished(done.returncode, done.stdout, done.stderr)

    def tool(self, name: str, text: str) -> None:
        """A program on the path of `build` that prints a text."""
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n".replace("cat", shutil.which("cat"))
        )
        path.chmod(0o755)

    def config(self, values: dict) -> str:
        """A folder that holds a config alone."""
        (self.folder / "model").mkdir()
        (self.folder / "model" / "config.json").write_text(json.dumps(values))
        return "model"

    def python(self, code: str) -> Finished:
        """A program of the user's own."""
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, run_command) -> Path:
    folder = tmp_path_factory.mktemp("models")
    assert run_command("synth", "tiny", cwd=folder).code == 0
    return folder / "tiny"


@pytest.fixture
def scene(run_main, monkeypatch, tmp_path, tiny) -> Scene:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("DEEPINFER_")]:
        monkeypatch.delenv(name)
    return Scene(run=run_main, patch=monkeypatch, folder=tmp_path, tiny=tiny)


def not_installed(scene: Scene) -> Finished:
    scene.patch.setenv("DEEPINFER_ACCELERATOR", "nvidia")
    scene.patch.setattr("deepinfer.report.platforms.installed_backends", dict)
    return scene.run("generate", str(scene.tiny), "--prompt", "x")


def not_usable(scene: Scene) -> Finished:
    from deepinfer.kernels.registry import API_VERSION, Backend, Probe

    probe = Probe(False, "no NVIDIA driver on this machine (libcuda.so.1 cannot be loaded)")
    backend = Backend("nvidia", API_VERSION, "cuda", lambda: probe, None)
    scene.patch.setattr("deepinfer.report.platforms.installed_backends", lambda: {"nvidia": None})
    scene.patch.setattr("deepinfer.report.platforms.load_backend", lambda name: backend)
    scene.patch.setenv("DEEPINFER_ACCELERATOR", "nvidia")
    return scene.run("generate", str(scene.tiny), "--prompt", "x")


def misspelt(scene: Scene) -> Finished:
    scene.patch.setenv("DEEPINFER_ACCELERATOR", "nvidai")
    return scene.run("info", str(scene.tiny))


def unknown_variable(scene: Scene) -> Finished:
    scene.patch.setenv("DEEPINFER_CACHEDIR", "/tmp")
    return scene.run("info", str(scene.tiny))


def no_compiler(scene: Scene) -> Finished:
    scene.patch.setenv("PATH", str(scene.folder))
    return scene.run("doctor")


def old_compiler(scene: Scene) -> Finished:
    scene.tool("cc", "cc (GCC) 4.8.5 20150623")
    return scene.build(DEEPINFER_ACCELERATOR="cpu")


def old_cuda(scene: Scene) -> Finished:
    scene.tool("cc", "cc (GCC) 12.2.0")
    scene.tool("nvidia-smi", "| NVIDIA-SMI 550.54  Driver Version: 550.54  CUDA Version: 12.4  |")
    return scene.build(DEEPINFER_ACCELERATOR="nvidia")


def no_cann(scene: Scene) -> Finished:
    scene.tool("cc", "cc (GCC) 12.2.0")
    return scene.build(DEEPINFER_ACCELERATOR="ascend", ASCEND_HOME_PATH=str(scene.folder))


def not_found(scene: Scene) -> Finished:
    return scene.run("verify", "./no-such-folder")


def no_config(scene: Scene) -> Finished:
    (scene.folder / "model").mkdir()
    return scene.run("info", "model")


def not_readable(scene: Scene) -> Finished:
    model = scene.config({})
    intact = os.open

    def refuse(path, *args, **options):
        if str(path).endswith("config.json"):
            raise PermissionError(13, "Permission denied")
        return intact(path, *args, **options)

    scene.patch.setattr(os, "open", refuse)
    return scene.run("info", model)


def other_family(scene: Scene) -> Finished:
    model = scene.config({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]})
    return scene.run("info", model)


def damaged(scene: Scene) -> Finished:
    copy = shutil.copytree(scene.tiny, scene.folder / "model")
    last = sorted(copy.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    return scene.run("verify", "model")


def offline(scene: Scene) -> Finished:
    return scene.run("download", "owner/no-such-model", "--offline")


def no_memory(scene: Scene) -> Finished:
    return scene.python(
        "from deepinfer.config import parse_config; from deepinfer.report import require_memory\n"
        f"require_memory(parse_config({published()!r}), available_bytes=64 * 10**9)"
    )


def weights_too_large(scene: Scene) -> Finished:
    model = scene.config(published())
    scene.patch.setattr("deepinfer.report.model_report.available_memory_bytes", lambda: 10**10)
    done = scene.run("info", model)
    assert done.code == 0
    return Finished(1, done.out, done.err)  # it tells, and is no error of this command


def too_few_devices(scene: Scene) -> Finished:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "offline_inference.py"), "--ep", "8"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout, done.stderr)


def no_torch(scene: Scene) -> Finished:
    scene.patch.setitem(sys.modules, "torch", None)
    return scene.run("doctor")


TROUBLES: dict[str, tuple[Callable[[Scene], Finished], str]] = {
    "its kernels are not installed": (not_installed, "`DEEPINFER_ACCELERATOR=nvidia ./build.sh`"),
    "but it cannot run here": (not_usable, "no NVIDIA driver on this machine"),
    "did you mean nvidia?": (misspelt, "allowed: cpu, nvidia or ascend"),
    "unknown environment variable": (unknown_variable, "did you mean DEEPINFER_CACHE_DIR?"),
    "no C compiler found": (no_compiler, "install gcc 9 or clang 10 or newer"),
    "too old": (old_compiler, "needed: gcc >= 9 or clang >= 10"),
    "needed: CUDA >= 13.0": (old_cuda, "found: driver for CUDA 12.4"),
    "needed: CANN >= 9.2": (no_cann, "install it and source its set_env.sh"),
    "there is no such folder": (not_found, "allowed: the folder of a checkpoint or a hub id"),
    "config.json: cannot be read (No such file or directory)": (
        no_config,
        "a checkpoint folder holds config.json",
    ),
    "cannot be read (Permission denied)": (not_readable, "config.json"),
    "this engine runs 'deepseek_v41' (DeepSeek-V4.1-Flash) alone": (
        other_family,
        "that is DeepSeek-V3 or R1",
    ),
    "truncated: ": (damaged, "fetch the file again"),
    "not in the hub's cache": (offline, "`deepinfer download owner/no-such-model`"),
    "not enough memory": (no_memory, "use a machine with more memory"),
    "the weights do not fit": (weights_too_large, "are free"),
    "ep=8 needs 8 devices": (too_few_devices, "lower it to 1"),
    "torch: version": (no_torch, "pip install torch"),
}
"""Words of the message (the first column of the README's table), how to meet it, and a remedy."""

MAY_GO_ON = {"no C compiler found", "too old"}
"""The CPU runs without a compiler, only slower."""


@pytest.mark.parametrize("words", TROUBLES)
def test_a_trouble_has_one_clear_message_that_says_what_to_do(words: str, scene: Scene):
    meet, remedy = TROUBLES[words]
    done = meet(scene)
    assert (done.code != 0) or words in MAY_GO_ON
    lines = [line for line in (done.out + done.err).splitlines() if words in line]
    assert len(lines) == 1, done.out + done.err
    assert remedy in lines[0]
    if words != "not enough memory":  # raised in a program of the user's own
        assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("model_type", "family"),
    [
        ("deepseek_v3", "DeepSeek-V3 or R1"),
        ("deepseek_v32", "DeepSeek-V3.2"),
        ("deepseek_v4", "V4"),
    ],
)
@pytest.mark.parametrize("command", ["info", "verify", "generate"])
def test_another_family_is_named_by_every_command_and_never_guessed_at(
    command: str, model_type: str, family: str, scene: Scene
):
    model = scene.config(published() | {"model_type": model_type})
    options = ["--prompt", "x"] if command == "generate" else []
    done = scene.run(command, model, *options)
    assert done.code == 1
    assert family in done.out + done.err
    assert "runs 'deepseek_v41'" in done.out + done.err


def test_build_without_an_accelerator_says_that_it_is_for_the_cpu(scene: Scene):
    scene.tool("cc", "cc (GCC) 12.2.0")
    done = scene.build()
    assert done.code == 0, done.err
    assert "DEEPINFER_ACCELERATOR is not set, so this is for the cpu" in done.out


def table_of_troubles() -> list[str]:
    """First columns of the README's table; empty while it has none."""
    text = (ROOT / "README.md").read_text("utf-8")
    section = re.search(r"^## Troubles\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    rows = re.findall(r"^\| `([^`]+)`", section[1], re.M) if section else []
    return [row.replace("\\|", "|") for row in rows]


def test_every_row_of_the_readme_is_a_scenario_and_every_scenario_a_row():
    rows = table_of_troubles()
    if not rows:
        pytest.skip("README.md has no section Troubles with a table yet")
    assert sorted(rows) == sorted(TROUBLES)
