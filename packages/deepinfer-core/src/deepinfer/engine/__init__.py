"""Running requests on a model."""

from deepinfer.engine.loop import generate

__all__ = ["generate"]
