"""Random interleavings of what can happen to a run: the bounds hold, nothing is lost, every run ends."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.core.errors import ConfigError, InvariantError
from opengyre.core.events import (
    AttemptDropped,
    CellJoined,
    CellLost,
    CellReady,
    CloseStep,
    Command,
    Dispatch,
    Dispatched,
    Event,
    Finished,
    GroupComplete,
    MicroStepDone,
    MicroStepReady,
    Mode,
    PublishWeights,
    RatesMeasured,
    RunMicroStep,
    SlotClosed,
    StepDone,
    SwitchCell,
    SwitchDone,
    WeightsPublished,
)
from opengyre.core.types import Kind
from opengyre.schedule.places import Candidate, PlaceBook, next_group
from opengyre.schedule.scheduler import Scheduler
from opengyre.schedule.settings import ScheduleSettings

RATES = RatesMeasured(
    decode_request_s=1e-4,
    decode_weights_s=0.01,
    environment_token_s=0.02,
    training_token_s=1e-4,
    context_tokens=100.0,
    output_tokens=1000.0,
)


class World:
    """Answers the scheduler's commands in random order and checks what must always hold."""

    def __init__(self, settings: ScheduleSettings, rng: random.Random, *, drops: float = 0.0, losses: float = 0.0):
        self.settings, self.rng, self.drops, self.losses = settings, rng, drops, losses
        self.scheduler = Scheduler(settings)
        self.pending: list[tuple[str, object]] = []
        self.now_s = 0.0
        self.times: list[float] = []
        self.log: list[tuple[Event, list[Command]]] = []
        self.versions: dict[int, int] = {}
        self.taken: dict[int, int] = {}
        self.counted: dict[str, int] = {}
        self.slots: dict[int, dict[int, bool]] = {}
        self.steps_closed: list[int] = []
        self.lost_left = 3

    def send(self, event: Event) -> None:
        self.now_s += self.rng.choice((0.0, 1.0, 10.0))
        commands = self.scheduler.on(event, self.now_s)
        self.log.append((event, commands))
        self.times.append(self.now_s)
        for command in commands:
            self.take(command)
        self.check()

    def take(self, command: Command) -> None:
        match command:
            case Dispatch(group_id=group_id, version=version, kind=Kind.TRAIN):
                assert self.versions.setdefault(group_id, version) == version
                self.pending.append(("execution", command))
            case Dispatch():
                self.pending.append(("execution", command))
            case SwitchCell() | RunMicroStep() | PublishWeights():
                self.pending.append((type(command).__name__, command))
            case CloseStep(step=step, groups=groups, contributions=contributions):
                assert len(groups) == self.settings.batch_groups
                for group_id in groups:
                    assert step - self.versions[group_id] <= self.settings.staleness_bound
                named = [name for ids in contributions.values() for name in ids]
                assert len(named) == len(set(named))
                assert set(contributions) <= set(self.scheduler.live_cells)
                self.pending.append(("CloseStep", command))

    def check(self) -> None:
        if self.settings.rule == "colocate" or len(self.settings.cells) == 1:
            return
        if self.scheduler.waterlevel and len(self.scheduler.live_cells) == len(self.settings.cells):
            cells = self.scheduler._cells.values()
            assert any(cell.target is Mode.ROLLOUT for cell in cells), "live executions without a cell in rollout mode"

    def run(self) -> None:
        self.send(RATES)
        self.send(WeightsPublished(version=0, incarnation=0, cells=self.settings.cells))
        for _ in range(20_000):
            if self.scheduler.is_done:
                return
            if self.losses and self.lost_left and self.rng.random() < self.losses:
                self.lose()
                continue
            assert self.pending, f"nothing can happen: {self.scheduler.waits_for()}"
            kind, what = self.pending.pop(self.rng.randrange(len(self.pending)))
            getattr(self, f"on_{kind}")(what)
        raise AssertionError(f"the run does not end: {self.scheduler.waits_for()}")

    def lose(self) -> None:
        """A cell goes away and comes back at once; what it was doing is gone."""
        self.lost_left -= 1
        cell = self.rng.choice(self.scheduler.live_cells)
        self.pending = [
            item for item in self.pending if getattr(item[1], "cell_id", None) != cell and item[0] != "CloseStep"
        ]
        closing = [item for item in self.pending if item[0] == "CloseStep"]
        before = self.scheduler._is_closing
        self.send(CellLost(cell_id=cell))
        if before and self.scheduler._is_closing and not closing:
            self.pending.append(("CloseStep", self.last_close))
        self.send(CellJoined(cell_id=cell))

    @property
    def last_close(self) -> CloseStep:
        return next(c for _, commands in reversed(self.log) for c in commands if isinstance(c, CloseStep))

    def on_execution(self, dispatch: Dispatch) -> None:
        execution_id = dispatch.execution_id
        self.send(Dispatched(execution_id=execution_id))
        group = self.slots.setdefault(dispatch.group_id, {}) if dispatch.kind is Kind.TRAIN else {}
        if self.rng.random() < self.drops:
            self.send(AttemptDropped(execution_id=execution_id, reason="test"))
            if self.scheduler.is_slot_open(dispatch.group_id, dispatch.slot, kind=dispatch.kind):
                return
            group[dispatch.slot] = False
        else:
            self.send(Finished(execution_id=execution_id))
            self.send(SlotClosed(execution_id=execution_id))
            group[dispatch.slot] = True
        if dispatch.kind is Kind.TRAIN and len(group) == self.settings.group_size:
            count = self.rng.choice((0, 1, 3))
            valid = sum(group.values())
            self.send(GroupComplete(group_id=dispatch.group_id, valid_slots=valid, micro_steps=count))
            for index in range(count):
                name = f"g{dispatch.group_id}-m{index}"
                self.send(MicroStepReady(group_id=dispatch.group_id, micro_step_id=name, rows=1, tokens=10, cost_s=1.0))

    def on_SwitchCell(self, command: SwitchCell) -> None:
        self.send(SwitchDone(cell_id=command.cell_id, mode=command.mode))
        if command.mode is Mode.TRAINING:
            self.send(CellReady(cell_id=command.cell_id))

    def on_RunMicroStep(self, command: RunMicroStep) -> None:
        self.send(MicroStepDone(cell_id=command.cell_id, micro_step_id=command.micro_step_id, seconds=1.0))
        self.send(CellReady(cell_id=command.cell_id))

    def on_CloseStep(self, command: CloseStep) -> None:
        for ids in command.contributions.values():
            for name in ids:
                self.counted[name] = self.counted.get(name, 0) + 1
        self.steps_closed.append(command.step)
        self.send(StepDone(version=command.step + 1))

    def on_PublishWeights(self, command: PublishWeights) -> None:
        self.send(WeightsPublished(version=command.version, incarnation=0, cells=self.settings.cells))


@st.composite
def settings_of_a_run(draw: st.DrawFn) -> ScheduleSettings:
    cells = draw(st.integers(1, 4))
    overlap, burst = draw(st.integers(0, 3)), draw(st.integers(1, 2))
    steps = draw(st.integers(1, 5))
    rule = draw(st.sampled_from(["waterlevel", "lookahead", "static", "colocate"])) if cells > 1 else "colocate"
    return ScheduleSettings(
        cells=tuple(range(cells)),
        steps=steps,
        batch_groups=draw(st.integers(1, 3)),
        group_size=draw(st.integers(2, 3)),
        overlap=overlap,
        burst=burst,
        rule=rule,
        ahead=draw(st.booleans()),
        streaming=draw(st.booleans()),
        training_cells=draw(st.integers(1, max(1, cells - 1))),
        floor=draw(st.integers(0, cells - 1)) if rule == "waterlevel" else 0,
        evaluate_at=(0, steps),
        evaluation_tasks=draw(st.integers(0, 2)),
        evaluate_greedy=draw(st.booleans()),
    )


@given(settings=settings_of_a_run(), seed=st.integers(0, 2**32))
def test_every_run_ends_and_no_group_is_older_than_its_bound(settings, seed):
    world = World(settings, random.Random(seed))
    world.run()
    assert world.steps_closed == list(range(settings.steps))
    assert len(world.versions) == settings.steps * settings.batch_groups


@given(settings=settings_of_a_run(), seed=st.integers(0, 2**32))
def test_drops_are_dispatched_again_at_most_once_and_hold_nothing_up(settings, seed):
    world = World(settings, random.Random(seed), drops=0.3)
    world.run()
    attempts = [c.attempt for _, commands in world.log for c in commands if isinstance(c, Dispatch)]
    assert max(attempts) <= settings.redispatch


@given(settings=settings_of_a_run(), seed=st.integers(0, 2**32))
def test_lost_cells_give_their_micro_steps_back_and_each_is_counted_once(settings, seed):
    world = World(settings, random.Random(seed), drops=0.1, losses=0.02)
    world.run()
    assert all(count == 1 for count in world.counted.values())
    made = {e.micro_step_id for e, _ in world.log if isinstance(e, MicroStepReady)}
    assert set(world.counted) == made


@given(settings=settings_of_a_run(), seed=st.integers(0, 2**32))
def test_commands_are_a_function_of_the_log(settings, seed):
    world = World(settings, random.Random(seed), drops=0.2)
    world.run()
    fresh = Scheduler(settings)
    for (event, commands), now_s in zip(world.log, world.times, strict=True):
        assert fresh.on(event, now_s) == commands


def test_a_restart_of_the_driver_costs_no_try():
    settings = ScheduleSettings(cells=(0, 1), steps=1, batch_groups=1, group_size=2, overlap=0, burst=1)
    scheduler = Scheduler(settings)
    first = scheduler.on(WeightsPublished(version=0, incarnation=0, cells=(0, 1)), 0.0)
    execution_id = first[0].execution_id
    for attempt in range(1, 4):
        event = AttemptDropped(execution_id=execution_id, reason="driver restarted", counts=False)
        again = [c for c in scheduler.on(event, 0.0) if isinstance(c, Dispatch)]
        assert [c.attempt for c in again] == [attempt]
        execution_id = again[0].execution_id
    assert scheduler.waterlevel == 2


@pytest.mark.parametrize(
    "event",
    [
        Finished(execution_id="never"),
        SlotClosed(execution_id="never"),
        MicroStepDone(cell_id=0, micro_step_id="never", seconds=1.0),
        SwitchDone(cell_id=0, mode=Mode.TRAINING),
        CellReady(cell_id=0),
        CellLost(cell_id=9),
        CellJoined(cell_id=0),
        StepDone(version=1),
        GroupComplete(group_id=0, valid_slots=2, micro_steps=0),
        WeightsPublished(version=5, incarnation=0, cells=(0,)),
    ],
)
def test_an_event_that_contradicts_the_books_is_an_invariant_error_with_the_values(event):
    settings = ScheduleSettings(cells=(0, 1), steps=2, batch_groups=1, group_size=2, overlap=1, burst=1)
    scheduler = Scheduler(settings)
    scheduler.on(WeightsPublished(version=0, incarnation=0, cells=(0, 1)), 0.0)
    with pytest.raises(InvariantError):
        scheduler.on(event, 0.0)


def test_an_execution_cannot_finish_twice():
    settings = ScheduleSettings(cells=(0, 1), steps=1, batch_groups=1, group_size=2, overlap=0, burst=1)
    scheduler = Scheduler(settings)
    dispatch = scheduler.on(WeightsPublished(version=0, incarnation=0, cells=(0, 1)), 0.0)[0]
    scheduler.on(Finished(execution_id=dispatch.execution_id), 0.0)
    with pytest.raises(InvariantError, match="twice"):
        scheduler.on(Finished(execution_id=dispatch.execution_id), 0.0)


def test_evaluations_are_refused_where_no_version_is_published():
    with pytest.raises(ConfigError, match=r"evaluation\.at = 1"):
        ScheduleSettings(
            cells=(0,), steps=4, batch_groups=1, group_size=2, overlap=0, burst=2, evaluate_at=(1,), evaluation_tasks=1
        )


def obvious(live: list[Candidate], step: int) -> int | None:
    """Groups at their deadline first, else the oldest complete: the rule without the reservation test."""
    complete = [group for group in live if group.is_complete]
    due = [group for group in complete if group.deadline <= step]
    return min((group.group_id for group in due or complete), default=None)


def search(phi: int, mu: int, batch: int, steps: int, *, reserve: bool) -> tuple[int, bool]:
    """Walk all orders in which groups can complete; return the states seen and whether a deadline was missed."""
    start = (0, 0, frozenset(), frozenset(), 0)
    seen, waiting, missed = {start}, [start], False
    while waiting:
        step, published, complete, consumed, _ = waiting.pop()
        limit = min((published + phi + mu) * batch, steps * batch)
        live = {g for g in range(limit) if g not in consumed}
        deadlines = {g: _version_of(g, phi, mu, batch) + phi + mu - 1 for g in live}
        following = [(step, published, complete | {g}, consumed, limit) for g in live - complete]
        place = len(consumed) - step * batch
        candidates = [Candidate(g, deadlines[g], g in complete) for g in sorted(live)]
        if step < steps:
            chosen = (
                next_group(candidates, step=step, places_left=batch - place, batch_groups=batch)
                if reserve
                else obvious(candidates, step)
            )
            if chosen is not None:
                missed |= step > deadlines[chosen]
                taken = consumed | {chosen}
                full = len(taken) == (step + 1) * batch
                version = step + 1 if full else step
                now = version if version % mu == 0 else published
                following.append((version, now, complete - {chosen}, taken, limit))
            else:
                missed |= not following
        for state in following:
            if state not in seen:
                seen.add(state)
                waiting.append(state)
    return len(seen), missed


def _version_of(group: int, phi: int, mu: int, batch: int) -> int:
    """Version at which a group is dispatched."""
    version = 0
    while group >= (version + phi + mu) * batch:
        version += mu
    return version


@pytest.mark.parametrize(("phi", "mu", "batch"), [(p, m, b) for p in range(4) for m in (1, 2) for b in (1, 2)])
def test_in_all_interleavings_no_deadline_is_missed_and_nothing_gets_stuck(phi, mu, batch):
    steps = 5 if (phi + mu) * batch <= 5 else 3
    states, missed = search(phi, mu, batch, steps, reserve=True)
    assert states >= 5
    assert not missed


def test_the_search_finds_that_the_obvious_rule_misses_a_deadline():
    assert search(2, 1, 1, 5, reserve=False)[1]


@given(
    groups=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=12),
    batch_groups=st.integers(1, 3),
    places_left=st.integers(0, 3),
    step=st.integers(0, 4),
)
def test_the_place_book_gives_the_places_that_the_rule_gives(groups, batch_groups, places_left, step):
    live = [Candidate(index, deadline, done) for index, (deadline, done) in enumerate(groups)]
    book = PlaceBook(batch_groups)
    for group in live:
        book.add(group.deadline)
        if group.is_complete:
            book.arrive(group.group_id, group.deadline)
    while True:
        expected = next_group(live, step=step, places_left=places_left, batch_groups=batch_groups)
        assert book.take(step=step, places_left=places_left) == expected
        if expected is None:
            return
        live = [group for group in live if group.group_id != expected]
        places_left -= 1
