"""Compare rules by live runs of equal seeds and equal work on this machine."""

import argparse
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.table import Table

from opengyre.core.config import Config, load_config
from opengyre.core.errors import InputError, RunError
from opengyre.core.records import EvaluationRecord
from opengyre.core.types import Kind
from opengyre.ledger.ledger import Ledger
from opengyre.report.console import console
from opengyre.report.results import summarise
from opengyre.report.statistics import mean, mean_interval
from opengyre.run.folder import RunFolder
from opengyre.run.report_data import read_run
from opengyre.run.supported import check_supported
from opengyre.run.train import drive_folder, install_policy

RULES = ("waterlevel", "lookahead", "static", "colocate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("config", type=Path, metavar="CONFIG.toml")
    parser.add_argument(
        "--rules", default=",".join(RULES), help=f"comma-separated (default: {','.join(RULES)}); static-N trains on N"
    )
    parser.add_argument("--cells", default="", metavar="K,...", help="numbers of cells (default: cells.count)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each rule, seeds run.seed, run.seed + 1, ...")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), metavar="DIR", help="new folder for the runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="override a key")


def main(arguments: argparse.Namespace) -> int:
    """Run every rule with every seed and number of cells, interleaved, and print the tables."""
    config = load_config(arguments.config, arguments.set)
    plans = plans_of(config, rules=arguments.rules, cells=arguments.cells, seeds=arguments.seeds)
    rows = [compare_one(plan, arguments.out / name, is_quiet=arguments.json) for name, plan in plans]
    summary = summaries(rows)
    if arguments.json:
        sys.stdout.write(msgspec.json.encode({"rules": rows, "summary": summary}).decode() + "\n")
        return 0
    console().print(table_of(rows))
    console().print(summary_table(summary))
    return 0


def plans_of(config: Config, *, rules: str, cells: str, seeds: int) -> list[tuple[str, Config]]:
    """Return name and configuration of each run in order: seeds outside, so that rules are interleaved in time.

    Raises:
        InputError: A rule or a number is none.

    >>> from opengyre.core.config import decode_config
    >>> [name for name, _ in plans_of(decode_config({}), rules="static,colocate", cells="", seeds=2)]
    ['static-k2-0', 'colocate-k2-0', 'static-k2-1', 'colocate-k2-1']
    """
    asked = f"--rules {rules} --cells {cells or config.cells.count} --seeds {seeds}"
    try:
        counts = [int(count) for count in cells.split(",")] if cells else [config.cells.count]
        settings = [rule_settings(rule) for rule in rules.split(",")]
    except (KeyError, ValueError) as error:
        raise InputError(f"{asked}: expected rules of {', '.join(RULES)} or static-N, and numbers of cells") from error
    if seeds < 1 or min(counts) < 1:
        raise InputError(f"{asked}: expected numbers of 1 or more")
    replace = msgspec.structs.replace
    return [
        (
            f"{rule}-k{count}-{config.run.seed + index}",
            replace(
                config,
                run=replace(config.run, seed=config.run.seed + index),
                cells=replace(config.cells, count=count),
                schedule=replace(config.schedule, **changes),
            ),
        )
        for index in range(seeds)
        for count in counts
        for rule, changes in zip(rules.split(","), settings, strict=True)
    ]


def rule_settings(rule: str) -> dict[str, Any]:
    """Return the keys of ``[schedule]`` that a rule on the command line stands for.

    >>> rule_settings("static-2")
    {'rule': 'static', 'training_cells': 2}
    """
    name, dash, count = rule.partition("-")
    if name not in RULES or (dash and name != "static"):
        raise KeyError(rule)
    return {"rule": name, "training_cells": int(count)} if dash else {"rule": name}


def compare_one(config: Config, path: Path, *, is_quiet: bool = False) -> dict[str, Any]:
    """Run one configuration to its end and return its row; quiet: without a line a step.

    Raises:
        RunError: It was interrupted.
    """
    check_supported(config)
    folder = RunFolder.create(path, config)
    install_policy(folder)
    started_s, before_s = time.monotonic(), _processor_s()
    if not drive_folder(folder, is_resumed=False, is_quiet=is_quiet):
        raise RunError(f"{path}: interrupted; go on with opengyre train --resume {path}")
    cores = len(os.sched_getaffinity(0))
    share = (_processor_s() - before_s) / (time.monotonic() - started_s) / cores
    return {**row_of(config, folder.path), "cpu_share": round(share, 3)}


def _processor_s() -> float:
    """Return the processor time of this process and of all that it and its children have waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def row_of(config: Config, path: Path) -> dict[str, Any]:
    """Return what a finished run has come to."""
    results = summarise(read_run(path))
    ledger = Ledger.open(path, read_only=True)
    evaluations = [record for record in ledger.records(EvaluationRecord) if record.kind is Kind.EVAL_SAMPLED]
    ledger.close()
    schedule = config.schedule
    return {
        "rule": schedule.rule + (f"-{schedule.training_cells}" if schedule.rule == "static" else ""),
        "cells": config.cells.count,
        "seed": config.run.seed,
        "wall_s": round(results.wall_s, 1),
        "trained_tokens_per_hour": round(3600 * results.tokens.trained / results.wall_s),
        "utilisation": round(results.utilisation, 3),
        "pass_rate": round(evaluations[-1].pass_rate, 3) if evaluations else None,
        "switches": results.switches,
        "staleness_mean": results.staleness.mean,
        "staleness_max": results.staleness.max,
        "handed_over": results.calls.handed_over,
        "moved_tokens": results.switching.moved_tokens,
        "predicted_wall_s": None,
    }


def summaries(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each number of cells and rule the mean and 95% interval over seeds, and against the first rule.

    The ratio to the first rule is taken seed by seed, for equal seeds are equal work.

    >>> rest = {"cells": 2, "trained_tokens_per_hour": 1.0, "utilisation": 0.5}
    >>> runs = (("a", 0, 10.0), ("b", 0, 12.0), ("a", 1, 20.0), ("b", 1, 26.0))
    >>> rows = [{"rule": rule, "seed": seed, "wall_s": wall_s, **rest} for rule, seed, wall_s in runs]
    >>> [(one["rule"], one["wall_s"]["mean"], one["wall_ratio"]["mean"]) for one in summaries(rows)]
    [('a', 15.0, 1.0), ('b', 19.0, 1.25)]
    """
    found = []
    for cells in dict.fromkeys(row["cells"] for row in rows):
        of_cells = [row for row in rows if row["cells"] == cells]
        first = {row["seed"]: row["wall_s"] for row in of_cells if row["rule"] == of_cells[0]["rule"]}
        for rule in dict.fromkeys(row["rule"] for row in of_cells):
            own = [row for row in of_cells if row["rule"] == rule]
            entry: dict[str, Any] = {"rule": rule, "cells": cells, "seeds": len(own)}
            for key in ("wall_s", "trained_tokens_per_hour", "utilisation"):
                entry[key] = _interval([row[key] for row in own])
            entry["wall_ratio"] = _interval([row["wall_s"] / first[row["seed"]] for row in own])
            found.append(entry)
    return found


def _interval(values: list[float]) -> dict[str, float | None]:
    low, high = mean_interval(values) or (None, None)
    return {"mean": mean(values), "low": low, "high": high}


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    table = Table(title="runs", title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    columns = {
        "rule": ("rule", ""),
        "cells": ("cells", "d"),
        "seed": ("seed", "d"),
        "wall s": ("wall_s", ".1f"),
        "trained/h": ("trained_tokens_per_hour", ",.0f"),
        "useful": ("utilisation", ".0%"),
        "pass": ("pass_rate", ".3f"),
        "switches": ("switches", "d"),
        "moved": ("handed_over", "d"),
        "CPU": ("cpu_share", ".0%"),
    }
    for name in columns:
        table.add_column(name, justify="left" if name == "rule" else "right", no_wrap=True)
    for row in rows:
        cells = ("-" if row[key] is None else format(row[key], form) for key, form in columns.values())
        table.add_row(*cells)
    return table


def summary_table(summary: list[dict[str, Any]]) -> Table:
    """Return means with their 95% intervals as a table; one seed has no interval."""
    table = Table(title="mean over seeds [95% interval]", title_justify="left", box=box.SIMPLE)
    for name in ("rule", "cells", "seeds", "wall s", "trained tokens per hour", "utilisation", "wall / first rule"):
        table.add_column(name, justify="left" if name == "rule" else "right")
    for one in summary:
        table.add_row(
            one["rule"],
            str(one["cells"]),
            str(one["seeds"]),
            _shown(one["wall_s"], ".1f"),
            _shown(one["trained_tokens_per_hour"], ",.0f"),
            _shown(one["utilisation"], ".3f"),
            _shown(one["wall_ratio"], ".3f"),
        )
    return table


def _shown(interval: dict[str, float | None], form: str) -> str:
    text = format(interval["mean"], form)
    return text if interval["low"] is None else f"{text} [{interval['low']:{form}}, {interval['high']:{form}}]"
