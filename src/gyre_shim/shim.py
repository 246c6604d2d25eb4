"""The shim of one execution: starts the harness in a sandbox and carries its HTTP to the proxy. Standard library only.

It is a session of its own, so it outlives the driver. While no proxy answers it holds requests; it never fails one.
Wire format: ``docs/shim-protocol.md``.
"""

import contextlib
import glob
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from typing import Any

from gyre_shim import landlock, processes, sandbox
from gyre_shim.cgroup import ControlGroup
from gyre_shim.container import Container
from gyre_shim.forward import Forwarder
from gyre_shim.quota import QuotaWatch

POLL_S = 0.25
RECEIPT_GRACE_S = 10.0
"""How long receipts are offered to the proxy after the harness ended; the journal has them in any case."""
STOPPED_GRACE_S = 0.5
"""The same for an execution that was told to stop: the proxy is probably gone."""


def run(order: dict[str, Any]) -> int:
    """Run one execution from start to ``exit.json``; returns the shim's exit status."""
    started_s = time.monotonic()
    folder = order["folder"]
    _write_json(f"{folder}/shim.json", {"pid": os.getpid(), "started": time.time(), "id": order["id"]})
    group: ControlGroup | None = None
    container: Container | None = None
    try:
        if order["sandbox"] == "namespaces":
            sandbox.enter_namespaces()
        else:
            processes.adopt_orphans()
        if order["control_group"]:
            group = ControlGroup(order["id"], memory_bytes=order["memory_bytes"], processes=order["processes"])
        if order["sandbox"] == "container":
            container = Container(order, {order["workspace"]: order["workdir"]}, order["workdir"])
            container.start()
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        harness = _start_harness(order, listener, group, container)
    except (OSError, sandbox.SandboxError) as error:
        for limit in (container, group):
            if limit is not None:
                limit.remove()
        _write_json(f"{folder}/exit.json", {"status": None, "error": str(error), "timed_out": False, "calls": 0})
        return 1
    outcome = _Loop(order, listener, harness, started_s).run()
    if container is not None:
        container.remove()
    if order["sandbox"] != "namespaces":
        outcome["left_processes"] = processes.end_descendants()
    if group is not None:
        outcome["out_of_memory"] = group.was_out_of_memory
        group.remove()
    _write_json(f"{folder}/exit.json", outcome)
    return 0


def _write_json(path: str, value: dict[str, Any]) -> None:
    with open(path + ".part", "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


def _start_harness(
    order: dict[str, Any], listener: socket.socket, group: ControlGroup | None, container: Container | None
) -> int:
    """Fork the harness; with namespaces it is process 1 of its own."""
    port = listener.getsockname()[1]
    base_url = f"http://127.0.0.1:{port}/v1"
    if container is not None:
        for name, text in _files(order, base_url).items():
            container.write(f"{CONTAINER_HOME}/{name}", text)
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        listener.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if group is not None:
            group.join()
        if container is not None:
            os.setsid()
            words = container.command(_command(order, base_url), _environment(order, base_url, CONTAINER_HOME))
            os.execvp(words[0], words)
        home = _ENTER[order["sandbox"]](order, port)
        status = _run_harness(order, base_url, home)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _enter_namespaces(order: dict[str, Any], _port: int) -> str:
    """Move into a private root; returns the home folder."""
    sandbox.enter_root(
        root=f"{order['folder']}/root",
        writable={order["workspace"]: order["workdir"] or sandbox.WORKSPACE},
        python_prefixes=sandbox.python_prefixes(),
        temporary_bytes=order["disk_bytes"],
        extra=tuple(order["shown"]),
        user=order["user"],
    )
    _drop(order)
    return "/tmp"


def _enter_landlock(order: dict[str, Any], port: int) -> str:
    """Confine this process where it stands; returns the home folder."""
    os.setsid()
    readable = (*sandbox.python_prefixes(), *order["shown"])
    home, workspace = f"{order['folder']}/home", order["workspace"]
    os.mkdir(home)
    order["user"] = landlock.fitting_user(order["user"], (*readable, order["folder"]))
    if os.getuid() == 0:
        sandbox.give((home, workspace), order["user"])
    os.chdir(workspace)
    _drop(order)
    landlock.confine(writable=(workspace, home), readable=readable, port=port)
    return home


def _enter_nothing(order: dict[str, Any], _port: int) -> str:
    os.setsid()
    os.chdir(order["workspace"])
    return str(order["workspace"])


_ENTER = {"namespaces": _enter_namespaces, "landlock": _enter_landlock, "none": _enter_nothing}


def _drop(order: dict[str, Any]) -> None:
    sandbox.drop_privileges(
        user=order["user"],
        memory_bytes=order["memory_bytes"],
        processes=order["processes"],
        file_bytes=order["disk_bytes"],
        cpu_s=int(order["overall_timeout_s"]) + 1,
        counts_address_space=bool(order["module"]),
    )


FAKETIME = "/usr/lib/*-linux-gnu/faketime/libfaketime.so.1"


def _pinned_date(day: str) -> dict[str, str]:
    """Return the environment that shows a process the noon of a day and lets time go on, where that can be had."""
    libraries = glob.glob(FAKETIME) if day else []
    if not libraries:
        return {}
    return {"LD_PRELOAD": libraries[0], "FAKETIME": f"@{day} 12:00:00", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def _write_files(home: str, files: dict[str, str]) -> None:
    """Write a harness's own configuration below its home folder."""
    for name, text in files.items():
        path = os.path.join(home, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)


def _filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


CONTAINER_HOME = "/tmp"


def _values(base_url: str) -> dict[str, str]:
    return {"{base_url}": base_url, "{origin}": base_url.removesuffix("/v1")}


def _environment(order: dict[str, Any], base_url: str, home: str) -> dict[str, str]:
    """Return the harness's environment: nothing of this process's own."""
    values = _values(base_url)
    return {
        "HOME": home,
        "TMPDIR": "/tmp" if order["sandbox"] in ("namespaces", "container") else home,
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": "none",
        "GYRE_BASE_URL": base_url,
        **_pinned_date(order["day"]),
        **{key: _filled(value, values) for key, value in order["environment"].items()},
    }


def _files(order: dict[str, Any], base_url: str) -> dict[str, str]:
    return {name: _filled(text, _values(base_url)) for name, text in order["files"].items()}


def _command(order: dict[str, Any], base_url: str) -> list[str]:
    values = {**_values(base_url), "{instruction}": order["instruction"]}
    return [_filled(part, values) for part in order["command"]]


def _run_harness(order: dict[str, Any], base_url: str, home: str) -> int:
    """Call a Python harness in this process, or execute a command."""
    if order["module"]:
        module = importlib.import_module(order["module"])
        return int(module.run(base_url=base_url, workspace=os.getcwd(), settings=order["settings"]))
    _write_files(home, _files(order, base_url))
    command = _command(order, base_url)
    os.execvpe(command[0], command, _environment(order, base_url, home))
    return 127


class _Loop:
    """Waits for the harness and forwards meanwhile."""

    def __init__(self, order: dict[str, Any], listener: socket.socket, harness: int, started_s: float) -> None:
        self._order = order
        self._harness = harness
        self._started_s = started_s
        self._selector = selectors.DefaultSelector()
        self._forwarder = Forwarder(
            self._selector, listener, order["socket"], journal=f"{order['folder']}/journal.jsonl", prefix=order["id"]
        )
        self._stopping = False
        self._quota = QuotaWatch(order["workspace"], order["disk_bytes"])
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        self._wakeup = reading
        signal.set_wakeup_fd(writing)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_terminate)
        self._selector.register(reading, selectors.EVENT_READ, None)

    def _on_terminate(self, *_: object) -> None:
        self._stopping = True

    def run(self) -> dict[str, Any]:
        """Forward until the harness ends or its time is up; return what ``exit.json`` says."""
        order = self._order
        timed_out = abandoned = disk_full = False
        status: int | None = None
        while status is None:
            for key, _ in self._selector.select(POLL_S):
                if key.fd == self._wakeup:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup, 4096)
                else:
                    self._forwarder.on_ready(key)
            now_s = time.monotonic()
            self._forwarder.on_tick(now_s)
            status = self._ended()
            if status is None:
                harness_s = now_s - self._started_s - self._forwarder.held_s(now_s)
                timed_out = timed_out or harness_s > order["timeout_s"]
                abandoned = abandoned or self._forwarder.away_s(now_s) > order["hold_s"]
                disk_full = disk_full or self._quota.is_over(now_s)
                if timed_out or abandoned or disk_full or self._stopping:
                    self._kill()
                    status = self._wait()
        ended_s = time.monotonic()
        held_s = self._forwarder.held_s(ended_s)
        self._settle()
        return {
            "status": status,
            "error": "stopped" if self._stopping else "",
            "timed_out": timed_out,
            "abandoned": abandoned,
            "disk_full": disk_full,
            "calls": self._forwarder.completed,
            "wall_s": ended_s - self._started_s,
            "harness_s": ended_s - self._started_s - held_s,
        }

    def _ended(self) -> int | None:
        child, status = os.waitpid(self._harness, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if child else None

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._order["sandbox"] == "namespaces":
                os.kill(self._harness, signal.SIGKILL)
            else:
                os.killpg(self._harness, signal.SIGKILL)

    def _wait(self) -> int:
        _, status = os.waitpid(self._harness, 0)
        return os.waitstatus_to_exitcode(status)

    def _settle(self) -> None:
        """The harness is gone: every open request is hung up; deliver the receipts that are left."""
        self._forwarder.hang_up_all()
        self._forwarder.receipts.flush(time.monotonic())
        deadline_s = time.monotonic() + (STOPPED_GRACE_S if self._stopping else RECEIPT_GRACE_S)
        while self._forwarder.receipts.has_some and time.monotonic() < deadline_s:
            for key, _ in self._selector.select(0.05):
                if key.fd != self._wakeup:
                    self._forwarder.on_ready(key)
            self._forwarder.on_tick(time.monotonic())
