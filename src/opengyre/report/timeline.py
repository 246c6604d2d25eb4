"""The timeline of the cells: mode and useful work of each, the waterlevel below, publications and hand-overs marked."""

from collections.abc import Sequence
from html import escape

from opengyre.core.events import Mode
from opengyre.core.records import CellSpan, ExecutionRecord, PublicationRecord, SwitchRecord
from opengyre.report.results import end_of, waterlevel
from opengyre.report.svg import Frame, clock, empty, figure, legend, time_ticks

COLOURS = {Mode.ROLLOUT: "var(--rollout)", Mode.TRAINING: "var(--training)", Mode.SWITCHING: "var(--switching)"}
_LANE = 40
_LEVEL = 90
_WIDTH = 1120
_BINS = 1200


def timeline(
    spans: Sequence[CellSpan],
    switches: Sequence[SwitchRecord],
    publications: Sequence[PublicationRecord],
    executions: Sequence[ExecutionRecord],
) -> str:
    """Return the timeline as SVG: the pale band is the mode, the full part of it useful work."""
    if not spans:
        return empty("no time of a cell was recorded")
    cells = sorted({span.cell_id for span in spans})
    end_s = max(end_of(spans), end_of(executions))
    height = len(cells) * _LANE + _LEVEL + 52
    frame = Frame(width=_WIDTH, height=height, x=(0.0, end_s), y=(0.0, 1.0))
    body = [_publication(frame, record, len(cells)) for record in publications]
    for lane, cell_id in enumerate(cells):
        top = 16 + lane * _LANE
        body.append(f'<text class="name" x="46" y="{top + 18}" text-anchor="end">cell {cell_id}</text>')
        body.extend(_span(frame, span, top) for span in merged([s for s in spans if s.cell_id == cell_id], end_s))
        body.extend(_hand_over(frame, switch, top) for switch in switches if switch.cell_id == cell_id)
    body.extend(_waterlevel(frame, executions, 16 + len(cells) * _LANE + 6))
    body.extend(
        f'<text class="tick" x="{frame.at_x(value)}" y="{height - 8}" text-anchor="middle">{clock(value)}</text>'
        for value in time_ticks(0.0, end_s)
    )
    entries = [(mode.value, COLOURS[mode]) for mode in COLOURS] + [("waterlevel w", "var(--level)")]
    return (
        figure(frame, body, "timeline of the cells")
        + legend(entries)
        + '<p class="note">Full colour: share of useful work in the span. Numbers on switches: live calls handed over. '
        "Thin lines: publications. Hover for values.</p>"
    )


def merged(spans: Sequence[CellSpan], end_s: float) -> list[CellSpan]:
    """Return the spans of one cell with neighbours of one mode joined that are too short to be seen.

    >>> span = CellSpan(cell_id=0, mode=Mode.ROLLOUT, started_s=0.0, ended_s=1.0, busy_s=1.0)
    >>> other = CellSpan(cell_id=0, mode=Mode.ROLLOUT, started_s=1.0, ended_s=2.0, busy_s=0.0)
    >>> [(one.ended_s, one.busy_s) for one in merged([span, other], 1e6)]
    [(2.0, 1.0)]
    """
    smallest_s = end_s / _BINS * 4
    found: list[CellSpan] = []
    for span in sorted(spans, key=lambda one: one.started_s):
        last = found[-1] if found else None
        if (
            last is not None
            and last.mode is span.mode
            and span.started_s - last.ended_s < smallest_s / 4
            and last.ended_s - last.started_s < smallest_s
        ):
            found[-1] = CellSpan(
                cell_id=span.cell_id,
                mode=span.mode,
                started_s=last.started_s,
                ended_s=span.ended_s,
                busy_s=last.busy_s + span.busy_s,
                tokens=last.tokens + span.tokens,
            )
        else:
            found.append(span)
    return found


def _span(frame: Frame, span: CellSpan, top: int) -> str:
    left, right = frame.at_x(span.started_s), frame.at_x(span.ended_s)
    width = max(round(right - left, 1), 0.5)
    length_s = span.ended_s - span.started_s
    share = 1.0 if span.mode is Mode.SWITCHING else min(1.0, span.busy_s / length_s) if length_s else 0.0
    full = round((_LANE - 12) * share, 1)
    colour = COLOURS[span.mode]
    title = (
        f"cell {span.cell_id} {span.mode.value} {clock(span.started_s)} to {clock(span.ended_s)}, "
        f"{length_s:.2f} s, {share:.0%} useful, {span.tokens} tokens"
    )
    return (
        f'<g><title>{escape(title)}</title><rect x="{left}" y="{top}" width="{width}" height="{_LANE - 12}" '
        f'fill="{colour}" opacity=".22"/><rect x="{left}" y="{top + _LANE - 12 - full}" width="{width}" '
        f'height="{full}" fill="{colour}"/></g>'
    )


def _hand_over(frame: Frame, switch: SwitchRecord, top: int) -> str:
    if not switch.handed_over:
        return ""
    x = frame.at_x(switch.started_s)
    title = f"{switch.handed_over} calls handed over, {switch.moved_tokens} tokens, {switch.parked} parked"
    return (
        f'<text class="mark" x="{x}" y="{top - 3}" text-anchor="middle">{switch.handed_over}'
        f"<title>{escape(title)}</title></text>"
    )


def _publication(frame: Frame, record: PublicationRecord, cells: int) -> str:
    x = frame.at_x(record.ended_s)
    return (
        f'<line class="publication" x1="{x}" x2="{x}" y1="12" y2="{16 + cells * _LANE}">'
        f"<title>version {record.version} published, {record.live_calls} calls in flight</title></line>"
    )


def _waterlevel(frame: Frame, executions: Sequence[ExecutionRecord], top: int) -> list[str]:
    levels = waterlevel(executions)
    if not levels:
        return []
    most = max(level for _, level in levels) or 1
    base = top + _LEVEL - 10
    per_bin: dict[float, int] = {}
    for now_s, level in levels:
        per_bin[frame.at_x(now_s)] = level
    places = [f"{frame.at_x(0.0)},{base}"]
    last = base * 1.0
    for x, level in per_bin.items():
        y = round(base - level / most * (_LEVEL - 16), 1)
        places += [f"{x},{last}", f"{x},{y}"]
        last = y
    places.append(f"{frame.plot_right},{last}")
    places.append(f"{frame.plot_right},{base}")
    return [
        f'<polygon fill="var(--level)" opacity=".35" points="{" ".join(places)}"/>',
        f'<text class="name" x="46" y="{base - _LEVEL // 2 + 12}" text-anchor="end">w</text>',
        f'<text class="tick" x="46" y="{top + 8}" text-anchor="end">{most}</text>',
        f'<line class="axis" x1="{frame.at_x(0.0)}" x2="{frame.plot_right}" y1="{base}" y2="{base}"/>',
    ]
