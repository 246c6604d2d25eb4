"""What a request is after its dialect is parsed away, and what an answer is before its dialect is put on."""

from typing import Any

import msgspec

from opengyre.core.chat import Message, Tool
from opengyre.core.types import Finish


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A model request of a harness, independent of its dialect.

    Example: ``ChatRequest(dialect="chat", model="policy", messages=(Message(role="user", content="hi"),))``.
    """

    dialect: str
    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    choices: int = 1
    truncated_law: bool = False
    """The client asked for what cuts the law down: a grammar, a forced tool, penalties, a bias."""
    body_hash: int = 0
    """xxh3 of the body without ``stream`` and token limits."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What is delivered; stored beside the call so that a repeated request gets the same bytes.

    Example: ``Answer(answer_id="chatcmpl-1", model="policy", created_s=0, choices=(choice,), prompt_tokens=12)``.
    """

    answer_id: str
    model: str
    created_s: int
    choices: tuple["AnswerChoice", ...]
    prompt_tokens: int

    @property
    def completion_tokens(self) -> int:
        """Sampled tokens of all choices."""
        return sum(choice.completion_tokens for choice in self.choices)


class AnswerChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of an answer; tool calls carry minted ids."""

    message: Message
    finish: Finish
    completion_tokens: int


Json = dict[str, Any]
