"""The configuration of a run: one TOML file, decoded into frozen structs that refuse unknown keys.

Symbols of the paper stand behind the keys that carry them: ``cells`` K, ``batch_groups`` B, ``group_size`` N,
``burst`` mu, ``overlap`` phi, ``max_leaves`` J_max. Q_b is the property ``dispatch_depth``.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta

from opengyre.core.errors import ConfigError

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NotNegativeFloat = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections."""


class RunSection(_Section, frozen=True, kw_only=True):
    """What the run is."""

    steps: Positive = 24
    """Optimizer steps."""
    seed: NotNegative = 0
    """Of the whole run: tasks, sampling, admission."""
    checkpoint_every: Positive = 1
    """Optimizer steps between two checkpoints."""
    stall_s: PositiveFloat = 120.0
    """Without progress for so long, the watchdog prints what the step waits for."""


class PolicySection(_Section, frozen=True, kw_only=True):
    """The model that is trained."""

    path: str = ""
    """Folder of a transformers model; empty: the embedded policy, made by the warm start."""
    hidden_size: Positive = 128
    """Width of the embedded policy."""
    layers: Positive = 4
    """Layers of the embedded policy."""
    heads: Positive = 4
    """Attention heads of the embedded policy."""
    kv_heads: Positive = 2
    """Key and value heads of the embedded policy."""
    mlp_size: Positive = 256
    """Inner width of the embedded policy's MLP."""
    context_tokens: Positive = 1024
    """Longest context plus output that the policy serves."""
    warm_start: dict[str, float] = {}
    """Overrides of the warm start's recipe (`demonstrations`, `copy_steps`, ...); its keys are checked there."""


class CellsSection(_Section, frozen=True, kw_only=True):
    """The cells of the run."""

    count: Positive = 2
    """K."""
    launcher: Literal["local", "ray"] = "local"
    """`local`: an OS process a cell; `ray`: an actor a cell."""
    engine: Literal["reference", "emulated"] = "reference"
    """`reference`: computes; `emulated`: sleeps for as long as the costs in `options` say, and answers from scripts."""
    kv_tokens: Positive = 65536
    """Key and value capacity of a cell, in tokens."""
    max_running: Positive = 64
    """Calls that a cell decodes at once; the rest queue."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where a cell computes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and cache in rollout mode."""
    fixed_order: bool = False
    """Add gradients micro-step by micro-step in a fixed order: the same bits on any cells, for more memory."""
    options: dict[str, Any] = {}
    """Settings of the engine: the costs of the emulated one (`step_weights_s`, `train_token_s`, ...)."""


class ScheduleSection(_Section, frozen=True, kw_only=True):
    """Dispatch, staleness and the switch rule."""

    batch_groups: Positive = 4
    """B: groups a step."""
    group_size: Annotated[int, Meta(ge=2)] = 8
    """N: executions a group."""
    overlap: NotNegative = 1
    """phi."""
    burst: Positive = 1
    """mu: optimizer steps between two publications."""
    rule: Literal["waterlevel", "static", "colocate", "lookahead"] = "waterlevel"
    """When a cell changes mode."""
    theta: PositiveFloat = 0.7
    """Waterlevel: share of the dispatch window that one cell carries."""
    floor: NotNegative = 0
    """Waterlevel: cells that always train."""
    queue: NotNegative = 1
    """Waterlevel: micro-steps that must wait for each cell that already trains."""
    training_cells: NotNegative = 1
    """Static: cells that train."""
    streaming: bool = True
    """Static: micro-steps of a group are run as soon as it has a place, not only when the batch is full."""
    ahead: bool = True
    """Colocate: dispatch ahead of consumption."""
    dispatch_on: Literal["publication", "consumption"] = "publication"
    """When groups are dispatched; `consumption` slides and has no staleness bound."""
    redispatch: NotNegative = 1
    """Times a dropped attempt is dispatched again."""
    starts_per_s: PositiveFloat = 200.0
    """Executions started a second at most."""
    live_limit: Positive = 96
    """Executions live at once at most; the rest are queued and count in w."""

    @property
    def dispatch_depth(self) -> int:
        """Q_b = (phi + mu) * B, in groups.

        Source: paper, Q_b.
        """
        return (self.overlap + self.burst) * self.batch_groups


class RolloutSection(_Section, frozen=True, kw_only=True):
    """How training calls are sampled and published to."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature of trained calls."""
    publish: Literal["in-flight", "drain"] = "in-flight"
    """What a call does at a publication: go on with the new weights, or finish on the old ones."""
    drain_s: PositiveFloat = 600.0
    """With `drain`, the longest wait."""
    hand_over: Literal["auto", "migrate", "prefill"] = "auto"
    """How a live call changes cells; `auto` chooses by estimated cost."""


class AlgorithmSection(_Section, frozen=True, kw_only=True):
    """Admission, advantages and the loss."""

    max_leaves: NotNegative = 5
    """J_max; 0 means without a cap."""
    advantage_eps: NotNegativeFloat = 1e-6
    """Added to the standard deviation."""
    advantage_std: bool = True
    """Divide by the standard deviation of the group."""
    clip_low: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """Lower bound of the ratio is 1 - clip_low (`clipped`)."""
    clip_high: NotNegativeFloat = 0.28
    """Upper bound of the ratio is 1 + clip_high (`clipped`)."""
    importance: Literal["clipped", "truncated", "masked"] = "truncated"
    """Clipped surrogate, truncated importance weights, or masked importance weights."""
    importance_cap: PositiveFloat = 2.0
    """Truncated: cap; masked: upper bound of the kept interval."""
    importance_floor: NotNegativeFloat = 0.5
    """Masked: lower bound of the kept interval."""


class TrainSection(_Section, frozen=True, kw_only=True):
    """The optimizer and the micro-steps."""

    learning_rate: PositiveFloat = 3e-4
    """AdamW, after the warm-up."""
    warm_up_steps: NotNegative = 0
    """Steps over which the learning rate rises along a line: Adam's first steps are all noise at full length."""
    learning_rate_end: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the learning rate that is left in the last step; it falls along a line."""
    beta1: Share = 0.9
    """AdamW."""
    beta2: Share = 0.95
    """AdamW."""
    weight_decay: NotNegativeFloat = 0.0
    """AdamW."""
    gradient_clip: PositiveFloat = 0.5
    """Largest gradient norm."""
    micro_step_tokens: Positive = 2048
    """Target size of a micro-step, in row tokens."""
    packing: Literal["rows", "tree"] = "rows"
    """`rows`: one row a leaf; `tree`: shared prefixes of an execution are computed once."""
    options: dict[str, Any] = {}
    """Settings of a trainer that is not ours, passed through."""


class TasksSection(_Section, frozen=True, kw_only=True):
    """Where tasks come from."""

    source: str = "minirepo"
    """`minirepo` or a folder of tasks."""
    train_count: Positive = 512
    """Training tasks."""
    heldout_count: Positive = 128
    """Held-out tasks."""
    unchecked: bool = False
    """Use tasks that `opengyre tasks check` did not accept."""
    options: dict[str, Any] = {}
    """`heldout`: folder of the held-out tasks, where `source` is a folder."""


class HarnessSection(_Section, frozen=True, kw_only=True):
    """The agent that works on the tasks."""

    name: str = "gyre-agent"
    """A shipped harness, or `command`."""
    max_calls: Positive = 20
    """Calls of an execution, where the harness can be told."""
    timeout_s: PositiveFloat = 120.0
    """Harness time after which the execution is ended and its workspace scored."""
    overall_timeout_s: PositiveFloat = 900.0
    """Wall time after which an execution is dropped."""
    options: dict[str, Any] = {}
    """Settings of the harness."""


class SandboxSection(_Section, frozen=True, kw_only=True):
    """Isolation of an execution."""

    kind: Literal["auto", "bubblewrap", "landlock", "none"] = "auto"
    """`auto`: the strongest that works here; `none` has to be written down."""
    memory_bytes: Positive = 512 * 1024 * 1024
    """Address space of a process in the sandbox."""
    processes: Positive = 64
    """Processes of an execution."""
    disk_bytes: Positive = 64 * 1024 * 1024
    """Workspace."""


class EvaluationSection(_Section, frozen=True, kw_only=True):
    """Held-out evaluation inside the run."""

    at: tuple[NotNegative, ...] = (0, 24)
    """Versions that are evaluated."""
    tasks: NotNegative = 128
    """Held-out tasks each time; 0 switches evaluation off."""
    greedy: bool = True
    """Evaluate greedy decoding beside sampled."""
    retries: NotNegative = 2
    """Times a failed scoring is tried again."""
    workers: Positive = 1
    """Scorings at once."""


class ProxySection(_Section, frozen=True, kw_only=True):
    """The proxy and the ledger."""

    keep_bodies: bool = False
    """Keep requests and answers as they went over the wire, without keys and ids of accounts and devices."""
    body_limit_bytes: Positive = 64 * 1024 * 1024
    """Largest request body."""
    hold_s: PositiveFloat = 3600.0
    """How long a shim holds a harness without a proxy."""


class Config(_Section, frozen=True, kw_only=True):
    """A whole run.

    >>> config = decode_config({"run": {"steps": 2}, "schedule": {"overlap": 1, "burst": 1, "batch_groups": 4}})
    >>> config.schedule.dispatch_depth
    8
    """

    run: RunSection = RunSection()
    policy: PolicySection = PolicySection()
    cells: CellsSection = CellsSection()
    schedule: ScheduleSection = ScheduleSection()
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    train: TrainSection = TrainSection()
    tasks: TasksSection = TasksSection()
    harness: HarnessSection = HarnessSection()
    sandbox: SandboxSection = SandboxSection()
    evaluation: EvaluationSection = EvaluationSection()
    proxy: ProxySection = ProxySection()

    def __post_init__(self) -> None:
        """Check what needs more than one key."""
        schedule, harness = self.schedule, self.harness
        if schedule.rule == "static" and not 1 <= schedule.training_cells < self.cells.count:
            _refuse(
                "schedule.training_cells", schedule.training_cells, f"1 to cells.count - 1 = {self.cells.count - 1}"
            )
        if schedule.floor >= self.cells.count:
            _refuse("schedule.floor", schedule.floor, f"0 to cells.count - 1 = {self.cells.count - 1}")
        if harness.overall_timeout_s <= harness.timeout_s:
            _refuse(
                "harness.overall_timeout_s", harness.overall_timeout_s, f"more than timeout_s = {harness.timeout_s}"
            )
        if self.policy.heads % self.policy.kv_heads:
            _refuse("policy.kv_heads", self.policy.kv_heads, f"a divisor of heads = {self.policy.heads}")
        if self.policy.hidden_size % self.policy.heads:
            _refuse("policy.hidden_size", self.policy.hidden_size, f"a multiple of heads = {self.policy.heads}")
        if self.evaluation.tasks > self.tasks.heldout_count:
            _refuse(
                "evaluation.tasks", self.evaluation.tasks, f"at most tasks.heldout_count = {self.tasks.heldout_count}"
            )


def _refuse(key: str, seen: object, expected: str) -> NoReturn:
    raise ConfigError(f"{key} = {seen!r}: expected {expected}")


def decode_config(table: dict[str, Any]) -> Config:
    """Return the configuration of a decoded TOML table.

    Raises:
        ConfigError: A key is unknown, of the wrong type or out of range; the message names it.
    """
    try:
        return msgspec.convert(table, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_readable(str(error))) from error


def _readable(message: str) -> str:
    """Turn msgspec's ``... - at `$.run.steps` `` into ``run.steps: ...``."""
    text, _, path = message.partition(" - at `$")
    key = path.rstrip("`").lstrip(".")
    if "unknown field" in text:
        field = text.rsplit("`", 2)[1]
        return f"{key + '.' if key else ''}{field}: no such key"
    return f"{key}: {text}" if key else text


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply ``section.key=value`` overrides (the value is TOML).

    Raises:
        ConfigError: The file is missing or not TOML, or a key is wrong.
    """
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    for override in overrides:
        _apply_override(table, override)
    return decode_config(table)


def _apply_override(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2:
        raise ConfigError(f"--set {override}: expected section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    section = table
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(f"--set {override}: {part} is not a section")
    section[parts[-1]] = value
