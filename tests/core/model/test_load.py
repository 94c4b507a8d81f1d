"""`load_model`: what it accepts, and what it says when it cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.core.model.golden import GoldenCase, all_cases, assert_quantized

import deepinfer
from deepinfer.checkpoint import synthesize
from deepinfer.errors import BackendError, CheckpointError, ConfigError, RequestError
from deepinfer.kernels.reference import ReferenceKernels
from deepinfer.kernels.registry import API_VERSION, Backend, Probe
from deepinfer.model import load

CASES = {case.name: case for case in all_cases()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize(tmp_path_factory.mktemp("models") / "tiny", config="tiny")


def test_a_synthesised_model_with_every_feature_runs_from_text(tiny: Path) -> None:
    model = deepinfer.load_model(tiny)
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("The lighthouse keeper saw a ship.")
    logits = model.full_logits([ids, ids[:5]])
    assert [tuple(x.shape) for x in logits] == [(len(ids), 512), (5, 512)]
    assert all(x.dtype == torch.float32 and torch.isfinite(x).all() for x in logits)
    assert 0.1 < logits[0].std() < 30


@pytest.mark.parametrize("numerics", ["exact", "served"])
@pytest.mark.parametrize("kv_format", ["v41", "bf16", "none"])
def test_every_numerics_and_format(tiny: Path, numerics: str, kv_format: str) -> None:
    """They differ from plain float32 by rounding: visibly, and not wildly."""
    ids = list(range(3, 200))
    plain = deepinfer.load_model(tiny, kv_format="none").full_logits([ids])[0]
    model = deepinfer.load_model(tiny, numerics=numerics, kv_format=kv_format)  # type: ignore[arg-type]
    got = model.full_logits([ids])[0]
    difference = float((got - plain).square().mean().sqrt() / plain.std())
    if (numerics, kv_format) == ("exact", "none"):
        assert difference == 0
    else:
        assert 1e-4 < difference < 1.0


def test_the_map_of_token_ids_as_a_list_an_array_or_a_tensor() -> None:
    case, maps = CASES["c08"], CASES["c08"].values["engram_token_map"]
    models = [
        deepinfer.load_model(case.folder, engram_token_map=given)
        for given in (maps, maps.tolist(), maps.numpy())
    ]
    want, *others = (model.full_logits([case.ids(0)])[0] for model in models)
    assert all(torch.equal(other, want) for other in others)


def test_engram_without_tokenizer_or_map_is_refused() -> None:
    with pytest.raises(ConfigError, match="add the model's own .in Python, engram_token_map"):
        deepinfer.load_model(CASES["c08"].folder)


@pytest.mark.parametrize("given", [["a"], [1.5], [[1], [2, 3]], 3.5, {"a": 1}], ids=str)
def test_a_map_that_holds_no_integers_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="engram_token_map is .*as integers"):
        deepinfer.load_model(CASES["c08"].folder, engram_token_map=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["short", "renumbered", "too few"])
def test_a_map_that_does_not_fit_is_refused(change: str) -> None:
    maps = CASES["c08"].values["engram_token_map"].clone()
    bad = {"short": maps[:-1], "renumbered": maps + 1, "too few": maps.clamp(max=100)}[change]
    with pytest.raises(ConfigError, match="map"):
        deepinfer.load_model(CASES["c08"].folder, engram_token_map=bad)


def test_a_folder_without_tokenizer_works_on_token_ids() -> None:
    model = deepinfer.load_model(CASES["c01"].folder)
    assert model.tokenizer is None
    assert model.full_logits([[5]])[0].shape == (1, 256)


def test_kernels_may_be_an_object_of_ones_own() -> None:
    case: GoldenCase = CASES["c01"]

    class Counting(ReferenceKernels):
        calls = 0

        def rms_norm(self, x_td, norm):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            Counting.calls += 1
            return super().rms_norm(x_td, norm)

    model = deepinfer.load_model(case.folder, kernels=Counting(kv_format="v41"))
    assert_quantized(model.full_logits([case.ids(0)])[0], case.values["0.logits"])
    assert Counting.calls > 0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"numerics": "fp8"}, ConfigError, "numerics='fp8'.*exact, served"),
        ({"kv_format": "fp8"}, ConfigError, "kv_format='fp8'.*v41, bf16, none"),
        ({"kernels": "cdu"}, BackendError, "'cdu' is not installed"),
        ({"device": "nowhere"}, BackendError, "device 'nowhere' is of a kind .*known: cpu, cuda"),
        ({"device": "mps"}, BackendError, "device 'mps' is of a kind"),
        ({"device": "meta"}, BackendError, "device 'meta' is of a kind"),
        ({"device": "xla:0"}, BackendError, "device 'xla:0' is of a kind"),
        ({"device": "cpu:x"}, BackendError, "torch knows no such device"),
        ({"device": ""}, BackendError, "device '' is of a kind"),
        ({"device": None}, BackendError, "device=None is no device"),
        ({"device": 0}, BackendError, "device=0 is no device"),
        ({"kernels": 3}, BackendError, "kernels=3 is neither"),
        ({"kernels": None}, BackendError, "kernels=None is neither"),
        ({"numerics": None}, ConfigError, "numerics=None"),
    ],
)
def test_unknown_options_name_the_known_ones(
    options: dict, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        deepinfer.load_model(CASES["c01"].folder, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_device_type_that_only_an_installed_backend_serves_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list of types is that of the backends, not a fixed one."""
    backend = Backend("own", API_VERSION, "mps", lambda: Probe(False, ""), None)  # type: ignore[arg-type]
    monkeypatch.setattr(load, "installed_backends", lambda: {"broken": None, "own": None})
    monkeypatch.setattr(load, "load_backend", {"own": backend}.__getitem__)
    with pytest.raises(BackendError, match=r"device 'mps' cannot be used here \(Could not run"):
        deepinfer.load_model(CASES["c01"].folder, device="mps")


@pytest.mark.parametrize("path", [None, 3, b"folder", ["folder"]], ids=str)
def test_a_path_that_is_none(path: object) -> None:
    with pytest.raises(ConfigError, match="allowed: the folder of a checkpoint or a hub id"):
        deepinfer.load_model(path)  # type: ignore[arg-type]


def test_every_missing_tensor_is_named_before_anything_is_computed(tmp_path: Path) -> None:
    folder = tmp_path / "c01"
    shutil.copytree(CASES["c01"].folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"num_hidden_layers": 5, "compress_ratios": [0] * 5}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        deepinfer.load_model(folder)
    text = str(caught.value)
    for name in ("attn_norm.weight", "attn.wq_a.weight", "ffn.experts.7.w2.weight", "hc_ffn_scale"):
        assert f"layers.4.{name}" in text


EMBEDS = {"token_ids": [[1, 2]], "image_mask": [True, False]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token_ids": [[]]}, "empty"),
        ({"token_ids": [[1], [256]]}, "sequence 1 has token id 256"),
        ({"token_ids": [[-1]]}, "token id -1"),
        ({"token_ids": [[1] * 1025]}, "context is 1024"),
        ({"token_ids": [[1, 2]], "image_mask": [[True]]}, "1 flags"),
        ({"token_ids": [[1, 2]], "image_mask": [None, None]}, "image_mask has 2 items for 1 seq"),
        ({"token_ids": [[1, 2], [3]], "image_mask": [True, False]}, "image mask is True; give"),
        ({"token_ids": [[1, 2]], "image_mask": [1, 0]}, "has 1, flags are True or False"),
        ({"token_ids": [[1, 2]], "image_mask": torch.tensor([[1, 0]])}, "has 1, flags are"),
        ({"token_ids": [[1, 2]], "image_mask": [[True, None]]}, "has None, flags are"),
        ({"token_ids": [[1, 2]], "image_mask": ["yes", "no"]}, "has 'yes', flags are"),
        ({"token_ids": [[1, 2]], "image_mask": "yes"}, "image_mask is 'yes'; give one for each"),
        ({"token_ids": [[1, 2]], "image_mask": torch.ones(1, 1, 2).bool()}, "flags are True"),
        ({"token_ids": [[1, 2]], "image_embeds": 3}, "image_embeds is 3; give one for each"),
        (EMBEDS | {"image_embeds": [[["a"] * 64]]}, "allowed: numbers of shape .1, 64"),
        (EMBEDS | {"image_embeds": [[[1] * 64]]}, "found torch.int64, allowed: floating-point"),
        (
            EMBEDS | {"image_embeds": [torch.zeros(1, 64, dtype=torch.cfloat)]},
            "found torch.complex",
        ),
        (EMBEDS | {"image_embeds": torch.full((1, 64), torch.nan)}, "not finite"),
        (EMBEDS | {"image_embeds": torch.ones(1, 64).double() * 1e300}, "not finite"),
        (EMBEDS | {"image_embeds": [[0.5] * 63]}, "found shape .1, 63"),
        ({"token_ids": [[1, 2]], "image_embeds": [torch.zeros(1, 64)]}, "need .0, 64"),
        ({"token_ids": [[1, 2]], "replay_keep": 4}, "no layer of ratio 1"),
        ({"token_ids": [[1, 2]], "replay_keep": 0}, "replay_keep=0"),
        ({"token_ids": [[1, 2]], "replay_keep": True}, "replay_keep=True is no number of tokens"),
        ({"token_ids": [[1, 2]], "replay_keep": 1.0}, "replay_keep=1.0 is no number"),
        ({"token_ids": [[1, 2]], "chunk_size": "8"}, "chunk_size='8' is no number of tokens"),
        ({"token_ids": [[1, 2]], "chunk_size": 2.5}, "chunk_size=2.5"),
        ({"token_ids": [[1, 2]], "chunk_size": False}, "chunk_size=False"),
        ({"token_ids": [[1, 2]], "chunk_size": 0}, "chunk_size=0"),
        ({"token_ids": 5}, "token_ids is 5; give a list of sequences"),
        ({"token_ids": [1, 2]}, "sequence 0 is 1; give a list of token ids"),
        ({"token_ids": ["12"]}, "sequence 0 is '12'; give a list of token ids"),
        ({"token_ids": [[1, None]]}, "has None, token ids are integers"),
        ({"token_ids": torch.tensor([[1.0, 2.0]])}, "has 1.0, token ids are integers"),
        ({"token_ids": [[1.5]]}, "integers"),
        ({"token_ids": [[True]]}, "integers"),
    ],
)
def test_requests_that_cannot_be_computed(options: dict, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        CASES["c01"].load().full_logits(**options)


def test_masks_and_embeddings_of_one_sequence_may_be_given_bare() -> None:
    """A 2-d mask, and a flat list of flags, used to end in a TypeError."""
    model = CASES["c01"].load()
    flags = [False, True, False, True]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 64, generator=generator)
    want = model.full_logits([[5, 6, 7, 8]], image_mask=[flags], image_embeds=[rows])[0]
    assert not torch.equal(want, model.full_logits([[5, 6, 7, 8]])[0])
    mask = torch.tensor(flags)
    for image_mask in (flags, [flags], mask, mask[None], [mask], mask.numpy(), list(mask)):
        for image_embeds in (
            rows,
            [rows],
            rows[None],
            rows.tolist(),
            [rows.tolist()],
            rows.numpy(),
        ):
            got = model.full_logits(
                [[5, 6, 7, 8]], image_mask=image_mask, image_embeds=image_embeds
            )
            assert torch.equal(got[0], want)


def test_no_sequences_no_logits() -> None:
    assert CASES["c01"].load().full_logits([]) == []


def test_engram_in_the_decoder_with_chunks_that_lie_before_the_replayed_part(
    tmp_path: Path,
) -> None:
    """A chunk wholly before the cut leaves the decoder's Engram layer without rows."""
    config = json.loads((CASES["c08"].folder / "config.json").read_text())
    config["text_config"]["engram_layer_ids"] = [1, 5]
    folder = synthesize(tmp_path / "model", config=config, format="plain")
    model = deepinfer.load_model(folder)
    ids = [list(range(3, 43))]
    whole = model.full_logits(ids, replay_keep=10)[0]
    assert (model.full_logits(ids, replay_keep=10, chunk_size=8)[0] - whole).abs().max() < 1e-3
