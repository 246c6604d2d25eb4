"""Measure what the budgets of the design are about, on this machine."""

import argparse
import importlib.util
import subprocess
import sys
from typing import Any

import msgspec
from rich import box
from rich.table import Table

from opengyre.core.errors import InputError, RunError
from opengyre.report.console import console

BENCHES = {
    "trees": "trajectory trees: building, admission",
    "simulate": "the scheduler under a virtual clock",
    "proxy": "overhead of a call in the proxy",
    "engine": "decoding and hand-over of the reference engine",
    "execution": "core seconds of an execution outside engine and trainer",
}
_CODE = "import importlib, json, sys; print(json.dumps(importlib.import_module(sys.argv[1]).run()))"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHES)} (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    """Run the named measurements, each in a process of its own."""
    unknown = [name for name in arguments.names if name not in BENCHES]
    if unknown:
        raise InputError(f"bench {unknown[0]}: no such measurement; expected one of {', '.join(BENCHES)}")
    chosen = arguments.names or available()
    absent = [name for name in chosen if name not in available()]
    if absent:
        raise InputError(f"bench {absent[0]}: not part of this version")
    results = []
    for name in chosen:
        found = measure(name)
        results += [{"bench": name, **result} for result in found]
        if not arguments.json:
            _show(name, found)
    if arguments.json:
        sys.stdout.write(msgspec.json.encode({"results": results}).decode() + "\n")
    return 0


def available() -> list[str]:
    """Return the measurements that this version has."""
    return [name for name in BENCHES if importlib.util.find_spec(_module(name)) is not None]


def measure(name: str) -> list[dict[str, Any]]:
    """Return the results of one measurement: case, value, unit.

    Choice: a fresh process each, so that neither torch nor the memory of one disturbs the next.

    Raises:
        RunError: The measurement failed.
    """
    ended = subprocess.run([sys.executable, "-c", _CODE, _module(name)], stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        raise RunError(f"bench {name}: exit code {ended.returncode}; its reason stands above")
    return list(msgspec.json.decode(ended.stdout.strip().splitlines()[-1]))


def _module(name: str) -> str:
    return f"opengyre.run.bench_{name}"


def _show(name: str, results: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE, title=f"{name}: {BENCHES[name]}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for result in results:
        value = result["value"]
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        table.add_row(str(result["case"]), shown, str(result["unit"]))
    console().print(table)
