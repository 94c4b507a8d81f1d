"""Results as text for people, or as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_cli.prompts import Prompt
from deepinfer_cli.streams import stdout_is_utf8, write_stderr, write_stdout

if TYPE_CHECKING:
    from deepinfer.outputs import RequestOutput, RunSummary

__all__ = ["result_to_dict", "write_json", "write_plain"]


def write_plain(
    prompts: Sequence[Prompt], results: Sequence[RequestOutput], *, has_tokenizer: bool
) -> None:
    """Write the text alone for one prompt, and a header line before each of several.

    Without a tokenizer the generated ids stand for the text. A failed prompt among several has its
    error in place of the text; a failed single prompt leaves stdout empty.
    """
    if len(results) == 1 and results[0].error is not None:
        write_stderr(f"error: {results[0].error}\n")
        return
    for prompt, result in zip(prompts, results, strict=True):
        body = result.text if has_tokenizer else " ".join(str(i) for i in result.token_ids)
        if result.error is not None:
            body = f"error: {result.error}"
        if len(results) > 1:
            mark = " (aborted)" if result.finish_reason == "abort" else ""
            header = f"==> {result.index + 1}/{len(results)} {prompt.preview()}".rstrip()
            body = f"{header}{mark}\n{body}"
        write_stdout(body + "\n")


def write_json(
    prompts: Sequence[Prompt], results: Sequence[RequestOutput], summary: RunSummary
) -> None:
    """Write one JSON object: the results in input order, and the summary."""
    rows = [result_to_dict(*pair) for pair in zip(prompts, results, strict=True)]
    document = {"results": rows, "summary": summary.to_dict()}
    write_stdout(json.dumps(document, ensure_ascii=not stdout_is_utf8()) + "\n")


def result_to_dict(prompt: Prompt, result: RequestOutput) -> dict[str, Any]:
    """One result under stable keys; times in seconds, null for a stage never reached."""
    return {
        "index": result.index,
        "id": prompt.id,
        "prompt_tokens": result.num_prompt_tokens,
        "output_tokens": result.num_output_tokens,
        "token_ids": list(result.token_ids),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "error": result.error,
        "queue_s": result.stats.queue_s,
        "ttft_s": result.stats.ttft_s,
        "decode_s": result.stats.decode_s,
    }
