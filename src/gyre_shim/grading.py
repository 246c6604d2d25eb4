"""One grading: the grader in a clean sandbox without network, as an ordinary user."""

import importlib
import json
import os
import shutil
import tempfile
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
        copied, refused = copy_workspace(order["workspace"], f"{folder}/work")
        for name, text in order["hidden_files"].items():
            with open(f"{folder}/work/{name}", "w") as file:
                file.write(text)
        os.mkdir(f"{folder}/root")
        os.chmod(folder, 0o755)
        result = _graded(order, folder)
        result["copied"], result["refused"] = copied, refused
        with open(order["result"] + ".part", "w") as file:
            json.dump(result, file)
        os.replace(order["result"] + ".part", order["result"])
        return 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
        status = 70
        try:
            sandbox.die_with_parent()
            if order["sandbox"]:
                sandbox.enter_root(
                    root=f"{folder}/root",
                    workspace=f"{folder}/work",
                    python_prefixes=sandbox.python_prefixes(),
                    temporary_bytes=16 * 1024 * 1024,
                )
                sandbox.drop_privileges(
                    user=order["user"],
                    memory_bytes=order["memory_bytes"],
                    processes=64,
                    file_bytes=16 * 1024 * 1024,
                    cpu_s=600,
                )
            else:
                os.chdir(f"{folder}/work")
            grade = importlib.import_module("gyre_grade.grade").grade
            text = json.dumps(grade(os.getcwd(), order["test_files"], limit_s=order["limit_s"]))
            with os.fdopen(writing, "w") as pipe:
                pipe.write(text)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return {"error": f"the grader ended with {os.waitstatus_to_exitcode(status)} and no result"}
    result: dict[str, Any] = json.loads(text)
    return result
