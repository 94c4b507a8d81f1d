"""DeepInfer: an inference engine for the DeepSeek-V4.1-Flash family.

Names are imported on first use, so that a front end can read the version or show help without
paying for torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.config import ModelConfig
    from deepinfer.engine.loop import generate
    from deepinfer.errors import (
        BackendError,
        CheckpointError,
        ConfigError,
        DeepInferError,
        RequestError,
    )
    from deepinfer.model.load import load_model
    from deepinfer.model.model import Model
    from deepinfer.outputs import CompletionOutput, GenerationRequest, RequestOutput

__all__ = [
    "BackendError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DeepInferError",
    "GenerationRequest",
    "Model",
    "ModelConfig",
    "RequestError",
    "RequestOutput",
    "__version__",
    "generate",
    "load_model",
]

try:
    __version__ = version("deepinfer-core")
except PackageNotFoundError:  # a source tree on the path that was never installed
    __version__ = "0+unknown"

_HOME = {
    "BackendError": "deepinfer.errors",
    "CheckpointError": "deepinfer.errors",
    "CompletionOutput": "deepinfer.outputs",
    "ConfigError": "deepinfer.errors",
    "DeepInferError": "deepinfer.errors",
    "GenerationRequest": "deepinfer.outputs",
    "Model": "deepinfer.model.model",
    "ModelConfig": "deepinfer.config",
    "RequestError": "deepinfer.errors",
    "RequestOutput": "deepinfer.outputs",
    "generate": "deepinfer.engine.loop",
    "load_model": "deepinfer.model.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
