"""Replication as a level set: every setting of a grid in which simulated ratios come out as the published ones.

A paper that names neither its load nor its window leaves many settings open. One that is fitted until it agrees says
nothing; the set of all that agree says what a published ratio is worth, and what it leaves open: how much elasticity
gains there against the best static split.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import msgspec

from opengyre.core.errors import ConfigError
from opengyre.sim.study import Runner
from opengyre.sim.workload import Published, Workload

TOLERANCE = 0.05
"""A ratio agrees if it lies within this share of the published one, or of the published range."""
LOADS = (1.0, 2.5, 4.0, 5.0, 7.0)
TRAINING_FACTORS = (0.5, 1.0, 2.0)
"""Of the workload's training time a token."""
WINDOWS = ((0, 1), (0, 2), (0, 4), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1))
"""(phi, mu)."""
ELASTIC = ("waterlevel:1.0:0", "waterlevel")
"""The paper's rule as it is published, and ours."""
COLOCATES = ("colocate", "colocate:sync")


@dataclass(frozen=True)
class Setting:
    """A point of the grid.

    Example: ``Setting(load=5.0, training_factor=1.0, phi=2, mu=1)``.
    """

    load: float
    training_factor: float
    phi: int
    mu: int

    def of(self, workload: Workload) -> Workload:
        """Return the workload in this setting."""
        return msgspec.structs.replace(
            workload,
            load=self.load,
            train_token_s=workload.train_token_s * self.training_factor,
            phi=self.phi,
            mu=self.mu,
        )


@dataclass(frozen=True)
class Measured:
    """Hours a step of each rule in a setting, the mean of the seeds.

    Example: ``Measured(setting, {"waterlevel": 2.2, "static:1": 3.9, "colocate": 2.8})``.
    """

    setting: Setting
    hours: dict[str, float]

    def over_best_static(self, elastic: str) -> float:
        """Return how many times as fast as the best whole-cell split an elastic rule is."""
        best = min(hours for rule, hours in self.hours.items() if rule.startswith("static:") and rule.count(":") == 1)
        return best / self.hours[elastic]


@dataclass(frozen=True)
class Agreement:
    """A setting and a reading of the baselines in which both ratios agree.

    Example: ``Agreement(setting, "waterlevel", "static:1", "colocate", 1.77, 1.23, 1.02)``.
    """

    setting: Setting
    elastic: str
    asynchronous: str
    colocate: str
    async_ratio: float
    colocate_ratio: float
    over_best_static: float


def grid() -> list[Setting]:
    """Return all settings.

    >>> len(grid())
    120
    """
    points = product(LOADS, TRAINING_FACTORS, WINDOWS)
    return [Setting(load, factor, phi, mu) for load, factor, (phi, mu) in points]


def targets(published: Published | None) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the lowest and the highest ratio that agree, of Async and of Colocate to the elastic run.

    Raises:
        ConfigError: The workload does not say what is published.

    >>> [round(bound, 3) for bound in targets(Published(elastic_h=1.0, async_h=2.0, colocate_h=1.0))[0]]
    [1.9, 2.1]
    """
    found = []
    if published is not None:
        elastic = published.elastic_h
        for hours, ratios in ((published.async_h, published.async_ratio), (published.colocate_h, published.colocate)):
            if elastic is not None and hours is not None:
                found.append((hours / elastic, hours / elastic))
            elif ratios is not None:
                found.append(ratios)
    if len(found) != 2:
        raise ConfigError(
            "published: expected hours or ratios of both baselines in a workload that is to be replicated"
        )
    (slowest, fastest), (low, high) = found
    return (slowest * (1 - TOLERANCE), fastest * (1 + TOLERANCE)), (low * (1 - TOLERANCE), high * (1 + TOLERANCE))


def rules(cells: int) -> list[str]:
    """Return the rules that a setting is measured with.

    >>> rules(2)
    ['waterlevel:1.0:0', 'waterlevel', 'colocate', 'colocate:sync', 'static:1', 'static:1:batch']
    """
    splits = [f"static:{split}{form}" for split in range(1, cells) for form in ("", ":batch")]
    return [*ELASTIC, *COLOCATES, *splits]


def measure(workload: Workload, setting: Setting, seeds: tuple[int, ...]) -> Measured:
    """Run all rules in a setting."""
    placed = setting.of(workload)
    runner = Runner(placed, seeds)
    return Measured(setting, {rule: runner.result(rule).hours(placed) for rule in rules(workload.cells)})


def agreements(measured: Measured, published: Published | None) -> Iterator[Agreement]:
    """Yield every reading of a setting in which both ratios agree with the published ones.

    Choice: which split Async had, whether it streamed, and whether Colocate dispatched ahead is open, so all are tried.
    """
    (async_low, async_high), (low, high) = targets(published)
    hours = measured.hours
    splits = [rule for rule in hours if rule.startswith("static:")]
    for elastic, split, colocate in product(ELASTIC, splits, COLOCATES):
        async_ratio, ratio = hours[split] / hours[elastic], hours[colocate] / hours[elastic]
        if async_low <= async_ratio <= async_high and low <= ratio <= high:
            over = measured.over_best_static(elastic)
            yield Agreement(measured.setting, elastic, split, colocate, async_ratio, ratio, over)
