"""Compare rules in virtual time: the real scheduler on simulated cells, at any size."""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from opengyre.core.errors import ConfigError, FileError, InputError
from opengyre.report.console import console, plain_table
from opengyre.report.statistics import mean_interval
from opengyre.run.calibrate import Calibration, calibrate, calibration_json, show_calibration
from opengyre.run.recorded import is_run, recorded_sessions
from opengyre.run.replicate import replicate, show_levels
from opengyre.run.simulate_page import simulate_page
from opengyre.sim.bounds import latency_bound_s, work_bound_s
from opengyre.sim.outcome import Outcome, shares, staleness, trained_tokens_per_hour
from opengyre.sim.rules import FORMS, settings_of
from opengyre.sim.study import Progress as StepProgress
from opengyre.sim.study import RuleResult, Study, study
from opengyre.sim.traces import Session
from opengyre.sim.workload import Workload, load_workloads

RULES = ("lookahead", "waterlevel", "waterlevel:1.0:0", "colocate", "static")
DIGITS = 6
LEGEND = (
    "h/step and tok/h (trained tokens): over the measured steps. roll, train: share of cell time in useful work. late: "
    "executions cut off. d: mean/max staleness. moved: KV tokens. bound: times the lower bound. split: times as "
    "fast as the best static split, 95% interval.\n"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("workload", type=Path, nargs="?", metavar="WORKLOAD.toml")
    parser.add_argument(
        "--calibrate", type=Path, metavar="RUN", help="costs from a recorded run; without a workload, all from it"
    )
    parser.add_argument("--rules", default=",".join(RULES), help=f"comma-separated: {FORMS} (static: best by search)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the workload's)")
    parser.add_argument("--seeds", type=int, help="number of paired seeds 1, 2, ... (default: the workload's)")
    parser.add_argument("--regimes", metavar="NAME,...", help="of a file with regimes: only these (default: all)")
    parser.add_argument(
        "--replicate", action="store_true", help="settings of a grid in which the published ratios come out"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the cells' modes over time")


def main(arguments: argparse.Namespace) -> int:
    """Run every rule on every workload of the file and print the tables."""
    started_s = time.monotonic()
    rules = arguments.rules.split(",")
    calibration = None if arguments.calibrate is None else calibrate(arguments.calibrate)
    workloads = chosen_workloads(arguments, calibration)
    if arguments.replicate:
        return _replicate(workloads, arguments)
    for workload in workloads.values():
        for rule in rules:
            settings_of("static:1" if rule == "static" and workload.cells > 1 else rule, workload)
    recorded = () if calibration is None or arguments.workload is not None else calibration.recorded.sessions
    studies = run_studies(workloads, rules, seeds=arguments.seeds, sessions=recorded)
    if arguments.html is not None:
        write_page(arguments.html, studies)
    if arguments.json:
        found = json_of(studies)
        if calibration is not None:
            found["calibration"] = _rounded(calibration_json(calibration))
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        if calibration is not None:
            show_calibration(calibration)
        show(studies)
    runs = sum(one.runs for one in studies)
    sys.stderr.write(f"{runs} simulated runs in {time.monotonic() - started_s:.1f} s\n")
    return 0


def _replicate(workloads: dict[str, Workload], arguments: argparse.Namespace) -> int:
    levels = []
    for name, workload in workloads.items():
        levels.append(replicate(name, workload, seeds_of(workload, arguments.seeds)))
        if not arguments.json:
            show_levels(levels[-1])
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(_rounded({"levels": levels})).decode() + "\n")
    return 0


def chosen_workloads(arguments: argparse.Namespace, calibration: Calibration | None = None) -> dict[str, Workload]:
    """Return the workloads that the command line asks for.

    Raises:
        InputError: A regime is unknown, or a number is impossible.
    """
    if arguments.seeds is not None and arguments.seeds < 1:
        raise InputError(f"--seeds {arguments.seeds}: expected at least 1")
    workloads = _named_workloads(arguments.workload, calibration)
    if arguments.regimes is not None:
        names = arguments.regimes.split(",")
        unknown = [name for name in names if name not in workloads]
        if unknown:
            raise InputError(f"--regimes {unknown[0]}: expected some of {', '.join(workloads)}")
        workloads = {name: workloads[name] for name in names}
    if arguments.steps is None:
        return workloads
    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps}: expected at least 1")
    return {name: msgspec.structs.replace(one, steps=arguments.steps) for name, one in workloads.items()}


def seeds_of(workload: Workload, asked: int | None) -> tuple[int, ...]:
    """Return the seeds 1, 2, ... where a number of them is asked for, else the workload's.

    >>> seeds_of(Workload(seeds=(7,)), 2), seeds_of(Workload(seeds=(7,)), None)
    ((1, 2), (7,))
    """
    return workload.seeds if asked is None else tuple(range(1, asked + 1))


def _named_workloads(path: Path | None, calibration: Calibration | None) -> dict[str, Workload]:
    if path is not None:
        workloads = load_workloads(path)
        if calibration is None:
            return workloads
        return {name: calibration.applied_to(one) for name, one in workloads.items()}
    if calibration is None:
        raise InputError("simulate: expected WORKLOAD.toml, --calibrate RUN, or both")
    return {calibration.run: calibration.workload}


def run_studies(
    workloads: dict[str, Workload],
    rules: Sequence[str],
    *,
    seeds: int | None,
    sessions: tuple[Session, ...] = (),
) -> list[Study]:
    """Run all rules on all workloads under a progress bar on the error stream, where that is a terminal.

    Args:
        workloads: By name; one whose trace is the folder of a run takes its executions.
        rules: As on the command line.
        seeds: How many; None for the workloads' own.
        sessions: Recorded executions that stand for every workload's own.
    """
    found: list[Study] = []
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        for number, (name, workload) in enumerate(workloads.items(), 1):
            task = bar.add_task(name, total=workload.steps)

            label = f"{number}/{len(workloads)} {name}"
            path = Path(workload.trace)
            work = recorded_sessions(path) if workload.trace and is_run(path) else sessions
            found.append(study(name, workload, rules, seeds_of(workload, seeds), _shown_on(bar, task, label), work))
            bar.remove_task(task)
    return found


def _shown_on(bar: Progress, task: TaskID, label: str) -> StepProgress:
    def show_step(rule: str, seed: int, step: int) -> None:
        bar.update(task, completed=step, description=f"{label} {rule} seed {seed}")

    return show_step


def write_page(path: Path, studies: Sequence[Study]) -> None:
    """Write the page.

    Raises:
        FileError: The file cannot be written.
    """
    try:
        path.write_text(simulate_page([(one, rows_of(one)) for one in studies]))
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}; expected a place for the page") from error


def _rounded(value: object) -> object:
    """Return a value with its floats to six digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


def ratio_of(workload: Workload, result: RuleResult, other: RuleResult) -> dict[str, float | None]:
    """Return how many times faster a rule is than another: the paired mean and its 95% interval."""
    pairs = zip(other.each_hours(workload), result.each_hours(workload), strict=True)
    logarithms = [math.log(theirs / own) for theirs, own in pairs]
    interval = mean_interval(logarithms)
    low, high = (None, None) if interval is None else (math.exp(interval[0]), math.exp(interval[1]))
    return {"mean": math.exp(sum(logarithms) / len(logarithms)), "low": low, "high": high}


def row_of(one: Study, result: RuleResult) -> dict[str, Any]:
    """Return the figures of a rule: means of the seeds."""
    workload, outcomes = one.workload, result.outcomes

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(outcomes)

    shared = [shares(outcome) for outcome in outcomes]
    hours = result.each_hours(workload)
    bounds = [one.bound_hours(outcome, index) for index, outcome in enumerate(outcomes)]
    return {
        "rule": result.rule,
        "hours_per_step": mean(hours),
        "hours_per_step_by_seed": hours,
        "total_hours": mean([outcome.step_done_s[-1] / 3600 for outcome in outcomes]),
        "trained_tokens_per_hour": mean([trained_tokens_per_hour(workload, outcome) for outcome in outcomes]),
        "utilisation": {
            "rollout": mean([share["useful_rollout"] for share in shared]),
            "training": mean([share["useful_training"] for share in shared]),
        },
        "modes": {mode: mean([share[mode] for share in shared]) for mode in ("rollout", "training", "switching")},
        "timeout_rate": mean([outcome.timed_out / outcome.executions for outcome in outcomes]),
        "staleness_mean": mean([staleness(outcome)[0] for outcome in outcomes]),
        "staleness_max": max(staleness(outcome)[1] for outcome in outcomes),
        "bound_ratio": mean([own / bound for own, bound in zip(hours, bounds, strict=True)]),
        "moved_kv_tokens": mean([outcome.moved_tokens for outcome in outcomes]),
        "switches_per_step": mean([outcome.switches / len(outcome.step_done_s) for outcome in outcomes]),
        "held_s": mean([outcome.held_s for outcome in outcomes]),
        "parked_s": mean([outcome.parked_s for outcome in outcomes]),
        "over_best_static": None if one.best_static is None else ratio_of(workload, result, one.best_static[1]),
        "executions": outcomes[0].executions,
    }


def rows_of(one: Study) -> list[dict[str, Any]]:
    """Return the figures of all rules of a study."""
    return [row_of(one, result) for result in one.results]


def study_json(one: Study) -> dict[str, Any]:
    """Return a study as the JSON object shows it."""
    workload = one.workload
    first: Sequence[Outcome] = one.results[0].outcomes
    groups = [outcome.groups.values() for outcome in first]
    best, relaxed = None, one.relaxed_hours
    if one.best_static is not None:
        best = {"training_cells": one.best_static[0], "hours_per_step": one.best_static[1].hours(workload)}
    return {
        "workload": one.name,
        "rules": rows_of(one),
        "best_static": best,
        "bounds": {
            "work_hours_per_step": sum(work_bound_s(workload, some) for some in groups) / 3600 / len(groups),
            "latency_hours_per_step": sum(latency_bound_s(workload, some) for some in groups) / 3600 / len(groups),
            "relaxed_hours_per_step": None if relaxed is None else sum(relaxed) / len(relaxed),
        },
        "measured_steps": list(workload.measured_steps),
        "events": sum(outcome.events for result in one.results for outcome in result.outcomes),
        "wall_s": sum(outcome.ended_s for result in one.results for outcome in result.outcomes),
    }


def json_of(studies: Sequence[Study]) -> dict[str, Any]:
    """Return the JSON object: of one workload its figures, of several a list and the summary.

    Choice: ``wall_s`` is virtual time, so that a seed gives the same bytes.
    """
    listed = [study_json(one) for one in studies]
    found = listed[0] if len(listed) == 1 else {"regimes": listed, "summary": summary_of(studies)}
    return {key: _rounded(value) for key, value in found.items()}


def summary_of(studies: Sequence[Study]) -> list[dict[str, Any]]:
    """Return for each rule by its place: geometric mean and least ratio to the best of the fixed baselines."""
    found: list[dict[str, Any]] = []
    rules = [result.rule for result in studies[0].results if not result.rule.startswith("static")]
    for rule in rules:
        static, best, bound = [], [], []
        for one in studies:
            own = next(result for result in one.results if result.rule == rule)
            baselines = [result for result in one.results if is_baseline(result.rule)]
            hours = own.hours(one.workload)
            bound.append(row_of(one, own)["bound_ratio"])
            if one.best_static is not None:
                static.append(one.best_static[1].hours(one.workload) / hours)
            if baselines:
                best.append(min(result.hours(one.workload) for result in baselines) / hours)
        found.append(
            {
                "rule": rule,
                "over_best_static_geometric_mean": _geometric_mean(static),
                "over_best_static_min": min(static, default=None),
                "over_best_baseline_geometric_mean": _geometric_mean(best),
                "over_best_baseline_min": min(best, default=None),
                "bound_ratio_mean": sum(bound) / len(bound),
            }
        )
    return found


def is_baseline(rule: str) -> bool:
    """Whether a rule is one of those that an elastic rule is judged against.

    >>> [is_baseline(rule) for rule in ("static:2", "colocate", "waterlevel:1.0:0", "waterlevel", "lookahead")]
    [True, True, True, False, False]
    """
    return rule.startswith("static:") or rule in ("colocate", "waterlevel:1.0:0")


def _geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(math.log(value) for value in values) / len(values)) if values else None


def show(studies: Sequence[Study]) -> None:
    """Print a table of each workload, and the summary of several."""
    for one in studies:
        console().print(table_of(one))
    console().print(LEGEND)
    if len(studies) > 1:
        console().print(summary_table(studies))


def table_of(one: Study) -> Table:
    """Return the rules of a workload as a table."""
    workload = one.workload
    title = (
        f"{one.name}: {workload.steps} steps, B {workload.batch_groups}, N {workload.group_size}, K {workload.cells}, "
        f"phi {workload.phi}, mu {workload.mu}, seeds {len(one.results[0].outcomes)}"
    )
    table = plain_table(title, ("rule", "h/step", "tok/h", "roll", "train", "late", "d", "moved", "bound", "split"))
    for row in rows_of(one):
        over = row["over_best_static"]
        table.add_row(
            row["rule"],
            f"{row['hours_per_step']:.3f}",
            f"{row['trained_tokens_per_hour'] / 1e6:.1f}M",
            f"{row['utilisation']['rollout']:.0%}",
            f"{row['utilisation']['training']:.0%}",
            f"{row['timeout_rate']:.1%}",
            f"{row['staleness_mean']:.2f}/{row['staleness_max']}",
            f"{row['moved_kv_tokens'] / 1e6:.0f}M",
            f"{row['bound_ratio']:.2f}",
            f"{over['mean']:.3f}{_half_width(over)}" if over else "-",
        )
    return table


def _half_width(ratio: dict[str, float | None]) -> str:
    low, high = ratio["low"], ratio["high"]
    return "" if low is None or high is None else f" ±{(high - low) / 2:.3f}"


def summary_table(studies: Sequence[Study]) -> Table:
    """Return the rules over all workloads as a table."""
    names = ("rule", "over best split", "least", "over best baseline", "least", "bound")
    table = plain_table(f"{len(studies)} workloads", names)
    for row in summary_of(studies):
        values = list(row.values())
        table.add_row(values[0], *("-" if value is None else f"{value:.3f}" for value in values[1:]))
    return table
