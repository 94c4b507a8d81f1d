"""What a forward reads of its caches: only rows that this sequence wrote. Everything else is
poisoned with NaN.
"""

from __future__ import annotations

import pytest
import torch
from tests.core.model.golden import GoldenCase, Runner, all_cases, case_runner

from deepinfer.cache.pools import CachePools

CASE = next(c for c in all_cases() if c.name == "c08")
formats = pytest.mark.parametrize("kv_format", ["v41", "bf16", "none"])


def poison(cache: CachePools) -> None:
    """NaN in every row but those of the null slot and the null block."""
    ring, state = cache.layout.ring_rows, cache.layout.state_rows
    for pool in cache.window:
        _spoil(pool.data[ring:])
    for layer, pool in cache.entries.items():
        _spoil(pool.data[cache.layout.entries_per_block(layer) :])
    for layer, pool in cache.index_keys.items():
        _spoil(pool.data[cache.layout.entries_per_block(layer) :])
    for rows in cache.states.values():
        _spoil(rows[state:])


def _spoil(rows: torch.Tensor) -> None:
    rows.fill_(255 if rows.dtype == torch.uint8 else float("nan"))


def null_rows(cache: CachePools) -> torch.Tensor:
    ring = cache.layout.ring_rows
    parts = [pool.data[:ring].float().flatten() for pool in cache.window]
    parts += [
        p.data[: cache.layout.entries_per_block(n)].float().flatten()
        for n, p in cache.entries.items()
    ]
    parts += [
        p.data[: cache.layout.entries_per_block(n)].float().flatten()
        for n, p in cache.index_keys.items()
    ]
    return torch.cat(parts)


@formats
@pytest.mark.parametrize("chunk_size", [1, 3, 50])
def test_unwritten_rows_are_never_read(kv_format: str, chunk_size: int) -> None:
    clean, spoilt = (case_runner(CASE, CASE.load(kv_format=kv_format), [0]) for _ in range(2))
    poison(spoilt.cache)
    want, got = clean.run([chunk_size])[0], spoilt.run([chunk_size])[0]
    assert not torch.isnan(got).any()
    assert torch.equal(got, want)
    assert not null_rows(spoilt.cache).any(), "a null row was written"


@formats
def test_a_slot_and_blocks_can_be_used_again(kv_format: str) -> None:
    """A sequence in the place of a longer one that has gone gives the bits of fresh caches."""
    model = CASE.load(kv_format=kv_format)
    fresh, used = case_runner(CASE, model, [0]), case_runner(CASE, model, [0])
    used.run([50])
    prompt = CASE.ids(0)[::-1][:77]
    for runner in (fresh, used):
        runner.tokens[0], runner.done[0] = list(prompt), 0
    assert torch.equal(used.run([20])[0], fresh.run([20])[0])


@formats
@pytest.mark.parametrize("num_rejected", [1, 2, 4, 5])
def test_rejected_rows_leave_no_trace(kv_format: str, num_rejected: int) -> None:
    """Rows behind the accepted ones are simply overwritten: windows, entries, index keys and open
    pairs.

    At every second position a wrong continuation is run first and taken back.
    """
    model, ids = CASE.load(kv_format=kv_format), CASE.ids(0)[:60]
    plain, speculated = Runner(model, [ids]), Runner(model, [ids])
    wrong = [5, 9, 200, 77, 31, 8]
    for at in range(len(ids)):
        if at % 2:
            speculated.tokens[0] = [*ids[: at + 1], *wrong[:num_rejected]]
            speculated.step([1 + num_rejected])
            speculated.done[0], speculated.tokens[0] = at, list(ids)
        assert torch.equal(speculated.step([1])[0], plain.step([1])[0]), f"position {at}"


def test_draft_blocks_write_nothing() -> None:
    runner = case_runner(CASE, CASE.load(), [0])
    runner.run([64])
    before = [pool.data.clone() for pool in runner.cache.window]
    runner.draft(0, 7)
    assert all(
        torch.equal(pool.data, old) for pool, old in zip(runner.cache.window, before, strict=True)
    )


def test_sequences_do_not_see_each_other() -> None:
    """A sequence gives the same logits, within rounding, whoever shares the forward with it."""
    case: GoldenCase = CASE
    model, ids = case.load(kv_format="none"), case.ids(0)
    alone = model.full_logits([ids])[0]
    for other in ([1], ids[::-1], list(range(200))):
        together = model.full_logits([other, ids, other])[1]
        assert (together - alone).abs().max() / alone.std() < 1e-4
