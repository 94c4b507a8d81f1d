"""What the tests of batch files share: files of lines, a scripted engine, results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.core.engine.scripted import llm_of

from deepinfer.batch import BatchFile, BatchSummary, run_batch
from deepinfer.llm import LLM
from deepinfer.sampling_params import SamplingParams

SAMPLED = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
"""Answers that depend on the seed of their line."""


def completion(custom_id: str, prompt: object = "ab", **body: Any) -> dict[str, Any]:
    """A request of the OpenAI form."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, **body},
    }


def chat(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    """A conversation of one message, of the OpenAI form."""
    messages = [{"role": "user", "content": text}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": messages, **body},
    }


def write_lines(path: Path, lines: list[Any]) -> Path:
    """A file of lines: bytes as they are, anything else as JSON."""
    data = [x if isinstance(x, bytes) else json.dumps(x).encode("utf-8") for x in lines]
    path.write_bytes(b"".join(line + b"\n" for line in data))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The results in a file, which ends with a whole line."""
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def comparable(path: Path) -> list[str]:
    """The results in a file without the time, and the luck of the prefix cache; sorted."""
    rows = read_rows(path)
    for row in rows:
        if row["response"] is not None:
            del row["response"]["body"]["created"]
            del row["response"]["body"]["usage"]["prompt_tokens_details"]
    return sorted(json.dumps(row) for row in rows)


def answer(
    source: Path,
    output: Path,
    params: SamplingParams = SAMPLED,
    llm: LLM | None = None,
    **more: Any,
) -> BatchSummary:
    """Run a batch over files."""
    files = {key: more.pop(key) for key in ("errors", "overwrite") if key in more}
    with BatchFile(source, output, **files) as batch, llm or llm_of() as engine:
        return run_batch(engine, batch, params, **more)


def errors_of(rows: list[dict[str, Any]]) -> dict[Any, str]:
    """Messages of the lines that failed, by id."""
    return {row["custom_id"]: row["error"]["message"] for row in rows if row["error"] is not None}
