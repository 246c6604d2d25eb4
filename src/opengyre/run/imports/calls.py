"""Our own file of calls: one JSON object a line, with token ids.

    {"execution_id": "e1", "context": [1, 2], "output": [3, 4], "logprobs": [-0.1, -0.2]}

``call_id``, ``request_id``, ``agent`` (``main``), ``role`` (``main``), ``version`` (0) and ``approximate`` (false) may
stand beside them. Without ``logprobs`` the call is approximate.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from opengyre.core.errors import FileError
from opengyre.core.types import Role, VersionRun
from opengyre.run.imports.parts import ImportedCall, ImportedExecution, Json, TokenRecord, logprob_list, read_lines
from opengyre.run.imports.parts import token_ids as ids_of
from opengyre.trajectory.tree import TrajectoryTree

_KEYS = {
    "execution_id",
    "call_id",
    "request_id",
    "agent",
    "role",
    "version",
    "approximate",
    "context",
    "output",
    "logprobs",
}


def read_calls(path: Path, *, vocabulary: int | None = None) -> list[ImportedExecution]:
    """Return the executions of a file of calls.

    Raises:
        FileError: A line is not such a call; the message names file, line and what was expected.
    """
    calls: dict[str, list[ImportedCall]] = {}
    rendered: set[str] = set()
    seen: dict[str, int] = {}
    for number, raw in read_lines(path):
        where = f"{path}:{number}"
        execution_id = str(raw.get("execution_id", path.stem))
        call = _call(raw, where, f"{execution_id}-{number:06d}", vocabulary)
        if call.call_id in seen:
            raise FileError(f"{where}: call_id {call.call_id!r} stands in line {seen[call.call_id]} already")
        seen[call.call_id] = number
        calls.setdefault(execution_id, []).append(call)
        if raw.get("approximate"):
            rendered.add(execution_id)
    if not calls:
        raise FileError(f"{path}: no calls; expected one JSON object a line")
    return [
        ImportedExecution(execution_id=name, calls=tuple(found), is_approximate=name in rendered)
        for name, found in calls.items()
    ]


def _call(raw: Json, where: str, default_id: str, vocabulary: int | None) -> ImportedCall:
    unknown = sorted(set(raw) - _KEYS)
    if unknown or "context" not in raw or "output" not in raw:
        wrong = f"unknown key {unknown[0]!r}" if unknown else "no context or no output"
        raise FileError(f"{where}: {wrong}; expected context, output and any of {', '.join(sorted(_KEYS))}")
    roles = [role.value for role in Role]
    role, version = raw.get("role", "main"), raw.get("version", 0)
    if role not in roles:
        raise FileError(f"{where}: role {role!r}; expected one of {', '.join(roles)}")
    if not isinstance(version, int):
        raise FileError(f"{where}: version {version!r}; expected an integer")
    context = ids_of(raw["context"], f"{where}: context", vocabulary=vocabulary)
    output = ids_of(raw["output"], f"{where}: output", vocabulary=vocabulary)
    given = raw.get("logprobs")
    logprobs = None if given is None else logprob_list(given, output, f"{where}: logprobs")
    call_id = str(raw.get("call_id", default_id))
    return ImportedCall(
        call_id=call_id,
        request_id=str(raw.get("request_id", call_id)),
        agent=str(raw.get("agent", "main")),
        role=Role(role),
        tokens=TokenRecord(context=context, output=output, logprobs=logprobs),
        versions=(VersionRun(version, len(output)),),
    )


def calls_to_lines(trees: Sequence[TrajectoryTree]) -> bytes:
    """Return the calls of trees as such a file."""
    lines = []
    for tree in trees:
        for index, call in enumerate(tree.calls):
            line: Json = {
                "execution_id": tree.execution_id,
                "call_id": call.call_id,
                "request_id": call.request_id,
                "agent": call.agent,
                "role": call.role.value,
                "version": call.versions[0].version if call.versions else 0,
                "context": tree.context_of(index).tolist(),
                "output": tree.output_of(index).tolist(),
            }
            if tree.is_approximate:
                line["approximate"] = True
            elif len(call.logprobs):
                line["logprobs"] = call.logprobs.tolist()
            lines.append(msgspec.json.encode(line))
    return b"\n".join([*lines, b""])
