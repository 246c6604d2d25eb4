"""The whole loop on a tiny policy: every part is the real one, in its own process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opengyre.core.config import decode_config
from opengyre.core.events import decode_command, decode_event
from opengyre.core.records import EvaluationRecord, StepRecord
from opengyre.core.types import Delivered
from opengyre.ledger.ledger import Ledger
from opengyre.run.build import schedule_settings
from opengyre.run.folder import read_config, socket_folder
from opengyre.schedule.scheduler import Scheduler
from opengyre.trajectory.recorded import tree_of

CONFIG = """
[run]
steps = 2
[policy]
hidden_size = 32
layers = 2
heads = 2
kv_heads = 1
mlp_size = 64
context_tokens = 512
warm_start = { demonstrations = 60, copy_steps = 10, unit_steps = 10, processes = 1 }
[schedule]
batch_groups = 2
group_size = 3
[tasks]
heldout_count = 4
[evaluation]
at = [0, 2]
tasks = 2
[algorithm]
advantage_eps = 0.05
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    (folder / "tiny.toml").write_text(CONFIG)
    return folder


def opengyre(home: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = dict(os.environ, XDG_CACHE_HOME=str(home / "cache"), OMP_NUM_THREADS="1")
    return subprocess.Popen(
        [sys.executable, "-m", "opengyre.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=home,
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate(timeout=150)
    return process.returncode, text


def wait_for_step(run: Path, step: int) -> None:
    deadline_s = time.monotonic() + 90
    while time.monotonic() < deadline_s:
        if (run / "ledger.sqlite").exists():
            ledger = Ledger.open(run, read_only=True)
            steps = len(ledger.records(StepRecord))
            ledger.close()
            if steps >= step:
                return
        time.sleep(0.2)
    raise AssertionError(f"step {step} was not reached")


def check_run(run: Path, *, steps: int) -> None:
    ledger = Ledger.open(run, read_only=True)
    records = {record.step: record for record in ledger.records(StepRecord)}
    assert sorted(records) == list(range(steps))
    assert all(d <= 1 for record in records.values() for d in record.staleness)
    assert all(record.checked_difference < 1e-4 for record in records.values())
    evaluations = {(record.version, record.kind.value) for record in ledger.records(EvaluationRecord)}
    assert evaluations == {(v, kind) for v in (0, steps) for kind in ("eval-sampled", "eval-greedy")}
    counts = ledger.delivery_counts()
    assert counts["complete"] > 0
    assert counts["unknown"] == 0
    for execution in ledger.executions():
        calls = ledger.read_calls(execution.execution_id)
        tree = tree_of(execution.execution_id, calls)
        assert len(tree.calls) == len(calls)
        assert all(call.delivered is not Delivered.UNKNOWN for call in calls)
    scheduler = Scheduler(schedule_settings(read_config(run)))
    for logged in ledger.events():
        commands = scheduler.on(decode_event(logged.event), logged.now_s)
        assert commands == [decode_command(command) for command in logged.commands]
    assert scheduler.is_done
    ledger.close()


def test_a_run_trains_evaluates_and_its_log_replays_to_the_same_commands(home):
    code, text = finished(opengyre(home, "train", "tiny.toml", "--run", "first"))
    assert code == 0, text
    check_run(home / "first", steps=2)
    sockets = socket_folder(home / "first")
    assert not sockets.exists()
    assert not (Path("/dev/shm") / sockets.name).exists()


def test_a_run_that_was_killed_goes_on_from_its_last_step_and_loses_no_call(home):
    run = home / "killed"
    process = opengyre(
        home, "train", "tiny.toml", "--run", str(run), "--set", "run.steps=4", "--set", "evaluation.at=[0,4]"
    )
    wait_for_step(run, 1)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    ledger = Ledger.open(run, read_only=True)
    before = {e.execution_id: [c.call_id for c in ledger.read_calls(e.execution_id)] for e in ledger.executions()}
    ledger.close()
    code, text = finished(opengyre(home, "train", "--resume", str(run)))
    assert code == 0, text
    check_run(run, steps=4)
    ledger = Ledger.open(run, read_only=True)
    for execution_id, calls in before.items():
        assert [c.call_id for c in ledger.read_calls(execution_id)][: len(calls)] == calls
    ledger.close()


def test_an_interrupted_run_ends_with_130_and_says_how_to_go_on(home):
    run = home / "interrupted"
    process = opengyre(home, "train", "tiny.toml", "--run", str(run))
    wait_for_step(run, 1)
    process.send_signal(signal.SIGINT)
    code, text = finished(process)
    assert code == 130, text
    assert f"--resume {run}" in text
    code, text = finished(opengyre(home, "train", "--resume", str(run)))
    assert code == 0, text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "tiny.toml", "--set", "run.stepz=3"], "run.stepz"),
        (["train", "tiny.toml", "--set", "run.steps=0"], "run.steps"),
        (["train", "absent.toml"], "absent.toml"),
        (["train", "tiny.toml", "--set", "tasks.source='nowhere'", "--run", "n"], "nowhere"),
        (["train", "--resume", "nothing-here"], "nothing-here"),
        (["eval", "tiny.toml", "--weights", "nothing-here"], "nothing-here"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(home, arguments, expected):
    code, text = finished(opengyre(home, *arguments))
    assert code == 2
    assert expected in text
    assert len(text.strip().splitlines()) == 1


def test_an_existing_run_folder_is_refused(home):
    (home / "taken").mkdir(exist_ok=True)
    (home / "taken" / "file").write_text("mine")
    code, text = finished(opengyre(home, "train", "tiny.toml", "--run", "taken"))
    assert code == 2
    assert "--resume" in text
    assert (home / "taken" / "file").read_text() == "mine"


def test_evaluation_prints_one_json_object(home):
    code, text = finished(opengyre(home, "eval", "tiny.toml", "--tasks", "2", "--json"))
    assert code == 0, text
    rows = json.loads(text)["evaluations"]
    assert [row["mode"] for row in rows] == ["greedy", "sampled"] or [row["mode"] for row in rows] == [
        "sampled",
        "greedy",
    ]


def test_the_settings_of_a_run_are_those_of_its_configuration():
    config = decode_config({"run": {"steps": 3}, "evaluation": {"at": [0, 24]}})
    assert schedule_settings(config).evaluate_at == (0, 3)


@pytest.mark.slow
def test_the_embedded_policy_trains_tokens_that_agree_with_how_they_were_sampled(tmp_path):
    """Needs the warm start of the recipe: minutes where it is not cached."""
    recipe = Path(__file__).parents[2] / "recipes" / "minirepo.toml"
    settings = ("run.steps=3", "evaluation.at=[0]", "evaluation.tasks=8")
    arguments = [part for setting in settings for part in ("--set", setting)]
    process = subprocess.Popen(
        [sys.executable, "-m", "opengyre.cli", "train", str(recipe), "--run", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    )
    text, _ = process.communicate(timeout=900)
    assert process.returncode == 0, text
    ledger = Ledger.open(tmp_path / "run", read_only=True)
    steps = ledger.records(StepRecord)
    assert all(step.trained_tokens > 0 and not step.empty for step in steps)
    assert all(step.checked_tokens > 0 and step.checked_difference < 1e-4 for step in steps)
    ledger.close()
