"""One module a dialect: parse a request, shape an answer, a stream and an error.

A served dialect is a module that has what ``Dialect`` asks for; ``gemini`` is read only.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from opengyre.core.chat import Message
from opengyre.core.errors import CallError
from opengyre.proxy.dialects import anthropic, chat, responses, responses_compact
from opengyre.proxy.requests import Answer, ChatRequest, Json


class Dialect(Protocol):
    """What the proxy needs to serve a protocol."""

    NAME: str
    """Of the protocol, as calls and captures name it."""

    def parse_request(self, body: Json, /) -> ChatRequest:
        """Return the request of a decoded body.

        Raises:
            CallError: It is not what the protocol says.
        """
        ...

    def parse_response(self, body: Json, /) -> Message:
        """Return the assistant message of an answer that was not streamed, argument text raw."""
        ...

    def answer_body(self, request: ChatRequest, answer: Answer, /) -> bytes:
        """Return the body of an answer that is not streamed."""
        ...

    def stream_chunks(self, request: ChatRequest, answer: Answer, /) -> Iterator[bytes]:
        """Yield the server-sent events of an answer, the end mark included."""
        ...

    def error_body(self, error: CallError, /) -> bytes:
        """Return the body of an error."""
        ...

    def stream_error(self, error: CallError, /) -> bytes | None:
        """Return the events that tell a streaming client of an error, None where its status does."""
        ...


DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/responses/compact": responses_compact,
    "/v1/messages": anthropic,
}
"""Path to the dialect that serves it."""

COUNTERS: Mapping[str, tuple[Dialect, Callable[[int], bytes]]] = {
    "/v1/messages/count_tokens": (anthropic, anthropic.count_body),
    "/v1/responses/input_tokens": (responses, responses.count_body),
}
"""Path to the dialect whose prompt is counted there, and the form of the answer."""
