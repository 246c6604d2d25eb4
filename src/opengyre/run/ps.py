"""List the live executions of a run and their shims."""

import argparse
import sys
import time
from pathlib import Path

import msgspec
from rich.table import Table

from opengyre.execute.live import live_shims
from opengyre.report.console import console
from opengyre.run.folder import read_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    """Print the live executions of a run."""
    read_config(arguments.run)
    live = live_shims(arguments.run / "executions")
    now = time.time()
    if arguments.json:
        rows = [{"execution_id": name, "pid": mark.pid, "age_s": round(now - mark.started, 1)} for name, mark in live]
        sys.stdout.write(msgspec.json.encode({"executions": rows}).decode() + "\n")
        return 0
    table = Table(title=f"{len(live)} live executions", title_justify="left")
    for name in ("execution", "shim", "age"):
        table.add_column(name, justify="left" if name == "execution" else "right")
    for name, mark in live:
        table.add_row(name, str(mark.pid), f"{now - mark.started:.0f} s")
    console().print(table)
    return 0
