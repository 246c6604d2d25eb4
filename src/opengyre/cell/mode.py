"""One cell: its mode, the versions it serves, and the order of a switch. What computes stands in a subclass."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Generic

from opengyre.cell.wire import CellSettings, CloseStep, Generate, Start
from opengyre.core.cells import CellStatus, MicroStepResult, StepResult, WeightsRef
from opengyre.core.errors import InvariantError
from opengyre.core.events import Mode
from opengyre.core.protocols import Generation
from opengyre.core.types import Row
from opengyre.engine.batching import BatchingEngine, WeightsT
from opengyre.engine.live import MovedT


class Cell(ABC, Generic[WeightsT, MovedT]):
    """Engine and trainer of one cell, and which of them works.

    Args:
        start: What the driver says at the start.
        engine: Serves the version of ``start`` and the pinned ones.

    Example: ``switch(Mode.TRAINING, weights)`` empties the engine first and refuses while it has calls.
    """

    def __init__(self, start: Start, engine: BatchingEngine[WeightsT, MovedT]) -> None:
        self.cell_id = start.cell_id
        self.settings: CellSettings = start.settings
        self.mode = Mode.ROLLOUT
        self.busy_s = 0.0
        self.engine = engine
        self._served = {reference.version: reference.checksum for reference in (start.weights, *start.pinned)}
        self._drain_ends_s: float | None = None
        self._asked_s, self._asked_tokens = time.monotonic(), 0

    # -- calls ------------------------------------------------------------------------------------------------

    def submit(self, request: Generate) -> None:
        """Queue a call, with the keys and values that came with it."""
        moved = self._take_moved(Path(request.kv_path)) if request.kv_path else None
        self.engine.submit(request.request, moved=moved)

    def step(self) -> list[tuple[str, Generation]]:
        """One step of the engine."""
        started_s = time.monotonic()
        if self._drain_ends_s is not None and started_s > self._drain_ends_s:
            self._drain_ends_s = None
            self.engine.end_drain()
        ended = self.engine.step()
        self.busy_s += time.monotonic() - started_s
        return ended

    # -- weights and modes ------------------------------------------------------------------------------------

    def load_weights(self, weights: WeightsRef, pinned: tuple[int, ...]) -> int:
        """Serve (or train) a version; returns the calls in flight."""
        if self.mode is Mode.TRAINING:
            self._load_training(weights)
            return 0
        in_flight = self._make_current(weights, keep=pinned, drain=self.settings.drain)
        if self.settings.drain and in_flight:
            self._drain_ends_s = time.monotonic() + self.settings.drain_s
        return in_flight

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
                self.engine.add_version(reference.version, self._read(reference, is_current=False))
                self._served[reference.version] = reference.checksum
        self._make_current(weights, keep=[reference.version for reference in pinned], drain=False)

    def _make_current(self, weights: WeightsRef, *, keep: Iterable[int], drain: bool) -> int:
        """Serve a version from now on; returns the calls in flight. One that is resident is not read again."""
        if self._is_resident(weights):
            served = self.engine.parameters(weights.version)
        else:
            served = self._read(weights, is_current=True)
            self._served[weights.version] = weights.checksum
        return self.engine.set_version(weights.version, served, keep=keep, drain=drain)

    def _is_resident(self, reference: WeightsRef) -> bool:
        is_same = self._served.get(reference.version) == reference.checksum
        return is_same and reference.version in self.engine.versions

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
            recomputed_tokens=counters.recomputed_tokens,
            busy_s=self.busy_s,
        )

    # -- what a subclass computes -----------------------------------------------------------------------------

    @abstractmethod
    def _take_moved(self, path: Path) -> MovedT | None:
        """Read and remove the keys and values of a call that comes from another cell."""

    @abstractmethod
    def _read(self, reference: WeightsRef, *, is_current: bool) -> WeightsT:
        """Return the weights of a version for the engine."""

    @abstractmethod
    def _load_training(self, weights: WeightsRef) -> None:
        """Train on a version from now on."""

    @abstractmethod
    def run_micro_step(self, micro_step_id: str, rows: Sequence[Row], *, step: int) -> MicroStepResult:
        """Add the gradient of rows to the sum of a step; a repetition changes nothing."""

    @abstractmethod
    def hand_in_gradient(self, step: int) -> str:
        """Write the gradient sum of a step to the shared folder and return its path."""

    @abstractmethod
    def close_step(self, request: CloseStep) -> StepResult:
        """Take the optimizer step; what it makes is durable before the answer."""

    @abstractmethod
    def forget_step(self, step: int) -> None:
        """Drop the gradient sum of a step."""
