"""The fluid twin against the simulator."""

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from opengyre.core.events import Command, Event, StepDone, WeightsPublished
from opengyre.schedule.lookahead import Books, start_of
from opengyre.schedule.meter import Meter
from opengyre.schedule.scheduler import Scheduler
from opengyre.schedule.settings import ScheduleSettings
from opengyre.schedule.twin import Start, Twin
from opengyre.sim.rules import settings_of
from opengyre.sim.simulator import Simulator
from opengyre.sim.workload import Workload, load_workloads

RECIPES = Path(__file__).parents[2] / "recipes/workloads"
SETTINGS = ((0.4, 0), (0.7, 0), (1.1, 0), (0.7, 1), (0.0, 1), (0.0, 2))
FROM, STEPS = 8, 20


class Watched(Scheduler):
    """A scheduler that learns as the look-ahead rule does, and keeps the start of a play at one publication."""

    def __init__(self, settings: ScheduleSettings, version: int) -> None:
        super().__init__(settings)
        self._meter, self._version = Meter(settings.group_size), version
        self.start: Start | None = None
        self.from_s, self.done_s = 0.0, {}

    def on(self, event: Event, now_s: float) -> list[Command]:
        commands = super().on(event, now_s)
        for command in commands:
            if hasattr(command, "mode"):
                self._meter.begin_switch(command.cell_id)
        books = Books(self._roster, self._open, self._cells, self.step, self.published)
        self._meter.observe(event, now_s, self._roster, rollout_cells=self._cells.rollout)
        if isinstance(event, WeightsPublished) and event.version == self._version:
            self.start, self.from_s = start_of(self.settings, self._meter, books), now_s
        if isinstance(event, StepDone):
            self.done_s[event.version] = now_s
        return commands


def prediction_and_truth(workload: Workload, theta: float, floor: int, seed: int) -> tuple[float, float]:
    rule = settings_of("waterlevel", workload)
    rule = replace(rule, theta=theta, floor=floor)
    watched = Watched(rule, FROM)
    Simulator(workload, rule, name="watched", seed=seed, scheduler=watched).run()
    twin = Twin(replace(watched.start, steps=STEPS), theta, floor)
    twin.play(math.inf)
    return twin.done_s[-1], watched.done_s[FROM + STEPS] - watched.from_s


def errors_of(regime: str, settings: tuple[tuple[float, int], ...], seed: int) -> dict[tuple[float, int], float]:
    workload = msgspec.structs.replace(load_workloads(RECIPES / "regimes.toml")[regime], steps=FROM + STEPS + 8)
    found = {}
    for theta, floor in settings:
        predicted, true = prediction_and_truth(workload, theta, floor, seed)
        found[theta, floor] = round(predicted / true - 1, 3)
    return found


def test_the_twin_predicts_twenty_steps_of_the_default_within_seven_percent():
    errors = errors_of("overlap-1-2", ((0.7, 0),), seed=1)
    assert all(abs(error) <= 0.07 for error in errors.values()), errors


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["overlap-1-2", "burst-4", "overlap-2-1"])
def test_the_twin_predicts_twenty_steps_within_seven_percent(regime):
    errors = errors_of(regime, SETTINGS, seed=1)
    assert all(abs(error) <= 0.07 for error in errors.values()), errors


@pytest.mark.slow
def test_under_a_heavy_tail_the_twin_is_within_seven_percent_in_the_mean_of_three_seeds():
    """One seed misses by up to 11%, either way: a few hundred lengths say too little of such a tail."""
    by_seed = [errors_of("heavy-tail", SETTINGS, seed) for seed in (1, 2, 3)]
    means = {setting: round(sum(errors[setting] for errors in by_seed) / len(by_seed), 3) for setting in SETTINGS}
    assert all(abs(error) <= 0.07 for error in means.values()), means
    assert all(abs(error) <= 0.15 for errors in by_seed for error in errors.values()), by_seed
