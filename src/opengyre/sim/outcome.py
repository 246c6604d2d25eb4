"""What a simulated run has come to, and the figures made of it."""

from dataclasses import dataclass, field

from opengyre.core.events import Mode
from opengyre.sim.workload import Workload


@dataclass(frozen=True)
class Span:
    """A cell in one mode.

    Example: ``Span(0, Mode.TRAINING, 45.0, 900.0, 640.0)`` trained for 640 of 855 s.
    """

    cell_id: int
    mode: Mode
    started_s: float
    ended_s: float
    busy_s: float


@dataclass(frozen=True)
class GroupWork:
    """The work of one group, for the bounds.

    Example: ``GroupWork(0, 0, 4e6, 1e6, 9.5e10, 9e3)``.
    """

    group_id: int
    version: int
    trained_tokens: float
    output_tokens: float
    context_tokens: float
    """Sum of output tokens times context."""
    alone_s: float
    """The longest execution of the group on an empty cell, scored."""


@dataclass
class Outcome:
    """A simulated run.

    Example: ``hours_per_step(workload, outcome)``.
    """

    rule: str
    seed: int
    step_done_s: list[float] = field(default_factory=list)
    step_tokens: list[float] = field(default_factory=list)
    staleness: dict[int, int] = field(default_factory=dict)
    groups: dict[int, GroupWork] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    executions: int = 0
    finished: int = 0
    timed_out: int = 0
    switches: int = 0
    moved_tokens: float = 0.0
    held_s: float = 0.0
    parked_s: float = 0.0
    events: int = 0
    ended_s: float = 0.0
    choices: list[tuple[int, float, int, float]] = field(default_factory=list)
    """(version, theta, floor, predicted seconds a step) of a rule that chooses."""


def hours_per_step(workload: Workload, outcome: Outcome) -> float:
    """Return hours of an optimizer step in the measured part of the run."""
    first, last = workload.measured_steps
    start_s = outcome.step_done_s[first - 1] if first else 0.0
    return (outcome.step_done_s[last - 1] - start_s) / (last - first) / 3600


def trained_tokens_per_hour(workload: Workload, outcome: Outcome) -> float:
    """Return trained tokens an hour in the measured part of the run."""
    first, last = workload.measured_steps
    return sum(outcome.step_tokens[first:last]) / (last - first) / hours_per_step(workload, outcome)


def shares(outcome: Outcome) -> dict[str, float]:
    """Return shares of all cell time: in each mode, and in useful rollout and training work.

    Useful rollout is time with an active call, useful training time with a micro-step.
    """
    total = sum(span.ended_s - span.started_s for span in outcome.spans) or 1.0
    found = {f"{mode.value}": 0.0 for mode in Mode} | {"useful_rollout": 0.0, "useful_training": 0.0}
    for span in outcome.spans:
        found[span.mode.value] += (span.ended_s - span.started_s) / total
        if span.mode is not Mode.SWITCHING:
            found[f"useful_{span.mode.value}"] += span.busy_s / total
    return found


def staleness(outcome: Outcome) -> tuple[float, int]:
    """Return mean and largest staleness of the consumed groups.

    >>> staleness(Outcome("waterlevel", 1, staleness={0: 3, 2: 1}))
    (0.5, 2)
    """
    groups = sum(outcome.staleness.values()) or 1
    mean = sum(d * number for d, number in outcome.staleness.items()) / groups
    return mean, max(outcome.staleness, default=0)
