"""The errors that this package raises for what a caller passed in."""

from __future__ import annotations

__all__ = ["BalanceError"]


class BalanceError(ValueError):
    """Loads or sizes that no placement can be made from; the message says what is allowed."""
