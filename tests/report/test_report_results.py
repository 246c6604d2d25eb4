import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from opengyre.core.events import Mode
from opengyre.core.records import CellSpan, ExecutionRecord, StepRecord
from opengyre.core.types import Kind
from opengyre.report.figures import RunData
from opengyre.report.results import breach_s, cell_times, summarise, waterlevel
from opengyre.report.statistics import difference, paired_difference, student_975, total, union

TIMES = st.floats(min_value=0.0, max_value=1000.0).map(lambda value: round(value, 3))
INTERVALS = st.lists(st.tuples(TIMES, TIMES).map(lambda pair: (min(pair), max(pair))), max_size=12)
DESIGN_KEYS = {
    "steps",
    "wall_s",
    "calls",
    "tokens",
    "cells",
    "switches",
    "evaluations",
    "reward",
    "staleness",
    "breach_s",
    "outcomes",
}


def execution(name: str, *, started_s: float, ended_s: float, dispatched_s: float = 0.0) -> ExecutionRecord:
    return ExecutionRecord(
        execution_id=name,
        task_id="t",
        group_id=0,
        kind=Kind.TRAIN,
        version=0,
        dispatched_s=dispatched_s,
        started_s=started_s,
        ended_s=ended_s,
        closed_s=ended_s,
        harness_s=ended_s - started_s,
        outcome="scored",
        reward=0.5,
    )


def span(mode: Mode, started_s: float, ended_s: float, *, cell_id: int = 0, busy_s: float = 0.0) -> CellSpan:
    return CellSpan(cell_id=cell_id, mode=mode, started_s=started_s, ended_s=ended_s, busy_s=busy_s)


def test_the_json_has_the_keys_of_the_design(made_up_run):
    answer = msgspec.json.decode(msgspec.json.encode(summarise(made_up_run(3))))
    assert set(answer) >= DESIGN_KEYS
    assert set(answer["calls"]) >= {"committed", "complete", "hung_up", "unknown"}
    assert set(answer["tokens"]) == {"summed", "unique", "sampled", "trained"}
    assert set(answer["cells"][0]) >= {"cell_id", "rollout_s", "training_s", "switching_s", "idle_s"}
    assert set(answer["evaluations"][0]) >= {"step", "mode", "pass_rate", "solved_rate", "tasks"}
    assert set(answer["staleness"]) >= {"mean", "max"}
    assert set(answer["outcomes"]) == {"scored", "timed_out", "no_artifact", "evaluation_failed", "dropped"}
    assert len(answer["reward"]) == answer["steps"] == 3


def test_every_execution_has_one_outcome(made_up_run):
    results = summarise(made_up_run(4))
    outcomes = results.outcomes
    counted = outcomes.scored + outcomes.no_artifact + outcomes.evaluation_failed + outcomes.dropped
    assert counted == results.executions


def test_a_step_taken_again_after_a_resume_replaces_the_lost_one(made_up_run):
    data = made_up_run(3)
    lost = next(record for record in data.records if isinstance(record, StepRecord) and record.step == 1)
    again = msgspec.structs.replace(lost, incarnation=1, trained_tokens=lost.trained_tokens + 1000)
    results = summarise(RunData(name="r", records=[again, *data.records]))
    assert results.steps == 3
    assert results.tokens.trained == summarise(data).tokens.trained + 1000


def test_evaluations_are_paired_by_task_and_a_dropped_task_leaves_its_pair(made_up_run):
    gains = summarise(made_up_run(24)).gains
    assert [gain.mode for gain in gains] == ["sampled", "greedy"]
    assert [gain.change.pairs for gain in gains] == [127, 127]
    assert gains[0].change.low < gains[0].change.difference < gains[0].change.high


def test_a_run_without_records_has_no_figures_and_no_error():
    results = summarise(RunData(name="empty", records=[]))
    assert (results.steps, results.wall_s, results.utilisation, results.reward) == (0, 0.0, 0.0, ())


def test_breach_is_the_time_in_which_an_execution_lived_and_no_cell_rolled_out():
    spans = [span(Mode.ROLLOUT, 0.0, 4.0), span(Mode.TRAINING, 4.0, 10.0), span(Mode.TRAINING, 0.0, 6.0, cell_id=1)]
    spans.append(span(Mode.ROLLOUT, 7.0, 10.0, cell_id=1))
    assert breach_s([execution("a", started_s=1.0, ended_s=9.0)], spans) == 3.0
    assert breach_s([execution("a", started_s=1.0, ended_s=5.0)], spans) == 1.0
    assert breach_s([], spans) == 0.0


@given(st.lists(st.tuples(st.sampled_from(list(Mode)), TIMES, TIMES, TIMES), max_size=20))
def test_the_times_of_a_cell_add_up_to_the_time_that_it_was_there(parts):
    spans = [
        span(mode, start, start + length, busy_s=0.0 if mode is Mode.SWITCHING else busy)
        for mode, start, length, busy in parts
    ]
    for cell in cell_times(spans):
        parts_s = (cell.rollout_s, cell.training_s, cell.switching_s, cell.idle_s)
        assert math.isclose(sum(parts_s), sum(one.ended_s - one.started_s for one in spans), abs_tol=1e-6)
        assert all(value >= -1e-9 for value in parts_s)


@given(INTERVALS, INTERVALS)
def test_what_is_removed_and_what_is_left_make_up_the_whole(covered, removed):
    left = difference(covered, removed)
    both = total(union(covered)) - total(left)
    assert -1e-6 <= both <= total(union(removed)) + 1e-6
    assert math.isclose(total(union([*left, *removed])), total(union([*covered, *removed])), abs_tol=1e-6)


@given(st.lists(st.tuples(TIMES, TIMES, TIMES), max_size=30))
def test_the_waterlevel_returns_to_zero_and_is_never_negative(parts):
    executions = [
        execution(f"e{n}", dispatched_s=at, started_s=at + wait, ended_s=at + wait + length)
        for n, (at, wait, length) in enumerate(parts)
    ]
    levels = [level for _, level in waterlevel(executions)]
    assert all(level >= 0 for level in levels)
    assert not levels or levels[-1] == 0


def test_the_interval_of_a_paired_difference_is_students():
    change = paired_difference([0.0, 0.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4])
    assert change is not None
    half = 3.1824463 * math.sqrt((0.05 / 3) / 4)
    assert math.isclose(change.high - change.difference, half, rel_tol=1e-4)
    assert [round(student_975(n), 2) for n in (1, 2, 3, 5, 30)] == [12.71, 4.30, 3.18, 2.57, 2.04]
