"""Repo tasks: write a library from a document, graded by hidden tests.

DIR/task.toml         format = "repo"; what is hidden, what is source, limits, the frozen tests
DIR/instruction.md    the document
DIR/hidden/           the tests, at their own paths
DIR/reference/        the library, at its own paths
"""

import hashlib
import shutil
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from opengyre.core.errors import FileError
from opengyre.core.types import Task
from opengyre.tasks.harbor import collect, limit, read_text, read_toml, section

GRADER = "gyre-pytest-1"


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """How a repo task is made: the keys of a descriptor file that are read.

    Example: ``Descriptor(task="jsonlines", reference_sdist="jsonlines-4.0.0.tar.gz", sha256="0c6d...",
    hidden_paths=("tests",), source_paths=("jsonlines",), pytest_target="tests")``.
    """

    task: str
    reference_sdist: str
    sha256: str
    hidden_paths: tuple[str, ...]
    source_paths: tuple[str, ...]
    pytest_target: str
    needs: tuple[str, ...] = ()


def is_repo(folder: Path) -> bool:
    """Whether a folder is a repo task."""
    path = folder / "task.toml"
    return path.exists() and read_toml(path).get("format") == "repo"


def read_repo(folder: Path) -> Task:
    """Return a repo task.

    Raises:
        FileError: A file is missing or wrong.
    """
    path = folder / "task.toml"
    table = read_toml(path)
    limits, frozen = section(path, table, "limits"), section(path, table, "frozen")
    instruction = read_text(folder / "instruction.md", "the document of the task")
    hidden = collect(folder / "hidden")
    tests = tuple(str(test) for test in frozen.get("tests", ()))
    if not hidden:
        raise FileError(f"{folder / 'hidden'}: holds no tests")
    for name in (*table.get("hidden_paths", ()), *table.get("source_paths", ())):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise FileError(f"{path}: {name}: leads out of the task's folder")
    return Task(
        task_id=str(table.get("name") or folder.name),
        format="repo",
        instruction=instruction,
        files={"TASK.md": instruction},
        hidden_files=hidden,
        test_ids=tests,
        artifact=("*.py",),
        grader=GRADER,
        scoring_limit_s=limit(path, limits, "limits.scoring_s", 300.0),
        options={
            "harness_timeout_s": limit(path, limits, "limits.harness_s", 3600.0),
            "hidden_paths": list(table.get("hidden_paths", ())),
            "test_files": sorted(name for name in hidden if _is_test_file(name)),
            "needs": list(table.get("needs", ())),
            "canaries": list(frozen.get("canaries", ())),
            "reference": collect(folder / "reference"),
        },
    )


def make_repo(descriptor_path: Path, out: Path, *, document: Path | None = None) -> Task:
    """Make the folder of a repo task from a descriptor and the source archive beside it; tests are not frozen yet.

    Args:
        descriptor_path: JSON with the keys of ``Descriptor``.
        out: New folder.
        document: What the agent reads; else the archive's own readme.

    Raises:
        FileError: Descriptor or archive is not what it says, or ``out`` is not new.
    """
    descriptor = _read_descriptor(descriptor_path)
    archive = descriptor_path.parent / descriptor.reference_sdist
    return make_described(descriptor, archive, out, named=str(descriptor_path), document=document)


def make_described(descriptor: Descriptor, archive: Path, out: Path, *, named: str, document: Path | None) -> Task:
    """Make the folder of a repo task from a decoded descriptor; ``named`` says in errors where that came from.

    Raises:
        FileError: As ``make_repo``.
    """
    if out.exists() and any(out.iterdir()):
        raise FileError(f"{out}: exists already; name a new folder")
    files = unpacked(archive, descriptor.sha256)
    hidden = {name: data for name, data in files.items() if is_below(name, descriptor.hidden_paths)}
    source = {name: data for name, data in files.items() if is_below(name, descriptor.source_paths)}
    if not hidden or not source:
        missing = "hidden_paths" if not hidden else "source_paths"
        raise FileError(f"{named}: {missing}: nothing in {archive.name} lies there")
    out.mkdir(parents=True, exist_ok=True)
    try:
        _write(out / "hidden", {name: data for name, data in hidden.items() if name not in source})
        _write(out / "reference", {name: data for name, data in source.items() if name not in hidden})
        (out / "instruction.md").write_text(_document(descriptor, files, document))
        needs = tuple(dict.fromkeys((*descriptor.needs, *pytest_needs(files))))
        (out / "task.toml").write_text(task_toml(msgspec.structs.replace(descriptor, needs=needs), frozen={}))
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    return read_repo(out)


def pytest_needs(files: dict[str, bytes]) -> list[str]:
    r"""Return the oldest pytest that an archive's own settings allow, as a need.

    >>> pytest_needs({"pytest.ini": b"[pytest]\nminversion = 6.2\n"})
    ['pytest>=6.2']
    """
    section = ""
    for name in ("pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg"):
        for line in files.get(name, b"").decode(errors="replace").splitlines():
            section = line.strip() if line.startswith("[") else section
            key, equals, value = line.partition("=")
            if equals and key.strip() == "minversion" and "pytest" in section:
                return ["pytest>=" + value.strip().strip("'\"")]
    return []


def freeze(folder: Path, *, tests: list[str], canaries: list[str], versions: dict[str, str]) -> None:
    """Write the frozen tests into a repo task's ``task.toml``."""
    path = folder / "task.toml"
    table = read_toml(path)
    table["frozen"] = {"tests": tests, "canaries": canaries, **versions}
    path.write_text(tomli_w.dumps(table))


def _read_descriptor(path: Path) -> Descriptor:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Descriptor)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise FileError(f"{path}: not a descriptor of a repo task: {error}") from error


def unpacked(archive: Path, sha256: str) -> dict[str, bytes]:
    """Return the regular files of a source archive without its first folder."""
    try:
        data = archive.read_bytes()
    except OSError as error:
        raise FileError(f"{archive}: cannot be read: {error.strerror}") from error
    seen = hashlib.sha256(data).hexdigest()
    if seen != sha256:
        raise FileError(f"{archive}: sha256 {seen}, expected {sha256}")
    files: dict[str, bytes] = {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            parts = Path(member.name).parts[1:]
            content = tar.extractfile(member) if member.isfile() else None
            if content is None or not parts:
                continue
            if ".." in parts or Path(member.name).is_absolute():
                raise FileError(f"{archive}: {member.name}: leads out of the archive")
            files["/".join(parts)] = content.read()
    return files


def _document(descriptor: Descriptor, files: dict[str, bytes], document: Path | None) -> str:
    """Return the instruction: a document given, or the archive's readme under a short order."""
    if document is not None:
        return read_text(document, "the document of the task")
    readmes = sorted(name for name in files if "/" not in name and name.upper().startswith("README"))
    if not readmes:
        raise FileError(f"{descriptor.reference_sdist}: has no readme; name a document with --document")
    order = (
        "Write the Python library that the document below describes, in this folder: "
        f"{', '.join(descriptor.source_paths)}.\nHidden tests import it from here.\n\n"
    )
    return order + files[readmes[0]].decode(errors="replace")


def task_toml(descriptor: Descriptor, *, frozen: dict[str, Any]) -> str:
    """Return the text of a repo task's ``task.toml``."""
    return tomli_w.dumps(
        {
            "format": "repo",
            "name": descriptor.task,
            "hidden_paths": list(descriptor.hidden_paths),
            "source_paths": list(descriptor.source_paths),
            "pytest_target": descriptor.pytest_target,
            "needs": list(descriptor.needs),
            "limits": {"harness_s": 3600.0, "scoring_s": 300.0},
            "frozen": frozen,
        }
    )


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def is_below(name: str, places: tuple[str, ...]) -> bool:
    """Whether a path is one of some places, or lies in one.

    >>> is_below("tests/a.py", ("tests/",)), is_below("tests_a.py", ("tests",))
    (True, False)
    """
    trimmed = [place.strip("/") for place in places]
    return any(name == place or name.startswith(place + "/") for place in trimmed)


def _is_test_file(name: str) -> bool:
    base = name.rpartition("/")[2]
    return base.endswith(".py") and (base.startswith("test_") or base.endswith("_test.py"))
