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
from typing import Any, TypeGuard

CANARIES = 2
CHILD_CPU_S = 10
GRADER = "gyre-grade-1"


def grade(folder: str, test_files: list[str], *, limit_s: float) -> dict[str, Any]:
    """Return ``{"tests": {"module::function": verdict}, "tampering": [file], "uncanaried": [file]}``.

    Args:
        folder: Candidate files and hidden tests side by side.
        test_files: Names of the hidden test files, ``hidden_<module>.py``.
        limit_s: Wall limit of the whole grading; what is finished by then counts.
    """
    deadline_s = time.monotonic() + limit_s
    tests: dict[str, str] = {}
    tampering: list[str] = []
    uncanaried: list[str] = []
    for name in test_files:
        verdicts, is_forged, has_canaries = _grade_file(folder, name, deadline_s - time.monotonic())
        tests.update(verdicts)
        if is_forged:
            tampering.append(name)
        if not has_canaries:
            uncanaried.append(name)
    return {"grader": GRADER, "tests": tests, "tampering": tampering, "uncanaried": uncanaried}


def _grade_file(folder: str, name: str, limit_s: float) -> tuple[dict[str, str], bool, bool]:
    with open(os.path.join(folder, name)) as file:
        tests = TestFile(file.read())
    module = name.removeprefix("hidden_").removesuffix(".py")
    if limit_s <= 0:
        return {f"{module}::{test}": "timeout" for test in tests.names}, False, tests.is_covered
    returned, timed_out = _run_child(folder, tests, limit_s)
    forged = any(nonce in returned for _, kind, nonce in tests.runs if kind == "canary")
    verdicts: dict[str, str] = {}
    for test, kind, nonce in tests.runs:
        if kind != "true":
            continue
        passed = nonce in returned and not forged
        verdicts[f"{module}::{test}"] = "passed" if passed else "timeout" if timed_out and not forged else "failed"
    return verdicts, forged, tests.is_covered


class TestFile:
    """A test file, parsed and compiled once: its head, its tests as written, its tests as canaries, the runs.

    Example: a file with ``def test_one()`` has ``names == ["one"]`` and three runs of it.
    """

    def __init__(self, source: str) -> None:
        tree = ast.parse(source)
        tests = [node for node in tree.body if _is_test(node)]
        self.names = [node.name.removeprefix("test_") for node in tests]
        """Tests in order of the file."""
        self.head = compile(ast.Module([node for node in tree.body if not _is_test(node)], []), "hidden", "exec")
        self.true = compile(ast.Module(list(tests), []), "hidden", "exec")
        self.runs: list[tuple[str, str, str]] = []
        """(test, kind, nonce) in random order."""
        self.is_covered = True
        """Whether every test has canaries."""
        expected: list[tuple[ast.Compare, str]] = []
        for node in tests:
            name = node.name.removeprefix("test_")
            self.runs.append((name, "true", secrets.token_hex(8)))
            comparisons = [inner for inner in ast.walk(node) if isinstance(inner, ast.Compare)]
            found = [(inner, _expected_side(inner)) for inner in comparisons]
            expected += [(inner, side) for inner, side in found if side]
            if any(side for _, side in found):
                self.runs += [(name, "canary", secrets.token_hex(8)) for _ in range(CANARIES)]
            else:
                self.is_covered = False
        random.SystemRandom().shuffle(self.runs)
        # This changes the tree, so the canaries come after the true tests are compiled.
        for comparison, side in expected:
            _expect_fresh(comparison, side)
        self.canary = compile(ast.Module(list(tests), []), "hidden", "exec")


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test_")


def _expected_side(node: ast.Compare) -> str:
    """Return which side of an equality is the expected value: the one without a call."""
    if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
        return ""
    left_calls = any(isinstance(inner, ast.Call) for inner in ast.walk(node.left))
    right_calls = any(isinstance(inner, ast.Call) for inner in ast.walk(node.comparators[0]))
    if left_calls and not right_calls:
        return "right"
    return "left" if right_calls and not left_calls else ""


def _expect_fresh(node: ast.Compare, side: str) -> None:
    """Replace the expected value of an equality by a name that is bound to a fresh object."""
    if side == "right":
        node.comparators = [ast.copy_location(ast.Name("__expected__", ast.Load()), node.comparators[0])]
    else:
        node.left = ast.copy_location(ast.Name("__expected__", ast.Load()), node.left)


def _run_child(folder: str, tests: TestFile, limit_s: float) -> tuple[set[str], bool]:
    """Run the tests in a child and return the nonces that came back, and whether it ran out of time."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            _child(folder, tests, writing)
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
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    timed_out = timed_out or os.waitstatus_to_exitcode(status) == -signal.SIGXCPU
    return {line.decode(errors="replace") for line in received.split(b"\n") if line}, timed_out


def _child(folder: str, tests: TestFile, writing: int) -> None:
    """Run every planned test; write the nonce of each that passes at once, so that a later hang loses nothing."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (CHILD_CPU_S, CHILD_CPU_S + 1))
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    scopes: dict[str, dict[str, Any]] = {"true": {"__name__": "hidden"}, "canary": {"__name__": "hidden"}}
    with contextlib.suppress(BaseException):
        exec(tests.head, scopes["true"])
    scopes["canary"].update(scopes["true"])
    exec(tests.true, scopes["true"])
    exec(tests.canary, scopes["canary"])
    for test, kind, nonce in tests.runs:
        scopes[kind]["__expected__"] = object()
        with contextlib.suppress(BaseException):
            scopes[kind][f"test_{test}"]()
            os.write(writing, nonce.encode() + b"\n")


def main(arguments: list[str]) -> int:
    """Grade a folder from the command line: FOLDER TEST_FILE ..."""
    sys.stdout.write(json.dumps(grade(arguments[0], arguments[1:], limit_s=60.0), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
