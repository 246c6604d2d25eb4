"""Claude Code session files with the files of their sub-agents (``SESSION/subagents/agent-*.jsonl``).

Rows are linked by ``parentUuid``; the rows of one answer share ``message.id`` and are one call. Its prompt is what its
ancestors say, with the results of all tool calls of an answer behind it. A row without a parent (a session's start, a
compaction boundary) begins a history. A sub-agent file whose rows hang below the session's own rows is a compaction.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from opengyre.core.chat import Message, ToolCall
from opengyre.core.errors import FileError
from opengyre.core.types import Role
from opengyre.run.imports.parts import ImportedCall, ImportedExecution, Json, read_lines, text_of


@dataclass
class _Row:
    uuid: str
    parent: str | None
    raw: Json
    agent: str
    where: str


@dataclass
class _Session:
    rows: dict[str, _Row] = field(default_factory=dict)
    answers: dict[str, list[_Row]] = field(default_factory=dict)
    """Message id to its rows in file order."""
    results: dict[str, Message] = field(default_factory=dict)
    """Tool-call id to its result."""
    made: dict[str, Message] = field(default_factory=dict)


def read_claude_code(path: Path) -> list[ImportedExecution]:
    """Return the execution of a session file and the files of its sub-agents.

    Raises:
        FileError: A line is not JSON or not a row of a session; nothing of the session is imported then.
    """
    session = _Session()
    agents = {"main": path}
    agents |= {file.stem: file for file in sorted(path.with_suffix("").glob("subagents/agent-*.jsonl"))}
    order = [row for agent, file in agents.items() for row in _read(session, file, agent)]
    roles = {agent: _role_of(session, agent, order) for agent in agents}
    calls = []
    for message_id, rows in session.answers.items():
        first = rows[0]
        history = _history(session, first)
        if history and not _is_synthetic(first):
            calls.append(_call(session, message_id, first, history, roles[first.agent]))
    if not calls:
        raise FileError(f"{path}: no answer of a model; expected rows of type assistant")
    return [ImportedExecution(execution_id=path.stem, calls=tuple(calls))]


def _read(session: _Session, path: Path, agent: str) -> list[_Row]:
    rows = []
    for number, raw in read_lines(path):
        if not isinstance(raw.get("type"), str):
            raise FileError(f"{path}:{number}: no 'type'; expected a row of a session file")
        if not isinstance(raw.get("uuid"), str):
            continue
        row = _Row(raw["uuid"], raw.get("parentUuid"), raw, agent, f"{path}:{number}")
        session.rows[row.uuid] = row
        rows.append(row)
        if raw["type"] in ("assistant", "user"):
            message = raw.get("message")
            if not isinstance(message, dict) or "content" not in message:
                raise FileError(f"{row.where}: a row of type {raw['type']} without message.content")
            if raw["type"] == "assistant":
                session.answers.setdefault(str(message.get("id") or row.uuid), []).append(row)
            else:
                session.results |= {each.tool_call_id: each for each in _results(row)}
    return rows


def _is_synthetic(row: _Row) -> bool:
    return bool(row.raw["message"].get("model") == "<synthetic>")


def _role_of(session: _Session, agent: str, rows: list[_Row]) -> tuple[Role, str]:
    """Return the role of a file's calls and whose history they belong to."""
    if agent == "main":
        return Role.MAIN, "main"
    for row in rows:
        parent = session.rows.get(row.parent or "")
        if row.agent == agent and parent is not None and parent.agent != agent:
            is_main = parent.agent == "main"
            return (Role.MAIN_SUMMARY if is_main else Role.SUB_AGENT_SUMMARY), parent.agent
    return Role.SUB_AGENT, agent


def _history(session: _Session, row: _Row) -> tuple[Message, ...]:
    """Return what the ancestors of an answer say, oldest first."""
    path: list[_Row] = []
    current = session.rows.get(row.parent or "")
    while current is not None:
        path.append(current)
        current = session.rows.get(current.parent or "")
    messages: list[Message] = []
    own = str(row.raw["message"].get("id") or row.uuid)
    seen = {own}
    for ancestor in reversed(path):
        if ancestor.raw["type"] == "assistant":
            message_id = str(ancestor.raw["message"].get("id") or ancestor.uuid)
            if message_id not in seen:
                seen.add(message_id)
                answer = _answer(session, message_id)
                messages.append(answer)
                messages += [session.results[call.id] for call in answer.tool_calls if call.id in session.results]
        elif ancestor.raw["type"] == "user":
            text = _user_text(session, ancestor)
            if text is not None:
                messages.append(text)
    return tuple(messages)


def _answer(session: _Session, message_id: str) -> Message:
    """Return the whole assistant message that the rows of an answer make."""
    if message_id not in session.made:
        texts, thoughts, calls = [], [], []
        for row in session.answers[message_id]:
            for block in _blocks(row):
                kind = block.get("type")
                if kind == "text":
                    texts.append(str(block.get("text", "")))
                elif kind == "thinking":
                    thoughts.append(str(block.get("thinking", "")))
                elif kind == "tool_use":
                    arguments = msgspec.json.encode(block.get("input", {})).decode()
                    calls.append(ToolCall(id=str(block["id"]), name=str(block["name"]), arguments=arguments))
        session.made[message_id] = Message(
            role="assistant", content="\n".join(texts), reasoning="\n".join(thoughts), tool_calls=tuple(calls)
        )
    return session.made[message_id]


def _user_text(session: _Session, row: _Row) -> Message | None:
    """Return the text of a user row without its tool results, None if it has no text."""
    if row.uuid not in session.made:
        content = row.raw["message"]["content"]
        parts = content if isinstance(content, str) else [each for each in _blocks(row) if each.get("type") == "text"]
        session.made[row.uuid] = Message(role="user", content=text_of(parts, row.where))
    made = session.made[row.uuid]
    return made if made.content else None


def _results(row: _Row) -> list[Message]:
    return [
        Message(
            role="tool",
            content=text_of(block.get("content"), row.where),
            tool_call_id=str(block.get("tool_use_id", "")),
        )
        for block in _blocks(row)
        if block.get("type") == "tool_result"
    ]


def _blocks(row: _Row) -> list[Json]:
    content: Any = row.raw["message"]["content"]
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise FileError(
            f"{row.where}: message.content is {type(content).__name__}, expected a text or a list of blocks"
        )
    return content


def _call(
    session: _Session, message_id: str, row: _Row, history: tuple[Message, ...], role: tuple[Role, str]
) -> ImportedCall:
    return ImportedCall(
        call_id=message_id,
        agent=role[1],
        role=role[0],
        messages=history,
        reply=_answer(session, message_id),
        request_id=str(row.raw.get("requestId") or message_id),
    )
