"""Rules against each other on one workload: the same seeds, the same work, and the best static split by search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from opengyre.core.errors import ConfigError
from opengyre.schedule.gate import RESUME_SHARE
from opengyre.sim.bounds import bound_s
from opengyre.sim.outcome import Outcome, hours_per_step
from opengyre.sim.rules import settings_of
from opengyre.sim.simulator import Simulator
from opengyre.sim.traces import Session, load_trace
from opengyre.sim.workload import Workload

Progress = Callable[[str, int, int], None]
"""Told a rule, a seed and the number of optimizer steps done."""
LARGE_POOL = 64
"""Cells above which the relaxed run is left out of the bound: it costs as much as a rule."""
ALL_SPLITS = 9
"""Up to so many cells every split is tried; above, a grid and then its neighbours."""


@dataclass(frozen=True)
class RuleResult:
    """A rule with all its seeds.

    Example: ``RuleResult("waterlevel", outcomes).hours(workload)`` is the mean of the seeds.
    """

    rule: str
    outcomes: tuple[Outcome, ...]

    def each_hours(self, workload: Workload) -> list[float]:
        """Return hours a step of each seed."""
        return [hours_per_step(workload, outcome) for outcome in self.outcomes]

    def hours(self, workload: Workload) -> float:
        """Return hours a step, the mean of the seeds."""
        return sum(self.each_hours(workload)) / len(self.outcomes)


@dataclass(frozen=True)
class Study:
    """What all rules did on one workload.

    Example: ``Study("burst-2", workload, results, None, None, 1)``.
    """

    name: str
    workload: Workload
    results: tuple[RuleResult, ...]
    best_static: tuple[int, RuleResult] | None
    """The split in training cells, chosen with hindsight on these very seeds."""
    relaxed_hours: tuple[float, ...] | None
    """Hours a step of each seed where every cell trains and rolls out at once; None for pools too large to ask."""
    runs: int

    def bound_hours(self, outcome: Outcome, index: int) -> float:
        """Return the lower bound of a seed in hours a step."""
        own = bound_s(self.workload, outcome.groups.values()) / 3600
        return own if self.relaxed_hours is None else max(own, self.relaxed_hours[index])


class Runner:
    """Runs rules on one workload and keeps what it has run.

    Args:
        workload: Sizes and costs.
        seeds: One run each.
        progress: Told after each optimizer step.
        sessions: Recorded executions; without them the workload's trace is read.

    Example: ``Runner(workload, (1, 2, 3)).result("static:2").hours(workload)``.
    """

    def __init__(
        self,
        workload: Workload,
        seeds: Sequence[int],
        progress: Progress | None = None,
        sessions: tuple[Session, ...] = (),
    ) -> None:
        self.workload = workload
        self._seeds = tuple(seeds)
        self._progress = progress
        self._sessions = _fitting(sessions or _sessions_of(workload), workload)
        self._done: dict[str, RuleResult] = {}
        self._relaxed_runs = 0

    @property
    def runs(self) -> int:
        """Simulated runs so far."""
        return len(self._done) * len(self._seeds) + self._relaxed_runs

    def result(self, rule: str) -> RuleResult:
        """Return the result of a rule, running it the first time."""
        if rule not in self._done:
            self._done[rule] = RuleResult(rule, tuple(self._run(rule, seed) for seed in self._seeds))
        return self._done[rule]

    def _run(self, rule: str, seed: int) -> Outcome:
        def on_step(step: int) -> None:
            if self._progress is not None:
                self._progress(rule, seed, step)

        settings = settings_of(rule, self.workload)
        return Simulator(self.workload, settings, name=rule, seed=seed, sessions=self._sessions, on_step=on_step).run()

    def relaxed_hours(self) -> tuple[float, ...] | None:
        """Return hours a step of each seed with twice the cells: one half trains, the other rolls out.

        The latency bound with the load on the cells in it. Nearly a bound and not a theorem: another order of the same
        work might be faster.
        """
        if self.workload.cells > LARGE_POOL:
            return None
        cells = self.workload.cells
        doubled = msgspec.structs.replace(self.workload, cells=2 * cells, gpus=2 * self.workload.gpus)
        runner = Runner(doubled, self._seeds, self._progress, self._sessions)
        hours = tuple(runner.result(f"static:{cells}").each_hours(doubled))
        self._relaxed_runs = runner.runs
        return hours

    def best_split(self) -> int | None:
        """Return the static split with the fewest hours a step, None where one cell cannot be split."""
        cells = self.workload.cells
        if cells < 2:
            return None
        if cells <= ALL_SPLITS:
            return min(range(1, cells), key=self._split_hours)
        width = cells // 8
        best = min(range(width, cells, width), key=self._split_hours)
        while width > max(1, cells // 64):
            width = -(-width // 2)
            near = [split for split in (best - width, best, best + width) if 1 <= split < cells]
            best = min(near, key=self._split_hours)
        return best

    def _split_hours(self, split: int) -> float:
        return self.result(f"static:{split}").hours(self.workload)


def _sessions_of(workload: Workload) -> tuple[Session, ...]:
    return load_trace(Path(workload.trace)) if workload.trace else ()


def _fitting(sessions: tuple[Session, ...], workload: Workload) -> tuple[Session, ...]:
    longest = max((call.context_tokens for session in sessions for call in session), default=0.0)
    if longest > RESUME_SHARE * workload.kv_capacity_tokens:
        raise ConfigError(
            f"kv_tokens_per_cell = {workload.kv_tokens_per_cell:g}: a cell holds {workload.kv_capacity_tokens:.0f} "
            f"tokens, one context of {workload.trace or 'the run'} has {longest:.0f}"
        )
    return sessions


def study(
    name: str,
    workload: Workload,
    rules: Sequence[str],
    seeds: Sequence[int],
    progress: Progress | None = None,
    sessions: tuple[Session, ...] = (),
) -> Study:
    """Run the rules; ``static`` without a number stands for the best split found by search."""
    runner = Runner(workload, seeds, progress, sessions)
    best = runner.best_split() if "static" in rules else None
    names = [f"static:{best}" if rule == "static" else rule for rule in rules if rule != "static" or best is not None]
    results = tuple(runner.result(rule) for rule in names)
    found = None if best is None else (best, runner.result(f"static:{best}"))
    relaxed = runner.relaxed_hours()
    return Study(name, workload, results, found, relaxed, runner.runs)
