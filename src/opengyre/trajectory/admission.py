"""Bounded admission: which leaves of an execution are trained, at most J_max of them.

Source: paper, role order and the mask. Choice: inside a role leaves are drawn in proportion to their trainable tokens
that are not covered yet; leaves that add nothing are skipped and cost nothing; ownership is decided here.
"""

from dataclasses import dataclass

import xxhash

from opengyre.core.types import Role
from opengyre.trajectory.tree import ROOT, TrajectoryTree


@dataclass(frozen=True)
class AdmittedLeaf:
    """A leaf that is trained, and the nodes whose targets it owns.

    Example: the second leaf behind a shared trunk owns only what follows the fork.
    """

    call: int
    """Index of the call whose output ends the leaf."""
    node: int
    role: Role
    owned: tuple[int, ...]
    """Nodes of its path that no leaf before it has covered."""
    trained_tokens: int


def admit(tree: TrajectoryTree, *, max_leaves: int, seed: int) -> list[AdmittedLeaf]:
    """Return the admitted leaves in order.

    Args:
        tree: The execution's tree.
        max_leaves: J_max; 0 means without a cap.
        seed: Decides the draws inside a role; a function of run, step and execution.
    """
    sampled = [node.sampled for node in tree.nodes]
    covered = [False] * len(tree.nodes)
    order = list(tree.preorder())
    by_role: dict[Role, list[int]] = {}
    for index in tree.candidates():
        if tree.calls[index].role is not Role.AUXILIARY:
            by_role.setdefault(tree.calls[index].role, []).append(index)
    admitted: list[AdmittedLeaf] = []
    draw = 0
    for role in Role:
        waiting = by_role.get(role, [])
        while waiting and (not max_leaves or len(admitted) < max_leaves):
            uncovered = _uncovered(tree, order, sampled, covered)
            gains = [uncovered[tree.call_ends[index]] for index in waiting]
            if not any(gains):
                break
            chosen = _weighted(gains, seed, draw)
            draw += 1
            index = waiting.pop(chosen)
            node = tree.call_ends[index]
            owned = tuple(number for number in tree.path(node) if not covered[number])
            for number in owned:
                covered[number] = True
            admitted.append(AdmittedLeaf(index, node, role, owned, gains[chosen]))
    return admitted


def _uncovered(tree: TrajectoryTree, order: list[int], sampled: list[int], covered: list[bool]) -> list[int]:
    """Return for each node the trainable tokens of its path that no admitted leaf covers, in one pass."""
    found = [0] * len(order)
    for node in order:
        if not covered[node]:
            parent = tree.nodes[node].parent
            found[node] = sampled[node] + (found[parent] if parent != ROOT else 0)
    return found


def _weighted(gains: list[int], seed: int, draw: int) -> int:
    """Return an index drawn in proportion to the gains.

    >>> _weighted([0, 5, 0], seed=1, draw=0)
    1
    """
    total = sum(gains)
    key = seed.to_bytes(16, "little", signed=True) + draw.to_bytes(8, "little")
    target = xxhash.xxh3_64_intdigest(key) * total >> 64
    for index, gain in enumerate(gains):
        target -= gain
        if target < 0:
            return index
    return len(gains) - 1
