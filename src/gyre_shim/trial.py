"""Tries a way of confining a process and says, in one JSON object, what it holds back. Standard library only.

``python -m gyre_shim.trial KIND`` prints ``{"works": true, ...}`` or ``{"works": false, "reason": ...}``.
"""

import encodings.idna  # noqa: F401 - a confined process cannot load it
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from gyre_shim import cgroup, landlock, sandbox
from gyre_shim.quota import used_bytes

USER = 199_999
"""User of a trial, as root."""


def tried(kind: str) -> dict[str, Any]:
    """Return what a confined process could do that it should not, or why none can be confined."""
    folder = tempfile.mkdtemp(prefix="gyre-trial-")
    try:
        os.chmod(folder, 0o755)
        for name in ("work", "root", "outside"):
            os.mkdir(f"{folder}/{name}")
        with open(f"{folder}/outside/secret", "w") as file:
            file.write("secret")
        if os.getuid() == 0:
            os.chown(f"{folder}/work", USER, USER)
        with socket.create_server(("127.0.0.1", 0)) as server:
            return _in_child(kind, folder, server.getsockname()[1])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _in_child(kind: str, folder: str, port: int) -> dict[str, Any]:
    starter = os.getpid()
    reading, writing = os.pipe()
    first = os.fork()
    if not first:
        try:
            if kind == "namespaces":
                sandbox.enter_namespaces()
            child = os.fork()
            if child:
                os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            _confine(kind, folder)
            said: dict[str, Any] = {"works": True, "breaks": _breaks(folder, port, starter)}
        except (OSError, sandbox.SandboxError) as error:
            said = {"works": False, "reason": str(error)}
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(first, 0)
    answer: dict[str, Any] = json.loads(text) if text else {"works": False, "reason": "the trial process died"}
    if answer.get("breaks"):
        answer = {"works": False, "reason": "confined, but it could " + " and ".join(answer["breaks"])}
    return answer


def _confine(kind: str, folder: str) -> None:
    if kind == "namespaces":
        workspace = {f"{folder}/work": sandbox.WORKSPACE}
        sandbox.enter_root(
            root=f"{folder}/root", writable=workspace, python_prefixes=(), temporary_bytes=4096, user=USER
        )
    else:
        os.setsid()
        os.chdir(f"{folder}/work")
    sandbox.drop_privileges(user=USER, memory_bytes=1 << 29, processes=16, file_bytes=1 << 20, cpu_s=10)
    if kind == "landlock":
        landlock.confine(writable=(f"{folder}/work",), readable=(), port=None)


def _breaks(folder: str, port: int, starter: int) -> list[str]:
    """Return what worked and should not; writing in the own folder must work.

    In a process namespace the id of the trial's ``starter`` means nobody.
    """
    with open("own", "w") as file:
        file.write("mine")
    if used_bytes(".", limit_bytes=1 << 20) == 0:
        raise OSError("the workspace shows no file that was written to it")
    attempts: dict[str, Callable[[], object]] = {
        "read a file outside": lambda: open(f"{folder}/outside/secret").close(),
        "write outside": lambda: open(f"{folder}/outside/new", "w").close(),
        "connect to a port of the host": lambda: socket.create_connection(("127.0.0.1", port), 1).close(),
        "signal the process that started it": lambda: os.kill(starter, 0),
    }
    found = []
    for name, attempt in attempts.items():
        try:
            attempt()
            found.append(name)
        except OSError:
            continue
    return found


def main() -> int:
    """Print what the way that is named in the arguments gives, and whether control groups can be made."""
    answer = tried(sys.argv[1])
    cgroup.sweep()
    answer["control_groups"] = cgroup.can_limit()
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0 if answer["works"] else 1


if __name__ == "__main__":
    sys.exit(main())
