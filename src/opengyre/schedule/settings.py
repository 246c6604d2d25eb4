"""What the scheduler is told once."""

from dataclasses import dataclass
from typing import Literal

from opengyre.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Sizes, staleness window and rule of a run.

    >>> settings = ScheduleSettings(cells=(0, 1), steps=24, batch_groups=4, group_size=8, overlap=1, burst=1)
    >>> settings.dispatch_depth, settings.capacity
    (8, 22.4)
    """

    cells: tuple[int, ...]
    """Ids of the cells at the start."""
    steps: int
    batch_groups: int
    """B."""
    group_size: int
    """N."""
    overlap: int
    """phi."""
    burst: int
    """mu."""
    core: int = 0
    """Id of the core cell."""
    rule: Literal["waterlevel", "static", "colocate", "lookahead"] = "waterlevel"
    theta: float = 0.7
    floor: int = 0
    queue: int = 1
    training_cells: int = 1
    streaming: bool = True
    ahead: bool = True
    dispatch_on: Literal["publication", "consumption"] = "publication"
    redispatch: int = 1
    evaluate_at: tuple[int, ...] = ()
    """Versions that are evaluated."""
    evaluation_tasks: int = 0
    evaluate_greedy: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        if not self.cells:
            raise ConfigError("cells.count = 0: expected at least 1")
        if self.overlap + self.burst < 1:
            raise ConfigError(f"schedule.overlap + schedule.burst = {self.overlap + self.burst}: expected at least 1")
        for version in self.evaluate_at if self.evaluation_tasks else ():
            if version > self.steps or (version % self.burst and version != self.steps):
                raise ConfigError(
                    f"evaluation.at = {version}: expected a published version, a multiple of {self.burst} "
                    f"up to {self.steps}"
                )

    @property
    def dispatch_depth(self) -> int:
        """Q_b = (phi + mu) * B in groups; without dispatch-ahead it is mu * B: one burst.

        Source: paper, Q_b.
        """
        if self.rule == "colocate" and not self.ahead:
            return self.burst * self.batch_groups
        return (self.overlap + self.burst) * self.batch_groups

    @property
    def capacity(self) -> float:
        """C: executions that one cell carries, theta times its share of the dispatch window.

        Choice: a share of the window, never the cell's half-throughput knee (that cost 5-19% in the study).
        """
        return self.theta * self.window_share

    @property
    def window_share(self) -> float:
        """Executions of a full dispatch window for each cell."""
        return (self.overlap + self.burst) * self.batch_groups * self.group_size / len(self.cells)

    @property
    def staleness_bound(self) -> int:
        """Largest d = v_t - v_d under dispatch on publication: phi + mu - 1."""
        return self.overlap + self.burst - 1
