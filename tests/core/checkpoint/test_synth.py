"""Made-up checkpoints: the published layout, the same bytes for the same seed, healthy values."""

import hashlib
import json
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.core.checkpoint.small import (
    INDEX,
    VISION,
    read_shard,
    read_tensors,
    small_config,
    smallest_config,
)
from tests.core.checkpoint.test_reader import opened

from deepinfer.checkpoint import dequantize, expected_tensors, synthesize
from deepinfer.checkpoint.synth_configs import named_config, names
from deepinfer.config import ModelConfig, engram_primes
from deepinfer.errors import ConfigError
from deepinfer.tokenizer import Tokenizer, compressed_token_map, engram_token_map

GOLDEN = sorted((Path(__file__).parents[2] / "data" / "golden").glob("c*"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("synth") / "tiny")


def digests(folder) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def count(name: str) -> int:
    config = ModelConfig.from_dict(named_config(name))
    return sum(prod(spec.shape) for spec in expected_tensors(config).values())


def test_named_configs_have_the_sizes_they_are_known_by():
    assert names() == ("tiny", "bench-tiny", "bench-small")
    assert round(count("tiny") / 1e6, 2) == 14.84
    assert round(count("bench-tiny") / 1e6, 1) == 4.3
    assert round(count("bench-small") / 1e6) == 383


def test_tiny_has_every_feature(tiny):
    config = ModelConfig.from_folder(tiny)
    assert config.num_encoder_layers == 4
    assert engram_primes(config.engram) == ((131, 137, 139, 149), (151, 157, 163, 167))
    assert config.dspark.num_layers == 2
    assert config.candidates.source_layer_id == 4
    assert config.quantization.expert_dtype == "fp4"
    assert config.yarn.original_max_position_embeddings == 256
    assert (config.head_dim, config.index_topk, config.vocab_size) == (512, 48, 512)
    assert {plan.ratio for plan in config.layers} == {0, 1, 2}


def test_files_are_those_of_the_published_layout(tiny):
    shards = [f"model-{at:05d}-of-00012.safetensors" for at in range(1, 13)]
    assert sorted(path.name for path in tiny.iterdir()) == sorted(
        [*shards, INDEX, "config.json", "tokenizer.json", "tokenizer_config.json"]
    )
    index = json.loads((tiny / INDEX).read_text())
    assert list(index) == ["metadata", "weight_map"]
    tensors = read_tensors(tiny)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors.values())
    groups = {}
    for name, shard in index["weight_map"].items():
        parts = name.split(".")
        groups.setdefault(shard, set()).add(
            "engram" if ".engram." in name else ".".join(parts[:2])
            if parts[0] in ("layers", "mtp") else "alone"
        )  # fmt: skip
    wanted = ["alone", *(f"layers.{layer}" for layer in range(7)), "engram", "engram"]
    assert [sorted(groups[shard]) for shard in shards] == [
        [group] for group in [*wanted, "mtp.0", "mtp.1"]
    ]


def test_dtypes_are_the_published_ones(tiny):
    """The summary of docs/checkpoint.md 3.6, by name."""
    for name, (dtype, _, _) in read_tensors(tiny).items():
        last = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if name.endswith(".scale"):
            wanted = "F8_E8M0"
        elif "hc_" in name or last in ("attn_sink", "bias", "bias_vl"):
            wanted = "F32"
        elif ".ffn.experts." in name:
            wanted = "I8"
        elif (
            last in ("wq_a", "wq_b", "wo_a", "wo_b", "main_proj")
            or name.endswith((".attn.wkv.weight", ".engram.wkv.weight", ".engram.embed.weight"))
            or ".shared_experts." in name
        ):
            wanted = "F8_E4M3"
        else:
            wanted = "BF16"
        assert dtype == wanted, name


def test_another_reader_sees_the_same(tiny):
    with opened(tiny) as checkpoint:
        for path in tiny.glob("*.safetensors"):
            with safe_open(path, "pt") as other:
                for name in other.keys():  # noqa: SIM118
                    if name.endswith(".scale"):
                        continue
                    wanted = other.get_tensor(name)
                    found = checkpoint.read(name).data.view(torch.uint8)
                    assert torch.equal(found, wanted.view(torch.uint8)), name


def test_config_is_nested_like_the_published_one(tiny):
    values = json.loads((tiny / "config.json").read_text())
    assert values["architectures"] == ["DeepseekV41ForCausalLM"]
    assert values["text_config"]["model_type"] == "deepseek_v41_text"
    assert values["quantization_config"]["weight_block_size"] == [32, 32]
    assert "vision_config" not in values
    assert values["text_config"]["compress_ratios"] == [0, 0, 2, 2, 1, 1, 1, 0, 0]


def test_compressed_vocabulary_is_that_of_the_tokenizer(tiny):
    config = ModelConfig.from_folder(tiny)
    tokenizer = Tokenizer.from_folder(tiny, config)
    assert tokenizer.vocab_size == config.vocab_size
    mapped = engram_token_map(tokenizer, config)
    assert mapped.max() + 1 == config.engram.compressed_vocab_size < config.vocab_size
    assert (mapped == compressed_token_map(tokenizer)).all()


def test_same_seed_gives_the_same_bytes(tmp_path, served):
    again = synthesize(tmp_path / "a", config=small_config())
    assert digests(again) == digests(served)
    code = (
        "import json, sys; from deepinfer.checkpoint import synthesize;"
        "synthesize(sys.argv[1], config=json.loads(sys.argv[2]))"
    )
    arguments = [str(tmp_path / "b"), json.dumps(small_config())]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    assert digests(tmp_path / "b") == digests(served)


def test_another_seed_gives_other_weights_of_the_same_form(tmp_path, served):
    other = read_tensors(synthesize(tmp_path / "a", config=small_config(), seed=1))
    for name, (dtype, shape, data) in read_tensors(served).items():
        assert other[name][:2] == (dtype, shape)
        if "hc_" not in name and not name.endswith("scale"):
            assert other[name][2] != data, name


def test_values_do_not_depend_on_other_tensors(tmp_path, served):
    values = small_config(n_routed_experts=2, num_nextn_predict_layers=0)
    values["text_config"]["compress_ratios"] = [0, 2, 1, 1, 1]
    fewer = read_tensors(synthesize(tmp_path / "a", config=values))
    more = read_tensors(served)
    for name in ("layers.1.attn.wq_a.weight", "layers.4.ffn.experts.1.w2.weight", "norm.weight"):
        assert fewer[name] == more[name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_checkpoints_are_unquantised(tmp_path, dtype):
    folder = synthesize(tmp_path / "out", config=small_config(), format="plain", dtype=dtype)
    config = ModelConfig.from_folder(folder)
    assert (config.dtype, config.quantization) == (dtype, None)
    dtypes = {name: each[0] for name, each in read_tensors(folder).items()}
    assert not [name for name in dtypes if name.endswith(".scale")]
    if dtype == "float32":
        assert set(dtypes.values()) == {"F32"}
    else:
        single = {name for name, found in dtypes.items() if found == "F32"}
        assert single == {
            name for name in dtypes if "hc_" in name or "bias" in name or "sink" in name
        }
    opened(folder).close()


def test_served_values_are_the_plain_ones_quantised(tmp_path, served):
    plain = synthesize(tmp_path / "out", config=small_config(), format="plain")
    with opened(served) as quantised, opened(plain) as exact:
        for name in exact.names():
            wanted = dequantize(exact.read(name))
            found = dequantize(quantised.read(name))
            worst = 0.26 if ".experts." in name else 0.07 if found.ndim == 2 else 0.005
            assert float((found - wanted).norm() / (wanted.norm() + 1e-9)) < worst, name


def test_values_are_healthy(tiny):
    with opened(tiny) as checkpoint:
        values = {name: dequantize(checkpoint.read(name)) for name in checkpoint.names()}
    for name, value in values.items():
        if "norm" in name or name.endswith(("q_weight", "k_weight")):
            assert abs(float(value.mean()) - 1) < 0.05, name
            assert 0.05 < float(value.std()) < 0.15, name
        elif name.endswith("embed.weight"):
            assert 0.9 < float(value.std()) < 1.1, name
        elif name.endswith((".weight", "_fn")):
            scaled = (
                float(value.std()) * value.shape[1] ** 0.5 / (2 if name == "head.weight" else 1)
            )
            assert 0.85 < scaled < 1.15, name
    biases = torch.cat([value for name, value in values.items() if name.endswith(".bias")])
    assert 0.03 < float(biases.std()) < 0.07
    layer = "layers.3.ffn.gate"
    assert not torch.equal(values[f"{layer}.bias"], values[f"{layer}.bias_vl"])


def test_hyper_connections_start_as_the_specification_says(tiny):
    """docs/model.md 9.2: one stream carries the input, streams keep to themselves."""
    with opened(tiny) as checkpoint:
        base = checkpoint.read("layers.6.hc_ffn_base").data
        scale = checkpoint.read("layers.6.hc_ffn_scale").data
    assert base[:4].tolist() == [-3, -3, 3, -3]
    assert base[4:8].tolist() == [0] * 4
    assert torch.equal(base[8:].view(4, 4), 6 * torch.eye(4) - 3)
    assert scale.tolist() == [pytest.approx(0.01)] * 3


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
@pytest.mark.parametrize("format", ["served", "plain"])
def test_any_config_can_be_made_up(tmp_path, folder, format):
    out = synthesize(tmp_path / "out", config=folder / "config.json", format=format)
    config = ModelConfig.from_folder(out)
    opened(out).close()
    tokenizer = Tokenizer.from_folder(out, config)
    assert tokenizer.vocab_size == config.vocab_size == 256
    text = "It was the best of times, it was the worst of times.\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vision_tensors_are_made_up_when_there_is_a_vision_config(tmp_path):
    values = small_config() | {"vision_config": dict(VISION)}
    out = synthesize(tmp_path / "out", config=values)
    first = read_shard(out / "model-00001-of-00010.safetensors")
    assert first["vision.blocks.1.attn.wqkv.bias"][:2] == ("BF16", [72])
    opened(out).close()


def test_config_may_be_given_as_text_path_folder_or_dictionary(tmp_path, served):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small_config()))
    for at, config in enumerate((path, str(path), tmp_path, small_config())):
        folder = tmp_path / f"out{at}"
        assert synthesize(folder, config=config) == folder
        assert digests(folder) == digests(served)


def test_given_dictionary_is_not_changed(tmp_path):
    values = small_config()
    synthesize(tmp_path / "out", config=values)
    assert values == small_config()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"config": "huge"}, "allowed: tiny, bench-tiny, bench-small or a config.json"),
        ({"config": {"model_type": "deepseek_v3"}}, "DeepSeek-V3"),
        ({"config": small_config(moe_intermediate_size=41)}, "even number"),
        ({"format": "gguf"}, "format: found 'gguf'"),
        ({"dtype": "float16"}, "dtype: found 'float16'"),
        ({"seed": -1}, "seed: found -1"),
    ],
)
def test_wrong_arguments_are_named_and_leave_nothing_behind(tmp_path, options, said):
    with pytest.raises(ConfigError) as caught:
        synthesize(tmp_path / "out", **options)
    assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    for out in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(ConfigError, match="not an empty folder"):
            synthesize(out, config=smallest_config(), format="plain")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_empty_folder_is_filled(tmp_path):
    out = tmp_path / "deep" / "out"
    out.mkdir(parents=True)
    synthesize(out, config=smallest_config(), format="plain")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_failure_on_the_way_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr("deepinfer.checkpoint.synth.tokenizer_files", fail)
    for make in (False, True):
        if make:
            (tmp_path / "out").mkdir()
        with pytest.raises(ConfigError, match="/out: cannot be written .no space") as caught:
            synthesize(tmp_path / "out", config=smallest_config(), format="plain")
        assert "partial" not in str(caught.value)
    assert [*tmp_path.rglob("*")] == [tmp_path / "out"]


@pytest.mark.parametrize("out", ["file/out", "file/deep/out", "/proc/self/out"])
def test_place_that_cannot_be_written_is_named_before_any_work(tmp_path, monkeypatch, out):
    """The message used to name the folder that the files are written to first."""
    monkeypatch.setattr("deepinfer.checkpoint.synth.build_tokenizer", None)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=f"{out}: cannot be written") as caught:
        synthesize(tmp_path / out, config=smallest_config(), format="plain")
    assert "partial" not in str(caught.value)


def test_current_folder_and_links_are_filled_in_place(tmp_path, monkeypatch):
    """The current folder used to be replaced: whoever stood in it saw nothing."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (tmp_path / "link").symlink_to(there)
    monkeypatch.chdir(here)
    synthesize(".", config=smallest_config(), format="plain")
    assert Path("config.json").is_file()
    assert not [path for path in here.iterdir() if path.name.startswith(".")]
    synthesize(tmp_path / "link", config=smallest_config(), format="plain")
    assert (there / "config.json").is_file()
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "link", "there"]
    for name in (".", "../link"):
        with pytest.raises(ConfigError, match="not an empty folder"):
            synthesize(name, config=smallest_config(), format="plain")


MEASURED = """
import json, resource, sys
from deepinfer.checkpoint import synthesize
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
synthesize(sys.argv[1], config=json.loads(sys.argv[2]), format=sys.argv[3])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="units of ru_maxrss differ")
@pytest.mark.parametrize("format", ["served", "plain"])
def test_large_tensors_are_made_piece_by_piece(tmp_path, format):
    values = small_config(vocab_size=200_000, dspark_noise_token_id=299, dspark_markov_rank=256)
    values["text_config"]["engram_layer_ids"] = []
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "out"), json.dumps(values), format],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert size > 250e6
    assert int(done.stdout) < 150e6
