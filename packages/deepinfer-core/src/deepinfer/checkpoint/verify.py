"""`verify_checkpoint`: everything that can be told of a download without computing.

Source: docs/checkpoint.md 6.2.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer.config import ModelConfig
from deepinfer.config.untrusted import shown_name
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.tokenizer import Tokenizer, engram_token_map

from .locate import INDEX_NAME
from .reader import Checkpoint

__all__ = ["VerifyReport", "verify_checkpoint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What was found in a checkpoint folder."""

    folder: str
    is_full: bool
    """Whether every byte was to be read."""
    problems: tuple[str, ...]
    """One line per fault, each naming the file or tensor; none means that it loads."""
    notes: tuple[str, ...]
    """What is odd and does no harm."""
    num_files: int
    """Safetensors files in the folder."""
    num_bytes: int
    """Their size."""
    num_tensors: int | None
    """Tensors in the files, scales counted; None when they could not be told."""
    num_bytes_read: int
    """Bytes of values that were read to look for NaN."""
    duration_s: float

    @property
    def is_sound(self) -> bool:
        return not self.problems

    @property
    def verdict(self) -> str:
        """The last line: what was checked and how it ended."""
        size = f"{self.num_files} files, {self.num_bytes / 1e9:.3f} GB"
        if self.problems:
            count = len(self.problems)
            return f"damaged: {self.folder}: {count} problem{'s' * (count > 1)} ({size})"
        what = "headers, sizes, names, shapes, types and scales are right"
        what += ", every byte was read" if self.is_full else "; --full reads every byte"
        return f"sound: {self.folder}: {self.num_tensors} tensors in {size}; {what}"

    def to_dict(self) -> dict[str, Any]:
        """Everything under stable keys."""
        values = asdict(self) | {"problems": list(self.problems), "notes": list(self.notes)}
        return {"is_sound": self.is_sound, "verdict": self.verdict, **values}


def verify_checkpoint(
    folder: str | Path,
    *,
    full: bool = False,
    ignore_unexpected: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check a checkpoint folder without computing anything.

    Args:
        folder: with ``config.json``, the files of the tensors and, if the model has Engram,
            ``tokenizer.json``.
        full: read every byte and look for NaN, too.
        ignore_unexpected: accept tensors that the config does not call for.
        on_progress: while every byte is read: bytes read so far, and bytes in all.

    Raises:
        CheckpointError: there is no such folder. Whatever is wrong inside is in the report.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError("no such folder", where=str(folder))
    start_s = time.perf_counter()
    problems: list[str] = []
    num_tensors, num_read = None, 0
    try:
        config = ModelConfig.from_folder(folder)
    except ConfigError as err:
        problems.append(str(err))
    else:
        try:
            with Checkpoint.open(folder, config, ignore_unexpected=ignore_unexpected) as checkpoint:
                num_tensors = checkpoint.num_tensors
                problems += _wrong_total(checkpoint)
                if full:
                    counter = _Counter(checkpoint.num_bytes, on_progress)
                    problems += checkpoint.scan(counter.add)
                    num_read = counter.done
        except CheckpointError as err:
            problems += err.problems
        problems += _tokenizer_faults(folder, config)
    files = sorted(folder.glob("*.safetensors"))
    notes = _leftovers(folder)
    if full and num_tensors is None:
        notes.append("values were not read: mend the faults first, then ask again")
    return VerifyReport(
        folder=str(folder),
        is_full=full,
        problems=tuple(problems),
        notes=tuple(notes),
        num_files=len(files),
        num_bytes=sum(file.stat().st_size for file in files if file.is_file()),
        num_tensors=num_tensors,
        num_bytes_read=num_read,
        duration_s=time.perf_counter() - start_s,
    )


class _Counter:
    """Adds up what was read and passes it on."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None) -> None:
        self.done = 0
        self._total = total
        self._on_progress = on_progress

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self._on_progress is not None:
            self._on_progress(self.done, self._total)


def _wrong_total(checkpoint: Checkpoint) -> list[str]:
    stated, found = checkpoint.stated_bytes, checkpoint.num_bytes
    if stated is None or stated == found:
        return []
    return [
        f"file {INDEX_NAME}: total_size is {stated}, the files hold {found} bytes of tensors; "
        "index and files are of different versions"
    ]


def _tokenizer_faults(folder: Path, config: ModelConfig) -> list[str]:
    """What is wrong with the tokenizer; a model without Engram may do without one."""
    if not (folder / "tokenizer.json").exists():
        if config.engram is None:
            return []
        return ["file tokenizer.json: missing; this model's Engram lookups depend on it"]
    try:
        tokenizer = Tokenizer.from_folder(folder, config)
        if config.engram is not None:
            engram_token_map(tokenizer, config)
    except CheckpointError as err:
        return err.problems
    return []


def _leftovers(folder: Path) -> list[str]:
    """Files that look like part of a checkpoint and that nothing reads."""
    index = folder / INDEX_NAME
    if not index.is_file():
        return []
    try:
        text = index.read_text("utf-8", "replace")
    except OSError:
        return []
    return [
        f"file {shown_name(file.name)}: not named by the index, never read"
        for file in sorted(folder.glob("*.safetensors"))
        if f'"{file.name}"' not in text
    ]
