"""Recorded traces as workloads: the calls of executions, with context, sampled tokens and the gap behind each.

Three formats, told by the name of the file: a folder or ``.json`` of agentic KV traces (a file is an execution);
``.jsonl`` with ``timestamp`` in milliseconds, ``input_length``, ``output_length`` and ``hash_ids`` (calls that extend
one another's blocks are one execution); ``.csv`` with ``TIMESTAMP``, ``ContextTokens`` and ``GeneratedTokens`` (a row
is an execution of one call).
"""

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from opengyre.core.errors import FileError


@dataclass(frozen=True)
class TraceCall:
    """One recorded call.

    Example: ``TraceCall(context_tokens=17432, output_tokens=309, gap_s=3.1)``.
    """

    context_tokens: float
    output_tokens: float
    gap_s: float
    """From its answer to the next call of its execution, as far as it is known."""


Session = tuple[TraceCall, ...]


def load_trace(path: Path) -> tuple[Session, ...]:
    """Return the executions of a trace.

    Raises:
        FileError: It cannot be read, a column is missing, or time decreases; names the file and the row.
    """
    try:
        if path.is_dir():
            names = sorted(name for name in path.glob("*.json") if name.name != "index.json")
            sessions = tuple(_agentic(name) for name in names)
        elif path.suffix == ".json":
            sessions = (_agentic(path),)
        elif path.suffix == ".jsonl":
            sessions = _blocks(path)
        elif path.suffix == ".csv":
            sessions = _rows(path)
        else:
            raise FileError(f"{path}: expected a folder, .json, .jsonl or .csv")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: {error}; expected a trace") from error
    sessions = tuple(session for session in sessions if session)
    if not sessions:
        raise FileError(f"{path}: holds no call with sampled tokens; expected at least one")
    return sessions


def _number(row: dict[str, Any], key: str, place: str) -> float:
    value = row.get(key)
    try:
        number = float(value) if value is not None else -1.0
    except (TypeError, ValueError):
        number = -1.0
    if number < 0:
        raise FileError(f"{place}: {key} = {value!r}: expected a number of 0 or more")
    return number


def _parsed(text: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise FileError(f"{place}: {error}; expected JSON") from error
    if not isinstance(value, dict):
        raise FileError(f"{place}: {type(value).__name__}; expected a JSON object")
    return value


def _agentic(path: Path) -> Session:
    """One file is one execution; the calls of its sub-agents stand among its own, in the order of time."""
    data = _parsed(path.read_text(), str(path))
    found: list[tuple[float, float, float, float]] = []
    if not isinstance(data.get("requests"), list):
        raise FileError(f"{path}: requests: missing; expected a list of calls")
    last_s = 0.0
    for number, request in enumerate(data["requests"]):
        place = f"{path} requests[{number}]"
        start_s = _number(request, "t", place)
        if start_s < last_s:
            raise FileError(f"{place}: t = {start_s:g} after {last_s:g}: expected time that does not decrease")
        last_s = start_s
        if isinstance(request.get("requests"), list):
            found += [
                _agentic_call(one, f"{place}.requests[{inner}]", start_s)
                for inner, one in enumerate(request["requests"])
            ]
        else:
            found.append(_agentic_call(request, place, 0.0))
    if not found:
        return ()
    found.sort(key=lambda one: one[0])
    ends = [call[0] + call[3] for call in found]
    gaps = [max(0.0, after[0] - end) for after, end in zip(found[1:], ends, strict=False)] + [0.0]
    return tuple(
        TraceCall(context, output, gap) for (_, context, output, _), gap in zip(found, gaps, strict=True) if output
    )


def _agentic_call(request: dict[str, Any], place: str, base_s: float) -> tuple[float, float, float, float]:
    served_s = _number(request, "api_time", place) if "api_time" in request else 0.0
    start_s = _number(request, "t", place)
    return max(base_s, start_s), _number(request, "in", place), _number(request, "out", place), served_s


def _blocks(path: Path) -> tuple[Session, ...]:
    sessions: list[list[tuple[float, float, float]]] = []
    ends: dict[int, int] = {}
    last = 0.0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        place = f"{path}:{number}"
        row = _parsed(line, place)
        at, context, output = (_number(row, key, place) for key in ("timestamp", "input_length", "output_length"))
        if at < last:
            raise FileError(f"{place}: timestamp = {at:g} after {last:g}: expected time that does not decrease")
        last = at
        blocks = row.get("hash_ids")
        if not isinstance(blocks, list):
            raise FileError(f"{place}: hash_ids: missing; expected a list of blocks")
        known = next((ends.pop(block) for block in reversed(blocks[:-1]) if block in ends), None)
        if known is None:
            known = len(sessions)
            sessions.append([])
        sessions[known].append((at / 1000, context, output))
        if len(blocks) > 1:
            ends[blocks[-2]] = known
    return tuple(_with_gaps(session) for session in sessions)


def _with_gaps(session: list[tuple[float, float, float]]) -> Session:
    gaps = [after[0] - call[0] for call, after in pairwise(session)] + [0.0]
    return tuple(TraceCall(call[1], call[2], gap) for call, gap in zip(session, gaps, strict=True) if call[2])


def _rows(path: Path) -> tuple[Session, ...]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(reader.fieldnames or ())
        if missing:
            raise FileError(f"{path}:1: column {min(missing)} is missing; the columns are {reader.fieldnames}")
        return tuple(_csv_sessions(path, reader))


def _csv_sessions(path: Path, reader: Iterable[dict[str, str]]) -> Iterable[Session]:
    last = datetime.min
    for number, row in enumerate(reader, 2):
        place = f"{path}:{number}"
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        except (TypeError, ValueError) as error:
            raise FileError(f"{place}: TIMESTAMP = {row['TIMESTAMP']!r}: expected a date and time") from error
        if at < last:
            raise FileError(f"{place}: TIMESTAMP = {at} after {last}: expected time that does not decrease")
        last = at
        output = _number(row, "GeneratedTokens", place)
        if output:
            yield (TraceCall(_number(row, "ContextTokens", place), output, 0.0),)
