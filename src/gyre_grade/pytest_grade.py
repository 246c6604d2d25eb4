"""Grade a library with hidden pytest files: ``python pytest_grade.py``, order on stdin, result on standard output.

The supervisor never imports candidate code. Each test file runs in a child three times in random order: as written, and
twice as a canary copy whose expected values nothing honest equals. A canary that passes zeroes the file.
"""

import contextlib
import ctypes
import itertools
import json
import os
import random
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata, util
from typing import Any

GRADER = "gyre-pytest-1"
CANARIES = 2
MakeCanary = Callable[[str], tuple[str, set[str]]]
TEST_LIMIT_S = 20.0
POLL_S = 0.1
MOST_SAID = 16 << 20
"""Bytes that a child may report: some 100,000 tests."""
_PR_SET_DUMPABLE = 4
_PLUGINS = {"pytest-mock": "pytest_mock", "pytest-asyncio": "pytest_asyncio", "pytest-benchmark": "pytest_benchmark"}


def grade(order: dict[str, Any], make_canary: MakeCanary) -> dict[str, Any]:
    """Return tests, tampering, what was collected, and what could not be canaried.

    Args:
        order: ``root``, ``hidden`` (path to text), ``test_files``, ``tests`` (frozen ids), ``canaries`` (frozen ids
            that must fail in a canary copy; None while they are being found), ``needs``, ``limit_s``.
        make_canary: Source of a test file to its canary copy and the tests that must fail in it.
    """
    missing = [lack for lack in map(what_lacks, order["needs"]) if lack]
    if missing:
        return {"error": f"the scoring environment lacks {', '.join(missing)}"}
    budget = Budget(order["limit_s"], runs=len(order["test_files"]) * (1 + CANARIES))
    result: dict[str, Any] = {
        "grader": GRADER,
        "tests": {},
        "tampering": [],
        "uncanaried": [],
        "collected": [],
        "canaries": [],
    }
    for name in order["test_files"]:
        _grade_file(order, name, make_canary, budget, result)
    return result


class Budget:
    """The wall limit of a grading, shared evenly by the runs that are left: no run can use up the time of others.

    Args:
        limit_s: Of the whole grading.
        runs: How many there are at most.
    """

    def __init__(self, limit_s: float, *, runs: int) -> None:
        self._deadline_s = time.monotonic() + limit_s
        self._runs = max(1, runs)

    def next_s(self) -> float:
        """Return the limit of the next run."""
        share_s = (self._deadline_s - time.monotonic()) / self._runs
        self._runs = max(1, self._runs - 1)
        return share_s


def _grade_file(
    order: dict[str, Any], name: str, make_canary: MakeCanary, budget: Budget, result: dict[str, Any]
) -> None:
    source = order["hidden"][name]
    canary, canaried = make_canary(source)
    runs = ["true", *["canary"] * (CANARIES if canaried else 0)]
    random.SystemRandom().shuffle(runs)
    survived: set[str] = set()
    for kind in runs:
        copy = canary if kind == "canary" else source
        collected, passed, is_late = _run(order, name, copy, budget.next_s())
        if kind == "canary":
            survived |= passed
            continue
        result["collected"] += sorted(collected)
        for test in collected | {test for test in order["tests"] if test.startswith(f"{name}::")}:
            result["tests"][test] = "passed" if test in passed else "timeout" if is_late else "failed"
    if not canaried:
        result["uncanaried"].append(name)
    _judge(order, name, canaried, survived, result)


def _judge(order: dict[str, Any], name: str, canaried: set[str], survived: set[str], result: dict[str, Any]) -> None:
    """Zero the file if a canary that must fail has passed; while freezing, note which ones do fail."""
    mine = [test for test in result["collected"] if test.startswith(f"{name}::")]
    candidates = [test for test in mine if _plain(test.removeprefix(f"{name}::")) in canaried]
    if order["canaries"] is None:
        result["canaries"] += [test for test in candidates if test not in survived]
        return
    if survived & {test for test in order["canaries"] if test.startswith(f"{name}::")}:
        result["tampering"].append(name)
        for test in result["tests"]:
            if test.startswith(f"{name}::"):
                result["tests"][test] = "failed"


def _plain(test: str) -> str:
    """Return a test's name without its parameters."""
    return test.partition("[")[0]


def _run(order: dict[str, Any], name: str, source: str, limit_s: float) -> tuple[set[str], set[str], bool]:
    """Run one copy of a test file in a child; return collected ids, passed ids, and whether it ran out of time."""
    if limit_s <= 0:
        return set(), set(), True
    with open(os.path.join(order["root"], name), "w") as file:
        file.write(source)
    nonces = {test: secrets.token_hex(8) for test in order["tests"]}
    reading, writing = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-I", "-B", os.path.join(os.path.dirname(os.path.abspath(__file__)), "pytest_child.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(writing,),
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HOME": "/tmp", "PATH": os.defpath, "LANG": "C.UTF-8", "TZ": "UTC"},
        start_new_session=True,
    )
    os.close(writing)
    plugins = [_PLUGINS[need] for need in order["needs"] if need in _PLUGINS]
    text = {
        "nonces": nonces,
        "test_limit_s": min(TEST_LIMIT_S, limit_s / 2),
        "descriptor": writing,
        "root": order["root"],
        "file": name,
        "plugins": plugins,
        "import_paths": [order["root"], os.path.join(order["root"], "src")],
    }
    with contextlib.suppress(BrokenPipeError):
        if child.stdin is not None:
            child.stdin.write(json.dumps(text).encode())
            child.stdin.close()
    lines, is_late = _read(reading, child, limit_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    collected = {text for kind, text in lines if kind == "collected"}
    said = {text for kind, text in lines if kind == "passed"}
    passed = {test for test, nonce in nonces.items() if nonce in said}
    if not order["tests"]:
        passed = said & collected
    return collected, passed, is_late


def _read(reading: int, child: subprocess.Popen[bytes], limit_s: float) -> tuple[list[tuple[str, str]], bool]:
    """Return what the child reported until it ended; what it left running may keep the pipe open and is not heard."""
    deadline_s = time.monotonic() + limit_s
    data, is_late = b"", False
    while True:
        has_ended = child.poll() is not None
        ready, _, _ = select.select([reading], [], [], 0.0 if has_ended else POLL_S)
        part = os.read(reading, 1 << 16) if ready else b""
        data += part
        if not part and (ready or has_ended):
            break
        if time.monotonic() > deadline_s:
            is_late = True
            break
        if len(data) > MOST_SAID:
            break
    os.close(reading)
    lines: list[tuple[str, str]] = []
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError, TypeError):
            kind, text = json.loads(line)
            lines.append((str(kind), str(text)))
    return lines, is_late


def what_lacks(need: str) -> str:
    """Return what is wrong with a need, empty if it is met: ``name`` or ``name>=1.2``.

    >>> what_lacks("pytest>=1"), what_lacks("pytest>=999").startswith("pytest>=999 (")
    ('', True)
    """
    name, _, least = need.partition(">=")
    try:
        seen = metadata.version(name)
    except metadata.PackageNotFoundError:
        return need
    return f"{need} ({seen} is installed)" if least and _numbers(seen) < _numbers(least) else ""


def _numbers(version: str) -> list[int]:
    """Return the leading numbers of a version."""
    found = []
    for part in version.split("."):
        digits = "".join(itertools.takewhile(str.isdigit, part))
        if not digits:
            break
        found.append(int(digits))
    return found


def _canary_maker() -> MakeCanary:
    """Return ``canary.make_canary``, loaded from beside this file: an isolated interpreter does not find packages."""
    spec = util.spec_from_file_location("canary", os.path.join(os.path.dirname(os.path.abspath(__file__)), "canary.py"))
    if spec is None or spec.loader is None:
        raise ImportError("canary.py is not beside pytest_grade.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    maker: MakeCanary = module.make_canary
    return maker


def main() -> int:
    """Grade by the order on standard input."""
    # What the candidate runs as the same user must not open this process's descriptors through /proc.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    order = json.load(sys.stdin)
    versions = {"python": sys.version.split()[0]}
    if not what_lacks("pytest"):
        versions["pytest"] = metadata.version("pytest")
    sys.stdout.write(json.dumps({**grade(order, _canary_maker()), "versions": versions}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
