"""The open step: its groups, and the micro-steps that wait, run and are done."""

import heapq

from opengyre.schedule.state import GroupState, MicroStepState


class OpenStep:
    """Groups with a place in the step that is being trained.

    Micro-steps are handed out in the order of their groups.

    Args:
        streaming: Whether they can be pulled before the batch is full.
        batch_groups: B.

    Example: ``take(group)`` for each place, ``pull(cell)`` until None, ``finish(name, cell)`` for each of them.
    """

    def __init__(self, *, streaming: bool, batch_groups: int) -> None:
        self._streaming = streaming
        self._batch_groups = batch_groups
        self._groups: dict[int, GroupState] = {}
        self._by_name: dict[str, MicroStepState] = {}
        self._order: dict[str, tuple[int, int]] = {}
        self._waiting: list[tuple[tuple[int, int], str]] = []
        self._undone = 0

    @property
    def group_ids(self) -> tuple[int, ...]:
        """Groups of the step, ascending."""
        return tuple(sorted(self._groups))

    @property
    def is_full(self) -> bool:
        """Whether all places are taken."""
        return len(self._groups) >= self._batch_groups

    @property
    def places_left(self) -> int:
        """Places that are free."""
        return self._batch_groups - len(self._groups)

    @property
    def is_busy(self) -> bool:
        """Whether micro-steps wait or run."""
        return self._undone > 0

    @property
    def waiting(self) -> int:
        """Micro-steps that can be pulled."""
        return len(self._waiting) if self._streaming or self.is_full else 0

    def take(self, group: GroupState) -> None:
        """Give a group a place."""
        self._groups[group.group_id] = group
        for index, (name, micro_step) in enumerate(group.micro_steps.items()):
            self._by_name[name] = micro_step
            self._order[name] = (group.group_id, index)
            heapq.heappush(self._waiting, (self._order[name], name))
            self._undone += 1

    def pull(self, cell_id: int) -> str | None:
        """Hand the next micro-step to a cell."""
        if not self.waiting:
            return None
        name = heapq.heappop(self._waiting)[1]
        self._by_name[name].running_on = cell_id
        return name

    def finish(self, name: str, cell_id: int) -> bool:
        """Note that a cell is done with a micro-step; False if it was not running there."""
        micro_step = self._by_name.get(name)
        if micro_step is None or micro_step.running_on != cell_id:
            return False
        micro_step.running_on, micro_step.done_by = None, cell_id
        self._undone -= 1
        return True

    def lose(self, cell_id: int) -> bool:
        """Return what a lost cell ran or holds to the queue: its sums are gone with it; whether there was any."""
        found = False
        for name, micro_step in self._by_name.items():
            if cell_id in (micro_step.running_on, micro_step.done_by):
                self._undone += micro_step.done_by is not None
                micro_step.running_on = micro_step.done_by = None
                heapq.heappush(self._waiting, (self._order[name], name))
                found = True
        return found

    def running(self) -> list[MicroStepState]:
        """Return the micro-steps that a cell works on."""
        return [micro_step for micro_step in self._by_name.values() if micro_step.running_on is not None]

    def running_costs(self) -> list[float]:
        """Return the estimated cell-seconds of the micro-steps that run."""
        return [micro_step.cost_s for micro_step in self.running()]

    def waiting_costs(self) -> list[float]:
        """Return the estimated cell-seconds of the micro-steps that wait."""
        return [self._by_name[name].cost_s for _, name in self._waiting]

    def contributions(self) -> dict[int, tuple[str, ...]]:
        """Return for each cell the micro-steps whose sums it holds, in the order of their groups."""
        found: dict[int, list[str]] = {}
        for name in sorted(self._by_name, key=self._order.__getitem__):
            done_by = self._by_name[name].done_by
            if done_by is not None:
                found.setdefault(done_by, []).append(name)
        return {cell_id: tuple(names) for cell_id, names in sorted(found.items())}

    def clear(self) -> list[GroupState]:
        """Empty the step and return its groups."""
        groups = [self._groups[group_id] for group_id in sorted(self._groups)]
        self._groups.clear()
        self._by_name.clear()
        self._order.clear()
        self._waiting.clear()
        self._undone = 0
        return groups
