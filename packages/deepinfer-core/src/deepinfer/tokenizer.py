"""Text to token ids and back, and the compressed ids that Engram hashes.

The work is done by the `tokenizers` library on the checkpoint's own `tokenizer.json`. What is ours
is the policy around it: when a prompt gets a BOS token, which ids are special, and the checks of
both against `config.json`.

Source: docs/checkpoint.md 9; docs/model.md 5.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from deepinfer.config.fields import shown
from deepinfer.config.untrusted import parse_json, read_bounded, shown_error
from deepinfer.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    import tokenizers

    from deepinfer.config import ModelConfig

__all__ = [
    "BOS_TEXT",
    "EOS_TEXT",
    "IMAGE_TEXT",
    "PAD_TEXT",
    "Tokenizer",
    "compressed_token_map",
    "engram_token_map",
]

BOS_TEXT = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
EOS_TEXT = "<\uff5cend\u2581of\u2581sentence\uff5c>"
PAD_TEXT = "<\uff5c\u2581pad\u2581\uff5c>"
IMAGE_TEXT = "<\uff5cdeepseek_image\uff5c>"

_FILE, _CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
_MAX_FILE_BYTES = 2**28
_REPLACEMENT = "\ufffd"
_LONE_SPACE = "\ue000"


class Tokenizer:
    """The tokenizer of one checkpoint. Made by `Tokenizer.from_folder`.

    Attributes:
        raw: the library's tokenizer, as the file defines it.
        bos_token_id, eos_token_id, pad_token_id: ids, or None where there is none.
    """

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_id: int | None,
        pad_token_id: int | None,
        adds_bos: bool = True,
    ) -> None:
        self.raw = raw
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self._adds_bos = adds_bos and bos_token_id is not None

    @classmethod
    def from_folder(cls, folder: str | Path, config: ModelConfig | None = None) -> Tokenizer:
        """The tokenizer of a checkpoint folder.

        Special tokens are found by their spelling (``tokenizer_config.json``, else the family's).
        Plain prompts get BOS whatever ``add_bos_token`` says, as the published engine does, unless
        the config's `tokenizer_compatibility` is ``native``.

        Args:
            folder: with ``tokenizer.json`` and, if there is one, ``tokenizer_config.json``.
            config: of the checkpoint; its token ids must agree with the tokenizer's.

        Raises:
            CheckpointError: a file is missing or unreadable, or disagrees with the config.
        """
        folder = Path(folder)
        raw = _load(folder)
        settings = _settings(folder)
        problems: list[str] = []
        bos = _special_id(raw, settings, "bos_token", BOS_TEXT, problems)
        eos = _special_id(raw, settings, "eos_token", EOS_TEXT, problems)
        pad = raw.token_to_id(PAD_TEXT)
        if pad is None:
            pad = _special_id(raw, settings, "pad_token", EOS_TEXT, problems)
        native = config is not None and config.tokenizer_compatibility == "native"
        adds_bos = settings.get("add_bos_token") is True if native else True
        if config is not None:
            # a native tokenizer may name another padding token; no forward reads it
            problems += _differences(raw, config, (bos, eos, None if native else pad))
        if problems:
            raise CheckpointError(problems, where=str(folder))
        return cls(raw, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad, adds_bos=adds_bos)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return max(self.raw.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """The ids of a text; spellings of special tokens in it become those tokens.

        Args:
            text: the prompt.
            add_bos: put BOS in front; None means as the checkpoint's policy says. A text that
                begins with BOS itself never gets a second one.

        Raises:
            RequestError: the tokenizer has no token for a part of it.
        """
        try:
            ids = list(self.raw.encode(text, add_special_tokens=False).ids)
        except BaseException as err:
            raise _translated(err, "the prompt cannot be encoded") from err
        wanted = self._adds_bos if add_bos is None else add_bos
        if wanted and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of some ids; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: token ids; those the tokenizer does not know give nothing.
            skip_special_tokens: leave out tokens that the file marks special, such as EOS.
        """
        try:
            return str(self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens))
        except BaseException as err:
            raise _translated(err, "the tokens cannot be decoded") from err


def compressed_token_map(
    tokenizer: Tokenizer, vocab_size: int | None = None
) -> npt.NDArray[np.int64]:
    """For each id its compressed id: tokens that differ in case, accents or spacing share one.

    Args:
        tokenizer: of the checkpoint.
        vocab_size: length of the map; the tokenizer's own by default. Ids that the tokenizer does
            not know count as empty text.

    Returns:
        int64 (vocab_size,), numbered by first appearance.

    Source: docs/model.md 5.1.
    """
    size = tokenizer.vocab_size if vocab_size is None else vocab_size
    normalizer = _normalizer()
    texts = tokenizer.raw.decode_batch(
        [[token] for token in range(size)], skip_special_tokens=False
    )
    numbers: dict[str, int] = {}
    mapped = np.empty(size, dtype=np.int64)
    for token, text in enumerate(texts):
        if _REPLACEMENT in text:
            # part of a multi-byte character, which only the piece itself tells apart
            key = tokenizer.raw.id_to_token(token) or text
        else:
            key = normalizer.normalize_str(text) or text
        mapped[token] = numbers.setdefault(key, len(numbers))
    return mapped


def engram_token_map(tokenizer: Tokenizer, config: ModelConfig) -> npt.NDArray[np.int64]:
    """The map of `compressed_token_map` for a model with Engram, checked against its config.

    Raises:
        CheckpointError: the number of compressed ids differs from `engram_compressed_vocab_size`;
            every hash depends on it.
    """
    mapped = compressed_token_map(tokenizer, config.vocab_size)
    found = int(mapped.max()) + 1
    expected = config.engram.compressed_vocab_size if config.engram is not None else found
    if found != expected:
        raise CheckpointError(
            f"{_FILE}: gives {found} compressed token ids, the config's "
            f"engram_compressed_vocab_size is {expected}: it is not this model's tokenizer"
        )
    return mapped


def _normalizer() -> tokenizers.normalizers.Sequence:
    """Compatibility forms, no accents, lower case, single spaces, trimmed; a lone space stays."""
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            # trimming would empty a string of one space: it steps aside as a private character
            normalizers.Replace(Regex(r"\A \z"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def _load(folder: Path) -> tokenizers.Tokenizer:
    import tokenizers

    where = str(folder)
    try:
        text = read_bounded(folder / _FILE, _MAX_FILE_BYTES).decode("utf-8")
    except FileNotFoundError as err:
        raise CheckpointError(
            f"file {_FILE}: missing; without it only token ids can be given, not text", where=where
        ) from err
    except (OSError, ValueError) as err:
        raise CheckpointError(f"file {_FILE}: cannot be read ({err})", where=where) from err
    try:
        raw = tokenizers.Tokenizer.from_str(text)
    # the library raises bare Exception for a malformed file, and its panics derive from
    # BaseException alone
    except BaseException as err:
        if not isinstance(err, Exception) and type(err).__name__ != "PanicException":
            raise
        told = f"file {_FILE}: no valid tokenizer ({shown_error(err)})"
        raise CheckpointError(told, where=where) from err
    raw.no_truncation()  # settings of a training run; a prompt is taken as it is
    raw.no_padding()
    if getattr(raw.model, "dropout", None):
        raise CheckpointError(f"file {_FILE}: has a BPE dropout, ids would be random", where=where)
    return raw


def _translated(err: BaseException, what: str) -> BaseException:
    """An error of the tokenizers library as one of ours; anything else stays as it is.

    The library raises bare Exception, and its panics derive from BaseException alone.
    """
    if isinstance(err, Exception) or type(err).__name__ == "PanicException":
        return RequestError(f"{what}: {shown_error(err)}")
    return err


def _settings(folder: Path) -> dict[str, object]:
    """The keys of `tokenizer_config.json`; empty when there is no such file."""
    path = folder / _CONFIG_FILE
    try:
        values = parse_json(read_bounded(path, _MAX_FILE_BYTES), brackets_per_byte=0.25)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as err:
        raise CheckpointError(f"file {_CONFIG_FILE}: no usable JSON ({err})") from err
    if not isinstance(values, dict):
        raise CheckpointError(f"file {_CONFIG_FILE}: no JSON object")
    return values


def _special_id(
    raw: tokenizers.Tokenizer,
    settings: dict[str, object],
    key: str,
    spelling: str,
    problems: list[str],
) -> int | None:
    """The id of a special token, by the spelling that the settings give or the family's own."""
    value = settings.get(key)
    if isinstance(value, dict):  # the long form {"content": ..., "special": ...}
        value = value.get("content")
    if value is None:
        found = raw.token_to_id(spelling)
        return int(found) if found is not None else None
    found = raw.token_to_id(value) if isinstance(value, str) else None
    if found is None:
        problems.append(f"file {_CONFIG_FILE}: {key} {shown(value)} is no token of {_FILE}")
        return None
    return int(found)


def _differences(
    raw: tokenizers.Tokenizer, config: ModelConfig, special: tuple[int | None, ...]
) -> list[str]:
    """Lines for special ids and sizes on which tokenizer and config disagree."""
    problems = []
    expected = (config.bos_token_id, config.eos_token_id, config.pad_token_id)
    for name, wanted, found in zip(("bos", "eos", "pad"), expected, special, strict=True):
        if wanted is not None and found is not None and found != wanted:
            problems.append(
                f"{name}_token_id: {wanted} in config.json, {found} in the tokenizer's files"
            )
    image = raw.token_to_id(IMAGE_TEXT)
    if config.vision is not None and image != config.image_token_id:
        problems.append(
            f"image_token_id: {config.image_token_id} in config.json, {image} in {_FILE}"
        )
    highest = max(raw.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= config.vocab_size:
        problems.append(
            f"vocab_size: {config.vocab_size} in config.json, but {_FILE} has token id {highest}"
        )
    return problems
