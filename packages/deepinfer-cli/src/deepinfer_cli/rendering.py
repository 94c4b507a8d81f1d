"""Results as text for people, or as one JSON object."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_cli.prompts import Prompt
from deepinfer_cli.streams import write_document, write_stderr, write_stdout

if TYPE_CHECKING:
    from deepinfer.outputs import CompletionOutput, RequestOutput, RunSummary

__all__ = ["result_to_dict", "write_failure", "write_json", "write_plain"]


def write_plain(
    prompts: Sequence[Prompt], results: Sequence[RequestOutput], *, has_tokenizer: bool
) -> None:
    """Write the text alone for one answer, and a header line before each of several.

    Without a tokenizer the generated ids stand for the text. A failed prompt among several has its
    error in place of the text; a failed single prompt leaves stdout empty.
    """
    if len(results) == 1 and results[0].error is not None:
        write_failure(results[0])
        return
    is_alone = sum(max(1, len(result.outputs)) for result in results) == 1
    for prompt, result in zip(prompts, results, strict=True):
        header = f"==> {result.index + 1}/{len(results)} "
        if result.error is not None:
            write_stdout(f"{header}{prompt.preview()}".rstrip() + f"\nerror: {result.error}\n")
            continue
        for answer in result.outputs:
            body = _text_of(answer, has_tokenizer=has_tokenizer)
            if not is_alone:
                which = f"answer {answer.index + 1} " if len(result.outputs) > 1 else ""
                mark = " (aborted)" if answer.finish_reason == "abort" else ""
                body = f"{header}{which}{prompt.preview()}".rstrip() + f"{mark}\n{body}"
            write_stdout(body + "\n")


def write_failure(result: RequestOutput) -> None:
    """Tell why a single prompt failed, where no results go."""
    write_stderr(f"error: {result.error}\n")


def _text_of(answer: CompletionOutput, *, has_tokenizer: bool) -> str:
    return answer.text if has_tokenizer else " ".join(str(token) for token in answer.token_ids)


def write_json(
    prompts: Sequence[Prompt], results: Sequence[RequestOutput], summary: RunSummary
) -> None:
    """Write one JSON object: the results in input order, and the summary."""
    rows = [result_to_dict(*pair) for pair in zip(prompts, results, strict=True)]
    document = {"results": rows, "summary": summary.to_dict()}
    write_document(document)


def result_to_dict(prompt: Prompt, result: RequestOutput) -> dict[str, Any]:
    """One result under stable keys; times in seconds, null for a stage never reached.

    `token_ids`, `text` and `finish_reason` are those of the first answer.
    """
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
        "request_id": result.request_id,
        "outputs": [_answer_to_dict(answer) for answer in result.outputs],
    }


def _answer_to_dict(answer: CompletionOutput) -> dict[str, Any]:
    return {
        "index": answer.index,
        "token_ids": list(answer.token_ids),
        "text": answer.text,
        "logprobs": None if answer.logprobs is None else [_finite(x) for x in answer.logprobs],
        "top_logprobs": None
        if answer.top_logprobs is None
        else [
            [{"token_id": token, "logprob": _finite(value)} for token, value in best.items()]
            for best in answer.top_logprobs
        ],
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "seed": answer.seed,
    }


def _finite(value: float) -> float | None:
    """A number that JSON has: the log-probability of the impossible is null."""
    return value if math.isfinite(value) else None
