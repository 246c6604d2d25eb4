"""A tree as bytes: equal trees give equal bytes, whatever the order in which their calls were inserted."""

import msgspec
import numpy as np

from opengyre.core.errors import FileError
from opengyre.core.types import Int32Array, Role, VersionRun
from opengyre.trajectory.tree import ROOT, Exclusion, Node, StoredCall, TrajectoryTree

FORMAT = "opengyre-tree-1"


class _WireCall(msgspec.Struct, frozen=True, array_like=True):
    call_id: str
    request_id: str
    agent: str
    role: Role
    context_tokens: int
    output_tokens: int
    logprobs: bytes
    versions: tuple[VersionRun, ...]
    exclusion: Exclusion
    temperature: float
    end: int


class _WireNode(msgspec.Struct, frozen=True, array_like=True):
    parent: int
    tokens: bytes
    span_start: int
    span: bytes


class _WireTree(msgspec.Struct, frozen=True, array_like=True):
    format: str
    execution_id: str
    is_approximate: bool
    calls: tuple[_WireCall, ...]
    nodes: tuple[_WireNode, ...]


def tree_to_bytes(tree: TrajectoryTree) -> bytes:
    """Return the canonical bytes: calls by id, nodes parents first and siblings by first token."""
    order = list(tree.preorder())
    number = {node: place for place, node in enumerate(order)}
    number[ROOT] = ROOT
    by_id = sorted(range(len(tree.calls)), key=lambda index: tree.calls[index].call_id)
    renumbered = np.full(len(tree.calls) + 1, -1, np.int32)
    for place, index in enumerate(by_id):
        renumbered[index] = place
    calls = tuple(_wire_call(tree.calls[index], number[tree.call_ends[index]]) for index in by_id)
    nodes = tuple(_wire_node(tree.nodes[node], number[tree.nodes[node].parent], renumbered) for node in order)
    wire = _WireTree(FORMAT, tree.execution_id, tree.is_approximate, calls, nodes)
    return msgspec.msgpack.encode(wire, order="deterministic")


def _wire_call(call: StoredCall, end: int) -> _WireCall:
    return _WireCall(
        call.call_id,
        call.request_id,
        call.agent,
        call.role,
        call.context_tokens,
        call.output_tokens,
        np.asarray(call.logprobs, "<f4").tobytes(),
        call.versions,
        call.exclusion,
        call.temperature,
        end,
    )


def _wire_node(node: Node, parent: int, renumbered: Int32Array) -> _WireNode:
    sampled = np.flatnonzero(node.span >= 0)
    low, high = (int(sampled[0]), int(sampled[-1]) + 1) if len(sampled) else (0, 0)
    span = renumbered[node.span[low:high]]
    start = node.span_start + low if len(sampled) else 0
    return _WireNode(parent, node.tokens.astype("<i4").tobytes(), start, span.astype("<i4").tobytes())


def tree_from_bytes(data: bytes) -> TrajectoryTree:
    """Return the tree that ``tree_to_bytes`` wrote.

    Raises:
        FileError: The bytes are not such a tree.
    """
    try:
        wire = msgspec.msgpack.decode(data, type=_WireTree)
    except msgspec.DecodeError as error:
        raise FileError(f"not a tree: {error}; expected {FORMAT}") from error
    if wire.format != FORMAT:
        raise FileError(f"a tree of format {wire.format!r}, expected {FORMAT}")
    tree = TrajectoryTree(wire.execution_id, is_approximate=wire.is_approximate)
    for node in wire.nodes:
        _add_node(tree, node)
    for call in wire.calls:
        _add_call(tree, call)
    return tree


def _add_node(tree: TrajectoryTree, wire: _WireNode) -> None:
    number = len(tree.nodes)
    if not ROOT <= wire.parent < number or not wire.tokens:
        raise FileError(f"node {number} of a tree has parent {wire.parent} and {len(wire.tokens)} bytes of tokens")
    tokens, span = np.frombuffer(wire.tokens, "<i4").astype(np.int32), np.frombuffer(wire.span, "<i4").astype(np.int32)
    start = tree.nodes[wire.parent].end if wire.parent != ROOT else 0
    tree.nodes.append(Node(wire.parent, start, tokens, wire.span_start, span))
    tree.adopt(wire.parent, number)


def _add_call(tree: TrajectoryTree, wire: _WireCall) -> None:
    if not ROOT <= wire.end < len(tree.nodes):
        raise FileError(f"call {wire.call_id} of a tree ends at node {wire.end} of {len(tree.nodes)}")
    tree.add_stored(
        StoredCall(
            call_id=wire.call_id,
            request_id=wire.request_id,
            agent=wire.agent,
            role=wire.role,
            context_tokens=wire.context_tokens,
            output_tokens=wire.output_tokens,
            logprobs=np.frombuffer(wire.logprobs, "<f4").astype(np.float32),
            versions=wire.versions,
            exclusion=wire.exclusion,
            temperature=wire.temperature,
        ),
        wire.end,
    )
