"""What a model is and needs, what fits, and what runs on this machine; without loading weights."""

from deepinfer.config.machine import available_memory_bytes

from .budget import CacheFit, fit_cache
from .doctor import DoctorReport, Finding, examine
from .memory import require_memory, resident_bytes
from .model_report import ModelReport, describe_model
from .parameters import ParameterCounts, count_parameters
from .platforms import Platform, choose_platform, require_devices

__all__ = [
    "CacheFit",
    "DoctorReport",
    "Finding",
    "ModelReport",
    "ParameterCounts",
    "Platform",
    "available_memory_bytes",
    "choose_platform",
    "count_parameters",
    "describe_model",
    "examine",
    "fit_cache",
    "require_devices",
    "require_memory",
    "resident_bytes",
]
