"""One grading: the grader in a clean sandbox without network, as an ordinary user."""

import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

from gyre_shim import landlock, processes, sandbox
from gyre_shim.cgroup import ControlGroup
from gyre_shim.container import Container
from gyre_shim.quota import WATCH_S, QuotaWatch

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
DISK_BYTES = 128 * 1024 * 1024
"""What the copy of the workspace may grow to while it is graded."""
FILE_BYTES = 16 * 1024 * 1024
PROCESSES = 64


def run(order: dict[str, Any]) -> int:
    """Copy the workspace, add the hidden tests, grade in a sandbox, write the result; returns the exit status."""
    folder = tempfile.mkdtemp(prefix="grade-", dir=order["scratch"])
    group: ControlGroup | None = None
    try:
        os.chmod(folder, 0o755)
        for name in ("work", "root", "tests", "logs", "home"):
            os.mkdir(f"{folder}/{name}")
        if order["sandbox"] == "namespaces":
            sandbox.enter_namespaces()
            sandbox.mount_memory(f"{folder}/work", DISK_BYTES)
        else:
            processes.adopt_orphans()
        if order["control_group"]:
            memory_bytes = order["memory_bytes"] + DISK_BYTES
            group = ControlGroup(order["id"], memory_bytes=memory_bytes, processes=PROCESSES)
        copied, refused = copy_workspace(order["workspace"], f"{folder}/work")
        _place_hidden(order, folder)
        result = _graded(order, folder, group)
        result["copied"], result["refused"] = copied, refused
        _write_result(order, result)
        return 0
    except (OSError, sandbox.SandboxError) as error:
        _write_result(order, {"error": f"set-up of the scoring: {type(error).__name__}: {error}"})
        return 70
    finally:
        if order["sandbox"] == "namespaces":
            sandbox.unmount(f"{folder}/work")
        else:
            processes.end_descendants()
        if group is not None:
            group.remove()
        shutil.rmtree(folder, ignore_errors=True)


def _write_result(order: dict[str, Any], result: dict[str, Any]) -> None:
    with open(order["result"] + ".part", "w") as file:
        json.dump(result, file)
    os.replace(order["result"] + ".part", order["result"])


def _place_hidden(order: dict[str, Any], folder: str) -> None:
    """Write the hidden tests, and give the sandbox's user what it may write."""
    for name, text in order["hidden_files"].items():
        place = f"{folder}/{name}" if order["grader"] == "script" else f"{folder}/work/{name}"
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "w", errors="surrogateescape") as file:
            file.write(text)
    if order["sandbox"] in ("namespaces", "landlock") and os.getuid() == 0:
        if order["sandbox"] == "landlock":
            order["user"] = landlock.fitting_user(order["user"], (*_readable(order), folder))
        sandbox.give(tuple(f"{folder}/{top}" for top in ("work", "logs", "home")), order["user"])


def _is_plain(name: str) -> bool:
    """Whether a folder may go along: no caches, no package metadata (its entry points could load plugins)."""
    return name != "__pycache__" and not name.endswith((".egg-info", ".dist-info"))


def copy_workspace(source: str, target: str) -> tuple[int, list[str]]:
    """Copy regular files only, without those that steer a grader; returns how many, and what was refused."""
    copied, total = 0, 0
    refused: list[str] = []
    for base, folders, files in os.walk(source, followlinks=False):
        folders[:] = [name for name in folders if not os.path.islink(os.path.join(base, name)) and _is_plain(name)]
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


def _graded(order: dict[str, Any], folder: str, group: ControlGroup | None) -> dict[str, Any]:
    """Run the grader in the sandbox and return its result, read through a pipe."""
    if order["sandbox"] == "container":
        try:
            status = _run_in_container(order, folder)
        except sandbox.SandboxError as error:
            return {"error": str(error)}
        return _script_result(f"{folder}/logs/verifier/reward.txt", status)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            sandbox.die_with_parent()
            if group is not None:
                group.join()
            _CONFINE[order["sandbox"]](order, folder)
            _GRADERS[order["grader"]](order, writing)
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            os._exit(70)
    os.close(writing)
    text, is_over = _listened(reading, child, None if order["sandbox"] == "namespaces" else f"{folder}/work")
    _, status = os.waitpid(child, 0)
    if is_over:
        return {"grader": "gyre-grade", "tests": {}, "disk_full": True}
    if order["grader"] == "script":
        return _script_result(f"{folder}/logs/verifier/reward.txt", os.waitstatus_to_exitcode(status))
    if not text:
        return {"error": f"the grader ended with {os.waitstatus_to_exitcode(status)} and no result"}
    result: dict[str, Any] = json.loads(text)
    return result


def _run_in_container(order: dict[str, Any], folder: str) -> int:
    """Run the task's test script in its image; returns the script's status, 124 if its time was up."""
    if order["grader"] != "script":
        raise sandbox.SandboxError(
            f"the grader {order['grader']} does not run in a container, only a task's own script"
        )
    _make_logs(folder)
    workdir = order["workdir"]
    mounts = {f"{folder}/work": workdir, f"{folder}/tests": "/tests", f"{folder}/logs": "/logs"}
    limits = {**order, "processes": PROCESSES}
    container = Container(limits, mounts, workdir)
    try:
        container.start()
        words = container.command(["/bin/bash", "/tests/test.sh"], {"HOME": "/tmp", **order["environment"]})
        return subprocess.run(words, stdin=subprocess.DEVNULL, timeout=order["limit_s"]).returncode
    except subprocess.TimeoutExpired:
        return 124
    finally:
        container.remove()


def _listened(reading: int, child: int, watched: str | None) -> tuple[bytes, bool]:
    """Return what the grader says, and whether it was ended because its folder holds too much.

    With namespaces the folder is a mount of limited size and needs no watch.
    """
    watch = QuotaWatch(watched, DISK_BYTES) if watched is not None else None
    said, is_over = b"", False
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], None if watch is None else WATCH_S)
            data = pipe.read(1 << 16) if ready else None
            if data == b"":
                return said, is_over
            said += data or b""
            if watch is not None and not is_over and watch.is_over(time.monotonic()):
                is_over = True
                os.kill(child, signal.SIGKILL)
                processes.end_descendants(limit_s=2.0)


def _confine_by_namespaces(order: dict[str, Any], folder: str) -> None:
    """Enter a private root; a script sees its tests and logs where Harbor puts them."""
    writable = {f"{folder}/work": order.get("workdir") or sandbox.WORKSPACE}
    if order["grader"] == "script":
        _make_logs(folder)
        writable |= {f"{folder}/logs": "/logs", f"{folder}/tests": "/tests"}
    sandbox.enter_root(
        root=f"{folder}/root",
        writable=writable,
        python_prefixes=sandbox.python_prefixes(),
        temporary_bytes=DISK_BYTES,
        extra=tuple(order.get("shown", ())),
        user=order["user"],
    )
    _drop(order)


def _confine_by_landlock(order: dict[str, Any], folder: str) -> None:
    """Confine this process where it stands. Without a loopback of its own: a test that opens a port fails."""
    if order["grader"] == "script":
        raise sandbox.SandboxError("a test script needs /tests and /logs, which only namespaces can show")
    os.setsid()
    os.chdir(f"{folder}/work")
    _drop(order)
    landlock.confine(
        writable=(f"{folder}/work", f"{folder}/home"),
        readable=_readable(order),
        port=None,
    )
    os.environ["TMPDIR"] = _ENVIRONMENT["TMPDIR"] = _ENVIRONMENT["HOME"] = f"{folder}/home"


def _readable(order: dict[str, Any]) -> tuple[str, ...]:
    return (*sandbox.python_prefixes(), *order.get("shown", ()))


def _confine_by_nothing(order: dict[str, Any], folder: str) -> None:
    os.setsid()
    os.chdir(f"{folder}/work")
    if order["grader"] == "script":
        raise sandbox.SandboxError("a test script needs /tests and /logs, which only namespaces can show")


_CONFINE = {"namespaces": _confine_by_namespaces, "landlock": _confine_by_landlock, "none": _confine_by_nothing}


def _make_logs(folder: str) -> None:
    os.makedirs(f"{folder}/logs/verifier", exist_ok=True)
    os.chmod(f"{folder}/logs/verifier", 0o777)


def _drop(order: dict[str, Any]) -> None:
    sandbox.drop_privileges(
        user=order["user"],
        memory_bytes=order["memory_bytes"],
        processes=PROCESSES,
        file_bytes=FILE_BYTES,
        cpu_s=int(order["limit_s"]) + 60,
    )
    sandbox.hide_from_others()


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


_ENVIRONMENT = {
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
}
_GRADERS = {"functions": _grade_functions, "pytest": _grade_pytest, "script": _grade_script}
