"""Chat to tokens without a vocabulary: one token a byte, a token of its own for each mark of the template.

For replays and captures, where no model's tokenizer is at hand: every text survives the way to tokens and back, and
text that looks like a mark stays text.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from opengyre.core.chat import Message, Tool, ToolCall
from opengyre.core.types import Int32Array

_OPEN, _CLOSE, _THINK, _CALL, _PART, _END = range(256, 262)
"""Marks: a message's head, its end, reasoning, a tool call, the next part of a call, the end of a reply."""
VOCABULARY = 262


class ByteRenderer:
    r"""A ChatML-like template over bytes; implements ``core.chat.ChatRenderer``.

    >>> renderer = ByteRenderer()
    >>> said = Message(role="assistant", content="<|im_end|>", reasoning="hm")
    >>> renderer.parse(renderer.render((), ()), renderer.encode_reply(said), ()) == said
    True
    """

    stop_ids = (_END,)
    is_prefix_stable = True

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        """Return the prompt, [C] int32: tools, messages, the head of the reply."""
        parts = [_text(f"{tool.name}: {tool.description}\n") for tool in tools]
        parts += [part for message in messages for part in self._message(message)]
        return np.concatenate([*parts, self._head("assistant")])

    def bridge(
        self, context: Int32Array, output: Int32Array, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> Int32Array | None:
        """Return what follows a prompt and its reply; a reply that was cut off is ended first."""
        parts = [] if len(output) and output[-1] == _END else [_mark(_END)]
        parts += [part for message in messages for part in self._message(message)]
        return np.concatenate([*parts, self._head("assistant")])

    def encode_reply(self, message: Message) -> Int32Array:
        """Return what a model that says this message samples, its end included."""
        parts = [_mark(_THINK), _text(message.reasoning), _mark(_THINK)] if message.reasoning else []
        parts.append(_text(message.content))
        for call in message.tool_calls:
            parts += [_mark(_CALL), _text(call.name), _mark(_PART), _text(call.arguments)]
        return np.concatenate([*parts, _mark(_END)])

    def parse(self, context: Int32Array, output: Int32Array, tools: Sequence[Tool]) -> Message:
        """Return the message of a reply; calls have no ids of their own."""
        tokens = output[:-1] if len(output) and output[-1] == _END else output
        reasoning = ""
        if len(tokens) and tokens[0] == _THINK and (ends := np.flatnonzero(tokens[1:] == _THINK)).size:
            reasoning, tokens = _read(tokens[1 : 1 + ends[0]]), tokens[2 + ends[0] :]
        content, *calls = _split(tokens, _CALL)
        made = []
        for call in calls:
            name, *arguments = _split(call, _PART)
            made.append(ToolCall(id="", name=_read(name), arguments="".join(map(_read, arguments))))
        return Message(role="assistant", content=_read(content), reasoning=reasoning, tool_calls=tuple(made))

    def _message(self, message: Message) -> list[Int32Array]:
        body = self.encode_reply(message) if message.role == "assistant" else _text(message.content)
        return [self._head(message.role), body, *([] if message.role == "assistant" else [_mark(_CLOSE)])]

    def _head(self, role: str) -> Int32Array:
        return np.concatenate([_mark(_OPEN), _text(f"{role}\n")])


def _mark(token: int) -> Int32Array:
    return np.array([token], np.int32)


def _text(text: str) -> Int32Array:
    return np.frombuffer(text.encode(errors="surrogatepass"), np.uint8).astype(np.int32)


def _read(tokens: Int32Array) -> str:
    return bytes(tokens[tokens < 256].astype(np.uint8)).decode(errors="surrogatepass")


def _split(tokens: Int32Array, mark: int) -> list[Int32Array]:
    """Return the parts between marks.

    >>> [len(part) for part in _split(np.array([1, 2, 258, 3], np.int32), 258)]
    [2, 1]
    """
    edges = [-1, *np.flatnonzero(tokens == mark).tolist(), len(tokens)]
    return [tokens[start + 1 : stop] for start, stop in itertools.pairwise(edges)]
