"""What is simulated: sizes, costs and lengths, read from a TOML that refuses unknown keys and impossible values.

A file has either the keys of one workload at its top, or ``[base]`` with keys and ``[regimes]`` and ``[paper]`` with
tables that change some of them.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta

from opengyre.core.errors import ConfigError, FileError
from opengyre.schedule.gate import RESUME_SHARE

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NotNegativeFloat = Annotated[float, Meta(ge=0)]

CELL_GPUS = 8
"""GPUs of the cell that the costs are given for."""


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of the paper that a workload is held against.

    Example: ``Published(elastic_h=75.4, async_h=134.6, colocate_h=91.5)``.
    """

    elastic_h: float | None = None
    async_h: float | None = None
    colocate_h: float | None = None
    async_ratio: tuple[float, float] | None = msgspec.field(default=None, name="async")
    """Lowest and highest ratio of the Async baseline to the elastic run."""
    colocate: tuple[float, float] | None = None


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One setting: a cluster, a job and what they cost.

    Costs are those of a cell of 8 GPUs at load 1; ``load`` multiplies the work, ``gpus / cells`` is a cell's size.

    >>> workload = Workload(cells=2)
    >>> workload.cell_size, round(workload.train_s_per_token * 1e6), round(workload.kv_capacity_tokens / 1e6)
    (2.0, 95, 48)
    """

    cells: Positive = 4
    """K."""
    gpus: Positive = 32
    """GPUs of the whole pool; they are shared evenly by the cells."""
    batch_groups: Positive = 16
    """B."""
    group_size: Annotated[int, Meta(ge=2)] = 8
    """N."""
    phi: NotNegative = 1
    """Overlap."""
    mu: Positive = 2
    """Burst: optimizer steps between two publications."""
    load: PositiveFloat = 2.5
    """Multiplies work per GPU; the weights' share of a decode step is not work per request."""
    step_weights_s: NotNegativeFloat = 0.014
    """Of a decode step: weights and launch."""
    step_request_s: NotNegativeFloat = 160e-6
    """Of a decode step: compute of each active request, the prefill of what tools answer included."""
    step_context_token_s: NotNegativeFloat = 1.36e-9
    """Of a decode step: KV read, each context token of all active requests."""
    prefill_token_s: NotNegativeFloat = 37e-6
    """Prefill of a context that is not in the cell's prefix cache."""
    migrate_token_s: NotNegativeFloat = 0.25e-6
    """Moving the KV of a token instead."""
    migrates: bool = False
    """Whether a moved execution brings its KV along; otherwise it is prefilled again."""
    kv_tokens_per_cell: PositiveFloat = 60e6
    """KV capacity."""
    gate: bool = True
    """Whether the KV gate stands before the cells; without it a full cell recomputes what it evicted."""
    train_token_s: NotNegativeFloat = 76e-6
    """Forward-backward of a trained token."""
    micro_step_tokens: PositiveFloat = 2e6
    """Trained tokens of a micro-step."""
    optimizer_s: NotNegativeFloat = 20.0
    """Reduction of the sums and optimizer step."""
    publish_s: NotNegativeFloat = 20.0
    """Publication of weights; cells in rollout mode wait."""
    switch_s: NotNegativeFloat = 45.0
    """Change of a cell's mode."""
    evaluate_s: NotNegativeFloat = 180.0
    """Scoring of an execution."""
    output_tokens: PositiveFloat = 130e3
    """Mean sampled tokens of an execution."""
    environment_s: NotNegativeFloat = 3100.0
    """Mean time of an execution in its environment."""
    trained_tokens_per_output: NotNegativeFloat = 3.9
    """Trained tokens a sampled token."""
    trained_tokens_per_output_from: NotNegativeFloat | None = None
    """A drift over the run: the first groups."""
    trained_tokens_per_output_to: NotNegativeFloat | None = None
    """A drift over the run: the last groups."""
    sigma_group: NotNegativeFloat = 0.30
    """Spread of the logarithm of the length between groups."""
    sigma_execution: NotNegativeFloat = 0.35
    """Spread within a group."""
    cap_h: PositiveFloat = 4.0
    """An execution does at most cap_h / nominal_h of the mean work: a timeout in work, equal for all rules."""
    nominal_h: PositiveFloat = 1.93
    """Hours that the mean work stands for."""
    timeout_h: PositiveFloat | None = None
    """A timeout in harness time; slow rules then do less work."""
    chunk_tokens: PositiveFloat = 8000.0
    """Sampled tokens between two visits to the environment."""
    context_low_tokens: NotNegativeFloat = 30e3
    """Context after a compaction."""
    context_high_tokens: NotNegativeFloat = 160e3
    """Context before a compaction."""
    context_period_chunks: Positive = 12
    """Chunks from one compaction to the next."""
    environment_factor_cycle: tuple[PositiveFloat, ...] = (1.0,)
    """Phases of the environment's time."""
    environment_cycle_steps: Positive = 1
    """Steps' worth of groups of each phase."""
    trace: str = ""
    """Executions of a trace or of a run instead of drawn ones: a folder or file, from the folder of the workload."""
    trace_in_order: bool = False
    """Group g, slot s takes execution g N + s of the trace (round and round) instead of one by chance."""
    trace_gap_cap_s: NotNegativeFloat = 600.0
    """Longest gap between two calls of a trace: people who went away are not the environment."""
    steps: Positive = 48
    """Optimizer steps."""
    warmup_steps: NotNegative = 4
    """Steps that hours a step leave out at the start; the last window is left out too."""
    seeds: tuple[NotNegative, ...] = (1,)
    """Seeds of the lengths."""
    async_training_cells: Positive | None = None
    """The split of the paper's Async baseline as this setting reads it."""
    published: Published | None = None
    """What the paper reports."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        if self.gpus < self.cells:
            raise ValueError(f"gpus = {self.gpus}: expected at least one for each of {self.cells} cells")
        if self.context_high_tokens < self.context_low_tokens:
            raise ValueError(f"context_high_tokens = {self.context_high_tokens:g}: expected context_low_tokens or more")
        if self.context_high_tokens > RESUME_SHARE * self.kv_capacity_tokens:
            raise ValueError(
                f"kv_tokens_per_cell = {self.kv_tokens_per_cell:g}: a cell holds {self.kv_capacity_tokens:.0f} tokens, "
                f"one context has {self.context_high_tokens:.0f}"
            )
        if (self.trained_tokens_per_output_from is None) != (self.trained_tokens_per_output_to is None):
            raise ValueError("trained_tokens_per_output_from: expected together with trained_tokens_per_output_to")
        if self.async_training_cells is not None and self.async_training_cells >= max(2, self.cells):
            raise ValueError(f"async_training_cells = {self.async_training_cells}: expected fewer than {self.cells}")
        if not self.seeds:
            raise ValueError("seeds = []: expected at least one")
        if not self.environment_factor_cycle:
            raise ValueError("environment_factor_cycle = []: expected at least one")

    @property
    def cell_size(self) -> float:
        """z: size of a cell, in cells of 8 GPUs."""
        return self.gpus / self.cells / CELL_GPUS

    @property
    def request_s(self) -> float:
        """Of a decode step on one of these cells: each active request."""
        return self.step_request_s * self.load / self.cell_size

    @property
    def context_token_s(self) -> float:
        """Of a decode step on one of these cells: each context token."""
        return self.step_context_token_s * self.load / self.cell_size

    @property
    def prefill_s_per_token(self) -> float:
        """Prefill on one of these cells."""
        return self.prefill_token_s * self.load / self.cell_size

    @property
    def move_s_per_token(self) -> float:
        """What a moved context costs the cell that takes it."""
        return self.migrate_token_s / self.cell_size if self.migrates else self.prefill_s_per_token

    @property
    def train_s_per_token(self) -> float:
        """Training on one of these cells."""
        return self.train_token_s * self.load / self.cell_size

    @property
    def kv_capacity_tokens(self) -> float:
        """What one of these cells holds."""
        return self.kv_tokens_per_cell / self.load * self.cell_size

    @property
    def measured_steps(self) -> tuple[int, int]:
        """First and last optimizer step of the measured part: whole bursts, with dispatch still going on."""
        first = -(-self.warmup_steps // self.mu) * self.mu
        last = (self.steps - self.phi - self.mu) // self.mu * self.mu
        return (first, last) if last > first else (0, self.steps)

    def trained_per_output(self, group_id: int) -> float:
        """Return trained tokens a sampled token of a group."""
        first, last = self.trained_tokens_per_output_from, self.trained_tokens_per_output_to
        if first is None or last is None:
            return self.trained_tokens_per_output
        groups = self.steps * self.batch_groups
        return first + (last - first) * (group_id + 0.5) / groups

    def environment_factor(self, group_id: int) -> float:
        """Return the phase of the environment that a group meets."""
        phase = group_id // self.batch_groups // self.environment_cycle_steps
        return self.environment_factor_cycle[phase % len(self.environment_factor_cycle)]

    def context_tokens(self, chunk: int) -> float:
        """Return the mean context in a chunk: a saw-tooth by compaction."""
        place = (chunk % self.context_period_chunks + 0.5) / self.context_period_chunks
        return self.context_low_tokens + (self.context_high_tokens - self.context_low_tokens) * place


def load_workloads(path: Path) -> dict[str, Workload]:
    """Return the workloads of a file by name; a file of one names it after itself.

    Raises:
        FileError: It cannot be read or is not TOML.
        ConfigError: A key is unknown or its value impossible.
    """
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}; expected a workload in TOML") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: {error}") from error
    if "base" not in data:
        return {path.stem: decode(data, path.name, path.parent)}
    unknown = sorted(set(data) - {"base", "regimes", "paper"})
    if unknown:
        raise ConfigError(f"{path.name}: {unknown[0]}: unknown; beside [base] stand [regimes] and [paper]")
    base = _table(data["base"], "base", path.name)
    found: dict[str, Workload] = {}
    for section in ("regimes", "paper"):
        for name, changes in _table(data.get(section, {}), section, path.name).items():
            place = f"{path.name} {section}.{name}"
            if name in found:
                raise ConfigError(f"{place}: the name stands twice")
            found[name] = decode({**base, **_table(changes, f"{section}.{name}", path.name)}, place, path.parent)
    return found or {path.stem: decode(base, f"{path.name} base", path.parent)}


def _table(value: object, key: str, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: {key} = {value!r}: expected a table")
    return value


def decode(data: dict[str, Any], place: str, folder: Path = Path()) -> Workload:
    """Return the workload of a table.

    Raises:
        ConfigError: One line that names the key.
    """
    unknown = sorted(set(data) - set(Workload.__struct_fields__))
    if unknown:
        raise ConfigError(f"{place}: {unknown[0]}: unknown key of a workload")
    try:
        workload = msgspec.convert(data, Workload)
        return msgspec.structs.replace(workload, trace=str(folder / workload.trace)) if workload.trace else workload
    except msgspec.ValidationError as error:
        _refuse(str(error), data, place, error)


def _refuse(message: str, data: dict[str, Any], place: str, cause: Exception) -> NoReturn:
    """Name the key first: msgspec puts it at the end as ``at `$.key```."""
    text, _, where = message.partition(" - at `$")
    key = where.strip("`.").partition("[")[0]
    if key in data:
        raise ConfigError(f"{place}: {key} = {data[key]!r}: {text[:1].lower()}{text[1:]}") from cause
    raise ConfigError(f"{place}: {text}") from cause
