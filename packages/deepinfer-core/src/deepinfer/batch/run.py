"""`run_batch`: answers the lines of a batch file, a bounded number of them at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from deepinfer.config.fields import is_integer, shown
from deepinfer.errors import ConfigError, RequestError
from deepinfer.outputs import Progress, RequestOutput
from deepinfer.sampling_params import SamplingParams

from .bodies import Answered, failed_line, result_line
from .files import BatchFile
from .lines import BatchLine, LineId
from .order import AsTheyFinish, InOrder, Order
from .requests import Kind, read_request
from .summary import BatchSummary, Totals

if TYPE_CHECKING:
    from deepinfer.chat import AnswerForm
    from deepinfer.llm import LLM

__all__ = ["finish_batch", "run_batch"]

logger = logging.getLogger(__name__)

_INFLIGHT_BYTES = 2**28
"""Lines in flight have at most so many bytes, except that one always may run."""

_HELD_PER_INFLIGHT = 16


def run_batch(
    llm: LLM,
    batch: BatchFile,
    sampling_params: SamplingParams | None = None,
    *,
    seed: int = 0,
    model: str = "",
    ordered: bool = False,
    max_inflight: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> BatchSummary:
    """Answer every line that has no result yet, and write each result as soon as it is there.

    What runs when the run is stopped, or the engine or the disk fails, is not written: the same
    call on the same files computes it again.

    Args:
        llm: answers; other calls may run beside it.
        batch: open; it is started here, and closed by its owner.
        sampling_params: for what a line does not say; None: the defaults. Its `seed` is not used.
        seed: a line without a seed has one that follows from this one and its id, so that it gets
            the same answer whenever it is computed.
        model: name of the model, handed on in the results.
        ordered: write in the order of the input. At most 16 times `max_inflight` results, and 256
            MiB, wait for one that is not ready; then no line is begun until it is.
        max_inflight: lines given to the engine at a time; None: twice its `max_num_seqs`. Lines of
            more than 256 MiB together are fewer.
        on_progress: called after every step.
        should_stop: asked before every step; True ends the run with what is written.

    Returns:
        The totals. Lines that failed are counted there and raise nothing.

    Raises:
        ConfigError: `max_inflight` is no number of lines.
        BackendError: a line is a chat, and the package deepseek-recipe is not installed.
        EngineError: the device or the model failed.
        OSError: a result cannot be written; what was written before is whole.
    """
    if max_inflight is None:
        max_inflight = 2 * llm.config.max_num_seqs
    if not is_integer(max_inflight) or max_inflight < 1:
        raise ConfigError(
            f"max_inflight={shown(max_inflight)} is no number of lines; give 1 or more"
        )
    run = _Run(llm, batch, sampling_params or SamplingParams(), seed, model, max_inflight)
    if ordered:
        run.order = InOrder(run.write, _HELD_PER_INFLIGHT * max_inflight)
    return run(on_progress, should_stop or (lambda: False))


def finish_batch(batch: BatchFile) -> BatchSummary:
    """The totals of a batch without a line that is left, for which no model is needed.

    Raises:
        OSError: the output cannot be written.
    """
    assert not batch.num_left, f"{batch.num_left} lines have no result"
    batch.start()
    return Totals().summary(
        num_lines=batch.num_lines,
        num_resumed=batch.num_resumed,
        num_resumed_failed=batch.num_resumed_failed,
        duration_s=0.0,
    )


@dataclass(frozen=True, slots=True)
class _Ticket:
    """What has to be known of a line while it is in flight."""

    position: int
    number: int
    custom_id: LineId
    num_bytes: int
    kind: Kind
    wants_ids: bool
    form: AnswerForm | None
    """Of a chat."""


class _Run:
    """One run over the lines that are left."""

    def __init__(
        self,
        llm: LLM,
        batch: BatchFile,
        params: SamplingParams,
        seed: int,
        model: str,
        max_inflight: int,
    ) -> None:
        from deepinfer.engine.feed import Feed

        self._llm, self._batch, self._model, self._seed = llm, batch, model, seed
        self._defaults = {f.name: getattr(params, f.name) for f in fields(params)}
        self._max_inflight = max_inflight
        self._feed: Feed[_Ticket] = llm.feed()
        self._lines = batch.lines()
        self._num_begun = self._inflight_bytes = 0
        self._is_exhausted = self._is_stopped = False
        self._totals = Totals()
        self.order: Order = AsTheyFinish(self.write)

    def __call__(
        self, on_progress: Callable[[Progress], None] | None, should_stop: Callable[[], bool]
    ) -> BatchSummary:
        start_s, counts = time.perf_counter(), self._llm.statistics.counts
        self._batch.start()
        try:
            while True:
                if not self._is_stopped and should_stop():
                    self._is_stopped = True
                    self._feed.abort()
                if not self._is_stopped:
                    self._admit(should_stop)
                for ticket, output in self._feed.turn():
                    self._finish(ticket, output)
                if on_progress is not None:
                    on_progress(self._progress(counts))
                if not self._feed.num_inflight and (self._is_stopped or self._is_exhausted):
                    break
        finally:
            self._feed.close()
        return self._totals.summary(
            num_lines=self._batch.num_lines,
            num_resumed=self._batch.num_resumed,
            num_resumed_failed=self._batch.num_resumed_failed,
            duration_s=time.perf_counter() - start_s,
        )

    def write(self, line: bytes, has_failed: bool) -> None:
        """Write a result and count it."""
        self._batch.write(line, has_failed=has_failed)
        self._totals.count_written(has_failed=has_failed)

    # ---- in ----

    def _admit(self, should_stop: Callable[[], bool]) -> None:
        """Give the engine lines, as many as there is room for."""
        while (
            self._feed.num_inflight < self._max_inflight
            and (self._inflight_bytes < _INFLIGHT_BYTES or not self._feed.num_inflight)
            and not self.order.is_full
            and not should_stop()
        ):
            line = next(self._lines, None)
            if line is None:
                self._is_exhausted = True
                return
            position, self._num_begun = self._num_begun, self._num_begun + 1
            if line.error is not None:
                self._fail(position, line.number, line.custom_id, "invalid_line", line.error)
                continue
            try:
                self._begin(position, line)
            except RequestError as problem:
                message = f"line {line.number}: {problem}"
                self._fail(position, line.number, line.custom_id, "invalid_request", message)

    def _begin(self, position: int, line: BatchLine) -> None:
        defaults = self._defaults | {"seed": _seed_of(line.custom_id, self._seed)}
        request = read_request(line, defaults)
        form, prompt = None, request.prompt
        if request.kind == "chat":
            chat = self._llm.chat_format.prompt(request.messages, **request.chat_options)
            form, prompt = chat.form, chat.token_ids
        assert prompt is not None, "a completion has a prompt"
        ticket = _Ticket(
            position=position,
            number=line.number,
            custom_id=line.custom_id,
            num_bytes=line.num_bytes,
            kind=request.kind,
            wants_ids=request.wants_ids,
            form=form,
        )
        given = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        self._feed.submit(ticket, given, request.params)
        self._inflight_bytes += line.num_bytes

    # ---- out ----

    def _finish(self, ticket: _Ticket, output: RequestOutput) -> None:
        """Write a result, unless we cut it off: then the line is computed again another time."""
        self._inflight_bytes -= ticket.num_bytes
        if any(answer.finish_reason == "abort" for answer in output.outputs):
            if self._is_stopped:
                return
            output = replace(output, error="the request was aborted from outside of this run")
        if output.error is None:
            output = self._with_messages(ticket, output)
        if output.error is not None:
            code = "failed" if output.stats.queue_s is not None else "invalid_request"
            message = f"line {ticket.number}: {output.error}"
            self._fail(ticket.position, ticket.number, ticket.custom_id, code, message)
            return
        answered = Answered(
            custom_id=ticket.custom_id,
            kind=ticket.kind,
            output=output,
            wants_ids=ticket.wants_ids,
        )
        line = result_line(
            answered, model=self._model, created=int(time.time()), tokenizer=self._llm.tokenizer
        )
        self._totals.add(output)
        self.order.put(ticket.position, line, has_failed=False)

    def _with_messages(self, ticket: _Ticket, output: RequestOutput) -> RequestOutput:
        if ticket.form is None:
            return output
        chat_format = self._llm.chat_format
        try:
            answers = [
                replace(answer, message=chat_format.message(answer, ticket.form))
                for answer in output.outputs
            ]
        except RequestError as problem:
            return replace(output, error=str(problem))
        return replace(output, outputs=answers)

    def _fail(self, position: int, number: int, custom_id: LineId, code: str, message: str) -> None:
        self.order.put(position, failed_line(custom_id, code, message, number), has_failed=True)

    def _progress(self, start: Any) -> Progress:
        counts = self._llm.statistics.counts.since(start)
        return Progress(
            num_finished=self._totals.num_written,
            num_requests=self._batch.num_left,
            prompt_tokens=counts.prefill_tokens,
            output_tokens=counts.committed_tokens,
        )


def _seed_of(custom_id: LineId, seed: int) -> int:
    """The seed of a line that has none: a function of its id and the seed of the run."""
    text = f"{seed}\0{custom_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
