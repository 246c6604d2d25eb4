"""The figures of a run as tables for the terminal."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opengyre.report.figures import Results, Scoring
from opengyre.report.svg import clock, number


def show_results(results: Results, console: Console) -> None:
    """Print what a run has come to."""
    for table in (summary_table(results), evaluation_table(results), cell_table(results)):
        if table.row_count:
            console.print(table)


def summary_table(results: Results) -> Table:
    """Return the figures of the whole run, one a row."""
    table = Table(
        box=box.SIMPLE, show_header=False, title=Text(f"{results.run}, {results.state}"), title_justify="left"
    )
    for name, value in _summary(results):
        table.add_row(name, Text(value))
    return table


def _summary(results: Results) -> list[tuple[str, str]]:
    rewards = [reward for reward in results.reward if reward is not None]
    tokens, calls, outcomes = results.tokens, results.calls, results.outcomes
    switching, checks = results.switching, results.checks
    ratio = tokens.summed / tokens.unique if tokens.unique else 0.0
    rows = [
        ("steps", f"{results.steps} in {clock(results.wall_s)}, {results.executions} executions"),
        ("utilisation", f"{results.utilisation:.1%} of cell time in useful work"),
        ("switches", f"{results.switches}, {switching.handed_over} live calls handed over, {switching.parked} parked"),
        ("staleness d", f"mean {results.staleness.mean:.2f}, max {results.staleness.max}"),
        (
            "tokens",
            f"{number(tokens.summed)} summed, {number(tokens.unique)} unique ({ratio:.1f}x), "
            f"{number(tokens.sampled)} sampled, {number(tokens.trained)} trained",
        ),
        (
            "calls",
            f"{calls.committed}: {calls.complete} complete, {calls.hung_up} hung up, {calls.unknown} unknown; "
            f"{calls.restored} restored, {calls.rendered} rendered, {calls.rewritten} rewritten",
        ),
        (
            "outcomes",
            f"{outcomes.scored} scored ({outcomes.timed_out} timed out), {outcomes.no_artifact} no artifact, "
            f"{outcomes.evaluation_failed} evaluation failed, {outcomes.dropped} dropped",
        ),
        ("scoring", scoring_in_words(results.scoring)),
        (
            "exactness",
            f"{number(checks.checked_tokens)} logprobs checked, largest difference {checks.checked_difference:.1e}, "
            f"{checks.steps_without_check} steps without a check",
        ),
        ("without a rollout cell", f"{results.breach_s:.2f} s while executions lived"),
    ]
    if rewards:
        rows.insert(1, ("reward", f"{rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last"))
    return rows


def scoring_in_words(scoring: Scoring) -> str:
    """Return the evaluation tail and the controls in one line."""
    suspect = f", suspect: {', '.join(scoring.suspect)}" if scoring.suspect else ""
    return (
        f"{scoring.mean_s:.2f} s after the harness, 95% within {scoring.p95_s:.2f} s, longest {scoring.max_s:.2f} s; "
        f"{scoring.controls} references scored in between{suspect}"
    )


def evaluation_table(results: Results) -> Table:
    """Return the held-out evaluations and the paired change from first to last."""
    table = Table(box=box.SIMPLE, title="held-out tasks", title_justify="left")
    for name in ("version", "decoding", "pass rate", "95%", "solved", "tasks", "change"):
        table.add_column(name, justify="left" if name in {"decoding", "change"} else "right")
    changes = {(gain.mode, gain.to_step): gain.change for gain in results.gains}
    for row in results.evaluations:
        change = changes.get((row.mode, row.step))
        interval = "" if row.low is None or row.high is None else f"{row.low:.3f} to {row.high:.3f}"
        points = "" if change is None else f"{change.difference * 100:+.1f}"
        span = "" if change is None else f" points ({change.low * 100:+.1f} to {change.high * 100:+.1f})"
        table.add_row(
            str(row.step),
            row.mode,
            f"{row.pass_rate:.3f}",
            interval,
            f"{row.solved_rate:.1%}",
            str(row.tasks),
            points + span,
        )
    return table


def cell_table(results: Results) -> Table:
    """Return where the time of each cell went."""
    table = Table(box=box.SIMPLE, title="cell time", title_justify="left")
    for name in ("cell", "rollout", "training", "switching", "idle", "useful"):
        table.add_column(name, justify="right")
    for cell in results.cells:
        times = (cell.rollout_s, cell.training_s, cell.switching_s, cell.idle_s)
        table.add_row(str(cell.cell_id), *(f"{time_s:.1f} s" for time_s in times), f"{cell.utilisation:.0%}")
    return table
