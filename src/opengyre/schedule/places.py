"""Who may take a place in the open step, such that every group meets its deadline.

The deadline of a group is v_d + phi + mu - 1. A complete group may take a place in step v only if afterwards, for every
t from v to its deadline - 1, the live groups not taken with deadline <= t still fit: (places left in v) + (t - v) * B.
With this test d <= phi + mu - 1 is a theorem (Hall's condition); the obvious rule breaks it for phi >= 2.
"""

import heapq
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


class PlaceBook:
    """The same decision as ``next_group`` from counts by deadline, so that an event costs no walk over all groups.

    Whether a group may take a place depends on its deadline alone.

    Args:
        batch_groups: B.

    >>> book = PlaceBook(batch_groups=1)
    >>> book.add(2), book.add(2), book.add(3), book.arrive(1, 2), book.arrive(2, 3)
    (None, None, None, None, None)
    >>> book.take(step=1, places_left=1), book.take(step=2, places_left=1)
    (1, None)
    """

    def __init__(self, batch_groups: int) -> None:
        self._batch_groups = batch_groups
        self._live: dict[int, int] = {}
        self._arrived: dict[int, list[int]] = {}

    def add(self, deadline: int) -> None:
        """Note a dispatched group."""
        self._live[deadline] = self._live.get(deadline, 0) + 1

    def arrive(self, group_id: int, deadline: int) -> None:
        """Note that all micro-steps of a group are known."""
        heapq.heappush(self._arrived.setdefault(deadline, []), group_id)

    def take(self, *, step: int, places_left: int) -> int | None:
        """Return the group that takes the next place and forget it, None if none may."""
        if places_left <= 0:
            return None
        for deadline in sorted(self._arrived):
            if not self._leaves_room(deadline, step, places_left - 1):
                continue
            group_id = heapq.heappop(self._arrived[deadline])
            self._forget(deadline)
            return group_id
        return None

    def _forget(self, deadline: int) -> None:
        if not self._arrived[deadline]:
            del self._arrived[deadline]
        self._live[deadline] -= 1
        if not self._live[deadline]:
            del self._live[deadline]

    def _leaves_room(self, deadline: int, step: int, places_after: int) -> bool:
        for limit in range(step, deadline):
            due = sum(count for other, count in self._live.items() if other <= limit)
            if due > places_after + (limit - step) * self._batch_groups:
                return False
        return True
