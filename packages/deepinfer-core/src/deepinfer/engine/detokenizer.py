"""Token ids to text, one token at a time, exactly as decoding all of them at once would give.

A tokenizer's decoder decides how much one token has to do with its neighbours:

* byte-level (the published family): the text is the tokens' bytes, joined and read as UTF-8. Every
  token has bytes of its own, looked up in a table; nothing is decoded twice.
* decoders that look at the token in front alone (spaces that only the first token loses, suffixes,
  runs of byte tokens): a short window of tokens is decoded, the text of its settled part taken off.
* decoders that rewrite joined text: nothing is certain before the end, all text comes from `flush`.
"""

from __future__ import annotations

import codecs
import functools
import json
from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepinfer.tokenizer import Tokenizer

__all__ = ["Detokenizer", "detokenizer"]

_REPLACEMENT = "\ufffd"
_PER_TOKEN = {"BPEDecoder", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
"""Decoders whose result for a token depends on that token and on which one is in front."""


class Detokenizer(Protocol):
    """The text of one growing list of tokens."""

    num_tokens: int
    """Tokens pushed."""
    num_needed_tokens: int
    """The first tokens without which the text given out would be shorter. Needs `tracks`."""

    def push(self, token_id: int) -> str:
        """Take a token; the text that is now certain and was not before."""
        ...

    def flush(self) -> str:
        """The rest of the text, as no token follows; bytes that are no character are U+FFFD."""
        ...

    def tokens_for(self, text: str) -> int:
        """Length of the shortest run of first tokens whose text begins with `text`.

        Args:
            text: a beginning of the text given out. Needs `tracks`.
        """
        ...


def detokenizer(
    tokenizer: Tokenizer, *, skip_special_tokens: bool = True, tracks: bool = False
) -> Detokenizer:
    """A new detokenizer of the kind that the tokenizer needs.

    Args:
        tokenizer: whose `decode` defines the text.
        skip_special_tokens: whether special tokens give no text.
        tracks: keep where each token ends, for `tokens_for` (8 bytes a token).
    """
    table = _table(tokenizer, skip_special_tokens)
    if table.kind == "bytes":
        return _ByteDetokenizer(table, tracks)
    return _WindowDetokenizer(table, tracks)


class _ByteDetokenizer:
    """Text is the tokens' bytes, joined."""

    def __init__(self, table: _Table, tracks: bool) -> None:
        self.num_tokens = self.num_needed_tokens = 0
        self._table = table
        self._pending = b""  # the beginning of a character, at most 3 bytes
        self._num_chars = 0
        # per token 2 x characters settled, + 1 with bytes pending: they would read as one U+FFFD
        self._ends: array[int] | None = array("q") if tracks else None

    def push(self, token_id: int) -> str:
        self.num_tokens += 1
        piece = self._table[token_id]
        # a piece is bytes where they are no text by themselves
        text = self._joined(piece) if self._pending or isinstance(piece, bytes) else piece
        if self._ends is not None:
            self._num_chars += len(text)
            self._ends.append(2 * self._num_chars + (self._pending != b""))
            if text:  # a last U+FFFD may be there since bytes of an earlier token
                is_bad = text[-1] == _REPLACEMENT
                self.num_needed_tokens = (
                    self._needed(self._num_chars) if is_bad else len(self._ends)
                )
        return text

    def _joined(self, piece: str | bytes) -> str:
        data = self._pending + (piece if isinstance(piece, bytes) else piece.encode())
        text, used = codecs.utf_8_decode(data, "replace", False)
        left = data[used:]
        tail = left.decode("utf-8", "replace")
        if len(tail) > 1:
            # the first bytes of a surrogate: Python waits for the last, but no byte makes it valid
            text, left = text + tail, b""
        self._pending = left
        return text

    def flush(self) -> str:
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return text

    def tokens_for(self, text: str) -> int:
        assert self._ends is not None, "made without `tracks`"
        if text.endswith(_REPLACEMENT):
            return self._needed(len(text))
        return bisect_left(self._ends, 2 * len(text)) + 1 if text else 0

    def _needed(self, num_chars: int) -> int:
        """Tokens until there are so many characters, the last one U+FFFD or bytes read as it."""
        assert self._ends is not None, "made without `tracks`"
        return bisect_left(self._ends, 2 * num_chars - 1) + 1


class _WindowDetokenizer:
    """Decodes the last settled tokens together with the new ones, and takes off their text.

    Tokens settle in groups: alone, or as a run of byte tokens with the token that ends it (one bad
    byte turns its whole run into U+FFFD, so that none of it is certain earlier).
    """

    def __init__(self, table: _Table, tracks: bool) -> None:
        self.num_tokens = self.num_needed_tokens = 0
        self._table = table
        # settled tokens, then those that are not; the settled ones are enough to have a text, so
        # that whatever a decoder takes off the beginning, it does not take it off a new token
        self._window: list[int] = []
        self._num_settled = 0
        self._settled_text = ""
        self._ids: list[int] | None = [] if tracks else None
        self._group_tokens = array("q")
        self._group_chars = array("q")

    def push(self, token_id: int) -> str:
        self.num_tokens += 1
        if self._ids is not None:
            self._ids.append(token_id)
        piece = self._table[token_id]
        if piece == "":
            return ""
        self._window.append(token_id)
        # bytes: a token that settles with a later one
        return "" if isinstance(piece, bytes) else self._settle()

    def flush(self) -> str:
        return self._settle() if len(self._window) > self._num_settled else ""

    def _settle(self) -> str:
        text = self._table.decode(self._window)
        new = text[len(self._settled_text) :]
        group = self._window[self._num_settled :]
        group_text = self._table.decode(group)
        if group_text:
            self._window, self._settled_text = group, group_text
        else:
            self._settled_text = text
        self._num_settled = len(self._window)
        if self._ids is not None:
            chars = self._group_chars[-1] if self._group_chars else 0
            self._group_chars.append(chars + len(new))
            self._group_tokens.append(self.num_tokens)
            if new:
                self.num_needed_tokens = self.num_tokens
        return new

    def tokens_for(self, text: str) -> int:
        assert self._ids is not None, "made without `tracks`"
        if not text:
            return 0
        group = bisect_left(self._group_chars, len(text))
        begin, end = self._begin(group), self._group_tokens[group]
        if self._table.kind == "whole" or end == begin + 1:
            return end
        wanted = text[self._group_chars[group - 1] if group else 0 :]
        first, context = begin, ""
        while first > 0 and not context:  # the group before may have no text of its own
            group -= 1
            first = self._begin(group)
            context = self._table.decode(self._ids[first:begin])
        for count in range(begin + 1, end):
            found = self._table.decode(self._ids[first:count])[len(context) :]
            if found.startswith(wanted):
                return count
        return end

    def _begin(self, group: int) -> int:
        return self._group_tokens[group - 1] if group else 0


class _Table(dict[int, "str | bytes"]):
    """What each token gives, filled as tokens are met.

    Kind `bytes`: its text, or its bytes where they are no text by themselves. Other kinds: "" for a
    token that gives nothing whatever stands beside it, bytes for one that settles with a later
    token, other text for the rest.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        added = tokenizer.raw.get_added_tokens_decoder()
        self._special = {token for token, each in added.items() if each.special}
        self._byte_values = _byte_values()
        self._steps = _decoder_steps(tokenizer)
        self.kind = _kind(self._steps)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips)

    def __missing__(self, token_id: int) -> str | bytes:
        piece = self._piece(token_id)
        self[token_id] = piece
        return piece

    def _piece(self, token_id: int) -> str | bytes:
        name = self._tokenizer.raw.id_to_token(token_id)
        if name is None or (self._skips and token_id in self._special):
            return ""
        if self.kind != "bytes":
            return name.encode() if self.kind == "whole" or self._is_byte(name) else name or " "
        data = name.encode()
        if all(char in self._byte_values for char in name):
            data = bytes(self._byte_values[char] for char in name)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    def _is_byte(self, name: str) -> bool:
        """Whether the decoder reads a token such as ``<0xE4>`` as that byte."""
        has_bytes = any(step["type"] == "ByteFallback" for step in self._steps)
        return has_bytes and len(name) == 6 and name.startswith("<0x") and name.endswith(">")


@functools.lru_cache(maxsize=8)
def _table(tokenizer: Tokenizer, skip_special_tokens: bool) -> _Table:
    """One table per tokenizer, shared by all outputs."""
    return _Table(tokenizer, skip_special_tokens)


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The library's decoders in the order they run; none: tokens are joined by spaces."""
    decoder = tokenizer.raw.decoder
    if decoder is None:
        return []
    found = json.loads(decoder.__getstate__())
    return _flattened(found)


def _flattened(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for each in decoder["decoders"] for step in _flattened(each)]


def _kind(steps: list[dict[str, Any]]) -> str:
    """`bytes`, `window` or `whole`, as the first lines of this module tell them apart."""
    kinds = [step["type"] for step in steps]
    if kinds[:1] == ["ByteLevel"] and set(kinds[1:]) <= {"Fuse"}:
        return "bytes"
    if not set(kinds) <= _PER_TOKEN:
        return "whole"
    behind = steps[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []
    return "window" if all(_keeps_tokens_apart(step) for step in behind) else "whole"


def _keeps_tokens_apart(step: dict[str, Any]) -> bool:
    """Whether a decoder that sees all text joined still treats each token's part by itself."""
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "")) == 1
    # taking off the end of the text so far would take off what a next token makes its middle
    return step["type"] == "Fuse" or bool(step["type"] == "Strip" and step["stop"] == 0)


def _byte_values() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for.

    Printable Latin-1 stands for itself, the other bytes for U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + at): byte for at, byte in enumerate(others)
    }
