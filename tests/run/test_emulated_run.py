"""A run on more emulated cells than the machine has cores: all parts real but the cells' work."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from opengyre.cli import main as cli
from opengyre.core.config import decode_config, load_config
from opengyre.core.errors import ConfigError
from opengyre.core.events import RatesMeasured, decode_command, decode_event
from opengyre.core.records import CellSpan, ExecutionRecord, RepublicationRecord, StepRecord
from opengyre.core.types import Kind
from opengyre.engine.emulated import EmulatedCosts, read_replies
from opengyre.ledger.ledger import Ledger
from opengyre.report.results import summarise
from opengyre.run.build import schedule_settings
from opengyre.run.calibrate import calibrate
from opengyre.run.emulated import PLANNED, REPLIES, PlannedCall, emulated_costs
from opengyre.run.folder import read_config
from opengyre.run.recorded import recorded_sessions
from opengyre.run.report_data import read_run
from opengyre.run.supported import check_supported
from opengyre.schedule.scheduler import Scheduler
from opengyre.trajectory.recorded import tree_of

CONFIG = """
[run]
steps = 3
[cells]
count = 5
engine = "emulated"
[cells.options]
step_weights_s = 0.002
step_request_s = 0.0001
train_token_s = 1e-4
optimizer_s = 0.05
publish_s = 0.05
switch_s = 0.05
[schedule]
batch_groups = 2
group_size = 3
[policy]
context_tokens = 640
[harness.options]
tool_wait_s = 0.01
[evaluation]
at = [0]
tasks = 2
"""


def test_a_run_on_five_emulated_cells_trains_and_its_executions_make_exactly_the_calls_that_were_planned(tmp_path):
    (tmp_path / "emulated.toml").write_text(CONFIG)
    process = subprocess.run(
        [sys.executable, "-m", "opengyre.cli", "train", "emulated.toml", "--run", "run"],
        capture_output=True,
        text=True,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        cwd=tmp_path,
        timeout=120,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    planned = msgspec.msgpack.decode((tmp_path / "run" / PLANNED).read_bytes(), type=dict[str, list[PlannedCall]])
    table = read_replies(tmp_path / "run" / REPLIES)
    ledger = Ledger.open(tmp_path / "run", read_only=True)
    steps, executions = ledger.records(StepRecord), ledger.executions()
    assert [step.step for step in steps] == [0, 1, 2]
    assert all(step.trained_tokens > 0 for step in steps)
    assert {span.cell_id for span in ledger.records(CellSpan)} == set(range(5))
    assert len(executions) == 3 * 2 * 3 + 2 * 2
    costs = ledger.records(RepublicationRecord)
    assert [cost.version for cost in costs] == [1, 2, 3]
    assert sum(cost.recomputed_tokens for cost in costs) == summarise(read_run(tmp_path / "run")).prefilled_tokens > 0
    for execution in executions:
        calls = ledger.read_calls(execution.execution_id)
        tree = tree_of(execution.execution_id, calls)
        assert len(calls) > 1
        assert all(table.knows(tree.context_of(tree.index_of(call.call_id))) for call in calls)
        if execution.execution_id in planned:
            made = [(len(tree.context_of(tree.index_of(call.call_id))), len(call.output)) for call in calls]
            script = planned.pop(execution.execution_id)
            assert made == [(call.context_tokens, call.output_tokens) for call in script]
            assert any(call.wait_s == 0.01 for call in script)
    assert not planned
    ledger.close()
    check_that_it_calibrates(tmp_path / "run", steps=len(steps))


def check_that_it_calibrates(folder, *, steps):
    """Costs come out near those of the options; the executions are those of the run, also as a trace."""
    one = calibrate(folder)
    fitted, given = {cost.key: cost.value for cost in one.costs}, emulated_costs(read_config(folder))
    assert fitted["train_token_s"] == pytest.approx(given.train_token_s, rel=0.5)
    assert 0 < one.decode.median_error < 0.8
    assert one.workload.steps == steps
    sampled = sum(end.sampled_tokens for end in recorded_ends(folder))
    assert sum(call.output_tokens for session in one.recorded.sessions for call in session) == sampled
    assert 0.2 < one.simulated_s / one.measured_s < 1.5
    assert recorded_sessions(folder) == one.recorded.sessions
    workload = folder / "again.toml"
    workload.write_text(
        'cells = 5\ngpus = 40\ntrace = "."\nkv_tokens_per_cell = 1e5\nsteps = 6\ncontext_high_tokens = 3e4\n'
    )
    assert cli(["simulate", str(workload), "--calibrate", str(folder), "--rules", "waterlevel"]) == 0


def test_the_look_ahead_rule_gets_rates_that_are_those_of_the_cells_and_its_choices_follow_from_the_log(tmp_path):
    (tmp_path / "emulated.toml").write_text(CONFIG)
    changes = ('schedule.rule="lookahead"', "run.steps=5", "evaluation.at=[]", "cells.options.step_request_s=0.004")
    process = subprocess.run(
        [sys.executable, "-m", "opengyre.cli", "train", "emulated.toml", "--run", "run"]
        + [part for change in changes for part in ("--set", change)],
        capture_output=True,
        text=True,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        cwd=tmp_path,
        timeout=120,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    ledger = Ledger.open(tmp_path / "run", read_only=True)
    scheduler = Scheduler(schedule_settings(read_config(tmp_path / "run")))
    measured = []
    for logged in ledger.events():
        event = decode_event(logged.event)
        assert scheduler.on(event, logged.now_s) == [decode_command(command) for command in logged.commands]
        if isinstance(event, RatesMeasured):
            measured.append(event)
    ledger.close()
    assert [choice.version for choice in scheduler.choices]
    assert 0.7e-4 < measured[-1].training_token_s < 1e-3  # a busy machine only makes it more
    assert 0.0005 < measured[-1].decode_request_s + measured[-1].decode_weights_s < 0.1
    assert measured[-1].kv_capacity_tokens == 65536


def recorded_ends(folder):
    ledger = Ledger.open(folder, read_only=True)
    ends = [end for end in ledger.records(ExecutionRecord) if end.kind is Kind.TRAIN]
    ledger.close()
    return ends


def test_costs_come_from_the_options_and_a_wrong_one_is_named():
    config = decode_config({"cells": {"engine": "emulated", "options": {"switch_s": 2}}})
    assert emulated_costs(config) == EmulatedCosts(switch_s=2.0)
    assert emulated_costs(decode_config({})) is None
    for options, named in (({"switch": 2}, "switch"), ({"switch_s": -1.0}, "switch_s"), ({"switch_s": "x"}, "float")):
        with pytest.raises(ConfigError, match=rf"cells\.options.*{named}"):
            emulated_costs(decode_config({"cells": {"engine": "emulated", "options": options}}))


def test_emulated_cells_refuse_work_for_which_there_is_no_script():
    with pytest.raises(ConfigError, match=r"harness\.name"):
        check_supported(decode_config({"cells": {"engine": "emulated"}, "harness": {"name": "codex"}}))


def test_the_recipe_is_one_that_a_live_run_carries_out():
    config = load_config(Path(__file__).parents[2] / "recipes" / "emulated.toml")
    check_supported(config)
    assert emulated_costs(config).train_token_s > 0
