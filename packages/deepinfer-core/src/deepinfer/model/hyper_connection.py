"""`Streams`: the residual streams and the mixing that every sub-layer enters and leaves by
(docs/model.md 2.3).

The pre-mix is shifted: a sub-layer reads its input through the mix that the *previous* sub-layer
computed. A sub-layer's write is held back until the next one enters, so that kernels can fuse the
two (`hc_seam`).

Shape letters: T = rows, C = streams, M = hidden size.
"""

from __future__ import annotations

import torch

from deepinfer.kernels.interface import HyperConnectionWeights, Kernels, Mix, Norm

__all__ = ["Streams"]


class Streams:
    """Residual streams of the rows of one forward.

    Args:
        kernels: the operations.
        h_tm: embeddings, (T, M); every stream starts as one.
        num_streams: C.
    """

    def __init__(self, kernels: Kernels, h_tm: torch.Tensor, num_streams: int) -> None:
        self._kernels = kernels
        self._x_tcm, self._pre_tc = kernels.expand_streams(h_tm, num_streams)
        self._mix: Mix | None = None
        self._pending_tm: torch.Tensor | None = None

    def enter(self, weights: HyperConnectionWeights, norm: Norm) -> torch.Tensor:
        """Normalised input of the next sub-layer, (T, M)."""
        k = self._kernels
        if self._pending_tm is not None and self._mix is not None:
            self._x_tcm, u_tm, self._mix = k.hc_seam(
                self._pending_tm, self._x_tcm, self._mix, weights, norm
            )
            self._pending_tm = None
        else:
            u_tm, self._mix = k.hc_pre(self._x_tcm, self._pre_tc, weights, norm)
        return u_tm

    def leave(self, y_tm: torch.Tensor) -> None:
        """The sub-layer entered last gives `y_tm`; it is written when the streams are next used."""
        assert self._mix is not None, "a sub-layer must enter before it leaves"
        self._pending_tm = y_tm
        self._pre_tc = self._mix.pre_tc

    def settled(self) -> torch.Tensor:
        """The streams with every write done, (T, C, M)."""
        if self._pending_tm is not None and self._mix is not None:
            self._x_tcm = self._kernels.hc_post(self._pending_tm, self._x_tcm, self._mix)
            self._pending_tm = None
        return self._x_tcm

    def replace(self, x_tcm: torch.Tensor) -> None:
        """Set the streams (Engram writes between sub-layers)."""
        assert self._pending_tm is None, "settle the streams before replacing them"
        self._x_tcm = x_tcm

    def keep_rows(self, keep: torch.Tensor) -> None:
        """Drop all rows but `keep` (bounded replay), after a sub-layer entered and before it
        leaves.
        """
        assert self._pending_tm is None, "rows are dropped inside a sub-layer"
        assert self._mix is not None, "rows are dropped inside a sub-layer"
        self._x_tcm = self._x_tcm[keep]
        mix = self._mix
        self._mix = Mix(mix.pre_tc[keep], mix.post_tc[keep], mix.comb_tcc[keep])

    def output(self) -> torch.Tensor:
        """The streams mixed by the last sub-layer's pre-mix, (T, M); docs/model.md 2.3 end."""
        return self._kernels.mix_streams(self.settled(), self._pre_tc)
