"""OpenAI chat completions."""

from collections.abc import Iterator
from typing import Any

import msgspec
import xxhash

from opengyre.core.chat import Message, Tool, ToolCall
from opengyre.core.errors import CallError
from opengyre.core.types import Finish
from opengyre.proxy.requests import Answer, AnswerChoice, ChatRequest, Json

NAME = "chat"
_ENCODER = msgspec.json.Encoder()
_FINISH = {Finish.STOP: "stop", Finish.TOOL_CALLS: "tool_calls", Finish.LENGTH: "length", Finish.ABORT: "length"}
_LIMITS = ("stream", "stream_options", "max_tokens", "max_completion_tokens")
_TRUNCATING = ("logit_bias", "response_format", "frequency_penalty", "presence_penalty", "stop", "functions")


def parse_request(body: Json) -> ChatRequest:
    """Return the request of a decoded body.

    Raises:
        CallError: Messages or tools are not what the protocol says.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise CallError(f"messages: expected a non-empty list, got {type(messages).__name__}")
    choice = body.get("tool_choice")
    truncating = [key for key in _TRUNCATING if body.get(key)]
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise CallError(f"max_tokens: expected a positive integer, got {limit!r}")
    return ChatRequest(
        dialect=NAME,
        model=str(body.get("model", "")),
        messages=tuple(_message(index, message) for index, message in enumerate(messages)),
        tools=tuple(_tool(index, tool) for index, tool in enumerate(body.get("tools") or ())),
        max_tokens=limit,
        stream=bool(body.get("stream", False)),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage", False)),
        choices=int(body.get("n") or 1),
        truncated_law=bool(truncating) or choice not in (None, "auto", "none"),
        body_hash=_body_hash(body),
    )


def _body_hash(body: Json) -> int:
    kept = {key: value for key, value in body.items() if key not in _LIMITS}
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(kept, order="deterministic"))


def _message(index: int, raw: Any) -> Message:  # noqa: ANN401 - whatever the client sent
    if not isinstance(raw, dict) or not isinstance(raw.get("role"), str):
        raise CallError(f"messages[{index}]: expected an object with a role, got {raw!r:.200}")
    calls = raw.get("tool_calls") or ()
    try:
        return Message(
            role=raw["role"],
            content=_text(index, raw.get("content")),
            reasoning=raw.get("reasoning_content") or raw.get("reasoning") or "",
            tool_calls=tuple(
                ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
                for call in calls
            ),
            tool_call_id=raw.get("tool_call_id") or "",
            name=raw.get("name") or "",
        )
    except (KeyError, TypeError) as error:
        raise CallError(f"messages[{index}].tool_calls: expected id and function with name and arguments") from error


def _text(index: int, content: Any) -> str:  # noqa: ANN401 - whatever the client sent
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text"):
            raise CallError(f"messages[{index}].content: part of type {kind!r}; this policy reads text only")
        parts.append(str(part.get("text", "")))
    return "".join(parts)


def _tool(index: int, raw: Any) -> Tool:  # noqa: ANN401 - whatever the client sent
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise CallError(f"tools[{index}]: expected a function with a name, got {raw!r:.200}")
    return Tool(
        name=function["name"], description=function.get("description") or "", schema=function.get("parameters") or {}
    )


def answer_body(answer: Answer) -> bytes:
    """Return the body of an answer that is not streamed."""
    return _ENCODER.encode(
        {
            "id": answer.answer_id,
            "object": "chat.completion",
            "created": answer.created_s,
            "model": answer.model,
            "choices": [
                {
                    "index": index,
                    "message": _outgoing(choice.message),
                    "finish_reason": _FINISH[choice.finish],
                    "logprobs": None,
                }
                for index, choice in enumerate(answer.choices)
            ],
            "usage": _usage(answer),
        }
    )


def _outgoing(message: Message) -> Json:
    out: Json = {"role": "assistant", "content": message.content or (None if message.tool_calls else "")}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [_outgoing_call(call) for call in message.tool_calls]
    return out


def _outgoing_call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(answer: Answer) -> Json:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def stream_chunks(answer: Answer, *, include_usage: bool) -> Iterator[bytes]:
    """Yield the server-sent events of an answer, the final usage chunk and the end mark included."""
    head = {
        "id": answer.answer_id,
        "object": "chat.completion.chunk",
        "created": answer.created_s,
        "model": answer.model,
    }

    def event(index: int, delta: Json, finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
        return b"data: " + _ENCODER.encode({**head, "choices": [choice]}) + b"\n\n"

    for index, choice in enumerate(answer.choices):
        yield from (event(index, delta) for delta in _deltas(choice))
        yield event(index, {}, _FINISH[choice.finish])
    if include_usage:
        yield b"data: " + _ENCODER.encode({**head, "choices": [], "usage": _usage(answer)}) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _deltas(choice: AnswerChoice) -> Iterator[Json]:
    message = choice.message
    yield {"role": "assistant", "content": ""}
    if message.reasoning:
        yield {"reasoning_content": message.reasoning}
    if message.content:
        yield {"content": message.content}
    for number, call in enumerate(message.tool_calls):
        yield {"tool_calls": [{"index": number, **_outgoing_call(call)}]}


def error_body(error: CallError) -> bytes:
    """Return the body of an error in the protocol's own form."""
    return _ENCODER.encode(
        {"error": {"message": str(error), "type": "invalid_request_error", "param": None, "code": error.code}}
    )
