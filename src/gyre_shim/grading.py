"""One grading: the grader in a clean sandbox without network, as an ordinary user."""

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from typing import Any

from gyre_shim import sandbox

_STEERING = {
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
    "sitecustomize.py",
    "usercustomize.py",
}
MOST_FILES = 2_000
MOST_BYTES = 64 * 1024 * 1024


def run(order: dict[str, Any]) -> int:
    """Copy the workspace, add the hidden tests, grade in a sandbox, write the result; returns the exit status."""
    folder = tempfile.mkdtemp(prefix="grade-", dir=order["scratch"])
    try:
        os.chmod(folder, 0o755)
        copied, refused = copy_workspace(order["workspace"], f"{folder}/work")
        for name in ("root", "tests", "logs"):
            os.mkdir(f"{folder}/{name}")
        for name, text in order["hidden_files"].items():
            place = f"{folder}/{name}" if order["grader"] == "script" else f"{folder}/work/{name}"
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(place, "w", errors="surrogateescape") as file:
                file.write(text)
        if order["sandbox"] and os.getuid() == 0:
            _give(folder, order["user"])
        result = _graded(order, folder)
        result["copied"], result["refused"] = copied, refused
        with open(order["result"] + ".part", "w") as file:
            json.dump(result, file)
        os.replace(order["result"] + ".part", order["result"])
        return 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_plain(name: str) -> bool:
    """Whether a folder may go along: no caches, no package metadata (its entry points could load plugins)."""
    return name != "__pycache__" and not name.endswith((".egg-info", ".dist-info"))


def _give(folder: str, user: int) -> None:
    """Make the sandbox's user the owner of what it may write."""
    for top in ("work", "logs"):
        for base, _, files in os.walk(f"{folder}/{top}"):
            os.chown(base, user, user)
            for name in files:
                os.chown(os.path.join(base, name), user, user)


def copy_workspace(source: str, target: str) -> tuple[int, list[str]]:
    """Copy regular files only, without those that steer a grader; returns how many, and what was refused."""
    os.mkdir(target)
    copied, total = 0, 0
    refused: list[str] = []
    for base, folders, files in os.walk(source, followlinks=False):
        folders[:] = [
            name for name in folders if not os.path.islink(os.path.join(base, name)) and name != "__pycache__"
        ]
        inside = os.path.join(target, os.path.relpath(base, source))
        os.makedirs(inside, exist_ok=True)
        for name in files:
            path = os.path.join(base, name)
            size = os.lstat(path).st_size
            regular = os.path.isfile(path) and not os.path.islink(path)
            if not regular or name in _STEERING or name.endswith(".pth") or copied >= MOST_FILES:
                refused.append(os.path.relpath(path, source)[:200])
                continue
            if total + size > MOST_BYTES:
                refused.append(os.path.relpath(path, source)[:200])
                continue
            shutil.copyfile(path, os.path.join(inside, name))
            copied, total = copied + 1, total + size
    return copied, refused[:50]


def _graded(order: dict[str, Any], folder: str) -> dict[str, Any]:
    """Run the grader in fresh namespaces and return its result, read through a pipe."""
    if order["sandbox"]:
        sandbox.enter_namespaces()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            sandbox.die_with_parent()
            _confine(order, folder)
            _GRADERS[order["grader"]](order, writing)
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            os._exit(70)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if order["grader"] == "script":
        return _script_result(f"{folder}/logs/verifier/reward.txt", os.waitstatus_to_exitcode(status))
    if not text:
        return {"error": f"the grader ended with {os.waitstatus_to_exitcode(status)} and no result"}
    result: dict[str, Any] = json.loads(text)
    return result


def _confine(order: dict[str, Any], folder: str) -> None:
    """Enter the sandbox of a grading; a script sees its tests and logs where Harbor puts them."""
    workdir = order.get("workdir") or sandbox.WORKSPACE
    if not order["sandbox"]:
        os.chdir(f"{folder}/work")
        return
    writable = {f"{folder}/work": workdir}
    if order["grader"] == "script":
        os.makedirs(f"{folder}/logs/verifier", exist_ok=True)
        os.chmod(f"{folder}/logs/verifier", 0o777)
        writable |= {f"{folder}/logs": "/logs", f"{folder}/tests": "/tests"}
    sandbox.enter_root(
        root=f"{folder}/root",
        writable=writable,
        python_prefixes=sandbox.python_prefixes(),
        temporary_bytes=64 * 1024 * 1024,
        extra=tuple(order.get("shown", ())),
    )
    sandbox.drop_privileges(
        user=order["user"],
        memory_bytes=order["memory_bytes"],
        processes=64,
        file_bytes=16 * 1024 * 1024,
        cpu_s=int(order["limit_s"]) + 60,
    )


def _grade_functions(order: dict[str, Any], writing: int) -> None:
    """Grade test functions in this process's children; it has the grader loaded."""
    grade = importlib.import_module("gyre_grade.grade").grade
    text = json.dumps(grade(os.getcwd(), order["test_files"], limit_s=order["limit_s"]))
    with os.fdopen(writing, "w") as pipe:
        pipe.write(text)
    os._exit(0)


def _grade_pytest(order: dict[str, Any], writing: int) -> None:
    """Become the pytest supervisor: a fresh interpreter that reads its order from standard input."""
    asked = {
        "root": os.getcwd(),
        "hidden": order["hidden_files"],
        "test_files": order["test_files"],
        "tests": order["tests"],
        "canaries": order["canaries"],
        "needs": order["needs"],
        "limit_s": order["limit_s"],
    }
    with tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps(asked).encode())
        stdin.seek(0)
        os.dup2(stdin.fileno(), 0)
    os.dup2(writing, 1)
    os.execve(order["python"], [order["python"], "-I", "-B", order["supervisor"]], _ENVIRONMENT)


def _grade_script(order: dict[str, Any], writing: int) -> None:
    """Become the task's own test script; its wall limit is the kernel's alarm."""
    os.close(writing)
    signal.alarm(max(1, int(order["limit_s"])))
    os.execve("/bin/bash", ["/bin/bash", "/tests/test.sh"], {**_ENVIRONMENT, **order["environment"]})


def _script_result(path: str, status: int) -> dict[str, Any]:
    """Return the reward that a test script wrote; no reward file is a broken evaluation, never a zero."""
    try:
        with open(path) as file:
            reward = float(file.read().strip())
    except (OSError, ValueError) as error:
        return {"error": f"the test script ended with {status} and no reward: {error}"}
    if not 0.0 <= reward <= 1.0:
        return {"error": f"the test script gave the reward {reward}, expected 0 to 1"}
    return {"grader": "harbor-script-1", "reward": reward, "tests": {"reward": "passed" if reward == 1.0 else "failed"}}


_ENVIRONMENT = {"HOME": "/tmp", "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "TZ": "UTC"}
_GRADERS = {"functions": _grade_functions, "pytest": _grade_pytest, "script": _grade_script}
