"""The published checkpoint: finding it, checking it, reading it tensor by tensor, writing one."""

from .formats import StoredTensor, dequantize
from .mapped_tensor import MappedTensor
from .reader import Checkpoint
from .resolve import DEFAULT_MODEL, choose_model, resolve_model
from .schema import TensorSpec, expected_tensors
from .synth import synthesize

__all__ = [
    "DEFAULT_MODEL",
    "Checkpoint",
    "MappedTensor",
    "StoredTensor",
    "TensorSpec",
    "choose_model",
    "dequantize",
    "expected_tensors",
    "resolve_model",
    "synthesize",
]
