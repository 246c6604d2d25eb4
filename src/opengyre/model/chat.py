"""The embedded policy's chat format: tools in short form, because JSON schemas would swamp its small vocabulary.

<sys>SYSTEM<arg>tool<arg>tool<end>  <user>TEXT<end>  <tool>TEXT<end>
<asst>TEXT<end>  or  <asst>tool<arg>value<arg>value<end>     (values in the order of the tool's schema)
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from opengyre.core.chat import Message, Tool, ToolCall
from opengyre.core.types import Int32Array
from opengyre.model.tokenizer import EmbeddedTokenizer

_MARKS = {"system": "<sys>", "developer": "<sys>", "user": "<user>", "assistant": "<asst>", "tool": "<tool>"}


class EmbeddedRenderer:
    """Chat to tokens and back; implements ``core.chat.ChatRenderer``.

    Args:
        tokenizer: The policy's tokenizer.
    """

    def __init__(self, tokenizer: EmbeddedTokenizer) -> None:
        self._tokenizer = tokenizer
        self._end = tokenizer.special("<end>")
        self._arg = tokenizer.special("<arg>")

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The end mark."""
        return (self._end,)

    @property
    def is_prefix_stable(self) -> bool:
        """Messages are rendered one by one: what follows never changes what stands before."""
        return True

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        """Return the tokens of the whole prompt, [C] int32."""
        ids: list[int] = []
        shown = False
        if tools and not (messages and messages[0].role in ("system", "developer")):
            ids += self._message(Message(role="system"), tools, with_tools=True)
            shown = True
        for message in messages:
            with_tools = not shown and message.role in ("system", "developer")
            shown = shown or with_tools
            ids += self._message(message, tools, with_tools=with_tools)
        ids.append(self._tokenizer.special("<asst>"))
        return np.asarray(ids, np.int32)

    def bridge(
        self, context: Int32Array, output: Int32Array, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> Int32Array | None:
        """Return the tokens that follow a prompt and its sampled output, [n] int32."""
        ids: list[int] = []
        if not len(output) or int(output[-1]) != self._end:
            ids.append(self._end)
        for message in messages:
            ids += self._message(message, tools, with_tools=False)
        ids.append(self._tokenizer.special("<asst>"))
        return np.asarray(ids, np.int32)

    def text_of(self, tokens: Int32Array) -> str:
        """Return tokens as text, marks by their names."""
        return self._tokenizer.decode(tokens)

    def encode_text(self, text: str) -> list[int]:
        """Return a reply of plain text as the policy would sample it, end mark included."""
        return [*self._tokenizer.encode(text), self._end]

    def encode_reply(self, message: Message, tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of an assistant message as the policy would sample it, end mark included."""
        if not message.tool_calls:
            return [*self._tokenizer.encode(message.content), self._end]
        call = message.tool_calls[0]
        ids = list(self._tokenizer.encode(call.name))
        for value in _values(call, tools):
            ids += [self._arg, *self._tokenizer.encode(value)]
        return [*ids, self._end]

    def parse(self, context: Int32Array, output: Int32Array, tools: Sequence[Tool]) -> Message:
        """Return the assistant message of sampled tokens; anything that is no well-formed call is content."""
        ids = output.tolist()
        if ids and ids[-1] == self._end:
            ids.pop()
        parts: list[list[int]] = [[]]
        for token in ids:
            if token == self._arg:
                parts.append([])
            else:
                parts[-1].append(token)
        name, *values = (self._tokenizer.decode(part) for part in parts)
        tool = next((tool for tool in tools if tool.name == name), None)
        if tool is None or len(values) != len(tool.parameters):
            return Message(role="assistant", content=self._tokenizer.decode(ids))
        arguments = msgspec.json.encode(dict(zip(tool.parameters, values, strict=True))).decode()
        return Message(role="assistant", tool_calls=(ToolCall(id="", name=name, arguments=arguments),))

    def _message(self, message: Message, tools: Sequence[Tool], *, with_tools: bool) -> list[int]:
        ids = [self._tokenizer.special(_MARKS.get(message.role, "<user>"))]
        if message.role == "assistant":
            return ids + self.encode_reply(message, tools)
        ids += self._tokenizer.encode(message.content)
        if with_tools:
            for tool in tools:
                ids += [self._arg, *self._tokenizer.encode(tool.name)]
        return [*ids, self._end]


def _values(call: ToolCall, tools: Sequence[Tool]) -> list[str]:
    """Return the argument values of a call in the order of its tool's schema, or of its JSON if the tool is unknown."""
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except msgspec.DecodeError:
        return [call.arguments]
    if not isinstance(arguments, dict):
        return [call.arguments]
    tool = next((tool for tool in tools if tool.name == call.name), None)
    names = tool.parameters if tool is not None and set(tool.parameters) == set(arguments) else tuple(arguments)
    return [
        value if isinstance(value, str) else msgspec.json.encode(value).decode() for value in map(arguments.get, names)
    ]
