"""NL2RepoBench task folders, from a user's own clone of the benchmark and a source archive of the library.

A folder holds ``start.md`` (the document), ``test_files.json`` (paths that the scoring replaces) and
``test_commands.json``. The hidden tests are not in the benchmark's repository: they come from the archive.
"""

import email
import hashlib
import shlex
from pathlib import Path

import msgspec

from opengyre.core.errors import FileError
from opengyre.tasks.repo import Descriptor, is_below, unpacked

DOCUMENT = "start.md"
_NO_SOURCE = set(
    ["setup", "conftest", "noxfile", "tasks", "versioneer", "docs", "doc", "examples", "benchmarks", "tests", "test"]
)


def is_nl2repo(folder: Path) -> bool:
    """Whether a folder is a task of the benchmark."""
    return folder.is_dir() and (folder / "test_files.json").exists()


def describe(folder: Path, archive: Path) -> Descriptor:
    """Return how a repo task is made of a benchmark folder and an archive.

    The declared number of tests is not used: totals are frozen from the reference.

    Raises:
        FileError: A file is missing or wrong, or the archive holds none of the tests.
    """
    if not (folder / DOCUMENT).exists():
        raise FileError(f"{folder / DOCUMENT}: no such file; expected the requirement document")
    wanted = _texts(folder / "test_files.json")
    try:
        sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    except OSError as error:
        raise FileError(f"{archive}: cannot be read: {error.strerror}") from error
    files = unpacked(archive, sha256)
    hidden = tuple(path.strip("/") for path in wanted if any(is_below(name, (path,)) for name in files))
    if not hidden:
        raise FileError(f"{archive}: holds none of the tests that {folder / 'test_files.json'} names: {wanted}")
    source = _source(set(files), hidden)
    if not source:
        raise FileError(f"{archive}: holds no package or module at its top level; expected the library there")
    return Descriptor(
        task=folder.name,
        reference_sdist=archive.name,
        sha256=sha256,
        hidden_paths=hidden,
        source_paths=source,
        pytest_target=_target(folder, hidden),
        needs=("pytest", *_requirements(files)),
    )


def _texts(path: Path) -> list[str]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[str])
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise FileError(f"{path}: expected a JSON list of texts: {error}") from error


def _source(names: set[str], hidden: tuple[str, ...]) -> tuple[str, ...]:
    """Return the packages and modules at the top level of an archive that are neither tests nor packaging."""
    packages = {name.partition("/")[0] for name in names if name.count("/") == 1 and name.endswith("/__init__.py")}
    modules = {name for name in names if "/" not in name and name.endswith(".py")}
    found = {place for place in packages | modules if place.removesuffix(".py") not in _NO_SOURCE}
    return tuple(sorted(place for place in found if not is_below(place, hidden)))


def _target(folder: Path, hidden: tuple[str, ...]) -> str:
    """Return what pytest is pointed at: the last path of its command, else the first hidden path."""
    path = folder / "test_commands.json"
    for command in _texts(path) if path.exists() else []:
        words = shlex.split(command)
        if any(word.endswith("pytest") for word in words):
            targets = [word for word in words if is_below(word.partition("::")[0], hidden)]
            return targets[-1] if targets else hidden[0]
    return hidden[0]


def _requirements(files: dict[str, bytes]) -> list[str]:
    """Return the names of what the library needs without extras, from the archive's PKG-INFO."""
    head = email.message_from_string(files.get("PKG-INFO", b"").decode(errors="replace"))
    lines = [str(line) for line in head.get_all("Requires-Dist", []) if "extra ==" not in str(line)]
    names = []
    for line in lines:
        stop = next((place for place, letter in enumerate(line) if letter in " <>=!~;[("), len(line))
        names.append(line[:stop])
    return sorted(set(names))
