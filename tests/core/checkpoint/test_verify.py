"""`verify_checkpoint`: sound folders pass, and what only it looks at is found.

The corpus of damage in `test_damaged.py` goes through it as well.
"""

import json
import shutil
import struct

import pytest
from tests.core.checkpoint.small import (
    INDEX,
    SHARD,
    read_shard,
    small_config,
    write_folder,
    write_index,
    write_shard,
)

from deepinfer.checkpoint import scan, synthesize, verify_checkpoint
from deepinfer.checkpoint.mapped_file import MappedFile
from deepinfer.errors import CheckpointError

TABLE = "layers.0.engram.embed"


@pytest.fixture
def copied(tmp_path, served):
    return shutil.copytree(served, tmp_path / "copy")


def rewrite(folder, name, change):
    """Change the stored bytes of one tensor in whichever file holds it."""
    for path in folder.glob("*.safetensors"):
        tensors = read_shard(path)
        if name in tensors:
            dtype, shape, data = tensors[name]
            write_shard(path, tensors | {name: (dtype, shape, change(data))})
            return
    raise AssertionError(name)


def put(at, code):
    return lambda data: data[:at] + code + data[at + len(code) :]


@pytest.mark.parametrize("full", [False, True])
def test_a_sound_folder_is_sound(served, full):
    report = verify_checkpoint(served, full=full)
    assert report.is_sound
    assert report.problems == report.notes == ()
    assert report.num_files == len(list(served.glob("*.safetensors")))
    assert report.num_bytes == sum(f.stat().st_size for f in served.glob("*.safetensors"))
    assert report.num_tensors == len(json.loads((served / INDEX).read_text())["weight_map"])
    assert report.verdict.startswith(f"sound: {served}: {report.num_tensors} tensors in ")
    assert "\n" not in report.verdict


def test_full_reads_every_byte_and_tells_its_progress(served, monkeypatch):
    monkeypatch.setattr(scan, "PIECE_BYTES", 1024)
    steps = []
    report = verify_checkpoint(
        served, full=True, on_progress=lambda done, total: steps.append((done, total))
    )
    stated = json.loads((served / INDEX).read_text())["metadata"]["total_size"]
    assert report.num_bytes_read == stated
    assert steps[-1] == (stated, stated)
    assert steps == sorted(steps)
    assert len(steps) > 100
    assert verify_checkpoint(served).num_bytes_read == 0


@pytest.mark.parametrize(
    ("name", "at", "code", "where"),
    [
        ("layers.1.attn.wq_b.weight", 77, b"\x7f", "[2, 13]"),
        ("norm.weight", 20, b"\xc0\x7f", "[10]"),
        ("layers.1.hc_attn_fn", 4000, b"\x01\x00\x80\x7f", "[3, 232]"),
        (f"{TABLE}.weight", 48 * 40 + 5, b"\xff", "[40, 5]"),
        ("mtp.1.markov_head.head.weight", 2 * 8 * 299, b"\xff\xff", "[299, 0]"),
    ],
)
@pytest.mark.parametrize("piece", [64, 2**24])
def test_nan_in_values_is_found_by_full_alone_and_named(
    copied, monkeypatch, piece, name, at, code, where
):
    monkeypatch.setattr(scan, "PIECE_BYTES", piece)
    rewrite(copied, name, put(at, code))
    assert verify_checkpoint(copied).is_sound
    (line,) = verify_checkpoint(copied, full=True).problems
    assert line == f"tensor {name}: holds NaN at {where}; the file is damaged"


def test_nan_in_a_scale_of_a_table_is_found_by_full(copied):
    rewrite(copied, f"{TABLE}.scale", put(2 * 51 + 1, b"\xff"))
    assert verify_checkpoint(copied).is_sound
    (line,) = verify_checkpoint(copied, full=True).problems
    assert line == f"tensor {TABLE}.weight: its scale holds NaN at [51, 1]; the file is damaged"


def test_float_scales_of_a_table_that_are_no_factors_are_found_by_full(
    tmp_path, served, served_config, served_tensors
):
    scale = struct.pack("<104f", *[1.0] * 103, -1.0)
    tensors = served_tensors | {f"{TABLE}.scale": ("F32", [52, 2], scale)}
    folder = write_folder(tmp_path, served_config, tensors)
    shutil.copy(served / "tokenizer.json", folder)
    (line,) = verify_checkpoint(folder, full=True).problems
    assert line.startswith(f"tensor {TABLE}.weight: its scale reaches from -1 to 1")


def test_every_fault_of_values_is_told(copied):
    for name in ("norm.weight", "embed.weight", "layers.4.attn.wkv.weight"):
        rewrite(copied, name, put(0, b"\xff\xff"))
    report = verify_checkpoint(copied, full=True)
    assert len(report.problems) == 3
    assert report.verdict.startswith(f"damaged: {copied}: 3 problems (")


def test_bytes_that_cannot_be_read_are_named_and_the_rest_is_read(copied, monkeypatch):
    """As on a disk with bad sectors."""
    rewrite(copied, "layers.4.attn.wkv.weight", put(0, b"\xff"))
    intact = MappedFile.copy

    def copy(self, begin, end):
        if end - begin == 300 * 64 * 2 and "head.weight" in read_shard(self.path):
            raise OSError(5, "Input/output error")
        return intact(self, begin, end)

    monkeypatch.setattr(MappedFile, "copy", copy)
    *unread, damaged = sorted(verify_checkpoint(copied, full=True).problems)
    assert "tensor head.weight: cannot be read (Input/output error)" in unread
    assert damaged.startswith("tensor layers.4.attn.wkv.weight: holds NaN at [0, 0]")


def test_a_total_that_is_not_that_of_the_files_is_found(copied):
    """Index and files of two versions, in which no name and no shape differs."""
    values = json.loads((copied / INDEX).read_text())
    values["metadata"]["total_size"] += 32
    (copied / INDEX).write_text(json.dumps(values))
    (line,) = verify_checkpoint(copied).problems
    assert line.startswith(f"file {INDEX}: total_size is ")
    assert "different versions" in line


@pytest.mark.parametrize("total", [None, "x", 1.5, True, []])
def test_a_total_that_is_no_number_states_nothing(copied, total):
    values = json.loads((copied / INDEX).read_text())
    values["metadata"]["total_size"] = total
    (copied / INDEX).write_text(json.dumps(values))
    assert verify_checkpoint(copied).is_sound


def test_a_file_that_no_index_names_is_a_note(copied):
    shutil.copy(
        copied / sorted(p.name for p in copied.glob("*.safetensors"))[0], copied / "x.safetensors"
    )
    report = verify_checkpoint(copied)
    assert report.is_sound
    assert report.notes == ("file x.safetensors: not named by the index, never read",)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "file tokenizer.json: missing; this model's Engram lookups"),
        (lambda path: path.write_text("{"), "file tokenizer.json: no valid tokenizer"),
        (lambda path: path.write_bytes(b"\xff"), "file tokenizer.json: cannot be read"),
    ],
    ids=["missing", "no JSON", "no UTF-8"],
)
def test_a_tokenizer_that_is_none_is_found(copied, damage, said):
    damage(copied / "tokenizer.json")
    (line,) = verify_checkpoint(copied).problems
    assert line.startswith(said)


def test_a_tokenizer_of_another_model_is_found(copied):
    values = json.loads((copied / "config.json").read_text())
    values["text_config"]["engram_compressed_vocab_size"] -= 1
    (copied / "config.json").write_text(json.dumps(values))
    (line,) = verify_checkpoint(copied).problems
    assert "is not this model's tokenizer" in line


def test_a_model_without_engram_may_do_without_a_tokenizer(tmp_path, plain):
    folder = shutil.copytree(plain, tmp_path / "copy")
    (folder / "tokenizer.json").unlink()
    assert verify_checkpoint(folder, full=True).is_sound


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "config.json: cannot be read (No such file or directory)"),
        ({"model_type": "deepseek_v3"}, "DeepSeek-V3 or R1"),
        ({"model_type": "deepseek_v4"}, "that is DeepSeek-V4,"),
    ],
    ids=["absent", "V3 or R1", "V4"],
)
def test_a_config_that_is_not_ours_is_the_one_problem(copied, config, said):
    (copied / "config.json").unlink()
    if config is not None:
        (copied / "config.json").write_text(json.dumps(config))
    report = verify_checkpoint(copied)
    (line,) = report.problems
    assert said in line
    assert report.num_tensors is None
    assert report.num_files > 0


def test_full_says_that_it_did_not_read_values_under_wrong_headers(copied):
    (copied / INDEX).write_text("{}")
    report = verify_checkpoint(copied, full=True)
    assert report.num_bytes_read == 0
    assert "values were not read: mend the faults first, then ask again" in report.notes


def test_an_absent_folder_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        verify_checkpoint(tmp_path / "absent")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("layers.1", "layers.10"),
        ("layers.1.ffn.experts.1", "layers.1.ffn.experts.11"),
        ("layers.1.attn.wkv", "layers.1.attn.compressor.wkv"),
    ],
)
def test_a_name_that_contains_anothers_name_is_no_trouble(tmp_path, first, second):
    """Layer 1 and layer 10 and so on: each name stands for itself."""
    config = small_config(
        num_hidden_layers=12, compress_ratios=[0, *[2] * 11], n_routed_experts=12,
        kv_source_layer_ids=[1], index_source_layer_ids=[1], candidate_source_layer_id=None,
        engram_layer_ids=[], num_nextn_predict_layers=0,
    )  # fmt: skip
    folder = synthesize(tmp_path / "m", config=config)
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    assert any(name.startswith(first + ".") for name in names)
    assert any(name.startswith(second + ".") for name in names)
    assert verify_checkpoint(folder, full=True).is_sound


def test_unexpected_tensors_are_accepted_on_request_and_read_all_the_same(
    tmp_path, plain_config, plain_tensors
):
    extra = {"extra.of.half.floats": ("F16", [3], bytes(6))}
    folder = write_folder(tmp_path, plain_config, plain_tensors | extra)
    (line,) = verify_checkpoint(folder).problems
    assert "extra.of.half.floats: unexpected" in line
    report = verify_checkpoint(folder, full=True, ignore_unexpected=True)
    assert report.is_sound
    assert report.num_bytes_read == sum(
        len(data) for _, _, data in (plain_tensors | extra).values()
    )


def test_the_dictionary_has_every_field(served):
    report = verify_checkpoint(served)
    values = report.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["is_sound"] is True
    assert values["verdict"] == report.verdict


def test_index_of_another_folder_is_found(copied):
    names = json.loads((copied / INDEX).read_text())["weight_map"]
    write_index(copied, dict.fromkeys(names, SHARD))
    assert not verify_checkpoint(copied).is_sound
