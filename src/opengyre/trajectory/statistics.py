"""What a tree holds, counted: the figures of ``opengyre trees``."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from opengyre.core.types import Role, Verdict
from opengyre.trajectory.admission import AdmittedLeaf
from opengyre.trajectory.tree import Exclusion, TrajectoryTree


class AdmittedCount(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted leaf.

    >>> AdmittedCount(role=Role.MAIN, trained_tokens=12).trained_tokens
    12
    """

    role: Role
    trained_tokens: int


class TreeStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one execution, or of several in sum.

    Example: p[1,2]g[3,4]; p[1,2,3,4,5]g[6] gives 2 calls, 1 root, 2 nodes, ``leaves={"main": 1}``, 10 summed tokens,
    6 unique ones, 3 sampled ones.
    """

    execution_id: str
    calls: int
    roots: int
    nodes: int
    leaves: dict[str, int]
    """Candidates by role."""
    summed_tokens: int
    unique_tokens: int
    sampled_tokens: int
    """Targets that could be trained, shared ones counted once."""
    admitted: tuple[AdmittedCount, ...]
    orphan: int
    vanished: int
    poisoned: int
    truncated: int
    auxiliary: int
    duplicate_tokens: int
    """Sampled again at the same place: trained once, under the canonical call."""
    restored: int = 0
    rendered: int = 0
    rewritten: int = 0

    @property
    def ratio(self) -> float:
        """Summed over unique tokens."""
        return self.summed_tokens / self.unique_tokens if self.unique_tokens else 0.0

    @property
    def trained_tokens(self) -> int:
        """Of all admitted leaves."""
        return sum(leaf.trained_tokens for leaf in self.admitted)


def statistics_of(
    tree: TrajectoryTree, admitted: Sequence[AdmittedLeaf], *, verdicts: Sequence[Verdict] = ()
) -> TreeStatistics:
    """Return the figures of a tree and its admitted leaves."""
    leaves = Counter(tree.calls[index].role for index in tree.candidates())
    reasons = Counter(call.exclusion for call in tree.calls)
    judged = Counter(verdicts)
    sampled = tree.sampled_tokens
    captured = sum(
        call.output_tokens - (not call.context_tokens)
        for call in tree.calls
        if call.exclusion is Exclusion.NONE and call.output_tokens
    )
    return TreeStatistics(
        execution_id=tree.execution_id,
        calls=len(tree.calls),
        roots=len(tree.roots),
        nodes=len(tree.nodes),
        leaves={role.value: leaves[role] for role in Role if leaves[role]},
        summed_tokens=tree.summed_tokens,
        unique_tokens=tree.unique_tokens,
        sampled_tokens=sampled,
        admitted=tuple(AdmittedCount(role=leaf.role, trained_tokens=leaf.trained_tokens) for leaf in admitted),
        orphan=reasons[Exclusion.ORPHAN],
        vanished=reasons[Exclusion.VANISHED],
        poisoned=reasons[Exclusion.POISONED],
        truncated=reasons[Exclusion.TRUNCATED],
        auxiliary=reasons[Exclusion.AUXILIARY],
        duplicate_tokens=captured - sampled,
        restored=judged[Verdict.RESTORED],
        rendered=judged[Verdict.RENDERED],
        rewritten=judged[Verdict.REWRITTEN],
    )


def total_of(parts: Sequence[TreeStatistics]) -> TreeStatistics:
    """Return the sum of several executions; admitted leaves are joined by role."""
    leaves: Counter[str] = Counter()
    admitted: Counter[Role] = Counter()
    for part in parts:
        leaves.update(part.leaves)
        for leaf in part.admitted:
            admitted[leaf.role] += leaf.trained_tokens

    def summed(name: str) -> int:
        return sum(int(getattr(part, name)) for part in parts)

    counts = {
        name: summed(name)
        for name in TreeStatistics.__struct_fields__
        if name not in ("execution_id", "leaves", "admitted")
    }
    return TreeStatistics(
        execution_id="",
        leaves={role.value: leaves[role.value] for role in Role if leaves[role.value]},
        admitted=tuple(AdmittedCount(role=role, trained_tokens=admitted[role]) for role in Role if role in admitted),
        **counts,
    )
