"""A cell as the driver sees it: starts the process and turns method calls into messages."""

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from typing import TypeVar

from opengyre.cell import wire
from opengyre.core.cells import CellStatus, HandedOver, MicroStepResult, StepResult, WeightsRef
from opengyre.core.errors import CellLostError, InvariantError, RunError
from opengyre.core.events import Mode
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import Row

T = TypeVar("T")
_MODULES = {"reference": "opengyre.cell.worker", "emulated": "opengyre.cell.emulated"}
_ERRORS: dict[str, type[Exception]] = {"InvariantError": InvariantError}


class LocalCell:
    """A cell in an OS process of its own; implements ``core.cells.CellClient``.

    Args:
        cell_id: 0 is the core.
        settings: What the process needs to know.
    """

    def __init__(self, cell_id: int, settings: wire.CellSettings) -> None:
        self._cell_id = cell_id
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[wire.Reply]] = {}
        self._number = 0
        self.lost: asyncio.Event = asyncio.Event()
        """Set when the process is gone without having been stopped."""

    @property
    def cell_id(self) -> int:
        """Number of the cell."""
        return self._cell_id

    @property
    def process_id(self) -> int:
        """Process id, 0 before the start."""
        return self._process.pid if self._process is not None else 0

    async def start(self, weights: WeightsRef, *, pinned: Sequence[WeightsRef] = (), optimizer_path: str = "") -> None:
        """Start the process and load the weights."""
        ours, theirs = socket.socketpair()
        environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            _MODULES[self._settings.engine],
            str(theirs.fileno()),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self.lost.clear()
        self._reading = asyncio.create_task(self._read(reader))
        await self._ask(
            wire.Start(
                cell_id=self._cell_id,
                settings=self._settings,
                weights=weights,
                pinned=tuple(pinned),
                optimizer_path=optimizer_path,
            ),
            type(None),
        )

    async def generate(self, request: GenerateRequest, *, kv_path: str = "") -> Generation | HandedOver:
        """Sample a call here until it ends or the cell leaves rollout mode; cancelling it frees its place there."""
        try:
            reply = await self._send(wire.Generate(request=request, kv_path=kv_path))
        except asyncio.CancelledError:
            if self._writer is not None and not self.lost.is_set():
                self._number += 1
                self._writer.write(wire.encode_request(self._number, wire.Abort(call_id=request.call_id)))
            raise
        if reply.kind == "handed_over":
            return wire.decode_body(reply.body, HandedOver)
        return wire.decode_body(reply.body, Generation)

    async def release(self, execution_id: str) -> None:
        """Cached keys and values of the execution may go."""
        await self._ask(wire.Release(execution_id=execution_id), type(None))

    async def load_weights(self, weights: WeightsRef, *, pinned: Sequence[int]) -> int:
        """Serve new calls with this version and keep the pinned ones; returns the calls in flight."""
        return await self._ask(wire.LoadWeights(weights=weights, pinned=tuple(pinned)), int)

    async def switch(self, mode: Mode, weights: WeightsRef, *, pinned: Sequence[WeightsRef] = ()) -> None:
        """Change mode; to training the live calls are handed over first."""
        await self._ask(wire.Switch(mode=mode, weights=weights, pinned=tuple(pinned)), type(None))

    async def run_micro_step(self, micro_step_id: str, rows: Sequence[Row], *, step: int) -> MicroStepResult:
        """Forward-backward; adds to the cell's gradient sum of the step."""
        request = wire.RunMicroStep(micro_step_id=micro_step_id, rows=tuple(rows), step=step)
        return await self._ask(request, MicroStepResult)

    async def hand_in_gradient(self, step: int) -> str:
        """Write the gradient sum of the step and return its path."""
        return await self._ask(wire.HandInGradient(step=step), str)

    async def close_step(
        self, step: int, gradient_paths: Sequence[str], *, executions: int, rate: float = 1.0
    ) -> StepResult:
        """Core only: reduce, step, write weights and optimizer."""
        request = wire.CloseStep(step=step, gradient_paths=tuple(gradient_paths), executions=executions, rate=rate)
        return await self._ask(request, StepResult)

    async def forget_step(self, step: int) -> None:
        """Drop the gradient sum of a step."""
        await self._ask(wire.ForgetStep(step=step), type(None))

    async def status(self) -> CellStatus:
        """Return the present load."""
        return await self._ask(wire.Status(), CellStatus)

    async def stop(self) -> None:
        """End the process, whatever it is doing."""
        process, self._process = self._process, None
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._fail_waiting()
        if process is not None and process.returncode is None:
            process.kill()
        if process is not None:
            await process.wait()

    # -- transport --------------------------------------------------------------------------------------------

    async def _ask(self, request: wire.Request, expected: type[T]) -> T:
        return wire.decode_body((await self._send(request)).body, expected)

    async def _send(self, request: wire.Request) -> wire.Reply:
        if self._writer is None or self.lost.is_set():
            raise CellLostError(f"cell {self._cell_id} has no process")
        self._number += 1
        waiter: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = waiter
        self._writer.write(wire.encode_request(self._number, request))
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise CellLostError(f"cell {self._cell_id} is gone") from error
        reply = await waiter
        if reply.kind == "failed":
            failure = wire.decode_body(reply.body, wire.Failure)
            raise _ERRORS.get(failure.error, RunError)(f"cell {self._cell_id}: {failure.message}")
        return reply

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = wire.FrameReader()
        try:
            while data := await reader.read(1 << 20):
                for frame in frames.feed(data):
                    reply = wire.decode_reply(frame)
                    waiter = self._waiting.pop(reply.number, None)
                    if waiter is not None and not waiter.done():
                        waiter.set_result(reply)
        except ConnectionError:
            pass
        self.lost.set()
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting.values():
            if not waiter.done():
                waiter.set_exception(CellLostError(f"cell {self._cell_id} is gone"))
