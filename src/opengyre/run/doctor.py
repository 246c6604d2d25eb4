"""Say what works on this machine and what a missing piece costs; of a run, its integrity and its disk forecast."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from opengyre.report.console import console
from opengyre.run.doctor_machine import machine_findings
from opengyre.run.doctor_run import run_findings
from opengyre.run.findings import Finding, State

_COLOURS = {State.GOOD: "green", State.NOTE: "cyan", State.BAD: "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="folder of a run to check")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 if something that a run needs does not work."""
    machine = machine_findings(Path.cwd() if arguments.run is None else arguments.run)
    run = [] if arguments.run is None else run_findings(arguments.run)
    works = not any(finding.state is State.BAD for finding in [*machine, *run])
    if arguments.json:
        answer = {"works": works, "machine": machine, "run": run}
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    else:
        _show("this machine", machine)
        if arguments.run is not None:
            _show(os.fspath(arguments.run), run)
    return 0 if works else 1


def _show(title: str, findings: Sequence[Finding]) -> None:
    table = Table(box=box.SIMPLE, title=Text(title), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.seen)
        if finding.fix:
            text.append(f"\n{finding.fix}", style="dim")
        table.add_row(Text(finding.state.value, style=_COLOURS[finding.state]), finding.name, text)
    console().print(table)
