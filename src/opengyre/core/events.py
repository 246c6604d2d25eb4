"""Events (facts, past tense) and commands (orders, imperative) of the scheduler.

The life of a training group: ``Dispatch`` (command, one for each slot) -> ``Dispatched`` -> ``Finished`` (the harness
ended, w falls) -> ``SlotClosed`` (its outcome is known) or ``AttemptDropped`` (the scheduler may dispatch again)
-> ``GroupComplete`` (advantages, trees and rows are made) with exactly ``micro_steps`` events ``MicroStepReady`` behind
it -> the group takes a place in the open step -> ``RunMicroStep`` to a cell that asked -> ``MicroStepDone`` -> when B
groups are consumed ``CloseStep`` -> ``StepDone`` -> every mu steps ``PublishWeights`` -> ``WeightsPublished``, which
dispatches again.

>>> decode_event(encode_event(Finished(execution_id="g0s0a0")))
Finished(execution_id='g0s0a0')
"""

from enum import StrEnum

import msgspec

from opengyre.core.types import Kind


class Mode(StrEnum):
    """Mode of a cell."""

    ROLLOUT = "rollout"
    SWITCHING = "switching"
    TRAINING = "training"


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all events and commands; the tag is the class name."""


class Tick(_Message, frozen=True, kw_only=True):
    """Time passed; answers ``WakeAt``."""


class Dispatched(_Message, frozen=True, kw_only=True):
    """The runner took an execution."""

    execution_id: str


class Finished(_Message, frozen=True, kw_only=True):
    """The harness of an execution ended, in whatever way; it no longer counts in the waterlevel."""

    execution_id: str


class SlotClosed(_Message, frozen=True, kw_only=True):
    """A valid outcome (scored or no artifact) closed the execution's slot."""

    execution_id: str


class AttemptDropped(_Message, frozen=True, kw_only=True):
    """An attempt was dropped; the scheduler dispatches the slot again or closes it empty.

    Implies ``Finished`` if that has not been reported.
    """

    execution_id: str
    reason: str
    counts: bool = True
    """Whether it uses up one of the slot's ``redispatch`` tries; False when the driver itself was restarted."""


class GroupComplete(_Message, frozen=True, kw_only=True):
    """All slots of a group are closed and its rows are made."""

    group_id: int
    valid_slots: int
    micro_steps: int
    """How many ``MicroStepReady`` follow; 0 when nothing is trained (A = 0)."""


class MicroStepReady(_Message, frozen=True, kw_only=True):
    """A micro-step of a complete group can be pulled once the group has a place in a step."""

    group_id: int
    micro_step_id: str
    rows: int
    tokens: int
    cost_s: float
    """Estimated cell-seconds."""


class MicroStepDone(_Message, frozen=True, kw_only=True):
    """A cell added a micro-step to its gradient sum."""

    cell_id: int
    micro_step_id: str
    seconds: float


class CellLoad(_Message, frozen=True, kw_only=True):
    """Load of a cell in rollout mode; at most one a second and cell."""

    cell_id: int
    running: int
    queued: int
    kv_tokens: int
    tokens_per_s: float


class RatesMeasured(_Message, frozen=True, kw_only=True):
    """Measured rates for the look-ahead rule, once a publication."""

    decode_request_s: float
    """Seconds per decoded token and active request (marginal)."""
    decode_weights_s: float
    """Seconds per decode step that do not depend on the batch."""
    environment_token_s: float
    """Seconds outside the engine per sampled token."""
    training_token_s: float
    """Cell-seconds per trained token."""
    context_tokens: float
    """Mean context of an active request."""
    output_tokens: float
    """Mean sampled tokens of an execution."""
    prefill_token_s: float = 0.0
    kv_capacity_tokens: float = 0.0
    """Context tokens that a cell holds; 0 if unknown."""


class CellReady(_Message, frozen=True, kw_only=True):
    """A cell in training mode is idle and asks for a micro-step (a pull)."""

    cell_id: int


class SwitchDone(_Message, frozen=True, kw_only=True):
    """A cell arrived in a mode."""

    cell_id: int
    mode: Mode


class CellLost(_Message, frozen=True, kw_only=True):
    """A cell went away; its micro-steps of the open step return to the queue."""

    cell_id: int


class CellJoined(_Message, frozen=True, kw_only=True):
    """A cell came (back), in rollout mode with the published weights."""

    cell_id: int


class StepDone(_Message, frozen=True, kw_only=True):
    """The core took an optimizer step (or an empty one); ``version`` counts optimizer steps."""

    version: int


class WeightsPublished(_Message, frozen=True, kw_only=True):
    """Every cell in rollout mode has ``version``; the run starts with version 0."""

    version: int
    incarnation: int
    cells: tuple[int, ...]


class Dispatch(_Message, frozen=True, kw_only=True):
    """Start an execution. A re-dispatch keeps group, slot and version and raises ``attempt``."""

    execution_id: str
    group_id: int
    slot: int
    attempt: int
    kind: Kind
    version: int
    """v_d of the group; for an evaluation the pinned version."""


class SwitchCell(_Message, frozen=True, kw_only=True):
    """Bring a cell into rollout or training mode."""

    cell_id: int
    mode: Mode


class RunMicroStep(_Message, frozen=True, kw_only=True):
    """Run a micro-step on a cell in training mode."""

    cell_id: int
    micro_step_id: str
    step: int


class CloseStep(_Message, frozen=True, kw_only=True):
    """Reduce the gradient sums of ``cells`` to the core and take the optimizer step.

    ``contributions`` lists for each cell the micro-steps whose sums it holds.
    """

    step: int
    groups: tuple[int, ...]
    contributions: dict[int, tuple[str, ...]]


class PublishWeights(_Message, frozen=True, kw_only=True):
    """Give ``version`` to every cell in rollout mode."""

    version: int


class DropExecution(_Message, frozen=True, kw_only=True):
    """End an execution whose slot is no longer needed."""

    execution_id: str
    reason: str


class WakeAt(_Message, frozen=True, kw_only=True):
    """Send ``Tick`` at this time at the latest."""

    now_s: float


Event = (
    Tick
    | Dispatched
    | Finished
    | SlotClosed
    | AttemptDropped
    | GroupComplete
    | MicroStepReady
    | MicroStepDone
    | CellLoad
    | RatesMeasured
    | CellReady
    | SwitchDone
    | CellLost
    | CellJoined
    | StepDone
    | WeightsPublished
)
Command = Dispatch | SwitchCell | RunMicroStep | CloseStep | PublishWeights | DropExecution | WakeAt

_EVENT_DECODER = msgspec.json.Decoder(Event)
_COMMAND_DECODER = msgspec.json.Decoder(Command)
_ENCODER = msgspec.json.Encoder()


def encode_event(event: Event) -> bytes:
    """Return the JSON of an event for the log."""
    return _ENCODER.encode(event)


def decode_event(data: bytes) -> Event:
    """Return the event that ``encode_event`` wrote.

    Raises:
        msgspec.ValidationError: The data is not an event.
    """
    return _EVENT_DECODER.decode(data)


def encode_command(command: Command) -> bytes:
    """Return the JSON of a command for the log."""
    return _ENCODER.encode(command)


def decode_command(data: bytes) -> Command:
    """Return the command that ``encode_command`` wrote.

    Raises:
        msgspec.ValidationError: The data is not a command.
    """
    return _COMMAND_DECODER.decode(data)


def execution_id_of(*, group_id: int, slot: int, attempt: int, kind: Kind = Kind.TRAIN) -> str:
    """Return the id of an execution: a function of its place, so that a replay gives the same ids.

    >>> execution_id_of(group_id=3, slot=1, attempt=0)
    'g00003-s01-a0'
    """
    prefix = {Kind.TRAIN: "g", Kind.EVAL_SAMPLED: "e", Kind.EVAL_GREEDY: "d"}[kind]
    return f"{prefix}{group_id:05d}-s{slot:02d}-a{attempt}"
