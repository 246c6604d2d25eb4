"""A run as a trace for Perfetto or chrome://tracing: cells, steps, executions and the waterlevel on one time axis."""

from collections.abc import Iterable
from typing import Any

from opengyre.core.records import CellSpan, EvaluationRecord, ExecutionRecord, PublicationRecord, Record, StepRecord
from opengyre.report.results import final_evaluations, final_steps, waterlevel

_CELLS, _STEPS, _EXECUTIONS = 1, 2, 3


def trace_events(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the events in the Trace Event Format, times in microseconds.

    >>> trace_events([])[0]["args"]
    {'name': 'cells'}
    """
    known = list(records)
    executions = [record for record in known if isinstance(record, ExecutionRecord)]
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in ((_CELLS, "cells"), (_STEPS, "steps"), (_EXECUTIONS, "executions"))
    ]
    for record in known:
        if isinstance(record, CellSpan):
            facts: dict[str, Any] = {"useful_s": record.busy_s, "tokens": record.tokens}
            events.append(_slice(record.mode.value, record.started_s, record.ended_s, _CELLS, record.cell_id, facts))
        elif isinstance(record, PublicationRecord):
            facts = {"live_calls": record.live_calls}
            name = f"publication {record.version}"
            events.append(_slice(name, record.started_s, record.ended_s, _STEPS, 1, facts))
    for step in final_steps(record for record in known if isinstance(record, StepRecord)):
        facts = {"trained_tokens": step.trained_tokens, "staleness": list(step.staleness)}
        events.append(_slice(f"step {step.step}", step.started_s, step.ended_s, _STEPS, 0, facts))
    for number, record in enumerate(final_evaluations(r for r in known if isinstance(r, EvaluationRecord))):
        facts = {"pass_rate": record.pass_rate}
        name = f"evaluation {record.version} {record.kind.value}"
        events.append(_slice(name, record.started_s, record.ended_s, _STEPS, 2 + number, facts))
    events += [_execution(record, lane) for record, lane in lanes(executions)]
    events += [
        {"name": "w", "ph": "C", "pid": _EXECUTIONS, "ts": now_s * 1e6, "args": {"w": level}}
        for now_s, level in waterlevel(executions)
    ]
    return events


def lanes(executions: Iterable[ExecutionRecord]) -> list[tuple[ExecutionRecord, int]]:
    """Return each execution with the first lane that is free when it starts."""
    free_s: list[float] = []
    placed = []
    for execution in sorted(executions, key=lambda one: one.started_s):
        lane = next((index for index, end_s in enumerate(free_s) if end_s <= execution.started_s), len(free_s))
        if lane == len(free_s):
            free_s.append(0.0)
        free_s[lane] = execution.closed_s
        placed.append((execution, lane))
    return placed


def _execution(record: ExecutionRecord, lane: int) -> dict[str, Any]:
    facts = {
        "task": record.task_id,
        "outcome": record.outcome,
        "reward": record.reward,
        "calls": record.calls,
        "version": record.version,
        "scoring_s": record.closed_s - record.ended_s,
    }
    return _slice(record.execution_id, record.started_s, record.closed_s, _EXECUTIONS, lane, facts)


def _slice(name: str, started_s: float, ended_s: float, pid: int, tid: int, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "ts": started_s * 1e6,
        "dur": max(0.0, ended_s - started_s) * 1e6,
        "pid": pid,
        "tid": tid,
        "args": facts,
    }
