"""From logits to tokens: parameters by state slot, random numbers, the sampler."""

from .sampler import Sampler, Samples
from .table import SamplingRows, SamplingTable

__all__ = ["Sampler", "Samples", "SamplingRows", "SamplingTable"]
