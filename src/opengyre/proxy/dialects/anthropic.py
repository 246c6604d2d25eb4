"""Anthropic Messages.

One user message may hold tool results and text: it becomes tool messages and user messages in the order of its blocks.
Argument text that is no JSON object cannot stand in a ``tool_use`` block; it is wrapped the way Claude Code wraps what
it could not read, and both come back as the raw text.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import xxhash

from opengyre.core.chat import Message, Tool, ToolCall
from opengyre.core.errors import CallError, ContextOverflowError
from opengyre.core.types import Finish
from opengyre.proxy.dialects.parts import (
    ENCODER,
    body_hash,
    compact,
    event,
    object_in,
    read_limit,
    read_object,
    read_objects,
    read_stops,
    read_string,
    read_text,
)
from opengyre.proxy.items import read_items
from opengyre.proxy.requests import Answer, AnswerChoice, ChatRequest, Json

NAME = "anthropic"
_STOP_REASONS = {
    Finish.STOP: "end_turn",
    Finish.TOOL_CALLS: "tool_use",
    Finish.LENGTH: "max_tokens",
    Finish.ABORT: "max_tokens",
}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_VOLATILE = ("stream", "max_tokens")
_HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset", "advisor")
_UNPARSED = "__unparsedToolInput"
_CLIENT_HEADER = "x-anthropic-billing-header:"
"""A header of the client's in the place of a system text: it changes in mid-execution and says nothing to a model."""


def parse_request(body: Json) -> ChatRequest:
    """Return the request of a decoded body.

    Raises:
        CallError: Messages or tools are not what the protocol says.
    """
    turns = read_items(body.get("messages"), "messages", _messages)
    if not turns:
        raise CallError("messages: expected a non-empty list")
    messages = [*_system(body.get("system")), *(message for turn in turns for message in turn)]
    choice = _tool_choice(body.get("tool_choice"))
    tools = tuple(tool for found in read_items(body.get("tools"), "tools", _tools) for tool in found)
    output_config = read_object(body.get("output_config"), "output_config")
    return ChatRequest(
        dialect=NAME,
        model=str(body.get("model", "")),
        messages=tuple(messages),
        tools=() if choice == "none" else tools,
        max_tokens=read_limit(body.get("max_tokens"), "max_tokens"),
        stream=bool(body.get("stream", False)),
        include_usage=True,
        truncated_law=choice not in ("auto", "none") or bool(output_config.get("format") or body.get("output_format")),
        stop=read_stops(body.get("stop_sequences"), "stop_sequences"),
        tool_choice=choice,
        body_hash=body_hash(body, _VOLATILE),
    )


def _system(raw: Any) -> Iterator[Message]:  # noqa: ANN401 - whatever the client sent
    if isinstance(raw, str):
        raw = [{"type": "text", "text": raw}]
    blocks = [
        block for block in read_objects(raw, "system") if not str(block.get("text", "")).startswith(_CLIENT_HEADER)
    ]
    text = read_text(blocks, "system")
    if text:
        yield Message(role="system", content=text)


def _messages(raw: Any, where: str) -> tuple[Message, ...]:  # noqa: ANN401 - whatever the client sent
    if not isinstance(raw, dict) or raw.get("role") not in ("user", "assistant", "system"):
        raise CallError(f"{where}: expected an object with role user, assistant or system, got {raw!r:.200}")
    content = raw.get("content")
    if content is None or isinstance(content, str):
        return (Message(role=raw["role"], content=content or ""),)
    blocks = read_objects(content, f"{where}.content")
    if raw["role"] == "assistant":
        return (_assistant(blocks, f"{where}.content"),)
    return tuple(_split(raw["role"], blocks, f"{where}.content"))


def _split(role: str, blocks: list[Json], where: str) -> list[Message]:
    """Return tool results as tool messages and the text between them as messages of the role, in order."""
    made: list[Message] = []
    texts: list[Json] = []
    for block in [*blocks, {"type": "end"}]:
        if block.get("type") not in ("tool_result", "end"):
            texts.append(block)
            continue
        if texts:
            made.append(Message(role=role, content=read_text(texts, where)))
            texts = []
        if block["type"] == "tool_result":
            content = read_text(block.get("content"), f"{where}: tool_result")
            call_id = read_string(block, "tool_use_id", f"{where}: tool_result")
            made.append(Message(role="tool", content=content, tool_call_id=call_id))
    return made or [Message(role=role)]


def _assistant(blocks: list[Json], where: str) -> Message:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            calls.append(_call(block, f"{where}: tool_use"))
        elif kind != "redacted_thinking":
            texts.append(read_text([block], where))
    return Message(role="assistant", content="".join(texts), reasoning="".join(thoughts), tool_calls=tuple(calls))


def _call(block: Json, where: str) -> ToolCall:
    value = read_object(block.get("input"), f"{where}.input")
    wrapped = value.get(_UNPARSED)
    raw = wrapped.get("raw") if len(value) == 1 and isinstance(wrapped, dict) else None
    arguments = raw if isinstance(raw, str) else compact(value)
    return ToolCall(id=read_string(block, "id", where), name=read_string(block, "name", where), arguments=arguments)


def _tools(raw: Any, where: str) -> tuple[Tool, ...]:  # noqa: ANN401 - whatever the client sent
    """Return the tool that the client runs itself; what a vendor's server would run is left out."""
    tool = read_object(raw, where)
    if str(tool.get("type") or "custom").startswith(_HOSTED):
        return ()
    name, description = read_string(tool, "name", where), str(tool.get("description") or "")
    schema = read_object(tool.get("input_schema"), f"{where}.input_schema")
    return (Tool(name=name, description=description, schema=schema),)


def _tool_choice(raw: Any) -> str:  # noqa: ANN401 - whatever the client sent
    choice = read_object(raw, "tool_choice")
    kind = choice.get("type", "auto")
    if kind == "tool":
        return read_string(choice, "name", "tool_choice")
    if kind not in ("auto", "none", "any"):
        raise CallError(f"tool_choice.type: expected auto, any, tool or none, got {kind!r:.200}")
    return "required" if kind == "any" else str(kind)


def parse_response(body: Json) -> Message:
    """Return the assistant message of an answer; ``_raw_tool_args``, where given, is the argument text as streamed.

    Raises:
        CallError: It is no message.
    """
    message = _assistant(read_objects(body.get("content"), "content"), "content")
    raw = body.get("_raw_tool_args") or ()
    calls = [
        msgspec.structs.replace(call, arguments=raw[index]) if index < len(raw) else call
        for index, call in enumerate(message.tool_calls)
    ]
    return msgspec.structs.replace(message, tool_calls=tuple(calls))


def answer_body(_: ChatRequest, answer: Answer) -> bytes:
    """Return the body of an answer that is not streamed."""
    choice = answer.choices[0]
    head = _head(answer)
    head |= _ending(choice)
    return ENCODER.encode({**head, "content": _blocks(choice.message), "usage": _usage(answer)})


def _head(answer: Answer) -> Json:
    return {
        "id": f"msg_{answer.answer_id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _ending(choice: AnswerChoice) -> Json:
    reason = "stop_sequence" if choice.stop_sequence else _STOP_REASONS[choice.finish]
    return {"stop_reason": reason, "stop_sequence": choice.stop_sequence or None}


def _blocks(message: Message) -> list[Json]:
    blocks: list[Json] = []
    if message.reasoning:
        signature = _signature(message.reasoning)
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": signature})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    return blocks


def _signature(thought: str) -> str:
    """Return what makes a thought ours; clients send it back and drop thoughts without one."""
    return f"gyre1.{xxhash.xxh3_128_hexdigest(thought.encode())}"


def _input(arguments: str) -> object:
    """Return the argument text itself where it is an object, so that order and numbers stay as sampled."""
    if object_in(arguments) is not None:
        return msgspec.Raw(arguments.encode())
    return {_UNPARSED: {"raw": arguments, "len": len(arguments)}}


def _usage(answer: Answer) -> Json:
    return {
        "input_tokens": answer.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": answer.completion_tokens,
    }


def stream_chunks(_: ChatRequest, answer: Answer) -> Iterator[bytes]:
    """Yield the server-sent events of an answer."""
    choice = answer.choices[0]
    start = {**_head(answer), "usage": {**_usage(answer), "output_tokens": 0}}
    yield event("message_start", {"type": "message_start", "message": start})
    calls = iter(choice.message.tool_calls)
    for index, block in enumerate(_blocks(choice.message)):
        arguments = next(calls).arguments if block["type"] == "tool_use" else ""
        yield from _block_events(index, block, arguments)
    yield event("message_delta", {"type": "message_delta", "delta": _ending(choice), "usage": _usage(answer)})
    yield event("message_stop", {"type": "message_stop"})


def _block_events(index: int, block: Json, arguments: str) -> Iterator[bytes]:
    """Yield start, deltas and stop of a content block; arguments go out as the very text that was sampled."""
    empty: Json
    deltas: list[Json]
    if block["type"] == "thinking":
        empty = {"type": "thinking", "thinking": "", "signature": ""}
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    elif block["type"] == "text":
        empty = {"type": "text", "text": ""}
        deltas = [{"type": "text_delta", "text": block["text"]}]
    else:
        empty = {**block, "input": {}}
        deltas = [{"type": "input_json_delta", "partial_json": arguments}]
    yield event("content_block_start", {"type": "content_block_start", "index": index, "content_block": empty})
    for delta in deltas:
        yield event("content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta})
    yield event("content_block_stop", {"type": "content_block_stop", "index": index})


def count_body(tokens: int) -> bytes:
    """Return the body that answers how many tokens a prompt has."""
    return ENCODER.encode({"input_tokens": tokens})


def error_body(error: CallError) -> bytes:
    """Return the body of an error in the protocol's own form."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    text = str(error)
    if isinstance(error, ContextOverflowError):
        text = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit_tokens} maximum"
    return ENCODER.encode({"type": "error", "error": {"type": kind, "message": text}})


def stream_error(_: CallError) -> bytes | None:
    """Return None: an error is answered by its status, streamed or not."""
    return None
