"""The environment: every name is known, typed and told; what is wrong is named with a way out."""

import os
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from deepinfer.config.environment import VARIABLES, Environment, read_environment
from deepinfer.errors import ConfigError

pytestmark = pytest.mark.torchless

ROOT = Path(__file__).parents[3]
PUBLISHED = (
    *("ACCELERATOR", "HF_MODEL_DIR", "USE_NEXTN_DECODE", "ENABLE_MTP_VARLEN", "BATCH_INVARIANT"),
    *("YOCO_PREFILL_TRUNCATION_MODE", "YOCO_PREFILL_KEEP_TOKENS", "JIT_CACHE_DIR"),
    *("NCCL_NUM_SMS", "GLOO_TIMEOUT", "MAX_BACKTRACKING_TOKENS", "ENFORCE_EAGER"),
    *("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "SAMPLER_FORCE_TOPK", "DECODE_TOKEN_BLACKLIST"),
    *("ENGRAM_FORCE_GPU_STORAGE", "XGRAMMAR_CACHE_LIMIT_BYTES", "ZERO_OVERHEAD_SCHEDULING"),
)


def refusal(**environ: str) -> str:
    """What is said of variables, given without their prefix."""
    with pytest.raises(ConfigError) as caught:
        read_environment({f"DEEPINFER_{name}": value for name, value in environ.items()})
    return str(caught.value)


def test_names_of_others_are_left_alone():
    assert read_environment({"PATH": "/bin", "deepinfer_x": "1", "HF_HOME": "x"}) == Environment()


def test_values_are_typed():
    read = read_environment(
        {
            "DEEPINFER_ACCELERATOR": "NVIDIA",
            "DEEPINFER_HF_MODEL_DIR": "/models/a",
            "DEEPINFER_USE_NEXTN_DECODE": "3",
            "DEEPINFER_ENABLE_MTP_VARLEN": "False",
            "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "mask",
            "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "140",
            "DEEPINFER_CPU_ISA": "avx2",
        }
    )
    assert read == Environment(
        accelerator="nvidia",
        hf_model_dir="/models/a",
        num_draft_tokens=3,
        schedules_drafts=False,
        swa_replay="mask",
        swa_replay_keep=140,
        cpu_isa="avx2",
    )
    with pytest.raises(FrozenInstanceError):
        read.accelerator = "cpu"


@pytest.mark.parametrize(("text", "value"), [("0", False), ("1", True), ("true", True)])
def test_flags_are_what_they_say(text, value):
    assert read_environment({"DEEPINFER_ENABLE_MTP_VARLEN": text}).schedules_drafts is value


def test_an_empty_value_counts_as_not_set():
    environ = {variable.name: " " for variable in VARIABLES}
    assert read_environment(environ) == Environment()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ACCELERATOR", "nvidai", "allowed: cpu, nvidia or ascend; did you mean nvidia?"),
        ("ACCELERATOR", "tpu", "allowed: cpu, nvidia or ascend"),
        ("CPU_ISA", "avx51", "did you mean avx512?"),
        ("USE_NEXTN_DECODE", "-1", "allowed: an integer of at least 0"),
        ("USE_NEXTN_DECODE", "five", "allowed: an integer of at least 0"),
        ("USE_NEXTN_DECODE", "1.5", "allowed: an integer"),
        ("ENABLE_MTP_VARLEN", "no", "allowed: 0, 1, false or true"),
        ("YOCO_PREFILL_TRUNCATION_MODE", "on", "allowed: off, mask or compact"),
        ("NCCL_NUM_SMS", "many", "allowed: an integer"),
        ("NUM_STATE_SLOTS_RATIO", "nan", "allowed: a finite number"),
        ("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,x", "allowed: a finite number"),
    ],
)
def test_a_malformed_value_is_an_error_with_what_is_allowed(name, value, said):
    message = refusal(**{name: value})
    assert message.startswith(f"DEEPINFER_{name}: found {value!r}, ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("ACELERATOR", "DEEPINFER_ACCELERATOR"),
        ("HF_MODELDIR", "DEEPINFER_HF_MODEL_DIR"),
        ("CACHEDIR", "DEEPINFER_CACHE_DIR"),
        ("cpu_isa", "DEEPINFER_CPU_ISA"),
        ("USE_NEXTN", "DEEPINFER_USE_NEXTN_DECODE"),
    ],
)
def test_an_unknown_name_is_an_error_that_suggests_the_nearest(name, near):
    assert f"did you mean {near}?" in refusal(**{name: "1"})


def test_an_unknown_name_without_a_neighbour_says_where_all_are_listed():
    assert "deepinfer doctor --environment" in refusal(QQQQ="1")
    assert "\x1b" not in refusal(**{"\x1b[2J": "1"})


def test_all_faults_are_told_at_once():
    lines = refusal(ACCELERATOR="x", NOPE="1", BATCH_INVARIANT="2").splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "DEEPINFER_ACCELERATOR",
        "DEEPINFER_BATCH_INVARIANT",
        "DEEPINFER_NOPE",
    ]


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_of_the_published_engine_are_known(name):
    assert f"DEEPINFER_{name}" in {variable.name for variable in VARIABLES}


def test_what_means_nothing_here_is_accepted_and_told_in_one_line():
    environ = {"DEEPINFER_GLOO_TIMEOUT": "60", "DEEPINFER_BATCH_INVARIANT": "1"}
    read = read_environment(environ)
    assert read.without_effect == ("DEEPINFER_BATCH_INVARIANT", "DEEPINFER_GLOO_TIMEOUT")
    assert read.warning().count("\n") == 0
    for name in environ:
        assert name in read.warning()
    assert "DEEPINFER_USE" in read.warning(["DEEPINFER_USE_NEXTN_DECODE"])
    assert read_environment({}).warning() == ""


def test_the_list_is_complete_and_consistent():
    names = [variable.name for variable in VARIABLES]
    assert len(set(names)) == len(names)
    known = {field.name for field in fields(Environment)} - {"without_effect"}
    assert {variable.field for variable in VARIABLES} - {""} == known
    for variable in VARIABLES:
        assert variable.name.startswith("DEEPINFER_")
        assert variable.meaning
        assert variable.default
        assert bool(variable.choices) == (variable.kind == "choice")


def test_every_name_that_our_files_speak_of_is_in_the_list():
    known = {variable.name for variable in VARIABLES}
    files = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]
    files += [ROOT / "Makefile", ROOT / "build.sh", *ROOT.glob("examples/*.py")]
    for file in files:
        spoken = set(re.findall(r"DEEPINFER_[A-Z][A-Z0-9_]*[A-Z0-9]", file.read_text("utf-8")))
        assert spoken <= known, file


def test_reading_it_imports_no_torch():
    code = "import sys; import deepinfer.config.environment; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, check=False)
    assert done.returncode == 0
