"""`Engine`: continuous batching over one forward.

One call of `step` is one turn of the loop: plan, build, launch, settle. The synchronous loop
settles the step it has just launched. The asynchronous one settles the step before, while the
device computes: it holds at most one step that is launched and not settled when it plans, its
inputs take the tokens that are not yet read from the device, and an end is noticed one step late,
at the cost of one wasted row. Nothing else differs, so that each checks the other.

Whatever a sequence ends by (finished, aborted, failed, preempted), it leaves through `_release`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer.cache.block_pool import SlotPool
from deepinfer.config.engine_config import ResolvedConfig
from deepinfer.engine.flops import StepFlops
from deepinfer.engine.output_processor import End, OutputProcessor
from deepinfer.engine.prefixes import Prefixes, SlotCopies
from deepinfer.engine.queue import WaitingQueue
from deepinfer.engine.runner import (
    EngineModel,
    InlineRunner,
    Launched,
    StepWork,
    ThreadRunner,
)
from deepinfer.engine.scheduler import SchedulerLimits, StepPlan, plan
from deepinfer.engine.sequence import Request, Sequence
from deepinfer.engine.statistics import Statistics, StepRecord
from deepinfer.engine.table import SequenceTable
from deepinfer.engine.text import OutputText
from deepinfer.engine.work_counts import StepWorkCounts, count_step, request_times
from deepinfer.errors import CheckpointError, EngineError
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling.seeds import derived_seed
from deepinfer.sampling.table import SamplingRows, SamplingTable
from deepinfer.step.batch import BatchRows

__all__ = ["Engine"]

logger = logging.getLogger(__name__)

_Ints = npt.NDArray[np.int64]
_NONE: _Ints = np.empty(0, dtype=np.int64)

_WATERMARK = 0.01
"""Share of the blocks that stays free when a new prompt is admitted beside others."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that is launched and not settled."""

    launched: Launched
    slots: _Ints
    epochs: _Ints
    """Of the slots when it was launched."""
    counts: _Ints
    has_logits: npt.NDArray[np.bool_]
    start_s: float
    work: StepWorkCounts


class Engine:
    """Runs requests on one model. Not thread-safe: one caller at a time.

    Args:
        model: what computes the logits.
        config: limits, all decided.
        clock: seconds, for statistics and results.
    """

    def __init__(
        self,
        model: EngineModel,
        config: ResolvedConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config, self._model, self._clock = config, model, clock
        image_token_id = model.config.image_token_id
        image = -1 if image_token_id is None else image_token_id
        self._builder = model.input_builder()
        self._slots = SlotPool(config.max_num_seqs)
        self._table = SequenceTable(
            config.max_num_seqs,
            config.max_model_len,
            self._builder.ngram_order,
            image,
            replay_keep=config.swa_replay_keep,
            replay_drops_rows=config.swa_replay == "compact",
            window=model.config.sliding_window,
        )
        num_slots = config.max_num_seqs + config.num_snapshots
        self._prefixes = Prefixes(
            self._table,
            config.num_blocks,
            range(config.max_num_seqs + 1, num_slots + 1),
            replay_keep=config.swa_replay_keep,
        )
        self._blocks = self._prefixes.blocks
        self._waiting = WaitingQueue()
        self._limits = SchedulerLimits(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            watermark_blocks=round(config.num_blocks * _WATERMARK),
            uses_blocks=config.num_blocks > 0,
        )
        vocab_size = model.config.vocab_size
        self._sampling = SamplingTable(config.max_num_seqs, vocab_size)
        self._outputs = OutputProcessor(
            self._table, model.tokenizer, model.config.eos_token_id, image
        )
        cache = model.new_cache(num_slots=num_slots, num_blocks=config.num_blocks)
        is_cpu = model.device.type == "cpu"
        runner = ThreadRunner if config.async_scheduling and is_cpu else InlineRunner
        self._runner = runner(model, cache, Sampler(vocab_size, model.device))
        self._flights: deque[_Flight] = deque()
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._num_quiet = self._num_taken_back = 0
        self._last_sampling: SamplingRows | None = None
        self.failure: EngineError | None = None
        """Why it has stopped; None while it works."""
        self.statistics = Statistics()
        self._flops: StepFlops | None = None
        if config.log_interval_s is not None:
            self._flops = StepFlops(
                model.config,
                replay_mode=config.swa_replay,
                replay_keep=config.swa_replay_keep or 0,
                keeps_a_row=False,
            )
        self._last_log_s = clock()

    # ---- requests ----

    def submit(self, request: Request) -> None:
        """Queue a request that has been checked.

        Raises:
            EngineError: the engine has stopped.
        """
        self._check_alive()
        assert request.request_id not in self._requests, f"{request.request_id} is already here"
        request.arrival_s = self._clock()
        self._requests[request.request_id] = request
        for number in range(request.params.n):
            seq = Sequence(
                request=request,
                number=number,
                arrival=self._num_arrived,
                seed=derived_seed(request.seed, number),
                token_ids=request.prompt_token_ids,
            )
            self._num_arrived += 1
            if self._model.tokenizer is not None and (
                request.params.stop or (request.on_delta is not None and request.params.detokenize)
            ):
                seq.text = OutputText(
                    self._model.tokenizer,
                    request.params.stop,
                    skip_special_tokens=request.params.skip_special_tokens,
                    include_stop=request.params.include_stop_str_in_output,
                )
            request.sequences.append(seq)
            self._waiting.push(seq)

    def refuse(self, request: Request, error: str) -> None:
        """End a request that was not submitted."""
        request.error = error
        if request.on_finish is not None:
            request.on_finish(self._outputs.result(request))

    def abort(self, request_id: str) -> bool:
        """End a request with what it has; False when there is none of that name."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        for seq in request.sequences:
            if seq.number not in request.completions:
                self._end(End(seq, "abort"))
        return True

    def abort_all(self) -> None:
        """End every request with what it has."""
        for request_id in [*self._requests]:
            self.abort(request_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether some request has no result yet."""
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to step for: requests, or a step that was not settled."""
        return bool(self._requests or self._flights)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._table.running)

    # ---- the loop ----

    def step(self) -> None:
        """One turn of the loop.

        Raises:
            EngineError: the device or the model failed; every request has been ended with the
                cause.
        """
        self._check_alive()
        try:
            self._turn()
        except Exception as cause:
            raise self._die(cause) from cause
        except BaseException as cause:  # a second Ctrl-C, somewhere in the middle of a step
            self._die(cause)
            raise

    def close(self) -> None:
        """Abort what runs, and end the thread that runs it. More than once does no harm."""
        if self.failure is None:
            self.abort_all()
            self.failure = EngineError("the engine has stopped: it was closed")
        self._flights.clear()
        self._runner.close()

    def _turn(self) -> None:
        now_s, num_rows = self._clock(), 1
        if self._num_quiet and not len(self._waiting):
            self._num_quiet -= 1
            slots = self._table.running
            batch = self._table.batch(slots, np.ones_like(slots))
            self._flights.append(self._launch_rows(batch, SlotCopies(), now_s, is_quiet=True))
        else:
            num_rows = self._plan_and_launch(now_s)
        may_stay = 1 if self.config.async_scheduling and num_rows else 0
        while len(self._flights) > may_stay:
            self._settle(self._flights.popleft())
        self._log(self._clock())

    def _plan_and_launch(self, now_s: float) -> int:
        """Launch what the scheduler chooses; returns the number of rows."""
        heads: list[Sequence] = []
        step_plan = plan(
            self._table.for_scheduler(),
            self._prefixes.candidates(self._waiting, heads),
            num_free_blocks=self._blocks.num_free,
            limits=self._limits,
        )
        num_rows = step_plan.num_rows
        if num_rows or step_plan.preempted:
            self._launch(step_plan, heads[: len(step_plan.admitted)], now_s)
        else:
            assert self._flights or not self.has_unfinished, "requests wait, but nothing can run"
        self._num_quiet = 0
        num_running = len(self._table.running)
        if 0 < num_rows == num_running == len(self._flights[-1].slots) and bool(
            self._flights[-1].has_logits.all()
        ):  # each had one row, its newest token
            self._num_quiet = self._table.quiet_steps(uses_blocks=self._limits.uses_blocks)
        return num_rows

    def _launch(self, step_plan: StepPlan, heads: list[Sequence], now_s: float) -> None:
        """Give sequences what the plan gives them, and launch their rows.

        Args:
            heads: the waiting sequences that the plan admits.
        """
        slots, counts = self._table.running, step_plan.counts_r
        for r in step_plan.preempted:
            self._preempt(int(slots[r]))
        if step_plan.preempted:
            stays = counts > 0
            slots, counts = slots[stays], counts[stays]
        elif step_plan.admitted or not counts.all():
            slots, counts = slots[counts > 0], counts[counts > 0]
        restored, num_cached = SlotCopies(), 0
        if heads:
            self._waiting.take(heads)
            fresh = [self._admit(seq, now_s) for seq in heads]
            # all of them take what they share before any of them takes fresh blocks
            num_cached = sum(self._prefixes.begin(seq, restored) for seq in heads)
            slots = np.concatenate([slots, np.array(fresh, dtype=np.int64)])
            counts = np.concatenate([counts, np.array(step_plan.admitted, dtype=np.int64)])
        if len(slots):
            self._reserve_blocks(slots, counts)
            flight = self._launch_rows(self._table.batch(slots, counts), restored, now_s)
            flight.work.num_preempted, flight.work.num_cached = len(step_plan.preempted), num_cached
            self._flights.append(flight)

    def _launch_rows(
        self, batch: BatchRows, restored: SlotCopies, now_s: float, *, is_quiet: bool = False
    ) -> _Flight:
        """Launch the rows of a step.

        Args:
            batch: the rows.
            restored: slots to copy before the forward.
            now_s: the time.
            is_quiet: the step before had the same sequences, with one row each as well.
        """
        table, slots, counts = self._table, batch.slot_s, batch.count_s
        unread_rows, unread_from = (
            table.unread_rows(slots, counts) if self._flights else (_NONE, _NONE)
        )
        end = batch.start_s + counts
        has_logits = batch.num_logits_s > 0
        chosen, position = slots[has_logits], end[has_logits]
        saved = SlotCopies() if is_quiet else self._prefixes.launched(slots, end)
        counted = count_step(table, batch, flops=self._flops)
        if not (is_quiet and self._last_sampling is not None and self._last_sampling.is_constant):
            num_outputs = position - table.num_prompt[chosen]
            self._last_sampling = self._sampling.rows(chosen, position, num_outputs)
        work = StepWork(
            self._builder.build(batch),
            self._last_sampling,
            unread_rows,
            unread_from,
            restored if restored.sources else None,
            saved if saved.sources else None,
        )
        launched = self._runner.launch(work)
        logger.debug(
            "step: %d rows of %d sequences, %d waiting",
            counted.num_rows,
            len(slots),
            len(self._waiting),
        )
        table.num_computed[slots] = end
        table.num_unread[chosen] += 1
        table.sample_row[chosen] = np.arange(len(chosen))
        return _Flight(launched, slots, table.epoch[slots], counts, has_logits, now_s, counted)

    def _settle(self, flight: _Flight) -> None:
        """Take in what a step has yielded."""
        try:
            samples = flight.launched.result()
        except (CheckpointError, OSError) as problem:  # a table row is damaged or out of reach
            self._blame(flight, problem)
            return
        now_s = self._clock()
        is_same = self._table.epoch[flight.slots] == flight.epochs
        takes = is_same[flight.has_logits]
        slots, rows = flight.slots[flight.has_logits][takes], np.flatnonzero(takes)
        num_tokens, ends = self._outputs.settle(slots, rows, samples, now_s)
        self._table.clear_suspicion(slots)
        ended = [end.seq.slot for end in ends]
        for end in ends:
            self._end(end)
        self._outputs.show(np.setdiff1d(slots, ended) if ended else slots)
        self._record(flight, num_tokens, int(flight.counts[~is_same].sum()), now_s)

    def _blame(self, flight: _Flight, problem: Exception) -> None:
        """A step failed by what one of its sequences looked up: that one fails, the others go on.

        Which one it was shows when each is computed again, from its beginning and alone. A step
        launched after the failed one is given up, and its sequences are computed again too.
        """
        later = [*self._flights]
        self._flights.clear()
        self._prefixes.forget()
        suspects = self._still_there(flight)
        if len(suspects) == 1:
            self._end(End(suspects[0], "error", error=str(problem)))
        else:
            logger.warning("a step of %d sequences failed: %s", len(suspects), problem)
            for seq in suspects:
                seq.is_alone = True
        for other in [flight, *later]:
            if other is not flight:
                _wait_for(other)
            for seq in self._still_there(other):
                self._preempt(seq.slot)

    def _still_there(self, flight: _Flight) -> list[Sequence]:
        """The sequences of a step that have not left since."""
        same = flight.slots[self._table.epoch[flight.slots] == flight.epochs]
        owners = [self._table.owner[slot] for slot in same.tolist()]
        return [seq for seq in owners if seq is not None]

    # ---- coming and going ----

    def _admit(self, seq: Sequence, now_s: float) -> int:
        """Let a sequence run; returns its slot."""
        slot = self._slots.allocate()
        self._table.place(seq, slot)
        params = seq.request.params
        eos = () if params.ignore_eos else (self._model.config.eos_token_id,)
        self._sampling.set(slot, params, seq.seed, (*eos, *params.stop_token_ids))
        if seq.first_scheduled_s is None:
            seq.first_scheduled_s = now_s
        return slot

    def _reserve_blocks(self, slots: _Ints, counts: _Ints) -> None:
        table = self._table
        need = self._limits.blocks_for(table.num_computed[slots] + counts) - table.num_blocks[slots]
        for at in np.flatnonzero(need > 0).tolist():
            table.add_blocks(int(slots[at]), self._blocks.allocate(int(need[at])))

    def _preempt(self, slot: int) -> None:
        """Take slot and blocks from a sequence; it waits to be computed again."""
        seq = self._table.owner[slot]
        assert seq is not None, f"slot {slot} has no sequence to preempt"
        seq.num_preemptions += 1
        computed = int(self._table.num_computed[slot])
        if seq.num_preemptions > 1 and computed <= seq.num_computed_before:
            seq.promote()  # it got no further than before: the next time nobody takes its place
        seq.num_computed_before = max(seq.num_computed_before, computed)
        self._release(seq)
        self._waiting.push(seq)

    def _end(self, end: End) -> None:
        """Complete an answer and let its sequence go."""
        seq, request = end.seq, end.seq.request
        num_sampled = self._table.num_outputs(seq)
        result = self._outputs.finish(end)
        # what a stop string took back did not become part of the answer
        self._num_taken_back += num_sampled - len(request.completions[seq.number].token_ids)
        self._release(seq)
        if result is not None:
            del self._requests[request.request_id]
            self.statistics.record_request(request_times(request, result, self._clock()))

    def _release(self, seq: Sequence) -> None:
        """The one way out: give back slot and blocks, or the place in the queue."""
        self._num_quiet = 0
        if not seq.slot:
            self._waiting.remove(seq)
            return
        slot = seq.slot
        self._prefixes.end(seq, self._table.remove(seq))
        self._sampling.clear(slot)
        self._slots.release(slot)

    # ---- failure ----

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineError(str(self.failure)) from self.failure.__cause__

    def _die(self, cause: BaseException) -> EngineError:
        """End every request with the cause, without touching the device again."""
        # set first: whoever sees a result of these must find the reason too
        self.failure = EngineError(f"the engine has stopped: {str(cause) or type(cause).__name__}")
        self.failure.__cause__ = cause
        self._flights.clear()
        for request in [*self._requests.values()]:
            for seq in request.sequences:
                if seq.number not in request.completions:
                    self._end(End(seq, "error", error=str(self.failure)))
        return self.failure

    # ---- statistics ----

    def _record(self, flight: _Flight, num_tokens: int, num_wasted: int, now_s: float) -> None:
        work = flight.work
        num_tokens, self._num_taken_back = num_tokens - self._num_taken_back, 0
        self.statistics.record_step(
            StepRecord(
                start_s=flight.start_s,
                end_s=now_s,
                num_rows=work.num_rows,
                num_prefill_rows=work.num_prefill,
                num_decode_rows=work.num_rows - work.num_prefill,
                num_committed_tokens=num_tokens,
                num_wasted_rows=num_wasted,
                num_running=self.num_running,
                num_waiting=self.num_waiting,
                num_free_blocks=self._blocks.num_free,
                num_blocks=self._blocks.num_blocks,
                num_free_slots=self._slots.num_free,
                num_slots=self._slots.num_slots,
                num_preempted=work.num_preempted,
                cached_tokens=work.num_cached,
                recomputed_rows=work.num_recomputed,
                skipped_rows=work.num_skipped,
                flops=work.flops,
            )
        )

    def _log(self, now_s: float) -> None:
        interval = self.config.log_interval_s
        if interval is not None and now_s - self._last_log_s >= interval:
            self._last_log_s = now_s
            logger.info("%s", self.statistics.log_line(now_s))


def _wait_for(flight: _Flight) -> None:
    """Let a step that is given up come to its end."""
    try:
        flight.launched.result()
    except Exception as problem:
        logger.debug("a step after the failed one failed too: %s", problem)
