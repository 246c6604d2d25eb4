"""The fork server: a small process that has everything loaded and forks an execution or a grading in milliseconds.

It reads one JSON object a line on its standard input and answers on its standard output:

    {"id": "g0", "kind": "execution", ...}  ->  {"id": "g0", "started": PID}  ...  {"id": "g0", "ended": STATUS}

Executions become sessions of their own: they outlive this process and the driver.
"""

import gc
import importlib
import json
import os
import select
import signal
import sys
import traceback
from typing import Any

PRELOADED = ("gyre_shim.shim", "gyre_shim.grading", "gyre_agent.agent", "gyre_grade.grade", "encodings.idna")


def _preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _say(message: dict[str, Any]) -> None:
    os.write(1, (json.dumps(message) + "\n").encode())


def _start(order: dict[str, Any], buffer_owner: int) -> int:
    """Fork, and in the child run the order's work; returns the child's process id."""
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        null = os.open("/dev/null", os.O_RDWR)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(buffer_owner)
        module = importlib.import_module("gyre_shim.shim" if order["kind"] == "execution" else "gyre_shim.grading")
        status = module.run(order)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)


def _reap(names: dict[int, str]) -> None:
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not child:
            return
        _say({"id": names.pop(child, ""), "ended": os.waitstatus_to_exitcode(status)})


def main() -> int:
    """Serve until standard input ends."""
    _preload()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    names: dict[int, str] = {}
    pending = b""
    _say({"ready": os.getpid()})
    while True:
        ready, _, _ = select.select([0, reading], [], [])
        if reading in ready:
            os.read(reading, 4096)
            _reap(names)
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                return 0
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                child = _start(order, reading)
                names[child] = order["id"]
                _say({"id": order["id"], "started": child})


if __name__ == "__main__":
    sys.exit(main())
