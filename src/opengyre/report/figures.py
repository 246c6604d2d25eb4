"""What the report says of a run: the types that ``opengyre report --json`` prints (design, section 11)."""

from collections.abc import Sequence

import msgspec

from opengyre.core.records import Record
from opengyre.report.statistics import PairedDifference


class CallTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the committed calls of a run.

    >>> CallTotals(committed=20, complete=19, hung_up=1).unknown
    0
    """

    committed: int = 0
    complete: int = 0
    hung_up: int = 0
    unknown: int = 0
    summed_tokens: int = 0
    """Context and output of every call."""
    unique_tokens: int = 0
    """Tokens of the trees: what is left after prefix sharing."""
    sampled_tokens: int = 0
    restored: int = 0
    rendered: int = 0
    rewritten: int = 0
    handed_over: int = 0
    """Calls that more than one cell served."""


class RunData(msgspec.Struct, frozen=True, kw_only=True):
    """What the report is made of.

    Example: ``RunData(name="runs/first", records=ledger_records, calls=CallTotals(committed=20, complete=20))``.
    """

    name: str
    records: Sequence[Record]
    calls: CallTotals = CallTotals()
    is_running: bool = False


class CallCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Calls by what the shims' journals say of their answers."""

    committed: int
    complete: int
    hung_up: int
    unknown: int
    restored: int
    rendered: int
    rewritten: int
    handed_over: int


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens: summed over calls, unique in the trees, sampled by the policy, trained."""

    summed: int
    unique: int
    sampled: int
    trained: int


class CellTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a cell: the first four add up to the time that it was there.

    Choice: ``rollout_s`` and ``training_s`` are useful work; waiting in either mode is ``idle_s``.
    """

    cell_id: int
    rollout_s: float
    training_s: float
    switching_s: float
    idle_s: float
    rollout_mode_s: float
    training_mode_s: float
    utilisation: float


class EvaluationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation of one version; ``mode`` is ``sampled`` or ``greedy``."""

    step: int
    mode: str
    pass_rate: float
    solved_rate: float
    tasks: int
    dropped: int
    low: float | None
    high: float | None


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """Last evaluation minus the first of the same mode, paired by task."""

    mode: str
    from_step: int
    to_step: int
    change: PairedDifference


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step as the report shows it."""

    step: int
    started_s: float
    ended_s: float
    reward: float | None
    staleness: tuple[int, ...]
    executions: int
    spent_groups: int
    zero_variance_groups: int
    leaves: int
    rows: int
    trained_tokens: int
    trainable_tokens: int
    mixed_tokens: int
    forward_backward_s: float
    entropy: float
    loss: float
    kl: float
    gradient_norm: float
    truncated_share: float
    checked_tokens: int
    checked_difference: float
    empty: bool


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """Staleness d over the consumed groups."""

    mean: float
    max: int
    counts: dict[int, int]


class Outcomes(msgspec.Struct, frozen=True, kw_only=True):
    """How executions ended; ``timed_out`` is the part of ``scored`` that met the harness timeout."""

    scored: int
    timed_out: int
    no_artifact: int
    evaluation_failed: int
    dropped: int


class Scoring(msgspec.Struct, frozen=True, kw_only=True):
    """How long outcomes took after the harness had ended, and what the control scorings said."""

    mean_s: float
    p95_s: float
    max_s: float
    controls: int
    """References that were scored in the middle of the run."""
    suspect: tuple[str, ...]
    """Tasks whose reference did not score 1."""


class Switches(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of mode and the live calls that they moved."""

    to_training: int
    to_rollout: int
    handed_over: int
    parked: int
    moved_tokens: int
    with_hand_over: int
    """Switches to training that handed over at least one call."""
    mean_s: float
    max_s: float


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """The checks of exactness."""

    checked_tokens: int
    checked_difference: float
    steps_without_check: int
    unknown_calls: int
    mixed_tokens: int


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that ``opengyre report`` says of a run."""

    run: str
    state: str
    steps: int
    wall_s: float
    executions: int
    calls: CallCounts
    tokens: TokenCounts
    cells: tuple[CellTime, ...]
    utilisation: float
    switches: int
    switching: Switches
    evaluations: tuple[EvaluationRow, ...]
    gains: tuple[Gain, ...]
    reward: tuple[float | None, ...]
    staleness: Staleness
    breach_s: float
    outcomes: Outcomes
    reasons: tuple[tuple[str, str, int], ...]
    """(outcome, reason, count), most frequent first."""
    scoring: Scoring
    checks: Checks
    empty_steps: int
    resumes: int
    publications: int
    prefilled_tokens: int
    """Computed again because of publications."""
    step_rows: tuple[StepRow, ...]
    versions: dict[str, str]
