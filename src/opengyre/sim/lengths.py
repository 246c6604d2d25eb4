"""What each execution has to do. A function of (seed, group, slot): all rules meet the same work.

f = exp(sigma_group Z_group + sigma_execution Z - (sigma_group^2 + sigma_execution^2) / 2), at most the cap
output tokens = O f, time in the environment = E f exp(Z' / 4 - 1 / 32) x the phase of its group
"""

import math
import random
from dataclasses import dataclass

from opengyre.sim.workload import Workload

GROUP_SLOT = 1 << 20
"""Slot under which the draw of a whole group is keyed."""
ENVIRONMENT_SIGMA = 0.25


@dataclass(slots=True)
class Job:
    """The work of one execution: chunks of sampled tokens, each with a visit to the environment behind it.

    Example: ``Job(outputs=[8000.0, 2000.0], environments=[60.0, 20.0], is_capped=False).tokens`` is 10000.
    """

    outputs: list[float]
    environments: list[float]
    is_capped: bool

    @property
    def tokens(self) -> float:
        """Sampled tokens."""
        return sum(self.outputs)


def generator(seed: int, group_id: int, slot: int) -> random.Random:
    """Return the generator of one place of a run."""
    return random.Random((seed << 80) | (group_id << 40) | slot)


def group_draw(seed: int, group_id: int) -> float:
    """Return the standard normal draw that the executions of a group share.

    >>> group_draw(1, 0) == group_draw(1, 0) != group_draw(1, 1)
    True
    """
    return generator(seed, group_id, GROUP_SLOT).gauss()


def job_of(workload: Workload, *, seed: int, group_id: int, slot: int, draw: float) -> Job:
    """Return the work of a slot; an attempt after a drop has the same.

    Args:
        workload: Means and spreads.
        seed: Of the simulation.
        group_id: Place in the run.
        slot: Place in the group.
        draw: What ``group_draw`` gave.

    >>> job = job_of(Workload(), seed=1, group_id=0, slot=0, draw=0.0)
    >>> len(job.outputs) == len(job.environments), 20e3 < job.tokens < 270e3
    (True, True)
    """
    draws = generator(seed, group_id, slot)
    own, environment = draws.gauss(), draws.gauss()
    within, between = workload.sigma_execution, workload.sigma_group
    factor = math.exp(between * draw + within * own - (between**2 + within**2) / 2)
    cap = workload.cap_h / workload.nominal_h
    is_capped, factor = factor > cap, min(factor, cap)
    tokens = workload.output_tokens * factor
    count = max(1, math.ceil(tokens / workload.chunk_tokens))
    outputs = [workload.chunk_tokens] * (count - 1)
    outputs.append(tokens - workload.chunk_tokens * (count - 1))
    environment_s = workload.environment_s * factor * workload.environment_factor(group_id)
    environment_s *= math.exp(ENVIRONMENT_SIGMA * environment - ENVIRONMENT_SIGMA**2 / 2)
    share_s = environment_s / count
    return Job(outputs, [share_s * (0.5 + 0.5 * draws.expovariate(1.0)) for _ in range(count)], is_capped)
