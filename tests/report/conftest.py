"""A made-up but realistic run: two cells, 24 steps, 1,280 executions; the same bytes every time."""

import random
from collections.abc import Callable, Sequence

import pytest

from opengyre.core.events import Mode, execution_id_of
from opengyre.core.records import (
    CellSpan,
    EvaluationRecord,
    ExecutionRecord,
    PublicationRecord,
    Record,
    RepublicationRecord,
    RunRecord,
    StepRecord,
    SwitchRecord,
)
from opengyre.core.types import Kind
from opengyre.report.figures import CallTotals, RunData

STEP_S = 21.0
GROUPS, SIZE = 4, 8


def _step(step: int, chance: random.Random) -> StepRecord:
    level = 0.24 + 0.26 * (1 - 0.9**step)
    rewards = tuple(min(1.0, max(0.0, round(chance.gauss(level, 0.2) * 8) / 8)) for _ in range(GROUPS * SIZE))
    rows = chance.randint(95, 120)
    return StepRecord(
        step=step,
        incarnation=0,
        started_s=step * STEP_S,
        ended_s=(step + 1) * STEP_S,
        groups=tuple(range(step * GROUPS, step * GROUPS + GROUPS)),
        staleness=(0,) * GROUPS if step == 0 else tuple(chance.choice((0, 1, 1, 1)) for _ in range(GROUPS)),
        rewards=rewards,
        executions=GROUPS * SIZE,
        spent_groups=0,
        zero_variance_groups=int(step % 7 == 3),
        rows=rows,
        leaves=rows + 8 * step,
        trained_tokens=rows * chance.randint(55, 65),
        trainable_tokens=rows * 70,
        mixed_tokens=chance.randint(0, 300),
        micro_steps=tuple((1, f"m{step}-{index}") for index in range(8)),
        forward_backward_s=6 + step * 0.12 + chance.random(),
        loss=chance.gauss(0, 0.01),
        entropy=0.26 - 0.004 * step + chance.gauss(0, 0.008),
        gradient_norm=chance.uniform(0.3, 1.4),
        ratio_mean=1.0,
        ratio_max=2.0,
        truncated_share=0.004,
        kl=0.002,
        checked_tokens=chance.randint(600, 1500),
        checked_difference=chance.uniform(2e-6, 2.4e-5),
        empty=False,
    )


def _cells(step: int, chance: random.Random) -> list[Record]:
    start, leave, back, end = (step * STEP_S + part * STEP_S for part in (0, 0.45 + 0.2 * chance.random(), 0.96, 1))
    records: list[Record] = [
        CellSpan(cell_id=0, mode=Mode.ROLLOUT, started_s=start, ended_s=end, busy_s=STEP_S * 0.83, tokens=9000),
        CellSpan(
            cell_id=1, mode=Mode.ROLLOUT, started_s=start, ended_s=leave, busy_s=(leave - start) * 0.9, tokens=7000
        ),
        CellSpan(cell_id=1, mode=Mode.SWITCHING, started_s=leave, ended_s=leave + 0.3, busy_s=0.0),
        CellSpan(
            cell_id=1,
            mode=Mode.TRAINING,
            started_s=leave + 0.3,
            ended_s=back,
            busy_s=(back - leave - 0.3) * 0.95,
            tokens=6500,
        ),
        CellSpan(cell_id=1, mode=Mode.SWITCHING, started_s=back, ended_s=end, busy_s=0.0),
    ]
    handed = chance.randint(0, 9)
    for mode, at_s, calls in ((Mode.TRAINING, leave, handed), (Mode.ROLLOUT, back, 0)):
        records.append(
            SwitchRecord(
                cell_id=1,
                mode=mode,
                started_s=at_s,
                ended_s=at_s + 0.3,
                handed_over=calls,
                parked=0,
                moved_tokens=calls * 190,
            )
        )
    records.append(
        PublicationRecord(
            version=step + 1,
            incarnation=0,
            started_s=end - 0.2,
            ended_s=end,
            live_calls=chance.randint(8, 30),
        )
    )
    records.append(RepublicationRecord(version=step + 1, ended_s=end, recomputed_tokens=500))
    return records


def _execution(group: int, slot: int, kind: Kind, at_s: float, chance: random.Random) -> ExecutionRecord:
    started = at_s + chance.random() * 2
    ended = started + chance.lognormvariate(2.2, 0.5)
    odds = chance.random()
    outcome = "dropped" if odds < 0.004 else "no_artifact" if odds < 0.02 else "scored"
    passed = chance.randint(0, 8)
    return ExecutionRecord(
        execution_id=execution_id_of(group_id=group, slot=slot, attempt=0, kind=kind),
        task_id=f"minirepo-{group}",
        group_id=group,
        kind=kind,
        version=group // GROUPS,
        dispatched_s=at_s,
        started_s=started,
        ended_s=ended,
        closed_s=ended + 0.3,
        harness_s=ended - started,
        outcome=outcome,
        reward={"scored": passed / 8, "no_artifact": 0.0, "dropped": None}[outcome],
        passed=passed,
        total=8,
        timed_out=odds > 0.985,
        reason={"dropped": "start_failed <script>alert(1)</script>", "no_artifact": "no module file"}.get(outcome, ""),
        calls=15,
        sampled_tokens=320,
    )


def _evaluation(version: int, kind: Kind, level: float, base: Sequence[float], chance: random.Random) -> Record:
    rewards = tuple(min(1.0, max(0.0, value + level + chance.gauss(0, 0.12))) for value in base)
    at_s = version * STEP_S
    return EvaluationRecord(
        version=version,
        kind=kind,
        task_ids=tuple(f"heldout-{index}" for index in range(len(base))),
        rewards=(None, *rewards[1:]) if version else rewards,
        started_s=at_s,
        ended_s=at_s + 25,
    )


def _made_up_run(steps: int) -> RunData:
    chance = random.Random(7)
    records: list[Record] = [
        RunRecord(
            incarnation=0,
            started_s=0.0,
            wall_clock="2026-12-01T06:00:00",
            cells=2,
            config="{}",
            versions={"python": "3.11.7", "torch": "2.13.0"},
        )
    ]
    for step in range(steps):
        records += [_step(step, chance), *_cells(step, chance)]
        for group in range(step * GROUPS, step * GROUPS + GROUPS):
            at_s = max(0, step - 1) * STEP_S
            records += [_execution(group, slot, Kind.TRAIN, at_s, chance) for slot in range(SIZE)]
    base = [chance.uniform(0.0, 0.45) for _ in range(128)]
    for version, sampled, greedy in ((0, 0.0, 0.4), (steps, 0.21, 0.43)):
        for kind, level in ((Kind.EVAL_SAMPLED, sampled), (Kind.EVAL_GREEDY, greedy)):
            records.append(_evaluation(version, kind, level, base, chance))
            at_s = version * STEP_S
            records += [_execution(version * 1000 + task, 0, kind, at_s, chance) for task in range(128)]
    calls = CallTotals(
        committed=19200,
        complete=19188,
        hung_up=12,
        summed_tokens=4_610_000,
        unique_tokens=1_020_000,
        sampled_tokens=405_000,
        restored=15_100,
        rendered=4_100,
        handed_over=131,
    )
    return RunData(name="runs/made-up", records=records, calls=calls)


@pytest.fixture(scope="session")
def made_up_run() -> Callable[[int], RunData]:
    return _made_up_run
