"""Switch rules: which cells should change mode now. One interface, pure functions of a view."""

import math
from dataclasses import dataclass
from typing import Protocol

from opengyre.core.errors import ConfigError
from opengyre.core.events import Mode
from opengyre.schedule.settings import ScheduleSettings


@dataclass(frozen=True)
class CellView:
    """One cell as a rule sees it.

    Example: ``CellView(cell_id=1, mode=Mode.ROLLOUT, target=Mode.ROLLOUT, is_idle=False, kv_tokens=3400)``.
    """

    cell_id: int
    mode: Mode
    target: Mode
    """Mode it is in or on the way to."""
    is_idle: bool
    """In training mode without known work."""
    kv_tokens: int

    @property
    def can_leave_rollout(self) -> bool:
        """Whether it is in rollout mode and stays there so far."""
        return self.mode is Mode.ROLLOUT and self.target is Mode.ROLLOUT

    @property
    def can_leave_training(self) -> bool:
        """Whether it is in training mode without work."""
        return self.mode is Mode.TRAINING and self.target is Mode.TRAINING and self.is_idle


@dataclass(frozen=True)
class RuleView:
    """What a rule decides on.

    Example: w = 20 live executions, two cells in rollout mode, 3 micro-steps waiting.
    """

    settings: ScheduleSettings
    cells: tuple[CellView, ...]
    waterlevel: int
    """w: executions dispatched and not finished."""
    waiting: int
    """q: micro-steps of the open step that no cell has pulled."""
    is_batch_ready: bool
    """All places of the open step are taken."""
    is_step_busy: bool
    """Micro-steps of the open step wait or run, or the step is being closed."""

    @property
    def training(self) -> int:
        """Cells in training mode or on the way to it."""
        return sum(cell.target is Mode.TRAINING for cell in self.cells)

    @property
    def joining(self) -> int:
        """Cells on the way to training."""
        return sum(cell.target is Mode.TRAINING and cell.mode is not Mode.TRAINING for cell in self.cells)

    def lightest_first(self) -> list[CellView]:
        """Return cells that can leave rollout, fewest resident tokens first: a switch costs their re-prefill."""
        leaving = [cell for cell in self.cells if cell.can_leave_rollout]
        return sorted(leaving, key=lambda cell: (cell.kv_tokens, -cell.cell_id))


class SwitchRule(Protocol):
    """Decides which cells change mode."""

    @property
    def parks(self) -> bool:
        """Whether it may leave live executions without a cell in rollout mode."""
        ...

    def switches(self, view: RuleView) -> list[tuple[int, Mode]]:
        """Return the cells that should change mode now, and where to."""
        ...


def wanted_trainers(view: RuleView) -> int:
    """Return max(floor, min(K - 1, K - ceil(w / C))).

    Source: paper, the waterlevel; Choice: C as a share of the dispatch window, and the floor.

    >>> settings = ScheduleSettings(cells=(0, 1), steps=1, batch_groups=4, group_size=8, overlap=1, burst=1)
    >>> [wanted_trainers(RuleView(settings, _two_cells(), w, 0, False, False)) for w in (64, 23, 22, 0)]
    [0, 0, 1, 1]
    """
    cells = len(view.cells)
    needed = math.ceil(view.waterlevel / view.settings.capacity)
    return max(view.settings.floor, min(cells - 1, cells - needed))


def _two_cells() -> tuple[CellView, ...]:
    return tuple(CellView(index, Mode.ROLLOUT, Mode.ROLLOUT, False, 0) for index in range(2))


class Waterlevel:
    """The default rule: as w falls, cells join training, if enough micro-steps wait for them.

    Source: paper, the waterlevel rule. Choice: the queue test and the recall of idle trainers only above ``want``.
    """

    parks = False

    def switches(self, view: RuleView) -> list[tuple[int, Mode]]:
        """Return the cells that join training, or the idle trainers that go back."""
        want, current, joining = wanted_trainers(view), view.training, view.joining
        chosen: list[tuple[int, Mode]] = []
        for cell in view.lightest_first():
            enough = view.waiting >= joining + 1 + view.settings.queue * current
            if want <= current or not enough or current >= len(view.cells) - 1:
                break
            chosen.append((cell.cell_id, Mode.TRAINING))
            current, joining = current + 1, joining + 1
        for cell in view.cells:
            if current > want and cell.can_leave_training:
                chosen.append((cell.cell_id, Mode.ROLLOUT))
                current -= 1
        return chosen


class Static:
    """A fixed split: the first baseline."""

    parks = False

    def switches(self, view: RuleView) -> list[tuple[int, Mode]]:
        """Return the cells that have to join training at the start or after a loss."""
        allowed = min(view.settings.training_cells, len(view.cells) - 1)
        missing = allowed - view.training
        leaving = sorted(view.lightest_first(), key=lambda cell: -cell.cell_id)
        return [(cell.cell_id, Mode.TRAINING) for cell in leaving[: max(0, missing)]]


class Colocate:
    """All cells roll out until the batch is ready, then all train; live calls are parked."""

    parks = True

    def switches(self, view: RuleView) -> list[tuple[int, Mode]]:
        """Return all cells that are not where the phase wants them."""
        if view.is_batch_ready and view.is_step_busy:
            return [(cell.cell_id, Mode.TRAINING) for cell in view.cells if cell.can_leave_rollout]
        return [(cell.cell_id, Mode.ROLLOUT) for cell in view.cells if cell.can_leave_training]


def rule_of(settings: ScheduleSettings) -> SwitchRule:
    """Return the rule that the settings name; a single cell always behaves as ``colocate``.

    Raises:
        ConfigError: The rule is not built yet.
    """
    if len(settings.cells) == 1 or settings.rule == "colocate":
        return Colocate()
    if settings.rule == "static":
        return Static()
    if settings.rule == "waterlevel":
        return Waterlevel()
    raise ConfigError(f"schedule.rule = {settings.rule!r}: this version has waterlevel, static and colocate only")
