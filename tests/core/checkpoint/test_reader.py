"""Reading: every stored form, every certain spelling, values bit for bit."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.core.checkpoint.small import (
    INDEX,
    VISION,
    read_tensors,
    small_config,
    write_folder,
    write_shard,
)

from deepinfer.checkpoint import (
    Checkpoint,
    MappedTensor,
    dequantize,
    expected_tensors,
    synthesize,
)
from deepinfer.config import ModelConfig
from deepinfer.errors import CheckpointError

GOLDEN = sorted((Path(__file__).parents[2] / "data" / "golden").glob("c*"))


def opened(folder, **options) -> Checkpoint:
    return Checkpoint.open(folder, ModelConfig.from_folder(folder), **options)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def everything(folder, **options) -> dict:
    """Values and scales of every tensor, as bytes."""
    with opened(folder, **options) as checkpoint:
        stored = {name: checkpoint.read(name) for name in checkpoint.names()}
    return {
        name: (bytes_of(each.data), None if each.scale is None else bytes_of(each.scale))
        for name, each in stored.items()
    }


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_checkpoints_of_another_implementation_are_read_bit_for_bit(folder):
    with (
        opened(folder) as checkpoint,
        safe_open(folder / "model.safetensors", "pt") as other,
    ):
        seen = set()
        for name in checkpoint.names():
            stored = checkpoint.read(name)
            assert bytes_of(stored.data) == bytes_of(other.get_tensor(name)), name
            seen.add(name)
            if stored.scale is not None:
                scale = name.removesuffix("weight") + "scale"
                assert bytes_of(stored.scale) == bytes_of(other.get_tensor(scale)), scale
                seen.add(scale)
        assert seen == set(other.keys())


def test_stored_forms(served):
    with opened(served) as checkpoint:
        fp8 = torch.float8_e4m3fn
        forms = {
            "embed.weight": ("plain", torch.bfloat16, (300, 64), None, None),
            "layers.0.attn.attn_sink": ("plain", torch.float32, (4,), None, None),
            "layers.0.attn.wo_a.weight": ("fp8", fp8, (48, 64), (2, 2), (32, 32)),
            "layers.0.ffn.experts.2.w2.weight": ("fp4", torch.uint8, (64, 40), (64, 2), (1, 32)),
            "layers.1.engram.embed.weight": ("fp8", fp8, (68, 48), (68, 2), (1, 32)),
        }
        for name, (kind, dtype, shape, grid, block) in forms.items():
            stored = checkpoint.read(name)
            assert stored.name == name
            assert (stored.kind, stored.data.dtype, stored.shape) == (kind, dtype, shape), name
            assert stored.block == block
            found = None if stored.scale is None else tuple(stored.scale.shape)
            assert found == grid, name
            if kind == "fp4":
                assert tuple(stored.data.shape) == (64, 20)
        assert "embed.weight" in checkpoint
        assert "embed.scale" not in checkpoint


def test_read_tensors_are_memory_of_their_own(served):
    with opened(served) as checkpoint:
        first = checkpoint.read("layers.0.attn.wq_a.weight")
        kept = bytes_of(first.data)
        first.data.view(torch.uint8).zero_()
        first.scale.zero_()
        second = checkpoint.read("layers.0.attn.wq_a.weight")
    assert bytes_of(second.data) == kept


def test_names_are_those_of_the_text_model_in_its_order(served):
    config = ModelConfig.from_folder(served)
    with opened(served) as checkpoint:
        assert checkpoint.names() == list(expected_tensors(config))


def test_vision_tensors_are_checked_but_not_listed(tmp_path):
    values = small_config() | {"vision_config": dict(VISION)}
    out = synthesize(tmp_path / "out", config=values)
    with opened(out) as checkpoint:
        assert not [name for name in checkpoint.names() if name.startswith("vision")]
        assert checkpoint.read("vision.norm.weight").shape == (24,)
    tensors = read_tensors(out)
    del tensors["aligner.w2.bias"]
    config = json.loads((out / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"aligner\.w2\.bias: missing"):
        opened(write_folder(tmp_path / "damaged", config, tensors))
    del config["vision_config"]
    with pytest.raises(CheckpointError, match=r"vision\.norm\.weight: unexpected.*vision_config"):
        opened(write_folder(tmp_path / "blind", config, tensors))
    with opened(tmp_path / "blind", ignore_unexpected=True) as checkpoint:
        assert "vision.norm.weight" not in checkpoint


@pytest.mark.parametrize("single", [False, True], ids=["index", "single file"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_prefix_and_index_are_optional(
    tmp_path, served, served_config, served_tensors, prefix, single
):
    tensors = {prefix + name: each for name, each in served_tensors.items()}
    folder = write_folder(tmp_path / "out", served_config, tensors, single=single)
    assert everything(folder) == everything(served)


def test_prefix_may_differ_from_tensor_to_tensor(tmp_path, served, served_config, served_tensors):
    tensors = {
        ("model." if at % 3 else "") + name: each
        for at, (name, each) in enumerate(served_tensors.items())
    }
    assert everything(write_folder(tmp_path, served_config, tensors)) == everything(served)


@pytest.mark.parametrize("suffix", [".weight_scale", ".weight_scale_inv"])
def test_scale_may_be_spelt_as_other_tools_do(
    tmp_path, served, served_config, served_tensors, suffix
):
    tensors = {
        (name.removesuffix(".scale") + suffix if name.endswith(".scale") else name): each
        for name, each in served_tensors.items()
    }
    assert everything(write_folder(tmp_path, served_config, tensors)) == everything(served)


def test_scale_bytes_and_expert_bytes_may_be_declared_as_u8(
    tmp_path, served, served_config, served_tensors
):
    tensors = {
        name: ("U8" if dtype in ("I8", "F8_E8M0") else dtype, shape, data)
        for name, (dtype, shape, data) in served_tensors.items()
    }
    assert everything(write_folder(tmp_path, served_config, tensors)) == everything(served)


def test_float_scales_multiply(tmp_path, served, served_config, served_tensors):
    tensors = dict(served_tensors)
    for name, (dtype, shape, data) in served_tensors.items():
        if dtype == "F8_E8M0":
            factors = torch.tensor([2.0 ** (code - 127) for code in data], dtype=torch.float32)
            tensors[name] = ("F32", shape, bytes_of(factors))
    folder = write_folder(tmp_path, served_config, tensors)
    with opened(folder) as found, opened(served) as wanted:
        for name in found.names():
            stored = found.read(name)
            assert stored.scale is None or stored.scale.dtype == torch.float32
            assert torch.equal(dequantize(stored), dequantize(wanted.read(name))), name


def test_experts_may_be_stored_as_fp8(tmp_path, served_config, served_tensors):
    config = json.loads(json.dumps(served_config))
    config["quantization_config"]["expert_dtype"] = "fp8"
    tensors = dict(served_tensors)
    for name, (dtype, shape, _) in served_tensors.items():
        if dtype == "I8":
            rows, half = shape
            tensors[name] = ("F8_E4M3", [rows, 2 * half], bytes([0x38]) * (rows * 2 * half))
            grid = [-(-rows // 32), -(-2 * half // 32)]
            tensors[name.removesuffix("weight") + "scale"] = (
                "F8_E8M0", grid, bytes([128]) * (grid[0] * grid[1]),
            )  # fmt: skip
    with opened(write_folder(tmp_path, config, tensors)) as checkpoint:
        stored = checkpoint.read("layers.3.ffn.experts.1.w2.weight")
        assert (stored.kind, stored.block) == ("fp8", (32, 32))
        assert torch.equal(dequantize(stored), torch.full((64, 40), 2.0))


def test_copies_of_the_draft_embedding_are_skipped_silently(
    tmp_path, served, served_config, served_tensors
):
    copies = {
        f"mtp.{stage}.{part}.weight": served_tensors[f"{part}.weight"]
        for stage in (0, 1)
        for part in ("embed", "head")
    }
    folder = write_folder(tmp_path, served_config, served_tensors | copies)
    assert everything(folder) == everything(served)


def test_unknown_tensors_are_left_out_when_asked(tmp_path, served, served_config, served_tensors):
    extra = served_tensors | {"layers.0.attn.mystery.weight": ("I64", [1], bytes(8))}
    folder = write_folder(tmp_path, served_config, extra)
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.mystery\.weight: unexpected"):
        opened(folder)
    assert everything(folder, ignore_unexpected=True) == everything(served)


def test_files_may_be_links_as_in_the_hub_cache(tmp_path, served):
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in served.iterdir():
        blob = tmp_path / "blobs" / path.name.upper()
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    assert everything(snapshot) == everything(served)


def test_files_that_the_index_does_not_name_are_not_opened(tmp_path, served_config, served_tensors):
    folder = write_folder(tmp_path, served_config, served_tensors)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"junk")
    (folder / "model.safetensors").write_bytes(b"junk")
    opened(folder).close()


def test_tensors_need_no_alignment(tmp_path, served, served_config, served_tensors):
    order = sorted(served_tensors.items(), key=lambda item: (len(item[1][2]) % 2, item[0]))
    odd = {"a.mystery": ("U8", [3], b"abc")} | dict(order)
    folder = write_folder(tmp_path, served_config, {})
    write_shard(folder / "model-1.safetensors", odd)
    weight_map = dict.fromkeys(odd, "model-1.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert everything(folder, ignore_unexpected=True) == everything(served, ignore_unexpected=True)
    with opened(folder, ignore_unexpected=True) as checkpoint:
        sink = checkpoint.map("layers.0.attn.attn_sink")
        assert torch.equal(sink.data, checkpoint.read("layers.0.attn.attn_sink").data)


@pytest.mark.parametrize("kind", ["served", "plain"])
def test_mapped_tables_give_the_same_rows(tmp_path, served, kind):
    folder = served
    if kind == "plain":
        folder = synthesize(tmp_path / "plain", config=small_config(), format="plain")
    name = "layers.1.engram.embed.weight"
    with opened(folder) as checkpoint:
        table, read = checkpoint.map(name), checkpoint.read(name)
    # the mapping outlives the checkpoint
    assert torch.equal(dequantize(table), dequantize(read))
    rows = torch.tensor([5, 67, 0, 5, 12])
    part = table.rows(rows)
    assert part.shape == (5, 48)
    assert torch.equal(dequantize(part), dequantize(read)[rows])
    assert torch.equal(dequantize(part), dequantize(read.rows(rows)))
    assert table.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 48)
    for wrong in ([68], [-1]):
        with pytest.raises(IndexError, match="table of 68"):
            table.rows(torch.tensor(wrong))


def test_tables_are_read_when_small_and_mapped_when_not(served):
    name = "layers.1.engram.embed.weight"
    num_bytes = 68 * (48 + 2)
    with opened(served) as checkpoint:
        assert not isinstance(checkpoint.table(name), MappedTensor)
        assert not isinstance(checkpoint.table(name, keep_bytes=num_bytes), MappedTensor)
        assert isinstance(checkpoint.table(name, keep_bytes=num_bytes - 1), MappedTensor)


def test_nan_in_a_mapped_table_is_refused_by_row(tmp_path, served_config, served_tensors):
    name = "layers.1.engram.embed.weight"
    for part, code in ((name, 0xFF), (name.removesuffix("weight") + "scale", 255)):
        dtype, shape, data = served_tensors[part]
        damaged = bytearray(data)
        damaged[7 * shape[1] + 1] = code
        tensors = served_tensors | {part: (dtype, shape, bytes(damaged))}
        with opened(write_folder(tmp_path, served_config, tensors)) as checkpoint:
            table = checkpoint.map(name)
            table.rows(torch.tensor([6, 8]))
            with pytest.raises(CheckpointError, match=r"layers\.1\.engram\.embed.*row 7 holds NaN"):
                table.rows(torch.tensor([6, 8, 7]))


def test_closed_checkpoint_says_so(served):
    checkpoint = opened(served)
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.read("embed.weight")
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.map("layers.0.engram.embed.weight")


def test_file_shortened_while_open_is_an_error_and_no_crash(
    tmp_path, served_config, served_tensors
):
    folder = write_folder(tmp_path, served_config, served_tensors)
    checkpoint = opened(folder)
    table = checkpoint.map("layers.0.engram.embed.weight")
    path = next(folder.glob("*.safetensors"))
    os.truncate(path, path.stat().st_size // 100)
    with pytest.raises(CheckpointError, match="embed.weight: .*shortened"):
        checkpoint.read("embed.weight")
    with pytest.raises(CheckpointError, match=r"engram\.embed\.weight: .*shortened"):
        table.rows(torch.tensor([50]))


SHORTENED = """
import os, sys
from pathlib import Path
import numpy
from deepinfer.checkpoint import Checkpoint, reader
from deepinfer.config import ModelConfig

folder, path = Path(sys.argv[1]), Path(sys.argv[2])
config = ModelConfig.from_folder(folder)
empty, find_bad_scale = numpy.empty, reader.find_bad_scale

def shorten_and_make(shape, dtype=float):
    os.truncate(path, 5000)
    return empty(shape, dtype)

def shorten_and_look(scale):
    os.truncate(path, 5000)
    return find_bad_scale(scale)

if sys.argv[3] == "opened":
    reader.find_bad_scale = shorten_and_look
checkpoint = Checkpoint.open(folder, config)
numpy.empty = shorten_and_make  # after the check of the size, and before the bytes are taken
checkpoint.read("head.weight")
"""


@pytest.mark.parametrize("when", ["read", "opened"])
def test_file_shortened_while_it_is_read_is_an_error_and_no_crash(
    tmp_path, served_config, served_tensors, when
):
    """The values were copied from the mapping: the process died of SIGBUS, without a message."""
    folder = write_folder(tmp_path, served_config, served_tensors)
    (path,) = folder.glob("*.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", SHORTENED, str(folder), str(path), when],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "CheckpointError" in done.stderr
    assert "shortened while it was open" in done.stderr


def test_a_read_that_comes_in_parts_is_completed(served, monkeypatch):
    """A system may hand out less than was asked for; Linux never gives more than 2 GB at once."""
    want = everything(served)
    preadv = os.preadv
    monkeypatch.setattr(
        os,
        "preadv",
        lambda file, into, at: preadv(file, [into[0][: max(1, len(into[0]) // 2)]], at),
    )
    assert everything(served) == want


def test_opening_is_logged_in_one_line(served, caplog):
    with caplog.at_level(logging.INFO, logger="deepinfer.checkpoint"):
        opened(served).close()
    assert len(caplog.records) == 1


def test_files_are_released(served):
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    if before is None:
        pytest.skip("no /proc on this system")
    for _ in range(3):
        with opened(served) as checkpoint:
            checkpoint.map("layers.0.engram.embed.weight")
    assert len(os.listdir("/proc/self/fd")) <= before
