"""Prompts from the command line, from a file or from standard input.

Whatever is wrong with one prompt is kept with it as its error; only a source that cannot be read at
all stops the command.
"""

from __future__ import annotations

import codecs
import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_cli.exits import UsageError

__all__ = ["Prompt", "collect_prompts", "parse_lines"]

_KEYS = ("prompt", "prompt_token_ids", "id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt as it was given: a text, token ids, or the reason why it is neither."""

    text: str | None = None
    token_ids: list[int] | None = None
    id: str | int | None = None
    """The caller's own name for it, handed back with the result."""
    error: str | None = None

    def as_given(self) -> dict[str, Any]:
        """As `LLM.generate` takes it; for a prompt without error."""
        if self.token_ids is not None:
            return {"prompt_token_ids": self.token_ids}
        return {"prompt": self.text}

    def preview(self, width: int = 60) -> str:
        """A short printable form on one line."""
        text = self.text if self.text is not None else ""
        if self.token_ids is not None:
            text = "[" + ", ".join(str(number) for number in self.token_ids[:width]) + "]"
        words = " ".join(text[: 4 * width].split())
        shown = "".join(char if char.isprintable() else "?" for char in words)
        return shown if len(shown) <= width else shown[: width - 3] + "..."


def collect_prompts(
    texts: Sequence[str] | None, file: str | None, *, option: str = "--prompts-file"
) -> list[Prompt]:
    """All prompts in order: the given texts, then the file; standard input when neither is given.

    Args:
        texts: prompts of the command line.
        file: path of a prompts file, ``-`` for standard input.
        option: which names the file, for messages.

    Raises:
        UsageError: there is no source, a source cannot be read, or it holds no prompt.
    """
    prompts = [_from_text(text, "--prompt") for text in texts or ()]
    if file is not None and file != "-":
        data, name, is_jsonl = _read_file(file, option), file, file.lower().endswith(".jsonl")
    elif file == "-" or not prompts:
        data, name, is_jsonl = _read_stdin(is_asked_for=file == "-"), "standard input", False
    else:
        return prompts
    prompts += parse_lines(data, name=name, is_jsonl=is_jsonl)
    if not prompts:
        hint = ", or give --prompt TEXT" if option == "--prompts-file" else ""
        raise UsageError(f"{name} holds no prompt; write one per line{hint}")
    return prompts


def parse_lines(data: bytes, *, name: str, is_jsonl: bool) -> Iterator[Prompt]:
    """One prompt per line that is not blank.

    Args:
        data: the bytes of the source, UTF-8.
        name: the source, for messages.
        is_jsonl: whether every line is a JSON object; otherwise only those that begin with a brace.
    """
    lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        where = f"line {number} of {name}"
        try:
            line = raw.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as err:
            value = raw[err.start]
            yield Prompt(error=f"{where}: byte 0x{value:02x} at {err.start} is not valid UTF-8")
            continue
        if is_jsonl or line.lstrip().startswith("{"):
            yield _from_json(line, where)
        else:
            yield _from_text(line, where)


def _read_file(file: str, option: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as err:
        reason = err.strerror or str(err)
        raise UsageError(f"{option} {file!r} cannot be read: {reason}") from err


def _read_stdin(*, is_asked_for: bool) -> bytes:
    if sys.stdin is None or (sys.stdin.isatty() and not is_asked_for):
        raise UsageError(
            "no prompt given; use --prompt TEXT, --prompts-file FILE, or standard input"
        )
    return sys.stdin.buffer.read()


def _from_text(text: str, where: str, identifier: str | int | None = None) -> Prompt:
    error = None
    if not text:
        error = f"{where}: the prompt is empty"
    elif not _is_unicode(text):
        error = f"{where}: the prompt is not valid Unicode text"
        text = text.encode("utf-8", "replace").decode("utf-8")
    return Prompt(text=text, id=identifier, error=error)


def _from_json(line: str, where: str) -> Prompt:
    """Read ``{"prompt": text}`` or ``{"prompt_token_ids": [int, ...]}``, each with an ``id``."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as err:
        return Prompt(error=f"{where}: not valid JSON: {err}")
    if not isinstance(value, dict):
        return Prompt(error=f"{where}: expected a JSON object, found {type(value).__name__}")
    identifier = value.get("id")
    if isinstance(identifier, bool) or not isinstance(identifier, (str, int, type(None))):
        return Prompt(error=f"{where}: 'id' must be a string or an integer")
    error = _check_keys(value)
    if error is not None:
        return Prompt(id=identifier, error=f"{where}: {error}")
    if "prompt" in value:
        return _from_text(value["prompt"], where, identifier)
    if not value["prompt_token_ids"]:
        return Prompt(token_ids=[], id=identifier, error=f"{where}: the prompt is empty")
    return Prompt(token_ids=value["prompt_token_ids"], id=identifier)


def _check_keys(value: dict[str, Any]) -> str | None:
    """What is wrong with the object of a line, or None."""
    for key in value:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"allowed are {', '.join(_KEYS)}"
            return f"unknown key {key!r}; {hint}"
    if ("prompt" in value) == ("prompt_token_ids" in value):
        return "give exactly one of 'prompt' and 'prompt_token_ids'"
    if "prompt" in value:
        if isinstance(value["prompt"], str):
            return None
        return f"'prompt' must be a string, found {type(value['prompt']).__name__}"
    ids = value["prompt_token_ids"]
    if not isinstance(ids, list) or any(type(number) is not int for number in ids):
        return "'prompt_token_ids' must be a list of integers"
    return None


def _is_unicode(text: str) -> bool:
    """False for lone surrogates, which stand for undecodable bytes of the command line."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
