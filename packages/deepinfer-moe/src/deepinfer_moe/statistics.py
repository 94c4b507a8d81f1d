"""Count the tokens of every expert, each step: text and image apart, idle rows left out.

Counting is one integer scatter per layer on the device of the ids and never waits for it; the same
ids give the same counts in any order.

Shape letters in this module: T = rows of a step, K = experts per token, L = layers, E = logical
experts, W = steps kept, M = 2 kinds of token (0 text, 1 image).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from deepinfer_moe.errors import BalanceError

if TYPE_CHECKING:
    import torch

__all__ = ["ExpertCounter"]


class ExpertCounter:
    """Counts of a window of steps and since the start, for the layers of one model.

    Call ``record`` for each layer of a step, then ``end_step`` once. Ids are those of logical
    experts; where the router gives slots, map them back through ``phy2log`` first.
    """

    def __init__(
        self, num_layers: int, num_experts: int, window_steps: int, device: str = "cpu"
    ) -> None:
        """Allocate 2 * L * (E + 1) * (4 * W + 12) bytes on the device, once.

        Args:
            num_layers, num_experts: L and E.
            window_steps: steps W that are kept one by one.
            device: where the ids are.

        Raises:
            BalanceError: a size below 1.
        """
        import torch

        sizes = {
            "num_layers": num_layers,
            "num_experts": num_experts,
            "window_steps": window_steps,
        }
        for name, value in sizes.items():
            if value < 1:
                raise BalanceError(f"{name}={value}; it must be at least 1")
        self.num_experts = num_experts
        self.window_steps = window_steps
        self.num_steps = 0
        """Steps ended since the start or the last ``reset``."""
        shape = (num_layers, 2, num_experts + 1)  # the last column takes what is not counted
        self._step_lme = torch.zeros(shape, dtype=torch.int32, device=device)
        self._total_lme = torch.zeros(shape, dtype=torch.int64, device=device)
        self._ring_wlme = torch.zeros((window_steps, *shape), dtype=torch.int32, device=device)

    def record(
        self,
        layer: int,
        ids_tk: torch.Tensor,
        is_valid_t: torch.Tensor | None = None,
        is_image_t: torch.Tensor | None = None,
    ) -> None:
        """Add the rows of one layer; may be called several times a step.

        Args:
            layer: index of the layer.
            ids_tk: logical experts of each row, (T, K), any integer dtype; negative is not counted.
            is_valid_t: false for rows that stand for no token (padding, idle ranks), (T,) bool.
            is_image_t: true for image tokens, (T,) bool; all are text when None.
        """
        import torch

        counted_tk = ids_tk >= 0
        if is_valid_t is not None:
            counted_tk = counted_tk & is_valid_t[:, None]
        column_tk = torch.where(counted_tk, ids_tk, self.num_experts).to(torch.int64)
        if is_image_t is not None:
            column_tk = column_tk + is_image_t[:, None].to(torch.int64) * (self.num_experts + 1)
        ones = torch.ones((1,), dtype=torch.int32, device=column_tk.device)
        counts = self._step_lme[layer].view(-1)
        counts.scatter_add_(0, column_tk.reshape(-1), ones.expand(column_tk.numel()))

    def end_step(self) -> None:
        """Close the step: it enters the window, in place of the oldest, and the totals."""
        self._ring_wlme[self.num_steps % self.window_steps].copy_(self._step_lme)
        self._total_lme += self._step_lme
        self._step_lme.zero_()
        self.num_steps += 1

    def reset(self) -> None:
        """Forget all steps."""
        for counts in (self._step_lme, self._total_lme, self._ring_wlme):
            counts.zero_()
        self.num_steps = 0

    def window(self, kind: str = "all") -> npt.NDArray[np.int64]:
        """Counts of the last steps, oldest first: (min(steps, W), L, E). Waits for the device.

        Args:
            kind: "text", "image" or "all".
        """
        kept = min(self.num_steps, self.window_steps)
        first = self.num_steps - kept
        rows = [step % self.window_steps for step in range(first, self.num_steps)]
        return _of_kind(self._ring_wlme.cpu().numpy()[rows].astype(np.int64), kind)

    def totals(self, kind: str = "all") -> npt.NDArray[np.int64]:
        """Counts since the start: (L, E). Waits for the device."""
        return _of_kind(self._total_lme.cpu().numpy(), kind)

    def dump(self, path: str | Path) -> None:
        """Write the window and totals as a ``.npz`` file that ``deepinfer moe`` reads."""
        with Path(path).open("wb") as file:
            np.savez_compressed(
                file,
                text=self.window("text"),
                image=self.window("image"),
                total_text=self.totals("text"),
                total_image=self.totals("image"),
                num_steps=np.int64(self.num_steps),
            )


def _of_kind(counts: npt.NDArray[np.int64], kind: str) -> npt.NDArray[np.int64]:
    """Take one kind of token, (..., M, E + 1) -> (..., E)."""
    kept = counts[..., :-1]
    if kind == "all":
        both: npt.NDArray[np.int64] = kept[..., 0, :] + kept[..., 1, :]
        return both
    if kind not in ("text", "image"):
        raise BalanceError(f"kind of token {kind!r} is unknown; there are text, image and all")
    return kept[..., ("text", "image").index(kind), :].copy()
