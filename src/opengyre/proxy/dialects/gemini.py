"""Gemini generateContent: requests and responses are read, for `replay`; nothing is served.

Its calls carry ids that the client invents, or none: an id here is name and place of the call inside its message, and a
result belongs to the next unanswered call of its name (to the very call, where the client repeats its own id).
"""

from dataclasses import dataclass, field

from opengyre.core.chat import Message, Tool, ToolCall
from opengyre.core.errors import CallError
from opengyre.proxy.dialects.parts import (
    body_hash,
    compact,
    read_limit,
    read_object,
    read_objects,
    read_stops,
    read_string,
)
from opengyre.proxy.requests import ChatRequest, Json

NAME = "gemini"
_ROLES = {"user": "user", "model": "assistant", "function": "user"}


@dataclass
class _Reader:
    """Reads contents in order; remembers which calls still wait for a result."""

    messages: list[Message] = field(default_factory=list)
    waiting: list[tuple[str, str, str]] = field(default_factory=list)
    """(id here, the client's id, name) of the latest calls."""

    def take(self, raw: Json, where: str) -> None:
        """Read one content."""
        role = _ROLES.get(str(raw.get("role") or "user"))
        if role is None:
            raise CallError(f"{where}.role: expected user or model, got {raw.get('role')!r:.200}")
        parts = read_objects(raw.get("parts"), f"{where}.parts")
        if role == "assistant":
            message = read_model(parts, where)
            calls = [read_object(part.get("functionCall"), where) for part in parts if "functionCall" in part]
            own = [str(call.get("id") or "") for call in calls]
            self.waiting = [(call.id, given, call.name) for call, given in zip(message.tool_calls, own, strict=True)]
            self.messages.append(message)
            return
        texts: list[str] = []
        for part in parts:
            if "functionResponse" in part:
                self._flush(texts)
                self.messages.append(self._result(read_object(part["functionResponse"], where), where))
            else:
                texts.append(_text(part, where))
        self._flush(texts)

    def _flush(self, texts: list[str]) -> None:
        if texts:
            self.messages.append(Message(role="user", content="\n".join(texts)))
            texts.clear()

    def _result(self, raw: Json, where: str) -> Message:
        name, given = read_string(raw, "name", f"{where}.functionResponse"), str(raw.get("id") or "")
        by_id = [call for call in self.waiting if given and call[1] == given]
        found = next(iter(by_id or [call for call in self.waiting if call[2] == name]), ("", "", ""))
        self.waiting = [call for call in self.waiting if call is not found]
        response = read_object(raw.get("response"), f"{where}.functionResponse.response")
        only = response.get("output") if len(response) == 1 else None
        content = only if isinstance(only, str) else compact(response)
        return Message(role="tool", content=content, tool_call_id=found[0], name=name)


def read_model(parts: list[Json], where: str) -> Message:
    """Return the assistant message of a model's parts.

    Raises:
        CallError: A part is neither text nor a call.
    """
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for part in parts:
        if "functionCall" in part:
            raw = read_object(part["functionCall"], where)
            name = read_string(raw, "name", f"{where}.functionCall")
            arguments = compact(read_object(raw.get("args"), f"{where}.functionCall.args"))
            calls.append(ToolCall(id=f"{name}_{len(calls)}", name=name, arguments=arguments))
        else:
            (thoughts if part.get("thought") else texts).append(_text(part, where))
    return Message(role="assistant", content="".join(texts), reasoning="".join(thoughts), tool_calls=tuple(calls))


def _text(part: Json, where: str) -> str:
    text = part.get("text")
    if not isinstance(text, str):
        raise CallError(f"{where}: part with {', '.join(sorted(part)) or 'nothing'}; this policy reads text only")
    return text


def parse_request(body: Json) -> ChatRequest:
    """Return the request of a decoded body; the model and whether it streams stand in the URL.

    Raises:
        CallError: Contents or tools are not what the protocol says.
    """
    contents = read_objects(body.get("contents"), "contents")
    if not contents:
        raise CallError("contents: expected a non-empty list")
    reader = _Reader()
    system = read_object(body.get("systemInstruction") or body.get("system_instruction"), "systemInstruction")
    texts = [_text(part, "systemInstruction") for part in read_objects(system.get("parts"), "systemInstruction.parts")]
    if texts:
        reader.messages.append(Message(role="system", content="\n".join(texts)))
    for index, raw in enumerate(contents):
        reader.take(raw, f"contents[{index}]")
    config = read_object(body.get("generationConfig"), "generationConfig")
    calling = read_object(read_object(body.get("toolConfig"), "toolConfig").get("functionCallingConfig"), "toolConfig")
    mode = str(calling.get("mode") or "auto").lower()
    return ChatRequest(
        dialect=NAME,
        model=str(body.get("model", "")),
        messages=tuple(reader.messages),
        tools=() if mode == "none" else _tools(read_objects(body.get("tools"), "tools")),
        max_tokens=read_limit(config.get("maxOutputTokens"), "generationConfig.maxOutputTokens"),
        include_usage=True,
        truncated_law=mode == "any" or "responseSchema" in config or "responseJsonSchema" in config,
        stop=read_stops(config.get("stopSequences"), "generationConfig.stopSequences"),
        tool_choice="required" if mode == "any" else mode,
        body_hash=body_hash({**body, "generationConfig": {**config, "maxOutputTokens": None}}, ()),
    )


def _tools(raw: list[Json]) -> tuple[Tool, ...]:
    tools = []
    for index, group in enumerate(raw):
        for each in read_objects(group.get("functionDeclarations"), f"tools[{index}].functionDeclarations"):
            schema = each.get("parametersJsonSchema") or each.get("parameters")
            tools.append(
                Tool(
                    name=read_string(each, "name", f"tools[{index}].functionDeclarations"),
                    description=str(each.get("description") or ""),
                    schema=read_object(schema, f"tools[{index}].parameters"),
                )
            )
    return tuple(tools)


def parse_response(body: Json) -> Message:
    """Return the assistant message of an answer's first candidate.

    Raises:
        CallError: It has none.
    """
    candidates = read_objects(body.get("candidates"), "candidates")
    if not candidates:
        raise CallError("candidates: expected at least one")
    content = read_object(candidates[0].get("content"), "candidates[0].content")
    return read_model(read_objects(content.get("parts"), "candidates[0].parts"), "candidates[0]")
