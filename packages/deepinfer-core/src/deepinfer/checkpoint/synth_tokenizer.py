"""A byte-level tokenizer of any vocabulary size, for checkpoints that are made up.

It has the published family's special tokens, all 256 bytes where there is room for them, and short
merges that shorten English a little. Any text comes back from its ids (with fewer than about 270
ids rare bytes are left out, and text that holds them loses them).

Source: docs/checkpoint.md 9.1, 9.2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from deepinfer.tokenizer import BOS_TEXT, EOS_TEXT, IMAGE_TEXT, PAD_TEXT

if TYPE_CHECKING:
    import tokenizers

    from deepinfer.config import ModelConfig

__all__ = ["build_tokenizer", "tokenizer_files"]

_SYSTEM_TEXT = "<\uff5cSystem\uff5c>"
_ROLES = (
    "<\uff5cUser\uff5c>",
    "<\uff5cAssistant\uff5c>",
    "<think>",
    "</think>",
    "\uff5cDSML\uff5c",
    "<\uff5clatest_reminder\uff5c>",
)
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
_ACCENTED = "\u00e9\u00e8\u00fc\u00f1\u00f6\u00e4\u00c9\u00dc"


def build_tokenizer(config: ModelConfig) -> tokenizers.Tokenizer:
    """A tokenizer with exactly `config.vocab_size` ids whose special ids are the config's."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    size = config.vocab_size
    special = _special_tokens(config)
    free = [token for token in range(size) if token not in special]
    alphabet = _byte_symbols()
    vocab = dict(zip(alphabet, free, strict=False))
    merges: list[tuple[str, str]] = []
    rest = free[len(vocab) :]
    for token, (left, right) in zip(rest, islice(_merges(alphabet), len(rest)), strict=False):
        vocab[left + right] = token
        merges.append((left, right))
    for at, token in enumerate(rest[len(merges) :]):
        special[token] = f"<\uff5cplace\u2581holder\u2581no\u2581{at}\uff5c>"
    model = models.BPE(
        vocab=vocab | {text: token for token, text in special.items()}, merges=merges
    )
    raw = tokenizers.Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(
        [
            tokenizers.AddedToken(special[token], special=True, normalized=False)
            for token in sorted(special)
        ]
    )
    return raw


def tokenizer_files(raw: tokenizers.Tokenizer) -> dict[str, str]:
    """The text of `tokenizer.json` and `tokenizer_config.json`."""
    settings = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS_TEXT,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS_TEXT,
        "legacy": True,
        "model_max_length": 1048576,
        "pad_token": EOS_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if raw.token_to_id(BOS_TEXT) is None:
        del settings["bos_token"]
    return {
        "tokenizer.json": raw.to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }


def _special_tokens(config: ModelConfig) -> dict[int, str]:
    """Spelling of each special id: those the config names, then the roles at the end."""
    wanted: list[tuple[int | None, str]] = [
        (config.eos_token_id, EOS_TEXT),
        (config.bos_token_id, BOS_TEXT),
        (config.pad_token_id, PAD_TEXT),
        (config.image_token_id, IMAGE_TEXT),
        (config.dspark.noise_token_id if config.dspark is not None else None, _SYSTEM_TEXT),
    ]
    special: dict[int, str] = {}
    for token, text in wanted:
        if token is not None:
            special.setdefault(token, text)
    roles = [*_ROLES] if _SYSTEM_TEXT in special.values() else [*_ROLES, _SYSTEM_TEXT]
    room = config.vocab_size - len(special) - 256
    token = config.vocab_size
    for text in reversed(roles[: max(0, room)]):
        token = next(each for each in range(token - 1, -1, -1) if each not in special)
        special[token] = text
    return special


def _byte_symbols() -> list[str]:
    """The printable stand-ins of the 256 bytes; common ones first, should the ids run out."""
    stand_ins = _stand_ins()
    common = [*range(0x20, 0x7F), 0x0A, 0x09, 0x0D]
    order = [*common, *(byte for byte in range(256) if byte not in common)]
    return [stand_ins[byte] for byte in order]


def _stand_ins() -> list[str]:
    """Printable character of each byte: itself, or the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], 0x100
    for byte in range(256):
        symbols.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return symbols


def _merges(alphabet: list[str]) -> Iterator[tuple[str, str]]:
    """Pairs to merge, all results different: accented letters, letter pairs, pairs of pairs."""
    stand_ins = _stand_ins()
    for char in _ACCENTED:
        first, second = (stand_ins[byte] for byte in char.encode("utf-8"))
        if first in alphabet and second in alphabet:
            yield first, second
    space = stand_ins[0x20]
    pairs = []
    for left, right in sorted(
        ((i, j) for i in range(len(_LETTERS)) for j in range(len(_LETTERS))),
        key=lambda at: (at[0] + at[1], at),
    ):
        if left == 0:
            pairs.append((space, _LETTERS[right]))
            pairs.append((space, _LETTERS[right].upper()))
        pairs.append((_LETTERS[left], _LETTERS[right]))
        pairs.append((_LETTERS[left].upper(), _LETTERS[right]))
    yield from pairs
    tails = [pair for pair in pairs if pair[0] != space and pair[0].islower()]
    for rank in range(len(pairs) + len(tails) - 1):
        for at in range(max(0, rank - len(tails) + 1), min(rank + 1, len(pairs))):
            head, tail = pairs[at], tails[rank - at]
            yield head[0] + head[1], tail[0] + tail[1]
