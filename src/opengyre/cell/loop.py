"""The loop of a cell's process: read messages, carry them out, then a step of the engine if there are calls.

Micro-steps and optimizer steps run between two steps of the engine. Nothing here decides: the driver's scheduler does.
"""

import ctypes
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opengyre.cell.mode import Cell
from opengyre.cell.wire import (
    Abort,
    CloseStep,
    Failure,
    ForgetStep,
    FrameReader,
    Generate,
    HandInGradient,
    LoadWeights,
    Numbered,
    Release,
    RunMicroStep,
    Start,
    Status,
    Stop,
    Switch,
    decode_request,
    encode_reply,
)
from opengyre.core.errors import FileError, GyreError, InvariantError, RunError
from opengyre.core.events import Mode

_PR_SET_PDEATHSIG = 1
AnyCell = Cell[Any, Any]


class Worker:
    """The loop around a cell.

    Args:
        connection: Socket to the driver; its end is the end of the process.
        make: Builds the cell when the driver starts it.
    """

    def __init__(self, connection: socket.socket, make: Callable[[Start], AnyCell]) -> None:
        self._connection = connection
        self._make = make
        self._reader = FrameReader()
        self._cell: AnyCell | None = None
        self._calls: dict[str, int] = {}
        """Call id to the number of its request."""

    def run(self) -> None:
        """Serve until ``Stop`` or until the driver is gone."""
        while True:
            idle = self._cell is None or self._cell.engine.is_idle
            ready, _, _ = select.select([self._connection], [], [], None if idle else 0)
            if ready:
                data = self._connection.recv(1 << 20)
                if not data:
                    return
                for frame in self._reader.feed(data):
                    if not self._take(decode_request(frame)):
                        return
            if self._cell is not None and not self._cell.engine.is_idle:
                self._step(self._cell)

    def _step(self, cell: AnyCell) -> None:
        for call_id, generation in cell.step():
            self._send(encode_reply(self._calls.pop(call_id), "done", generation))

    def _send(self, frame: bytes) -> None:
        self._connection.setblocking(True)
        self._connection.sendall(frame)

    def _take(self, numbered: Numbered) -> bool:
        """Carry out one request; False after ``Stop``."""
        request = numbered.request
        if isinstance(request, Stop):
            self._send(encode_reply(numbered.number, "done", None))
            return False
        try:
            body = self._carry_out(numbered)
        except GyreError as error:
            failure = Failure(error=type(error).__name__, message=str(error))
            self._send(encode_reply(numbered.number, "failed", failure))
            return True
        if not isinstance(request, Generate | Abort):
            self._send(encode_reply(numbered.number, "done", body))
        return True

    def _carry_out(self, numbered: Numbered) -> object:
        request = numbered.request
        if isinstance(request, Start):
            self._cell = self._make(request)
            return None
        cell = self._cell
        if cell is None:
            raise InvariantError(f"{type(request).__name__} before Start")
        if isinstance(request, Generate):
            self._submit(cell, numbered.number, request)
            return None
        started_s = time.monotonic()
        try:
            return self._work(cell, request)
        finally:
            if isinstance(request, RunMicroStep | CloseStep | HandInGradient):
                cell.busy_s += time.monotonic() - started_s

    def _submit(self, cell: AnyCell, number: int, request: Generate) -> None:
        if cell.mode is not Mode.ROLLOUT:
            raise InvariantError(f"call {request.request.call_id} came to cell {cell.cell_id} in mode {cell.mode}")
        cell.submit(request)
        self._calls[request.request.call_id] = number

    def _work(self, cell: AnyCell, request: object) -> object:
        """Carry out what changes or asks the whole cell, and return the body of the answer."""
        match request:
            case LoadWeights(weights=weights, pinned=pinned):
                return cell.load_weights(weights, pinned)
            case Switch(mode=mode, weights=weights, pinned=pinned):
                if mode is Mode.TRAINING:
                    self._hand_over(cell)
                cell.switch(mode, weights, pinned)
            case Abort(call_id=call_id):
                cell.engine.abort(call_id)
            case Release(execution_id=execution_id):
                cell.engine.release(execution_id)
            case Status():
                return cell.status()
            case _:
                return self._train(cell, request)
        return None

    def _train(self, cell: AnyCell, request: object) -> object:
        """Carry out what belongs to the trainer."""
        match request:
            case RunMicroStep(micro_step_id=micro_step_id, rows=rows, step=step):
                if cell.mode is not Mode.TRAINING:
                    raise InvariantError(f"micro-step {micro_step_id} came to cell {cell.cell_id} in mode {cell.mode}")
                return cell.run_micro_step(micro_step_id, rows, step=step)
            case HandInGradient(step=step):
                return cell.hand_in_gradient(step)
            case CloseStep():
                return cell.close_step(request)
            case ForgetStep(step=step):
                cell.forget_step(step)
                return None
            case _:
                raise InvariantError(f"a cell does not know {type(request).__name__}")

    def _hand_over(self, cell: AnyCell) -> None:
        folder = Path(cell.settings.kv_folder) if cell.settings.kv_folder else None
        for call_id, partial in cell.engine.hand_over(folder):
            self._send(encode_reply(self._calls.pop(call_id), "handed_over", partial))


def serve(descriptor: int, make: Callable[[Start], AnyCell]) -> int:
    """Serve the driver on an inherited socket until it is gone; returns the exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    try:
        Worker(connection, make).run()
    except (BrokenPipeError, ConnectionResetError):
        return 0
    except (FileError, RunError) as error:
        sys.stderr.write(f"cell: {error}\n")
        return 1
    return 0
