"""The report of a run as one HTML file that opens offline; everything that a model may have written is escaped."""

from collections.abc import Sequence
from html import escape
from importlib import resources

from opengyre.core.records import CellSpan, ExecutionRecord, PublicationRecord, SwitchRecord
from opengyre.report.figures import EvaluationRow, Results, RunData
from opengyre.report.svg import Series, bar_chart, clock, line_chart, number
from opengyre.report.timeline import timeline

TOLERANCE = 1e-4
"""Largest difference between behaviour and training logprobs that counts as equal."""
_GOOD, _BAD = "ok", "bad"


def page(data: RunData, results: Results, *, trees: str = "") -> str:
    """Return the whole page.

    Args:
        data: The records, for the timeline.
        results: The figures of the same records.
        trees: Name of a page with the trees that lies beside this one; empty if there is none.
    """
    style = resources.files("opengyre.report").joinpath("page.css").read_text()
    title = escape(results.run)
    sections = [
        _head(results),
        _tiles(results),
        _section("Cells over time", timeline(*_records(data))),
        f'<div class="columns">{_learning(results)}{_scheduling(results)}{_training(results)}</div>',
        _section("Steps", _step_table(results)),
        _closer(results, trees),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} - OpenGyre</title><style>{style}</style></head>"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _records(
    data: RunData,
) -> tuple[list[CellSpan], list[SwitchRecord], list[PublicationRecord], list[ExecutionRecord]]:
    return (
        [record for record in data.records if isinstance(record, CellSpan)],
        [record for record in data.records if isinstance(record, SwitchRecord)],
        [record for record in data.records if isinstance(record, PublicationRecord)],
        [record for record in data.records if isinstance(record, ExecutionRecord)],
    )


def _section(title: str, body: str, note: str = "") -> str:
    text = f'<p class="note">{note}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{text}{body}</section>"


def _head(results: Results) -> str:
    versions = ", ".join(f"{escape(name)} {escape(version)}" for name, version in results.versions.items())
    resumed = f", {results.resumes} resumes" if results.resumes else ""
    return (
        f'<header><p class="kicker">OpenGyre run report</p><h1>{escape(results.run)}</h1>'
        f"<p>{results.steps} optimizer steps in {clock(results.wall_s)}, {results.executions} executions, "
        f"{len(results.cells)} cells, {escape(results.state)}{resumed}. {versions}</p></header>"
    )


def _tiles(results: Results) -> str:
    tiles = []
    for gain in results.gains:
        first, last = _ends(results.evaluations, gain.mode)
        change = gain.change
        text = f"{change.difference * 100:+.1f} points [{change.low * 100:+.1f}, {change.high * 100:+.1f}]"
        tiles.append(
            _tile(f"{gain.mode} pass rate", f"{first.pass_rate:.3f} → {last.pass_rate:.3f}", f"{text}, paired 95%")
        )
    tokens = results.tokens
    ratio = tokens.summed / tokens.unique if tokens.unique else 0.0
    checks = results.checks
    is_wrong = checks.checked_difference > TOLERANCE or checks.steps_without_check > 0
    state = _BAD if is_wrong else _GOOD if checks.checked_tokens else ""
    worst = f"largest difference {checks.checked_difference:.1e}"
    breach = _BAD if results.breach_s > 1 else _GOOD
    switching = results.switching
    tiles += [
        _tile("utilisation", f"{results.utilisation:.0%}", "cell time in useful work"),
        _tile("switches", str(results.switches), f"{switching.handed_over} live calls handed over"),
        _tile("staleness", f"{results.staleness.mean:.2f}", f"mean d, at most {results.staleness.max}"),
        _tile("prefix sharing", f"{ratio:.1f}x", f"{number(tokens.summed)} summed, {number(tokens.unique)} unique"),
        _tile("logprobs checked", number(checks.checked_tokens), worst, state),
        _tile("calls", number(results.calls.committed), _deliveries(results)),
        _tile("without a rollout cell", f"{results.breach_s:.1f} s", "while executions lived", breach),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _deliveries(results: Results) -> str:
    calls = results.calls
    return f"{calls.complete} complete, {calls.hung_up} hung up, {calls.unknown} unknown"


def _tile(name: str, value: str, text: str, state: str = "") -> str:
    return (
        f'<div class="tile {state}"><p class="name">{escape(name)}</p><p class="big">{escape(value)}</p>'
        f"<p>{escape(text)}</p></div>"
    )


def _ends(evaluations: Sequence[EvaluationRow], mode: str) -> tuple[EvaluationRow, EvaluationRow]:
    of_mode = [row for row in evaluations if row.mode == mode]
    return of_mode[0], of_mode[-1]


def _learning(results: Results) -> str:
    rewards = [(float(row.step), row.reward) for row in results.step_rows if row.reward is not None]
    series = [Series(name="reward in training", points=rewards, colour="var(--rollout)")]
    for mode, colour in (("sampled", "var(--training)"), ("greedy", "var(--level)")):
        rows = [row for row in results.evaluations if row.mode == mode]
        bars = [(float(r.step), r.low, r.high) for r in rows if r.low is not None and r.high is not None]
        points = [(float(row.step), row.pass_rate) for row in rows]
        series.append(Series(name=f"held out, {mode}", points=points, colour=colour, low_high=bars))
    chart = line_chart(series, label="reward and pass rate by step", y=(0.0, 1.0))
    evaluated = [
        (r.step, r.mode, f"{r.pass_rate:.3f}", f"{r.solved_rate:.1%}", r.tasks, r.dropped) for r in results.evaluations
    ]
    table = _table(("version", "decoding", "pass rate", "solved", "tasks", "dropped"), evaluated)
    entropy = [Series(name="entropy", points=_by_step(results, "entropy"), colour="var(--training)")]
    return (
        _section("Reward and pass rate", chart + table)
        + _section("Outcomes", _outcomes(results))
        + _section("Entropy", line_chart(entropy, label="entropy by step"))
    )


def _outcomes(results: Results) -> str:
    outcomes = results.outcomes
    bars = [
        ("scored", outcomes.scored - outcomes.timed_out, "var(--good)"),
        ("scored, timed out", outcomes.timed_out, "var(--level)"),
        ("no artifact", outcomes.no_artifact, "var(--training)"),
        ("evaluation failed", outcomes.evaluation_failed, "var(--bad)"),
        ("dropped", outcomes.dropped, "var(--bad)"),
    ]
    chart = bar_chart([(n, float(v), c) for n, v, c in bars], label="outcomes", total=float(results.executions))
    scoring = results.scoring
    tail = f"{scoring.mean_s:.2f} s, {scoring.p95_s:.2f} s, {scoring.max_s:.2f} s"
    facts: list[tuple[object, ...]] = [
        ("scoring after the harness: mean, 95% within, longest", tail),
        ("references scored in between", scoring.controls),
    ]
    if scoring.suspect:
        facts.append(("suspect: their reference no longer scores 1", ", ".join(scoring.suspect)))
    chart += _table(("scoring", ""), facts)
    if not results.reasons:
        return chart
    return chart + _table(("outcome", "reason", "executions"), [*results.reasons[:8]])


def _scheduling(results: Results) -> str:
    counts = [(f"d = {d}", float(count), "var(--rollout)") for d, count in results.staleness.counts.items()]
    groups = sum(results.staleness.counts.values())
    cells = [
        (
            f"cell {c.cell_id}",
            f"{c.rollout_s:.0f} s",
            f"{c.training_s:.0f} s",
            f"{c.switching_s:.1f} s",
            f"{c.idle_s:.0f} s",
            f"{c.utilisation:.0%}",
        )
        for c in results.cells
    ]
    switching = results.switching
    facts = [
        ("switches to training, to rollout", f"{switching.to_training}, {switching.to_rollout}"),
        ("switches that handed over a call", f"{switching.with_hand_over} of {switching.to_training}"),
        ("calls handed over, parked", f"{switching.handed_over}, {switching.parked}"),
        ("tokens of the calls that moved", number(switching.moved_tokens)),
        ("time of a switch, mean and longest", f"{switching.mean_s:.2f} s, {switching.max_s:.2f} s"),
        ("publications, tokens prefilled again", f"{results.publications}, {number(results.prefilled_tokens)}"),
    ]
    return (
        _section("Where cell time went", _table(("", "rollout", "training", "switching", "idle", "useful"), cells))
        + _section("Switches", _table(("", ""), facts))
        + _section("Staleness of groups", bar_chart(counts, label="staleness", total=float(groups)))
    )


def _training(results: Results) -> str:
    tokens = results.tokens
    bars = [
        ("summed over calls", float(tokens.summed), "var(--switching)"),
        ("unique in trees", float(tokens.unique), "var(--level)"),
        ("sampled", float(tokens.sampled), "var(--rollout)"),
        ("trained", float(tokens.trained), "var(--training)"),
    ]
    seconds = [Series(name="seconds", points=_by_step(results, "forward_backward_s"), colour="var(--training)")]
    checks = [
        Series(
            name="largest difference",
            points=[(float(r.step), r.checked_difference) for r in results.step_rows if r.checked_tokens],
            colour="var(--good)",
        )
    ]
    leaves = [
        Series(name="candidate leaves", points=_by_step(results, "leaves"), colour="var(--switching)"),
        Series(name="admitted rows", points=_by_step(results, "rows"), colour="var(--training)"),
    ]
    checked = line_chart(checks, label="difference of logprobs", lines_at=[(TOLERANCE, "1e-4")])
    return (
        _section("Tokens", bar_chart(bars, label="tokens"))
        + _section("Exactness: behaviour against training logprobs", checked)
        + _section("Forward-backward", line_chart(seconds, label="forward-backward by step", y_label="s"))
        + _section("Leaves", line_chart(leaves, label="leaves by step"))
    )


def _by_step(results: Results, field: str) -> list[tuple[float, float]]:
    return [(float(row.step), float(getattr(row, field))) for row in results.step_rows]


def _step_table(results: Results) -> str:
    names = ("step", "ended", "reward", "d", "S", "rows", "trained tokens", "loss", "KL", "gradient", "cut", "checked")
    rows = [
        (
            r.step,
            clock(r.ended_s),
            "-" if r.reward is None else f"{r.reward:.3f}",
            max(r.staleness, default=0),
            r.executions,
            f"{r.rows}/{r.leaves}",
            f"{r.trained_tokens:,}",
            "empty" if r.empty else f"{r.loss:+.4f}",
            f"{r.kl:.4f}",
            f"{r.gradient_norm:.2f}",
            f"{r.truncated_share:.1%}",
            f"{r.checked_tokens:,}",
        )
        for r in results.step_rows
    ]
    return f"<details><summary>{len(rows)} steps</summary>{_table(names, rows)}</details>"


def _table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _closer(results: Results, trees: str) -> str:
    run = escape(results.run)
    link = f'<p><a href="{escape(trees, quote=True)}">Trees of the executions</a></p>' if trees else ""
    commands = (
        f"opengyre trees {run} --html trees.html\nopengyre report {run} --json\n"
        f"opengyre report {run} --perfetto trace.json\nopengyre doctor {run}"
    )
    return _section("Look closer", f"{link}<pre>{commands}</pre>")
