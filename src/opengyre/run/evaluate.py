"""Evaluate weights on held-out tasks, sampled and greedy."""

import argparse
import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from opengyre.core.config import Config, load_config
from opengyre.core.errors import InputError
from opengyre.core.records import EvaluationRecord
from opengyre.ledger.ledger import Ledger
from opengyre.report.console import console
from opengyre.run.folder import RunFolder
from opengyre.run.supported import check_supported
from opengyre.run.train import drive, install_weights
from opengyre.run.warmstart import TOKENIZER, shown_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("config", type=Path, metavar="CONFIG.toml")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="a run, or a folder with tokenizer and weights")
    parser.add_argument("--tasks", type=int, metavar="N", help="held-out tasks (default: evaluation.tasks)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="override a key")


def main(arguments: argparse.Namespace) -> int:
    """Run the evaluation and print pass rates."""
    config = load_config(arguments.config, arguments.set)
    source = arguments.weights or shown_progress(config)
    records = evaluate(config, source, tasks=arguments.tasks or config.evaluation.tasks)
    if arguments.json:
        console().print_json(data={"evaluations": [as_json(record) for record in records]})
        return 0
    table = Table(title=f"held out, {source}")
    for name in ("decoding", "pass rate", "solved", "tasks"):
        table.add_column(name, justify="left" if name == "decoding" else "right")
    for record in records:
        row = as_json(record)
        table.add_row(row["mode"], f"{row['pass_rate']:.3f}", f"{row['solved_rate']:.3f}", str(row["tasks"]))
    console().print(table)
    return 0


def as_json(record: EvaluationRecord) -> dict[str, Any]:
    """Return an evaluation as the report shows it."""
    return {
        "step": record.version,
        "mode": record.kind.value.removeprefix("eval-"),
        "pass_rate": record.pass_rate,
        "solved_rate": record.solved_rate,
        "tasks": len(record.task_ids),
    }


def evaluate(config: Config, source: Path, *, tasks: int) -> list[EvaluationRecord]:
    """Return the evaluations of the newest weights of a folder.

    Raises:
        InputError: The folder holds no weights, or there are not so many held-out tasks.
    """
    if not 1 <= tasks <= config.tasks.heldout_count:
        raise InputError(f"--tasks {tasks}: expected 1 to tasks.heldout_count = {config.tasks.heldout_count}")
    check_supported(config)
    if config.cells.engine == "emulated":
        raise InputError("cells.engine = 'emulated': eval needs an engine that computes, expected 'reference'")
    weights = newest_weights(source)
    replace = msgspec.structs.replace
    changed = replace(
        config,
        run=replace(config.run, steps=0),
        evaluation=replace(config.evaluation, at=(0,), tasks=tasks),
    )
    scratch = Path(tempfile.mkdtemp(prefix="opengyre-eval-"))
    try:
        folder = RunFolder.create(scratch / "run", changed)
        try:
            install_weights(folder, tokenizer=source / TOKENIZER, weights=weights)
            ledger = Ledger.open(folder.path)
            try:
                asyncio.run(drive(folder, ledger, is_resumed=False, on_change=None))
                return ledger.records(EvaluationRecord)
            finally:
                ledger.close()
        finally:
            folder.close()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def newest_weights(source: Path) -> Path:
    """Return the newest weight file of a run folder or of a folder with weights.

    Raises:
        InputError: There is none, or no tokenizer beside it.
    """
    files = sorted((source / "weights").glob("v*.safetensors")) or sorted(source.glob("*.safetensors"))
    if not files or not (source / TOKENIZER).exists():
        raise InputError(f"{source}: expected {TOKENIZER} and weights (a run, or a warm start)")
    return files[-1]
