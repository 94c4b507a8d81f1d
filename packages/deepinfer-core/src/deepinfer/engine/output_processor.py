"""What becomes of sampled tokens: ends found, text grown, deltas and results made.

`settle` looks at all sequences of a step at once and picks out those that need a look of their own:
the ones that end, and the ones that somebody watches.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from deepinfer.engine.runner import StepSamples
from deepinfer.engine.sequence import Request, Sequence
from deepinfer.engine.table import SequenceTable
from deepinfer.errors import RequestError
from deepinfer.outputs import (
    CompletionOutput,
    FinishReason,
    RequestDelta,
    RequestOutput,
    RequestStats,
)
from deepinfer.tokenizer import Tokenizer

__all__ = ["End", "OutputProcessor"]

logger = logging.getLogger(__name__)

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class End:
    """Why a sequence has ended."""

    seq: Sequence
    reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None


class OutputProcessor:
    """Turns samples into outputs.

    Args:
        table: the sequences that run.
        tokenizer: None: answers have no text.
        eos_token_id: ends an answer.
        image_token_id: the token of image rows; -1 without.
    """

    def __init__(
        self,
        table: SequenceTable,
        tokenizer: Tokenizer | None,
        eos_token_id: int,
        image_token_id: int,
    ) -> None:
        self._table, self._tokenizer = table, tokenizer
        self._eos, self._image = eos_token_id, image_token_id

    # ---- one step ----

    def settle(
        self, slots: _Ints, rows: _Ints, samples: StepSamples, now_s: float
    ) -> tuple[int, list[End]]:
        """Append the tokens of a step to the sequences in `slots`.

        Args:
            slots: sequences that get a token and are still those that the step ran.
            rows: where among the samples each one's token stands.
            now_s: the time.

        Returns:
            Tokens that became part of an answer, and the sequences that end here.
        """
        table = self._table
        token_l, is_valid_l = samples.token_ids[rows], samples.is_valid[rows]
        table.num_unread[slots] -= 1
        table.tokens[slots, table.num_tokens[slots]] = token_l
        table.num_tokens[slots] += is_valid_l
        table.last_token_s[slots[is_valid_l]] = now_s
        is_eos_l = (token_l == self._eos) & table.ends_at_eos[slots]
        is_full_l = table.num_tokens[slots] >= table.max_len[slots]
        is_first_l = table.num_tokens[slots] == table.num_prompt[slots] + 1
        if (token_l == self._image).any():
            table.has_image[slots[token_l == self._image]] = True
        looks = is_eos_l | is_full_l | is_first_l | ~is_valid_l | table.is_watched[slots]
        ends: list[End] = []
        for at in np.flatnonzero(looks).tolist():
            seq = table.owner[int(slots[at])]
            assert seq is not None, "a sequence that runs has no owner"
            if not is_valid_l[at]:
                error = "the model's logits are not finite (NaN or inf)"
                ends.append(End(seq, "error", error=error))
                continue
            seq.first_token_s = now_s if seq.first_token_s is None else seq.first_token_s
            end = self._look(seq, int(token_l[at]), int(rows[at]), samples)
            if end is None and is_eos_l[at]:
                end = End(seq, "stop")
            elif end is None and is_full_l[at]:
                end = End(seq, "length")
            if end is not None:
                ends.append(end)
        return int(is_valid_l.sum()), ends

    def _look(self, seq: Sequence, token: int, row: int, samples: StepSamples) -> End | None:
        """Note what was asked for of one token; says whether it ends the answer."""
        params = seq.request.params
        if params.logprobs is not None:
            self._note_logprobs(seq, params.logprobs, row, samples)
        num_outputs = int(self._table.num_tokens[seq.slot]) - seq.num_prompt_tokens
        may_stop = num_outputs >= params.min_tokens
        if may_stop and token in params.stop_token_ids:
            end: End | None = End(seq, "stop", stop_reason=token)
        else:
            end = None
        if seq.text is None:
            return end
        try:
            # the text does not show the token that ended the answer
            hides = end is not None or (token == self._eos and not params.ignore_eos)
            if not hides and seq.text.append(token, may_stop=may_stop):
                end = End(seq, "stop", stop_reason=seq.text.stop_reason)
        except Exception as problem:  # whatever a tokenizer raises ends this request alone
            return self._failed(seq, problem)
        return end

    @staticmethod
    def _failed(seq: Sequence, problem: Exception) -> End:
        if not isinstance(problem, RequestError):
            logger.error("request %s failed", seq.request.request_id, exc_info=problem)
        return End(seq, "error", error=str(problem) or type(problem).__name__)

    @staticmethod
    def _note_logprobs(seq: Sequence, count: int, row: int, samples: StepSamples) -> None:
        assert samples.logprobs is not None, "log-probabilities were asked for"
        seq.logprobs.append(float(samples.logprobs[row]))
        if count:
            assert samples.top_ids is not None, "the best tokens were asked for"
            assert samples.top_logprobs is not None, "the best tokens were asked for"
            ids, values = samples.top_ids[row, :count], samples.top_logprobs[row, :count]
            seq.top_logprobs.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))

    # ---- deltas and results ----

    def show(self, slots: _Ints) -> None:
        """Tell whoever streams what a step added to the sequences in `slots` that go on."""
        for slot in slots[self._table.is_watched[slots]].tolist():
            seq = self._table.owner[slot]
            if seq is None or seq.request.on_delta is None:
                continue
            output_ids, text = self._output_ids(seq), ""
            if seq.text is not None:
                text = seq.text.take_delta()
                if seq.request.params.stop:  # ids that a stop string may still take back wait
                    del output_ids[seq.text.num_certain_tokens :]
            if len(output_ids) > seq.num_shown or text:
                seq.request.on_delta(self._delta(seq, output_ids, text))

    def finish(self, end: End) -> RequestOutput | None:
        """Complete an answer, whose sequence still runs or waits; the result, if it was the
        request's last one.
        """
        seq, request = end.seq, end.seq.request
        output_ids, tail = self._output_ids(seq), ""
        if seq.slot:
            self._table.note_time(seq)
        try:
            tail = seq.text.finish() if seq.text is not None else ""
            completion = self._completion(end, output_ids)
        except Exception as problem:  # whatever a tokenizer raises ends this request alone
            end = self._failed(seq, problem)
            completion = CompletionOutput(
                index=seq.number, token_ids=output_ids, finish_reason="error", seed=seq.seed
            )
        request.completions[seq.number] = completion
        request.error = request.error or end.error
        result = self.result(request) if request.is_finished else None
        if request.on_delta is not None:
            delta = self._delta(seq, completion.token_ids, tail)
            request.on_delta(replace(delta, finish_reason=completion.finish_reason, output=result))
        if result is not None and request.on_finish is not None:
            request.on_finish(result)
        return result

    def _output_ids(self, seq: Sequence) -> list[int]:
        prompt = seq.num_prompt_tokens
        if seq.slot:
            ids = self._table.tokens[seq.slot, prompt : self._table.num_tokens[seq.slot]]
        else:
            ids = seq.token_ids[prompt:]
        output_ids: list[int] = ids.tolist()
        return output_ids

    def _completion(self, end: End, output_ids: list[int]) -> CompletionOutput:
        seq, params, text = end.seq, end.seq.request.params, ""
        reason, stop_reason = end.reason, end.stop_reason
        if seq.text is not None:
            text = seq.text.text
            if seq.text.stop_reason is not None:
                reason, stop_reason = "stop", seq.text.stop_reason
                del output_ids[seq.text.num_tokens :]
        elif self._tokenizer is not None and params.detokenize:
            hidden = 1 if end.reason == "stop" else 0
            text = self._tokenizer.decode(
                output_ids[: len(output_ids) - hidden],
                skip_special_tokens=params.skip_special_tokens,
            )
        count = len(output_ids)
        return CompletionOutput(
            index=seq.number,
            token_ids=output_ids,
            text=text,
            logprobs=seq.logprobs[:count] if params.logprobs is not None else None,
            top_logprobs=seq.top_logprobs[:count] if params.logprobs else None,
            finish_reason=reason,
            stop_reason=stop_reason,
            seed=seq.seed,
        )

    @staticmethod
    def _delta(seq: Sequence, token_ids: list[int], text: str) -> RequestDelta:
        """What is new since the last delta, of the ids that are certain so far."""
        shown, seq.num_shown = seq.num_shown, len(token_ids)
        wants_logprobs = seq.request.params.logprobs is not None
        return RequestDelta(
            request_id=seq.request.request_id,
            index=seq.request.index,
            answer=seq.number,
            token_ids=token_ids[shown:],
            text=text,
            logprobs=seq.logprobs[shown : len(token_ids)] if wants_logprobs else None,
        )

    def result(self, request: Request) -> RequestOutput:
        """The result of a request whose answers are complete."""
        return RequestOutput(
            index=request.index,
            request_id=request.request_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            outputs=[request.completions[n] for n in sorted(request.completions)],
            error=request.error,
            stats=_stats(request),
        )


def _stats(request: Request) -> RequestStats:
    """Times of a request."""

    def earliest(times: list[float | None]) -> float | None:
        return min((t for t in times if t is not None), default=None)

    seqs = request.sequences
    more = {
        "num_preemptions": sum(seq.num_preemptions for seq in seqs),
        "num_cached_tokens": sum(seq.num_cached_tokens for seq in seqs),
    }
    started = earliest([seq.first_scheduled_s for seq in seqs])
    first = earliest([seq.first_token_s for seq in seqs])
    if started is None:
        return RequestStats(**more)
    queue_s = started - request.arrival_s
    if first is None:
        return RequestStats(queue_s=queue_s, **more)
    last = max(seq.last_token_s for seq in seqs if seq.last_token_s is not None)
    return RequestStats(
        queue_s=queue_s,
        prefill_s=first - started,
        decode_s=last - first,
        **more,
    )
