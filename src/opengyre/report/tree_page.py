"""A picture of trajectory trees: one lane a path, coloured by role, admitted paths marked."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from opengyre.core.types import Role
from opengyre.report.svg import number
from opengyre.trajectory.admission import AdmittedLeaf
from opengyre.trajectory.statistics import TreeStatistics
from opengyre.trajectory.tree import ROOT, Exclusion, TrajectoryTree

COLOURS = {
    Role.MAIN: "#2f6fd0",
    Role.MAIN_SUMMARY: "#e0861a",
    Role.SUB_AGENT: "#2f8f5b",
    Role.SUB_AGENT_SUMMARY: "#8e5bb5",
    Role.AUXILIARY: "#8b939e",
}
_EXCLUDED = "#c8403a"
_WIDTH = 1160
_LEFT = 210
_RIGHT = 96
_LANE = 17
_SHOWN = 40
_STYLE = """
.lane{font-size:11px}.lane.small{font-size:10px;fill:var(--soft)}
.trunk{fill:var(--line)}.fork{fill:none;stroke:var(--soft);stroke-width:1;opacity:.7}
.admitted{font-weight:700;paint-order:stroke;stroke:var(--card);stroke-width:4px}.owned{fill:none;stroke:var(--ink);stroke-width:1}
"""


@dataclass(frozen=True)
class DrawnTree:
    """A tree with what was admitted of it and its figures.

    Example: ``DrawnTree(tree=tree, admitted=admit(tree, max_leaves=5, seed=0), statistics=figures)``.
    """

    tree: TrajectoryTree
    admitted: Sequence[AdmittedLeaf]
    statistics: TreeStatistics


@dataclass(frozen=True)
class _Lane:
    """What of a path no lane above it shows."""

    nodes: tuple[int, ...]
    parent_lane: int
    """-1 for a root."""


def tree_page(trees: Sequence[DrawnTree], *, title: str) -> str:
    """Return one HTML page without any reference to another file.

    Choice: at most 40 trees are drawn, those of the most calls; the table has them all.
    """
    style = resources.files("opengyre.report").joinpath("page.css").read_text() + _STYLE
    drawn = sorted(trees, key=lambda each: -each.statistics.calls)[:_SHOWN]
    sections = "".join(_section(each) for each in drawn)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{escape(title)}</title><style>{style}</style><main><header><p class=kicker>trajectory trees</p>"
        f"<h1>{escape(title)}</h1><p>{_summary(trees, len(drawn))}</p></header>{_legend()}{sections}"
        f"<section><h2>All executions</h2>{_table(trees)}</section></main></html>"
    )


def _summary(trees: Sequence[DrawnTree], drawn: int) -> str:
    summed = sum(each.statistics.summed_tokens for each in trees)
    unique = sum(each.statistics.unique_tokens for each in trees)
    ratio = summed / unique if unique else 0.0
    shown = "" if drawn == len(trees) else f", the {drawn} with most calls drawn"
    return f"{len(trees)} executions{shown}; {number(summed)} tokens summed, {number(unique)} unique ({ratio:.1f}x)"


def _legend() -> str:
    entries = [(colour, role.value) for role, colour in COLOURS.items()]
    entries += [(_EXCLUDED, "orphan, vanished, poisoned or cut-down law: context"), ("var(--line)", "context")]
    spans = "".join(f"<span><i style='background:{colour}'></i>{escape(text)}</span>" for colour, text in entries)
    note = (
        "Left to right: depth in tokens. A lane begins where its path leaves the lane it forks from. "
        "Outlined: tokens that the admitted leaf owns; \N{CHECK MARK} and the number: trained tokens."
    )
    return f"<section><div class=legend>{spans}</div><p class=note>{note}</p></section>"


def _section(drawn: DrawnTree) -> str:
    figures = drawn.statistics
    head = (
        f"{figures.calls} calls, {figures.roots} roots, {figures.nodes} nodes; {number(figures.summed_tokens)} tokens "
        f"summed, {number(figures.unique_tokens)} unique ({figures.ratio:.1f}x), {number(figures.sampled_tokens)} "
        f"sampled, {number(figures.trained_tokens)} trained in {len(figures.admitted)} leaves"
    )
    name = escape(figures.execution_id or "execution")
    approximate = " (approximate: rendered ids, not for training)" if drawn.tree.is_approximate else ""
    return f"<section><h2>{name}{approximate}</h2><p class=note>{head}</p>{_svg(drawn)}</section>"


def _lanes(tree: TrajectoryTree) -> list[_Lane]:
    """Return the lanes in preorder: a path goes straight on into its deepest child and ends where a candidate ends."""
    ends = {tree.call_ends[index] for index in tree.candidates()}
    deepest = [0] * len(tree.nodes)
    order = list(tree.preorder())
    for node in reversed(order):
        deepest[node] = max([tree.nodes[node].end, *(deepest[child] for child in tree.children_of(node))])
    lanes: list[_Lane] = []
    waiting = [(child, -1) for child in reversed(tree.children_of(ROOT))]
    while waiting:
        node, parent_lane = waiting.pop()
        nodes, side = [node], []
        while children := tree.children_of(nodes[-1]):
            if nodes[-1] in ends:
                side += children
                break
            straight = max(children, key=lambda child: deepest[child])
            side += [child for child in children if child != straight]
            nodes.append(straight)
        lanes.append(_Lane(tuple(nodes), parent_lane))
        waiting += [(child, len(lanes) - 1) for child in reversed(side)]
    return lanes


def _svg(drawn: DrawnTree) -> str:
    tree = drawn.tree
    lanes = _lanes(tree)
    depth = max((node.end for node in tree.nodes), default=1)
    scale = (_WIDTH - _LEFT - _RIGHT) / depth
    owned = {node: leaf for leaf in drawn.admitted for node in leaf.owned}
    by_end = {leaf.node: leaf for leaf in drawn.admitted}
    parts = []
    for number_, lane in enumerate(lanes):
        top = number_ * _LANE
        if lane.parent_lane >= 0:
            x = _LEFT + tree.nodes[lane.nodes[0]].start * scale
            parts.append(f"<path class=fork d='M{x:.1f} {lane.parent_lane * _LANE + 13}V{top + 8}'/>")
        parts.append(_lane_label(drawn, lane, top))
        for node in lane.nodes:
            parts += _node(tree, node, top, scale, is_owned=node in owned)
        parts += [_mark(tree, by_end[node], top, scale) for node in lane.nodes if node in by_end]
    height = len(lanes) * _LANE + 20
    axis = f"<text class=tick x={_LEFT} y={height - 4}>0</text>" + (
        f"<text class=tick x={_WIDTH - _RIGHT} y={height - 4} text-anchor=end>{number(depth)} tokens deep</text>"
    )
    return f"<svg viewBox='0 0 {_WIDTH} {height}' role=img aria-label='tree'>{''.join(parts)}{axis}</svg>"


def _mark(tree: TrajectoryTree, leaf: AdmittedLeaf, top: int, scale: float) -> str:
    """Return the mark behind the end of an admitted path."""
    x = _LEFT + tree.nodes[leaf.node].end * scale + 4
    text = f"\N{CHECK MARK} {number(leaf.trained_tokens)}"
    return f"<text class='lane admitted' x={x:.1f} y={top + 12}>{text}</text>"


def _lane_label(drawn: DrawnTree, lane: _Lane, top: int) -> str:
    tree = drawn.tree
    last = [index for node in lane.nodes for index in tree.nodes[node].ends]
    if not last:
        return ""
    call = tree.calls[last[-1]]
    count = f"{len(last)} call{'s' if len(last) > 1 else ''}"
    reason = "" if call.exclusion in (Exclusion.NONE, Exclusion.AUXILIARY) else f" {call.exclusion.value}"
    agent = call.agent if len(call.agent) <= 9 else "\N{HORIZONTAL ELLIPSIS}" + call.agent[-8:]
    name = call.role.value if call.agent in ("", "main") else f"{call.role.value} {agent}"
    return (
        f"<text class=lane x=0 y={top + 12} style='fill:{_colour(drawn, last[-1])}'>{escape(name[:28])}{reason}</text>"
        f"<text class='lane small' x={_LEFT - 6} y={top + 12} text-anchor=end>{count}</text>"
    )


def _colour(drawn: DrawnTree, index: int) -> str:
    call = drawn.tree.calls[index]
    return COLOURS[call.role] if call.exclusion in (Exclusion.NONE, Exclusion.AUXILIARY) else _EXCLUDED


def _node(tree: TrajectoryTree, number_: int, top: int, scale: float, *, is_owned: bool) -> list[str]:
    """Return the bars of a node: context, sampled spans, outputs that are context."""
    node = tree.nodes[number_]
    x, width = _LEFT + node.start * scale, max(len(node.tokens) * scale, 0.6)
    ends = ", ".join(tree.calls[index].call_id for index in node.ends[:4])
    title = f"<title>{escape(f'{len(node.tokens)} tokens from depth {node.start}; calls {ends}')}</title>"
    parts = [f"<rect class=trunk x={x:.1f} y={top + 5} width={width:.1f} height=6>{title}</rect>"]
    for low, high, owner in _runs(node.owners.tolist()):
        bar_x, bar_width = _LEFT + (node.start + low) * scale, max((high - low) * scale, 0.8)
        outline = f" style='stroke:var(--ink);stroke-width:{0.8 if is_owned else 0}'"
        parts.append(
            f"<rect x={bar_x:.1f} y={top + 3} width={bar_width:.1f} height=10 fill='{COLOURS[tree.calls[owner].role]}'"
            f"{outline}>{title}</rect>"
        )
    for index in node.ends:
        call = tree.calls[index]
        if call.exclusion is not Exclusion.NONE and call.output_tokens:
            bar_x = _LEFT + max(call.context_tokens, node.start) * scale
            bar_width = max((node.end - max(call.context_tokens, node.start)) * scale, 0.8)
            colour = COLOURS[call.role] if call.exclusion is Exclusion.AUXILIARY else _EXCLUDED
            tip = escape(f"{call.call_id}: {call.exclusion.value}, context")
            parts.append(
                f"<rect x={bar_x:.1f} y={top + 5} width={bar_width:.1f} height=6 fill='{colour}' opacity=.75>"
                f"<title>{tip}</title></rect>"
            )
    return parts


def _runs(owners: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (first, behind last, owner) of each sampled run.

    >>> _runs([-1, 4, 4, -1, 2])
    [(1, 3, 4), (4, 5, 2)]
    """
    runs: list[tuple[int, int, int]] = []
    for place, owner in enumerate(owners):
        if owner < 0:
            continue
        if runs and runs[-1][1] == place and runs[-1][2] == owner:
            runs[-1] = (runs[-1][0], place + 1, owner)
        else:
            runs.append((place, place + 1, owner))
    return runs


def _table(trees: Sequence[DrawnTree]) -> str:
    names = ("execution", "calls", "roots", "leaves", "summed", "unique", "ratio", "sampled", "admitted", "trained")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = []
    for drawn in trees:
        figures = drawn.statistics
        cells = (
            escape(figures.execution_id),
            figures.calls,
            figures.roots,
            sum(figures.leaves.values()),
            number(figures.summed_tokens),
            number(figures.unique_tokens),
            f"{figures.ratio:.1f}",
            number(figures.sampled_tokens),
            len(figures.admitted),
            number(figures.trained_tokens),
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"
