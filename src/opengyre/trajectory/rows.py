"""From a tree and its admitted leaves to rows: tokens, targets, behaviour logprobs, versions, weights."""

from collections.abc import Sequence

import numpy as np

from opengyre.core.errors import InvariantError
from opengyre.core.types import BoolArray, Float32Array, Int32Array, Row
from opengyre.trajectory.admission import AdmittedLeaf
from opengyre.trajectory.tree import StoredCall, TrajectoryTree


def rows_of(tree: TrajectoryTree, leaves: Sequence[AdmittedLeaf], *, advantage: float) -> list[Row]:
    """Return one row for each admitted leaf; weights are 1 / T_s over all of them.

    Source: paper, average inside an execution. Choice: T_s counts admitted trainable tokens.

    Raises:
        InvariantError: The tree is approximate: its ids were rendered, so they are not what was sampled.
    """
    if tree.is_approximate:
        raise InvariantError(f"execution {tree.execution_id!r} has rendered token ids and must not be trained")
    trained = sum(leaf.trained_tokens for leaf in leaves)
    return [_row(tree, leaf, advantage=advantage, trained=trained) for leaf in leaves]


def _row(tree: TrajectoryTree, leaf: AdmittedLeaf, *, advantage: float, trained: int) -> Row:
    owned = set(leaf.owned)
    nodes = [(tree.nodes[number], number in owned) for number in tree.path(leaf.node)]
    tokens = np.concatenate([node.tokens for node, _ in nodes])
    trainable = np.zeros(len(tokens), bool)
    logprobs = np.zeros(len(tokens), np.float32)
    versions = np.full(len(tokens), -1, np.int32)
    mixed = np.zeros(len(tokens), bool)
    for node, is_owned in nodes:
        first = node.start + node.span_start
        for owner in np.unique(node.span[node.span >= 0]) if is_owned else ():
            call = tree.calls[owner]
            places = np.flatnonzero(node.span == owner) + first
            offsets = places - call.context_tokens
            trainable[places] = True
            logprobs[places] = call.logprobs[offsets]
            call_versions, call_mixed = token_versions(call)
            versions[places], mixed[places] = call_versions[offsets], call_mixed[offsets]
    return Row(
        execution_id=tree.execution_id,
        leaf=leaf.node,
        role=leaf.role,
        tokens=tokens,
        positions=np.arange(len(tokens), dtype=np.int32),
        trainable=trainable,
        behaviour_logprobs=logprobs,
        versions=versions,
        mixed=mixed,
        weight=_weights(trainable, trained),
        advantage=advantage,
        temperature=tree.calls[leaf.call].temperature,
    )


def _weights(trainable: BoolArray, trained: int) -> Float32Array:
    return np.where(trainable, 1.0 / max(1, trained), 0.0).astype(np.float32)


def token_versions(call: StoredCall) -> tuple[Int32Array, BoolArray]:
    """Return for each output token its version and whether it is mixed, both [T]."""
    counts = [run.count for run in call.versions]
    versions = np.repeat(np.array([run.version for run in call.versions], np.int32), counts)
    mixed = np.repeat(np.array([run.mixed for run in call.versions], bool), counts)
    return versions, mixed
