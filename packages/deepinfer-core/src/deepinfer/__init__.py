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
    from deepinfer.config.engine_config import EngineConfig
    from deepinfer.errors import (
        BackendError,
        CheckpointError,
        ConfigError,
        DeepInferError,
        EngineError,
        RequestError,
    )
    from deepinfer.llm import LLM
    from deepinfer.model.load import load_model
    from deepinfer.model.model import Model
    from deepinfer.outputs import (
        CompletionOutput,
        RequestDelta,
        RequestOutput,
    )
    from deepinfer.sampling_params import SamplingParams

__all__ = [
    "BackendError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DeepInferError",
    "EngineConfig",
    "EngineError",
    "LLM",
    "Model",
    "ModelConfig",
    "RequestDelta",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
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
    "EngineConfig": "deepinfer.config.engine_config",
    "EngineError": "deepinfer.errors",
    "LLM": "deepinfer.llm",
    "Model": "deepinfer.model.model",
    "ModelConfig": "deepinfer.config",
    "RequestDelta": "deepinfer.outputs",
    "RequestError": "deepinfer.errors",
    "RequestOutput": "deepinfer.outputs",
    "SamplingParams": "deepinfer.sampling_params",
    "load_model": "deepinfer.model.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
