"""`generate`: runs requests together through the one forward, first come first served.

A small synchronous loop. Every step holds one row of each running sequence that decodes, then as
many prompt rows as the budget allows. Blocks are reserved when a sequence is admitted, so nothing
has to be preempted.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from deepinfer.cache.pools import CachePools
from deepinfer.config.fields import is_integer, is_number, shown
from deepinfer.errors import CheckpointError, ConfigError, RequestError
from deepinfer.model.arguments import plain
from deepinfer.model.model import Model
from deepinfer.outputs import (
    CompletionOutput,
    FinishReason,
    GenerationRequest,
    Progress,
    RequestOutput,
    RequestStats,
)
from deepinfer.step.builder import InputBuilder, SequenceRows

__all__ = ["generate"]

logger = logging.getLogger(__name__)


def generate(
    model: Model,
    requests: Sequence[GenerationRequest],
    *,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int = 512,
    max_model_len: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> list[RequestOutput]:
    """Continue every request; exactly one result each, in the order given.

    Args:
        model: a loaded model.
        requests: prompts and their limits. One that cannot run gets an error of its own, the others
            go on.
        max_num_seqs: most sequences that run at a time; None: 16, or the row budget if smaller.
        max_num_batched_tokens: most rows of one forward.
        max_model_len: longest prompt plus output in tokens; None: the model's context.
        on_progress: called after every step.
        should_stop: asked before every step; True ends the run, unfinished requests are aborted
            with what they have.

    Raises:
        ConfigError: a limit that lets nothing run.
    """
    _check_integers(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    if max_num_seqs is None:
        max_num_seqs = max(1, min(16, max_num_batched_tokens))
    limit = _check_limits(model, max_num_seqs, max_num_batched_tokens, max_model_len)
    run = _Run(model, requests, limit, max_num_seqs, max_num_batched_tokens)
    while run.has_work:
        if should_stop is not None and should_stop():
            break
        run.step()
        if on_progress is not None:
            on_progress(run.progress())
    return run.finish()


def _check_integers(**limits: object) -> None:
    for name, value in limits.items():
        if value is not None and not is_integer(value):
            raise ConfigError(f"{name}={shown(value)} is no integer; give one")


def _check_limits(
    model: Model, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int | None
) -> int:
    """The longest prompt plus output that a sequence may reach."""
    if max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs={max_num_seqs} lets nothing run; give at least 1")
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens={max_num_batched_tokens} is below max_num_seqs="
            f"{max_num_seqs}: not every running sequence would have a row in a step; "
            f"raise it to {max_num_seqs} or lower max_num_seqs"
        )
    context = model.config.max_position_embeddings
    if max_model_len is not None and not 2 <= max_model_len <= context:
        raise ConfigError(
            f"max_model_len={max_model_len} is not in 2..{context}, the context of this model"
        )
    return max_model_len or context


def _allocate(model: Model, num_slots: int, num_blocks: int) -> CachePools:
    layout, value = model.layout, torch.finfo(model.kernels.compute_dtype).bits // 8
    need = (num_slots + 1) * layout.bytes_per_slot(value)
    need += (num_blocks + 1) * layout.bytes_per_block(value)
    try:
        return model.new_cache(num_slots=num_slots, num_blocks=num_blocks)
    except (MemoryError, RuntimeError) as problem:  # what torch raises depends on the device
        raise ConfigError(
            f"the caches of {num_slots} sequences take {need / 1e9:.1f} GB, more than can be had; "
            f"lower max_num_seqs, max_tokens or max_model_len"
        ) from problem


@dataclass(slots=True)
class _Sequence:
    """One request while it runs."""

    index: int
    request: GenerationRequest
    token_ids: list[int]
    """Prompt and output."""
    is_image: list[bool] | None
    """Per token of `token_ids`; None where the prompt has no image rows."""
    max_len: int
    """Length at which it ends: prompt and `max_tokens`, within the context."""
    slot: int = 0
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    runs_alone: bool = False
    """It was in a step that failed, and may be the cause."""
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        assert self.request.prompt_token_ids is not None, "a request that runs has a prompt"
        return len(self.request.prompt_token_ids)

    def rows(self, count: int) -> SequenceRows:
        """The next `count` rows; the last known token gives logits."""
        is_last = self.num_computed + count == len(self.token_ids)
        return SequenceRows(
            token_ids=self.token_ids,
            start=self.num_computed,
            count=count,
            slot=self.slot,
            blocks=self.blocks,
            num_logits=1 if is_last else 0,
            is_image=self.is_image,
        )


class _Run:
    """All requests of one call, the caches they share, and their results."""

    def __init__(
        self,
        model: Model,
        requests: Sequence[GenerationRequest],
        limit: int,
        max_num_seqs: int,
        max_rows: int,
    ) -> None:
        self._model, self._limit, self._max_rows = model, limit, max_rows
        self._started_s = time.perf_counter()
        self._results: list[RequestOutput | None] = [None] * len(requests)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._num_prompt_rows = self._num_outputs = 0
        for index, request in enumerate(requests):
            self._submit(index, request)
        needs = sorted((self._blocks_of(seq) for seq in self._waiting), reverse=True)
        num_slots = max(1, min(max_num_seqs, len(needs)))
        num_blocks = sum(
            needs[:num_slots]
        )  # the largest that may run at a time, so that all of them fit
        self._free_slots = list(range(num_slots, 0, -1))
        self._free_blocks = list(range(num_blocks, 0, -1))
        self._cache = _allocate(model, num_slots, num_blocks)
        self._builder: InputBuilder = model.input_builder()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def progress(self) -> Progress:
        return Progress(
            num_finished=sum(result is not None for result in self._results),
            num_requests=len(self._results),
            prompt_tokens=self._num_prompt_rows,
            output_tokens=self._num_outputs,
        )

    def step(self) -> None:
        """Admit what fits, run one forward, settle what it finished."""
        self._admit()
        batch = self._plan()
        logger.debug(
            "step: %d rows of %d sequences, %d waiting",
            sum(rows.count for _, rows in batch),
            len(batch),
            len(self._waiting),
        )
        try:
            tokens = iter(self._forward(batch))
        except (CheckpointError, OSError) as problem:  # a table row that is damaged or out of reach
            self._blame(batch, problem)
            return
        now_s = time.perf_counter()
        for seq, rows in batch:
            self._num_prompt_rows += max(0, min(rows.end, seq.num_prompt_tokens) - rows.start)
            seq.num_computed = rows.end
            if rows.num_logits:
                token = next(tokens)
                if token is None:
                    self._release(seq, "error", "the model's logits are not finite (NaN or inf)")
                else:
                    self._append(seq, token, now_s)

    def _forward(self, batch: Sequence[tuple[_Sequence, SequenceRows]]) -> list[int | None]:
        """Run the rows of a step; the next token of each sequence whose last row was among them."""
        with torch.inference_mode():
            step = self._builder.step([rows for _, rows in batch])
            logits = self._model.transformer.forward(step, self._cache)
            return _sample([seq for seq, rows in batch if rows.num_logits], logits)

    def _blame(self, batch: Sequence[tuple[_Sequence, SequenceRows]], problem: Exception) -> None:
        """A step failed by what one of its sequences looked up: that one fails, the others go on.

        Which one it was shows when each is computed again, from its beginning and alone.
        """
        if len(batch) == 1:
            self._release(batch[0][0], "error", str(problem))
            return
        for seq, _ in batch:
            seq.num_computed, seq.runs_alone = 0, True

    def finish(self) -> list[RequestOutput]:
        """Every result; what did not finish is aborted with what it has."""
        for seq in (*self._running, *self._waiting):
            self._release(seq, "abort")
        assert all(result is not None for result in self._results), "a request has no result"
        return [result for result in self._results if result is not None]

    # ---- admission ----

    def _submit(self, index: int, given: GenerationRequest) -> None:
        """Queue a request, or record why it cannot run."""
        try:
            request, prompt = self._checked(given)
        except RequestError as problem:
            ids = getattr(given, "prompt_token_ids", None)
            num_tokens = len(ids) if isinstance(ids, list) else 0
            self._results[index] = RequestOutput(
                index=index, num_prompt_tokens=num_tokens, error=str(problem)
            )
            return
        image_id = self._model.config.image_token_id
        is_image = [token == image_id for token in prompt] if image_id in prompt else None
        self._waiting.append(
            _Sequence(
                index=index,
                request=request,
                token_ids=list(prompt),
                is_image=is_image,
                max_len=min(len(prompt) + request.max_tokens, self._limit),
            )
        )

    def _checked(self, given: GenerationRequest) -> tuple[GenerationRequest, list[int]]:
        """The request in plain Python numbers, and its prompt.

        Raises:
            RequestError: it cannot run.
        """
        if not isinstance(given, GenerationRequest):
            raise RequestError(f"found {shown(given)}, allowed: a GenerationRequest")
        if given.error is not None:
            raise RequestError(str(given.error))
        if given.prompt_token_ids is None:
            raise RequestError("the request has neither prompt_token_ids nor an error")
        prompt = self._model.check_prompt(given.prompt_token_ids)
        if len(prompt) >= self._limit:
            raise RequestError(
                f"the prompt is {len(prompt)} tokens long and max_model_len={self._limit} leaves "
                f"no room for an output; shorten it or raise max_model_len"
            )
        max_tokens, seed = plain(given.max_tokens), plain(given.seed)
        temperature = plain(given.temperature)
        if not is_integer(max_tokens) or max_tokens < 1:
            raise RequestError(
                f"max_tokens={shown(max_tokens)} is no number of tokens; give 1 or more"
            )
        if not is_number(temperature) or temperature < 0:
            raise RequestError(f"temperature={shown(temperature)} is not a finite number >= 0")
        if not is_integer(seed) or not 0 <= seed < 2**64:
            raise RequestError(f"seed={shown(seed)} is not an integer from 0 to 2^64 - 1")
        if not isinstance(given.ignore_eos, bool):
            raise RequestError(f"ignore_eos={shown(given.ignore_eos)} is not True or False")
        request = replace(
            given,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            temperature=float(temperature),
            seed=seed,
        )
        return request, prompt

    def _blocks_of(self, seq: _Sequence) -> int:
        return self._model.layout.blocks_for(seq.max_len)

    def _admit(self) -> None:
        while (
            self._waiting
            and self._free_slots
            and len(self._free_blocks) >= self._blocks_of(self._waiting[0])
        ):
            seq = self._waiting.popleft()
            seq.slot = self._free_slots.pop()
            seq.blocks = [self._free_blocks.pop() for _ in range(self._blocks_of(seq))]
            self._running.append(seq)

    # ---- one step ----

    def _plan(self) -> list[tuple[_Sequence, SequenceRows]]:
        """Rows of this step: decoding sequences one each, then prompts, oldest first, within the
        budget.
        """
        left, batch = self._max_rows, []
        suspects = [seq for seq in self._running if seq.runs_alone][:1]
        for seq in suspects or sorted(
            self._running, key=lambda s: len(s.token_ids) - s.num_computed > 1
        ):
            count = min(len(seq.token_ids) - seq.num_computed, left)
            if count == 0:
                break
            if seq.started_s is None:
                seq.started_s = time.perf_counter()
            batch.append((seq, seq.rows(count)))
            left -= count
        return batch

    def _append(self, seq: _Sequence, token: int, now_s: float) -> None:
        seq.token_ids.append(token)
        if seq.is_image is not None:
            seq.is_image.append(token == self._model.config.image_token_id)
        self._num_outputs += 1
        seq.first_token_s = seq.first_token_s or now_s
        seq.last_token_s = now_s
        if token == self._model.config.eos_token_id and not seq.request.ignore_eos:
            self._release(seq, "stop")
        elif len(seq.token_ids) >= seq.max_len:
            self._release(seq, "length")

    def _release(self, seq: _Sequence, reason: FinishReason, error: str | None = None) -> None:
        """The one way out: give back slot and blocks, record the result."""
        if seq in self._running:
            self._running.remove(seq)
            self._free_slots.append(seq.slot)
            self._free_blocks.extend(seq.blocks)
        output_ids = seq.token_ids[seq.num_prompt_tokens :]
        try:
            text = self._text(output_ids)
        except RequestError as problem:
            text, error = "", str(problem)
        self._results[seq.index] = RequestOutput(
            index=seq.index,
            num_prompt_tokens=seq.num_prompt_tokens,
            outputs=[CompletionOutput(token_ids=output_ids, text=text, finish_reason=reason)],
            error=error,
            stats=self._stats(seq),
        )

    def _text(self, output_ids: Sequence[int]) -> str:
        tokenizer, eos = self._model.tokenizer, self._model.config.eos_token_id
        if tokenizer is None:
            return ""
        return tokenizer.decode([token for token in output_ids if token != eos])

    def _stats(self, seq: _Sequence) -> RequestStats:
        if seq.started_s is None:
            return RequestStats()
        queue_s = seq.started_s - self._started_s
        if seq.first_token_s is None:
            return RequestStats(queue_s=queue_s)
        return RequestStats(
            queue_s=queue_s,
            prefill_s=seq.first_token_s - seq.started_s,
            decode_s=seq.last_token_s - seq.first_token_s,
        )


def _sample(sequences: Iterable[_Sequence], logits_sv: torch.Tensor) -> list[int | None]:
    """Next token of each sequence from its row of logits; None where a logit is not finite.

    Temperature 0 takes the arg-max, lowest id on ties. Otherwise the arg-max of logits /
    temperature plus Gumbel noise that depends on the request's seed, the position and the token id
    alone, so that a request gets the same tokens whatever runs beside it.
    """
    tokens: list[int | None] = [*logits_sv.argmax(-1).tolist()]
    is_finite = torch.isfinite(logits_sv).all(-1).tolist()
    for row, seq in enumerate(sequences):
        temperature = seq.request.temperature
        if not is_finite[row]:
            tokens[row] = None
        elif temperature > 0.0:
            key = (seq.request.seed, len(seq.token_ids))
            uniform_v = np.random.Generator(np.random.Philox(key=key)).random(logits_sv.shape[1])
            noise_v = -np.log(-np.log(np.maximum(uniform_v, np.finfo(np.float64).tiny)))
            logits_v = logits_sv[row].double().cpu().numpy()
            with np.errstate(over="ignore"):  # a tiny temperature: all but the largest are -inf
                tokens[row] = int(((logits_v - logits_v.max()) / temperature + noise_v).argmax())
    return tokens
