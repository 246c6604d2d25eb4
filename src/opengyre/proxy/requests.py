"""What a request is after its dialect is parsed away, and what an answer is before its dialect is put on."""

from typing import Any

import msgspec

from opengyre.core.chat import Message, Tool
from opengyre.core.types import Finish


class ToolWire(msgspec.Struct, frozen=True, kw_only=True):
    """How a dialect writes the calls of a tool where it is not the plain form of a function call.

    Example: ``ToolWire(kind="function", name="spawn_agent", namespace="agents")``.
    """

    kind: str
    """`function`, `custom` (free text instead of JSON) or `local_shell`."""
    name: str
    """Name on the wire."""
    namespace: str = ""


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
    stop: tuple[str, ...] = ()
    """Texts that end the answer; the first of them to appear is cut off."""
    tool_choice: str = "auto"
    """`auto`, `none` (no tool is offered), `required`, or the name of the tool that is forced."""
    wires: dict[str, ToolWire] = {}
    """Tool name to its form on the wire, where that is a special one."""
    is_compaction: bool = False
    """The path or an item of the request says that the answer is to be a summary of the history."""
    body_hash: int = 0
    """xxh3 of the body without ``stream`` and token limits."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What is delivered; stored beside the call so that a repeated request gets the same bytes.

    Example: ``Answer(answer_id="g0-s0-a0-c0001", model="policy", created_s=0, choices=(choice,), prompt_tokens=12)``.
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
    stop_sequence: str = ""
    """The text of the client's that ended it, if one did; it is not part of the message."""


Json = dict[str, Any]
