"""What a scripted model prefers: compiled scripts, and pseudo-random logits for everything else.

Shape letters: R = rows that need logits, V = vocabulary, T = rows of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from deepinfer.config.fields import is_integer, shown
from deepinfer.errors import ConfigError
from deepinfer.testing.scripted.records import (
    EMPTY,
    OFFSET,
    SCRIPT,
    Ints,
    hash_steps,
    mixed,
)

__all__ = ["Fault", "Preference", "Scripts", "apply_preference", "checked_ids", "random_logits"]

Logits = npt.NDArray[np.float32]
Prompt = tuple[int, ...]

TOP = 10.0
"""Logit of the token preferred most; the next ones have 9, 8, ..."""
_DEPTH = 8.0
"""Pseudo-random logits lie in [-8, 0)."""


class Fault(Enum):
    """A row of logits that no model should give."""

    NAN = "nan"
    """Every logit is NaN."""
    INF = "inf"
    """One logit is +inf."""


Preference = int | Sequence[int] | Fault
"""What one output position prefers: a token, tokens in order of preference, or a fault."""
_Compiled = tuple[int, ...] | Fault


def random_logits(hash_r: Ints, vocab_size: int) -> Logits:
    """Pseudo-random logits of some contexts, (R, V) in [-8, 0); those of a row all differ.

    Integer arithmetic, exact in float32: the same bits for the same context, whatever else runs.
    """
    # each round maps 0 .. 2^24 - 1 onto itself, so different tokens get different values
    x_rv = np.empty((len(hash_r), vocab_size), dtype=np.uint32)
    x_rv[:] = np.arange(vocab_size, dtype=np.uint32)
    scratch_rv = np.empty_like(x_rv)
    for number, factor in enumerate((0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)):
        x_rv += mixed(hash_r + number).astype(np.uint32)[:, None]
        x_rv *= np.uint32(factor)
        x_rv &= np.uint32(0xFFFFFF)
        np.right_shift(x_rv, np.uint32(11), out=scratch_rv)
        x_rv ^= scratch_rv
    logits_rv = x_rv.astype(np.float32)
    logits_rv *= np.float32(_DEPTH / 2**24)
    logits_rv -= np.float32(_DEPTH)
    return logits_rv


def apply_preference(logits_v: Logits, preference: _Compiled) -> None:
    """Write one preference into a row of logits (in place)."""
    if preference is Fault.NAN:
        logits_v[:] = np.nan
    elif preference is Fault.INF:
        logits_v[0] = np.inf
    else:
        for rank, token in enumerate(preference):
            logits_v[token] = TOP - rank


def compiled(preference: object, vocab_size: int, where: str) -> _Compiled:
    """A preference as a tuple of ids, or the fault that it is.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(preference, Fault):
        return preference
    ids = checked_ids((preference,) if is_integer(preference) else preference, vocab_size, where)
    if len(ids) > TOP or len(set(ids)) < len(ids):
        raise ConfigError(
            f"{where}: found {shown(ids)}, allowed: 1 to {TOP:.0f} different tokens, the one "
            f"preferred most first"
        )
    return ids


def checked_ids(given: object, vocab_size: int, where: str) -> Prompt:
    """Token ids of the vocabulary, at least one.

    Raises:
        ConfigError: something else was given.
    """
    ids = [*given] if isinstance(given, Sequence) and not isinstance(given, str | bytes) else []
    if not ids or not all(is_integer(i) and 0 <= i < vocab_size for i in ids):
        raise ConfigError(
            f"{where}: found {shown(given)}, allowed: token ids in 0..{vocab_size - 1}"
        )
    return tuple(ids)


class Scripts:
    """Scripts by prompt, compiled for whole steps at a time.

    Args:
        scripts: preferences per output position, for each prompt.
        ends_with: token preferred behind the end of a script; None: pseudo-random ones.
        marked: a prompt to recognise even if it has no script.

    Raises:
        ConfigError: a token outside the vocabulary, or a script whose own output spells out the
            prompt of another one.
    """

    def __init__(
        self,
        scripts: Mapping[Prompt, Sequence[Preference]],
        *,
        vocab_size: int,
        ends_with: int | None,
        image_token_id: int | None,
        marked: Prompt | None = None,
    ) -> None:
        self._ends_with = ends_with
        lists = {
            checked_ids(prompt, vocab_size, f"prompt of script {number}"): [
                compiled(item, vocab_size, f"script {number}, output {at}")
                for at, item in enumerate(script)
            ]
            for number, (prompt, script) in enumerate(scripts.items())
        }
        _refuse_ambiguous(lists, ends_with)
        self._num_real = len(lists)
        if marked is not None:
            lists.setdefault(marked, [])
        prompts = list(lists)
        self.marked = prompts.index(marked) if marked is not None else None
        """Number of the script that the marked prompt has."""
        hashes = np.array([_context(p, image_token_id) for p in prompts], dtype=np.int64)
        self._order = np.argsort(hashes)
        self._hashes = hashes[self._order]
        self._preferences = [item for script in lists.values() for item in script]
        self._length = np.array([len(script) for script in lists.values()], dtype=np.int64)
        self._begin = np.array([0, *accumulate(self._length.tolist())], dtype=np.int64)
        self._only = np.array(  # the token of outputs that prefer a single one, else -1
            [p[0] if not isinstance(p, Fault) and len(p) == 1 else -1 for p in self._preferences],
            dtype=np.int64,
        )

    def follow(
        self, hash_t: Ints, sequence_t: Ints, first_s: Ints, base_fs: Ints
    ) -> tuple[Ints, Ints]:
        """Script of every row and output position in it, int64 (T,) each; script -1: none.

        A row that completes the prompt of a script is at its output 0; each further row of the
        sequence is one further on. A longer prompt takes over from a shorter one.

        Args:
            first_s: first row of each sequence.
            base_fs: records of the positions before.
        """
        row_t = np.arange(len(hash_t), dtype=np.int64)
        if not len(self._hashes):
            return np.full_like(row_t, -1), np.zeros_like(row_t)
        at_t = np.searchsorted(self._hashes, hash_t).clip(max=len(self._hashes) - 1)
        is_prompt_t = self._hashes[at_t] == hash_t
        latest_t = np.maximum.accumulate(np.where(is_prompt_t, row_t, -1))
        first_t = first_s[sequence_t]
        is_here_t = latest_t >= first_t  # in this step and in this sequence
        script_t = np.where(is_here_t, self._order[at_t[latest_t]], base_fs[SCRIPT][sequence_t])
        before_t = base_fs[OFFSET][sequence_t] + 1 + row_t - first_t
        return script_t, np.where(is_here_t, row_t - latest_t, before_t)

    def apply(self, logits_rv: Logits, script_r: Ints, offset_r: Ints) -> None:
        """Write the preferences of scripted rows into their logits (in place)."""
        row_r = np.flatnonzero((script_r >= 0) & (script_r < self._num_real))
        script_r, offset_r = script_r[row_r], offset_r[row_r]
        is_over_r = offset_r >= self._length[script_r]
        if self._ends_with is not None:
            logits_rv[row_r[is_over_r], self._ends_with] = TOP
        row_r = row_r[~is_over_r]
        at_r = (self._begin[script_r] + offset_r)[~is_over_r]
        only_r = self._only[at_r]
        logits_rv[row_r[only_r >= 0], only_r[only_r >= 0]] = TOP
        for row, at in zip(row_r[only_r < 0], at_r[only_r < 0], strict=True):
            apply_preference(logits_rv[row], self._preferences[at])


def _context(prompt: Prompt, image_token_id: int | None) -> int:
    """Context hash behind a prompt."""
    token_t = np.array(prompt, dtype=np.int64)
    is_image_t = token_t == (-1 if image_token_id is None else image_token_id)
    steps_t = hash_steps(token_t, np.arange(len(prompt), dtype=np.int64), is_image_t)
    return int(np.array([EMPTY, *steps_t], dtype=np.int64).sum())


def _refuse_ambiguous(lists: Mapping[Prompt, Sequence[_Compiled]], ends_with: int | None) -> None:
    """The model sees tokens, not where a prompt ends: an output must not complete a prompt."""
    for longer in lists:
        for cut in range(1, len(longer)):
            script = lists.get(longer[:cut])
            if script is None:
                continue
            best = [None if isinstance(p, Fault) else p[0] for p in script]
            best += [ends_with] * (len(longer) - cut - len(best))
            if tuple(best[: len(longer) - cut]) == longer[cut:]:
                raise ConfigError(
                    f"prompt {shown(longer[:cut])} and its script spell out {shown(longer)}, the "
                    f"prompt of another script; let one of the prompts begin differently"
                )
