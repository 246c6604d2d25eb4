"""OpenAI-style message lists: a JSON file or JSON lines of ``{"messages": [...], "tools": [...]}`` or of bare lists.

Every assistant message is a call whose prompt is what stands before it.
"""

from pathlib import Path
from typing import Any

import msgspec

from opengyre.core.chat import Message, Tool, ToolCall
from opengyre.core.errors import FileError
from opengyre.core.types import Role
from opengyre.run.imports.parts import ImportedCall, ImportedExecution, Json, read_bytes, text_of

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_openai(path: Path) -> list[ImportedExecution]:
    """Return one execution for each message list.

    Raises:
        FileError: A line is no message list; the message names file, line and what was expected.
    """
    executions = []
    for number, value in _values(path):
        where = f"{path}:{number}"
        raw = {"messages": value} if isinstance(value, list) else value
        if not isinstance(raw, dict) or not isinstance(raw.get("messages"), list) or not raw["messages"]:
            raise FileError(f"{where}: expected an object with a non-empty list 'messages', or such a list")
        name = str(raw.get("execution_id") or raw.get("id") or f"{path.stem}-{number}")
        executions.append(execution_of(name, raw, where))
    if not executions:
        raise FileError(f"{path}: empty; expected message lists")
    return executions


def _values(path: Path) -> list[tuple[int, Any]]:
    """Return (line number, value): of a file that is one value as a whole, or of each line."""
    data = read_bytes(path)
    try:
        whole = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return [(number, _decoded(path, number, line)) for number, line in enumerate(data.splitlines(), 1) if line]
    if isinstance(whole, list) and whole and isinstance(whole[0], (list, dict)) and not _is_message(whole[0]):
        return [(1, each) for each in whole]
    return [(1, whole)]


def _decoded(path: Path, number: int, line: bytes) -> Any:  # noqa: ANN401 - from a file
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path}:{number}: not JSON: {error}; expected one message list a line") from error


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and "role" in value


def execution_of(name: str, raw: Json, where: str) -> ImportedExecution:
    """Return the execution of one message list.

    Raises:
        FileError: A message or tool is malformed, or no assistant speaks.
    """
    messages = [message_of(each, f"{where}: messages[{index}]") for index, each in enumerate(raw["messages"])]
    tools = tuple(tool_of(each, f"{where}: tools[{index}]") for index, each in enumerate(raw.get("tools") or ()))
    calls = [
        ImportedCall(
            call_id=f"{name}-c{index:04d}",
            agent="main",
            role=Role.MAIN,
            messages=tuple(messages[:index]),
            reply=message,
            tools=tools,
        )
        for index, message in enumerate(messages)
        if message.role == "assistant" and index
    ]
    if not calls:
        raise FileError(f"{where}: no assistant message behind another message; expected at least one")
    return ImportedExecution(execution_id=name, calls=tuple(calls))


def message_of(raw: Any, where: str) -> Message:  # noqa: ANN401 - from a file
    """Return one message.

    Raises:
        FileError: It has no role, or its content or tool calls are malformed.
    """
    if not isinstance(raw, dict) or raw.get("role") not in _ROLES:
        raise FileError(f"{where}: {str(raw)[:80]!r}; expected an object with role {', '.join(_ROLES)}")
    calls = raw.get("tool_calls") or ()
    if raw.get("function_call"):
        calls = [{"id": "", "function": raw["function_call"]}]
    try:
        tool_calls = tuple(
            ToolCall(
                id=str(call.get("id") or ""), name=call["function"]["name"], arguments=_arguments(call["function"])
            )
            for call in calls
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{where}.tool_calls: expected id and function with name and arguments") from error
    return Message(
        role=raw["role"],
        content=text_of(raw.get("content"), where),
        reasoning=str(raw.get("reasoning_content") or raw.get("reasoning") or ""),
        tool_calls=tool_calls,
        tool_call_id=str(raw.get("tool_call_id") or ""),
        name=str(raw.get("name") or ""),
    )


def _arguments(function: Json) -> str:
    arguments = function.get("arguments", "")
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def tool_of(raw: Any, where: str) -> Tool:  # noqa: ANN401 - from a file
    """Return one tool.

    Raises:
        FileError: It has no name.
    """
    function = raw.get("function", raw) if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FileError(f"{where}: {str(raw)[:80]!r}; expected a function with a name")
    return Tool(
        name=function["name"],
        description=str(function.get("description") or ""),
        schema=function.get("parameters") or function.get("input_schema") or {},
    )
