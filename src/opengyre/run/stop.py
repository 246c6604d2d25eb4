"""End the live executions of a run whose driver is gone."""

import argparse
import asyncio
from pathlib import Path

from opengyre.core.errors import InputError, RunError
from opengyre.execute.live import end_shims, live_shims
from opengyre.report.console import console
from opengyre.run.folder import read_config
from opengyre.run.report import is_running

GRACE_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")


def main(arguments: argparse.Namespace) -> int:
    """End the shims and harnesses that a dead driver left.

    Raises:
        InputError: A driver is at work; interrupt it instead.
        RunError: Some did not end.
    """
    read_config(arguments.run)
    if is_running(arguments.run):
        raise InputError(f"{arguments.run}: its driver is at work; interrupt it with Ctrl-C instead")
    executions = arguments.run / "executions"
    live = len(live_shims(executions))
    asyncio.run(end_shims(executions, grace_s=GRACE_S))
    left = live_shims(executions)
    if left:
        raise RunError(f"{len(left)} of {live} executions did not end within {GRACE_S:.0f} s: {left[0][0]}")
    console().print(f"{live} executions ended")
    return 0
