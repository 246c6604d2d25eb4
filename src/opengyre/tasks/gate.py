"""The control gate: a task is accepted only if nothing scores 0 and the reference scores 1, again and again.

Pure: the runs are made elsewhere and come in as rewards.
"""

from collections.abc import Sequence
from dataclasses import dataclass

EMPTY_RUNS = 2
REFERENCE_RUNS = 5


@dataclass(frozen=True, kw_only=True)
class GateVerdict:
    """What the gate says of a task.

    Example: ``GateVerdict(task_id="t", is_accepted=False, reason="the reference scores 0.5", total=4, empty=0.0,
    reference=0.5)``.
    """

    task_id: str
    is_accepted: bool
    reason: str
    total: int
    empty: float | None
    reference: float | None


def judge(task_id: str, *, total: int, empty: Sequence[float | str], reference: Sequence[float | str]) -> GateVerdict:
    """Return the verdict on a task from its control runs.

    Args:
        task_id: The task.
        total: Frozen tests.
        empty: Rewards of the empty workspace, or why there is none.
        reference: Rewards of the reference, or why there is none.

    Choice: empty = 0 twice, reference = 1 five times.

    >>> judge("t", total=2, empty=[0.0, 0.0], reference=[1.0] * 5).is_accepted
    True
    >>> judge("t", total=2, empty=[0.0, 0.0], reference=[1.0, 0.5, 1.0, 1.0, 1.0]).reason
    'flaky: the reference scores 0.5 to 1'
    """
    broken = [run for run in (*empty, *reference) if isinstance(run, str)]
    rewards = [run for run in reference if not isinstance(run, str)]
    zeros = [run for run in empty if not isinstance(run, str)]
    reason = ""
    if broken:
        reason = f"the grader does not work here: {broken[0]}"
    elif not total:
        reason = "no test passes on the reference"
    elif any(zeros):
        reason = f"the empty workspace scores {max(zeros):g}, expected 0"
    elif min(rewards) != max(rewards):
        reason = f"flaky: the reference scores {min(rewards):g} to {max(rewards):g}"
    elif rewards[0] != 1.0:
        reason = f"the reference scores {rewards[0]:g}, expected 1"
    return GateVerdict(
        task_id=task_id,
        is_accepted=not reason,
        reason=reason or "accepted",
        total=total,
        empty=max(zeros, default=None),
        reference=min(rewards, default=None),
    )
