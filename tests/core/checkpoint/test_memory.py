"""Loading never holds a second copy; a mapped table costs what is looked up in it.

The checkpoints are sparse files of zeros: they take no room on the disk, and memory when read.
Everything runs in the benchmark's own process, so that the peak is that of reading alone.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.core.checkpoint.small import small_config, smallest_config, sparse_checkpoint

from deepinfer.checkpoint import expected_tensors
from deepinfer.config import EngramConfig, ModelConfig, engram_primes

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "load_memory.py"
QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def figures(folder, *options) -> dict:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), str(folder), *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["few large tensors", "many small tensors"])
def test_peak_memory_of_reading_is_that_of_the_weights(tmp_path, shape):
    values = smallest_config()
    if shape == "few large tensors":
        values["text_config"].update(vocab_size=131072, hidden_size=1024)
    else:
        values["text_config"].update(
            n_routed_experts=6000, hidden_size=96, moe_intermediate_size=80
        )
    specs = expected_tensors(ModelConfig.from_dict(values))
    stored = {name: ("F32", spec.shape) for name, spec in specs.items()}
    found = figures(sparse_checkpoint(tmp_path, values, stored))
    assert found["kept_bytes"] > 1e9
    assert found["peak_resident_bytes"] <= 1.15 * found["kept_bytes"] + 300e6
    assert found["within_bound"]
    # in fact nothing is held twice: beside weights and libraries there is a constant
    own = found["peak_resident_bytes"] - found["kept_bytes"] - found["resident_before_bytes"]
    assert own < 120e6


def table_checkpoint(folder) -> Path:
    """Quantised, with two Engram tables of 0.75 GB, their rows as the published ones are."""
    layers = (0, 1)
    engram = EngramConfig(
        layer_ids=layers, num_embeddings=(1, 1), max_ngram_size=4, n_heads=8, head_dim=256,
        vocab_size=119_000, pad_token_id=2, compressed_vocab_size=300,
    )  # fmt: skip
    values = small_config(
        engram_layer_ids=list(layers), engram_max_ngram_size=4, engram_n_heads=8,
        engram_head_dim=256, engram_vocab_size=119_000,
        engram_num_embeddings=[sum(primes) for primes in engram_primes(engram)],
    )  # fmt: skip
    values["quantization_config"] = QUANTIZATION
    stored = {}
    for name, spec in expected_tensors(ModelConfig.from_dict(values)).items():
        rows, columns = spec.shape[0], spec.shape[-1]
        scale = name.removesuffix("weight") + "scale"
        if spec.role in ("fp32", "bf16"):
            stored[name] = ("F32" if spec.role == "fp32" else "BF16", spec.shape)
            continue
        packed = (rows, columns // 2)
        stored[name] = ("I8", packed) if spec.role == "expert" else ("F8_E4M3", spec.shape)
        grid_rows = -(-rows // 32) if spec.role == "linear" else rows
        stored[scale] = ("F8_E8M0", (grid_rows, -(-columns // 32)))
    return sparse_checkpoint(folder, values, stored)


@pytest.mark.slow
@pytest.mark.parametrize("is_cached", [False, True], ids=["on disk", "in the system's cache"])
def test_tables_of_1_5_gb_add_little_for_a_prompt_of_20_tokens(tmp_path, is_cached):
    """A touch of a cached file can map a megabyte; looking up must not go through the mapping."""
    folder = table_checkpoint(tmp_path)
    if is_cached:
        with (folder / "model.safetensors").open("rb") as file:
            while file.read(2**24):
                pass
    found = figures(folder, "--rows", str(20 * 24))
    assert found["table_bytes"] > 1.5e9
    assert found["table_rows_looked_up"] == 2 * 20 * 24
    assert found["table_added_bytes"] < 50e6
    assert found["peak_resident_bytes"] < 500e6
