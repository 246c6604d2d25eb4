"""The scheduler's books: executions, groups, the open step, cells."""

from dataclasses import dataclass, field

from opengyre.core.events import Mode
from opengyre.core.types import Kind


@dataclass
class ExecutionState:
    """An execution that was dispatched.

    Example: live until ``Finished``; open until ``SlotClosed`` or ``AttemptDropped``.
    """

    execution_id: str
    kind: Kind
    group_id: int
    slot: int
    attempt: int
    is_live: bool = True
    is_open: bool = True


@dataclass
class SlotState:
    """One slot of a group."""

    attempts: int = 1
    charged: int = 0
    """Drops that count against ``redispatch``."""
    is_closed: bool = False
    is_valid: bool = False


@dataclass
class MicroStepState:
    """A micro-step of a group: waiting, running on a cell, or done by a cell."""

    micro_step_id: str
    cost_s: float
    running_on: int | None = None
    done_by: int | None = None


@dataclass
class GroupState:
    """A group from dispatch to consumption."""

    group_id: int
    kind: Kind
    version: int
    deadline: int
    slots: list[SlotState]
    is_complete: bool = False
    valid_slots: int = 0
    expected: int = 0
    """Micro-steps announced by ``GroupComplete``."""
    micro_steps: dict[str, MicroStepState] = field(default_factory=dict)
    step: int | None = None
    """Step that it has a place in."""

    @property
    def all_closed(self) -> bool:
        """Whether every slot is closed."""
        return all(slot.is_closed for slot in self.slots)

    @property
    def has_arrived(self) -> bool:
        """Whether it is complete and all its micro-steps are known."""
        return self.is_complete and len(self.micro_steps) == self.expected


@dataclass
class CellState:
    """A cell of the run."""

    cell_id: int
    mode: Mode = Mode.ROLLOUT
    target: Mode = Mode.ROLLOUT
    is_asking: bool = False
    """It sent ``CellReady`` and got nothing."""
    running: str | None = None
    """Micro-step that it works on."""
    kv_tokens: int = 0
    tokens_per_s: float = 0.0
