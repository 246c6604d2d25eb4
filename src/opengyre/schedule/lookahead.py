"""The look-ahead rule: a waterlevel whose floor and theta are chosen once a publication by playing the fluid twin."""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from opengyre.core.events import Event, Mode, WeightsPublished, execution_id_of
from opengyre.core.types import Kind
from opengyre.schedule.cells import CellBook
from opengyre.schedule.meter import Meter
from opengyre.schedule.open_step import OpenStep
from opengyre.schedule.roster import Roster
from opengyre.schedule.rules import RuleView, waterlevel_switches
from opengyre.schedule.settings import ScheduleSettings
from opengyre.schedule.state import GroupState
from opengyre.schedule.twin import INFINITY, Start, Twin

THETAS = (0.0, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.92, 1.1, 1.4)
GAIN = 0.006
"""Another setting must be better by this share."""
WINDOWS = 2.5
"""Dispatch windows that a play looks ahead."""
FULL_EVERY = 4
"""Publications from one search of the whole grid to the next; between them neighbours only."""
MOVES = 3
FIRST_CHOICE = 2
"""Publications before the first choice."""
MOST_GROUPS = 32
"""B of the twin at most: larger clusters are played at a smaller scale."""
_GOLDEN = 0.6180339887498949


@dataclass
class Books:
    """What a rule may read of the scheduler beside its view.

    Example: the scheduler makes one and keeps ``step`` and ``published`` up to date.
    """

    roster: Roster
    open_step: OpenStep
    cells: CellBook
    step: int = 0
    published: int = -1


@dataclass(frozen=True)
class Choice:
    """A setting that was chosen at a publication.

    Example: ``Choice(version=4, theta=0.7, floor=0, step_s=7900.0)``.
    """

    version: int
    theta: float
    floor: int
    step_s: float
    """Predicted seconds a step over the horizon."""


class Lookahead:
    """Chooses (floor, theta) of the waterlevel once a publication.

    Choice: static settings are among the candidates, a change needs a predicted gain of 0.6%, and no length is
    predicted: a running execution's rest is drawn from the lengths of those that got as far.

    Args:
        settings: Sizes, and the setting of the start.
    """

    parks = False

    def __init__(self, settings: ScheduleSettings) -> None:
        self._settings = settings
        self._meter = Meter(settings.group_size)
        self._publications = 0
        self.theta, self.floor = settings.theta, settings.floor
        self.choices: list[Choice] = []

    def observe(self, event: Event, now_s: float, books: Books) -> None:
        """Learn from an event, and choose again at a publication."""
        self._meter.observe(event, now_s, books.roster, rollout_cells=books.cells.rollout)
        if isinstance(event, WeightsPublished) and self._meter.is_ready:
            self._publications += 1
            if self._publications > FIRST_CHOICE and books.step < self._settings.steps:
                self._choose(books)

    def switches(self, view: RuleView) -> list[tuple[int, Mode]]:
        """Return the switches of the waterlevel with the chosen setting."""
        chosen = waterlevel_switches(view, theta=self.theta, floor=self.floor, queue=view.settings.queue)
        for cell_id, _ in chosen:
            self._meter.begin_switch(cell_id)
        return chosen

    # -- the choice -------------------------------------------------------------------------------------------

    def _choose(self, books: Books) -> None:
        start = start_of(self._settings, self._meter, books)
        scale = self._settings.batch_groups / start.batch_groups
        search = _Search(start)
        present = (self.theta, min(start.cells - 1, round(self.floor / scale)))
        kept = search.cost(present)
        if (self._publications - FIRST_CHOICE) % FULL_EVERY == 1:
            search.climb(present)  # a good play to measure the others by: most of them are given up early
            best = search.best_of(grid(start.cells), present)
        else:
            best = search.climb(present)
        if search.cost(best) < (1 - GAIN) * kept:
            self.theta, self.floor = best[0], round(best[1] * scale)
            present = best
        self.choices.append(Choice(books.published, self.theta, self.floor, search.cost(present) / start.steps))


class _Search:
    """Plays of one start, each setting once; a play is given up when it has taken longer than the best one costs."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._costs: dict[tuple[float, int], float] = {}
        self._best = INFINITY

    def cost(self, setting: tuple[float, int]) -> float:
        if setting not in self._costs:
            theta, floor = setting
            cost = Twin(self._start, theta, floor).play(self._best)
            self._costs[setting] = cost
            self._best = min(self._best, cost)
        return self._costs[setting]

    def best_of(self, settings: Iterable[tuple[float, int]], present: tuple[float, int]) -> tuple[float, int]:
        return min([present, *settings], key=self.cost)

    def climb(self, present: tuple[float, int]) -> tuple[float, int]:
        for _ in range(MOVES):
            best = self.best_of(neighbours(present, self._start.cells), present)
            if best == present:
                break
            present = best
        return present


def grid(cells: int) -> list[tuple[float, int]]:
    """Return the settings of a full search.

    >>> len(grid(4)), len(grid(16))
    (39, 69)
    """
    step = max(1, cells // 8)
    floors = range(cells) if cells <= 4 else range(0, 7 * step, step)
    return [(theta, floor) for floor in floors for theta in THETAS if theta or floor]


def neighbours(setting: tuple[float, int], cells: int) -> list[tuple[float, int]]:
    """Return the settings next to one, static ones among them.

    >>> (0.0, 1) in neighbours((0.7, 1), 4), (0.8, 1) in neighbours((0.7, 1), 4)
    (True, True)
    """
    theta, floor = setting
    place = min(range(len(THETAS)), key=lambda index: abs(THETAS[index] - theta))
    lower, higher = THETAS[max(1, place - 1)], THETAS[min(len(THETAS) - 1, place + 1)]
    step = max(1, cells // 8)
    found = [(theta, floor + change) for change in (-step, -1, 1, step)]
    found += [(lower, floor), (higher, floor), (lower, floor - 1), (higher, floor + 1)]
    found += [(0.0, floor), (0.0, floor + 1), (theta or 0.7, 0)]
    return [one for one in dict.fromkeys(found) if 0 <= one[1] < cells and one != setting and (one[0] or one[1])]


# -- the start of a play ----------------------------------------------------------------------------------------


def start_of(settings: ScheduleSettings, meter: Meter, books: Books) -> Start:
    """Return the cluster as the twin takes it over, at a smaller scale where it is large."""
    scale = max(1, -(-settings.batch_groups // MOST_GROUPS))
    scale = max(1, min(scale, len(books.cells) // 2))
    cells, open_step = books.cells, books.open_step
    templates = meter.templates()
    lengths = sorted(length for group in templates for length in group)
    mean = sum(lengths) / len(lengths)
    live: list[tuple[float, int]] = []
    scoring: list[int] = []
    arrived: list[int] = []
    open_slots: dict[int, int] = {}
    deadlines: dict[int, int] = {}
    tokens: dict[int, float] = {}
    groups = [g for g in books.roster.groups.values() if g.kind is Kind.TRAIN and g.step is None]
    for group in groups[::scale]:
        deadlines[group.group_id] = group.deadline - books.step
        tokens[group.group_id] = mean * settings.group_size
        if group.has_arrived:
            arrived.append(group.group_id)
            continue
        rests, scored = _rests(group, meter, books.roster, lengths)
        open_slots[group.group_id] = max(1, len(rests) + scored)
        scoring += [group.group_id] * (open_slots[group.group_id] - len(rests))
        live += [(rest, group.group_id) for rest in rests]
    window = settings.overlap + settings.burst
    burst = settings.burst
    return Start(
        rates=meter.rates,
        cells=max(1, round(len(cells) / scale)),
        batch_groups=max(1, round(settings.batch_groups / scale)),
        group_size=settings.group_size,
        depth=window,
        burst=burst,
        steps=min(burst * max(2, math.ceil(WINDOWS * window / burst)), settings.steps - books.step),
        queue=settings.queue,
        live=tuple(live),
        open_slots=open_slots,
        scoring=tuple(scoring),
        deadlines=deadlines,
        arrived=tuple(arrived),
        group_tokens=tokens,
        places_left=round(open_step.places_left / scale),
        waiting=tuple(open_step.waiting_costs()[::scale]),
        running=tuple(cost / 2 for cost in open_step.running_costs()[::scale]),
        idle_trainers=round(len(cells.idle_trainers()) / scale),
        joining=round(cells.joining / scale),
        returning=round(cells.returning / scale),
        templates=templates,
        train_s_per_token=meter.train_s_per_token,
        micro_steps=meter.micro_steps,
        groups_left=round((settings.steps * settings.batch_groups - books.roster.dispatched_groups) / scale),
    )


def _rests(group: GroupState, meter: Meter, roster: Roster, lengths: list[float]) -> tuple[list[float], int]:
    """Return the tokens that each live execution of a group has to go, and how many are being scored."""
    rests: list[float] = []
    scored = 0
    for index, slot in enumerate(group.slots):
        if slot.is_closed:
            continue
        name = execution_id_of(group_id=group.group_id, slot=index, attempt=slot.attempts - 1, kind=group.kind)
        if not roster.execution(name).is_live:
            scored += 1
            continue
        share = (group.group_id * len(group.slots) + index + 1) * _GOLDEN % 1.0
        rests.append(rest_of(lengths, meter.tokens - meter.began(name), share))
    return rests, scored


def rest_of(lengths: list[float], done: float, share: float) -> float:
    """Return the tokens to go of an execution that has done so many.

    Args:
        lengths: Lengths of executions, ascending.
        done: Tokens so far.
        share: Its fixed quantile among those that are longer, from 0 to 1.

    >>> rest_of([10.0, 20.0, 30.0, 40.0], 15.0, 0.5)
    15.0
    >>> rest_of([10.0], 15.0, 0.5)
    1.0
    """
    first = bisect_right(lengths, done)
    if first == len(lengths):
        return lengths[-1] / 10
    return lengths[first + int(share * (len(lengths) - first))] - done
