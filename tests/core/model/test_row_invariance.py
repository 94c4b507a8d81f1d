"""The same answer every time: a row's bits do not depend on chunks, company or threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.core.model.golden import GoldenCase, all_cases, case_runner

CASES = all_cases()
CHUNKS = [1, 3, 5, 6, 7, 9, 16, 17, 64]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Leave the number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("numerics", ["exact", "served"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_are_bit_identical_for_every_chunk_and_company(
    case: GoldenCase, numerics: str
) -> None:
    """Alone and whole against: each chunk size, mixed with other lengths and phases, with one
    thread and with two.
    """
    model = case.load(numerics=numerics)  # type: ignore[arg-type]
    torch.set_num_threads(1)
    want = case_runner(case, model, [0]).run([len(case.ids(0))])[0]
    for number, chunk in enumerate(CHUNKS):
        torch.set_num_threads(1 + number % 2)
        runner = case_runner(case, model, [0, 0, 0])
        runner.tokens[1] = runner.tokens[1][:31][::-1]
        runner.tokens[2] = runner.tokens[2][:5]
        runner.masks[1] = runner.masks[2] = runner.embeds[1] = runner.embeds[2] = None
        got = runner.run([chunk, 4, 1])[0]
        assert torch.equal(got, want), f"chunks of {chunk} on {1 + number % 2} threads"


@pytest.mark.parametrize(
    "case", [c for c in CASES if "0.draft.anchors" in c.values], ids=lambda case: case.name
)
def test_draft_blocks_are_bit_identical_whatever_the_prompts_chunks(case: GoldenCase) -> None:
    drafts = []
    for chunk in (64, 7, 1):
        runner = case_runner(case, case.load(), [0])
        while runner.done[0] < 50:
            runner.step([min(chunk, 50 - runner.done[0])])
        drafts.append(runner.draft(0, 7))
    for other in drafts[1:]:
        assert all(torch.equal(other[name], drafts[0][name]) for name in drafts[0])


def test_a_row_of_several_equals_a_row_alone() -> None:
    """Verification: six rows of a sequence in one step give the bits of six steps of one row."""
    case = next(c for c in CASES if c.name == "c08")
    one, six = (case_runner(case, case.load(), [0]) for _ in range(2))
    for runner in (one, six):
        runner.step([100])
    singles = torch.cat([one.step([1])[0] for _ in range(6)])
    assert torch.equal(six.step([6])[0], singles)
