"""Grade a workspace with hidden tests without trusting it. Standard library only.

A supervisor that never imports candidate code runs each test file in a child. Every test runs three times in random
order: once as written and twice as a canary, in which the expected value of each equality is a fresh object that no
honest result equals. A run that passes returns its own nonce. A test passes if its true run returned its nonce; a
canary that passes means that results are being forged, and zeroes the file.
"""

import ast
import contextlib
import json
import os
import random
import resource
import secrets
import select
import signal
import sys
import time
from typing import Any, NamedTuple, TypeGuard

from gyre_grade import canary

CANARIES = 2
_FRESH = compile(canary.HEAD, "hidden", "exec")
CHILD_CPU_S = 10
FIRST_CPU_S = 2
"""Of the child that runs all files: what takes longer runs again, file by file."""
MOST_SAID = 1 << 20
"""Bytes that a child may write: its nonces need a thousandth of that."""
_REPORT = 3
"""Descriptor that a child writes its nonces to, and its only one beside the standard three."""
GRADER = "gyre-grade-2"


def grade(folder: str, test_files: list[str], *, limit_s: float) -> dict[str, Any]:
    """Return ``{"tests": {"module::function": verdict}, "tampering": [file], "uncanaried": [file]}``.

    All files run in one child first; a file that this child did not finish, because something in it or before it
    crashed or hung, runs again in a child of its own.

    Args:
        folder: Candidate files and hidden tests side by side.
        test_files: Names of the hidden test files, ``hidden_<module>.py``.
        limit_s: Wall limit of the whole grading; what is finished by then counts.
    """
    deadline_s = time.monotonic() + limit_s
    files = [TestFile(name, _text(folder, name)) for name in test_files]
    random.SystemRandom().shuffle(files)
    together = _run_child(folder, files, min(FIRST_CPU_S, limit_s), cpu_s=FIRST_CPU_S)
    result: dict[str, Any] = {"grader": GRADER, "tests": {}, "tampering": [], "uncanaried": []}
    for tests in sorted(files, key=lambda each: test_files.index(each.name)):
        returned, timed_out = together.returned, False
        if tests.done not in returned:
            tests.renew()
            alone = _run_child(folder, [tests], deadline_s - time.monotonic(), cpu_s=CHILD_CPU_S)
            returned, timed_out = alone.returned, alone.timed_out
        _judge(tests, returned, timed_out, result)
    return result


def _text(folder: str, name: str) -> str:
    with open(os.path.join(folder, name)) as file:
        return file.read()


def _judge(tests: "TestFile", returned: set[str], timed_out: bool, result: dict[str, Any]) -> None:
    """Add the verdicts on one file to a result."""
    module = tests.name.removeprefix("hidden_").removesuffix(".py")
    forged = any(nonce in returned for _, kind, nonce in tests.runs if kind == "canary")
    for test, kind, nonce in tests.runs:
        if kind == "true":
            passed = nonce in returned and not forged
            lost = "timeout" if timed_out and not forged else "failed"
            result["tests"][f"{module}::{test}"] = "passed" if passed else lost
    if forged:
        result["tampering"].append(tests.name)
    if not tests.is_covered:
        result["uncanaried"].append(tests.name)


class TestFile:
    """A test file, parsed and compiled once: its head, its tests as written, its tests as canaries, the runs.

    Example: a file with ``def test_one()`` has three runs of ``one``: as it is, and two canaries.
    """

    def __init__(self, name: str, source: str) -> None:
        tree = ast.parse(source)
        tests = [node for node in tree.body if _is_test(node)]
        self.name = name
        self.head = compile(ast.Module([node for node in tree.body if not _is_test(node)], []), "hidden", "exec")
        self.true = compile(ast.Module(list(tests), []), "hidden", "exec")
        # This changes the tree, so the canaries come after the true tests are compiled.
        covered = {node.name.removeprefix("test_"): canary.expect_fresh(node) for node in tests}
        self.canary = compile(ast.Module(list(tests), []), "hidden", "exec")
        self.is_covered = all(covered.values())
        """Whether every test has canaries."""
        self._kinds = [(test, "true") for test in covered]
        self._kinds += [(test, "canary") for test, has_canary in covered.items() if has_canary] * CANARIES
        self.renew()

    def renew(self) -> None:
        """Plan the runs anew: random order, nonces that no earlier child has seen."""
        self.runs = [(test, kind, secrets.token_hex(8)) for test, kind in self._kinds]
        """(test, kind, nonce) in random order."""
        random.SystemRandom().shuffle(self.runs)
        self.done = secrets.token_hex(8)
        """What the child says when it is through with the file."""


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test_")


class Ended(NamedTuple):
    """What became of a child."""

    returned: set[str]
    """Lines that it wrote."""
    timed_out: bool


def _run_child(folder: str, files: list[TestFile], limit_s: float, *, cpu_s: int) -> Ended:
    """Run test files in a child, within a wall and a processor limit."""
    if limit_s <= 0:
        return Ended(set(), timed_out=True)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            _child(folder, files, writing, cpu_s)
        finally:
            os._exit(0)
    os.close(writing)
    deadline_s = time.monotonic() + limit_s
    received = b""
    timed_out = False
    while True:
        left_s = deadline_s - time.monotonic()
        ready, _, _ = select.select([reading], [], [], max(0.0, left_s))
        if not ready:
            timed_out = True
            break
        data = os.read(reading, 1 << 16)
        if not data:
            break
        received += data
        if len(received) > MOST_SAID:
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    timed_out = timed_out or os.waitstatus_to_exitcode(status) == -signal.SIGXCPU
    return Ended({line.decode(errors="replace") for line in received.split(b"\n") if line}, timed_out)


def _child(folder: str, files: list[TestFile], writing: int, cpu_s: int) -> None:
    """Run every planned test; write the nonce of each that passes at once, so that a later hang loses nothing."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    # The supervisor's own result goes through a descriptor that this child was forked with.
    if writing != _REPORT:
        os.dup2(writing, _REPORT)
    os.closerange(_REPORT + 1, os.sysconf("SC_OPEN_MAX"))
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    for tests in files:
        _run_file(tests, _REPORT)
        os.write(_REPORT, tests.done.encode() + b"\n")


def _run_file(tests: TestFile, writing: int) -> None:
    scopes: dict[str, dict[str, Any]] = {"true": {"__name__": "hidden"}, "canary": {"__name__": "hidden"}}
    with contextlib.suppress(BaseException):
        exec(tests.head, scopes["true"])
    scopes["canary"].update(scopes["true"])
    exec(tests.true, scopes["true"])
    exec(tests.canary, scopes["canary"])
    for test, kind, nonce in tests.runs:
        exec(_FRESH, scopes[kind])
        with contextlib.suppress(BaseException):
            scopes[kind][f"test_{test}"]()
            os.write(writing, nonce.encode() + b"\n")


def main(arguments: list[str]) -> int:
    """Grade a folder from the command line: FOLDER TEST_FILE ..."""
    sys.stdout.write(json.dumps(grade(arguments[0], arguments[1:], limit_s=60.0), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
