"""From a tree and its admitted leaves to rows: tokens, targets, behaviour logprobs, versions, weights."""

from collections.abc import Sequence

import numpy as np

from opengyre.core.types import Row
from opengyre.trajectory.admission import AdmittedLeaf
from opengyre.trajectory.tree import TrajectoryTree, TreeCall


def rows_of(tree: TrajectoryTree, leaves: Sequence[AdmittedLeaf], *, advantage: float) -> list[Row]:
    """Return one row for each admitted leaf; weights are 1 / T_s over all of them.

    Source: paper, average inside an execution. Choice: T_s counts admitted trainable tokens.
    """
    trained = sum(leaf.trained_tokens for leaf in leaves)
    versions, mixed = _call_versions(tree.calls)
    return [_row(tree, leaf, advantage, trained, versions, mixed) for leaf in leaves]


def _call_versions(calls: Sequence[TreeCall]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    versions, mixed = [], []
    for call in calls:
        counts = [run.count for run in call.versions]
        versions.append(np.repeat(np.array([run.version for run in call.versions], np.int32), counts))
        mixed.append(np.repeat(np.array([run.mixed for run in call.versions], bool), counts))
    return versions, mixed


def _row(
    tree: TrajectoryTree,
    leaf: AdmittedLeaf,
    advantage: float,
    trained: int,
    call_versions: list[np.ndarray],
    call_mixed: list[np.ndarray],
) -> Row:
    path = tree.path(leaf.node)
    owned = set(leaf.owned)
    nodes = [tree.nodes[number] for number in path]
    tokens = np.concatenate([node.tokens for node in nodes])
    owners = np.concatenate([node.owners for node in nodes])
    mine = np.concatenate([np.full(len(tree.nodes[number].tokens), number in owned) for number in path])
    trainable = (owners >= 0) & mine
    depth = np.arange(len(tokens), dtype=np.int32)
    versions = np.full(len(tokens), -1, np.int32)
    mixed = np.zeros(len(tokens), bool)
    for owner in np.unique(owners[trainable]):
        places = depth[trainable & (owners == owner)]
        offsets = places - len(tree.calls[owner].context)
        versions[places] = call_versions[owner][offsets]
        mixed[places] = call_mixed[owner][offsets]
    return Row(
        execution_id=tree.execution_id,
        leaf=leaf.node,
        role=leaf.role,
        tokens=tokens,
        positions=depth,
        trainable=trainable,
        behaviour_logprobs=np.where(trainable, np.concatenate([node.logprobs for node in nodes]), 0).astype(np.float32),
        versions=versions,
        mixed=mixed,
        weight=np.where(trainable, 1.0 / max(1, trained), 0).astype(np.float32),
        advantage=advantage,
        temperature=tree.calls[leaf.call].temperature,
    )
