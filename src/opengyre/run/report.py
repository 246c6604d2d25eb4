"""Show what a run has come to: tables, one HTML page, JSON, or a trace."""

import argparse
import fcntl
import sys
from pathlib import Path

import msgspec

from opengyre.core.errors import InputError
from opengyre.report.console import console
from opengyre.report.page import page
from opengyre.report.results import summarise
from opengyre.report.tables import show_results
from opengyre.report.trace import trace_events
from opengyre.run.folder import read_config
from opengyre.run.report_data import read_run

PAGE = "report.html"
TREES = "trees.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, ended or going on")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help=f"where the page goes (default: RUN/{PAGE})")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, write no page")
    parser.add_argument("--perfetto", type=Path, metavar="FILE.json", help="also write a trace for ui.perfetto.dev")


def main(arguments: argparse.Namespace) -> int:
    """Print the report of a run and write its page."""
    read_config(arguments.run)
    data = read_run(arguments.run, is_running=is_running(arguments.run))
    results = summarise(data)
    if arguments.perfetto is not None:
        trace = {"displayTimeUnit": "ms", "traceEvents": trace_events(data.records)}
        _write(arguments.perfetto, msgspec.json.encode(trace))
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(results).decode() + "\n")
        return 0
    out = arguments.out or arguments.run / PAGE
    _write(out, page(data, results, trees=TREES if (out.parent / TREES).exists() else "").encode())
    show_results(results, console())
    console().print(f"page: {out}", soft_wrap=True, markup=False)
    return 0


def write_page(run: Path) -> Path:
    """Write the page of a run into its folder and print the tables; what a driver does at its end."""
    data = read_run(run)
    results = summarise(data)
    out = run / PAGE
    _write(out, page(data, results, trees=TREES if (run / TREES).exists() else "").encode())
    show_results(results, console())
    return out


def is_running(run: Path) -> bool:
    """Return whether a driver is at work in the folder of a run."""
    try:
        with (run / "driver.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
