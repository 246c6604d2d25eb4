"""`opengyre simulate WORKLOAD.toml --replicate`: the settings of a grid in which the published ratios come out."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import Progress

from opengyre.report.console import console, plain_table
from opengyre.sim.levels import ELASTIC, Agreement, Measured, agreements, grid, measure, targets
from opengyre.sim.workload import Workload


def measure_grid(name: str, workload: Workload, seeds: tuple[int, ...]) -> list[Measured]:
    """Measure every setting of the grid, on all cores; the order and the figures do not depend on their number."""
    settings = grid()
    errors = Console(stderr=True)
    spawn = multiprocessing.get_context("spawn")
    with (
        Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar,
        ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool,
    ):
        task = bar.add_task(name, total=len(settings))
        found = []
        many = len(settings)
        for one in pool.map(measure, [workload] * many, settings, [seeds] * many):
            found.append(one)
            bar.advance(task)
    return found


def replicate(name: str, workload: Workload, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return the level set of a workload as it goes into the JSON.

    Raises:
        ConfigError: The workload does not say what is published.
    """
    wanted = targets(workload.published)
    measured = measure_grid(name, workload, seeds)
    found = [agreement for one in measured for agreement in agreements(one, workload.published)]
    return {
        "workload": name,
        "cells": workload.cells,
        "steps": workload.steps,
        "seeds": list(seeds),
        "settings": len(measured),
        "async_ratio": wanted[0],
        "colocate_ratio": wanted[1],
        "agreeing": [_row(one) for one in found],
        "summary": [summary(elastic, found, measured) for elastic in ELASTIC],
        "measured": [{**asdict(one.setting), "hours_per_step": one.hours} for one in measured],
    }


def _row(one: Agreement) -> dict[str, Any]:
    row = asdict(one)
    setting = row.pop("setting")
    return {**setting, **row}


def summary(elastic: str, found: Sequence[Agreement], measured: Sequence[Measured]) -> dict[str, Any]:
    """Return how much an elastic rule gains on the best static split, in the level set and on the whole grid."""
    own = [one for one in found if one.elastic == elastic]
    inside = {one.setting: one.over_best_static for one in own}
    everywhere = [one.over_best_static(elastic) for one in measured]
    return {
        "elastic": elastic,
        "readings": len(own),
        "settings": len(inside),
        "over_best_static_min": min(inside.values(), default=None),
        "over_best_static_max": max(inside.values(), default=None),
        "grid_over_best_static_min": min(everywhere),
        "grid_over_best_static_max": max(everywhere),
    }


def show_levels(level: dict[str, Any]) -> None:
    """Print the level set: a line each setting, its readings side by side."""
    low, high = level["async_ratio"], level["colocate_ratio"]
    title = (
        f"{level['workload']}: K {level['cells']}, {level['steps']} steps, seeds {len(level['seeds'])}; settings of "
        f"{level['settings']} with Async {low[0]:.2f}-{low[1]:.2f} and Colocate {high[0]:.2f}-{high[1]:.2f}"
    )
    names = ("rule", "load", "training", "phi", "mu", "Async", "ratio", "Colocate", "ratio", "best static")
    table = plain_table(title, names, left=("rule", "Async", "Colocate"))
    for row in level["agreeing"]:
        table.add_row(
            row["elastic"],
            f"{row['load']:g}",
            f"{row['training_factor']:g}",
            str(row["phi"]),
            str(row["mu"]),
            row["asynchronous"],
            f"{row['async_ratio']:.2f}",
            row["colocate"],
            f"{row['colocate_ratio']:.2f}",
            f"{row['over_best_static']:.3f}",
        )
    console().print(table)
    for row in level["summary"]:
        console().print(_sentence(row))


def _sentence(row: dict[str, Any]) -> str:
    everywhere = f"{row['grid_over_best_static_min']:.2f} to {row['grid_over_best_static_max']:.2f} on the whole grid"
    if not row["settings"]:
        return f"{row['elastic']}: no setting agrees; {everywhere} times as fast as the best static split"
    inside = f"{row['over_best_static_min']:.2f} to {row['over_best_static_max']:.2f}"
    agreeing = f"{row['settings']} settings ({row['readings']} readings) agree"
    return f"{row['elastic']}: {agreeing}; there {inside} times as fast as the best static split, {everywhere}"
