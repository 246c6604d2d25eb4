"""Rules against each other on one workload: the same seeds, the same work, and the best static split by search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opengyre.sim.outcome import Outcome, hours_per_step
from opengyre.sim.rules import settings_of
from opengyre.sim.simulator import Simulator
from opengyre.sim.workload import Workload

Progress = Callable[[str, int, int], None]
"""Told a rule, a seed and the number of optimizer steps done."""
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

    Example: ``Study("burst-2", workload, results, None, 1)``.
    """

    name: str
    workload: Workload
    results: tuple[RuleResult, ...]
    best_static: tuple[int, RuleResult] | None
    """The split in training cells, chosen with hindsight on these very seeds."""
    runs: int


class Runner:
    """Runs rules on one workload and keeps what it has run.

    Args:
        workload: Sizes and costs.
        seeds: One run each.
        progress: Told after each optimizer step.

    Example: ``Runner(workload, (1, 2, 3)).result("static:2").hours(workload)``.
    """

    def __init__(self, workload: Workload, seeds: Sequence[int], progress: Progress | None = None) -> None:
        self.workload = workload
        self._seeds = tuple(seeds)
        self._progress = progress
        self._done: dict[str, RuleResult] = {}

    @property
    def runs(self) -> int:
        """Simulated runs so far."""
        return len(self._done) * len(self._seeds)

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
        return Simulator(self.workload, settings, name=rule, seed=seed, on_step=on_step).run()

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


def study(
    name: str, workload: Workload, rules: Sequence[str], seeds: Sequence[int], progress: Progress | None = None
) -> Study:
    """Run the rules; ``static`` without a number stands for the best split found by search."""
    runner = Runner(workload, seeds, progress)
    best = runner.best_split() if "static" in rules else None
    names = [f"static:{best}" if rule == "static" else rule for rule in rules if rule != "static" or best is not None]
    results = tuple(runner.result(rule) for rule in names)
    found = None if best is None else (best, runner.result(f"static:{best}"))
    return Study(name, workload, results, found, runner.runs)
