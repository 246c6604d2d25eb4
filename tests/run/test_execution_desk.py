"""The desk for executions: retries of broken evaluations, references in between, outcomes as data."""

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from opengyre.core.config import decode_config
from opengyre.core.events import AttemptDropped, SlotClosed
from opengyre.core.records import ControlRecord, ExecutionRecord
from opengyre.core.types import Dropped, EvaluationFailed, Execution, Scored
from opengyre.execute.isolation import choose_isolation
from opengyre.execute.launcher import ForkServer
from opengyre.execute.live import HarnessEnd
from opengyre.execute.scoring import SandboxedEvaluator
from opengyre.ledger.ledger import Ledger
from opengyre.run import execution_desk
from opengyre.run.execution_desk import ExecutionDesk
from opengyre.tasks.minirepo.tasks import minirepo_package, minirepo_task, reference_files
from opengyre.tasks.references import write_files
from opengyre.trajectory.marks import RoleMarks

TASK = minirepo_task("train", 0)


@dataclass
class Written:
    """A runner whose harness left the reference without its last file, after one call."""

    folder: Path
    number: int = 0
    discarded: list[str] = field(default_factory=list)

    async def run(self, execution_id, task, socket_path):
        files = reference_files(minirepo_package("train", 0))
        files.popitem()
        write_files(self.workspace(execution_id), files)
        return HarnessEnd(status=0, calls=1)

    def workspace(self, execution_id):
        return self.folder / execution_id

    def discard(self, execution_id):
        self.discarded.append(execution_id)


class Failing:
    """An evaluator that fails some times before it says what it was given."""

    def __init__(self, outcome, failures):
        self.outcome, self.left, self.asked = outcome, failures, 0

    async def evaluate(self, task, workspace, *, timed_out):
        self.asked += 1
        self.left -= 1
        return EvaluationFailed(reason="no loopback") if self.left >= 0 else self.outcome


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory(prefix="gyre-d") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def ledger(place):
    made = Ledger.open(place)
    yield made
    made.close()


@pytest.fixture
async def evaluator(place):
    server = ForkServer(place / "forkserver.log")
    await server.start()
    yield SandboxedEvaluator(server, place / "s", workers=1, isolation=choose_isolation("auto"), memory_bytes=1 << 29)
    await server.stop()


def desk_of(place, ledger, evaluator, *, retries=2):
    async def nothing(*_):
        return None

    events = []
    desk = ExecutionDesk(
        config=decode_config({"evaluation": {"retries": retries}}),
        runner=Written(place / "x"),
        evaluator=evaluator,
        proxy=SimpleNamespace(open_execution=nothing, close_execution=nothing),
        router=SimpleNamespace(release=lambda execution_id: None),
        ledger=ledger,
        clock=time.monotonic,
        post=events.append,
        sockets=place,
        marks=RoleMarks(),
    )
    return desk, events


def execution(number: int) -> Execution:
    return Execution(execution_id=f"e{number}", task_id=TASK.task_id, group_id=0, slot=number, attempt=0, version=0)


async def test_every_so_many_scorings_a_reference_is_scored_and_a_broken_grader_makes_the_task_suspect(
    place, ledger, evaluator, monkeypatch
):
    monkeypatch.setattr(execution_desk, "CONTROL_EVERY", 2)
    desk, _ = desk_of(place, ledger, evaluator)
    for number in range(4):
        await desk.run(execution(number), TASK)
    controls = ledger.records(ControlRecord)
    assert [(control.reward, control.is_suspect) for control in controls] == [(1.0, False)] * 2
    broken = msgspec.structs.replace(
        TASK, hidden_files={name: text.replace("==", "!=") for name, text in TASK.hidden_files.items()}
    )
    for number in range(4, 6):
        await desk.run(execution(number), broken)
    last = ledger.records(ControlRecord)[-1]
    assert last.is_suspect
    assert last.reward != 1.0
    rewards = [record.reward for record in ledger.records(ExecutionRecord)]
    assert all(0 < reward < 1 for reward in rewards[:4])


async def test_a_failed_evaluation_is_tried_again_and_then_counts(place, ledger, monkeypatch):
    monkeypatch.setattr(execution_desk, "RETRY_S", 0.001)
    judge = Failing(Scored(reward=0.5, passed=1, total=2), failures=2)
    desk, events = desk_of(place, ledger, judge)
    await desk.run(execution(0), TASK)
    assert judge.asked == 3
    assert events[-1] == SlotClosed(execution_id="e0")
    assert ledger.outcome("e0") == Scored(reward=0.5, passed=1, total=2)


async def test_an_evaluation_that_keeps_failing_drops_the_attempt_and_is_never_a_zero(place, ledger, monkeypatch):
    monkeypatch.setattr(execution_desk, "RETRY_S", 0.001)
    judge = Failing(Scored(reward=0.0, passed=0, total=2), failures=99)
    desk, events = desk_of(place, ledger, judge, retries=1)
    await desk.run(execution(0), TASK)
    assert judge.asked == 2
    assert events[-1] == AttemptDropped(execution_id="e0", reason="evaluation_failed: no loopback")
    assert isinstance(ledger.outcome("e0"), Dropped)
    assert ledger.records(ExecutionRecord)[0].reward is None
    assert desk.runner.discarded == []
