"""Damaged checkpoints: each fault is found when the folder is opened, and named.

The last tests flip bytes at random: whatever comes of it, it is refused by name or every value is
right. None may crash, hang or load wrongly. One long file, because it is one corpus: a fault is
looked for here.
"""

import json
import os
import random
import re
import shutil
import struct

import pytest
from tests.core.checkpoint.small import (
    INDEX,
    SHARD,
    read_shard,
    write_folder,
    write_index,
    write_raw,
    write_shard,
)
from tests.core.checkpoint.test_reader import bytes_of, everything, opened

from deepinfer.checkpoint import Checkpoint, verify_checkpoint
from deepinfer.checkpoint.container import Shard
from deepinfer.config import ModelConfig
from deepinfer.errors import CheckpointError, ConfigError

LINEAR = "layers.1.attn.wq_b.weight"
SCALE = "layers.1.attn.wq_b.scale"
EXPERT = "layers.2.ffn.experts.1.w3.weight"


def problems(folder, **options) -> list[str]:
    """One line per fault that opening the folder reports; `verify_checkpoint` reports the same."""
    with pytest.raises(CheckpointError) as caught:
        opened(folder, **options)
    assert str(caught.value).isascii()
    report = verify_checkpoint(folder, **options)
    assert report.problems[: len(caught.value.problems)] == tuple(caught.value.problems)
    assert report.verdict.startswith("damaged: ")
    return caught.value.problems


@pytest.fixture
def damage(tmp_path, served_config, served_tensors):
    """Write the small checkpoint with changed tensors (None removes one) and report its faults."""

    def write(changes: dict, *, config=None, single=False) -> list[str]:
        tensors = {**served_tensors, **changes}
        tensors = {name: each for name, each in tensors.items() if each is not None}
        folder = write_folder(tmp_path / "damaged", config or served_config, tensors, single=single)
        return problems(folder)

    return write


@pytest.mark.parametrize("single", [False, True], ids=["index", "single file"])
@pytest.mark.parametrize(
    "name",
    [
        *("embed.weight", "head.weight", "norm.weight", LINEAR, SCALE, EXPERT),
        *("layers.2.ffn.experts.1.w3.scale", "layers.0.hc_ffn_fn", "layers.4.attn.attn_sink"),
        *("layers.1.attn.compressor.wgate.weight", "layers.2.attn.indexer.k_norm.weight"),
        *("layers.0.engram.embed.weight", "layers.0.engram.embed.scale", "mtp.0.main_proj.scale"),
        *("mtp.1.confidence_head.proj.weight", "layers.3.ffn.gate.bias_vl"),
    ],
)
def test_missing_tensor_is_named(damage, name, single):
    assert damage({name: None}, single=single) == [f"tensor {name}: missing"]


@pytest.mark.parametrize(
    "name",
    [
        *("layers.5.attn_norm.weight", "layers.0.ffn.experts.3.w1.weight", "lm_head.weight"),
        *("layers.2.attn.compressor.wgate.weight", "layers.3.attn.indexer.wq_b.weight"),
        *("mtp.0.markov_head.embed.weight", "mtp.x.embed.weight", "mtp.0.lm.head.weight"),
        *("hc_head_fn", "layers.0.attn.wq_a.bias", "embed.scale", "layers.0.attn_sink"),
        "layers.0.attn.\u3042\x1b[2J",
    ],
)
def test_unexpected_tensor_is_named(damage, name):
    (line,) = damage({name: ("BF16", [2], bytes(4))})
    assert "unexpected" in line
    assert name in line or ascii(name) in line


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layers.0.hc_attn_norm.weight", "folded into hc_*_fn"),
        ("mtp.1.hc_ffn_norm.weight", "folded into hc_*_fn"),
        ("hc_head_norm.weight", "folded into hc_*_fn"),
        ("hc_head_base", "hc_shifted=false"),
        ("layers.0.ffn.experts.0.w1.weight_scale_2", "NVFP4"),
        ("layers.0.ffn.experts.0.w1.input_scale", "NVFP4"),
        ("layers.0.attn.wq_a.weight_offset", "W8A8"),
        ("layers.0.self_attn.q_a_proj.weight", "another format"),
        ("vision.norm.weight", "no vision_config"),
    ],
)
def test_foreign_tensor_is_refused_with_the_reason(damage, name, said):
    (line,) = damage({name: ("F32", [1], bytes(4))})
    assert name in line
    assert said in line


def test_separate_norm_is_refused_even_when_extras_are_ignored(
    tmp_path, served_config, served_tensors
):
    extra = {"layers.0.hc_attn_norm.weight": ("F32", [256], bytes(1024))}
    folder = write_folder(tmp_path, served_config, served_tensors | extra)
    (line,) = problems(folder, ignore_unexpected=True)
    assert "layers.0.hc_attn_norm.weight" in line


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "said"),
    [
        (LINEAR, "F8_E4M3", [64, 64], "shape [64, 64], expected [128, 32]"),
        (LINEAR, "F8_E4M3", [32, 128], "shape [32, 128], expected [128, 32]"),
        (LINEAR, "F8_E4M3", [128, 32, 1], "expected [128, 32]"),
        (LINEAR, "BF16", [128, 32], "dtype BF16, expected F8_E4M3"),
        (LINEAR, "F8_E5M2", [128, 32], "dtype F8_E5M2, expected F8_E4M3"),
        (LINEAR, "I8", [128, 32], "dtype I8, expected F8_E4M3"),
        (SCALE, "F8_E8M0", [1, 1], "expected [4, 1] (one scale per 32x32 of [128, 32])"),
        (SCALE, "F8_E8M0", [128, 1], "expected [4, 1]"),
        (SCALE, "BF16", [4, 1], "dtype BF16, expected F8_E8M0 or U8 or F32"),
        (SCALE, "F8_E4M3", [4, 1], "dtype F8_E4M3, expected"),
        (EXPERT, "F8_E4M3", [40, 64], "dtype F8_E4M3, expected I8 or U8"),
        (EXPERT, "I8", [40, 64], "shape [40, 64], expected [40, 32]"),
        ("layers.4.attn.attn_sink", "BF16", [4], "dtype BF16, expected F32"),
        ("layers.4.attn.attn_sink", "F32", [5], "shape [5], expected [4]"),
        ("layers.0.hc_attn_fn", "BF16", [24, 256], "dtype BF16, expected F32"),
        ("norm.weight", "F32", [64], "dtype F32, expected BF16"),
        ("norm.weight", "F16", [64], "dtype F16, expected BF16"),
        ("layers.0.engram.embed.weight", "F8_E4M3", [53, 48], "expected [52, 48]"),
        ("layers.0.engram.embed.scale", "F8_E8M0", [2, 2], "(one scale per 1x32 of [52, 48])"),
    ],
)
def test_misshaped_and_wrongly_typed_tensors_are_named(damage, name, dtype, shape, said):
    size = {"F32": 4, "BF16": 2, "F16": 2}.get(dtype, 1)
    for edge in shape:
        size *= edge
    (line,) = damage({name: (dtype, shape, bytes(size))})
    assert line.startswith(f"tensor {name}: found ")
    assert said in line


def test_scales_of_another_block_size_are_refused(damage, served_config, served_tensors):
    """The reverse, a config of other blocks than the files, is a `ConfigError`."""
    changes = {}
    for name, (dtype, shape, _) in served_tensors.items():
        if dtype == "F8_E4M3" and "engram.embed" not in name:
            grid = [-(-shape[0] // 128), -(-shape[1] // 128)]
            scale = name.removesuffix("weight") + "scale"
            changes[scale] = ("F8_E8M0", grid, bytes(grid[0] * grid[1]))
    differing = [name for name in changes if changes[name][1] != served_tensors[name][1]]
    lines = damage(changes)
    assert len(lines) == len(differing) > 40
    for name in differing:
        assert any(line.startswith(f"tensor {name}: found shape") for line in lines)
    served_config = json.loads(json.dumps(served_config))
    served_config["quantization_config"]["weight_block_size"] = [128, 128]
    with pytest.raises(ConfigError, match="weight_block_size"):
        damage({}, config=served_config)


def test_quantised_files_under_a_plain_config_are_refused(damage, served_config):
    config = {key: value for key, value in served_config.items() if key != "quantization_config"}
    lines = damage({}, config=config)
    assert any(f"{LINEAR}: found dtype F8_E4M3, expected F32 or BF16" in line for line in lines)
    assert any(f"{SCALE}: unexpected; a scale, but the config has no" in line for line in lines)


def test_two_scales_of_one_tensor_are_refused(damage, served_tensors):
    (line,) = damage({"layers.1.attn.wq_b.weight_scale": served_tensors[SCALE]})
    assert line.startswith(f"tensor {LINEAR}: has several scales")


@pytest.mark.parametrize("name", [LINEAR, SCALE, "norm.weight"])
def test_name_with_and_without_prefix_is_refused(damage, served_tensors, name):
    (line,) = damage({f"model.{name}": served_tensors[name]})
    assert line == f"tensor {name}: both with and without `model.`"


def test_all_faults_are_reported_together(tmp_path, served_config, served_tensors):
    tensors = dict(served_tensors)
    del tensors["layers.0.attn.q_norm.weight"], tensors[SCALE]
    tensors["layers.9.extra"] = ("F32", [1], bytes(4))
    tensors["norm.weight"] = ("F32", [64], bytes(256))
    tensors["head.weight"] = ("BF16", [64, 300], bytes(64 * 600))
    folder = write_folder(tmp_path, served_config, tensors)
    weight_map = dict.fromkeys(tensors, SHARD)
    weight_map |= {"layers.0.attn_norm.weight": "gone.safetensors", "ghost": SHARD}
    del weight_map["layers.0.ffn_norm.weight"]
    write_index(folder, weight_map)
    lines = problems(folder)
    for named in (
        "tensor layers.0.attn.q_norm.weight: missing",
        f"tensor {SCALE}: missing",
        "tensor layers.9.extra: unexpected",
        "tensor norm.weight: found dtype",
        "tensor head.weight: found shape",
        "file gone.safetensors: cannot be read",
        f"tensor ghost: the index places it in file {SHARD}, which does not hold it",
        f"tensor layers.0.ffn_norm.weight: in file {SHARD}, but not in the index",
    ):
        assert [line for line in lines if line.startswith(named)], named
    assert len(lines) == 8


def test_tensors_of_a_truncated_file_are_named(tmp_path, served_config, served_tensors):
    """One line for the file: a published shard has thousands of tensors."""
    folder = write_folder(tmp_path, served_config, served_tensors)
    path = folder / SHARD
    last = list(served_tensors)[-1]
    os.truncate(path, path.stat().st_size - 1)
    (line,) = problems(folder)
    assert line == (
        f"file {SHARD}: truncated: 1 bytes are missing at its end, and with them all or part of "
        f"1 of {len(served_tensors)} tensors: {last}; fetch the file again"
    )
    os.truncate(path, path.stat().st_size // 2)
    (line,) = problems(folder)
    found = re.search(r"part of (\d+) of \d+ tensors: (\S+), \S+, \S+, \S+ and (\d+) more;", line)
    assert found is not None
    assert int(found[1]) == int(found[3]) + 4 > 100
    assert found[2] in served_tensors


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 5000])
def test_file_cut_within_its_header_is_named(tmp_path, served_config, served_tensors, size):
    folder = write_folder(tmp_path, served_config, served_tensors)
    os.truncate(folder / SHARD, size)
    (line,) = problems(folder)
    assert line.startswith(f"file {SHARD}: ")
    assert f"the index places {len(served_tensors)} tensors in it" in line


def _pipe(path):
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("replace", "said"),
    [
        (lambda path: None, "cannot be read"),
        (lambda path: path.mkdir(), "cannot be read"),
        (lambda path: path.symlink_to("/nowhere"), "cannot be read"),
        (lambda path: path.symlink_to("/dev/zero"), "regular file"),
        (_pipe, "regular file"),
    ],
    ids=["absent", "folder", "dangling link", "device", "pipe"],
)
def test_what_is_no_file_is_refused_and_does_not_hang(
    tmp_path, served_config, served_tensors, replace, said
):
    folder = write_folder(tmp_path, served_config, served_tensors)
    for path in (folder / SHARD, folder / INDEX):
        path.unlink()
        replace(path)
        (line,) = problems(folder)
        assert path.name in line
        # without an index it is the single file that is looked for
        is_gone = path.name == INDEX and not path.is_symlink() and not path.exists()
        assert (said in line) != is_gone
        if path.is_dir():
            path.rmdir()
        elif path.exists() or path.is_symlink():
            path.unlink()
        write_folder(folder, served_config, served_tensors)


@pytest.mark.parametrize(
    "place",
    [
        *("../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", ""),
        *("..\\outside.safetensors", "C:x.safetensors", "x.bin", ".hidden.safetensors"),
        *("a\0b.safetensors", "a\nb.safetensors", "x" * 300 + ".safetensors"),
        *(None, 3, ["x.safetensors"], {"file": "x"}, True),
    ],
    ids=str,
)
def test_index_cannot_leave_the_folder(tmp_path, served_config, served_tensors, place):
    folder = write_folder(tmp_path / "inner", served_config, served_tensors)
    shutil.copy(folder / SHARD, tmp_path / "outside.safetensors")
    write_index(folder, dict.fromkeys(served_tensors, SHARD) | {LINEAR: place})
    lines = problems(folder)
    assert len(lines) == 1
    assert lines[0].startswith(f"file {INDEX}, tensor {LINEAR}: file name ")
    assert "inside the folder" in lines[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "no usable JSON"),
        (b"{", "no usable JSON"),
        (b"\x80", "UTF-8"),
        (b"[]", "weight_map"),
        (b"null", "weight_map"),
        (b"{}", "weight_map"),
        (b'{"weight_map": []}', "weight_map"),
        (b'{"weight_map": {}}', "weight_map"),
        (b'{"weight_map": "x"}', "weight_map"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "appears twice"),
        (b"[" * 200_000, "brackets"),
        (b'{"a":' * 40_000 + b" " * 2_000_000, "too deeply"),
    ],
)
def test_index_that_is_none_is_refused(tmp_path, served_config, served_tensors, text, said):
    folder = write_folder(tmp_path, served_config, served_tensors)
    (folder / INDEX).write_bytes(text)
    (line,) = problems(folder)
    assert line.startswith(f"file {INDEX}: ")
    assert said in line


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (None, "no model.safetensors.index.json and no model.safetensors"),
        ("quant_model_description.json", "W8A8"),
        ("pytorch_model.bin", "pickled weights"),
    ],
)
def test_folder_without_safetensors_says_what_it_holds(tmp_path, served_config, file, said):
    (tmp_path / "config.json").write_text(json.dumps(served_config))
    if file:
        (tmp_path / file).write_bytes(b"x")
    (line,) = problems(tmp_path)
    assert said in line


def test_absent_folder_is_named(tmp_path, served_config):
    config = ModelConfig.from_dict(served_config)
    with pytest.raises(CheckpointError, match="absent: no such folder"):
        Checkpoint.open(tmp_path / "absent", config)


def test_same_tensor_in_two_files_is_refused(tmp_path, served_config, served_tensors):
    folder = write_folder(tmp_path, served_config, served_tensors)
    write_shard(folder / "b.safetensors", {"norm.weight": served_tensors["norm.weight"]})
    other = {"head.weight": served_tensors["head.weight"]}
    write_shard(folder / "c.safetensors", other)
    rest = {name: each for name, each in served_tensors.items() if name != "head.weight"}
    write_shard(folder / SHARD, rest)
    weight_map = dict.fromkeys(rest, SHARD) | {"head.weight": "c.safetensors"}
    write_index(folder, weight_map | {"norm.weight": "b.safetensors"})
    (line,) = problems(folder)
    assert "tensor norm.weight: both in file" in line
    write_index(folder, weight_map | {"norm.weight": "c.safetensors"})
    (line,) = problems(folder)
    assert f"in file c.safetensors, which does not hold it, it is in {SHARD}" in line


GOOD = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}


def entry(**changes: object) -> dict:
    return {"norm.weight": GOOD | changes}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (entry(dtype="F33"), "unknown dtype 'F33'"),
        (entry(dtype=7), "unknown dtype 7"),
        (entry(dtype=["F32"]), "unknown dtype"),
        (entry(shape=[-16]), "shape"),
        (entry(shape=[True, 16]), "shape"),
        (entry(shape=[16.0]), "shape"),
        (entry(shape="16"), "shape"),
        (entry(shape=[1] * 20 + [16]), "shape"),
        (entry(shape=[2**62, 2**62, 2**62]), "needs"),
        (entry(shape=[17]), "needs 68 bytes, data_offsets give 64"),
        (entry(data_offsets=[0]), "data_offsets"),
        (entry(data_offsets=[0, 64, 128]), "data_offsets"),
        (entry(data_offsets=[-64, 0]), "data_offsets"),
        (entry(data_offsets=[64, 0]), "data_offsets give -64"),
        (entry(data_offsets=[False, 64]), "data_offsets"),
        (entry(data_offsets=[0, 2**64]), "data_offsets"),
        (entry(extra=1), "is not {dtype, shape, data_offsets}"),
        ({"norm.weight": []}, "is not {dtype, shape, data_offsets}"),
        ({"norm.weight": {"dtype": "F32"}}, "is not {dtype, shape, data_offsets}"),
    ],
)
def test_unsound_header_entries_are_named(tmp_path, plain_config, header, said):
    write_folder(tmp_path, plain_config, {}, single=True)
    write_raw(tmp_path / "model.safetensors", json.dumps(header).encode(), bytes(64))
    lines = [line for line in problems(tmp_path) if "model.safetensors" in line]
    assert len(lines) == 1
    assert lines[0].startswith("file model.safetensors, tensor norm.weight: ")
    assert said in lines[0]


@pytest.mark.parametrize("begin", [64, 2**40])
def test_offsets_beyond_the_end_are_named(tmp_path, plain_config, begin):
    write_folder(tmp_path, plain_config, {}, single=True)
    header = json.dumps(entry(data_offsets=[begin, begin + 64])).encode()
    write_raw(tmp_path / "model.safetensors", header, bytes(64))
    (line,) = [line for line in problems(tmp_path) if "model.safetensors" in line]
    assert f"truncated: {begin} bytes are missing" in line
    assert "norm.weight" in line


def pair(first: list[int], second: list[int]) -> bytes:
    header = {"a": GOOD | {"data_offsets": first}, "b": GOOD | {"data_offsets": second}}
    return json.dumps(header).encode()


@pytest.mark.parametrize(
    ("header", "payload", "said"),
    [
        (b"", 64, "header length 0"),
        (b"x", 64, "no valid JSON"),
        (b"[]", 64, "no JSON object"),
        (b"null", 64, "no JSON object"),
        (b'{"__metadata__": 3}', 0, "__metadata__"),
        (b"\xff", 64, "UTF-8"),
        (b'{"a": 1, "a": 1}', 64, "key a appears twice"),
        (b"[" * 50_000, 64, "brackets"),
        (b'{"a":' * 10_000 + b" " * 100_000, 64, "too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", 64, "digits"),
        (b"{}", 64, "64 bytes behind the last tensor"),
        (pair([0, 64], [32, 96]), 96, "overlaps tensor a"),
        (pair([0, 64], [0, 64]), 64, "overlaps tensor a"),
        (pair([0, 64], [72, 136]), 136, "8 bytes before it belong to no tensor"),
        (pair([8, 72], [72, 136]), 136, "8 bytes before it belong to no tensor"),
        (pair([0, 64], [64, 128]), 130, "2 bytes behind the last tensor"),
    ],
)
def test_unsound_headers_are_named(tmp_path, plain_config, header, payload, said):
    write_folder(tmp_path, plain_config, {}, single=True)
    write_raw(tmp_path / "model.safetensors", header, bytes(payload))
    lines = [line for line in problems(tmp_path) if "model.safetensors" in line]
    assert lines[0].startswith("file model.safetensors")
    assert said in lines[0]


@pytest.mark.parametrize("length", [0, 2**63, 2**64 - 1, 10**9, -1])
def test_header_length_is_checked_before_use(tmp_path, plain_config, plain_tensors, length):
    folder = write_folder(tmp_path, plain_config, plain_tensors, single=True)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    if length == -1:  # one more than there is
        length = len(data) - 7
    path.write_bytes(length.to_bytes(8, "little") + data[8:])
    assert f"header length {length} is not in" in problems(folder)[0]


def test_header_shifted_by_its_padding_does_not_pass(tmp_path, plain_config, plain_tensors):
    """A shorter header over trailing spaces is valid JSON, but every value would move."""
    folder = write_folder(tmp_path, plain_config, plain_tensors, single=True)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, payload = data[8 : 8 + length], data[8 + length :]
    write_raw(path, header + b"   ", payload)
    opened(folder).close()
    path.write_bytes((length + 1).to_bytes(8, "little") + header + b"   " + payload)
    assert "behind the last tensor belong to no tensor" in problems(folder)[0]


def test_nan_scales_are_all_named_before_anything_is_read(damage, served_tensors):
    changes = {}
    for name in (SCALE, "layers.4.ffn.experts.0.w2.scale", "mtp.1.attn.wo_b.scale"):
        dtype, shape, data = served_tensors[name]
        changes[name] = (dtype, shape, data[:-1] + b"\xff")
    lines = damage(changes)
    assert len(lines) == 3
    for name in changes:
        weight = name.removesuffix("scale") + "weight"
        assert any(line.startswith(f"tensor {weight}: its scale holds code 255") for line in lines)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -1.0])
def test_float_scales_that_are_no_factors_are_named(damage, factor):
    (line,) = damage({SCALE: ("F32", [4, 1], struct.pack("<4f", 1, 1, factor, 1))})
    assert line.startswith(f"tensor {LINEAR}: its scale")


@pytest.mark.parametrize(
    ("name", "at", "code"),
    [
        (LINEAR, 77, b"\x7f"),
        (LINEAR, 4095, b"\xff"),
        ("norm.weight", 20, b"\xc0\x7f"),
        ("layers.1.hc_attn_fn", 400, b"\x01\x00\x80\x7f"),
        ("layers.4.attn.attn_sink", 12, b"\x00\x00\xc0\xff"),
    ],
)
def test_nan_values_are_refused_by_name_when_read(
    tmp_path, served_config, served_tensors, name, at, code
):
    dtype, shape, data = served_tensors[name]
    damaged = data[:at] + code + data[at + len(code) :]
    folder = write_folder(tmp_path, served_config, served_tensors | {name: (dtype, shape, damaged)})
    with opened(folder) as checkpoint, pytest.raises(CheckpointError, match=f"{name}: holds NaN"):
        checkpoint.read(name)


def test_nan_scale_is_refused_when_read_if_it_was_not_before(
    tmp_path, served_config, served_tensors
):
    dtype, shape, data = served_tensors[SCALE]
    tensors = served_tensors | {SCALE: (dtype, shape, b"\xff" + data[1:])}
    folder = write_folder(tmp_path, served_config, tensors)
    with (
        opened(folder, check_scales=False) as checkpoint,
        pytest.raises(CheckpointError, match=f"{LINEAR}: its scale holds code 255"),
    ):
        checkpoint.read(LINEAR)


def test_infinities_are_left_to_those_who_train_with_them(tmp_path, served_config, served_tensors):
    name = "layers.0.ffn.gate.bias"
    data = served_tensors[name][2]
    changed = ("F32", [3], b"\x00\x00\x80\xff" + data[4:])
    folder = write_folder(tmp_path, served_config, served_tensors | {name: changed})
    with opened(folder) as checkpoint:
        assert checkpoint.read(name).data[0] == float("-inf")


def test_very_many_faults_are_cut_short(tmp_path, served_config):
    config = json.loads(json.dumps(served_config))
    config["text_config"]["n_routed_experts"] = 500
    folder = write_folder(tmp_path, config, {"x": ("F32", [1], bytes(4))})
    lines = problems(folder)
    assert len(lines) == 1001
    assert lines[-1].startswith("and ")


# bytes at random


def outcome(folder, wanted: dict) -> str:
    """``refused`` by name, or ``loaded`` with every value right; anything else fails the test.

    `verify_checkpoint` must say the same. It alone looks at the total that an index states and at
    the tokenizer.
    """
    came_of_it = _outcome(folder, wanted)
    problems = verify_checkpoint(folder, full=True).problems
    others = [line for line in problems if "total_size" not in line and "tokenizer" not in line]
    assert bool(others) == (came_of_it == "refused")
    return came_of_it


def _outcome(folder, wanted: dict) -> str:
    try:
        config = ModelConfig.from_folder(folder)
        with Checkpoint.open(folder, config) as checkpoint:
            names = checkpoint.names()
            assert names == list(wanted)
            for name in names:
                stored = checkpoint.read(name)
                scale = None if stored.scale is None else bytes_of(stored.scale)
                assert (bytes_of(stored.data), scale) == wanted[name], name
    except (CheckpointError, ConfigError) as err:
        message = str(err)
        assert "config.json" in message or "file " in message or "tensor " in message
        assert message.isascii()
        return "refused"
    return "loaded"


def flip(data: bytes, places: range, generator: random.Random, count: int) -> bytes:
    changed = bytearray(data)
    for _ in range(count):
        at = places[generator.randrange(len(places))]
        kind = generator.randrange(3)
        if kind == 0:
            changed[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            changed[at] = generator.randrange(256)
        else:  # a byte of the same alphabet goes further than noise does
            changed[at] = data[places[generator.randrange(len(places))]]
    return bytes(changed)


def rounds(path, places, folder, wanted, *, seed: int, number: int) -> dict[str, int]:
    """Flip one to three bytes of a file again and again; count what came of it."""
    generator = random.Random(seed)
    original = path.read_bytes()
    counts = {"refused": 0, "loaded": 0}
    for _ in range(number):
        path.write_bytes(flip(original, places, generator, generator.choice((1, 1, 2, 3))))
        counts[outcome(folder, wanted)] += 1
    path.write_bytes(original)
    assert outcome(folder, wanted) == "loaded"
    return counts


@pytest.mark.parametrize("seed", range(4))
def test_random_flips_in_a_header(tmp_path, plain, plain_config, plain_tensors, seed):
    folder = write_folder(tmp_path, plain_config, plain_tensors, single=True)
    path = folder / "model.safetensors"
    length = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    counts = rounds(path, range(length), folder, everything(plain), seed=seed, number=3000)
    assert counts["refused"] > 2500


def test_random_flips_in_the_length_of_a_header(tmp_path, plain, plain_config, plain_tensors):
    folder = write_folder(tmp_path, plain_config, plain_tensors, single=True)
    path = folder / "model.safetensors"
    counts = rounds(path, range(8), folder, everything(plain), seed=1, number=300)
    assert counts["refused"] > 250


@pytest.mark.parametrize("seed", range(2))
def test_random_flips_in_an_index(tmp_path, plain, seed):
    folder = shutil.copytree(plain, tmp_path / "copy")
    path = folder / INDEX
    places = range(path.stat().st_size)
    counts = rounds(path, places, folder, everything(plain), seed=seed, number=1500)
    assert counts["refused"] > 1000


@pytest.mark.parametrize("seed", range(2))
def test_random_flips_in_a_config(tmp_path, plain, seed):
    """A number that is still a number cannot be told from the right one; the files still can."""
    folder = shutil.copytree(plain, tmp_path / "copy")
    path = folder / "config.json"
    places = range(path.stat().st_size)
    counts = rounds(path, places, folder, everything(plain), seed=seed, number=1500)
    assert counts["refused"] > 700


def test_random_flips_in_headers_of_quantised_files(tmp_path, served):
    folder = shutil.copytree(served, tmp_path / "copy")
    wanted = everything(served)
    for at, path in enumerate(sorted(folder.glob("*.safetensors"))):
        length = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        rounds(path, range(length), folder, wanted, seed=at, number=100)


def test_random_truncation(tmp_path, plain, plain_config, plain_tensors):
    folder = write_folder(tmp_path, plain_config, plain_tensors, single=True)
    path = folder / "model.safetensors"
    original, generator = path.read_bytes(), random.Random(5)
    wanted = everything(plain)
    for _ in range(100):
        path.write_bytes(original[: generator.randrange(len(original))])
        assert outcome(folder, wanted) == "refused"
    for extra in (1, 8, 4096):
        path.write_bytes(original + bytes(extra))
        assert outcome(folder, wanted) == "refused"


def test_name_changed_into_another_one_is_a_repeated_key(plain_tensors, tmp_path):
    """Names are all that tells equal shapes apart; the last of two would win unseen."""
    path = tmp_path / "x.safetensors"
    write_shard(path, plain_tensors)
    assert read_shard(path) == plain_tensors
    data = path.read_bytes()
    first, second = (f"layers.0.ffn.experts.0.{part}.weight".encode() for part in ("w1", "w3"))
    assert data.count(first) == data.count(second) == 1
    path.write_bytes(data.replace(first, second))
    assert "appears twice" in Shard(path).problems[0]
