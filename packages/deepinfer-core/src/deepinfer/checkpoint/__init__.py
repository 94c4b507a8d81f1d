"""The published checkpoint: finding it, checking it, reading it tensor by tensor, writing one.

Names are imported on first use: finding a checkpoint and doing arithmetic on its tensors need no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .download import download_model
    from .formats import StoredTensor, dequantize
    from .mapped_tensor import MappedTensor
    from .reader import Checkpoint
    from .resolve import DEFAULT_MODEL, choose_model, resolve_model
    from .schema import TensorSpec, expected_tensors
    from .synth import synthesize
    from .verify import VerifyReport, verify_checkpoint

__all__ = [
    "DEFAULT_MODEL",
    "Checkpoint",
    "MappedTensor",
    "StoredTensor",
    "TensorSpec",
    "VerifyReport",
    "choose_model",
    "dequantize",
    "download_model",
    "expected_tensors",
    "resolve_model",
    "synthesize",
    "verify_checkpoint",
]

_HOME = {
    "DEFAULT_MODEL": "resolve",
    "Checkpoint": "reader",
    "MappedTensor": "mapped_tensor",
    "StoredTensor": "formats",
    "TensorSpec": "schema",
    "VerifyReport": "verify",
    "choose_model": "resolve",
    "dequantize": "formats",
    "download_model": "download",
    "expected_tensors": "schema",
    "resolve_model": "resolve",
    "synthesize": "synth",
    "verify_checkpoint": "verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deepinfer.checkpoint' has no attribute {name!r}")
    return getattr(import_module(f"deepinfer.checkpoint.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
