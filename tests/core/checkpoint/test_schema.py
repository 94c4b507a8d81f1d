"""The table of expected tensors against what is known of the published files."""

from math import prod

from tests.core.checkpoint.small import VISION, small_config
from tests.core.config.published import published

from deepinfer.checkpoint import expected_tensors
from deepinfer.config import ModelConfig


def released() -> dict:
    return expected_tensors(ModelConfig.from_dict(published()))


def test_release_has_96085_names():
    specs = released()
    assert len(specs) + sum(spec.has_scale for spec in specs.values()) == 96_085


def test_release_has_the_published_number_of_bytes():
    """The index of the release states the sum of all payloads; every shape and dtype is in it."""
    total = 0
    for spec in released().values():
        elements = prod(spec.shape)
        if spec.role == "fp32":
            total += 4 * elements
        elif spec.role == "bf16":
            total += 2 * elements
        elif spec.role == "linear":
            total += elements + -(-spec.shape[0] // 32) * -(-spec.shape[1] // 32)
        elif spec.role == "table":
            total += elements + spec.shape[0] * -(-spec.shape[1] // 32)
        else:
            total += elements // 2 + spec.shape[0] * -(-spec.shape[1] // 32)
    assert total == 510_286_023_000


def test_shapes_of_the_release():
    specs = released()
    wanted = {
        "embed.weight": ((129280, 5120), "bf16"),
        "layers.0.hc_attn_fn": ((24, 20480), "fp32"),
        "layers.0.attn.attn_sink": ((64,), "fp32"),
        "layers.39.attn.wo_a.weight": ((8192, 4096), "linear"),
        "layers.39.attn.wo_b.weight": ((5120, 8192), "linear"),
        "layers.7.ffn.experts.383.w2.weight": ((5120, 2304), "expert"),
        "layers.7.ffn.gate.bias_vl": ((384,), "fp32"),
        "layers.20.attn.compressor.wkv.weight": ((512, 5120), "bf16"),
        "layers.14.attn.compressor.wgate.weight": ((512, 5120), "bf16"),
        "layers.14.attn.indexer.wk.weight": ((128, 512), "bf16"),
        "layers.36.attn.indexer.wq_b.weight": ((4096, 1280), "linear"),
        "layers.1.engram.embed.weight": ((384006168, 256), "table"),
        "layers.14.engram.embed.weight": ((384016682, 256), "table"),
        "layers.14.engram.wkv.weight": ((25600, 6144), "linear"),
        "mtp.0.main_proj.weight": ((5120, 15360), "linear"),
        "mtp.2.markov_head.head.weight": ((129280, 256), "bf16"),
        "mtp.2.confidence_head.proj.weight": ((1, 5376), "bf16"),
        "mtp.1.ffn.experts.127.w1.weight": ((2304, 5120), "expert"),
        "vision.patch_embed.proj.weight": ((1024, 588), "bf16"),
        "vision.blocks.31.mlp.w1.weight": ((5632, 1024), "bf16"),
        "aligner.w1.weight": ((5120, 9216), "bf16"),
    }
    for name, (shape, role) in wanted.items():
        assert (specs[name].shape, specs[name].role) == (shape, role), name


def test_tensors_that_only_some_layers_own():
    specs = released()
    absent = [
        "layers.20.attn.compressor.wgate.weight",  # ratio 1 has no gate
        "layers.24.attn.indexer.wk.weight",  # no source of entries
        "layers.3.attn.indexer.wq_b.weight",  # no index source
        "layers.0.attn.compressor.wkv.weight",
        "layers.0.engram.wkv.weight",
        "mtp.0.norm.weight",
        "mtp.1.main_proj.weight",
        "mtp.0.engram.wkv.weight",
        "mtp.0.ffn.experts.128.w1.weight",
        "hc_head_fn",
    ]
    assert not [name for name in absent if name in specs]


def test_index_keys_belong_to_their_own_sources():
    values = small_config(index_k_source_layer_ids=[1, 2, 4])
    specs = expected_tensors(ModelConfig.from_dict(values))
    assert "layers.4.attn.indexer.wk.weight" in specs
    assert "layers.4.attn.compressor.wkv.weight" not in specs


def test_vision_tensors_are_expected_exactly_with_a_vision_config():
    values = small_config()
    without = expected_tensors(ModelConfig.from_dict(values))
    assert not [name for name in without if name.startswith(("vision.", "aligner.", "image_"))]
    values["vision_config"] = dict(VISION)
    extra = set(expected_tensors(ModelConfig.from_dict(values))) - set(without)
    # 3 delimiters, 2 of the patch embedding, 8 per block, the norm, 4 of the aligner
    assert len(extra) == 3 + 2 + 2 * 8 + 1 + 4
