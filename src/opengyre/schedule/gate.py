"""The KV gate: what becomes of an execution at its next call on a cell. The same for every rule."""

from enum import StrEnum

RESUME_SHARE = 0.97
"""A held execution comes back when a cell is below this share of its capacity with it."""


class Verdict(StrEnum):
    """What the gate says."""

    RUN = "run"
    MOVE = "move"
    HOLD = "hold"


def admit(
    *, call_tokens: int, resident_tokens: int, capacity_tokens: int, other_tokens: int | None, is_oldest: bool
) -> Verdict:
    """Decide on one call.

    Args:
        call_tokens: Context of the call.
        resident_tokens: Resident tokens of the other executions on its cell.
        capacity_tokens: What a cell holds.
        other_tokens: Resident tokens of the cell with most room, None if there is no other.
        is_oldest: Whether no execution on the cell is of an older group.

    Choice: run if it fits, else move where there is room, else hold, but never the oldest group.

    >>> def verdict(resident, other, oldest):
    ...     return admit(call_tokens=10, resident_tokens=resident, capacity_tokens=100, other_tokens=other,
    ...                  is_oldest=oldest).value
    >>> verdict(90, 95, False), verdict(95, 80, False), verdict(95, 95, False), verdict(95, None, True)
    ('run', 'move', 'hold', 'run')
    """
    if resident_tokens + call_tokens <= capacity_tokens:
        return Verdict.RUN
    if other_tokens is not None and other_tokens + call_tokens <= capacity_tokens:
        return Verdict.MOVE
    return Verdict.RUN if is_oldest else Verdict.HOLD


def can_resume(*, call_tokens: int, resident_tokens: int, capacity_tokens: int) -> bool:
    """Whether a held execution fits a cell again.

    Choice: with 3% of room left, so that it is not held again at its next call.

    >>> can_resume(call_tokens=10, resident_tokens=87, capacity_tokens=100)
    True
    >>> can_resume(call_tokens=10, resident_tokens=88, capacity_tokens=100)
    False
    """
    return resident_tokens + call_tokens <= RESUME_SHARE * capacity_tokens
