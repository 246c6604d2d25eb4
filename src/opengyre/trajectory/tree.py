"""The prefix-sharing tree of an execution's calls, built from exact token ids.

A node is a run of tokens that no call forks inside and no call's output ends inside. A token is sampled if a trainable
call sampled it, else context; sampled beats context. Two calls that sampled the same tokens at the same place share one
target, whose logprobs are the canonical call's: the one with the smallest (first version, request id). So the tree is a
join of its calls, and the order of insertion does not matter.

Source: paper, the tree of an execution. Choice: splits inside an output, the canonical call, 12 bytes a unique token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from opengyre.core.errors import InvariantError
from opengyre.core.types import Float32Array, Int32Array, Role, VersionRun

ROOT = -1
_EMPTY_INT = np.zeros(0, np.int32)


class Exclusion(StrEnum):
    """Why the output of a call is context and not trained."""

    NONE = "none"
    ORPHAN = "orphan"
    VANISHED = "vanished"
    POISONED = "poisoned"
    TRUNCATED = "truncated"
    AUXILIARY = "auxiliary"


@dataclass(frozen=True, kw_only=True)
class TreeCall:
    """A call as the tree needs it.

    Example: ``TreeCall(call_id="c1", request_id="r1", agent="main", role=Role.MAIN, context=context, output=output,
    logprobs=logprobs, versions=(VersionRun(0, len(output)),))``.
    """

    call_id: str
    request_id: str
    agent: str
    role: Role
    context: Int32Array
    output: Int32Array
    logprobs: Float32Array
    versions: tuple[VersionRun, ...]
    exclusion: Exclusion = Exclusion.NONE
    temperature: float = 1.0

    @property
    def rank(self) -> tuple[int, str, str]:
        """Order in which calls own a shared target; the smallest wins."""
        return (self.versions[0].version if self.versions else 0, self.request_id, self.call_id)


@dataclass
class Node:
    """A run of tokens.

    Example: after p[1,2]g[3,4] and p[1,2,3,9]g[5] the nodes are [1,2,3], [4] and [9,5].
    """

    parent: int
    start: int
    """Depth of its first token."""
    tokens: Int32Array
    owners: Int32Array
    """[n] index of the call that owns the sampled token, -1 for context."""
    logprobs: Float32Array
    """[n], 0 for context."""
    children: dict[int, int] = field(default_factory=dict)
    """First token to node."""
    ends: list[int] = field(default_factory=list)
    """Calls whose output ends with the node's last token."""

    @property
    def end(self) -> int:
        """Depth behind its last token."""
        return self.start + len(self.tokens)

    @property
    def sampled(self) -> int:
        """Tokens that can be trained."""
        return int((self.owners >= 0).sum())


class TrajectoryTree:
    """The tree of one execution; several roots are allowed.

    Args:
        execution_id: Whose calls they are.
    """

    def __init__(self, execution_id: str = "") -> None:
        self.execution_id = execution_id
        self.nodes: list[Node] = []
        self.calls: list[TreeCall] = []
        self.call_ends: list[int] = []
        """Node at whose end each call's output ends; -1 for a call without output."""
        self._roots: dict[int, int] = {}
        self._seen: dict[str, int] = {}
        self._recent: list[tuple[Int32Array, int]] = []
        """Last paths: their tokens and their end node."""

    # -- building ---------------------------------------------------------------------------------------------

    def insert(self, call: TreeCall) -> None:
        """Add a call; adding it again changes nothing.

        Raises:
            InvariantError: Another call has the same id.
        """
        known = self._seen.get(call.call_id)
        if known is not None:
            if not _same(self.calls[known], call):
                raise InvariantError(f"two different calls have the id {call.call_id}")
            return
        index = len(self.calls)
        self._seen[call.call_id] = index
        self.calls.append(call)
        self.call_ends.append(ROOT)
        if not len(call.output) or not len(call.context):
            return
        path = np.concatenate((call.context, call.output))
        node, depth = self._descend(path)
        if depth < len(path):
            node = self._append(node, depth, path)
        elif self.nodes[node].end > depth:
            node = self._split(node, depth)
        self.nodes[node].ends.append(index)
        self.call_ends[index] = node
        if call.exclusion is Exclusion.NONE:
            self._own(index, node)
        self._remember(path, node)

    def _remember(self, path: Int32Array, node: int) -> None:
        self._recent.insert(0, (path, node))
        del self._recent[6:]

    def _descend(self, path: Int32Array) -> tuple[int, int]:
        """Return the node in or at whose end the longest common prefix ends, and its length."""
        node, depth = self._nearest(path)
        while depth < len(path):
            if node != ROOT and depth < self.nodes[node].end:
                current = self.nodes[node]
                have = current.tokens[depth - current.start :]
                matched = common_prefix(have, path[depth : depth + len(have)])
                depth += matched
                if matched < len(have):
                    return node, depth
                continue
            children = self._roots if node == ROOT else self.nodes[node].children
            child = children.get(int(path[depth]))
            if child is None:
                return node, depth
            node = child
        return node, depth

    def _nearest(self, path: Int32Array) -> tuple[int, int]:
        """Return a good place to start from: inside the recent path that shares most."""
        best, depth = ROOT, 0
        for tokens, end in self._recent:
            shared = common_prefix(tokens, path)
            if shared > depth:
                best, depth = end, shared
                if shared == len(tokens):
                    break
        while best != ROOT and self.nodes[best].start >= depth:
            best = self.nodes[best].parent
        return best, depth

    def _append(self, node: int, depth: int, path: Int32Array) -> int:
        """Hang ``path[depth:]`` below a node, splitting it first if the path leaves in its middle."""
        if node != ROOT and self.nodes[node].end > depth:
            node = self._split(node, depth)
        tail = path[depth:].copy()
        fresh = Node(node, depth, tail, np.full(len(tail), -1, np.int32), np.zeros(len(tail), np.float32))
        self.nodes.append(fresh)
        children = self._roots if node == ROOT else self.nodes[node].children
        children[int(tail[0])] = len(self.nodes) - 1
        return len(self.nodes) - 1

    def _split(self, node: int, depth: int) -> int:
        """Cut a node at a depth and return its upper part; the lower part keeps its number."""
        lower = self.nodes[node]
        cut = depth - lower.start
        upper = Node(lower.parent, lower.start, lower.tokens[:cut], lower.owners[:cut], lower.logprobs[:cut])
        self.nodes.append(upper)
        number = len(self.nodes) - 1
        siblings = self._roots if lower.parent == ROOT else self.nodes[lower.parent].children
        siblings[int(upper.tokens[0])] = number
        lower.tokens, lower.owners, lower.logprobs = lower.tokens[cut:], lower.owners[cut:], lower.logprobs[cut:]
        lower.parent, lower.start = number, depth
        upper.children[int(lower.tokens[0])] = node
        return number

    def _own(self, index: int, node: int) -> None:
        """Make the call the owner of its output where nobody of smaller rank owns it."""
        call = self.calls[index]
        first = len(call.context)
        while node != ROOT and self.nodes[node].end > first:
            current = self.nodes[node]
            low = max(first, current.start)
            place = slice(low - current.start, current.end - current.start)
            source = slice(low - first, current.end - first)
            owners = current.owners[place]
            mine = owners < 0
            for other in np.unique(owners[~mine]):
                if call.rank < self.calls[other].rank:
                    mine |= owners == other
            owners[mine] = index
            current.logprobs[place][mine] = call.logprobs[source][mine]
            node = current.parent

    # -- reading ----------------------------------------------------------------------------------------------

    @property
    def roots(self) -> tuple[int, ...]:
        """Nodes without a parent."""
        return tuple(self._roots.values())

    @property
    def unique_tokens(self) -> int:
        """Tokens of all nodes."""
        return sum(len(node.tokens) for node in self.nodes)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that can be trained."""
        return sum(node.sampled for node in self.nodes)

    def path(self, node: int) -> list[int]:
        """Return the nodes from a root down to a node."""
        found: list[int] = []
        while node != ROOT:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def preorder(self) -> Iterator[int]:
        """Yield nodes parents first, siblings by first token."""
        stack = [self._roots[token] for token in sorted(self._roots, reverse=True)]
        while stack:
            node = stack.pop()
            yield node
            children = self.nodes[node].children
            stack += [children[token] for token in sorted(children, reverse=True)]

    def candidates(self) -> list[int]:
        """Return one call for each candidate: its output has no descendant output of the same agent and role.

        Choice: so a main path that only a summary call continues is still a main candidate.
        """
        bits: dict[tuple[str, Role], int] = {}
        for call in self.calls:
            bits.setdefault((call.agent, call.role), 1 << len(bits))
        below: dict[int, int] = {}
        found: list[int] = []
        for node in reversed(list(self.preorder())):
            mask = 0
            for child in self.nodes[node].children.values():
                mask |= below[child]
            here = 0
            for index in sorted(self.nodes[node].ends, key=lambda number: self.calls[number].rank):
                call = self.calls[index]
                bit = bits[call.agent, call.role]
                if not (mask | here) & bit:
                    found.append(index)
                here |= bit
            below[node] = mask | here
        return sorted(found, key=lambda index: self.calls[index].call_id)


def common_prefix(one: Int32Array, other: Int32Array) -> int:
    """Return the length of the longest common prefix of two arrays.

    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 9, 9]))
    2
    """
    length = min(len(one), len(other))
    start, block = 0, 1024
    while start < length:
        stop = min(length, start + block)
        differs = one[start:stop] != other[start:stop]
        if differs.any():
            return start + int(differs.argmax())
        start, block = stop, block * 8
    return length


def check_logprobs(output: Int32Array, logprobs: Sequence[float] | Float32Array) -> bool:
    """Return whether logprobs belong to an output: as many, all finite, none above zero.

    >>> check_logprobs(np.array([1, 2]), [-0.5]), check_logprobs(np.array([1]), [float("nan")])
    (False, False)
    """
    values = np.asarray(logprobs, np.float32)
    return len(values) == len(output) and bool(np.isfinite(values).all()) and bool((values <= 1e-6).all())


def _same(one: TreeCall, other: TreeCall) -> bool:
    return np.array_equal(one.context, other.context) and np.array_equal(one.output, other.output)
