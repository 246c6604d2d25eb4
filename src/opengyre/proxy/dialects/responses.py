"""OpenAI Responses, without stored state: every request carries its whole history."""

from collections.abc import Iterator
from typing import Any

from opengyre.core.chat import Message
from opengyre.core.errors import CallError, ContextOverflowError
from opengyre.core.types import Finish
from opengyre.proxy.dialects.chat import error_object
from opengyre.proxy.dialects.parts import (
    ENCODER,
    body_hash,
    event,
    merged,
    read_limit,
    read_object,
    read_objects,
    read_string,
)
from opengyre.proxy.dialects.responses_items import ItemReader, as_compaction, output_items
from opengyre.proxy.items import read_items
from opengyre.proxy.requests import Answer, ChatRequest, Json

NAME = "responses"
_VOLATILE = ("stream", "stream_options", "max_output_tokens")
_STORED = ("previous_response_id", "conversation", "background")


def parse_request(body: Json) -> ChatRequest:
    """Return the request of a decoded body.

    Raises:
        CallError: Items or tools are not what the protocol says, or the request relies on what was stored.
    """
    for key in _STORED:
        if body.get(key):
            raise CallError(f"{key}: this proxy stores no responses; send the whole history as input")
    reader = ItemReader()
    reader.toolbox.add_all(read_items(body.get("tools"), "tools", _object), "tools")
    if body.get("instructions"):
        reader.messages.append(Message(role="system", content=read_string(body, "instructions", "request")))
    for index, item in enumerate(_items(body.get("input"))):
        reader.take(item, f"input[{index}]")
    choice = _tool_choice(body.get("tool_choice"))
    form = read_object(read_object(body.get("text"), "text").get("format"), "text.format").get("type", "text")
    request = ChatRequest(
        dialect=NAME,
        model=str(body.get("model", "")),
        messages=tuple(reader.messages),
        tools=() if choice == "none" else tuple(reader.toolbox.tools),
        max_tokens=read_limit(body.get("max_output_tokens"), "max_output_tokens"),
        stream=bool(body.get("stream", False)),
        include_usage=True,
        truncated_law=form != "text" or choice not in ("auto", "none"),
        tool_choice=choice,
        wires=reader.toolbox.wires,
        body_hash=body_hash(body, _VOLATILE),
    )
    return as_compaction(request) if reader.is_compaction else request


def _items(raw: Any) -> list[Json]:  # noqa: ANN401 - whatever the client sent
    items = [{"role": "user", "content": raw}] if isinstance(raw, str) else read_items(raw, "input", _object)
    if not items:
        raise CallError("input: expected a text or a non-empty list of items")
    return items


def _object(raw: Any, where: str) -> Json:  # noqa: ANN401 - whatever the client sent
    if not isinstance(raw, dict):
        raise CallError(f"{where}: expected an object, got {raw!r:.200}")
    return raw


def _tool_choice(raw: Any) -> str:  # noqa: ANN401 - whatever the client sent
    if raw is None or isinstance(raw, str):
        return raw or "auto"
    choice = read_object(raw, "tool_choice")
    kind = str(choice.get("type"))
    return str(choice.get("mode") or "auto") if kind == "allowed_tools" else str(choice.get("name") or kind)


def parse_response(body: Json) -> Message:
    """Return the assistant message of an answer.

    Raises:
        CallError: It has no items of an assistant.
    """
    reader = ItemReader()
    for index, item in enumerate(read_objects(body.get("output"), "output")):
        reader.take(item, f"output[{index}]")
    if not reader.messages:
        raise CallError("output: expected items of an assistant")
    return merged(reader.messages)


def usage(answer: Answer) -> Json:
    """Return the token counts of an answer."""
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _shell(answer_id: str, model: str, created_s: int) -> Json:
    """Return a response in which nothing has happened yet."""
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": created_s,
        "model": model,
        "status": "in_progress",
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "max_output_tokens": None,
        "previous_response_id": None,
        "store": False,
        "usage": None,
    }


def _finished(request: ChatRequest, answer: Answer) -> Json:
    is_cut = answer.choices[0].finish in (Finish.LENGTH, Finish.ABORT)
    return {
        **_shell(answer.answer_id, answer.model, answer.created_s),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output_items(request, answer),
        "usage": usage(answer),
    }


def answer_body(request: ChatRequest, answer: Answer) -> bytes:
    """Return the body of an answer that is not streamed."""
    return ENCODER.encode(_finished(request, answer))


def stream_chunks(request: ChatRequest, answer: Answer) -> Iterator[bytes]:
    """Yield the server-sent events of an answer, numbered in sequence."""
    for number, (name, fields) in enumerate(_events(request, answer)):
        yield event(name, {"type": name, "sequence_number": number, **fields})


def _events(request: ChatRequest, answer: Answer) -> Iterator[tuple[str, Json]]:
    shell, finished = _shell(answer.answer_id, answer.model, answer.created_s), _finished(request, answer)
    yield "response.created", {"response": shell}
    yield "response.in_progress", {"response": shell}
    for index, item in enumerate(finished["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        yield "response.output_item.added", {"output_index": index, "item": _begun(item)}
        if item["type"] == "reasoning":
            yield from _thought_events(place, item)
        elif item["type"] == "message":
            yield from _text_events(place, item)
        elif item["type"] == "function_call":
            arguments = item["arguments"]
            yield "response.function_call_arguments.delta", {**place, "delta": arguments}
            yield "response.function_call_arguments.done", {**place, "name": item["name"], "arguments": arguments}
        elif item["type"] == "custom_tool_call":
            yield "response.custom_tool_call_input.delta", {**place, "delta": item["input"]}
            yield "response.custom_tool_call_input.done", {**place, "input": item["input"]}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{finished['status']}", {"response": finished}


def _begun(item: Json) -> Json:
    """Return an item as it looks before its first delta."""
    empty: Json = {"summary": [], "content": [], "arguments": "", "input": ""}
    begun = {key: empty.get(key, value) for key, value in item.items()}
    return begun | ({"status": "in_progress"} if "status" in item else {})


def _thought_events(place: Json, item: Json) -> Iterator[tuple[str, Json]]:
    (part,) = item["summary"]
    place = {**place, "summary_index": 0}
    yield "response.reasoning_summary_part.added", {**place, "part": {**part, "text": ""}}
    yield "response.reasoning_summary_text.delta", {**place, "delta": part["text"]}
    yield "response.reasoning_summary_text.done", {**place, "text": part["text"]}
    yield "response.reasoning_summary_part.done", {**place, "part": part}


def _text_events(place: Json, item: Json) -> Iterator[tuple[str, Json]]:
    (part,) = item["content"]
    place = {**place, "content_index": 0}
    yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
    yield "response.output_text.delta", {**place, "delta": part["text"], "logprobs": []}
    yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**place, "part": part}


def count_body(tokens: int) -> bytes:
    """Return the body that answers how many tokens a prompt has."""
    return ENCODER.encode({"object": "response.input_tokens", "input_tokens": tokens})


def error_body(error: CallError) -> bytes:
    """Return the body of an error in the protocol's own form."""
    return ENCODER.encode({"error": _error(error)})


def _error(error: CallError) -> Json:
    if not isinstance(error, ContextOverflowError):
        return error_object(error)
    text = f"Your input exceeds the context window of this model: {error}"
    return {**error_object(error), "message": text, "param": "input"}


def stream_error(error: CallError) -> bytes | None:
    """Return a stream that fails where the prompt does not fit, None for other errors.

    Choice: Codex knows an overflow only by a ``response.failed`` event; an HTTP status ends its turn.
    """
    if not isinstance(error, ContextOverflowError):
        return None
    failed = {**_shell("failed", "", 0), "status": "failed", "error": {"code": error.code, "message": str(error)}}
    events = (("response.created", _shell("failed", "", 0)), ("response.failed", failed))
    return b"".join(
        event(name, {"type": name, "sequence_number": number, "response": response})
        for number, (name, response) in enumerate(events)
    )
