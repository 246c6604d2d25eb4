"""SWE-agent trajectories (``.traj``): the prompt of each step where the file holds it, else the history before it."""

from pathlib import Path
from typing import Any

from opengyre.core.chat import Message
from opengyre.core.errors import FileError
from opengyre.core.types import Role
from opengyre.run.imports.openai import message_of
from opengyre.run.imports.parts import ImportedCall, ImportedExecution, Json, read_object


def read_swe_agent(path: Path) -> list[ImportedExecution]:
    """Return the execution of a ``.traj`` file; demonstrations in its history are context.

    Raises:
        FileError: The file has no steps or history, or a message is malformed.
    """
    raw = read_object(path)
    steps = raw.get("trajectory")
    history = raw.get("history")
    if not isinstance(steps, list) or not steps or not isinstance(history, list):
        raise FileError(f"{path}:1: expected an object with lists 'trajectory' and 'history'")
    messages = [_message(each, f"{path}: history[{index}]") for index, each in enumerate(history)]
    replies = [index for index, each in enumerate(history) if _is_policy(each)]
    calls = []
    for number, step in enumerate(steps):
        place = replies[number] if number < len(replies) else None
        calls.append(_call(path, number, step, messages, place))
    return [ImportedExecution(execution_id=path.stem, calls=tuple(calls))]


def _is_policy(raw: Json) -> bool:
    return raw.get("role") == "assistant" and not raw.get("is_demo")


def _call(path: Path, number: int, step: Json, history: list[Message], place: int | None) -> ImportedCall:
    where = f"{path}: trajectory[{number}]"
    if not isinstance(step, dict) or not isinstance(step.get("response"), str):
        raise FileError(f"{where}: expected an object with a text 'response'")
    prompt = step.get("messages") or step.get("query")
    if isinstance(prompt, list) and prompt:
        messages = _prompt([_message(each, f"{where}.messages[{i}]") for i, each in enumerate(prompt)], step)
    elif place is not None:
        messages = history[:place]
    else:
        raise FileError(f"{where}: no messages, and no assistant message of the history left for it")
    reply = history[place] if place is not None else Message(role="assistant", content=step["response"])
    name = f"{path.stem}-c{number:04d}"
    return ImportedCall(call_id=name, agent="main", role=Role.MAIN, messages=tuple(messages), reply=reply)


def _prompt(messages: list[Message], step: Json) -> list[Message]:
    """Return the prompt without the step's own reply and what follows it, where the file appended them."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].role == "assistant":
            said = messages[index].content.strip()
            is_own = said and said == str(step["response"]).strip()
            return messages[:index] if is_own and index >= len(messages) - 2 else messages
    return messages


def _message(raw: Any, where: str) -> Message:  # noqa: ANN401 - from a file
    """Return a message; results carry their call's id in a list of one."""
    if isinstance(raw, dict) and isinstance(raw.get("tool_call_ids"), list) and raw["tool_call_ids"]:
        raw = {**raw, "tool_call_id": raw["tool_call_ids"][0]}
    return message_of(raw, where)
