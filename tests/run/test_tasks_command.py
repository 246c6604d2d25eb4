"""Repo tasks end to end: made, frozen, checked, scored, attacked."""

import ast
import asyncio
import json
from pathlib import Path

import pytest

from opengyre import cli
from opengyre.core.config import decode_config
from opengyre.core.errors import ConfigError, InputError
from opengyre.core.types import Kind, Task
from opengyre.execute.isolation import choose_isolation
from opengyre.execute.launcher import ForkServer
from opengyre.execute.scoring import GradeResult, SandboxedEvaluator
from opengyre.run.task_source import task_source
from opengyre.run.tasks_command import check_task, freeze_task
from opengyre.tasks.checked import why_unchecked
from opengyre.tasks.folder import read_task
from opengyre.tasks.references import write_files
from opengyre.tasks.repo import Descriptor, task_toml

SHARED = Path(__file__).parents[3] / "shared" / "data" / "repo-gen-tasks"
ADDER = "def add(a, b):\n    return a + b\n\ndef fail():\n    raise ValueError('no')\n"
TESTS = """import pytest
from adder import add, fail

@pytest.mark.parametrize(("a", "b", "total"), [(1, 2, 3), (2, 2, 4)])
def test_add(a, b, total):
    assert add(a, b) == total

def test_fail():
    with pytest.raises(ValueError):
        fail()

class TestMore:
    def test_three(self):
        assert 6 == add(add(1, 2), 3)

def test_true():
    assert add(0, 1)
"""
DESCRIPTOR = Descriptor(
    task="adder",
    reference_sdist="adder.tar.gz",
    sha256="",
    hidden_paths=("tests",),
    source_paths=("adder.py",),
    pytest_target="tests",
    needs=("pytest",),
)


def adder_task(
    folder: Path, *, tests: str = TESTS, reference: str = ADDER, needs: tuple[str, ...] = ("pytest",)
) -> Task:
    folder.mkdir()
    (folder / "task.toml").write_text(
        task_toml(DESCRIPTOR, frozen={}).replace('"pytest"', ", ".join(f'"{n}"' for n in needs))
    )
    (folder / "instruction.md").write_text("Write adder.")
    write_files(folder / "hidden", {"tests/test_adder.py": TESTS})
    write_files(folder / "reference", {"adder.py": ADDER})
    return read_task(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture
async def evaluator(place):
    server = ForkServer(place / "forkserver.log")
    await server.start()
    yield SandboxedEvaluator(server, place / "s", workers=2, isolation=choose_isolation("auto"), memory_bytes=1 << 31)
    await server.stop()


@pytest.fixture
async def adder(evaluator, tmp_path):
    return await freeze_task(evaluator, adder_task(tmp_path / "adder"), tmp_path / "adder")


async def grade(evaluator, task, tmp_path, files) -> GradeResult:
    return await evaluator.grade(task, write_files(tmp_path / f"w{len(list(tmp_path.iterdir()))}", files))


async def reward(evaluator, task, tmp_path, files) -> tuple[float, str]:
    workspace = write_files(tmp_path / f"w{len(list(tmp_path.iterdir()))}", files)
    outcome = await evaluator.evaluate(task, workspace, timed_out=False)
    return outcome.reward, outcome.reason


async def test_the_reference_freezes_its_tests_and_those_with_canaries(adder):
    assert len(adder.test_ids) == 5
    assert "tests/test_adder.py::TestMore::test_three" in adder.test_ids
    assert sorted(test.partition("::")[2] for test in adder.options["canaries"]) == [
        "TestMore::test_three",
        "test_add[1-2-3]",
        "test_add[2-2-4]",
        "test_fail",
    ]


async def test_the_gate_accepts_a_good_task_and_names_what_is_wrong_with_others(evaluator, adder, tmp_path):
    assert (await check_task(evaluator, adder)).is_accepted
    newer = adder_task(tmp_path / "newer", needs=("pytest>=99",))
    verdict = await check_task(evaluator, newer)
    assert not verdict.is_accepted
    assert "lacks pytest>=99 (" in verdict.reason
    lacking = adder_task(tmp_path / "lacking", needs=("pytest", "no-such-package"))
    verdict = await check_task(evaluator, lacking)
    assert not verdict.is_accepted
    assert "lacks no-such-package" in verdict.reason


async def test_partial_work_counts_test_by_test(evaluator, adder, tmp_path):
    assert await reward(evaluator, adder, tmp_path, {"adder.py": ADDER}) == (1.0, "")
    half = "def add(a, b):\n    return a + b\n\ndef fail():\n    pass\n"
    assert await reward(evaluator, adder, tmp_path, {"adder.py": half}) == (0.8, "")
    assert (await reward(evaluator, adder, tmp_path, {"adder.py": "def add(a, b): return 3\n"}))[0] == 0.0


FORGER = """
import json, os
names = ["test_add[1-2-3]", "test_add[2-2-4]", "test_fail", "TestMore::test_three", "test_true"]
tests = {f"tests/test_adder.py::{name}": "passed" for name in names}
forged = json.dumps({"grader": "gyre-pytest-1", "tests": tests}).encode()
for number in os.listdir("/proc"):
    try:
        for name in os.listdir(f"/proc/{number}/fd"):
            os.write(os.open(f"/proc/{number}/fd/{name}", os.O_WRONLY | os.O_NONBLOCK), forged)
    except (OSError, ValueError):
        pass
"""
FLOOD = """
while True:
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, bytes(1 << 16))
        except OSError:
            pass
"""
ATTACKS = {
    "forged result": {"adder.py": FORGER},
    "forged result and a flood": {"adder.py": FORGER + FLOOD},
    "conftest": {"conftest.py": "print('5 passed')\ndef pytest_sessionfinish():\n    print('5 passed')\n"},
    "exit at import": {"adder.py": "import os\nos._exit(0)\n"},
    "exit nicely": {"adder.py": "raise SystemExit(0)\n"},
    "no modules": {"adder.py": "import sys\nsys.modules.clear()\n"},
    "report file": {"adder.py": "open('report.xml', 'w').write('<testsuite tests=\"5\" failures=\"0\"/>')\n"},
    "entry point": {
        "evil.py": "def pytest_runtest_call(item):\n    item.obj = lambda *a, **k: None\n",
        "evil-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1\n",
        "evil-1.dist-info/entry_points.txt": "[pytest11]\nevil = evil\n",
    },
    "own tests": {"tests/test_adder.py": "def test_add(): pass\n", "adder.py": ""},
    "own pytest": {"pytest.py": "def main(*a, **k): return 0\n", "adder.py": ""},
    "sitecustomize": {"sitecustomize.py": "import os\nos._exit(0)\n", "adder.py": ""},
}


@pytest.mark.parametrize("attack", list(ATTACKS))
async def test_what_passes_nothing_scores_nothing(evaluator, adder, tmp_path, attack):
    assert (await reward(evaluator, adder, tmp_path, ATTACKS[attack]))[0] == 0.0


FORGERIES = {
    "equals everything": "class Any:\n    __eq__ = lambda s, o: True\n    __hash__ = None\n"
    "def add(a, b): return Any()\ndef fail(): raise ValueError\n",
    "patched raises": "import contextlib, pytest\n"
    "@contextlib.contextmanager\ndef raises(*a, **k):\n    yield\npytest.raises = raises\n"
    "def add(a, b): return None\ndef fail(): pass\n",
    "patched runner": "import _pytest.runner as r\nold = r.CallInfo.from_call\n"
    "def quiet(func, *a, **k):\n    def calm():\n        try: return func()\n"
    "        except BaseException: return None\n"
    "    return old(calm, *a, **k)\nr.CallInfo.from_call = staticmethod(quiet)\n"
    "def add(a, b): return None\ndef fail(): pass\n",
    "patched function call": "import _pytest.python as p\np.pytest_pyfunc_call = lambda pyfuncitem: True\n"
    "p.Function.runtest = lambda self: None\ndef add(a, b): return None\ndef fail(): pass\n",
}


@pytest.mark.parametrize("forgery", list(FORGERIES))
async def test_forged_passes_are_found_by_their_canaries(evaluator, adder, tmp_path, forgery):
    score, reason = await reward(evaluator, adder, tmp_path, {"adder.py": FORGERIES[forgery]})
    assert (score, reason) == (0.0, "tampering")


async def test_a_process_left_behind_changes_nothing_and_ends(evaluator, adder, tmp_path):
    source = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(3)\n"
        "    open('tests/test_adder.py', 'w').write('def test_add(): pass')\n    os._exit(0)\ndef add(a, b): return 0\n"
    )
    assert (await reward(evaluator, adder, tmp_path, {"adder.py": source}))[0] == 0.0


async def test_an_endless_loop_in_one_test_leaves_the_others_their_results(evaluator, tmp_path):
    folder = tmp_path / "loop"
    frozen = await freeze_task(evaluator, adder_task(folder), folder)
    looping = "def add(a, b):\n    while (a, b) == (0, 1): pass\n    return a + b\n\ndef fail(): raise ValueError\n"
    (folder / "task.toml").write_text(
        (folder / "task.toml").read_text().replace("scoring_s = 300.0", "scoring_s = 9.0")
    )
    outcome = await evaluator.evaluate(
        read_task(folder), write_files(tmp_path / "w", {"adder.py": looping}), timed_out=False
    )
    assert outcome.reward >= 0.8
    assert outcome.tests["tests/test_adder.py::test_true"] in ("failed", "timeout")
    assert len(frozen.test_ids) == 5


def stubbed(source: str, share: float) -> str:
    """Return source whose last functions, in order of their lines, raise NotImplementedError."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    functions.sort(key=lambda node: node.lineno)
    for node in functions[len(functions) - int(len(functions) * share) :]:
        node.body = [ast.parse("raise NotImplementedError").body[0]]
    return ast.unparse(tree)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared task folders beside the checkout")
def test_the_shared_repo_tasks_have_their_right_values(tmp_path, capsys):
    for name, total in (("jsonlines", 27), ("schedule-master", 81)):
        made = tmp_path / name
        assert cli.main(["tasks", "make-repo", str(SHARED / name / "task.json"), "--out", str(made), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tests"] == total
        assert score(made, made / "reference", capsys) == (total, total)
    jsonlines = tmp_path / "jsonlines"
    empty = write_files(tmp_path / "empty", {})
    assert score(jsonlines, empty, capsys) == (0, 27)
    reference = {path.name: path.read_text() for path in (jsonlines / "reference" / "jsonlines").glob("*.py")}
    reference["jsonlines.py"] = stubbed(reference["jsonlines.py"], 0.2)
    candidate = write_files(tmp_path / "stub", {f"jsonlines/{name}": text for name, text in reference.items()})
    assert score(jsonlines, candidate, capsys) == (22, 27)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared task folders beside the checkout")
def test_a_benchmark_folder_and_an_archive_make_a_task(tmp_path, capsys):
    folder, archive = tmp_path / "jsonlines", SHARED / "jsonlines" / "jsonlines-4.0.0.tar.gz"
    files = {
        "start.md": "Write jsonlines.",
        "test_files.json": '["tests", "conftest.py"]',
        "test_commands.json": '["pip install -e .", "pytest --continue-on-collection-errors tests"]',
        "test_case_count.txt": "27",
    }
    write_files(folder, files)
    made = tmp_path / "made"
    command = ["tasks", "make-repo", str(folder), "--out", str(made), "--json"]
    assert cli.main(command) == 2
    assert "expected --archive FILE" in capsys.readouterr().err
    assert cli.main([*command, "--archive", str(archive)]) == 0
    assert json.loads(capsys.readouterr().out)["tests"] == 27
    assert (made / "instruction.md").read_text() == "Write jsonlines."
    assert score(made, made / "reference", capsys) == (27, 27)
    assert not (made / "reference" / "tests").exists()


def score(task: Path, workspace: Path, capsys) -> tuple[int, int]:
    cli.main(["tasks", "score", str(task), str(workspace), "--json"])
    row = json.loads(capsys.readouterr().out)
    return row["passed"], row["total"]


def test_a_task_that_needs_an_image_is_refused_by_name(tmp_path, capsys):
    folder = tmp_path / "image"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text("[environment]\ndocker_image = 'registry/x:1'\n")
    (folder / "instruction.md").write_text("x")
    (folder / "tests" / "test.sh").write_text("x")
    assert cli.main(["tasks", "score", str(folder), str(tmp_path)]) == 2
    assert "registry/x:1" in capsys.readouterr().err
    assert cli.main(["tasks", "check", str(folder)]) == 1


def test_a_harbor_script_gives_its_reward_and_without_one_the_evaluation_failed(tmp_path, capsys):
    for name, script, code, outcome in (
        (
            "good",
            "test -f hello.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt",
            0,
            "scored",
        ),
        ("silent", "true", 1, "evaluation_failed"),
    ):
        folder = tmp_path / name
        write_files(folder, {"task.toml": "", "instruction.md": "x", "tests/test.sh": script})
        workspace = write_files(tmp_path / f"w-{name}", {"hello.txt": "hi"})
        assert cli.main(["tasks", "score", str(folder), str(workspace), "--json"]) == code
        row = json.loads(capsys.readouterr().out)
        assert row["outcome"] == outcome
        assert row["reward"] == (1.0 if name == "good" else None)


def test_two_hundred_scorings_leave_no_process_mount_or_file_behind(tmp_path):
    async def run() -> None:
        server = ForkServer(tmp_path / "forkserver.log")
        await server.start()
        made = SandboxedEvaluator(
            server, tmp_path / "s", workers=4, isolation=choose_isolation("auto"), memory_bytes=1 << 29
        )
        from opengyre.tasks.minirepo.tasks import minirepo_package, minirepo_task, reference_files  # noqa: PLC0415

        task = minirepo_task("train", 1)
        workspace = write_files(tmp_path / "w", reference_files(minirepo_package("train", 1)))
        mounts = len(Path("/proc/mounts").read_text().splitlines())
        await asyncio.gather(*(made.grade(task, workspace) for _ in range(200)))
        assert len(Path("/proc/mounts").read_text().splitlines()) == mounts
        assert [path.name for path in (tmp_path / "s").iterdir()] == ["grading.log"]
        children = Path(f"/proc/{server.process_id}/task/{server.process_id}/children").read_text().split()
        assert children == []
        await server.stop()

    asyncio.run(run())


def test_the_gate_runs_a_harbor_solution_in_the_sandbox_and_keeps_its_verdict(tmp_path, capsys):
    folder = tmp_path / "task"
    check = "test -f /app/hello.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    solve = f"touch hello.txt; touch {tmp_path}/escaped 2>/dev/null; true"
    write_files(folder, {"task.toml": "", "instruction.md": "x", "tests/test.sh": check, "solution/solve.sh": solve})
    assert cli.main(["tasks", "check", str(folder), "--json"]) == 0, capsys.readouterr().out
    assert json.loads(capsys.readouterr().out)["tasks"][0]["reference"] == 1.0
    assert not (tmp_path / "escaped").exists()
    task = read_task(folder)
    assert why_unchecked(folder, task) == ""
    (folder / "instruction.md").write_text("y")
    assert "changed" in why_unchecked(folder, read_task(folder))


def test_a_run_takes_only_tasks_that_the_gate_accepted(tmp_path, capsys):
    folder = tmp_path / "tasks" / "one"
    write_files(folder, {"task.toml": "", "instruction.md": "x", "tests/test.sh": "echo 1 > /logs/verifier/reward.txt"})
    table = {"tasks": {"source": str(tmp_path / "tasks")}, "evaluation": {"tasks": 0}}
    with pytest.raises(InputError, match="the control gate has not seen it"):
        task_source(decode_config(table))
    assert cli.main(["tasks", "check", str(folder)]) == 1
    assert "the empty workspace scores 1" in capsys.readouterr().out
    with pytest.raises(InputError, match="the control gate refused it"):
        task_source(decode_config(table))
    table["tasks"]["unchecked"] = True
    assert task_source(decode_config(table))(Kind.TRAIN, 7).task_id == "one"
    with pytest.raises(ConfigError, match=r"tasks\.options\.heldout"):
        task_source(decode_config({**table, "evaluation": {"tasks": 4}}))
