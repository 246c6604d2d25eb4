"""The driver's book of groups: which slots are closed, with which outcome, and when a group is complete."""

from dataclasses import dataclass, field

from opengyre.core.errors import InvariantError
from opengyre.core.events import Dispatch
from opengyre.core.types import Dropped, EvaluationFailed, Execution, Kind, NoArtifact, Outcome, Scored


def reward_of(outcome: Outcome | None) -> float | None:
    """Return the reward of a valid outcome, None where there is none: a missing reward is never 0.

    >>> reward_of(NoArtifact()), reward_of(Dropped(reason="start_failed")), reward_of(None)
    (0.0, None, None)
    """
    match outcome:
        case Scored(reward=reward):
            return reward
        case NoArtifact():
            return 0.0
        case EvaluationFailed() | Dropped() | None:
            return None


@dataclass
class GroupState:
    """One group: a slot is open while its key maps to None.

    Example: after slot 0 was scored and slot 1 dropped for good, ``closed == {0: "g00000-s00-a0", 1: ""}``.
    """

    group_id: int
    task_id: str
    version: int
    slots: int
    closed: dict[int, str] = field(default_factory=dict)
    """Slot to the execution that closed it, empty if it was closed by drops."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every slot is closed."""
        return len(self.closed) == self.slots

    @property
    def valid_executions(self) -> tuple[str, ...]:
        """Executions with a valid outcome, in order of slot."""
        return tuple(self.closed[slot] for slot in sorted(self.closed) if self.closed[slot])

    @property
    def valid_rewards(self) -> tuple[float, ...]:
        """Rewards of the valid executions, in order of slot."""
        rewards = [reward_of(self.outcomes[execution_id]) for execution_id in self.valid_executions]
        return tuple(reward for reward in rewards if reward is not None)


class GroupBook:
    """All groups of a run that have been dispatched.

    >>> book = GroupBook(group_size=2)
    >>> _ = book.open(Execution(execution_id="a", task_id="t", group_id=0, slot=0, attempt=0, version=0))
    >>> _ = book.open(Execution(execution_id="b", task_id="t", group_id=0, slot=1, attempt=0, version=0))
    >>> book.close("a", Scored(reward=1.0, passed=1, total=1)).is_complete
    False
    >>> book.close_empty("b").valid_rewards
    (1.0,)
    """

    def __init__(self, *, group_size: int) -> None:
        self._group_size = group_size
        self._groups: dict[tuple[Kind, int], GroupState] = {}
        self._executions: dict[str, Execution] = {}

    def open(self, execution: Execution) -> GroupState:
        """Note a dispatched execution and return its group."""
        self._executions[execution.execution_id] = execution
        slots = 1 if execution.kind.is_evaluation else self._group_size
        return self._groups.setdefault(
            (execution.kind, execution.group_id),
            GroupState(execution.group_id, execution.task_id, execution.version, slots),
        )

    def execution(self, execution_id: str) -> Execution:
        """Return a dispatched execution.

        Raises:
            InvariantError: It was never dispatched.
        """
        try:
            return self._executions[execution_id]
        except KeyError as error:
            raise InvariantError(f"execution {execution_id} was never dispatched") from error

    def group(self, group_id: int) -> GroupState:
        """Return a training group."""
        return self._groups[(Kind.TRAIN, group_id)]

    def close(self, execution_id: str, outcome: Outcome) -> GroupState:
        """Close the execution's slot with a valid outcome.

        Raises:
            InvariantError: The outcome is not valid, or the slot was closed before.
        """
        if reward_of(outcome) is None:
            raise InvariantError(f"execution {execution_id}: outcome {outcome} cannot close a slot")
        return self._close(execution_id, execution_id, outcome)

    def close_empty(self, execution_id: str) -> GroupState:
        """Close the execution's slot without an outcome: its last attempt was dropped."""
        return self._close(execution_id, "", None)

    def _close(self, execution_id: str, closer: str, outcome: Outcome | None) -> GroupState:
        execution = self.execution(execution_id)
        group = self._groups[(execution.kind, execution.group_id)]
        if execution.slot in group.closed:
            raise InvariantError(
                f"slot {execution.slot} of group {execution.group_id} was closed by "
                f"{group.closed[execution.slot] or 'drops'} and again by {execution_id}"
            )
        group.closed[execution.slot] = closer
        if outcome is not None:
            group.outcomes[execution_id] = outcome
        return group


def execution_of(dispatch: Dispatch, *, task_id: str) -> Execution:
    """Return the execution that a command starts."""
    return Execution(
        execution_id=dispatch.execution_id,
        task_id=task_id,
        group_id=dispatch.group_id,
        slot=dispatch.slot,
        attempt=dispatch.attempt,
        version=dispatch.version,
        kind=dispatch.kind,
    )
