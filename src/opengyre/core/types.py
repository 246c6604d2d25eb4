"""The central data types, each with a worked example.

Arrays are numpy: token ids ``int32``, logprobs ``float32``. Times are seconds on the driver's clock.
"""

from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from opengyre.core.errors import InvariantError

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


class Role(StrEnum):
    """Who made a call. The order of definition is the priority of admission.

    Source: paper, roles main > main-summary > sub-agent > sub-agent-summary.
    Choice: ``auxiliary`` (titles, probes) stands last and is never trained.

    >>> [role.value for role in Role][:2]
    ['main', 'main-summary']
    """

    MAIN = "main"
    MAIN_SUMMARY = "main-summary"
    SUB_AGENT = "sub-agent"
    SUB_AGENT_SUMMARY = "sub-agent-summary"
    AUXILIARY = "auxiliary"


class Finish(StrEnum):
    """Why the engine stopped sampling a call."""

    STOP = "stop"
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"
    ABORT = "abort"


class Delivered(StrEnum):
    """What the shim's journal says of an answer; ``unknown`` until its receipt arrives."""

    COMPLETE = "complete"
    HUNG_UP = "hung_up"
    UNKNOWN = "unknown"


class Verdict(StrEnum):
    """How the prompt of a call was made: from recorded tokens, by rendering, or after a rewritten history."""

    RESTORED = "restored"
    RENDERED = "rendered"
    REWRITTEN = "rewritten"


class SamplingLaw(StrEnum):
    """What the output was drawn from: the policy itself, or a cut-down law (``truncated``, ``greedy``)."""

    POLICY = "policy"
    TRUNCATED = "truncated"
    GREEDY = "greedy"


class VersionRun(msgspec.Struct, frozen=True, array_like=True):
    """A run of output tokens sampled under one version of the weights.

    ``mixed`` marks tokens whose cached keys and values an older version computed.

    >>> VersionRun(version=3, count=17)
    VersionRun(version=3, count=17, mixed=False)
    """

    version: int
    count: int
    mixed: bool = False


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling that a call was really served with.

    >>> Sampling(temperature=1.0, seed=7).law.value
    'policy'
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    law: SamplingLaw = SamplingLaw.POLICY


class Call(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One model request of a harness that the proxy answered.

    The context is given as the first ``shared`` tokens of the parent call's context + output, followed by
    ``tail``; a call without a parent has ``shared == 0``.

    Example: the parent has context [1, 2] and output [3, 4]; a call whose whole context is [1, 2, 3, 4, 5] is
    ``Call(..., parent_call_id="c1", shared=4, tail=np.array([5], np.int32), output=np.array([6], np.int32), ...)``.
    """

    execution_id: str
    call_id: str
    """Unique in the run."""
    seq: int
    """Position in the execution's ledger, from 0."""
    request_id: str
    """The shim's id of the HTTP request."""
    dialect: str
    """`chat`, `responses`, `anthropic` or `gemini`."""
    agent_key: str
    """Which agent of the harness asked, as far as the wire tells; empty if it does not."""
    role: Role
    role_evidence: str
    verdict: Verdict
    first_difference: int
    """Index of the first context token that differs from the best stored path; -1 if none does."""
    parent_call_id: str | None
    shared: int
    tail: Int32Array
    """[C - shared] int32."""
    output: Int32Array
    """[T] int32."""
    behaviour_logprobs: Float32Array
    """[T] float32."""
    versions: tuple[VersionRun, ...]
    """Counts add up to T."""
    sampling: Sampling
    finish: Finish
    choice_index: int = 0
    message_keys: tuple[int, ...] = ()
    """Chained xxh3 of each message of the request as the template sees it, the reply's key last."""
    shared_keys: int = 0
    """How many of the first keys are all of the parent's; the ledger stores the others only."""
    tool_ids: tuple[tuple[str, str], ...] = ()
    """(minted id, the model's own id) in order."""
    arguments: tuple[str, ...] = ()
    """Raw argument text of each tool call, as sampled."""
    body_hash: int = 0
    """xxh3 of the request body without `stream` and token limits."""
    prompt_tokens: int = 0
    """As reported to the harness."""
    delivered: Delivered = Delivered.UNKNOWN
    started_s: float = 0.0
    ended_s: float = 0.0
    cell_ids: tuple[int, ...] = ()
    """Cells that served it, in order; more than one means it was handed over."""

    @property
    def context_tokens(self) -> int:
        """Length C of the whole context, in tokens."""
        return self.shared + len(self.tail)


class ExecutionState(StrEnum):
    """Life of an execution; allowed transitions stand in ``EXECUTION_TRANSITIONS``."""

    DISPATCHED = "dispatched"
    LIVE = "live"
    FINISHED = "finished"
    CLOSED = "closed"


EXECUTION_TRANSITIONS: dict[ExecutionState, frozenset[ExecutionState]] = {
    ExecutionState.DISPATCHED: frozenset({ExecutionState.LIVE, ExecutionState.CLOSED}),
    ExecutionState.LIVE: frozenset({ExecutionState.FINISHED, ExecutionState.CLOSED}),
    ExecutionState.FINISHED: frozenset({ExecutionState.CLOSED}),
    ExecutionState.CLOSED: frozenset(),
}


class Kind(StrEnum):
    """What an execution is for: training, or evaluation with sampled or greedy decoding."""

    TRAIN = "train"
    EVAL_SAMPLED = "eval-sampled"
    EVAL_GREEDY = "eval-greedy"

    @property
    def is_evaluation(self) -> bool:
        """Whether executions of this kind stand outside the training count."""
        return self is not Kind.TRAIN


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a harness on a task.

    >>> Execution(execution_id="g3s1a0", task_id="t17", group_id=3, slot=1, attempt=0, version=2).kind.value
    'train'
    """

    execution_id: str
    task_id: str
    group_id: int
    slot: int
    attempt: int
    version: int
    """Version at dispatch v_d; for an evaluation the pinned version."""
    kind: Kind = Kind.TRAIN
    state: ExecutionState = ExecutionState.DISPATCHED


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag="scored"):
    """The evaluator gave a score.

    >>> Scored(reward=0.5, passed=4, total=8).timed_out
    False
    """

    reward: float
    passed: int
    total: int
    timed_out: bool = False
    reason: str = ""
    tests: dict[str, str] = {}
    """Test id to `passed`, `failed`, `missing` or `timeout`."""

    def __post_init__(self) -> None:
        """Refuse a reward outside [0, 1]."""
        if not 0.0 <= self.reward <= 1.0:
            raise InvariantError(f"reward {self.reward} lies outside [0, 1]")


class NoArtifact(msgspec.Struct, frozen=True, kw_only=True, tag="no_artifact"):
    """The harness made a delivered call and ended without the task's artifact: a valid reward of 0.

    Source: paper, the placeholder reward.
    """

    reason: str = ""
    total: int = 0

    @property
    def reward(self) -> float:
        """Always 0."""
        return 0.0


class EvaluationFailed(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation_failed"):
    """The evaluator broke; retried, never a reward."""

    reason: str


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag="dropped"):
    """Removed after retries; counted and shown."""

    reason: str


Outcome = Scored | NoArtifact | EvaluationFailed | Dropped


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What an execution is asked to do and how it is graded, independent of the task's format.

    Example: a minirepo task has ``instruction`` (the specification), ``files`` with the visible tests, ``artifact``
    ``("*.py",)``, and ``hidden_files`` that are put beside the candidate only after the harness has ended.
    """

    task_id: str
    format: str
    """`minirepo`, `repo` or `harbor`."""
    instruction: str
    files: dict[str, str] = {}
    """Relative path to text: what stands in the workspace at the start."""
    hidden_files: dict[str, str] = {}
    """Relative path to text: tests that the grader adds."""
    test_ids: tuple[str, ...] = ()
    """The frozen list; reward = passed / len(test_ids)."""
    artifact: tuple[str, ...] = ()
    """Glob patterns; the artifact is there if any file matches one that was not in `files`."""
    grader: str = ""
    """Which grader and version scores it."""
    scoring_limit_s: float = 60.0
    options: dict[str, Any] = {}
    """Settings of the format that only its grader reads."""
    image: str | None = None
    """Container image, if the task needs one."""


class Row(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One admitted path, ready to train.

    Example: tokens [1, 2, 3], trainable [F, F, T], one trained token of an execution with T_s = 1: weight [0, 0, 1].
    """

    execution_id: str
    leaf: int
    """Node id of the leaf in its tree."""
    role: Role
    tokens: Int32Array
    """[L] int32."""
    positions: Int32Array
    """[L] int32, depth in the tree."""
    trainable: BoolArray
    """[L] bool: the token is an admitted target that this row owns."""
    behaviour_logprobs: Float32Array
    """[L] float32, 0 where not sampled."""
    versions: Int32Array
    """[L] int32, version that sampled the token; -1 for context."""
    mixed: BoolArray
    """[L] bool: sampled on keys and values of an older version."""
    weight: Float32Array
    """[L] float32: 1 / T_s where trainable, else 0."""
    advantage: float
    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Refuse arrays of unequal length and trainable tokens without weight."""
        lengths = {
            name: len(getattr(self, name))
            for name in ("tokens", "positions", "trainable", "behaviour_logprobs", "versions", "mixed", "weight")
        }
        if len(set(lengths.values())) != 1:
            raise InvariantError(f"a row has arrays of unequal length: {lengths}")
        if bool(np.any((self.weight > 0) != self.trainable)):
            raise InvariantError("a row has a weight on a token that is not trainable, or none on one that is")
        if len(self.trainable) and bool(self.trainable[0]):
            raise InvariantError("the first token of a path has no source position and cannot be trained")

    @property
    def trained_tokens(self) -> int:
        """Number of targets that the row owns."""
        return int(self.trainable.sum())
