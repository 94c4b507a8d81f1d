"""`Bar`: the progress of a run on stderr."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from deepinfer.outputs import Progress

__all__ = ["Bar"]


class Bar:
    """A progress bar over requests, with input and output tokens per second and the time left.

    Args:
        num_requests: how many there are.
        enabled: False draws nothing.
    """

    def __init__(self, num_requests: int, *, enabled: bool = True) -> None:
        self._bar: Any = None
        if enabled:
            from tqdm import tqdm

            self._bar = tqdm(
                total=num_requests,
                unit="request",
                miniters=0,  # a step that finishes no request still moves the rates
                dynamic_ncols=True,
            )

    def update(self, progress: Progress) -> None:
        """Show how far the run has come."""
        if self._bar is None:
            return
        seconds = self._bar.format_dict["elapsed"] or 1e-9
        self._bar.set_postfix_str(
            f"in {progress.prompt_tokens / seconds:.0f} tokens/s, "
            f"out {progress.output_tokens / seconds:.0f} tokens/s",
            refresh=False,
        )
        self._bar.update(progress.num_finished - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
