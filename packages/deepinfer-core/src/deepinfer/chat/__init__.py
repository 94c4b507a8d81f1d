"""Conversations: messages to token ids, and the ids of an answer to reasoning, content and tool
calls. The format itself is the package `deepseek-recipe`, the extra `chat`.
"""

from .answers import AnswerForm, ChatMessage, ToolCall
from .format import ChatFormat, ChatPrompt, as_conversations, parse_answer, render_chat

__all__ = [
    "AnswerForm",
    "ChatFormat",
    "ChatMessage",
    "ChatPrompt",
    "ToolCall",
    "as_conversations",
    "parse_answer",
    "render_chat",
]
