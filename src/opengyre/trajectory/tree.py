"""The prefix-sharing tree of an execution's calls, built from exact token ids.

A node is a run of tokens that no call forks inside and no call's path ends inside. A token is sampled if a trainable
call sampled it, else context; sampled beats context. Two calls that sampled the same tokens at the same place share one
target, whose logprobs are the canonical call's: the one with the smallest (first version, request id). So the tree is a
join of its calls, and the order of insertion does not matter.

Source: paper, the tree of an execution. Choice: splits inside an output, the canonical call. A context token costs 4
bytes, a sampled one 12: owners are kept for the span of a node that was sampled, logprobs by the call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from opengyre.core.errors import InvariantError
from opengyre.core.types import Float32Array, Int32Array, Role, VersionRun

ROOT = -1
_EMPTY_INT = np.zeros(0, np.int32)
_RECENT_PATHS = 8


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
    """A call as it is inserted: its context is given whole, or as a tail after a stored call.

    Example: ``TreeCall(call_id="c1", request_id="r1", agent="main", role=Role.MAIN, context=context, output=output,
    logprobs=logprobs, versions=(VersionRun(0, len(output)),))``. With ``parent="c1", shared=7`` the context is the
    first 7 tokens of c1's context and output, followed by ``context``.
    """

    call_id: str
    request_id: str
    agent: str
    role: Role
    context: Int32Array
    """[C] int32, or [C - shared] behind a parent."""
    output: Int32Array
    """[T] int32."""
    logprobs: Float32Array
    """[T] float32; of a poisoned call whatever was recorded."""
    versions: tuple[VersionRun, ...]
    exclusion: Exclusion = Exclusion.NONE
    temperature: float = 1.0
    parent: str | None = None
    shared: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCall:
    """A call as the tree keeps it: its tokens are the path to its end node.

    Example: p[1,2]g[3] is ``context_tokens=2, output_tokens=1`` and the node that ends at depth 3.
    """

    call_id: str
    request_id: str
    agent: str
    role: Role
    context_tokens: int
    output_tokens: int
    logprobs: Float32Array
    versions: tuple[VersionRun, ...]
    exclusion: Exclusion
    temperature: float

    @property
    def rank(self) -> tuple[int, str, str]:
        """Order in which calls own a shared target; the smallest wins."""
        return (self.versions[0].version if self.versions else 0, self.request_id, self.call_id)


@dataclass(slots=True)
class Node:
    """A run of tokens.

    Example: after p[1,2]g[3,4] and p[1,2,3,9]g[5] the nodes are [1,2,3], [4] and [9,5].
    """

    parent: int
    start: int
    """Depth of its first token."""
    tokens: Int32Array
    span_start: int = 0
    """Offset in the node at which ``span`` begins."""
    span: Int32Array = field(default_factory=lambda: _EMPTY_INT)
    """Index of the call that owns each token of a span that covers all sampled ones; -1 for context."""
    children: dict[int, int] | None = None
    """First token to node."""
    ends: list[int] = field(default_factory=list)
    """Calls whose path ends with the node's last token."""

    @property
    def end(self) -> int:
        """Depth behind its last token."""
        return self.start + len(self.tokens)

    @property
    def sampled(self) -> int:
        """Tokens that can be trained."""
        return int(np.count_nonzero(self.span >= 0))

    @property
    def owners(self) -> Int32Array:
        """[n] index of the call that owns each token, -1 for context."""
        whole = np.full(len(self.tokens), -1, np.int32)
        whole[self.span_start : self.span_start + len(self.span)] = self.span
        return whole

    def open_span(self, low: int, high: int) -> Int32Array:
        """Return a writable view of the owners of the tokens [low, high), growing the span where needed."""
        if not len(self.span):
            self.span_start, self.span = low, np.full(high - low, -1, np.int32)
        first = min(low, self.span_start)
        last = max(high, self.span_start + len(self.span))
        if (first, last) != (self.span_start, self.span_start + len(self.span)):
            grown = np.full(last - first, -1, np.int32)
            grown[self.span_start - first : self.span_start - first + len(self.span)] = self.span
            self.span_start, self.span = first, grown
        return self.span[low - self.span_start : high - self.span_start]


class TrajectoryTree:
    """The tree of one execution; several roots are allowed.

    Args:
        execution_id: Whose calls they are.
        is_approximate: Its token ids were rendered, not recorded: it may be counted and shown, never trained.
    """

    def __init__(self, execution_id: str = "", *, is_approximate: bool = False) -> None:
        self.execution_id = execution_id
        self.is_approximate = is_approximate
        self.nodes: list[Node] = []
        self.calls: list[StoredCall] = []
        self.call_ends: list[int] = []
        """Node at whose end each call's path ends; -1 for a call without tokens."""
        self._roots: dict[int, int] = {}
        self._seen: dict[str, int] = {}
        self._recent: list[tuple[Int32Array, Int32Array, int]] = []
        """Context, output and end node of the last paths."""

    # -- building ---------------------------------------------------------------------------------------------

    def insert(self, call: TreeCall) -> None:
        """Add a call; adding it again changes nothing.

        Raises:
            InvariantError: Another call has the same id, or its parent is missing or too short.
        """
        has_parent = call.parent is not None and call.shared > 0
        node, base = self._below_parent(call) if has_parent else (ROOT, 0)
        length = base + len(call.context) + len(call.output)
        if call.call_id in self._seen:
            self._check_same(self._seen[call.call_id], call, base + len(call.context))
            return
        index = len(self.calls)
        self._seen[call.call_id] = index
        self.calls.append(_stored(call, base + len(call.context)))
        self.call_ends.append(ROOT)
        if not length:
            return
        depth = base
        if not has_parent:
            node, depth = self._nearest(call.context, call.output)
        tail = _tokens_from(call, depth - base)
        node, matched = self._descend(node, depth, tail)
        depth += matched
        if depth < length:
            node = self._append(node, depth, tail[matched:])
        elif self.nodes[node].end > depth:
            node = self._split(node, depth)
        self.nodes[node].ends.append(index)
        self.call_ends[index] = node
        if call.exclusion is Exclusion.NONE:
            self._own(index, node)
        if not has_parent:
            self._recent.insert(0, (call.context, call.output, node))
            del self._recent[_RECENT_PATHS:]

    def _below_parent(self, call: TreeCall) -> tuple[int, int]:
        """Return the node in which the head that is shared with the parent ends, and its length."""
        parent = self._seen.get(call.parent or "")
        length = 0
        if parent is not None:
            length = self.calls[parent].context_tokens + self.calls[parent].output_tokens
        if parent is None or length < call.shared:
            raise InvariantError(
                f"call {call.call_id} shares {call.shared} tokens with {call.parent}, which has {length}"
            )
        node = self.call_ends[parent]
        while self.nodes[node].start >= call.shared:
            node = self.nodes[node].parent
        return node, call.shared

    def _nearest(self, context: Int32Array, output: Int32Array) -> tuple[int, int]:
        """Return a good place to start from: inside the recent path that shares most."""
        best, depth = ROOT, 0
        for other_context, other_output, end in self._recent:
            shared = common_prefix(other_context, context)
            if shared == len(other_context):
                shared += _common_across(other_output, context, output, shared)
            elif shared == len(context):
                shared += common_prefix(other_context[shared : shared + len(output)], output)
            if shared > depth:
                best, depth = end, shared
                if shared == len(other_context) + len(other_output):
                    break
        while best != ROOT and self.nodes[best].start >= depth:
            best = self.nodes[best].parent
        return best, depth

    def _descend(self, node: int, depth: int, tail: Int32Array) -> tuple[int, int]:
        """Follow ``tail`` from a depth inside (or at the end of) a node; return the last node and what matched."""
        matched = 0
        while matched < len(tail):
            if node != ROOT and depth + matched < self.nodes[node].end:
                current = self.nodes[node]
                have = current.tokens[depth + matched - current.start :]
                step = common_prefix(have, tail[matched : matched + len(have)])
                matched += step
                if step < len(have):
                    return node, matched
                continue
            child = self._children(node).get(int(tail[matched]))
            if child is None:
                return node, matched
            node = child
        return node, matched

    def _children(self, node: int) -> dict[int, int]:
        if node == ROOT:
            return self._roots
        children = self.nodes[node].children
        return {} if children is None else children

    def adopt(self, node: int, child: int) -> None:
        """Make a node the child of another one, in place of what began with the same token."""
        token = int(self.nodes[child].tokens[0])
        if node != ROOT and self.nodes[node].children is None:
            self.nodes[node].children = {}
        self._children(node)[token] = child

    def add_stored(self, call: StoredCall, end: int) -> None:
        """Add a call whose path stands in the tree already."""
        index = len(self.calls)
        self._seen[call.call_id] = index
        self.calls.append(call)
        self.call_ends.append(end)
        if end != ROOT:
            self.nodes[end].ends.append(index)

    def _append(self, node: int, depth: int, tail: Int32Array) -> int:
        """Hang a tail below a node, splitting it first if the path leaves in its middle."""
        if node != ROOT and self.nodes[node].end > depth:
            node = self._split(node, depth)
        self.nodes.append(Node(node, depth, tail.copy()))
        self.adopt(node, len(self.nodes) - 1)
        return len(self.nodes) - 1

    def _split(self, node: int, depth: int) -> int:
        """Cut a node at a depth and return its upper part; the lower part keeps its number."""
        lower = self.nodes[node]
        cut = depth - lower.start
        inside = min(max(cut - lower.span_start, 0), len(lower.span))
        upper = Node(lower.parent, lower.start, lower.tokens[:cut], lower.span_start, lower.span[:inside])
        if not inside:
            upper.span_start = 0
        self.nodes.append(upper)
        number = len(self.nodes) - 1
        self.adopt(lower.parent, number)
        lower.tokens, lower.span = lower.tokens[cut:], lower.span[inside:]
        lower.span_start = max(lower.span_start - cut, 0) if len(lower.span) else 0
        lower.parent, lower.start = number, depth
        upper.children = {int(lower.tokens[0]): node}
        return number

    def _own(self, index: int, node: int) -> None:
        """Make the call the owner of its output where nobody of smaller rank owns it."""
        call = self.calls[index]
        first = max(call.context_tokens, 1)
        while node != ROOT and self.nodes[node].end > first:
            current = self.nodes[node]
            span = current.open_span(max(first - current.start, 0), len(current.tokens))
            mine = span < 0
            if not mine.all():
                for other in np.unique(span[~mine]):
                    if call.rank < self.calls[other].rank:
                        mine |= span == other
            span[mine] = index
            node = current.parent

    def _check_same(self, known: int, call: TreeCall, context_tokens: int) -> None:
        stored = self.calls[known]
        path = self.path_tokens(self.call_ends[known])
        given = _tokens_from(call, 0)
        same = (stored.context_tokens, stored.output_tokens) == (context_tokens, len(call.output))
        if not same or not np.array_equal(path[len(path) - len(given) :], given):
            raise InvariantError(f"two different calls have the id {call.call_id}")

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
    def summed_tokens(self) -> int:
        """Context and output tokens of all calls."""
        return sum(call.context_tokens + call.output_tokens for call in self.calls)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that can be trained."""
        return sum(node.sampled for node in self.nodes)

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays of the tree."""
        arrays = sum(node.tokens.nbytes + node.span.nbytes for node in self.nodes)
        return arrays + sum(call.logprobs.nbytes for call in self.calls)

    def index_of(self, call_id: str) -> int:
        """Return the index of a call."""
        return self._seen[call_id]

    def children_of(self, node: int) -> list[int]:
        """Return the children of a node (of ``ROOT``: the roots) by first token."""
        children = self._children(node)
        return [children[token] for token in sorted(children)]

    def path(self, node: int) -> list[int]:
        """Return the nodes from a root down to a node."""
        found: list[int] = []
        while node != ROOT:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def path_tokens(self, node: int) -> Int32Array:
        """Return the tokens from the root to the end of a node, [depth] int32."""
        return np.concatenate([_EMPTY_INT, *(self.nodes[number].tokens for number in self.path(node))])

    def context_of(self, index: int) -> Int32Array:
        """Return the whole context of a call, [C] int32."""
        return self.path_tokens(self.call_ends[index])[: self.calls[index].context_tokens]

    def output_of(self, index: int) -> Int32Array:
        """Return the output of a call, [T] int32."""
        return self.path_tokens(self.call_ends[index])[self.calls[index].context_tokens :]

    def preorder(self) -> Iterator[int]:
        """Yield nodes parents first, siblings by first token."""
        stack = self.children_of(ROOT)[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack += self.children_of(node)[::-1]

    def candidates(self) -> list[int]:
        """Return one call for each candidate: its output has no descendant output of the same agent and role.

        Choice: so a main path that only a summary call continues is still a main candidate. An output that is context
        (orphan, vanished, poisoned, cut-down law) neither is a candidate nor hides one.
        """
        bits: dict[tuple[str, Role], int] = {}
        for call in self.calls:
            bits.setdefault((call.agent, call.role), 1 << len(bits))
        below: dict[int, int] = {}
        found: list[int] = []
        for node in reversed(list(self.preorder())):
            mask = 0
            for child in self._children(node).values():
                mask |= below.pop(child)
            for index in sorted(self.nodes[node].ends, key=lambda number: self.calls[number].rank):
                call = self.calls[index]
                bit = bits[call.agent, call.role]
                if call.exclusion not in (Exclusion.NONE, Exclusion.AUXILIARY) or not call.output_tokens:
                    continue
                if not mask & bit:
                    found.append(index)
                mask |= bit
            below[node] = mask
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


def _common_across(other: Int32Array, context: Int32Array, output: Int32Array, start: int) -> int:
    """Return how far ``other`` agrees with ``context[start:]`` followed by ``output``."""
    shared = common_prefix(other, context[start:])
    if start + shared == len(context):
        shared += common_prefix(other[shared:], output)
    return shared


def _tokens_from(call: TreeCall, skip: int) -> Int32Array:
    """Return what follows the first ``skip`` tokens of the given context and output."""
    if skip < len(call.context):
        return np.concatenate((call.context[skip:], call.output))
    return call.output[skip - len(call.context) :]


def check_logprobs(output: Int32Array, logprobs: Sequence[float] | Float32Array) -> bool:
    """Return whether logprobs belong to an output: as many, all finite, none above zero.

    >>> check_logprobs(np.array([1, 2]), [-0.5]), check_logprobs(np.array([1]), [float("nan")])
    (False, False)
    """
    values = np.asarray(logprobs, np.float32)
    return len(values) == len(output) and bool(np.isfinite(values).all()) and bool((values <= 1e-6).all())


def _stored(call: TreeCall, context_tokens: int) -> StoredCall:
    return StoredCall(
        call_id=call.call_id,
        request_id=call.request_id,
        agent=call.agent,
        role=call.role,
        context_tokens=context_tokens,
        output_tokens=len(call.output),
        logprobs=call.logprobs,
        versions=call.versions,
        exclusion=call.exclusion,
        temperature=call.temperature,
    )
