"""Parameters and bytes of the published model, against the figures of docs/model.md 1.7."""

import json
import subprocess
import sys

import pytest
from tests.core.checkpoint.small import VISION, small_config
from tests.core.config.published import published

from deepinfer.checkpoint.schema import expected_tensors
from deepinfer.checkpoint.storage import stored_bytes, stored_form
from deepinfer.config import ModelConfig
from deepinfer.report.model_report import describe_model
from deepinfer.report.parameters import count_parameters

pytestmark = pytest.mark.torchless


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_dict(published())


@pytest.mark.parametrize(
    ("group", "billions"),
    [
        ("attention", 5.065),
        ("routed_experts", 543.58),
        ("shared_experts", 1.416),
        ("router", 0.0786),
        ("hyper_connections", 0.0393),
        ("compressors_and_indexers", 0.01835 + 0.0435),
        ("embedding", 0.6619),
        ("head", 0.6619),
        ("engram_projections", 0.3147),
        ("backbone", 551.9),
        ("engram_tables", 196.6),
        ("drafts", 14.2),
        ("active_decode", 16.1),
        ("active_prefill", 7.9),
    ],
)
def test_published_counts_are_those_of_the_specification(config, group, billions):
    count = count_parameters(config).to_dict()[group]
    assert count / 1e9 == pytest.approx(billions, rel=4e-3)


def test_published_storage_is_exact_to_the_byte_and_the_tensor(config):
    """Payload and number of tensors of the published files."""
    tensors = expected_tensors(config)
    assert sum(stored_bytes(*item, config) for item in tensors.items()) == 510_286_023_000
    assert sum(len(stored_form(*item, config)) for item in tensors.items()) == 96_085
    weights = describe_model(config, available_bytes=10**12).weights
    assert weights["stored_bytes"] == 510_286_023_000
    assert weights["num_tensors"] == 96_085


def test_groups_add_up_to_all_tensors():
    values = small_config()
    values["vision_config"] = VISION
    values["image_token_id"] = 298
    config = ModelConfig.from_dict(values)
    total = 0
    for spec in expected_tensors(config).values():
        count = 1
        for edge in spec.shape:
            count *= edge
        total += count
    counts = count_parameters(config)
    assert counts.total == total
    assert counts.vision > 0
    assert counts.active_prefill < counts.active_decode < counts.backbone


def test_experts_in_fp8_are_counted_as_they_are_stored():
    values = published()
    values["quantization_config"]["expert_dtype"] = "fp8"
    config = ModelConfig.from_dict(values)
    name = "layers.0.ffn.experts.0.w1.weight"
    form = stored_form(name, expected_tensors(config)[name], config)
    assert form == {
        name: ("F8_E4M3", (2304, 5120)),
        "layers.0.ffn.experts.0.w1.scale": ("F8_E8M0", (72, 160)),
    }


def test_a_report_is_made_without_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published()))
    code = (
        "import sys; from deepinfer.config import ModelConfig; "
        "from deepinfer.report import describe_model; "
        "print(describe_model(ModelConfig.from_folder(sys.argv[1])).cache['bytes_per_token']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 890
