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
    with pytest.raises(ConfigError, match="engram_token_map"):
        deepinfer.load_model(CASES["c08"].folder)


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
        ({"device": "nowhere"}, BackendError, "device 'nowhere'"),
    ],
)
def test_unknown_options_name_the_known_ones(
    options: dict, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        deepinfer.load_model(CASES["c01"].folder, **options)


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token_ids": [[]]}, "empty"),
        ({"token_ids": [[1], [256]]}, "sequence 1 has token id 256"),
        ({"token_ids": [[-1]]}, "token id -1"),
        ({"token_ids": [[1] * 1025]}, "context is 1024"),
        ({"token_ids": [[1, 2]], "image_mask": [[True]]}, "1 flags"),
        ({"token_ids": [[1, 2]], "image_mask": [None, None]}, "2 image masks"),
        ({"token_ids": [[1, 2]], "image_embeds": [torch.zeros(1, 64)]}, "need .0, 64"),
        ({"token_ids": [[1, 2]], "replay_keep": 4}, "no layer of ratio 1"),
        ({"token_ids": [[1, 2]], "chunk_size": 0}, "chunk_size=0"),
        ({"token_ids": [1, 2]}, "list of sequences"),
        ({"token_ids": ["12"]}, "list of sequences"),
        ({"token_ids": [[1.5]]}, "integers"),
        ({"token_ids": [[True]]}, "integers"),
    ],
)
def test_requests_that_cannot_be_computed(options: dict, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        CASES["c01"].load().full_logits(**options)


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
