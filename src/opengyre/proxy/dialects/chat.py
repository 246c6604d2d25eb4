"""OpenAI chat completions."""

from collections.abc import Iterator
from typing import Any

from opengyre.core.chat import Message, Tool, ToolCall
from opengyre.core.errors import CallError
from opengyre.core.types import Finish
from opengyre.proxy.dialects.parts import (
    ENCODER,
    body_hash,
    compact,
    read_limit,
    read_object,
    read_objects,
    read_stops,
    read_string,
    read_text,
)
from opengyre.proxy.items import read_items
from opengyre.proxy.requests import Answer, AnswerChoice, ChatRequest, Json

NAME = "chat"
MOST_CHOICES = 128
_FINISH = {Finish.STOP: "stop", Finish.TOOL_CALLS: "tool_calls", Finish.LENGTH: "length", Finish.ABORT: "length"}
_VOLATILE = ("stream", "stream_options", "max_tokens", "max_completion_tokens")
_TRUNCATING = ("logit_bias", "frequency_penalty", "presence_penalty", "functions")


def parse_request(body: Json) -> ChatRequest:
    """Return the request of a decoded body.

    Raises:
        CallError: Messages or tools are not what the protocol says.
    """
    messages = read_items(body.get("messages"), "messages", _message)
    if not messages:
        raise CallError("messages: expected a non-empty list")
    choice = _tool_choice(body.get("tool_choice"))
    tools = tuple(read_items(body.get("tools"), "tools", _tool))
    form = read_object(body.get("response_format"), "response_format").get("type", "text")
    is_cut = any(body.get(key) for key in _TRUNCATING) or form != "text" or choice not in ("auto", "none")
    limit = body.get("max_completion_tokens")
    return ChatRequest(
        dialect=NAME,
        model=str(body.get("model", "")),
        messages=tuple(messages),
        tools=() if choice == "none" else tools,
        max_tokens=read_limit(body.get("max_tokens") if limit is None else limit, "max_tokens"),
        stream=bool(body.get("stream", False)),
        include_usage=bool(read_object(body.get("stream_options"), "stream_options").get("include_usage", False)),
        choices=_choices(body.get("n")),
        truncated_law=is_cut,
        stop=read_stops(body.get("stop"), "stop"),
        tool_choice=choice,
        body_hash=body_hash(body, _VOLATILE),
    )


def _choices(raw: Any) -> int:  # noqa: ANN401 - whatever the client sent
    count = read_limit(raw, "n") or 1
    if count > MOST_CHOICES:
        raise CallError(f"n: expected at most {MOST_CHOICES}, got {count}")
    return count


def _tool_choice(raw: Any) -> str:  # noqa: ANN401 - whatever the client sent
    if raw is None or isinstance(raw, str):
        return raw or "auto"
    choice = read_object(raw, "tool_choice")
    if choice.get("type") == "allowed_tools":
        return str(read_object(choice.get("allowed_tools"), "tool_choice.allowed_tools").get("mode", "auto"))
    return read_string(read_object(choice.get("function"), "tool_choice.function"), "name", "tool_choice.function")


def _message(raw: Any, where: str) -> Message:  # noqa: ANN401 - whatever the client sent
    if not isinstance(raw, dict) or not isinstance(raw.get("role"), str):
        raise CallError(f"{where}: expected an object with a role, got {raw!r:.200}")
    content, calls = raw.get("content"), raw.get("tool_calls")
    if not isinstance(content, str):
        content = read_text(content, f"{where}.content", separator="" if raw["role"] == "assistant" else "\n")
    return Message(
        role=raw["role"],
        content=content,
        reasoning=str(raw.get("reasoning_content") or raw.get("reasoning") or ""),
        tool_calls=_calls(calls, f"{where}.tool_calls") if calls is not None else (),
        tool_call_id=str(raw.get("tool_call_id") or ""),
        name=str(raw.get("name") or ""),
    )


def _calls(raw: Any, where: str) -> tuple[ToolCall, ...]:  # noqa: ANN401 - whatever the client sent
    calls = []
    for call in read_objects(raw, where):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise CallError(f"{where}: expected id and function with name and arguments, got {call!r:.200}")
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = compact(read_object(arguments, f"{where}.function.arguments"))
        calls.append(ToolCall(id=str(call.get("id") or ""), name=function["name"], arguments=arguments))
    return tuple(calls)


def _tool(raw: Any, where: str) -> Tool:  # noqa: ANN401 - whatever the client sent
    function = read_object(raw, where).get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise CallError(f"{where}: expected a function with a name, got {raw!r:.200}")
    return Tool(
        name=function["name"],
        description=str(function.get("description") or ""),
        schema=read_object(function.get("parameters"), f"{where}.function.parameters"),
    )


def parse_response(body: Json) -> Message:
    """Return the assistant message of an answer's first choice.

    Raises:
        CallError: It has none.
    """
    choices = read_objects(body.get("choices"), "choices")
    if not choices:
        raise CallError("choices: expected at least one")
    return _message(
        {**read_object(choices[0].get("message"), "choices[0].message"), "role": "assistant"}, "choices[0].message"
    )


def answer_body(_: ChatRequest, answer: Answer) -> bytes:
    """Return the body of an answer that is not streamed."""
    return ENCODER.encode(
        {
            "id": f"chatcmpl-{answer.answer_id}",
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


def stream_chunks(request: ChatRequest, answer: Answer) -> Iterator[bytes]:
    """Yield the server-sent events of an answer, the final usage chunk and the end mark included."""
    head = {
        "id": f"chatcmpl-{answer.answer_id}",
        "object": "chat.completion.chunk",
        "created": answer.created_s,
        "model": answer.model,
    }

    def event(index: int, delta: Json, finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
        return b"data: " + ENCODER.encode({**head, "choices": [choice]}) + b"\n\n"

    for index, choice in enumerate(answer.choices):
        yield from (event(index, delta) for delta in _deltas(choice))
        yield event(index, {}, _FINISH[choice.finish])
    if request.include_usage:
        yield b"data: " + ENCODER.encode({**head, "choices": [], "usage": _usage(answer)}) + b"\n\n"
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
    return ENCODER.encode({"error": error_object(error)})


def error_object(error: CallError) -> Json:
    """Return what stands under ``error`` in both protocols of OpenAI."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    if error.status == 429:
        kind = "rate_limit_error"
    return {"message": str(error), "type": kind, "param": None, "code": error.code}


def stream_error(_: CallError) -> bytes | None:
    """Return None: an error is answered by its status, streamed or not."""
    return None
