"""The ``deepinfer`` command: a thin front end over the public functions of ``deepinfer``."""

from __future__ import annotations

__all__: list[str] = []
