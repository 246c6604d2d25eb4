"""Harbor task folders, read as they are: ``task.toml``, ``instruction.md``, ``environment/``, ``tests/``, a solution.

What cannot be carried out here is refused by key: several steps, a reward dictionary, an image without an engine.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from opengyre.core.errors import FileError
from opengyre.core.types import Task

GRADER = "harbor-script-1"
LARGEST_FILE_BYTES = 4 * 1024 * 1024
_KNOWN = {
    "version",
    "schema_version",
    "artifacts",
    "task",
    "metadata",
    "verifier",
    "agent",
    "environment",
    "solution",
    "source",
}
_REFUSED = {"steps": "several steps", "reward": "a reward dictionary"}


def is_harbor(folder: Path) -> bool:
    """Whether a folder looks like a Harbor task."""
    return (folder / "task.toml").exists()


def read_harbor(folder: Path) -> Task:
    """Return a Harbor task.

    Raises:
        FileError: A file is missing or wrong, or a key asks for what is not carried out here.
    """
    path = folder / "task.toml"
    table = read_toml(path)
    for key, what in _REFUSED.items():
        if key in table:
            raise FileError(f"{path}: {key}: {what}: not carried out by this version")
    instruction = read_text(folder / "instruction.md", "the instruction of the task")
    tests = collect(folder / "tests")
    if "test.sh" not in tests:
        raise FileError(f"{folder / 'tests' / 'test.sh'}: no such file; a Harbor task is scored by it")
    verifier, environment = section(path, table, "verifier"), section(path, table, "environment")
    return Task(
        task_id=str(table.get("task", {}).get("name") or folder.name),
        format="harbor",
        instruction=instruction,
        hidden_files={f"tests/{name}": text for name, text in tests.items()},
        test_ids=("reward",),
        artifact=("*",),
        grader=GRADER,
        scoring_limit_s=limit(path, verifier, "verifier.timeout_sec", 600.0),
        options={
            "unknown_keys": sorted(set(table) - _KNOWN),
            "harness_timeout_s": limit(path, section(path, table, "agent"), "agent.timeout_sec", 900.0),
            "solution": collect(folder / "solution"),
            "environment": {str(key): str(value) for key, value in verifier.get("env", {}).items()},
            "workdir": str(environment.get("workdir") or workdir(folder) or "/app"),
        },
        image=image_of(folder, environment),
    )


def image_of(folder: Path, environment: dict[str, Any]) -> str | None:
    """Return the image that a task needs: named, or built from its own Dockerfile; None for a plain base image.

    Choice: a Dockerfile that only names a distribution and a working folder needs no engine: the host serves as well.
    """
    named = environment.get("docker_image")
    if named:
        return str(named)
    steps = dockerfile_steps(folder)
    plain = all(step.split()[0].upper() in ("FROM", "WORKDIR", "ENV") for step in steps)
    return None if plain else f"{folder / 'environment' / 'Dockerfile'}"


def dockerfile_steps(folder: Path) -> list[str]:
    """Return the instructions of a task's Dockerfile, continued lines joined."""
    path = folder / "environment" / "Dockerfile"
    if not path.exists():
        return []
    text = re.sub(r"\\\n", " ", path.read_text())
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def workdir(folder: Path) -> str:
    """Return the last working folder of the Dockerfile, empty without one."""
    found = [step.split(None, 1)[1] for step in dockerfile_steps(folder) if step.upper().startswith("WORKDIR ")]
    return found[-1] if found else ""


# -- reading, shared with repo tasks --------------------------------------------------------------------------


def read_toml(path: Path) -> dict[str, Any]:
    """Return a TOML file.

    Raises:
        FileError: It is missing or not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: not TOML: {error}") from error


def read_text(path: Path, what: str) -> str:
    """Return a text file that must not be empty.

    Raises:
        FileError: It is missing, empty or not text.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise FileError(f"{path}: no such file; expected {what}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not text") from error
    if not text.strip():
        raise FileError(f"{path}: empty; expected {what}")
    return text


def section(path: Path, table: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a table of a TOML file, empty if it is absent.

    Raises:
        FileError: The key is not a table.
    """
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise FileError(f"{path}: {key}: expected a table, got {type(found).__name__}")
    return found


def limit(path: Path, table: dict[str, Any], key: str, default: float) -> float:
    """Return a timeout in seconds.

    Raises:
        FileError: It is not a positive number.
    """
    value = table.get(key.rpartition(".")[2], default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise FileError(f"{path}: {key} = {value!r}: expected a positive number of seconds")
    return float(value)


def collect(folder: Path) -> dict[str, str]:
    """Return the text files below a folder by relative path; links that leave it are refused.

    Raises:
        FileError: A file is too large, or a link leaves the folder.
    """
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise FileError(f"{path}: leads out of the task's folder")
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise FileError(f"{path}: {path.stat().st_size} bytes, expected at most {LARGEST_FILE_BYTES}")
        found[path.relative_to(folder).as_posix()] = path.read_text(errors="surrogateescape")
    return found
