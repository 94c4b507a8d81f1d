"""`Forward`: what the layers of one forward hand on to each other. Made anew for every step.

Shape letters: T = rows, C = streams, M = hidden size, N = completed entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from deepinfer.cache.pools import CachePools
from deepinfer.kernels.interface import Candidates, Kernels, Rotation, Selection
from deepinfer.model.hyper_connection import Streams
from deepinfer.step import Rows, StepInputs

__all__ = ["Forward", "Trace"]


class Trace(Protocol):
    """Receives intermediates by name and layer. Called inside the forward: copy what is to be kept.

    Names: `streams` (after the layer), `experts`, `expert_weights`, `index` (entries chosen),
    `blocks` (candidate blocks), `engram_rows`, `context` (normalised draft features; layer -1).
    """

    def __call__(self, name: str, layer: int, value: torch.Tensor) -> None: ...


def _no_trace(name: str, layer: int, value: torch.Tensor) -> None:
    """The trace of a forward that nobody watches."""


@dataclass(slots=True)
class Forward:
    """State of one forward over the backbone.

    `rows` and what belongs to them change once: where the decoder layers begin, if replay drops
    rows.
    """

    kernels: Kernels
    step: StepInputs
    cache: CachePools
    plain_frequencies: torch.Tensor
    entry_frequencies: torch.Tensor
    trace: Trace = _no_trace
    rows: Rows = field(init=False)
    plain_rotation: Rotation = field(init=False)
    """Layers of ratio 0 and drafts."""
    entry_rotation: Rotation = field(init=False)
    """Layers with a ratio: queries, window keys, inverse rotation."""
    stored_rotations: dict[int, Rotation] = field(init=False)
    """Per ratio: entries completed in this step."""
    latents: dict[int, torch.Tensor] = field(default_factory=dict)
    """Per entry owner: normalised latents of the entries completed in this step, (N, D)."""
    selections: dict[int, Selection] = field(default_factory=dict)
    """Per index source."""
    candidates: Candidates | None = None
    features: dict[int, torch.Tensor] = field(default_factory=dict)
    """Draft features by target layer, (T, M) each; those of encoder layers have all rows."""
    lookback_tg: torch.Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self._run_on(self.step.rows)
        self.lookback_tg = self.step.lookback_tg
        self.stored_rotations = {
            ratio: self.kernels.rotation(writes.position_n, self.entry_frequencies)
            for ratio, writes in self.step.entries.items()
        }

    def _run_on(self, rows: Rows) -> None:
        self.rows = rows
        self.plain_rotation = self.kernels.rotation(rows.positions_t, self.plain_frequencies)
        self.entry_rotation = self.kernels.rotation(rows.positions_t, self.entry_frequencies)

    def rotation_for(self, ratio: int) -> Rotation:
        """Rotation of this layer's queries and window keys."""
        return self.entry_rotation if ratio else self.plain_rotation

    def enter_decoder(self, streams: Streams, u_tm: torch.Tensor) -> torch.Tensor:
        """Go on with the decoder's rows only; returns their part of the sub-layer input `u_tm`."""
        if self.step.decoder_rows is self.step.rows:
            return u_tm
        self._run_on(self.step.decoder_rows)
        keep = self.step.decoder_keep
        if keep is None:  # all rows, with narrower windows
            return u_tm
        streams.keep_rows(keep)
        if self.lookback_tg is not None:
            self.lookback_tg = self.lookback_tg[keep]
        return u_tm[keep]
