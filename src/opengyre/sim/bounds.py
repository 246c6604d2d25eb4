"""What no rule can be faster than: the work of the groups, and the time their executions take alone."""

import heapq
from collections.abc import Iterable

from opengyre.sim.outcome import GroupWork
from opengyre.sim.workload import Workload


def work_bound_s(workload: Workload, groups: Iterable[GroupWork]) -> float:
    """Return seconds a step that the work takes if all cells are always busy.

    Choice: decoding is as cheap as it can be: a full window of calls on one cell shares each decode step's weights, and
    contexts are the measured ones.

    >>> group = GroupWork(0, 0, trained_tokens=1e6, output_tokens=0.0, context_tokens=0.0, alone_s=0.0)
    >>> round(work_bound_s(Workload(batch_groups=1, steps=1, load=1.0), [group]), 1)
    19.0
    """
    first, last = workload.measured_steps
    measured = range(first * workload.batch_groups, last * workload.batch_groups)
    window = (workload.phi + workload.mu) * workload.batch_groups * workload.group_size
    token_s = workload.step_weights_s / window + workload.request_s
    total_s, count = 0.0, 0
    for group in groups:
        if group.group_id in measured or (first, last) == (0, workload.steps):
            total_s += group.trained_tokens * workload.train_s_per_token
            total_s += group.output_tokens * token_s + group.context_tokens * workload.context_token_s
            count += 1
    return total_s / workload.cells * workload.batch_groups / max(1, count)


def step_ends_s(workload: Workload, groups: Iterable[GroupWork]) -> list[float]:
    """Return when each step ends at the earliest if every execution had a cell of its own and training were free.

    A group is dispatched at a publication at the earliest and cannot be complete sooner than alone; step v needs
    (v + 1) B complete groups in all, and every group whose deadline it is.
    """
    ordered = sorted(groups, key=lambda group: group.group_id)
    depth, batch = workload.phi + workload.mu, workload.batch_groups
    published_s, published, sent, last_s = 0.0, 0, 0, 0.0
    complete: list[float] = []
    due: dict[int, float] = {}
    ends: list[float] = []
    for step in range(workload.steps):
        limit = min((published + depth) * batch, len(ordered))
        for group in ordered[sent:limit]:
            end_s = published_s + group.alone_s
            heapq.heappush(complete, end_s)
            deadline = published + depth - 1
            due[deadline] = max(due.get(deadline, 0.0), end_s)
        sent = max(sent, limit)
        taken = [heapq.heappop(complete) for _ in range(min(batch, len(complete)))]
        last_s = max([last_s, due.pop(step, 0.0), *taken]) + workload.optimizer_s
        ends.append(last_s)
        if (step + 1) % workload.mu == 0:
            published, published_s = step + 1, last_s + workload.publish_s
    return ends


def latency_bound_s(workload: Workload, groups: Iterable[GroupWork]) -> float:
    """Return seconds a step of the measured part in ``step_ends_s``.

    For the whole run it is a bound; for a part of it, nearly one.
    """
    ends = step_ends_s(workload, groups)
    first, last = workload.measured_steps
    return (ends[last - 1] - (ends[first - 1] if first else 0.0)) / (last - first)


def bound_s(workload: Workload, groups: Iterable[GroupWork]) -> float:
    """Return the larger of both bounds, in seconds a step."""
    listed = list(groups)
    return max(work_bound_s(workload, listed), latency_bound_s(workload, listed))
