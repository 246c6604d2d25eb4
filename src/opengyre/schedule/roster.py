"""The scheduler's roster: executions, groups and slots from dispatch to consumption."""

from opengyre.core.errors import InvariantError
from opengyre.core.events import Command, Dispatch, execution_id_of
from opengyre.core.types import Kind
from opengyre.schedule.places import PlaceBook
from opengyre.schedule.settings import ScheduleSettings
from opengyre.schedule.state import ExecutionState, GroupState, MicroStepState, SlotState

EVALUATION_STRIDE = 10_000
"""Group ids of the n-th evaluation start at n times this."""


class Roster:
    """Who was dispatched, and what has become of it.

    Args:
        settings: Sizes and the evaluation plan.

    Example: ``roster.dispatch_training(8, version=0)`` returns the commands of the first eight groups.
    """

    def __init__(self, settings: ScheduleSettings) -> None:
        self._settings = settings
        self.executions: dict[str, ExecutionState] = {}
        self.groups: dict[int, GroupState] = {}
        """Groups that are not consumed, and those of the open step."""
        self.open_evaluations: set[str] = set()
        self.waterlevel = 0
        """w: executions dispatched and not finished."""
        self.places = PlaceBook(settings.batch_groups)
        """Who may take a place in a step."""
        self._dispatched_groups = 0
        self._evaluated: set[int] = set()

    @property
    def dispatched_groups(self) -> int:
        """Training groups dispatched so far."""
        return self._dispatched_groups

    def execution(self, execution_id: str) -> ExecutionState:
        """Return a dispatched execution.

        Raises:
            InvariantError: It was never dispatched.
        """
        try:
            return self.executions[execution_id]
        except KeyError as error:
            raise InvariantError(f"execution {execution_id} was never dispatched") from error

    def group(self, group_id: int, kind: Kind) -> GroupState | None:
        """Return a group that is not consumed, None if there is no such."""
        return self.groups.get(_key(group_id, kind))

    def finish(self, execution_id: str) -> None:
        """Take an execution out of the waterlevel: its harness ended.

        Raises:
            InvariantError: It finished before.
        """
        execution = self.execution(execution_id)
        if not execution.is_live:
            raise InvariantError(f"execution {execution_id} finished twice")
        execution.is_live = False
        self.waterlevel -= 1

    def _end(self, execution_id: str) -> tuple[ExecutionState, GroupState]:
        execution = self.execution(execution_id)
        if not execution.is_open:
            raise InvariantError(f"execution {execution_id} has an outcome already")
        execution.is_open = False
        if execution.is_live:
            execution.is_live = False
            self.waterlevel -= 1
        group = self.group(execution.group_id, execution.kind)
        if group is None or group.slots[execution.slot].is_closed:
            raise InvariantError(f"execution {execution_id}: slot {execution.slot} of its group is closed")
        return execution, group

    def close_slot(self, execution_id: str) -> None:
        """Close a slot with a valid outcome."""
        execution, group = self._end(execution_id)
        slot = group.slots[execution.slot]
        slot.is_closed = slot.is_valid = True
        self._forget_evaluation(execution, group)

    def drop_attempt(self, execution_id: str, *, counts: bool, step: int) -> list[Command]:
        """Dispatch a dropped slot again or close it empty.

        Args:
            execution_id: The dropped attempt.
            counts: Whether it uses up a try of ``redispatch``.
            step: The open step.
        """
        execution, group = self._end(execution_id)
        slot = group.slots[execution.slot]
        slot.charged += counts
        if not counts or self._may_redispatch(group, execution.slot, step):
            slot.attempts += 1
            return [self._dispatch(group, execution.slot, slot.attempts - 1)]
        slot.is_closed = True
        self._forget_evaluation(execution, group)
        return []

    def _may_redispatch(self, group: GroupState, index: int, step: int) -> bool:
        """Whether a dropped slot is tried again.

        Choice: while another slot of its group is unfinished and the step of its deadline has not begun.
        """
        if group.slots[index].charged > self._settings.redispatch:
            return False
        if group.kind.is_evaluation:
            return True
        others = any(not slot.is_closed for number, slot in enumerate(group.slots) if number != index)
        return others and step < group.deadline

    def _forget_evaluation(self, execution: ExecutionState, group: GroupState) -> None:
        if execution.kind.is_evaluation:
            self.open_evaluations.discard(_key_text(group.group_id, group.kind))
            del self.groups[_key(group.group_id, group.kind)]

    def complete_group(self, group_id: int, *, valid_slots: int, micro_steps: int) -> None:
        """Note that the rows of a group are made and how many micro-steps follow.

        Raises:
            InvariantError: It is not complete, or its valid slots are others.
        """
        group = self.groups.get(group_id)
        if group is None or group.is_complete or not group.all_closed:
            raise InvariantError(f"group {group_id} was reported complete, but it is not: {group}")
        valid = sum(slot.is_valid for slot in group.slots)
        if valid != valid_slots:
            raise InvariantError(f"group {group_id}: {valid_slots} valid slots reported, {valid} known")
        group.is_complete, group.valid_slots, group.expected = True, valid, micro_steps
        if group.has_arrived:
            self.places.arrive(group_id, group.deadline)

    def add_micro_step(self, group_id: int, micro_step: MicroStepState) -> None:
        """Note a micro-step of a complete group.

        Raises:
            InvariantError: None is expected, or it is known.
        """
        group = self.groups.get(group_id)
        name = micro_step.micro_step_id
        if group is None or not group.is_complete or group.has_arrived or name in group.micro_steps:
            raise InvariantError(f"micro-step {name} of group {group_id} is not expected")
        group.micro_steps[name] = micro_step
        if group.has_arrived:
            self.places.arrive(group_id, group.deadline)

    # -- dispatch ---------------------------------------------------------------------------------------------

    def _dispatch(self, group: GroupState, slot: int, attempt: int) -> Dispatch:
        execution_id = execution_id_of(group_id=group.group_id, slot=slot, attempt=attempt, kind=group.kind)
        self.executions[execution_id] = ExecutionState(execution_id, group.kind, group.group_id, slot, attempt)
        self.waterlevel += 1
        return Dispatch(
            execution_id=execution_id,
            group_id=group.group_id,
            slot=slot,
            attempt=attempt,
            kind=group.kind,
            version=group.version,
        )

    def dispatch_training(self, limit_groups: int, *, version: int) -> list[Command]:
        """Dispatch groups of the published version until ``limit_groups`` have been in all.

        Source: paper, Q_b = (phi + mu) * B. Choice: never more than steps * B in all.
        """
        limit = min(limit_groups, self._settings.steps * self._settings.batch_groups)
        commands: list[Command] = []
        while self._dispatched_groups < limit:
            group_id = self._dispatched_groups
            self._dispatched_groups += 1
            slots = [SlotState() for _ in range(self._settings.group_size)]
            deadline = version + self._settings.staleness_bound
            group = GroupState(group_id, Kind.TRAIN, version, deadline, slots)
            self.groups[group_id] = group
            self.places.add(deadline)
            commands += [self._dispatch(group, slot, 0) for slot in range(self._settings.group_size)]
        return commands

    def dispatch_evaluation(self, version: int) -> list[Command]:
        """Dispatch the evaluation of a version, once, if it is planned."""
        settings = self._settings
        if version not in settings.evaluate_at or version in self._evaluated or not settings.evaluation_tasks:
            return []
        self._evaluated.add(version)
        first = settings.evaluate_at.index(version) * EVALUATION_STRIDE
        kinds = (Kind.EVAL_SAMPLED, Kind.EVAL_GREEDY) if settings.evaluate_greedy else (Kind.EVAL_SAMPLED,)
        commands: list[Command] = []
        for kind in kinds:
            for task in range(settings.evaluation_tasks):
                group = GroupState(first + task, kind, version, 0, [SlotState()])
                self.groups[_key(group.group_id, kind)] = group
                self.open_evaluations.add(_key_text(group.group_id, kind))
                commands.append(self._dispatch(group, 0, 0))
        return commands


def _key(group_id: int, kind: Kind) -> int:
    """Return the key of a group: training groups count up from 0, evaluations down from -1.

    >>> _key(3, Kind.TRAIN), _key(0, Kind.EVAL_SAMPLED), _key(0, Kind.EVAL_GREEDY)
    (3, -1, -2)
    """
    if kind is Kind.TRAIN:
        return group_id
    return -1 - 2 * group_id - (kind is Kind.EVAL_GREEDY)


def _key_text(group_id: int, kind: Kind) -> str:
    return f"{kind}-{group_id}"
