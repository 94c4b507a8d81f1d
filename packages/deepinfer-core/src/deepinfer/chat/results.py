"""Results of the engine, with the message of each answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deepinfer.errors import RequestError
from deepinfer.outputs import RequestOutput

from .format import ChatFormat, ChatPrompt

__all__ = ["with_messages"]


def with_messages(
    outputs: Sequence[RequestOutput],
    prompts: Sequence[ChatPrompt | RequestError],
    chat_format: ChatFormat,
) -> list[RequestOutput]:
    """The results with `message` set on every answer.

    Args:
        outputs: one result per prompt, in their order.
        prompts: of the conversations; those that failed have results without answers.
        chat_format: that made the prompts.
    """
    return [
        _with_message(output, prompt, chat_format) if isinstance(prompt, ChatPrompt) else output
        for output, prompt in zip(outputs, prompts, strict=True)
    ]


def _with_message(
    output: RequestOutput, prompt: ChatPrompt, chat_format: ChatFormat
) -> RequestOutput:
    try:
        answers = [
            replace(answer, message=chat_format.message(answer, prompt.form))
            for answer in output.outputs
        ]
    except RequestError as problem:  # its ids and text are kept
        return replace(output, error=output.error or str(problem))
    return replace(output, outputs=answers)
