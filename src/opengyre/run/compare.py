"""Compare rules by live runs of equal seeds and equal work on this machine."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from opengyre.core.config import Config, load_config
from opengyre.core.errors import InputError, RunError
from opengyre.core.records import EvaluationRecord
from opengyre.core.types import Kind
from opengyre.ledger.ledger import Ledger
from opengyre.report.console import console
from opengyre.report.results import summarise
from opengyre.run.folder import RunFolder
from opengyre.run.report_data import read_run
from opengyre.run.supported import check_supported
from opengyre.run.train import drive_folder, install_policy

RULES = ("waterlevel", "static", "colocate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("config", type=Path, metavar="CONFIG.toml")
    parser.add_argument("--rules", default=",".join(RULES), help=f"comma-separated (default: {','.join(RULES)})")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each rule, seeds run.seed, run.seed + 1, ...")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), metavar="DIR", help="new folder for the runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="override a key")


def main(arguments: argparse.Namespace) -> int:
    """Run every rule with every seed, interleaved, and print the table."""
    config = load_config(arguments.config, arguments.set)
    rules = arguments.rules.split(",")
    unknown = [rule for rule in rules if rule not in RULES]
    if unknown or arguments.seeds < 1:
        raise InputError(f"--rules {arguments.rules} --seeds {arguments.seeds}: expected rules of {', '.join(RULES)}")
    plans = [(rule, config.run.seed + index) for index in range(arguments.seeds) for rule in rules]
    rows = [compare_one(with_rule(config, rule, seed), arguments.out / f"{rule}-{seed}") for rule, seed in plans]
    if arguments.json:
        sys.stdout.write(msgspec.json.encode({"rules": rows}).decode() + "\n")
        return 0
    console().print(table_of(rows))
    return 0


def with_rule(config: Config, rule: str, seed: int) -> Config:
    """Return the configuration with another rule and seed."""
    replace = msgspec.structs.replace
    changed: dict[str, Any] = {"rule": rule}
    return replace(config, run=replace(config.run, seed=seed), schedule=replace(config.schedule, **changed))


def compare_one(config: Config, path: Path) -> dict[str, Any]:
    """Run one configuration to its end and return its row.

    Raises:
        RunError: It was interrupted.
    """
    check_supported(config)
    folder = RunFolder.create(path, config)
    install_policy(folder)
    if not drive_folder(folder, is_resumed=False):
        raise RunError(f"{path}: interrupted; go on with opengyre train --resume {path}")
    return row_of(config, folder.path)


def row_of(config: Config, path: Path) -> dict[str, Any]:
    """Return what a finished run has come to."""
    results = summarise(read_run(path))
    ledger = Ledger.open(path, read_only=True)
    evaluations = [record for record in ledger.records(EvaluationRecord) if record.kind is Kind.EVAL_SAMPLED]
    ledger.close()
    return {
        "rule": config.schedule.rule,
        "seed": config.run.seed,
        "wall_s": round(results.wall_s, 1),
        "trained_tokens_per_hour": round(3600 * results.tokens.trained / results.wall_s),
        "utilisation": round(results.utilisation, 3),
        "pass_rate": round(evaluations[-1].pass_rate, 3) if evaluations else None,
        "switches": results.switches,
        "staleness_mean": results.staleness.mean,
        "staleness_max": results.staleness.max,
        "handed_over": results.calls.handed_over,
        "predicted_wall_s": None,
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    table = Table(title="rules", title_justify="left")
    shown = ("rule", "seed", "wall_s", "trained_tokens_per_hour", "utilisation", "pass_rate", "switches", "handed_over")
    for name in shown:
        table.add_column(name.replace("_", " "), justify="left" if name == "rule" else "right")
    for row in rows:
        table.add_row(*(str(row[name]) for name in shown))
    return table
