"""The driver's desk for training: micro-steps to cells, gradient sums to the core, optimizer steps, their records."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from opengyre.core.cells import MicroStepResult, StepResult, WeightsRef
from opengyre.core.errors import CellLostError, InvariantError
from opengyre.core.events import CellReady, CloseStep, Event, MicroStepDone, Mode, RunMicroStep, StepDone
from opengyre.core.records import StepRecord
from opengyre.core.types import Row
from opengyre.ledger.ledger import Ledger
from opengyre.run.cell_desk import CellDesk
from opengyre.run.material import GroupMaterial

GUESSED_TOKEN_S = 2.5e-4
"""First guess of cell-seconds for a row token, until a micro-step has been measured."""
FORGET = 0.03
"""Weight of the newest micro-step in what a row token costs."""


@dataclass
class TrainingDesk:
    """Carries out micro-steps and optimizer steps.

    Args:
        cells: The cells of the run.
        ledger: Takes records and references to weights.
        clock: The driver's clock.
        post: Hands an event to the scheduler.
        modes: Present mode of a cell.
        incarnation: Of this start of the run.
        keep_versions: Weight files that stay.
        rate_of: Factor of the learning rate in a step.
    """

    cells: CellDesk
    ledger: Ledger
    clock: Callable[[], float]
    post: Callable[[Event], None]
    modes: Callable[[int], Mode]
    incarnation: int
    keep_versions: int
    rate_of: Callable[[int], float]
    materials: dict[int, GroupMaterial] = field(default_factory=dict)
    _rows: dict[str, tuple[Row, ...]] = field(default_factory=dict)
    _results: dict[str, tuple[int, MicroStepResult]] = field(default_factory=dict)
    _opened_s: float = 0.0
    _trained: tuple[float, float] = (0.0, 0.0)
    """Seconds and row tokens of micro-steps, the latest ones weigh most."""

    @property
    def token_s(self) -> float:
        """Cell-seconds of a row token, as far as is known."""
        seconds, tokens = self._trained
        return seconds / tokens if tokens else GUESSED_TOKEN_S

    def take_group(self, material: GroupMaterial) -> None:
        """Keep a complete group until it is consumed."""
        self.materials[material.group_id] = material
        self._rows.update(material.micro_steps)

    def forget_group(self, group_id: int) -> None:
        """Let a consumed group go."""
        for micro_step_id in self.materials.pop(group_id).micro_steps:
            del self._rows[micro_step_id]
            self._results.pop(micro_step_id, None)

    async def run_micro_step(self, command: RunMicroStep) -> None:
        """Run a micro-step on its cell and ask for the next."""
        cell = self.cells.cells[command.cell_id]
        rows = self._rows[command.micro_step_id]
        with contextlib.suppress(CellLostError):
            result = await cell.run_micro_step(command.micro_step_id, rows, step=command.step)
            self._results[command.micro_step_id] = (command.cell_id, result)
            seconds, tokens = (value * (1 - FORGET) for value in self._trained)
            self._trained = seconds + result.seconds, tokens + sum(len(row.tokens) for row in rows)
            self.cells.note_trained(command.cell_id, result.trained_tokens)
            self.post(
                MicroStepDone(cell_id=command.cell_id, micro_step_id=command.micro_step_id, seconds=result.seconds)
            )
            self.post(CellReady(cell_id=command.cell_id))

    async def close_step(self, command: CloseStep) -> None:
        """Reduce to the core, step, record, report; a lost cell leaves the step to the scheduler."""
        materials = [self.materials[group_id] for group_id in command.groups]
        executions = sum(material.executions for material in materials)
        if not any(material.micro_steps for material in materials):
            executions = 0
        try:
            result = await self._reduce(command, executions)
        except CellLostError:
            return
        await self.ledger.put_meta(f"weights-{result.weights.version}", _encoded(result.weights))
        await self.cells.take_version(result.weights, self.modes)
        record = self._record(command, materials, executions, result)
        check_exactness(record)
        await self.ledger.add_record(record)
        for material in materials:
            self.forget_group(material.group_id)
        self._opened_s = self.clock()
        self.post(StepDone(version=result.weights.version))
        self.cells.forget_versions(self.keep_versions)

    async def _reduce(self, command: CloseStep, executions: int) -> StepResult:
        core = self.cells.cells[self.cells.core]
        others = [cell_id for cell_id in sorted(command.contributions) if cell_id != self.cells.core]
        paths = await asyncio.gather(*(self.cells.cells[cell_id].hand_in_gradient(command.step) for cell_id in others))
        try:
            result = await core.close_step(command.step, paths, executions=executions, rate=self.rate_of(command.step))
        finally:
            for path in paths:
                Path(path).unlink(missing_ok=True)
        for cell_id in others:
            with contextlib.suppress(CellLostError):
                await self.cells.cells[cell_id].forget_step(command.step)
        return result

    def _record(
        self, command: CloseStep, materials: list[GroupMaterial], executions: int, result: StepResult
    ) -> StepRecord:
        done = [(cell_id, micro_step_id) for cell_id, ids in command.contributions.items() for micro_step_id in ids]
        results = [self._results[micro_step_id][1] for _, micro_step_id in done]
        trained = sum(part.trained_tokens for part in results)
        return StepRecord(
            step=command.step,
            incarnation=self.incarnation,
            started_s=self._opened_s,
            ended_s=self.clock(),
            groups=command.groups,
            staleness=tuple(command.step - material.version for material in materials),
            rewards=tuple(reward for material in materials for reward in material.rewards),
            executions=executions,
            spent_groups=sum(material.is_spent for material in materials),
            zero_variance_groups=sum(not material.has_variance for material in materials),
            rows=sum(material.rows for material in materials),
            leaves=sum(material.leaves for material in materials),
            trained_tokens=trained,
            trainable_tokens=sum(material.trainable_tokens for material in materials),
            mixed_tokens=sum(material.mixed_tokens for material in materials),
            micro_steps=tuple(done),
            forward_backward_s=sum(part.seconds for part in results),
            loss=_mean((part.loss for part in results), executions),
            entropy=_mean((part.entropy for part in results), trained),
            gradient_norm=result.gradient_norm,
            ratio_mean=_mean((part.ratio for part in results), trained),
            ratio_max=max((part.ratio_max for part in results), default=0.0),
            truncated_share=_mean((part.truncated for part in results), trained),
            kl=_mean((part.kl for part in results), trained),
            checked_tokens=sum(part.checked_tokens for part in results),
            checked_difference=max((part.checked_difference for part in results), default=0.0),
            empty=result.empty,
        )


def check_exactness(record: StepRecord, *, limit: float = 1e-4) -> None:
    """Refuse a step whose behaviour logprobs differ from the training logprobs under the same weights.

    Raises:
        InvariantError: They differ by more than ``limit``.
    """
    if record.checked_difference > limit:
        raise InvariantError(
            f"step {record.step}: behaviour and training logprobs differ by {record.checked_difference:.3g} "
            f"on {record.checked_tokens} tokens, expected at most {limit}"
        )


def _mean(values: Iterable[float], count: int) -> float:
    return float(sum(values)) / count if count else 0.0


def _encoded(weights: WeightsRef) -> str:
    return msgspec.json.encode(weights).decode()
