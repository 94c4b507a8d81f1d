"""The geometry that a scripted model has when none is given."""

from __future__ import annotations

from deepinfer.checkpoint.synth_configs import named_config
from deepinfer.config.fields import is_integer, shown
from deepinfer.config.model_config import ModelConfig
from deepinfer.errors import ConfigError
from deepinfer.tokenizer import Tokenizer

__all__ = ["small_config"]


def small_config(
    vocab_size: int | None, context: int, sliding_window: int, tokenizer: Tokenizer | None
) -> ModelConfig:
    """Layers of every kind, Engram included, and no drafts.

    Args:
        vocab_size: None: as many ids as the tokenizer has, or 256.
        context: longest sequence in tokens.
        sliding_window: window in tokens.
        tokenizer: its special ids are the config's; without one they are the last ids.

    Raises:
        ConfigError: a number that is out of range.
    """
    known = tokenizer.vocab_size if tokenizer is not None else 0
    size = (known or 256) if vocab_size is None else vocab_size
    if not is_integer(size) or size < max(8, known):
        raise ConfigError(f"vocab_size={shown(size)}: give at least {max(8, known)}")
    bos, eos, pad = size - 4, size - 3, size - 2
    if tokenizer is not None:
        given = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        bos, eos, pad = (
            default if own is None else own
            for own, default in zip(given, (bos, eos, pad), strict=True)
        )
    values = named_config("tiny")
    values |= {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    values["image_token_id"] = size - 1
    text = values["text_config"]
    text["rope_scaling"]["original_max_position_embeddings"] = max(1, context // 16)
    text |= {
        "vocab_size": size,
        "max_position_embeddings": context,
        "sliding_window": sliding_window,
        "compress_ratios": text["compress_ratios"][: text["num_hidden_layers"]],
        "num_nextn_predict_layers": 0,
        "engram_pad_token_id": pad,
        "engram_compressed_vocab_size": size,
    }
    return ModelConfig.from_dict(values)
