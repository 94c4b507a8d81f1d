"""A model that says what a test wants; its public names are those of `deepinfer.testing`."""

from deepinfer.testing.scripted.byte_tokenizer import byte_tokenizer
from deepinfer.testing.scripted.model import ScriptedModel
from deepinfer.testing.scripted.records import CacheCorruption, ScriptedCache
from deepinfer.testing.scripted.scripts import Fault

__all__ = ["CacheCorruption", "Fault", "ScriptedCache", "ScriptedModel", "byte_tokenizer"]
