"""Grading: what was really done counts, and what only looks like it does not."""

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from opengyre.core.types import EvaluationFailed, NoArtifact, Scored, Task
from opengyre.execute.isolation import choose_isolation
from opengyre.execute.launcher import ForkServer
from opengyre.execute.scoring import SandboxedEvaluator
from opengyre.tasks.minirepo.family import Package
from opengyre.tasks.minirepo.tasks import minirepo_package, minirepo_task, reference_files

TASK = Task(
    task_id="two",
    format="minirepo",
    instruction="",
    files={"TASK.md": ""},
    hidden_files={
        "hidden_amber.py": "from amber import *\n\n\n"
        "def test_one():\n    assert one([1]) == 2\n    assert one([2]) == 3\n\n\n"
        "def test_two():\n    assert two([1]) == [1]\n"
    },
    test_ids=("amber::one", "amber::two"),
    artifact=("amber.py",),
    scoring_limit_s=8.0,
)
ONE = "def one(v):\n    return v[0] + 1\n"
TWO = "def two(v):\n    return v\n"


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory(prefix="gyre-s") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(params=["bubblewrap", "landlock"])
def isolation(request):
    return choose_isolation(request.param)


@pytest.fixture
async def evaluator(folder, isolation):
    server = ForkServer(folder / "forkserver.log")
    await server.start()
    made = SandboxedEvaluator(server, folder / "s", workers=2, isolation=isolation, memory_bytes=1 << 29)
    yield made
    made.close()
    await server.stop()


def workspace(folder: Path, files: dict[str, str]) -> Path:
    path = folder / f"w{len(list(folder.iterdir()))}"
    path.mkdir()
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


async def score(evaluator, folder, files, task=TASK):
    return await evaluator.evaluate(task, workspace(folder, files), timed_out=False)


async def test_right_functions_count_one_by_one(evaluator, folder):
    assert (await score(evaluator, folder, {"amber.py": ONE + TWO})).reward == 1.0
    half = await score(evaluator, folder, {"amber.py": ONE})
    assert half.tests == {"amber::one": "passed", "amber::two": "failed"}
    assert half.reward == 0.5


async def test_without_the_artifact_there_is_a_valid_zero(evaluator, folder):
    assert await score(evaluator, folder, {"birch.py": ONE}) == NoArtifact(reason="no artifact", total=2)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(0)\n",
        "raise SystemExit(0)\n",
        "import sys\nsys.exit(0)\n",
        "def one(v):\n    return 1\n",
        "this is not python",
        "",
        "def one(v):\n    import os\n    os._exit(0)\n",
        "import sys\nsys.modules['hidden'] = None\n",
        "import os\nopen('hidden_amber.py', 'w').write('def test_one(): pass')\n",
    ],
    ids=["exit", "raise", "sys-exit", "constant", "syntax", "empty", "exit-inside", "modules", "rewrite"],
)
async def test_what_does_not_do_the_work_scores_nothing(evaluator, folder, source):
    outcome = await score(evaluator, folder, {"amber.py": source})
    assert isinstance(outcome, Scored)
    assert outcome.reward == 0.0


async def test_an_object_that_equals_everything_is_tampering_and_zeroes_the_file(evaluator, folder):
    source = "class Any:\n    def __eq__(self, other):\n        return True\n\ndef one(v):\n    return Any()\n" + TWO
    outcome = await score(evaluator, folder, {"amber.py": source})
    assert outcome.reward == 0.0
    assert outcome.reason == "tampering"


async def test_an_endless_loop_costs_its_own_test_only(evaluator, folder):
    outcome = await score(evaluator, folder, {"amber.py": "def one(v):\n    while True: pass\n" + TWO})
    assert outcome.tests["amber::one"] in ("failed", "timeout")
    assert outcome.reward <= 0.5


async def test_a_candidate_that_forks_eats_memory_or_fills_the_disk_is_scored_and_leaves_nothing(evaluator, folder):
    source = (
        "import os, time\nfor _ in range(30):\n    try:\n        if not os.fork():\n            time.sleep(88)\n"
        "            os._exit(0)\n    except OSError: break\n" + ONE + TWO
    )
    outcome = await score(evaluator, folder, {"amber.py": source})
    assert isinstance(outcome, Scored)
    hungry = await score(evaluator, folder, {"amber.py": "x = bytearray(8 * 1024 ** 3)\n" + ONE})
    assert hungry.reward == 0.0
    full = await score(evaluator, folder, {"amber.py": "open('big', 'wb').write(bytes(10 ** 9))\n" + ONE})
    assert full.reward == 0.0
    assert [path.name for path in (folder / "s").iterdir() if path.name.startswith("grade-")] == []


async def test_links_and_files_that_steer_a_grader_are_left_out(evaluator, folder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    path = workspace(folder, {"amber.py": ONE + TWO, "conftest.py": "raise SystemExit", "sitecustomize.py": "1/0"})
    os.symlink(secret, path / "link.py")
    os.mkfifo(path / "pipe.py")
    outcome = await evaluator.evaluate(TASK, path, timed_out=True)
    assert outcome.reward == 1.0
    assert outcome.timed_out


async def test_a_grader_that_cannot_start_is_an_evaluation_failure_and_no_zero(folder, isolation):
    server = ForkServer(folder / "gone.log")
    await server.start()
    broken = SandboxedEvaluator(server, folder / "b", workers=1, isolation=isolation, memory_bytes=1 << 29)
    await server.stop()
    assert isinstance(await score(broken, folder, {"amber.py": ONE}), EvaluationFailed)


@pytest.mark.parametrize("split", ["train", "heldout"])
async def test_minirepo_tasks_pass_the_control_gate(evaluator, folder, split):
    for index in range(4):
        task = minirepo_task(split, index)
        package: Package = minirepo_package(split, index)
        assert (await score(evaluator, folder, reference_files(package), task)).reward == 1.0
        empty = {name: "" for name in reference_files(package)}
        assert (await score(evaluator, folder, empty, task)).reward == 0.0


FORGER = """
import json, os
forged = json.dumps({"grader": "gyre-grade-2", "tests": {"amber::one": "passed", "amber::two": "passed"}}).encode()
places = [f"/proc/{number}/fd" for number in os.listdir("/proc") if number.isdigit() and int(number) != os.getpid()]
for descriptor in range(3, 64):
    try: os.write(descriptor, forged)
    except OSError: pass
for place in places:
    try: names = os.listdir(place)
    except OSError: continue
    for name in names:
        try: os.write(os.open(f"{place}/{name}", os.O_WRONLY | os.O_NONBLOCK), forged)
        except OSError: pass
"""
FLOOD = """
while True:
    for descriptor in range(3, 64):
        try: os.write(descriptor, bytes(1 << 16))
        except OSError: pass
"""


@pytest.mark.parametrize("source", [FORGER, FORGER + FLOOD], ids=["forged", "forged and flooded"])
async def test_a_candidate_cannot_speak_for_its_supervisor_nor_break_it(evaluator, folder, source):
    outcome = await score(evaluator, folder, {"amber.py": source})
    assert isinstance(outcome, Scored)
    assert outcome.reward == 0.0


async def test_identical_workspaces_are_scored_once_even_at_the_same_time(evaluator, folder, monkeypatch):
    started = []
    launch = evaluator.server.launch

    async def counted(order):
        started.append(order["id"])
        return await launch(order)

    monkeypatch.setattr(evaluator.server, "launch", counted)
    source = {"amber.py": ONE + "# the same\n" + TWO}
    outcomes = await asyncio.gather(*(score(evaluator, folder, source) for _ in range(4)))
    assert [outcome.reward for outcome in outcomes] == [1.0] * 4
    assert len(started) == 1
    assert (await score(evaluator, folder, {"amber.py": ONE})).reward == 0.5
    assert len(started) == 2
