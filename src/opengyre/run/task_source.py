"""Which task a group works on."""

from collections.abc import Callable
from pathlib import Path
from random import Random

from opengyre.core.config import Config
from opengyre.core.errors import ConfigError, InputError
from opengyre.core.types import Kind, Task
from opengyre.execute.container import require_engine
from opengyre.schedule.roster import EVALUATION_STRIDE
from opengyre.tasks.checked import why_unchecked
from opengyre.tasks.folder import MINIREPO, located_tasks
from opengyre.tasks.minirepo.tasks import minirepo_task

_OPTIONS = {"heldout"}


def task_source(config: Config) -> Callable[[Kind, int], Task]:
    """Return which task a group of a kind gets: a function of its number and the run's seed.

    Raises:
        ConfigError: The options are wrong, or there are too few held-out tasks.
        InputError: A task cannot be had here, or the control gate did not accept it.
    """
    if config.tasks.source == MINIREPO:
        if config.tasks.options:
            raise ConfigError(f"tasks.options = {config.tasks.options!r}: expected none with minirepo")
        # Generated tasks go through the control gate in the project's own tests.
        return _in_order(
            config,
            config.tasks.train_count,
            lambda index: minirepo_task("train", index),
            lambda index: minirepo_task("heldout", index),
        )
    unknown = set(config.tasks.options) - _OPTIONS
    if unknown:
        raise ConfigError(f"tasks.options.{min(unknown)}: no such key; expected heldout = a folder of tasks")
    train = accepted_tasks(config.tasks.source, allows_unchecked=config.tasks.unchecked)[: config.tasks.train_count]
    return _in_order(config, len(train), train.__getitem__, _heldout(config).__getitem__)


def _in_order(
    config: Config, count: int, train: Callable[[int], Task], heldout: Callable[[int], Task]
) -> Callable[[Kind, int], Task]:
    """Groups go through the training tasks in an order drawn from the seed, evaluations through theirs as they lie."""
    order = list(range(count))
    Random(f"tasks-{config.run.seed}").shuffle(order)

    def task_of(kind: Kind, group_id: int) -> Task:
        if kind.is_evaluation:
            return heldout(group_id % EVALUATION_STRIDE)
        return train(order[group_id % count])

    return task_of


def _heldout(config: Config) -> list[Task]:
    wanted = config.evaluation.tasks
    folder = config.tasks.options.get("heldout")
    if not wanted:
        return []
    if folder is None:
        raise ConfigError(
            f"evaluation.tasks = {wanted}: expected 0, or tasks.options.heldout = a folder of tasks that no group "
            "trains on"
        )
    tasks = accepted_tasks(str(folder), allows_unchecked=config.tasks.unchecked)
    if len(tasks) < wanted:
        raise ConfigError(f"evaluation.tasks = {wanted}: expected at most {len(tasks)}, the tasks in {folder}")
    return tasks[:wanted]


def accepted_tasks(source: str, *, allows_unchecked: bool) -> list[Task]:
    """Return the tasks of a folder, or refuse the first that a run should not use.

    Raises:
        InputError: A task needs an image and no engine answers, or the gate did not accept it.
    """
    tasks = []
    for folder, task in located_tasks(Path(source)):
        reason = "" if allows_unchecked else why_unchecked(folder, task)
        if reason:
            raise InputError(
                f"{folder}: {reason}; expected opengyre tasks check {folder}, or tasks.unchecked = true in the "
                "configuration"
            )
        tasks.append(task)
    require_engine(tasks)
    return tasks
