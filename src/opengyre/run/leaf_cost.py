"""What J_max costs: forward-backward time of a finished run's trees at several caps.

    python -m opengyre.run.leaf_cost RUN [--blocks 4]

The trees of every step are admitted again at each cap and trained on the run's newest weights, without an optimizer
step; the order of the caps changes from step to step. Prints a table by block of steps.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.table import Table

from opengyre.algorithm.settings import LossSettings
from opengyre.core.cells import WeightsRef
from opengyre.core.config import Config
from opengyre.core.records import StepRecord
from opengyre.ledger.ledger import Ledger
from opengyre.model.weights import read_version
from opengyre.report.console import console
from opengyre.run.evaluate import newest_weights
from opengyre.run.folder import read_config
from opengyre.run.groups import GroupBook
from opengyre.run.material import GroupMaterial, material_of
from opengyre.train.trainer import Trainer

CAPS = (1, 5, 0)
"""J_max; 0 is without a cap."""


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m opengyre.run.leaf_cost")
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of steps in the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console().print(table_of(measure(arguments.run), blocks=arguments.blocks))
    return 0


def measure(run: Path) -> list[dict[str, Any]]:
    """Return one row a step and cap: step, cap, seconds, rows, leaves, trained tokens."""
    config, ledger = read_config(run), Ledger.open(run, read_only=True)
    decoder, parameters = read_version(WeightsRef(version=0, incarnation=0, path=str(newest_weights(run)), checksum=""))
    trainer = Trainer(decoder, parameters, version=0, loss=LossSettings())
    book = book_of(ledger, config)
    rows: list[dict[str, Any]] = []
    for record in ledger.records(StepRecord):
        turn = record.step % len(CAPS)
        for cap in CAPS[turn:] + CAPS[:turn]:
            made = [material(config, ledger, book, group_id, cap) for group_id in record.groups]
            seconds = 0.0
            for index, (name, part) in enumerate(item for group in made for item in group.micro_steps.items()):
                seconds += trainer.run_micro_step(f"{name}-{cap}-{index}", part, step=0).seconds
            trainer.forget_step(0)
            rows.append(
                {
                    "step": record.step,
                    "cap": cap,
                    "seconds": seconds,
                    "rows": sum(group.rows for group in made),
                    "leaves": sum(group.leaves for group in made),
                    "trained": sum(group.trained_tokens for group in made),
                }
            )
    ledger.close()
    return rows


def book_of(ledger: Ledger, config: Config) -> GroupBook:
    """Return the groups of a run with their outcomes."""
    book = GroupBook(group_size=config.schedule.group_size)
    outcomes = ledger.outcomes()
    for execution in ledger.executions():
        if execution.kind.is_evaluation:
            continue
        book.open(execution)
        outcome = outcomes.get(execution.execution_id)
        if outcome is not None and outcome.__struct_config__.tag in ("scored", "no_artifact"):
            book.close(execution.execution_id, outcome)
    return book


def material(config: Config, ledger: Ledger, book: GroupBook, group_id: int, cap: int) -> GroupMaterial:
    """Return a group's micro-steps under another cap."""
    changed = msgspec.structs.replace(config, algorithm=msgspec.structs.replace(config.algorithm, max_leaves=cap))
    group = book.group(group_id)
    calls = {execution_id: ledger.read_calls(execution_id) for execution_id in group.valid_executions}
    return material_of(group, calls, changed)


def table_of(rows: list[dict[str, Any]], *, blocks: int) -> Table:
    """Return seconds at each cap as a share of uncapped, by block of steps."""
    steps = max(row["step"] for row in rows) + 1
    sums: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        block = min(blocks - 1, row["step"] * blocks // steps)
        for key in (block, blocks):
            for name in ("seconds", "rows", "leaves", "trained"):
                sums[key, row["cap"]][name] += row[name]
    table = Table(title="forward-backward at J_max as a share of uncapped", title_justify="left")
    for name in (
        "steps",
        "candidates",
        "uncapped s",
        *(f"J={cap} {what}" for cap in CAPS[:2] for what in ("time", "tokens")),
    ):
        table.add_column(name, justify="right")
    for block in range(blocks + 1):
        whole = sums[block, 0]
        first, last = block * steps // blocks, (block + 1) * steps // blocks - 1
        cells = [f"{first}-{last}" if block < blocks else "all", f"{whole['leaves']:.0f}", f"{whole['seconds']:.1f}"]
        for cap in CAPS[:2]:
            cells += [f"{sums[block, cap][name] / whole[name]:.1%}" for name in ("seconds", "trained")]
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
