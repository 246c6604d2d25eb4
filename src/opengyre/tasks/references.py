"""Reference solutions: what must score 1."""

from pathlib import Path

from opengyre.core.types import Task
from opengyre.tasks.minirepo.tasks import minirepo_package, reference_files


def reference_of(task: Task) -> dict[str, str]:
    """Return the files of a task's reference; a Harbor task's are the scripts that make it."""
    if task.format == "minirepo":
        _, split, index = task.task_id.split("-")
        return reference_files(minirepo_package(split, int(index)))
    if task.format == "repo":
        return dict(task.options["reference"])
    return dict(task.options["solution"])


def has_plain_reference(task: Task) -> bool:
    """Whether the reference is files, and not a script that has to be run first."""
    return task.format != "harbor"


def write_files(folder: Path, files: dict[str, str]) -> Path:
    """Write files below a new folder and return it."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, errors="surrogateescape")
    return folder
