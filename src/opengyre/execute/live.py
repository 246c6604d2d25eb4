"""One execution from its workspace to the end of its harness."""

import asyncio
import contextlib
import os
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from opengyre.core.config import Config
from opengyre.core.errors import HarnessError, SandboxError
from opengyre.core.types import Delivered, Task
from opengyre.execute.container import ImageStore, engine_lack
from opengyre.execute.isolation import Isolation
from opengyre.execute.launcher import ForkServer, wait_for_file


class HarnessEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What ``exit.json`` of a shim says.

    Example: ``HarnessEnd(status=0, calls=12, wall_s=3.1, harness_s=3.1)``.
    """

    status: int | None = None
    """Exit status of the harness, negative for a signal; None if it never started."""
    error: str = ""
    timed_out: bool = False
    abandoned: bool = False
    disk_full: bool = False
    """The workspace grew beyond its limit and the harness was ended; what it left is scored."""
    out_of_memory: bool = False
    """The kernel ended a process of the execution for its memory."""
    left_processes: int = 0
    """Processes that could not be ended, where no process namespace ends them."""
    calls: int = 0
    """Answers that reached the harness in full."""
    wall_s: float = 0.0
    harness_s: float = 0.0


class ShimMark(msgspec.Struct, frozen=True):
    """Who the shim of an execution is, from ``shim.json``."""

    pid: int
    started: float
    id: str


@dataclass(frozen=True)
class HarnessPlan:
    """How a harness is started.

    Example: ``HarnessPlan(module="gyre_agent.agent", command=(), environment={}, settings={"max_calls": 20})``.
    """

    module: str
    """Python module with ``run(base_url, workspace, settings)``, called in the forked process; else empty."""
    command: tuple[str, ...]
    environment: dict[str, str]
    settings: dict[str, Any]
    shown: tuple[str, ...] = ()
    """Folders that the sandbox shows read-only beside the system's: where the harness is installed."""
    files: dict[str, str] = field(default_factory=dict)
    """Files to write below the home folder: path to text."""
    pin_date: bool = False


class LiveRunner:
    """Starts executions through the fork server and waits for them.

    Args:
        config: Limits and timeouts.
        folder: The run's folder of executions.
        server: Fork server.
        plan: The harness.
        isolation: How harnesses are confined.
        images: Images of tasks that name one; None: there is no engine and no such task.
        day: Day that a harness with a pinned date is shown, ISO 8601.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        server: ForkServer,
        plan: HarnessPlan,
        *,
        isolation: Isolation,
        images: ImageStore | None = None,
        day: str = "",
    ) -> None:
        self._config = config
        self._folder = folder
        self._server = server
        self._plan = plan
        self._isolation = isolation
        self._images = images
        self._day = day if plan.pin_date else ""

    def workspace(self, execution_id: str) -> Path:
        """Return the workspace of an execution."""
        return self._folder / execution_id / "workspace"

    async def run(self, execution_id: str, task: Task, socket_path: Path) -> HarnessEnd:
        """Run an execution to the end of its harness.

        Raises:
            HarnessError: The shim went away without saying how it ended.
            SandboxError: Nothing can be started.
        """
        folder = self._folder / execution_id
        user = 0 if task.image is not None else self._server.next_user()
        if task.image is not None:
            await asyncio.to_thread(_prepare, folder, task, user, self._images)
        else:
            _prepare(folder, task, user, None)
        status = await self._server.launch(self._order(execution_id, task, socket_path, user))
        exit_file = folder / "exit.json"
        if status is None:
            mark = read_mark(folder)
            await wait_for_file(exit_file, process_id=mark.pid if mark is not None else 0)
        if not exit_file.exists():
            raise HarnessError(f"execution {execution_id}: its shim ended with {status} and wrote no exit.json")
        return msgspec.json.decode(exit_file.read_bytes(), type=HarnessEnd)

    def _order(self, execution_id: str, task: Task, socket_path: Path, user: int) -> dict[str, Any]:
        config, folder = self._config, self._folder / execution_id
        own_limit_s = float(task.options.get("harness_timeout_s", config.harness.timeout_s))
        return {
            "id": execution_id,
            "kind": "execution",
            "folder": str(folder),
            "workspace": str(folder / "workspace"),
            "log": str(folder / "harness.log"),
            "socket": str(socket_path),
            **sandbox_of(task, self._isolation, self._images, is_light=bool(self._plan.module)),
            "shown": list(self._plan.shown),
            "user": user,
            "module": self._plan.module,
            "command": list(self._plan.command),
            "environment": self._plan.environment,
            "settings": self._plan.settings,
            "files": self._plan.files,
            "instruction": task.instruction,
            "day": self._day,
            "memory_bytes": config.sandbox.memory_bytes,
            "processes": config.sandbox.processes,
            "disk_bytes": config.sandbox.disk_bytes,
            "timeout_s": min(config.harness.timeout_s, own_limit_s),
            "overall_timeout_s": config.harness.overall_timeout_s,
            "hold_s": config.proxy.hold_s,
        }

    def stop(self, execution_id: str) -> None:
        """Ask the shim of an execution to end its harness."""
        mark = read_mark(self._folder / execution_id)
        if mark is not None and is_shim(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(mark.pid, signal.SIGTERM)

    def discard(self, execution_id: str) -> None:
        """Remove the files of an execution."""
        shutil.rmtree(self._folder / execution_id, ignore_errors=True)


def read_mark(folder: Path) -> ShimMark | None:
    """Return the shim of an execution's folder, if one was started."""
    try:
        return msgspec.json.decode((folder / "shim.json").read_bytes(), type=ShimMark)
    except (OSError, msgspec.DecodeError):
        return None


def is_shim(mark: ShimMark) -> bool:
    """Whether the process id still belongs to that shim: same start within two seconds."""
    try:
        fields = Path(f"/proc/{mark.pid}/stat").read_text().rpartition(")")[2].split()
        booted = next(
            float(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
        )
    except (OSError, StopIteration):
        return False
    started = booted + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] != "Z" and abs(started - mark.started) < 2.0


class JournalLine(msgspec.Struct, frozen=True):
    """What a shim's journal says of one answer.

    Example: ``{"request_id": "g00000-s00-a0-3-812", "delivered": "complete", "sent_bytes": 412}``.
    """

    request_id: str
    delivered: Delivered
    sent_bytes: int


def read_journals(executions: Path) -> list[tuple[str, JournalLine]]:
    """Return the journal lines of all executions whose folders are still there, by execution."""
    found = []
    for path in sorted(executions.glob("*/journal.jsonl")):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                found.append((path.parent.name, msgspec.json.decode(line, type=JournalLine)))
    return found


async def end_shims(executions: Path, *, grace_s: float) -> None:
    """Ask every live shim of a run to end its harness and wait until they have ended."""
    for _, mark in live_shims(executions):
        with contextlib.suppress(ProcessLookupError):
            os.kill(mark.pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            while live_shims(executions):
                await asyncio.sleep(0.05)


def live_shims(executions: Path) -> list[tuple[str, ShimMark]]:
    """Return the executions of a run whose shim lives."""
    found = []
    for folder in sorted(executions.iterdir()) if executions.is_dir() else ():
        mark = read_mark(folder)
        if mark is not None and not (folder / "exit.json").exists() and is_shim(mark):
            found.append((folder.name, mark))
    return found


def sandbox_of(task: Task, isolation: Isolation, images: ImageStore | None, *, is_light: bool) -> dict[str, Any]:
    """Return the part of an order that says how it is confined; the image of a task comes before the machine's way.

    Choice: what runs inside the forked process (``is_light``) is limited process by process, by rlimits. A control
    group of version 1 made an execution of the embedded job 20% dearer (0.23 to 0.28 core-seconds on a slow machine).

    Raises:
        SandboxError: The task needs an image and there is no engine.
    """
    workdir = str(task.options.get("workdir", ""))
    if task.image is None:
        return {
            "sandbox": isolation.kind,
            "control_group": isolation.has_control_groups and not is_light,
            "workdir": workdir,
        }
    if images is None:
        raise SandboxError(f"{task.task_id}: {engine_lack(task)}")
    return {
        "sandbox": "container",
        "control_group": False,
        "workdir": workdir or "/app",
        "engine": images.engine,
        "image": images.image_of(task),
    }


def _prepare(folder: Path, task: Task, user: int, images: ImageStore | None) -> None:
    """Make the workspace anew with the task's files, owned by the sandbox's user."""
    shutil.rmtree(folder, ignore_errors=True)
    workspace = folder / "workspace"
    workspace.mkdir(parents=True)
    (folder / "root").mkdir()
    if images is not None:
        images.fill(task, workspace)
    for name, text in task.files.items():
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if os.getuid() == 0:
        os.chown(workspace, user, user)
        for path in workspace.rglob("*"):
            os.chown(path, user, user)
