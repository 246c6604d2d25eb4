"""The page of ``opengyre simulate``: the figures of the rules, and the cells' modes over time of each."""

from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from opengyre.core.records import CellSpan
from opengyre.report.timeline import timeline
from opengyre.sim.outcome import Outcome
from opengyre.sim.study import Study

SHOWN_CELLS = 16
"""Cells of a timeline; of more, the first ones."""
_COLUMNS = (
    ("hours_per_step", "h/step", "{:.3f}"),
    ("trained_tokens_per_hour", "trained tokens/h", "{:,.0f}"),
    ("timeout_rate", "timeouts", "{:.1%}"),
    ("staleness_mean", "d mean", "{:.2f}"),
    ("staleness_max", "d max", "{}"),
    ("moved_kv_tokens", "moved KV tokens", "{:,.0f}"),
    ("switches_per_step", "switches a step", "{:.1f}"),
    ("bound_ratio", "x bound", "{:.2f}"),
)


def simulate_page(studies: Sequence[tuple[Study, list[dict[str, Any]]]]) -> str:
    """Return the whole page.

    Args:
        studies: Each study with the figures of its rules.
    """
    style = resources.files("opengyre.report").joinpath("page.css").read_text()
    body = "".join(_study(one, rows) for one, rows in studies)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Simulated rules - OpenGyre</title><style>{style}</style></head><body><main>"
        '<header><p class="kicker">OpenGyre simulation</p><h1>Rules in virtual time</h1>'
        "<p>The real scheduler on simulated cells; all rules have the same work.</p></header>"
        f"{body}</main></body></html>\n"
    )


def _study(one: Study, rows: list[dict[str, Any]]) -> str:
    parts = [f"<section><h2>{escape(one.name)}</h2>{_table(rows)}</section>"]
    for result in one.results:
        cells = min(SHOWN_CELLS, one.workload.cells)
        note = f"first {cells} of {one.workload.cells} cells, " if cells < one.workload.cells else ""
        title = f"{one.name}: {result.rule} ({note}seed {result.outcomes[0].seed})"
        parts.append(f"<section><h2>{escape(title)}</h2>{_timeline(result.outcomes[0], cells)}</section>")
    return "".join(parts)


def _timeline(outcome: Outcome, cells: int) -> str:
    spans = [
        CellSpan(
            cell_id=span.cell_id,
            mode=span.mode,
            started_s=span.started_s,
            ended_s=span.ended_s,
            busy_s=span.busy_s,
            tokens=0,
        )
        for span in outcome.spans
        if span.cell_id < cells
    ]
    return timeline(spans, [], [], [])


def _table(rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("rule", *(name for _, name, _ in _COLUMNS)))
    body = "".join(
        f"<tr><td>{escape(row['rule'])}</td>"
        + "".join(f"<td>{escape(form.format(row[key]))}</td>" for key, _, form in _COLUMNS)
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
