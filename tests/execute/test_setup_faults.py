"""A fault of the scoring's surroundings is an evaluation failure; the same trouble made by a candidate is a score."""

import os
import subprocess
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from opengyre.core.types import EvaluationFailed, Scored, Task
from opengyre.execute.isolation import choose_isolation
from opengyre.execute.launcher import ForkServer
from opengyre.execute.scoring import SandboxedEvaluator

TASK = Task(
    task_id="one",
    format="minirepo",
    instruction="",
    hidden_files={"hidden_amber.py": "from amber import *\n\n\ndef test_one():\n    assert one(1) == 2\n"},
    test_ids=("amber::one",),
    artifact=("amber.py",),
    scoring_limit_s=8.0,
)
RIGHT = "def one(x):\n    return x + 1\n"


LOOPBACK_DOWN = """
from gyre_shim import forkserver, sandbox
def refused():
    raise OSError(19, "No such device")
sandbox._raise_loopback = refused
forkserver.main()
"""
HUNGRY_GRADER = """
from gyre_grade import grade
from gyre_shim import forkserver
grade.grade = lambda *_, **__: bytes(1 << 40)
forkserver.main()
"""


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory(prefix="gyre-f") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def write_on(file):
    while True:
        file.write(bytes(4096))


@asynccontextmanager
async def evaluator(place, *, isolation="bubblewrap", memory_bytes=1 << 29, **options):
    server = ForkServer(place / "forkserver.log", **options)
    await server.start()
    yield SandboxedEvaluator(
        server, place / "s", workers=1, isolation=choose_isolation(isolation), memory_bytes=memory_bytes
    )
    await server.stop()


async def scored(judge, place, source, task=TASK):
    folder = Path(tempfile.mkdtemp(dir=place))
    (folder / "amber.py").write_text(source)
    return await judge.evaluate(task, folder, timed_out=False)


async def test_a_loopback_that_stays_down_is_an_evaluation_failure(place):
    async with evaluator(place, program=("-c", LOOPBACK_DOWN)) as judge:
        outcome = await scored(judge, place, RIGHT)
    assert isinstance(outcome, EvaluationFailed)
    assert "No such device" in outcome.reason
    async with evaluator(place) as judge:
        assert (await scored(judge, place, RIGHT)).reward == 1.0


async def test_the_loopback_is_up_for_a_candidate_and_what_nobody_serves_is_its_own_fault(place):
    serving = (
        "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(server.getsockname(), timeout=5)\n"
    )
    asking = "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=5)\n"
    async with evaluator(place) as judge:
        assert (await scored(judge, place, serving + RIGHT)).reward == 1.0
        outcome = await scored(judge, place, asking + RIGHT)
    assert isinstance(outcome, Scored)
    assert outcome.reward == 0.0


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make a small file system")
@pytest.mark.parametrize("isolation", ["bubblewrap", "landlock"])
async def test_a_full_disk_is_an_evaluation_failure_until_there_is_room(place, isolation):
    (place / "s").mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", place / "s"], check=False)
    if made.returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        async with evaluator(place, isolation=isolation) as judge:
            filler = place / "s" / "filler"
            with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
                write_on(file)
            assert isinstance(await scored(judge, place, RIGHT), EvaluationFailed)
            filler.unlink()
            assert (await scored(judge, place, RIGHT)).reward == 1.0
    finally:
        subprocess.run(["umount", "-l", place / "s"], check=True)


@pytest.mark.parametrize("isolation", ["bubblewrap", "landlock"])
async def test_a_grader_without_memory_is_an_evaluation_failure_and_a_hungry_candidate_a_zero(place, isolation):
    async with evaluator(place, isolation=isolation, program=("-c", HUNGRY_GRADER)) as starved:
        assert isinstance(await scored(starved, place, RIGHT), EvaluationFailed)
    async with evaluator(place, isolation=isolation) as fed:
        hungry = await scored(fed, place, "store = bytearray(8 << 30)\n" + RIGHT)
        assert isinstance(hungry, Scored)
        assert hungry.reward == 0.0
        assert (await scored(fed, place, RIGHT)).reward == 1.0


async def test_a_candidate_that_kills_itself_is_scored(place):
    async with evaluator(place) as judge:
        outcome = await scored(judge, place, "import os\nos.kill(os.getpid(), 9)\n" + RIGHT)
    assert isinstance(outcome, Scored)
    assert outcome.reward == 0.0


async def test_what_the_scoring_of_a_library_lacks_is_an_evaluation_failure_and_what_the_library_lacks_a_zero(place):
    tests = "from amber import one\n\ndef test_one():\n    assert one(1) == 2\n"
    options = {"test_files": ["test_amber.py"], "canaries": [], "needs": ["pytest"]}
    task = msgspec.structs.replace(
        TASK,
        format="repo",
        hidden_files={"test_amber.py": tests},
        test_ids=("test_amber.py::test_one",),
        options=options,
    )
    lacking = msgspec.structs.replace(task, options={**options, "needs": ["pytest", "a-package-nobody-has"]})
    async with evaluator(place, memory_bytes=1 << 31) as judge:
        failed = await scored(judge, place, RIGHT, lacking)
        assert isinstance(failed, EvaluationFailed)
        assert "a-package-nobody-has" in failed.reason
        assert (await scored(judge, place, RIGHT, task)).reward == 1.0
        assert (await scored(judge, place, "store = bytearray(8 << 30)\n" + RIGHT, task)).reward == 0.0
        assert (await scored(judge, place, "import a_package_nobody_has\n" + RIGHT, task)).reward == 0.0
    async with evaluator(place, memory_bytes=16 << 20) as starved:
        assert isinstance(await scored(starved, place, RIGHT, task), EvaluationFailed)
