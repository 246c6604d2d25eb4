"""Tasks from folders: which format a folder has, and every task below it."""

from pathlib import Path

from opengyre.core.errors import FileError, InputError
from opengyre.core.types import Task
from opengyre.tasks.harbor import is_harbor, read_harbor
from opengyre.tasks.minirepo.tasks import minirepo_task
from opengyre.tasks.repo import is_repo, read_repo

MINIREPO = "minirepo"


def read_task(folder: Path) -> Task:
    """Return the task of a folder.

    Raises:
        FileError: It is no task, or something in it is wrong; the message names file and key.
    """
    if not folder.is_dir():
        raise FileError(f"{folder}: no such folder; expected a task (task.toml and instruction.md)")
    if is_repo(folder):
        return read_repo(folder)
    if is_harbor(folder):
        return read_harbor(folder)
    raise FileError(f"{folder}: no task.toml; expected a repo task or a Harbor task")


def read_tasks(source: str) -> list[Task]:
    """Return the tasks of a folder of tasks, of one task's folder, or ``minirepo:SPLIT:FIRST:COUNT``.

    Raises:
        InputError: There is no task, or one is wrong.

    >>> [task.task_id for task in read_tasks("minirepo:train:0:2")]
    ['minirepo-train-0', 'minirepo-train-1']
    """
    if source.partition(":")[0] == MINIREPO:
        return _minirepo(source)
    return [task for _, task in located_tasks(Path(source))]


def located_tasks(root: Path) -> list[tuple[Path, Task]]:
    """Return the tasks of a folder of tasks, or of one task's folder, each with its own folder.

    Raises:
        FileError: There is no task, or one is wrong.
    """
    if (root / "task.toml").exists() or not root.is_dir():
        return [(root, read_task(root))]
    folders = sorted(path.parent for path in root.glob("*/task.toml"))
    if not folders:
        raise FileError(f"{root}: holds no task (no task.toml here or one level below)")
    return [(folder, read_task(folder)) for folder in folders]


def _minirepo(source: str) -> list[Task]:
    parts = source.split(":")
    split = parts[1] if len(parts) > 1 else "train"
    try:
        first, count = (int(part) for part in (*parts[2:4], "0", "8")[:2])
    except ValueError as error:
        raise InputError(f"{source}: expected minirepo:SPLIT:FIRST:COUNT") from error
    return [minirepo_task(split, index) for index in range(first, first + count)]
