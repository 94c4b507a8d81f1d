"""`SequenceTable`: the sequences that run, as arrays indexed by state slot.

A step reads and writes these with a few array operations, however many sequences there are. Slot 0
is never used.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deepinfer.cache.layout import BLOCK_TOKENS
from deepinfer.engine.scheduler import NEVER, Running
from deepinfer.engine.sequence import Sequence
from deepinfer.step.batch import BatchRows, offsets, ranges

__all__ = ["SequenceTable"]

_Ints = npt.NDArray[np.int64]


class SequenceTable:
    """State of the running sequences.

    Args:
        num_slots: slots 1..num_slots.
        max_model_len: longest sequence in tokens.
        ngram_order: longest n-gram that Engram looks up; None without Engram.
        image_token_id: the token of image rows.
        replay_keep: last tokens of a prompt whose windows the decoder layers see; None: all.
        replay_drops_rows: whether they leave out the rows before (`compact`).
        window: tokens that a row sees.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        ngram_order: int | None,
        image_token_id: int,
        *,
        replay_keep: int | None = None,
        replay_drops_rows: bool = True,
        window: int = 0,
    ) -> None:
        rows = num_slots + 1
        self._ngram_order, self._image_token_id = ngram_order, image_token_id
        self._replay_keep, self._window = replay_keep, window
        self._replay_drops_rows = replay_drops_rows
        # zeroed lazily by the system: only the pages of tokens that exist take memory
        self.tokens = np.zeros((rows, max_model_len), dtype=np.int32)
        """Prompt and answer; what lies behind `num_tokens` is stale."""
        self.blocks = np.zeros((rows, -(-max_model_len // BLOCK_TOKENS)), dtype=np.int32)
        """Blocks in order; 0 behind `num_blocks`."""
        self.num_tokens: _Ints = np.zeros(rows, dtype=np.int64)
        """Tokens known."""
        self.num_unread: _Ints = np.zeros(rows, dtype=np.int64)
        """Tokens that launched steps will yield."""
        self.num_computed: _Ints = np.zeros(rows, dtype=np.int64)
        """Positions computed, those of launched steps included."""
        self.num_prompt: _Ints = np.zeros(rows, dtype=np.int64)
        self.num_blocks: _Ints = np.zeros(rows, dtype=np.int64)
        self.max_len: _Ints = np.zeros(rows, dtype=np.int64)
        """Length at which the answer ends."""
        self.rank: _Ints = np.zeros(rows, dtype=np.int64)
        self.stop: _Ints = np.full(rows, NEVER, dtype=np.int64)
        """Position that a chunk must not pass in one step, `NEVER` for none."""
        self.redo_until: _Ints = np.zeros(rows, dtype=np.int64)
        """Positions before this one were computed before it was preempted."""
        self.is_alone = np.zeros(rows, dtype=np.bool_)
        self.ends_at_eos = np.zeros(rows, dtype=np.bool_)
        self.is_watched = np.zeros(rows, dtype=np.bool_)
        """Each of its tokens is looked at: stops, streaming, log-probabilities."""
        self.has_image = np.zeros(rows, dtype=np.bool_)
        """Some token of it may be an image's."""
        self.epoch: _Ints = np.zeros(rows, dtype=np.int64)
        """Changes when the slot gets another owner: results of steps before are not its own."""
        self.sample_row: _Ints = np.zeros(rows, dtype=np.int64)
        """Where its unread token stands among those of the last launched step."""
        self.last_token_s = np.zeros(rows, dtype=np.float64)
        """When its newest token came; stale before the first one."""
        self.owner: list[Sequence | None] = [None] * rows
        self._running: _Ints | None = None

    # ---- coming and going ----

    def place(self, seq: Sequence, slot: int) -> None:
        """Let a sequence run in a free slot; nothing of it is computed yet."""
        count = len(seq.token_ids)
        self.tokens[slot, :count] = seq.token_ids
        self.num_tokens[slot], self.num_prompt[slot] = count, seq.num_prompt_tokens
        self.num_unread[slot] = self.num_computed[slot] = self.num_blocks[slot] = 0
        self.max_len[slot], self.rank[slot] = seq.request.max_len, seq.rank
        self.stop[slot] = NEVER
        self.last_token_s[slot] = seq.last_token_s or 0.0
        self.redo_until[slot], self.is_alone[slot] = seq.num_computed_before, seq.is_alone
        self.ends_at_eos[slot] = not seq.request.params.ignore_eos
        params = seq.request.params
        self.is_watched[slot] = (
            bool(seq.text is not None or params.stop_token_ids or params.logprobs is not None)
            or seq.request.on_delta is not None
        )
        self.has_image[slot] = bool((seq.token_ids == self._image_token_id).any())
        self.owner[slot], seq.slot = seq, slot
        self._running = None

    def remove(self, seq: Sequence) -> list[int]:
        """Take a sequence out, keeping its tokens; returns the blocks it held."""
        slot = seq.slot
        self.note_time(seq)
        seq.token_ids = self.tokens[slot, : self.num_tokens[slot]].copy()
        held: list[int] = self.blocks[slot, : self.num_blocks[slot]].tolist()
        self.blocks[slot, : self.num_blocks[slot]] = 0
        self.num_blocks[slot] = 0
        self.epoch[slot] += 1
        self.owner[slot], seq.slot = None, 0
        self._running = None
        return held

    def num_outputs(self, seq: Sequence) -> int:
        """Tokens of an answer so far, whether it runs or waits."""
        known = int(self.num_tokens[seq.slot]) if seq.slot else len(seq.token_ids)
        return known - seq.num_prompt_tokens

    def note_time(self, seq: Sequence) -> None:
        """Tell a sequence that runs when its newest token came."""
        if self.num_tokens[seq.slot] > self.num_prompt[seq.slot]:
            seq.last_token_s = float(self.last_token_s[seq.slot])

    def clear_suspicion(self, slots: _Ints) -> None:
        """The sequences in `slots` have got past the place where a step failed."""
        for slot in slots[self.is_alone[slots]].tolist():
            self.is_alone[slot] = False
            if (seq := self.owner[slot]) is not None:
                seq.is_alone = False

    def add_blocks(self, slot: int, blocks: list[int]) -> None:
        held = int(self.num_blocks[slot])
        self.blocks[slot, held : held + len(blocks)] = blocks
        self.num_blocks[slot] = held + len(blocks)

    # ---- looking ----

    @property
    def running(self) -> _Ints:
        """Slots in use, ascending."""
        if self._running is None:
            taken = [slot for slot, seq in enumerate(self.owner) if seq is not None]
            self._running = np.array(taken, dtype=np.int64)
        return self._running

    def for_scheduler(self) -> Running:
        """What the scheduler is told of the sequences of `running`.

        A sequence whose launched steps may complete it has nothing to compute.
        """
        slots = self.running
        computed, tokens = self.num_computed[slots], self.num_tokens[slots] + self.num_unread[slots]
        return Running(
            num_computed_r=computed,
            num_tokens_r=np.where(tokens < self.max_len[slots], tokens, computed),
            num_blocks_r=self.num_blocks[slots],
            rank_r=self.rank[slots],
            stop_r=self.stop[slots],
            is_alone_r=self.is_alone[slots],
        )

    def quiet_steps(self, *, uses_blocks: bool) -> int:
        """Steps ahead in which, as things stand, every running sequence gets its one row: none
        needs a block, ends by length or reaches a checkpoint. Nothing has to be planned for these
        unless a sequence comes or goes.
        """
        slots = self.running
        if not len(slots) or self.is_alone[slots].any() or self.stop[slots].min() < NEVER:
            return 0
        room = self.max_len[slots] - self.num_tokens[slots] - self.num_unread[slots]
        if uses_blocks:
            held = self.num_blocks[slots] * BLOCK_TOKENS
            room = np.minimum(room, held - self.num_computed[slots])
        return max(0, int(room.min()))

    # ---- one step ----

    def batch(self, slots: _Ints, counts: _Ints) -> BatchRows:
        """The next `counts` rows of the sequences in `slots`. Where the token of a last row is not
        known yet, it is stale (see `unread_rows`).
        """
        start_s = self.num_computed[slots]
        end_s = start_s + counts
        unread = slots[self.num_unread[slots] > 0]
        if len(unread):  # what the slot's last owner left there must not pass for an image
            self.tokens[unread, self.num_tokens[unread]] = 0 if self._image_token_id else 1
        slot_t, position_t = slots, start_s
        if counts.max() > 1:
            slot_t, position_t = slots.repeat(counts), ranges(start_s, counts)
        tokens_t = self.tokens[slot_t, position_t].astype(np.int64)
        has_image = bool(self.has_image[slots].any())
        width = int(self.num_blocks[slots].max()) or 1
        return BatchRows(
            start_s=start_s,
            count_s=counts,
            slot_s=slots,
            num_logits_s=(end_s == self.num_tokens[slots] + self.num_unread[slots]).astype(
                np.int64
            ),
            block_table_sb=self.blocks[slots, :width],
            token_ids_t=tokens_t,
            lookback_tg=self._lookback(slot_t, position_t, has_image),
            is_image_t=tokens_t == self._image_token_id if has_image else None,
            decoder_start_s=self._decoder_start(slots, start_s),
            drops_rows=self._replay_drops_rows,
        )

    def _decoder_start(self, slots: _Ints, start_s: _Ints) -> _Ints | None:
        """First position that the decoder layers see of each sequence; None where all see all.

        It counts from the prompt's end, also when a preempted sequence is computed again with its
        answer: so its windows are the same as before.
        """
        if self._replay_keep is None:
            return None
        first_s = np.maximum(self.num_prompt[slots] - self._replay_keep, 0)
        # rows whose whole window lies behind it see no difference
        first_s *= start_s < first_s + self._window - 1
        return first_s if first_s.any() else None

    def unread_rows(self, slots: _Ints, counts: _Ints) -> tuple[_Ints, _Ints]:
        """Rows of that batch whose token a launched step has yet to yield, and where among its
        samples it stands.
        """
        is_unread = self.num_computed[slots] + counts > self.num_tokens[slots]
        return offsets(counts)[1:][is_unread] - 1, self.sample_row[slots[is_unread]]

    def _lookback(self, slot_t: _Ints, position_t: _Ints, has_image: bool) -> _Ints | None:
        """Tokens at t, t-1, ... of each row; -1 before the start and from the first image token on
        (docs/model.md 5.4).
        """
        if self._ngram_order is None:
            return None
        at_tg = position_t[:, None] - np.arange(self._ngram_order)
        token_tg = self.tokens[slot_t[:, None], at_tg].astype(np.int64)  # stale where at_tg < 0
        is_blocked_tg = at_tg < 0
        if has_image:
            is_image_tg = (token_tg == self._image_token_id) & ~is_blocked_tg
            is_blocked_tg |= np.logical_or.accumulate(is_image_tg, axis=1)
        return np.where(is_blocked_tg, -1, token_tg)
