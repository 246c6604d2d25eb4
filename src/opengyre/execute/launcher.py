"""The driver's side of the fork server: start an execution or a grading, wait for its end."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from opengyre.core.errors import SandboxError

POLL_S = 0.2
FIRST_USER = 200_000
"""As root each sandbox has a user id of its own, from here on."""
USERS = 60_000


class _Said(msgspec.Struct, frozen=True):
    """One line of the fork server."""

    id: str = ""
    ready: int | None = None
    started: int | None = None
    ended: int | None = None


class ForkServer:
    """A running fork server.

    Args:
        log: Takes the error output of it and of what it starts.
        program: Arguments of the interpreter that make it one.

    Example: ``server = ForkServer(log)``; ``await server.start()``; ``status = await server.launch(order)``.
    """

    def __init__(self, log: Path, *, program: tuple[str, ...] = ("-m", "gyre_shim.forkserver")) -> None:
        self._log = log
        self._program = program
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ended: dict[str, asyncio.Future[int | None]] = {}
        self._ready = asyncio.Event()
        self._users = 0

    @property
    def process_id(self) -> int:
        """Process id, 0 before the start."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Start the process and wait until it has everything loaded.

        Raises:
            SandboxError: It ended at once.
        """
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self._program,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=dict(os.environ, PYTHONDONTWRITEBYTECODE="1"),
                start_new_session=True,
            )
        self._reading = asyncio.create_task(self._read())
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({ready, self._reading}, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.is_set():
            ready.cancel()
            raise SandboxError(f"the fork server ended at its start; its reason is in {self._log}")

    async def stop(self) -> None:
        """End the process; executions that live go on."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    def next_user(self) -> int:
        """Return a user id for a sandbox; what an ordinary user runs keeps that user's id."""
        self._users = (self._users + 1) % USERS
        return FIRST_USER + self._users if os.getuid() == 0 else os.getuid()

    async def launch(self, order: dict[str, Any]) -> int | None:
        """Start what the order says and return its exit status; None if the fork server was lost meanwhile.

        Raises:
            SandboxError: There is no fork server.
        """
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None:
            raise SandboxError("the fork server is gone")
        ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._ended[order["id"]] = ended
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        try:
            return await ended
        finally:
            self._ended.pop(order["id"], None)

    async def _read(self) -> None:
        process = self._process
        if process is None or process.stdout is None:
            return
        while line := await process.stdout.readline():
            said = msgspec.json.decode(line, type=_Said)
            if said.ready is not None:
                self._ready.set()
            if said.ended is not None and said.id in self._ended:
                ended = self._ended[said.id]
                if not ended.done():
                    ended.set_result(said.ended)
        for waiting in self._ended.values():
            if not waiting.done():
                waiting.set_result(None)


async def wait_for_file(path: Path, *, process_id: int) -> bool:
    """Wait until a file is there, or the process that was to write it is gone; returns whether it is there."""
    while not path.exists():
        if process_id and not _is_alive(process_id):
            return path.exists()
        await asyncio.sleep(POLL_S)
    return True


def _is_alive(process_id: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, 0)
        return True
    return False
