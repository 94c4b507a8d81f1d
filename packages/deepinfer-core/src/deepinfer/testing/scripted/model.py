"""`ScriptedModel`: a stand-in for a model, for tests of everything around one.

Shape letters: R = rows that need logits, V = vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch

from deepinfer.cache.layout import CacheLayout
from deepinfer.config.fields import is_integer, is_number, shown
from deepinfer.config.model_config import ModelConfig
from deepinfer.errors import ConfigError, RequestError
from deepinfer.model.arguments import items
from deepinfer.step import StepInputs
from deepinfer.step.builder import InputBuilder
from deepinfer.testing.scripted import checks
from deepinfer.testing.scripted.byte_tokenizer import byte_tokenizer
from deepinfer.testing.scripted.config import small_config
from deepinfer.testing.scripted.records import HASH, OFFSET, SCRIPT, Ints, ScriptedCache, mixed
from deepinfer.testing.scripted.scripts import (
    TOP,
    Fault,
    Logits,
    Preference,
    Scripts,
    apply_preference,
    checked_ids,
    compiled,
    random_logits,
)
from deepinfer.testing.scripted.step import StepRecords
from deepinfer.tokenizer import Tokenizer

__all__ = ["ScriptedModel"]

_ScriptTable = Mapping[tuple[int, ...] | str, Sequence[Preference] | str]
_ScriptCall = Callable[[Sequence[int]], Preference | None]
_SPECIAL_BELOW = np.float32(8)
"""How far the pseudo-random logits of special tokens lie below the others."""
_END_SALT = 0x3C6E_F372_FE94_F82A


class ScriptedModel:
    """A model that says what a test wants, and that notices when its caches are mixed up.

    The engine runs on it as on any other model. It does no arithmetic of a network, but it keeps
    window rings, compressor state and compressed entries in slots and blocks as a real one does,
    and looks back at tokens for Engram. What it stores are records of whose they are; what a row
    knows of its context it has from the records it is shown. With `check_every` every one of them
    is compared with what it must be, and a wrong one raises `CacheCorruption`.

    The next token is a pseudo-random function of the whole context, unless a script says otherwise:

    >>> from deepinfer.testing import ScriptedModel
    >>> model = ScriptedModel(
    ...     tokenizer="bytes",
    ...     scripts={
    ...         "greet": "hi there",              # text, where there is a tokenizer
    ...         (7, 8, 9): [65, [66, 67], 68],    # output 1 prefers 66, then 67
    ...         (1, 2): [70, ScriptedModel.NAN],  # output 1 has no finite logit
    ...     },
    ... )
    >>> cache, builder = model.new_cache(num_slots=1, num_blocks=1), model.input_builder()
    >>> from deepinfer.step.builder import SequenceRows
    >>> tokens = model.check_prompt(model.tokenizer.encode("greet"))
    >>> for start, count in ((0, 6), (6, 1)):
    ...     rows = SequenceRows(
    ...         token_ids=tokens, start=start, count=count, slot=1, blocks=[1], num_logits=1
    ...     )
    ...     tokens.append(int(model.forward(builder.step([rows]), cache).argmax()))
    >>> model.tokenizer.decode(tokens)
    'greethi'

    A script is known by the tokens of its prompt, and goes on whatever is sampled. Behind its end
    comes EOS again and again (`after="eos"`) or what the context gives (`after="hash"`). Preferred
    tokens have logits 10, 9, 8, ...; all others lie in [-8, 0). A longer prompt takes over from a
    shorter one that it begins with. Embeddings of image rows are part of the context, so a prompt
    that comes with some has no script.

    Args:
        scripts: preferences per output position, by prompt; or a function that is called for every
            row with logits: it gets all tokens so far (read from the caches) and returns what to
            prefer next, or None for what the context gives.
        after: what follows a script.
        vocab_size: None: 256, or as many as the tokenizer has. Without a tokenizer the last four
            ids are BOS, EOS, padding and image; the last one is the image's in any case.
        max_position_embeddings: the context in tokens.
        sliding_window: window in tokens, at least 3.
        tokenizer: for text; `"bytes"` is `byte_tokenizer()`.
        config: geometry to use instead of one made from the four above.
        backtrack: rows that a later step may take back, see `CacheLayout`.
        allows_replay: windows may begin behind the start of a sequence (bounded replay). Without
            it that is an error.
        eos_share: share of contexts without a script whose best token is EOS, 0 to 1. EOS, BOS,
            padding and image tokens never are the best otherwise.
        check_every: check what is read in every n-th forward; 0: never.
        fails_at: number of a forward, from 1; or a prompt: every forward fails that computes the
            prompt's last token or a token behind it. A forward that fails leaves poison in all
            places that it would have written.
        raises: what such a forward raises.
        step_time_s: a forward takes at least as long, without holding the interpreter lock.
        on_forward: called with the inputs of every forward before it begins.

    Attributes:
        config, layout, tokenizer, device: as of `deepinfer.Model`.
        num_forwards: forwards begun so far.
        cache: the newest one that `new_cache` made, for tests that poison it; or None.
        step_time_s, on_forward, check_every: as given; may be changed at any time.

    Raises:
        ConfigError: an argument out of range, or a script that cannot be.
    """

    compute_bytes: ClassVar[int] = 4
    NAN: ClassVar[Fault] = Fault.NAN
    """Preference: every logit is NaN."""
    INF: ClassVar[Fault] = Fault.INF
    """Preference: one logit is +inf."""

    def __init__(
        self,
        *,
        scripts: _ScriptTable | _ScriptCall | None = None,
        after: Literal["eos", "hash"] = "eos",
        vocab_size: int | None = None,
        max_position_embeddings: int = 4096,
        sliding_window: int = 16,
        tokenizer: Tokenizer | Literal["bytes"] | None = None,
        config: ModelConfig | None = None,
        backtrack: int | None = None,
        allows_replay: bool = False,
        eos_share: float = 0.0,
        check_every: int = 1,
        fails_at: int | Sequence[int] | str | None = None,
        raises: BaseException | None = None,
        step_time_s: float = 0.0,
        on_forward: Callable[[StepInputs], None] | None = None,
    ) -> None:
        if after not in ("eos", "hash"):
            raise ConfigError(f"after={shown(after)}: allowed are 'eos' and 'hash'")
        if not is_number(eos_share) or not 0 <= eos_share <= 1:
            raise ConfigError(f"eos_share={shown(eos_share)} is not a share from 0 to 1")
        self.device = torch.device("cpu")
        self.tokenizer = byte_tokenizer() if tokenizer == "bytes" else tokenizer
        self.config = config or small_config(
            vocab_size, max_position_embeddings, sliding_window, self.tokenizer
        )
        self._ngram_order = self.config.engram.max_ngram_size if self.config.engram else None
        if self.config.sliding_window < max(2, self._ngram_order or 0):
            raise ConfigError(
                f"sliding_window={self.config.sliding_window} does not show the tokens looked "
                f"back at; give at least {max(2, self._ngram_order or 0)}"
            )
        self.layout = CacheLayout(self.config, backtrack=backtrack)
        self.cache: ScriptedCache | None = None
        self.num_forwards = 0
        self.step_time_s, self.on_forward, self.check_every = step_time_s, on_forward, check_every
        self._allows_replay, self._eos_share = allows_replay, eos_share
        self._raises = raises or RuntimeError("the scripted model fails here, as it was told to")
        self._call = scripts if callable(scripts) else None
        self._fails_at = fails_at if is_integer(fails_at) else None
        is_prompt = fails_at is not None and self._fails_at is None
        self._scripts = Scripts(
            self._table(scripts) if scripts is not None and not callable(scripts) else {},
            vocab_size=self.config.vocab_size,
            ends_with=self.config.eos_token_id if after == "eos" else None,
            image_token_id=self.config.image_token_id,
            marked=self._prompt(fails_at, "fails_at") if is_prompt else None,
        )

    # ---- what the engine uses ----

    def check_prompt(self, prompt: object, *, name: str = "prompt") -> list[int]:
        """The token ids of a list, array or tensor as plain integers; see `deepinfer.Model`.

        Raises:
            RequestError: it is no prompt that this model can run.
        """
        ids: list[int] = items(prompt, name, "a list of token ids")
        size, context = self.config.vocab_size, self.config.max_position_embeddings
        if not 1 <= len(ids) <= context:
            raise RequestError(f"{name} is {len(ids)} tokens long, allowed: 1..{context}")
        wrong = next((t for t in ids if not is_integer(t) or not 0 <= t < size), None)
        if wrong is not None:
            raise RequestError(f"{name} has {shown(wrong, 60)}, token ids are 0..{size - 1}")
        return ids

    def new_cache(self, *, num_slots: int, num_blocks: int) -> ScriptedCache:
        """Caches full of poison for `num_slots` sequences and `num_blocks` blocks."""
        self.cache = ScriptedCache(self.layout, num_slots=num_slots, num_blocks=num_blocks)
        return self.cache

    def input_builder(self) -> InputBuilder:
        """Builder of this model's step inputs."""
        return InputBuilder(self.layout, self.device)

    def forward(self, step: StepInputs, cache: ScriptedCache) -> torch.Tensor:
        """Logits of `step.logits_rows`, float32 (R, V). Writes the step's rows into `cache`.

        Raises:
            CacheCorruption: something that the step reads is not what it must be.
        """
        started_s = time.perf_counter()
        self.num_forwards += 1
        if self.on_forward is not None:
            self.on_forward(step)
        work = StepRecords(step, cache, self._scripts)
        self._fail_if_told(work)
        is_checked = self.check_every > 0 and self.num_forwards % self.check_every == 0
        if is_checked:
            checks.check_addresses(work)
            checks.check_windows(work, allows_replay=self._allows_replay)
            checks.check_look_back(work, self._ngram_order)
            checks.check_partners(work)
        work.store_entries(checks=is_checked)
        if is_checked:
            checks.check_entries(work)
        work.store_windows(checks=is_checked)
        logits_rv = self._logits(work)
        _wait_until(started_s + self.step_time_s)
        return torch.from_numpy(logits_rv)

    # ---- inside ----

    def _fail_if_told(self, work: StepRecords) -> None:
        marked = self._scripts.marked
        is_marked = marked is not None and bool((work.records[SCRIPT] == marked).any())
        if is_marked or self.num_forwards == self._fails_at:
            work.spoil()
            raise self._raises.with_traceback(None)  # not that of an earlier forward too

    def _logits(self, work: StepRecords) -> Logits:
        row_r, config = work.logits_rows(), self.config
        hash_r = work.records[HASH, row_r]
        logits_rv = random_logits(hash_r, config.vocab_size)
        special = {
            config.eos_token_id,
            config.bos_token_id,
            config.pad_token_id,
            config.image_token_id,
        }
        for token in special - {None}:
            logits_rv[:, token] -= _SPECIAL_BELOW
        if self._eos_share > 0:
            logits_rv[_is_drawn(hash_r, self._eos_share), config.eos_token_id] = TOP
        if self._call is not None:
            self._ask(work, row_r, logits_rv, self._call)
        self._scripts.apply(logits_rv, work.records[SCRIPT, row_r], work.records[OFFSET, row_r])
        return logits_rv

    def _ask(self, work: StepRecords, row_r: Ints, logits_rv: Logits, call: _ScriptCall) -> None:
        """Write what a script that is a function prefers (`logits_rv` is changed in place)."""
        for logits_v, row in zip(logits_rv, row_r.tolist(), strict=True):
            preference = call(work.context(row))
            if preference is not None:
                where = "what the script returned"
                apply_preference(logits_v, compiled(preference, self.config.vocab_size, where))

    def _table(self, scripts: _ScriptTable) -> dict[tuple[int, ...], Sequence[Preference]]:
        """Scripts with every text as token ids."""
        table: dict[tuple[int, ...], Sequence[Preference]] = {}
        for prompt, script in scripts.items():
            outputs = self._encoded(script, add_bos=False) if isinstance(script, str) else script
            table[self._prompt(prompt, "the prompt of a script")] = outputs
        return table

    def _prompt(self, given: object, name: str) -> tuple[int, ...]:
        ids = self._encoded(given) if isinstance(given, str) else given
        return checked_ids(ids, self.config.vocab_size, name)

    def _encoded(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        if self.tokenizer is None:
            raise ConfigError(f"text {shown(text)} in a script: give a tokenizer, or token ids")
        return self.tokenizer.encode(text, add_bos=add_bos)


def _is_drawn(hash_r: Ints, share: float) -> Ints:
    """Indices of a pseudo-random share of some contexts."""
    drawn_r = mixed(hash_r ^ _END_SALT).view(np.uint64) * 2.0**-64
    return np.flatnonzero(drawn_r < share)


def _wait_until(time_s: float) -> None:
    while (left_s := time_s - time.perf_counter()) > 0:
        time.sleep(left_s)
