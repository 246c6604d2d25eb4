"""Charts as SVG text, so that a report is one small file that opens offline.

Choice: our own SVG and not plotly, whose script alone is 4.8 MB a page; ``<title>`` elements give the hover texts.
"""

import math
from collections.abc import Sequence
from html import escape

import msgspec

Point = tuple[float, float]
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 12, 30


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a chart.

    >>> Series(name="reward", points=[(0.0, 0.2), (1.0, 0.3)], colour="var(--rollout)").dots
    True
    """

    name: str
    points: Sequence[Point]
    colour: str
    dots: bool = True
    line: bool = True
    low_high: Sequence[tuple[float, float, float]] = ()
    """(x, low, high) of error bars."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """Size and ranges of a chart.

    >>> Frame(width=552, height=200, x=(0.0, 10.0), y=(0.0, 1.0)).at_x(5.0)
    295.0
    """

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]

    @property
    def plot_right(self) -> int:
        """Right edge of the plot."""
        return self.width - _RIGHT

    @property
    def plot_bottom(self) -> int:
        """Lower edge of the plot."""
        return self.height - _BOTTOM

    def at_x(self, value: float) -> float:
        """Return the horizontal place of a value."""
        low, high = self.x
        return round(_LEFT + (value - low) / ((high - low) or 1.0) * (self.width - _LEFT - _RIGHT), 1)

    def at_y(self, value: float) -> float:
        """Return the vertical place of a value."""
        low, high = self.y
        return round(self.plot_bottom - (value - low) / ((high - low) or 1.0) * (self.plot_bottom - _TOP), 1)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round values between two bounds.

    >>> ticks(0.0, 24.0), ticks(0.13, 0.52, 4)
    ([0.0, 5.0, 10.0, 15.0, 20.0], [0.2, 0.3, 0.4, 0.5])
    """
    if not high > low:
        return [low]
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.8)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def time_ticks(low_s: float, high_s: float, wanted: int = 10) -> list[float]:
    """Return times between two bounds at steps that a clock knows.

    >>> time_ticks(0.0, 500.0, 6)
    [0.0, 120.0, 240.0, 360.0, 480.0]
    """
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)
    step = next((step for step in steps if (high_s - low_s) / step <= wanted), 86400 * 7)
    return [float(value) for value in range(math.ceil(low_s / step) * step, math.floor(high_s) + 1, step)]


def number(value: float) -> str:
    """Return a number as an axis shows it.

    >>> number(0.25), number(1200.0), number(2_500_000.0), number(3.0)
    ('0.25', '1.2k', '2.5M', '3')
    """
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds, or hours and minutes.

    >>> clock(75.0), clock(7320.0)
    ('1:15', '2h02')
    """
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}"


def figure(frame: Frame, body: Sequence[str], label: str) -> str:
    """Return an SVG element with a label for readers that see no picture."""
    return (
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'
    )


def axes(frame: Frame, *, x_label: str, y_label: str = "") -> list[str]:
    """Return grid, ticks and labels."""
    parts = []
    for value in ticks(*frame.y, 4):
        y = frame.at_y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{frame.plot_right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 3.5}" text-anchor="end">{number(value)}</text>')
    for value in ticks(*frame.x, 8):
        x, text = frame.at_x(value), number(value)
        parts.append(f'<text class="tick" x="{x}" y="{frame.plot_bottom + 14}" text-anchor="middle">{text}</text>')
    y = frame.plot_bottom
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{frame.plot_right}" y1="{y}" y2="{y}"/>')
    parts.append(
        f'<text class="tick" x="{frame.plot_right}" y="{frame.height - 3}" text-anchor="end">{escape(x_label)}</text>'
    )
    if y_label:
        parts.append(f'<text class="tick" x="{_LEFT + 4}" y="{_TOP + 2}">{escape(y_label)}</text>')
    return parts


def polyline(frame: Frame, series: Series) -> list[str]:
    """Return one series: its line, error bars and points with hover texts."""
    parts = []
    if series.line and len(series.points) > 1:
        places = " ".join(f"{frame.at_x(x)},{frame.at_y(y)}" for x, y in series.points)
        parts.append(f'<polyline fill="none" stroke="{series.colour}" stroke-width="2" points="{places}"/>')
    for x, low, high in series.low_high:
        parts.append(
            f'<line stroke="{series.colour}" stroke-width="1.5" opacity=".55" x1="{frame.at_x(x)}" '
            f'x2="{frame.at_x(x)}" y1="{frame.at_y(low)}" y2="{frame.at_y(high)}"/>'
        )
    for x, y in series.points if series.dots else ():
        parts.append(
            f'<circle cx="{frame.at_x(x)}" cy="{frame.at_y(y)}" r="3" fill="{series.colour}">'
            f"<title>{escape(series.name)} at {number(x)}: {y:.4g}</title></circle>"
        )
    return parts


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_label: str = "step",
    y_label: str = "",
    y: tuple[float, float] | None = None,
    lines_at: Sequence[tuple[float, str]] = (),
) -> str:
    """Return a chart of lines over steps; ``lines_at`` are dashed levels with a text."""
    points = [point for one in series for point in one.points]
    if not points:
        return empty("nothing recorded yet")
    x_values = [x for x, _ in points]
    bars = [value for one in series for _, low, high in one.low_high for value in (low, high)]
    values = [y_value for _, y_value in points] + bars + [level for level, _ in lines_at]
    low, high = y or (min(0.0, min(values)), (max(values) or 1.0) * 1.08)
    frame = Frame(width=540, height=220, x=(min(x_values), max(max(x_values), min(x_values) + 1)), y=(low, high))
    body = axes(frame, x_label=x_label, y_label=y_label)
    for level, text in lines_at:
        place = frame.at_y(level)
        body.append(f'<line class="level" x1="{_LEFT}" x2="{frame.plot_right}" y1="{place}" y2="{place}"/>')
        body.append(
            f'<text class="tick" x="{frame.plot_right}" y="{place - 4}" text-anchor="end">{escape(text)}</text>'
        )
    for one in series:
        body.extend(polyline(frame, one))
    return figure(frame, body, label) + legend([(one.name, one.colour) for one in series])


def bar_chart(bars: Sequence[tuple[str, float, str]], *, label: str, total: float = 0.0) -> str:
    """Return horizontal bars of (name, value, colour) with the value, and its share of ``total``, at their ends."""
    if not bars:
        return empty("nothing recorded yet")
    most = max(value for _, value, _ in bars) or 1.0
    row = 30
    width, left, right = 540, 150, 110
    parts = []
    for index, (name, value, colour) in enumerate(bars):
        top = index * row + 6
        length = round(value / most * (width - left - right), 1)
        share = f" ({value / total:.1%})" if total else ""
        parts.append(
            f'<text class="name" x="{left - 8}" y="{top + 14}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{left}" y="{top}" width="{max(length, 1)}" height="{row - 10}" rx="2" fill="{colour}"/>'
            f'<text class="value" x="{left + length + 7}" y="{top + 14}">{number(value)}{share}</text>'
        )
    height = len(bars) * row + 8
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return the names of colours."""
    items = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in entries)
    return f'<div class="legend">{items}</div>'


def empty(text: str) -> str:
    """Return what stands where a chart has nothing to show."""
    return f'<p class="empty">{escape(text)}</p>'
