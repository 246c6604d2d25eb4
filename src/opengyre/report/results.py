"""From the records of a run to the figures that people read: pure functions, no ledger and no clock."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from opengyre.core.events import Mode
from opengyre.core.records import (
    CellSpan,
    ControlRecord,
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
from opengyre.report.figures import (
    CallCounts,
    CallTotals,
    CellTime,
    Checks,
    EvaluationRow,
    Gain,
    Outcomes,
    Results,
    RunData,
    Scoring,
    Staleness,
    StepRow,
    Switches,
    TokenCounts,
)
from opengyre.report.statistics import (
    difference,
    mean,
    mean_interval,
    paired_difference,
    quantile,
    total,
    union,
)

_Kept = TypeVar("_Kept", bound=Record)


def summarise(data: RunData) -> Results:
    """Return the figures of a run.

    >>> summarise(RunData(name="empty", records=[])).steps
    0
    """
    runs = _of(data.records, RunRecord)
    steps = final_steps(_of(data.records, StepRecord))
    spans = _of(data.records, CellSpan)
    executions = _of(data.records, ExecutionRecord)
    evaluations = final_evaluations(_of(data.records, EvaluationRecord))
    switches = _of(data.records, SwitchRecord)
    publications = _of(data.records, PublicationRecord)
    cells = cell_times(spans)
    present_s = sum(cell.rollout_s + cell.training_s + cell.switching_s + cell.idle_s for cell in cells)
    rows = tuple(_step_row(step) for step in steps)
    return Results(
        run=data.name,
        state="running" if data.is_running else "ended",
        steps=len(steps),
        wall_s=end_of(data.records),
        executions=len(executions),
        calls=_call_counts(data.calls),
        tokens=TokenCounts(
            summed=data.calls.summed_tokens,
            unique=data.calls.unique_tokens,
            sampled=data.calls.sampled_tokens,
            trained=sum(step.trained_tokens for step in steps),
        ),
        cells=cells,
        utilisation=sum(cell.rollout_s + cell.training_s for cell in cells) / present_s if present_s else 0.0,
        switches=len(switches),
        switching=_switches(switches),
        evaluations=tuple(_evaluation_row(record) for record in evaluations),
        gains=gains(evaluations),
        reward=tuple(row.reward for row in rows),
        staleness=_staleness(steps),
        breach_s=breach_s(executions, spans),
        outcomes=_outcomes(executions),
        reasons=_reasons(executions),
        scoring=_scoring(executions, _of(data.records, ControlRecord)),
        checks=_checks(steps, data.calls),
        empty_steps=sum(step.empty for step in steps),
        resumes=max((run.incarnation for run in runs), default=0),
        publications=len(publications),
        prefilled_tokens=sum(one.recomputed_tokens for one in _of(data.records, RepublicationRecord)),
        step_rows=rows,
        versions=dict(runs[-1].versions) if runs else {},
    )


def _of(records: Iterable[Record], kind: type[_Kept]) -> list[_Kept]:
    return [record for record in records if isinstance(record, kind)]


def final_steps(records: Iterable[StepRecord]) -> list[StepRecord]:
    """Return one record a step, in order: after a resume the redone step replaces the lost one."""
    kept: dict[int, StepRecord] = {}
    for record in records:
        present = kept.get(record.step)
        if present is None or record.incarnation >= present.incarnation:
            kept[record.step] = record
    return [kept[step] for step in sorted(kept)]


def final_evaluations(records: Iterable[EvaluationRecord]) -> list[EvaluationRecord]:
    """Return one evaluation a version and kind, in order; the last one counts."""
    kept = {(record.version, record.kind): record for record in records}
    return [kept[key] for key in sorted(kept, key=lambda key: (key[0], key[1] is Kind.EVAL_GREEDY))]


def end_of(records: Iterable[Record]) -> float:
    """Return the last time that any record knows, in seconds since the start of the run."""
    ends = [
        record.closed_s
        if isinstance(record, ExecutionRecord)
        else record.started_s
        if isinstance(record, RunRecord)
        else record.ended_s
        for record in records
    ]
    return max(ends, default=0.0)


def cell_times(spans: Iterable[CellSpan]) -> tuple[CellTime, ...]:
    """Return where the time of each cell went.

    >>> span = CellSpan(cell_id=1, mode=Mode.ROLLOUT, started_s=0.0, ended_s=10.0, busy_s=6.0)
    >>> [(cell.rollout_s, cell.idle_s, cell.utilisation) for cell in cell_times([span])]
    [(6.0, 4.0, 0.6)]
    """
    of_cell: dict[int, list[CellSpan]] = {}
    for span in spans:
        of_cell.setdefault(span.cell_id, []).append(span)
    found = []
    for cell_id in sorted(of_cell):
        mode_s = dict.fromkeys(Mode, 0.0)
        busy_s = dict.fromkeys(Mode, 0.0)
        for span in of_cell[cell_id]:
            length_s = span.ended_s - span.started_s
            mode_s[span.mode] += length_s
            busy_s[span.mode] += min(max(span.busy_s, 0.0), length_s)
        useful_s = busy_s[Mode.ROLLOUT] + busy_s[Mode.TRAINING]
        present_s = sum(mode_s.values())
        found.append(
            CellTime(
                cell_id=cell_id,
                rollout_s=busy_s[Mode.ROLLOUT],
                training_s=busy_s[Mode.TRAINING],
                switching_s=mode_s[Mode.SWITCHING],
                idle_s=present_s - useful_s - mode_s[Mode.SWITCHING],
                rollout_mode_s=mode_s[Mode.ROLLOUT],
                training_mode_s=mode_s[Mode.TRAINING],
                utilisation=useful_s / present_s if present_s else 0.0,
            )
        )
    return tuple(found)


def breach_s(executions: Sequence[ExecutionRecord], spans: Sequence[CellSpan]) -> float:
    """Return how long executions lived while no cell was in rollout mode.

    Choice: the no-stall invariant in seconds; only time that the spans of some cell cover is judged.
    """
    known = union((span.started_s, span.ended_s) for span in spans)
    serving = union((span.started_s, span.ended_s) for span in spans if span.mode is Mode.ROLLOUT)
    live = union((execution.started_s, execution.ended_s) for execution in executions)
    without_cell = difference(known, serving)
    return total(without_cell) - total(difference(without_cell, live))


def gains(evaluations: Sequence[EvaluationRecord]) -> tuple[Gain, ...]:
    """Return, for sampled and greedy decoding, the change from the first to the last evaluation, paired by task."""
    found = []
    for kind in (Kind.EVAL_SAMPLED, Kind.EVAL_GREEDY):
        of_kind = [record for record in evaluations if record.kind is kind]
        if len(of_kind) < 2:
            continue
        first, last = of_kind[0], of_kind[-1]
        before = dict(zip(first.task_ids, first.rewards, strict=True))
        after = dict(zip(last.task_ids, last.rewards, strict=True))
        both = [task_id for task_id in before if task_id in after]
        change = paired_difference([before[task_id] for task_id in both], [after[task_id] for task_id in both])
        if change is not None:
            found.append(Gain(mode=_mode(kind), from_step=first.version, to_step=last.version, change=change))
    return tuple(found)


def waterlevel(executions: Iterable[ExecutionRecord]) -> list[tuple[float, int]]:
    """Return (time, w after it) wherever w, the executions dispatched and not finished, changes.

    Source: paper, the waterlevel w.
    """
    changes: Counter[float] = Counter()
    for execution in executions:
        changes[execution.dispatched_s] += 1
        changes[execution.ended_s] -= 1
    level = 0
    found = []
    for now_s in sorted(changes):
        level += changes[now_s]
        found.append((now_s, level))
    return found


def _mode(kind: Kind) -> str:
    return "greedy" if kind is Kind.EVAL_GREEDY else "sampled"


def _call_counts(calls: CallTotals) -> CallCounts:
    return CallCounts(**{field: getattr(calls, field) for field in CallCounts.__struct_fields__})


def _evaluation_row(record: EvaluationRecord) -> EvaluationRow:
    valid = [reward for reward in record.rewards if reward is not None]
    low, high = mean_interval(valid) or (None, None)
    return EvaluationRow(
        step=record.version,
        mode=_mode(record.kind),
        pass_rate=record.pass_rate,
        solved_rate=record.solved_rate,
        tasks=len(valid),
        dropped=len(record.rewards) - len(valid),
        low=low,
        high=high,
    )


def _step_row(step: StepRecord) -> StepRow:
    same = {field: getattr(step, field) for field in StepRow.__struct_fields__ if field != "reward"}
    return StepRow(reward=mean(step.rewards), **same)


def _staleness(steps: Sequence[StepRecord]) -> Staleness:
    values = [value for step in steps for value in step.staleness]
    return Staleness(mean=mean(values) or 0.0, max=max(values, default=0), counts=dict(sorted(Counter(values).items())))


def _outcomes(executions: Sequence[ExecutionRecord]) -> Outcomes:
    counts = Counter(execution.outcome for execution in executions)
    return Outcomes(
        scored=counts["scored"],
        timed_out=sum(execution.timed_out for execution in executions if execution.outcome == "scored"),
        no_artifact=counts["no_artifact"],
        evaluation_failed=counts["evaluation_failed"],
        dropped=counts["dropped"],
    )


def _reasons(executions: Sequence[ExecutionRecord]) -> tuple[tuple[str, str, int], ...]:
    counts = Counter((execution.outcome, execution.reason) for execution in executions if execution.reason)
    return tuple((outcome, reason, count) for (outcome, reason), count in counts.most_common())


def _scoring(executions: Sequence[ExecutionRecord], controls: Sequence[ControlRecord]) -> Scoring:
    """Return the evaluation tail: from the end of a harness to its outcome."""
    tails = [record.closed_s - record.ended_s for record in executions if record.outcome == "scored"]
    return Scoring(
        mean_s=mean(tails) or 0.0,
        p95_s=quantile(tails, 0.95),
        max_s=max(tails, default=0.0),
        controls=len(controls),
        suspect=tuple(sorted({control.task_id for control in controls if control.is_suspect})),
    )


def _switches(switches: Sequence[SwitchRecord]) -> Switches:
    lengths = [switch.ended_s - switch.started_s for switch in switches]
    leaving = [switch for switch in switches if switch.mode is Mode.TRAINING]
    return Switches(
        to_training=len(leaving),
        to_rollout=len(switches) - len(leaving),
        handed_over=sum(switch.handed_over for switch in switches),
        parked=sum(switch.parked for switch in switches),
        moved_tokens=sum(switch.moved_tokens for switch in switches),
        with_hand_over=sum(switch.handed_over > 0 for switch in leaving),
        mean_s=mean(lengths) or 0.0,
        max_s=max(lengths, default=0.0),
    )


def _checks(steps: Sequence[StepRecord], calls: CallTotals) -> Checks:
    return Checks(
        checked_tokens=sum(step.checked_tokens for step in steps),
        checked_difference=max((step.checked_difference for step in steps), default=0.0),
        steps_without_check=sum(step.checked_tokens == 0 and not step.empty for step in steps),
        unknown_calls=calls.unknown,
        mixed_tokens=sum(step.mixed_tokens for step in steps),
    )
