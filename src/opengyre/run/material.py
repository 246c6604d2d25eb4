"""From the recorded calls of a complete group to its micro-steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from opengyre.algorithm.advantage import advantages
from opengyre.core.config import Config
from opengyre.core.types import Call, Row
from opengyre.run.groups import GroupState
from opengyre.trajectory.admission import admit
from opengyre.trajectory.recorded import tree_of
from opengyre.trajectory.rows import rows_of


@dataclass(frozen=True, kw_only=True)
class GroupMaterial:
    """What a complete group brings to its step.

    Example: 8 valid executions of different rewards with 4 leaves each give 32 rows in a few micro-steps.
    """

    group_id: int
    version: int
    rewards: tuple[float, ...]
    micro_steps: dict[str, tuple[Row, ...]]
    executions: int
    """Valid executions with admitted tokens (their part of S), those with A = 0 included."""
    is_spent: bool
    has_variance: bool
    leaves: int
    trained_tokens: int
    trainable_tokens: int
    mixed_tokens: int

    @property
    def rows(self) -> int:
        """Rows of all micro-steps."""
        return sum(len(rows) for rows in self.micro_steps.values())


def material_of(group: GroupState, calls: Mapping[str, Sequence[Call]], config: Config) -> GroupMaterial:
    """Return advantages, trees, admitted leaves, rows and micro-steps of a complete group.

    Args:
        group: Its slots are all closed.
        calls: Recorded calls of each valid execution.
        config: Admission, advantages and micro-step size.
    """
    algorithm = config.algorithm
    values = advantages(group.valid_rewards, eps=algorithm.advantage_eps, use_std=algorithm.advantage_std)
    rows: list[Row] = []
    executions = leaves = trained = trainable = 0
    for execution_id, advantage in zip(group.valid_executions, values, strict=True):
        tree = tree_of(execution_id, calls[execution_id])
        seed = xxhash.xxh3_64_intdigest(f"{config.run.seed}/{group.group_id}/{execution_id}".encode())
        admitted = admit(tree, max_leaves=algorithm.max_leaves, seed=seed)
        tokens = sum(leaf.trained_tokens for leaf in admitted)
        executions += tokens > 0
        leaves += len(tree.candidates())
        trained += tokens
        trainable += tree.sampled_tokens
        if advantage:
            rows += rows_of(tree, admitted, advantage=advantage)
    return GroupMaterial(
        group_id=group.group_id,
        version=group.version,
        rewards=group.valid_rewards,
        micro_steps=cut_micro_steps(rows, group_id=group.group_id, tokens=config.train.micro_step_tokens),
        executions=executions,
        is_spent=len(group.valid_rewards) < 2,
        has_variance=any(values),
        leaves=leaves,
        trained_tokens=trained,
        trainable_tokens=trainable,
        mixed_tokens=sum(int(row.mixed.sum()) for row in rows),
    )


def cut_micro_steps(rows: Sequence[Row], *, group_id: int, tokens: int) -> dict[str, tuple[Row, ...]]:
    """Return rows of similar length cut into micro-steps of at most ``tokens`` padded tokens, in a fixed order."""
    ordered = sorted(rows, key=lambda row: (len(row.tokens), row.execution_id, row.leaf))
    cut: list[list[Row]] = []
    for row in ordered:
        if not cut or len(row.tokens) * (len(cut[-1]) + 1) > tokens:
            cut.append([])
        cut[-1].append(row)
    return {f"g{group_id:05d}-m{index:02d}": tuple(part) for index, part in enumerate(cut)}


def row_name(row: Row) -> str:
    """Return the name under which a row stands in the ledger."""
    return f"{row.execution_id}/{row.leaf}"
