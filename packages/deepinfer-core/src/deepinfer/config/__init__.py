"""What a model is: `ModelConfig` from its `config.json`, and what follows from it by arithmetic."""

from .engram_tables import column_offsets, engram_multipliers, engram_primes
from .model_config import (
    CandidateConfig,
    DSparkConfig,
    EngramConfig,
    LayerPlan,
    ModelConfig,
    QuantizationConfig,
    VisionConfig,
    YarnConfig,
)
from .parse import parse_config, read_config

__all__ = [
    "CandidateConfig",
    "DSparkConfig",
    "EngramConfig",
    "LayerPlan",
    "ModelConfig",
    "QuantizationConfig",
    "VisionConfig",
    "YarnConfig",
    "column_offsets",
    "engram_multipliers",
    "engram_primes",
    "parse_config",
    "read_config",
]
