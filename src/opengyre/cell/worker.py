"""The process of one cell: ``python -m opengyre.cell.worker FD``.

One torch thread, one loop: read messages, then a step of the engine if there are calls. Micro-steps and optimizer steps
run between two steps of the engine. Nothing here decides: the driver's scheduler does.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from opengyre.cell.wire import (
    Abort,
    CellSettings,
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
from opengyre.core.cells import CellStatus, StepResult, WeightsRef
from opengyre.core.errors import FileError, GyreError, InvariantError, RunError
from opengyre.core.events import Mode
from opengyre.core.protocols import Generation
from opengyre.engine.moved import take_moved
from opengyre.engine.torch_engine import TorchEngine
from opengyre.model.decoder import Parameters
from opengyre.model.weights import read_version, write_version
from opengyre.train.trainer import Trainer

_PR_SET_PDEATHSIG = 1
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Cell:
    """Engine and trainer of one cell, and which of them works.

    Example: ``Cell(start)`` serves calls; ``switch(Mode.TRAINING, weights)`` empties the engine first.
    """

    def __init__(self, start: Start) -> None:
        settings = start.settings
        self.cell_id = start.cell_id
        self.settings: CellSettings = settings
        self.mode = Mode.ROLLOUT
        self.busy_s = 0.0
        self._served = {reference.version: reference.checksum for reference in (start.weights, *start.pinned)}
        self._drain_ends_s: float | None = None
        self._asked_s, self._asked_tokens = time.monotonic(), 0
        config, parameters = read_version(start.weights)
        self._dtype = _DTYPES[settings.dtype]
        self.engine = TorchEngine(
            config,
            slots=settings.slots,
            max_running=settings.max_running,
            kv_tokens=settings.kv_tokens,
            dtype=self._dtype,
        )
        self.engine.set_version(start.weights.version, self._for_rollout(parameters))
        for reference in start.pinned:
            if reference.version != start.weights.version:
                self.engine.add_version(reference.version, self._for_rollout(read_version(reference)[1]))
        self.trainer = Trainer(
            config,
            parameters,
            version=start.weights.version,
            loss=settings.loss,
            optimizer=settings.optimizer,
        )
        if start.optimizer_path:
            self.trainer.load_optimizer(Path(start.optimizer_path))

    def _for_rollout(self, parameters: Parameters) -> Parameters:
        return {name: tensor.detach().to(self._dtype) for name, tensor in parameters.items()}

    def load_weights(self, weights: WeightsRef, pinned: tuple[int, ...]) -> int:
        """Serve (or train) a version; returns the calls in flight."""
        if self.mode is Mode.TRAINING:
            self._load_training(weights)
            return 0
        in_flight = self._make_current(weights, keep=pinned, drain=self.settings.drain)
        if self.settings.drain and in_flight:
            self._drain_ends_s = time.monotonic() + self.settings.drain_s
        return in_flight

    def step(self) -> list[tuple[str, Generation]]:
        """One step of the engine."""
        started_s = time.monotonic()
        if self._drain_ends_s is not None and started_s > self._drain_ends_s:
            self._drain_ends_s = None
            self.engine.end_drain()
        ended = self.engine.step()
        self.busy_s += time.monotonic() - started_s
        return ended

    def _load_training(self, weights: WeightsRef) -> None:
        if self.trainer.version != weights.version:
            _, parameters = read_version(weights)
            self.trainer.load(weights.version, parameters, keep_versions=self.settings.keep_versions)

    def switch(self, mode: Mode, weights: WeightsRef, pinned: tuple[WeightsRef, ...]) -> None:
        """Change mode; the calls have been handed over before."""
        if mode is Mode.TRAINING:
            if not self.engine.is_idle:
                raise InvariantError(f"cell {self.cell_id} was to train with {self.engine.running} live calls")
            self._load_training(weights)
            self.engine.clear_cache()
        else:
            self._serve(weights, pinned)
        self.mode = mode

    def _serve(self, weights: WeightsRef, pinned: tuple[WeightsRef, ...]) -> None:
        """Make a version current and the pinned ones resident."""
        for reference in pinned:
            if not self._is_resident(reference):
                self.engine.add_version(reference.version, self._for_rollout(read_version(reference)[1]))
                self._served[reference.version] = reference.checksum
        self._make_current(weights, keep=[reference.version for reference in pinned], drain=False)

    def _make_current(self, weights: WeightsRef, *, keep: Iterable[int], drain: bool) -> int:
        """Serve a version from now on; returns the calls in flight. One that is resident is not read again."""
        parameters = self.engine.parameters(weights.version) if self._is_resident(weights) else None
        if parameters is None:
            _, read = read_version(weights)
            self.trainer.note_version(weights.version, read, keep_versions=self.settings.keep_versions)
            parameters = self._for_rollout(read)
            self._served[weights.version] = weights.checksum
        return self.engine.set_version(weights.version, parameters, keep=keep, drain=drain)

    def _is_resident(self, reference: WeightsRef) -> bool:
        is_same = self._served.get(reference.version) == reference.checksum
        return is_same and reference.version in self.engine.versions

    def hand_in_gradient(self, step: int) -> str:
        """Write the gradient sum to the shared folder."""
        path = Path(self.settings.gradient_folder) / f"gradient-{step:05d}-{self.cell_id}-{os.getpid()}"
        self.trainer.hand_in_gradient(step, path)
        return str(path)

    def close_step(self, request: CloseStep) -> StepResult:
        """Take the optimizer step; optimizer state first, then weights, both durable before the answer."""
        started_s = time.monotonic()
        settings = self.settings
        norm, empty = self.trainer.close_step(
            request.step,
            [Path(path) for path in request.gradient_paths],
            executions=request.executions,
            keep_versions=settings.keep_versions,
            rate=request.rate,
        )
        version = self.trainer.version
        name = f"v{version:05d}-{settings.incarnation}.safetensors"
        self.trainer.save_optimizer(Path(settings.optimizer_folder) / name)
        weights = write_version(
            Path(settings.weights_folder) / name,
            self.trainer.config,
            self.trainer.parameters,
            version=version,
            incarnation=settings.incarnation,
        )
        return StepResult(weights=weights, gradient_norm=norm, empty=empty, seconds=time.monotonic() - started_s)

    def status(self) -> CellStatus:
        """Return the present load; the token rate is that since the last question."""
        counters = self.engine.counters
        now_s = time.monotonic()
        elapsed_s = max(now_s - self._asked_s, 1e-3)
        rate = (counters.sampled_tokens - self._asked_tokens) / elapsed_s
        self._asked_s, self._asked_tokens = now_s, counters.sampled_tokens
        return CellStatus(
            cell_id=self.cell_id,
            mode=self.mode,
            running=self.engine.running,
            queued=self.engine.queued,
            kv_tokens=self.engine.kv_tokens,
            tokens_per_s=rate,
            sampled_tokens=counters.sampled_tokens,
            prefilled_tokens=counters.prefilled_tokens,
            busy_s=self.busy_s,
        )


class Worker:
    """The loop around a cell.

    Args:
        connection: Socket to the driver; its end is the end of the process.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader()
        self._cell: Cell | None = None
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

    def _step(self, cell: Cell) -> None:
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
            self._cell = Cell(request)
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

    def _submit(self, cell: Cell, number: int, request: Generate) -> None:
        if cell.mode is not Mode.ROLLOUT:
            raise InvariantError(f"call {request.request.call_id} came to cell {cell.cell_id} in mode {cell.mode}")
        moved = take_moved(Path(request.kv_path)) if request.kv_path else None
        cell.engine.submit(request.request, moved=moved)
        self._calls[request.request.call_id] = number

    def _work(self, cell: Cell, request: object) -> object:
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

    def _train(self, cell: Cell, request: object) -> object:
        """Carry out what belongs to the trainer."""
        match request:
            case RunMicroStep(micro_step_id=micro_step_id, rows=rows, step=step):
                if cell.mode is not Mode.TRAINING:
                    raise InvariantError(f"micro-step {micro_step_id} came to cell {cell.cell_id} in mode {cell.mode}")
                return cell.trainer.run_micro_step(micro_step_id, rows, step=step)
            case HandInGradient(step=step):
                return cell.hand_in_gradient(step)
            case CloseStep():
                return cell.close_step(request)
            case ForgetStep(step=step):
                cell.trainer.forget_step(step)
                return None
            case _:
                raise InvariantError(f"a cell does not know {type(request).__name__}")

    def _hand_over(self, cell: Cell) -> None:
        folder = Path(cell.settings.kv_folder) if cell.settings.kv_folder else None
        for call_id, partial in cell.engine.hand_over(folder):
            self._send(encode_reply(self._calls.pop(call_id), "handed_over", partial))


def main(descriptor: int) -> int:
    """Serve the driver on an inherited socket."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    connection = socket.socket(fileno=descriptor)
    try:
        Worker(connection).run()
    except (BrokenPipeError, ConnectionResetError):
        return 0
    except (FileError, RunError) as error:
        sys.stderr.write(f"cell: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
