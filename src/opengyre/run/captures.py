"""Capture files: one HTTP request and its answer a line, as they went over the wire."""

from pathlib import Path
from typing import Any

import msgspec

from opengyre.core.errors import FileError


class CapturedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a capture; keys that are not named here are carried by the file and not read.

    Example: ``{"n": 1, "protocol": "chat", "path": "/v1/chat/completions", "headers": {}, "request": {...},
    "status": 200, "response": {...}}``.
    """

    n: int
    protocol: str
    path: str
    status: int
    method: str = "POST"
    headers: dict[str, str] = {}
    request: dict[str, Any] | None = None
    response: dict[str, Any] | None = None
    fault: str | None = None
    """The server dropped the stream half-way."""


def read_capture(path: Path) -> list[CapturedCall]:
    """Return the calls of a capture in order.

    Raises:
        FileError: A line is not what a capture says; the message names it.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error
    calls = []
    for number, line in enumerate(lines, 1):
        try:
            calls.append(msgspec.json.decode(line, type=CapturedCall))
        except msgspec.DecodeError as error:
            raise FileError(f"{path}:{number}: not a line of a capture: {error}") from error
    if not calls:
        raise FileError(f"{path}: holds no request; expected a capture, one JSON object a line")
    return calls
