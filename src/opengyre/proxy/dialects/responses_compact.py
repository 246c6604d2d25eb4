"""The compaction endpoint of OpenAI Responses: the policy writes a summary, the client gets it back as a sealed item.

Choice: what is asked for stands here, for the protocol leaves it to the server; the tools stay in the prompt, so the
call shares its whole history with the call before it.
"""

from collections.abc import Iterator

from opengyre.core.chat import Message
from opengyre.core.errors import CallError
from opengyre.proxy.dialects import responses
from opengyre.proxy.dialects.parts import ENCODER
from opengyre.proxy.dialects.responses_items import as_compaction, output_items, retained_items
from opengyre.proxy.requests import Answer, ChatRequest, Json

NAME = responses.NAME


def parse_request(body: Json) -> ChatRequest:
    """Return the request for a summary of the history in a body.

    Raises:
        CallError: Items or tools are not what the protocol says.
    """
    request = responses.parse_request({**body, "stream": False})
    return request if request.is_compaction else as_compaction(request)


def parse_response(body: Json) -> Message:
    """Return what a compaction puts in the place of the history: its last item."""
    return responses.parse_response({"output": list(body.get("output") or ())[-1:]})


def answer_body(request: ChatRequest, answer: Answer) -> bytes:
    """Return the users' messages and the compaction item that replace the history."""
    return ENCODER.encode(
        {
            "id": f"resp_{answer.answer_id}",
            "object": "response.compaction",
            "created_at": answer.created_s,
            "output": [*retained_items(request), *output_items(request, answer)],
            "usage": responses.usage(answer),
        }
    )


def stream_chunks(request: ChatRequest, answer: Answer) -> Iterator[bytes]:
    """Yield the body: this endpoint does not stream."""
    yield answer_body(request, answer)


def error_body(error: CallError) -> bytes:
    """Return the body of an error in the protocol's own form."""
    return responses.error_body(error)


def stream_error(_: CallError) -> bytes | None:
    """Return None: this endpoint does not stream."""
    return None
