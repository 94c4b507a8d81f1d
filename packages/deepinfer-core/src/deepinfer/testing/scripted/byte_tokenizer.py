"""A tokenizer whose token ids are bytes."""

from __future__ import annotations

from deepinfer.tokenizer import BOS_TEXT, EOS_TEXT, IMAGE_TEXT, PAD_TEXT, Tokenizer

__all__ = ["byte_tokenizer"]

_SPECIAL = (BOS_TEXT, EOS_TEXT, PAD_TEXT, IMAGE_TEXT)


def byte_tokenizer(*, adds_bos: bool = True) -> Tokenizer:
    """A tokenizer of 260 ids: id n below 256 is byte n; then BOS, EOS, padding and image.

    Args:
        adds_bos: put BOS in front of a text, as the family's tokenizers do.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {symbol: byte for byte, symbol in enumerate(_stand_ins())}
    vocab |= {text: 256 + at for at, text in enumerate(_SPECIAL)}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in _SPECIAL]
    )
    return Tokenizer(raw, bos_token_id=256, eos_token_id=257, pad_token_id=258, adds_bos=adds_bos)


def _stand_ins() -> list[str]:
    """The character that a byte-level tokenizer writes for each byte: itself where it is printable,
    else the next one from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], 0x100
    for byte in range(256):
        symbols.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return symbols
