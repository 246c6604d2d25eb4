"""Task folders: what is read, what is refused, and by which name."""

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from opengyre.core.errors import FileError, InputError
from opengyre.tasks.folder import read_task, read_tasks
from opengyre.tasks.gate import judge
from opengyre.tasks.repo import freeze, make_repo

SHARED = Path(__file__).parents[3] / "shared" / "data"
TESTS = "from adder import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"


def harbor(folder: Path, toml: str = "version = '1.0'\n", **files: str) -> Path:
    folder.mkdir()
    (folder / "task.toml").write_text(toml)
    for name, text in {"instruction.md": "do it", "tests/test.sh": "echo", **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def archive(folder: Path, files: dict[str, str], **changes: object) -> Path:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"adder-1/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    folder.mkdir(exist_ok=True)
    (folder / "adder-1.tar.gz").write_bytes(data.getvalue())
    descriptor = {
        "task": "adder",
        "reference_sdist": "adder-1.tar.gz",
        "sha256": hashlib.sha256(data.getvalue()).hexdigest(),
        "hidden_paths": ["tests"],
        "source_paths": ["adder.py"],
        "pytest_target": "tests",
        **changes,
    }
    (folder / "task.json").write_text(json.dumps(descriptor))
    return folder / "task.json"


FILES = {"adder.py": "def add(a, b):\n    return a + b\n", "tests/test_adder.py": TESTS, "README.md": "Adds numbers."}


def test_a_harbor_task_is_read_with_its_limits_and_its_plain_image_is_the_host(tmp_path):
    task = read_task(
        harbor(
            tmp_path / "t",
            "[verifier]\ntimeout_sec = 30\n[agent]\ntimeout_sec = 60\n[surprise]\nx = 1\n",
            **{"environment/Dockerfile": "FROM ubuntu:24.04\n\nWORKDIR /app\n"},
        )
    )
    assert (task.format, task.scoring_limit_s, task.options["harness_timeout_s"]) == ("harbor", 30.0, 60.0)
    assert task.image is None
    assert task.options["workdir"] == "/app"
    assert task.options["unknown_keys"] == ["surprise"]


def test_a_task_with_an_image_or_a_dockerfile_that_builds_names_it(tmp_path):
    built = harbor(tmp_path / "a", **{"environment/Dockerfile": "FROM python:3\nRUN pip install x\n"})
    assert "Dockerfile" in str(read_task(built).image)
    named = harbor(tmp_path / "b", "[environment]\ndocker_image = 'registry/x:1'\n")
    assert read_task(named).image == "registry/x:1"


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("[[steps]]\nname = 'a'\n", "task.toml: steps"),
        ("[reward]\na = 1\n", "task.toml: reward"),
        ("[verifier]\ntimeout_sec = 0\n", "verifier.timeout_sec = 0"),
        ("[agent]\ntimeout_sec = 'long'\n", "agent.timeout_sec"),
        ("verifier = 3\n", "verifier: expected a table"),
        ("not toml at all", "not TOML"),
    ],
)
def test_what_a_harbor_task_may_not_say_is_refused_by_file_and_key(tmp_path, toml, expected):
    with pytest.raises(FileError, match=expected.replace("[", r"\[")):
        read_task(harbor(tmp_path / "t", toml))


def test_missing_pieces_are_named(tmp_path):
    for missing, named in (("instruction.md", "instruction.md"), ("tests/test.sh", "test.sh")):
        folder = harbor(tmp_path / named)
        (folder / missing).unlink()
        with pytest.raises(FileError, match=named):
            read_task(folder)
    empty = harbor(tmp_path / "empty", **{"instruction.md": "  \n"})
    with pytest.raises(FileError, match=r"instruction\.md: empty"):
        read_task(empty)
    with pytest.raises(FileError, match="no such folder"):
        read_task(tmp_path / "absent")
    (tmp_path / "plain").mkdir()
    with pytest.raises(FileError, match=r"no task\.toml"):
        read_task(tmp_path / "plain")
    with pytest.raises(FileError, match="holds no task"):
        read_tasks(str(tmp_path / "plain"))


def test_a_link_that_leaves_the_task_is_refused(tmp_path):
    folder = harbor(tmp_path / "t")
    os.symlink("/etc/passwd", folder / "tests" / "secret")
    with pytest.raises(FileError, match="leads out"):
        read_task(folder)


def test_a_repo_task_is_made_from_its_archive_and_read_back(tmp_path):
    task = make_repo(archive(tmp_path / "in", FILES), tmp_path / "out")
    assert task.hidden_files == {"tests/test_adder.py": TESTS}
    assert task.options["reference"] == {"adder.py": FILES["adder.py"]}
    assert "Adds numbers." in task.instruction
    assert task.test_ids == ()
    freeze(tmp_path / "out", tests=["tests/test_adder.py::test_add"], canaries=[], versions={"python": "3"})
    assert read_task(tmp_path / "out").test_ids == ("tests/test_adder.py::test_add",)


def test_a_document_of_ones_own_is_the_instruction(tmp_path):
    (tmp_path / "doc.md").write_text("Write adder.")
    task = make_repo(archive(tmp_path / "in", FILES), tmp_path / "out", document=tmp_path / "doc.md")
    assert task.instruction == "Write adder."


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sha256": "00"}, "sha256"),
        ({"hidden_paths": ["nowhere"]}, "hidden_paths"),
        ({"source_paths": ["nowhere"]}, "source_paths"),
        ({"reference_sdist": "absent.tar.gz"}, "absent.tar.gz"),
        ({"hidden_paths": 3}, "not a descriptor"),
    ],
)
def test_a_wrong_descriptor_is_refused_and_leaves_nothing(tmp_path, changes, expected):
    with pytest.raises(FileError, match=expected):
        make_repo(archive(tmp_path / "in", FILES, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_archive_that_leads_out_of_itself_is_refused(tmp_path):
    with pytest.raises(FileError, match="leads out"):
        make_repo(archive(tmp_path / "in", {**FILES, "../evil.py": "x"}), tmp_path / "out")


def test_minirepo_tasks_are_named_by_split_first_and_count():
    assert [task.task_id for task in read_tasks("minirepo:heldout:3:2")] == ["minirepo-heldout-3", "minirepo-heldout-4"]
    with pytest.raises(InputError, match="minirepo:SPLIT:FIRST:COUNT"):
        read_tasks("minirepo:train:x")
    with pytest.raises(InputError, match="nowhere"):
        read_tasks("minirepo:nowhere:0:1")


@pytest.mark.parametrize(
    ("empty", "reference", "total", "reason"),
    [
        ([0.0, 0.0], [1.0] * 5, 2, "accepted"),
        ([0.5, 0.0], [1.0] * 5, 2, "the empty workspace scores 0.5"),
        ([0.0, 0.0], [1.0, 0.0, 1.0, 1.0, 1.0], 2, "flaky"),
        ([0.0, 0.0], [0.5] * 5, 2, "the reference scores 0.5"),
        ([0.0, "no pytest"], [1.0] * 5, 2, "no pytest"),
        ([0.0, 0.0], [0.0] * 5, 0, "no test passes"),
    ],
)
def test_the_gate_accepts_only_a_zero_and_a_steady_one(empty, reference, total, reason):
    verdict = judge("t", total=total, empty=empty, reference=reference)
    assert reason in verdict.reason
    assert verdict.is_accepted == (reason == "accepted")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared task folders beside the checkout")
def test_the_shared_harbor_tasks_are_read_or_refused_by_key():
    assert read_task(SHARED / "harbor-cookbook-tasks" / "simple-task").task_id == "simple-task"
    with pytest.raises(FileError, match="steps"):
        read_task(SHARED / "harbor-cookbook-tasks" / "multi-step")
    image = read_task(SHARED / "harbor-task-deepswe" / "tomlkit-toml-table-converters").image
    assert image is not None
    assert "swe-bench" in image
