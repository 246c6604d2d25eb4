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


@pytest.mark.parametrize("regime", ["overlap-1-2", "burst-4", "overlap-2-1", "heavy-tail"])
def test_the_twin_predicts_twenty_steps_within_seven_percent(regime):
    workload = msgspec.structs.replace(load_workloads(RECIPES / "regimes.toml")[regime], steps=FROM + STEPS + 8)
    errors = {}
    for theta, floor in SETTINGS:
        predicted, true = prediction_and_truth(workload, theta, floor, seed=1)
        errors[theta, floor] = round(predicted / true - 1, 3)
    assert all(abs(error) <= 0.07 for error in errors.values()), errors
