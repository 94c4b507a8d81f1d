"""Running requests on a model: queue, scheduler, loop, text and statistics (docs/engine.md)."""

from deepinfer.engine.core import Engine
from deepinfer.engine.driver import Driver

__all__ = ["Driver", "Engine"]
