"""What the requests and answers of executions were, as they went over the wire: ``proxy.keep_bodies``.

One file an execution, in the format of captures, so that ``opengyre replay`` reads it. Written when the answer is
committed, and not synced: it is for people, the ledger is what a run lives by.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from opengyre.proxy.dialects import Dialect
from opengyre.proxy.redaction import host_names, redacted_call
from opengyre.proxy.requests import Answer, ChatRequest, Json

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True)
class Asked:
    """A request before it is answered.

    Example: ``Asked("chat", "/v1/chat/completions", {}, {"messages": []}, time.monotonic())``.
    """

    protocol: str
    path: str
    headers: Mapping[str, str]
    body: Json
    started_s: float


@dataclass
class BodyFiles:
    """Appends calls to one file an execution.

    Args:
        folder: Where the files lie; it is made with the first of them.
    """

    folder: Path
    _counts: dict[str, int] = field(default_factory=dict)
    _began_s: dict[str, float] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=host_names)

    def path(self, execution_id: str) -> Path:
        """Return the file of an execution."""
        return self.folder / f"{execution_id}.jsonl"

    def keep(self, execution_id: str, asked: Asked, status: int, response: Json | None) -> None:
        """Append a call.

        Args:
            execution_id: Whose it is.
            asked: The request.
            status: HTTP status of the answer.
            response: Body of the answer; a streamed one as the body that it comes to.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        number = self._next(execution_id)
        began_s = self._began_s.setdefault(execution_id, asked.started_s)
        line: dict[str, Any] = {
            "n": number,
            "t": round(asked.started_s - began_s, 4),
            "dt": round(time.monotonic() - asked.started_s, 4),
            "protocol": asked.protocol,
            "method": "POST",
            "path": asked.path,
            "headers": dict(asked.headers),
            "request": asked.body,
            "status": status,
            "response": response,
        }
        with self.path(execution_id).open("ab") as file:
            file.write(_ENCODER.encode(redacted_call(line, self._names)) + b"\n")

    def _next(self, execution_id: str) -> int:
        """Return the number of the next call; a driver that goes on with a run finds the earlier ones in the file."""
        if execution_id not in self._counts:
            path = self.path(execution_id)
            self._counts[execution_id] = len(path.read_bytes().splitlines()) if path.exists() else 0
        self._counts[execution_id] += 1
        return self._counts[execution_id]


def response_of(dialect: Dialect, parsed: ChatRequest, answer: Answer) -> Json:
    """Return the body of an answer as a capture has it: argument text beside it where the protocol parses it."""
    body: Json = msgspec.json.decode(dialect.answer_body(parsed, answer))
    if parsed.dialect == "anthropic":
        calls = [call for choice in answer.choices for call in choice.message.tool_calls]
        body["_raw_tool_args"] = [call.arguments for call in calls]
    return body
