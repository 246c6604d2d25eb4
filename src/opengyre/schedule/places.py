"""Who may take a place in the open step, such that every group meets its deadline.

The deadline of a group is v_d + phi + mu - 1. A complete group may take a place in step v only if afterwards, for every
t from v to its deadline - 1, the live groups not taken with deadline <= t still fit: (places left in v) + (t - v) * B.
With this test d <= phi + mu - 1 is a theorem (Hall's condition); the obvious rule breaks it for phi >= 2.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A live group: dispatched and not consumed.

    Example: ``Candidate(group_id=3, deadline=1, is_complete=True)``.
    """

    group_id: int
    deadline: int
    is_complete: bool


def next_group(live: Iterable[Candidate], *, step: int, places_left: int, batch_groups: int) -> int | None:
    """Return the complete group that takes the next place of the step, or None.

    Among the groups that may: earliest deadline, then oldest.

    Choice: the reservation test of the module's head.

    >>> live = [Candidate(0, 2, False), Candidate(1, 2, True), Candidate(2, 3, True)]
    >>> next_group(live, step=1, places_left=1, batch_groups=1)
    1
    >>> next_group([Candidate(0, 1, False), Candidate(1, 2, True)], step=1, places_left=1, batch_groups=1) is None
    True
    """
    if places_left <= 0:
        return None
    groups = sorted(live, key=lambda group: (group.deadline, group.group_id))
    for group in groups:
        if group.is_complete and _leaves_room(groups, group, step, places_left - 1, batch_groups):
            return group.group_id
    return None


def _leaves_room(groups: list[Candidate], taken: Candidate, step: int, places_after: int, batch_groups: int) -> bool:
    """Whether all others with an earlier deadline than ``taken`` still fit."""
    for limit in range(step, taken.deadline):
        due = sum(group.deadline <= limit for group in groups if group.group_id != taken.group_id)
        if due > places_after + (limit - step) * batch_groups:
            return False
    return True
