"""Messages as the chat template sees them, independent of the dialect that carried them.

The proxy keeps very many of them for hours; they can be in no cycle, so the cycle collector does not look at them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from opengyre.core.types import Int32Array


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A tool call of an assistant message.

    >>> ToolCall(id="call_1", name="write_file", arguments='{"module": "amber"}').name
    'write_file'
    """

    id: str
    name: str
    arguments: str
    """Raw text, JSON where the model wrote JSON."""


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message of a request or a reply.

    >>> Message(role="user", content="hello").tool_calls
    ()
    """

    role: str
    """`system`, `developer`, `user`, `assistant` or `tool`."""
    content: str = ""
    """Text; a missing or null content is empty."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Of a tool result: the call it answers."""
    name: str = ""


class Tool(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A tool that the harness offers.

    >>> Tool(name="finish", schema={"properties": {"result": {"type": "string"}}}).parameters
    ('result',)
    """

    name: str
    description: str = ""
    schema: dict[str, Any] = {}
    """JSON schema of the arguments."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the arguments in the order of the schema."""
        return tuple(self.schema.get("properties", {}))


class ChatRenderer(Protocol):
    """Chat to tokens and back for one model."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant message."""
        ...

    @property
    def is_prefix_stable(self) -> bool:
        """Whether sampled tokens survive what is appended to them. If not, ``bridge`` is never asked."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        """Return the tokens of the whole prompt, generation prompt included, [C] int32.

        Text of users and tools is encoded with special-token parsing off.
        """
        ...

    def bridge(
        self, context: Int32Array, output: Int32Array, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> Int32Array | None:
        """Return the tokens that follow a prompt and the output sampled from it, or None if none can follow.

        ``messages`` are those after the sampled reply; the generation prompt is included. If the sampled output does
        not end in a stop id (cut off by length), the closing tokens come first.
        """
        ...

    def parse(self, context: Int32Array, output: Int32Array, tools: Sequence[Tool]) -> Message:
        """Return the assistant message of sampled tokens; malformed tool calls stay in ``content``.

        The prompt may begin the reply (an opened block of reasoning), so it is told too. Tool calls carry the
        model's own ids where its format has them, else an empty id.
        """
        ...
