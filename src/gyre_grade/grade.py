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
import types
from typing import Any

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
        source = file.read()
    module = name.removeprefix("hidden_").removesuffix(".py")
    plan, ids, has_canaries = plan_runs(source)
    if limit_s <= 0:
        return {f"{module}::{test}": "timeout" for test in ids}, False, has_canaries
    returned, timed_out = _run_child(folder, source, plan, limit_s)
    forged = any(nonce in returned for _, kind, nonce in plan if kind == "canary")
    verdicts: dict[str, str] = {}
    for test, kind, nonce in plan:
        if kind != "true":
            continue
        passed = nonce in returned and not forged
        verdicts[f"{module}::{test}"] = "passed" if passed else "timeout" if timed_out and not forged else "failed"
    return verdicts, forged, has_canaries


def plan_runs(source: str) -> tuple[list[tuple[str, str, str]], list[str], bool]:
    """Return the runs (test, kind, nonce) in random order, the tests in order, and whether every test has canaries."""
    tree = ast.parse(source)
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    runs: list[tuple[str, str, str]] = []
    covered = True
    for node in tests:
        name = node.name.removeprefix("test_")
        runs.append((name, "true", secrets.token_hex(8)))
        if any(_expected_side(inner) for inner in ast.walk(node)):
            runs += [(name, "canary", secrets.token_hex(8)) for _ in range(CANARIES)]
        else:
            covered = False
    random.SystemRandom().shuffle(runs)
    return runs, [node.name.removeprefix("test_") for node in tests], covered


def _expected_side(node: ast.AST) -> str:
    """Return which side of an equality is the expected value: the one without a call."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
        return ""
    left_calls = any(isinstance(inner, ast.Call) for inner in ast.walk(node.left))
    right_calls = any(isinstance(inner, ast.Call) for inner in ast.walk(node.comparators[0]))
    if left_calls and not right_calls:
        return "right"
    return "left" if right_calls and not left_calls else ""


class _Canary(ast.NodeTransformer):
    """Replaces expected values by a name that is bound to a fresh object."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Replace the expected side of an equality."""
        side = _expected_side(node)
        fresh = ast.Name("__expected__", ast.Load())
        if side == "right":
            node.comparators = [fresh]
        elif side == "left":
            node.left = fresh
        return node


def _run_child(folder: str, source: str, plan: list[tuple[str, str, str]], limit_s: float) -> tuple[set[str], bool]:
    """Run the plan in a child and return the nonces that came back, and whether it ran out of time."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            _child(folder, source, plan, writing)
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


def _child(folder: str, source: str, plan: list[tuple[str, str, str]], writing: int) -> None:
    """Run every planned test; write the nonce of each that passes at once, so that a later hang loses nothing."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (CHILD_CPU_S, CHILD_CPU_S + 1))
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    tree = ast.parse(source)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    head = [node for node in tree.body if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_")]
    namespace: dict[str, Any] = {"__name__": "hidden"}
    with contextlib.suppress(BaseException):
        exec(compile(ast.Module(head, []), "hidden", "exec"), namespace)
    for test, kind, nonce in plan:
        node: ast.FunctionDef = functions[f"test_{test}"]
        if kind == "canary":
            copied = ast.parse(ast.unparse(node)).body[0]
            node = ast.fix_missing_locations(_Canary().visit(copied))
        scope = types.ModuleType("hidden").__dict__
        scope.update(namespace, __expected__=object())
        with contextlib.suppress(BaseException):
            exec(compile(ast.Module([node], []), "hidden", "exec"), scope)
            scope[f"test_{test}"]()
            os.write(writing, nonce.encode() + b"\n")


def main(arguments: list[str]) -> int:
    """Grade a folder from the command line: FOLDER TEST_FILE ..."""
    sys.stdout.write(json.dumps(grade(arguments[0], arguments[1:], limit_s=60.0), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
