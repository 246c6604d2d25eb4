"""What each execution has to do. A function of (seed, group, slot): all rules meet the same work.

f = exp(sigma_group Z_group + sigma_execution Z - (sigma_group^2 + sigma_execution^2) / 2), at most the cap
output tokens = O f, time in the environment = E f exp(Z' / 4 - 1 / 32) x the phase of its group
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from opengyre.sim.traces import Session
from opengyre.sim.workload import Workload

GROUP_SLOT = 1 << 20
"""Slot under which the draw of a whole group is keyed."""
ENVIRONMENT_SIGMA = 0.25


@dataclass(slots=True)
class Job:
    """The work of one execution: chunks of sampled tokens, each with a visit to the environment behind it.

    Example: ``Job([8000.0, 2000.0], [60.0, 20.0], [3e4, 4e4], is_capped=False).tokens`` is 10000.
    """

    outputs: list[float]
    environments: list[float]
    contexts: Sequence[float]
    """Context tokens of each chunk; there may be more of them than chunks."""
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


class JobSource:
    """Gives each place of a run its work.

    Args:
        workload: Means and spreads.
        seed: Of the simulation.
        sessions: Executions of a trace to draw from instead.

    >>> job = JobSource(Workload(), seed=1).job(group_id=0, slot=0)
    >>> len(job.outputs) == len(job.environments), 20e3 < job.tokens < 270e3
    (True, True)
    """

    def __init__(self, workload: Workload, *, seed: int, sessions: tuple[Session, ...] = ()) -> None:
        self._workload = workload
        self._seed = seed
        self._cap = workload.cap_h / workload.nominal_h
        most = math.ceil(workload.output_tokens * self._cap / workload.chunk_tokens) + 1
        self._contexts = [workload.context_tokens(chunk) for chunk in range(most)]
        self._sessions = sessions
        self._draws: dict[int, float] = {}

    def job(self, *, group_id: int, slot: int) -> Job:
        """Return the work of a slot; an attempt after a drop has the same."""
        draws = generator(self._seed, group_id, slot)
        if self._sessions:
            index = draws.randrange(len(self._sessions))
            if self._workload.trace_in_order:
                index = (group_id * self._workload.group_size + slot) % len(self._sessions)
            return self._recorded(self._sessions[index], group_id)
        return self._drawn(draws, group_id, slot)

    def _drawn(self, draws: random.Random, group_id: int, slot: int) -> Job:
        workload = self._workload
        if slot == 0 or group_id not in self._draws:
            self._draws = {group_id: group_draw(self._seed, group_id)}
        own, environment = draws.gauss(), draws.gauss()
        within, between = workload.sigma_execution, workload.sigma_group
        factor = math.exp(between * self._draws[group_id] + within * own - (between**2 + within**2) / 2)
        is_capped, factor = factor > self._cap, min(factor, self._cap)
        tokens = workload.output_tokens * factor
        count = max(1, math.ceil(tokens / workload.chunk_tokens))
        outputs = [workload.chunk_tokens] * (count - 1)
        outputs.append(tokens - workload.chunk_tokens * (count - 1))
        environment_s = workload.environment_s * factor * workload.environment_factor(group_id)
        environment_s *= math.exp(ENVIRONMENT_SIGMA * environment - ENVIRONMENT_SIGMA**2 / 2)
        share_s = environment_s / count
        visits = [share_s * (0.5 + 0.5 * draws.expovariate(1.0)) for _ in range(count)]
        return Job(outputs, visits, self._contexts, is_capped)

    def _recorded(self, session: Session, group_id: int) -> Job:
        factor, cap_s = self._workload.environment_factor(group_id), self._workload.trace_gap_cap_s
        return Job(
            [call.output_tokens for call in session],
            [min(call.gap_s, cap_s) * factor for call in session],
            [call.context_tokens for call in session],
            is_capped=False,
        )

    def expected(self) -> tuple[float, float, float]:
        """Return what is expected of an execution: sampled tokens, time in the environment, context tokens."""
        if not self._sessions:
            context = sum(self._contexts) / len(self._contexts)
            return self._workload.output_tokens, self._workload.environment_s, context
        jobs = [self._recorded(session, 0) for session in self._sessions]
        tokens = sum(job.tokens for job in jobs)
        contexts = sum(sum(map(float.__mul__, job.outputs, job.contexts)) for job in jobs)
        return tokens / len(jobs), sum(sum(job.environments) for job in jobs) / len(jobs), contexts / tokens
