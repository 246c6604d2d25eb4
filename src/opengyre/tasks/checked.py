"""What the control gate found, kept beside a task, so that a run can refuse tasks that nobody checked."""

import hashlib
import platform
from pathlib import Path

import msgspec

from opengyre.core.errors import FileError
from opengyre.core.types import Task
from opengyre.tasks.gate import GateVerdict

CHECK_FILE = "opengyre-check.json"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``opengyre-check.json``.

    Example: ``{"fingerprint": "9f0c...", "accepted": true, "reason": "accepted", "total": 27, "python": "3.11.7",
    "tests": ["tests/test_a.py::test_b", ...]}``.
    """

    fingerprint: str
    accepted: bool
    reason: str
    total: int
    python: str
    tests: tuple[str, ...] = ()
    """The frozen ids."""


def fingerprint(task: Task) -> str:
    """Return a hash of everything that decides a task's score: its files, tests, grader and limits."""
    digest = hashlib.blake2b(msgspec.json.encode(task, order="deterministic"), digest_size=16)
    return digest.hexdigest()


def write_check(folder: Path, task: Task, verdict: GateVerdict) -> None:
    """Keep a verdict beside its task.

    Raises:
        FileError: The folder cannot be written.
    """
    check = Check(
        fingerprint=fingerprint(task),
        accepted=verdict.is_accepted,
        reason=verdict.reason,
        total=verdict.total,
        python=platform.python_version(),
        tests=task.test_ids,
    )
    path = folder / CHECK_FILE
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(check)) + b"\n")
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror}; the verdict would be lost") from error


def why_unchecked(folder: Path, task: Task) -> str:
    """Return why a task may not be trained on, empty if the gate accepted exactly this task with this Python."""
    try:
        check = msgspec.json.decode((folder / CHECK_FILE).read_bytes(), type=Check)
    except (OSError, msgspec.DecodeError):
        return "the control gate has not seen it"
    if not check.accepted:
        return f"the control gate refused it: {check.reason}"
    if check.fingerprint != fingerprint(task):
        return "it has changed since the control gate saw it"
    seen, here = check.python.rpartition(".")[0], platform.python_version().rpartition(".")[0]
    return "" if seen == here else f"the control gate saw it with Python {seen}, this is {here}"
