"""Switch rules: which cells should change mode now. One interface, pure functions of a view."""

import math
from dataclasses import dataclass
from typing import Protocol

from opengyre.core.events import Mode
from opengyre.schedule.cells import CellBook
from opengyre.schedule.settings import ScheduleSettings


@dataclass(frozen=True)
class RuleView:
    """What a rule decides on.

    Example: w = 20 live executions, two cells in rollout mode, 3 micro-steps waiting.
    """

    settings: ScheduleSettings
    cells: CellBook
    waterlevel: int
    """w: executions dispatched and not finished."""
    waiting: int
    """q: micro-steps of the open step that no cell has pulled."""
    is_batch_ready: bool
    """All places of the open step are taken."""
    is_step_busy: bool
    """Micro-steps of the open step wait or run, or the step is being closed."""


class SwitchRule(Protocol):
    """Decides which cells change mode."""

    @property
    def parks(self) -> bool:
        """Whether it may leave live executions without a cell in rollout mode."""
        ...

    def switches(self, view: RuleView) -> list[tuple[int, Mode]]:
        """Return the cells that should change mode now, and where to."""
        ...


def wanted_trainers(settings: ScheduleSettings, *, cells: int, waterlevel: int, theta: float, floor: int) -> int:
    """Return max(floor, min(K - 1, K - ceil(w / C))) with C = theta * (phi + mu) * B * N / K.

    Source: paper, the waterlevel; Choice: C as a share of the dispatch window, and the floor.

    >>> settings = ScheduleSettings(cells=(0, 1), steps=1, batch_groups=4, group_size=8, overlap=1, burst=1)
    >>> [wanted_trainers(settings, cells=2, waterlevel=w, theta=0.7, floor=0) for w in (64, 23, 22, 0)]
    [0, 0, 1, 1]
    """
    if not theta:
        return min(floor, cells - 1)
    needed = math.ceil(waterlevel / (theta * settings.window_share))
    return max(min(floor, cells - 1), min(cells - 1, cells - needed))


def joiners(*, want: int, training: int, joining: int, waiting: int, queue: int) -> int:
    """Return how many cells join training now: each needs a queue of its own.

    Choice: a further cell joins only if q >= joining + 1 + queue * (cells that train already).

    >>> joiners(want=3, training=0, joining=0, waiting=2, queue=1)
    1
    >>> joiners(want=3, training=0, joining=0, waiting=9, queue=1)
    3
    """
    number = 0
    while want > training + number and waiting >= joining + number + 1 + queue * (training + number):
        number += 1
    return number


def waterlevel_switches(view: RuleView, *, theta: float, floor: int, queue: int) -> list[tuple[int, Mode]]:
    """Return the switches of the waterlevel rule: joiners, and idle trainers above the wanted number.

    Source: paper, the waterlevel rule. Choice: the queue test; nothing is recalled at a publication as such.
    """
    cells = view.cells
    want = wanted_trainers(view.settings, cells=len(cells), waterlevel=view.waterlevel, theta=theta, floor=floor)
    number = joiners(
        want=min(want, len(cells) - 1),
        training=cells.training,
        joining=cells.joining,
        waiting=view.waiting,
        queue=queue,
    )
    chosen = [(cell.cell_id, Mode.TRAINING) for cell in cells.lightest(number)]
    surplus = cells.training + len(chosen) - want
    if surplus > 0 and cells.can_feed:
        chosen += [(cell_id, Mode.ROLLOUT) for cell_id in cells.idle_trainers()[:surplus]]
    return chosen


class Waterlevel:
    """The default rule: as w falls, cells join training, if enough micro-steps wait for them."""

    parks = False

    def switches(self, view: RuleView) -> list[tuple[int, Mode]]:
        """Return the cells that join training, or the idle trainers that go back."""
        settings = view.settings
        return waterlevel_switches(view, theta=settings.theta, floor=settings.floor, queue=settings.queue)


class Static:
    """A fixed split: the first baseline."""

    parks = False

    def switches(self, view: RuleView) -> list[tuple[int, Mode]]:
        """Return the cells that have to join training at the start or after a loss."""
        allowed = min(view.settings.training_cells, len(view.cells) - 1)
        missing = allowed - view.cells.training
        if missing <= 0:
            return []
        return [(cell_id, Mode.TRAINING) for cell_id in view.cells.movable()[::-1][:missing]]


class Colocate:
    """All cells roll out until the batch is ready, then all train; live calls are parked."""

    parks = True

    def switches(self, view: RuleView) -> list[tuple[int, Mode]]:
        """Return all cells that are not where the phase wants them."""
        if view.is_batch_ready and view.is_step_busy:
            return [(cell_id, Mode.TRAINING) for cell_id in view.cells.movable()]
        return [(cell_id, Mode.ROLLOUT) for cell_id in view.cells.idle_trainers()]


def plain_rule_of(settings: ScheduleSettings) -> SwitchRule | None:
    """Return the rule that the settings name if it needs no memory; a single cell always behaves as ``colocate``."""
    if len(settings.cells) == 1 or settings.rule == "colocate":
        return Colocate()
    if settings.rule == "static":
        return Static()
    return Waterlevel() if settings.rule == "waterlevel" else None
