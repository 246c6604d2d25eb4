"""The items of OpenAI Responses: read into messages and tools, and written from an answer.

An answer is several items (thought, text, one for each call); neighbouring items of the assistant are one message.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from opengyre.core.chat import Message, Tool, ToolCall
from opengyre.core.errors import CallError
from opengyre.core.types import Finish
from opengyre.proxy.dialects.parts import (
    compact,
    merged,
    object_in,
    read_object,
    read_objects,
    read_string,
    read_text,
    seal,
    unseal,
)
from opengyre.proxy.requests import Answer, ChatRequest, Json, ToolWire

SUMMARY_HEAD = "Summary of the work so far, whose messages are no longer shown:\n"
COMPACTION_PROMPT = (
    "Write a summary of the work so far. It will replace the conversation above, so name the task, what was done and "
    "found out, which files matter and why, and what remains to be done. Answer with the summary only and call no tool."
)
_ROLES = ("user", "assistant", "system", "developer")
_HOSTED = ("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "tool_search_call")
"""What a vendor's server did by itself: nothing that this policy has seen."""
_LOCAL_SHELL_SCHEMA: Json = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "timeout_ms": {"type": "integer"},
        "working_directory": {"type": "string"},
    },
    "required": ["command"],
}
_CUSTOM_SCHEMA: Json = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass
class Toolbox:
    """The tools of a request and how their calls look on the wire."""

    tools: list[Tool] = field(default_factory=list)
    wires: dict[str, ToolWire] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    def add_all(self, raw: list[Json], where: str, namespace: str = "") -> None:
        """Take in tools; what a vendor's server would run is left out."""
        for index, each in enumerate(raw):
            place, kind = f"{where}[{index}]", each.get("type")
            if kind == "function":
                schema = read_object(each.get("parameters"), f"{place}.parameters")
                wire = ToolWire(kind="function", name=read_string(each, "name", place), namespace=namespace)
                self._add(wire, each, schema)
            elif kind == "custom":
                self._add(ToolWire(kind="custom", name=read_string(each, "name", place)), each, _CUSTOM_SCHEMA)
            elif kind == "local_shell":
                self._add(ToolWire(kind="local_shell", name="local_shell"), each, _LOCAL_SHELL_SCHEMA)
            elif kind == "namespace" and not namespace:
                self.add_all(read_objects(each.get("tools"), f"{place}.tools"), place, read_string(each, "name", place))

    def _add(self, wire: ToolWire, raw: Json, schema: Json) -> None:
        """Add a tool under a name that no other has."""
        name = wire.name if wire.name not in self._taken else f"{wire.namespace or wire.kind}__{wire.name}"
        self._taken.add(name)
        self.tools.append(Tool(name=name, description=str(raw.get("description") or ""), schema=schema))
        if wire != ToolWire(kind="function", name=name):
            self.wires[name] = wire

    def name_of(self, wire: ToolWire) -> str:
        """Return the name under which the policy knows a tool."""
        return next((name for name, each in self.wires.items() if each == wire), wire.name)


@dataclass
class ItemReader:
    """Reads items in order.

    Example: reasoning, message, function_call, function_call_output are an assistant message and a tool message.
    """

    toolbox: Toolbox = field(default_factory=Toolbox)
    messages: list[Message] = field(default_factory=list)
    is_compaction: bool = False

    def take(self, item: Json, where: str) -> None:
        """Read one item.

        Raises:
            CallError: It is malformed, or of a type that this policy cannot read.
        """
        kind = str(item.get("type") or "message")
        readers: dict[str, Callable[[Json, str], Message]] = {
            "message": _message,
            "reasoning": _reasoning,
            "function_call": self._function_call,
            "custom_tool_call": self._custom_call,
            "local_shell_call": self._shell_call,
            "function_call_output": _result,
            "custom_tool_call_output": _result,
            "local_shell_call_output": _result,
            "compaction": _compaction,
            "compaction_summary": _compaction,
        }
        if kind == "compaction_trigger":
            self.is_compaction = True
        elif kind in readers:
            self._put(readers[kind](item, where))
        elif kind not in _HOSTED:
            raise CallError(f"{where}: item of type {kind!r:.200}; this proxy reads {', '.join(readers)}")

    def _put(self, message: Message) -> None:
        last = self.messages[-1] if self.messages else None
        if message.role == "assistant" and last is not None and last.role == "assistant":
            self.messages[-1] = merged([last, message])
        else:
            self.messages.append(message)

    def _function_call(self, item: Json, where: str) -> Message:
        wire = ToolWire(
            kind="function", name=read_string(item, "name", where), namespace=str(item.get("namespace") or "")
        )
        return self._call(item, wire, read_string(item, "arguments", where), where)

    def _custom_call(self, item: Json, where: str) -> Message:
        wire = ToolWire(kind="custom", name=read_string(item, "name", where))
        return self._call(item, wire, compact({"input": read_string(item, "input", where)}), where)

    def _shell_call(self, item: Json, where: str) -> Message:
        action = read_object(item.get("action"), f"{where}.action")
        arguments = {key: value for key, value in action.items() if key != "type" and value not in (None, {})}
        return self._call(item, ToolWire(kind="local_shell", name="local_shell"), compact(arguments), where)

    def _call(self, item: Json, wire: ToolWire, arguments: str, where: str) -> Message:
        call_id = read_string(item, "call_id", where)
        call = ToolCall(id=call_id, name=self.toolbox.name_of(wire), arguments=arguments)
        return Message(role="assistant", tool_calls=(call,))


def _message(item: Json, where: str) -> Message:
    role = item.get("role")
    if role not in _ROLES:
        raise CallError(f"{where}.role: expected one of {', '.join(_ROLES)}, got {role!r:.200}")
    separator = "" if role == "assistant" else "\n"
    return Message(role=role, content=read_text(item.get("content"), f"{where}.content", separator=separator))


def _reasoning(item: Json, where: str) -> Message:
    """Return a thought: what we sealed, else what is readable of another server's."""
    text = unseal(item.get("encrypted_content"))
    if text is None:
        readable = item.get("content") or item.get("summary")
        text = read_text(readable, f"{where}.summary", separator="")
    return Message(role="assistant", reasoning=text)


def _result(item: Json, where: str) -> Message:
    call_id = item.get("call_id") or item.get("id")
    if not isinstance(call_id, str):
        raise CallError(f"{where}.call_id: expected a text, got {call_id!r:.200}")
    return Message(role="tool", content=read_text(item.get("output"), f"{where}.output"), tool_call_id=call_id)


def _compaction(item: Json, where: str) -> Message:
    text = unseal(item.get("encrypted_content"))
    if text is None:
        raise CallError(f"{where}: this compaction was not made by this proxy")
    return Message(role="user", content=SUMMARY_HEAD + text)


def output_items(request: ChatRequest, answer: Answer) -> list[Json]:
    """Return the items of an answer."""
    choice = answer.choices[0]
    message, name = choice.message, answer.answer_id
    if request.is_compaction:
        return [{"type": "compaction", "id": f"cmp_{name}", "encrypted_content": seal(message.content)}]
    status = "incomplete" if choice.finish in (Finish.LENGTH, Finish.ABORT) else "completed"
    items: list[Json] = []
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        sealed = seal(message.reasoning)
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": summary, "encrypted_content": sealed})
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status, "content": [part]})
    for number, call in enumerate(message.tool_calls):
        items.append(call_item(call, request.wires, f"{name}_{number}"))
    return items


def call_item(call: ToolCall, wires: Mapping[str, ToolWire], name: str) -> Json:
    """Return the item of a call in the form that its tool has on the wire."""
    wire = wires.get(call.name) or ToolWire(kind="function", name=call.name)
    values = object_in(call.arguments)
    if wire.kind == "custom":
        given = values.get("input") if values is not None and len(values) == 1 else None
        text = given if isinstance(given, str) else call.arguments
        item = {"type": "custom_tool_call", "id": f"ctc_{name}", "call_id": call.id, "name": wire.name, "input": text}
        return {**item, "status": "completed"}
    if wire.kind == "local_shell" and values is not None and _is_command(values.get("command")):
        action = {"env": {}, **values, "type": "exec"}
        return {
            "type": "local_shell_call",
            "id": f"lsh_{name}",
            "call_id": call.id,
            "action": action,
            "status": "completed",
        }
    item = {"type": "function_call", "id": f"fc_{name}", "call_id": call.id, "name": wire.name}
    item |= {"arguments": call.arguments, "status": "completed"}
    return item | ({"namespace": wire.namespace} if wire.namespace else {})


def _is_command(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def retained_items(request: ChatRequest) -> list[Json]:
    """Return the users' messages of a history that is being compacted, the request to summarise it left out."""
    return [
        {
            "type": "message",
            "id": f"msg_kept_{index}",
            "role": "user",
            "status": "completed",
            "content": [{"type": "input_text", "text": message.content}],
        }
        for index, message in enumerate(request.messages[:-1])
        if message.role == "user"
    ]


def as_compaction(request: ChatRequest) -> ChatRequest:
    """Return a request as one for a summary: its history, and what is asked at the end."""
    messages = (*request.messages, Message(role="user", content=COMPACTION_PROMPT))
    return msgspec.structs.replace(request, messages=messages, is_compaction=True)
