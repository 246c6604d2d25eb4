"""Names of rules on the command line, and the scheduler's settings they stand for."""

from typing import Any

from opengyre.core.errors import InputError
from opengyre.schedule.settings import ScheduleSettings
from opengyre.sim.workload import Workload

FORMS = "waterlevel[:THETA[:QUEUE]], lookahead, static[:CELLS[:batch]], colocate[:sync]"


def settings_of(rule: str, workload: Workload) -> ScheduleSettings:
    """Return the settings of a rule on a workload.

    Raises:
        InputError: There is no such rule, or it does not fit the workload.

    >>> settings_of("static:2", Workload()).training_cells, settings_of("colocate:sync", Workload()).ahead
    (2, False)
    """
    name, *options = rule.split(":")
    changes: dict[str, Any] = {"rule": name}
    if name == "static" and options and options[1:] in ([], ["batch"]):
        changes |= {"training_cells": _cells(options[0], rule, workload), "streaming": options[1:] == []}
    elif name == "colocate" and options in ([], ["sync"]):
        changes |= {"ahead": not options}
    elif name == "waterlevel" and options and (options[1:] == [] or (len(options) == 2 and options[1].isdigit())):
        changes |= {"theta": _theta(options[0], rule), "queue": int(options[1]) if options[1:] else 1}
    elif options or name not in ("waterlevel", "lookahead"):
        raise InputError(f"--rules {rule}: expected {FORMS}")
    return ScheduleSettings(
        cells=tuple(range(workload.cells)),
        steps=workload.steps,
        batch_groups=workload.batch_groups,
        group_size=workload.group_size,
        overlap=workload.phi,
        burst=workload.mu,
        **changes,
    )


def _cells(text: str, rule: str, workload: Workload) -> int:
    if not text.isdigit() or not 1 <= int(text) < workload.cells:
        raise InputError(f"--rules {rule}: expected 1 to {workload.cells - 1} training cells of {workload.cells}")
    return int(text)


def _theta(text: str, rule: str) -> float:
    try:
        theta = float(text)
    except ValueError:
        theta = -1.0
    if not 0 < theta < 100:
        raise InputError(f"--rules {rule}: expected a number above 0 behind the colon")
    return theta
