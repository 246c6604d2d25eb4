"""The process of one emulated cell: ``python -m opengyre.cell.emulated FD``. It imports no torch and mostly sleeps.

It answers every message of the protocol, in the time that the cost model says: calls, hand-over, switches, micro-steps,
gradient sums, optimizer steps, publications. A gradient sum is the list of micro-steps in it, so the core sees at once
if one were lost or counted twice.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from safetensors.numpy import save

from opengyre.cell.loop import serve
from opengyre.cell.mode import Cell
from opengyre.cell.wire import CloseStep, Start
from opengyre.core.cells import MicroStepResult, StepResult, WeightsRef
from opengyre.core.durable import write_durably
from opengyre.core.errors import FileError, InvariantError
from opengyre.core.events import Mode
from opengyre.core.types import Row
from opengyre.engine.emulated import (
    EmulatedCosts,
    EmulatedEngine,
    MovedTokens,
    Pace,
    read_replies,
    take_moved_tokens,
)


class EmulatedCell(Cell[str, MovedTokens]):
    """A cell whose work is waiting.

    Args:
        start: What the driver says at the start; ``settings.replies_path`` names the table of replies.
        pace: Spends the time.

    Raises:
        FileError: The table of replies is missing.
    """

    def __init__(self, start: Start, pace: Pace | None = None) -> None:
        settings = start.settings
        self._costs = settings.costs or EmulatedCosts()
        self._pace = pace or Pace()
        engine = EmulatedEngine(
            self._costs,
            read_replies(Path(settings.replies_path)),
            self._pace,
            context_tokens=settings.context_tokens,
            slots=settings.slots,
            max_running=settings.max_running,
            kv_tokens=settings.kv_tokens,
        )
        super().__init__(start, engine)
        engine.set_version(start.weights.version, start.weights.checksum)
        for reference in start.pinned:
            engine.add_version(reference.version, reference.checksum)
        self._trained = start.weights.version
        self._step = -1
        self._done: dict[str, MicroStepResult] = {}

    def _take_moved(self, path: Path) -> MovedTokens | None:
        return take_moved_tokens(path)

    def _read(self, reference: WeightsRef, *, is_current: bool) -> str:
        if is_current and self.mode is Mode.ROLLOUT:
            self._pace.spend(self._costs.publish_s)
        return reference.checksum

    def _load_training(self, weights: WeightsRef) -> None:
        self._trained = weights.version

    def switch(self, mode: Mode, weights: WeightsRef, pinned: tuple[WeightsRef, ...]) -> None:
        """Change mode, which takes its time only if the mode is another one."""
        if mode is not self.mode:
            self._pace.spend(self._costs.switch_s)
        super().switch(mode, weights, pinned)

    # -- training ---------------------------------------------------------------------------------------------

    def run_micro_step(self, micro_step_id: str, rows: Sequence[Row], *, step: int) -> MicroStepResult:
        """Take the time of the rows' tokens.

        Raises:
            InvariantError: The weights are not those of the step.
        """
        if step != self._trained:
            raise InvariantError(f"micro-step {micro_step_id} of step {step} on weights of version {self._trained}")
        if self._step != step:
            self._done, self._step = {}, step
        if micro_step_id in self._done:
            return self._done[micro_step_id]
        started_s = time.monotonic()
        tokens = sum(len(row.tokens) for row in rows)
        trained = sum(row.trained_tokens for row in rows)
        self._pace.spend(tokens * self._costs.train_token_s)
        result = MicroStepResult(
            seconds=time.monotonic() - started_s,
            tokens=tokens,
            trained_tokens=trained,
            loss=0.0,
            entropy=0.0,
            kl=0.0,
            ratio=float(trained),
            ratio_max=1.0,
            truncated=0,
            checked_tokens=0,
            checked_difference=0.0,
        )
        self._done[micro_step_id] = result
        return result

    def hand_in_gradient(self, step: int) -> str:
        """Write which micro-steps this cell's sum holds and return the path."""
        path = Path(self.settings.gradient_folder) / f"gradient-{step:05d}-{self.cell_id}-{os.getpid()}"
        path.write_bytes(msgspec.json.encode(self._sum_of(step)))
        return str(path)

    def _sum_of(self, step: int) -> list[str]:
        return sorted(self._done) if step == self._step else []

    def forget_step(self, step: int) -> None:
        """Drop the gradient sum of a step."""
        if step == self._step:
            self._done, self._step = {}, -1

    def close_step(self, request: CloseStep) -> StepResult:
        """Add the sums, take the time of an optimizer step, write the next version.

        Raises:
            InvariantError: The step is not the next one, a satellite was asked, or a micro-step stands in two sums.
        """
        if self.settings.optimizer is None or request.step != self._trained:
            raise InvariantError(f"step {request.step} was to be closed on weights of version {self._trained}")
        started_s = time.monotonic()
        summed = self._sum_of(request.step)
        for handed_in in request.gradient_paths:
            summed += _read_sum(Path(handed_in))
        if len(set(summed)) != len(summed):
            raise InvariantError(f"step {request.step}: a micro-step was counted twice in {sorted(summed)}")
        self._pace.spend(self._costs.optimizer_s)
        self.forget_step(request.step)
        self._trained = request.step + 1
        settings = self.settings
        path = Path(settings.weights_folder) / f"v{self._trained:05d}-{settings.incarnation}.safetensors"
        weights = write_emulated_version(path, version=self._trained, incarnation=settings.incarnation)
        is_empty = request.executions == 0
        return StepResult(weights=weights, gradient_norm=0.0, empty=is_empty, seconds=time.monotonic() - started_s)


def _read_sum(path: Path) -> list[str]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[str])
    except (OSError, msgspec.DecodeError) as error:
        raise FileError(f"{path}: not the list of micro-steps of an emulated cell: {error}") from error


def write_emulated_version(path: Path, *, version: int, incarnation: int) -> WeightsRef:
    """Write a weight file without weights: a safetensors file that only says which version it stands for.

    Raises:
        RunError: The disk is full or not writable.
    """
    data = save({}, {"emulated": "true", "version": str(version), "incarnation": str(incarnation)})
    checksum = write_durably(path, data)
    return WeightsRef(version=version, incarnation=incarnation, path=str(path), checksum=checksum)


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), EmulatedCell))
