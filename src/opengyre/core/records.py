"""What a run writes down for people: the rows that the ledger keeps and the report reads.

Times are seconds since the start of the run on the driver's clock; a resumed run goes on from the last one.
"""

import msgspec

from opengyre.core.events import Mode
from opengyre.core.types import Kind


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """One start (or resume) of the driver."""

    incarnation: int
    """0 at the first start; a resume raises it."""
    started_s: float
    wall_clock: str
    """ISO 8601."""
    cells: int
    config: str
    """The configuration as JSON."""
    versions: dict[str, str]
    """Software versions: python, torch, opengyre, ..."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One optimizer step."""

    step: int
    """From 0; it makes version step + 1."""
    incarnation: int
    started_s: float
    ended_s: float
    groups: tuple[int, ...]
    staleness: tuple[int, ...]
    """d = step - v_d, one a group."""
    rewards: tuple[float, ...]
    """Of the valid executions."""
    executions: int
    """S: valid executions with admitted tokens."""
    spent_groups: int
    zero_variance_groups: int
    rows: int
    leaves: int
    """Candidates before the cap."""
    trained_tokens: int
    trainable_tokens: int
    """Before the cap."""
    mixed_tokens: int
    micro_steps: tuple[tuple[int, str], ...]
    """(cell, micro-step id) in the order of completion."""
    forward_backward_s: float
    loss: float
    entropy: float
    gradient_norm: float
    ratio_mean: float
    ratio_max: float
    truncated_share: float
    """Share of trained tokens whose importance weight was capped or masked."""
    kl: float
    """Mean of (ratio - 1) - log ratio against the behaviour policy."""
    checked_tokens: int
    """Tokens whose behaviour logprob was compared with the training logprob under the same weights."""
    checked_difference: float
    """Largest absolute difference among them."""
    empty: bool
    """No group had an advantage: the optimizer was not called."""


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation"):
    """One held-out evaluation of one version."""

    version: int
    kind: Kind
    task_ids: tuple[str, ...]
    rewards: tuple[float | None, ...]
    """None where the execution was dropped."""
    started_s: float
    ended_s: float

    @property
    def pass_rate(self) -> float:
        """Mean reward over the valid tasks."""
        valid = [reward for reward in self.rewards if reward is not None]
        return sum(valid) / len(valid) if valid else 0.0

    @property
    def solved_rate(self) -> float:
        """Share of the valid tasks with reward 1."""
        valid = [reward for reward in self.rewards if reward is not None]
        return sum(reward == 1.0 for reward in valid) / len(valid) if valid else 0.0


class CellSpan(msgspec.Struct, frozen=True, kw_only=True, tag="span"):
    """A cell was in one mode; ``busy_s`` of it was useful work (decode, prefill, forward-backward, optimizer)."""

    cell_id: int
    mode: Mode
    started_s: float
    ended_s: float
    busy_s: float
    tokens: int = 0
    """Sampled in rollout mode, trained in training mode."""


class SwitchRecord(msgspec.Struct, frozen=True, kw_only=True, tag="switch"):
    """A cell changed mode."""

    cell_id: int
    mode: Mode
    """The mode it arrived in."""
    started_s: float
    ended_s: float
    handed_over: int
    """Live calls that were moved to other cells."""
    parked: int
    """Live calls for which no cell was left."""
    moved_tokens: int
    """Context and output tokens of the calls that moved."""


class PublicationRecord(msgspec.Struct, frozen=True, kw_only=True, tag="publication"):
    """A version reached every cell in rollout mode."""

    version: int
    incarnation: int
    started_s: float
    ended_s: float
    live_calls: int
    """In flight at the change."""


class RepublicationRecord(msgspec.Struct, frozen=True, kw_only=True, tag="recomputed"):
    """What a publication has cost, known when the next one comes or the run stops."""

    version: int
    ended_s: float
    recomputed_tokens: int
    """Had been cached and were computed again because of the change, in whole blocks."""


class ExecutionRecord(msgspec.Struct, frozen=True, kw_only=True, tag="execution"):
    """The end of an execution: clocks, sizes and outcome."""

    execution_id: str
    task_id: str
    group_id: int
    kind: Kind
    version: int
    dispatched_s: float
    started_s: float
    ended_s: float
    """The harness ended."""
    closed_s: float
    """The outcome was known."""
    harness_s: float
    """Harness time: without the time parked or held."""
    outcome: str
    """`scored`, `no_artifact`, `evaluation_failed` or `dropped`."""
    reward: float | None
    passed: int = 0
    total: int = 0
    timed_out: bool = False
    reason: str = ""
    calls: int = 0
    sampled_tokens: int = 0
    malformed_calls: int = 0


class ControlRecord(msgspec.Struct, frozen=True, kw_only=True, tag="control"):
    """A reference solution was scored in the middle of a run, to see whether the grader still works."""

    task_id: str
    reward: float | None
    """None where the grader failed."""
    reason: str
    started_s: float
    ended_s: float

    @property
    def is_suspect(self) -> bool:
        """Whether the task cannot be trusted any more."""
        return self.reward != 1.0


Record = (
    ControlRecord
    | RunRecord
    | StepRecord
    | EvaluationRecord
    | CellSpan
    | SwitchRecord
    | PublicationRecord
    | RepublicationRecord
    | ExecutionRecord
)
