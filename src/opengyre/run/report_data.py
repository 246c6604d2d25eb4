"""From the ledger of a run to what the report is made of."""

from collections import Counter
from pathlib import Path

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
from opengyre.core.types import Call
from opengyre.ledger.ledger import Ledger
from opengyre.report.figures import CallTotals, RunData
from opengyre.trajectory.recorded import tree_of


def read_run(folder: Path, *, is_running: bool = False) -> RunData:
    """Return what the ledger of a run holds, also while the run goes on.

    Raises:
        FileError: The folder holds no ledger.
    """
    ledger = Ledger.open(folder, read_only=True)
    try:
        records: list[Record] = [
            *ledger.records(RunRecord),
            *ledger.records(StepRecord),
            *ledger.records(EvaluationRecord),
            *ledger.records(CellSpan),
            *ledger.records(SwitchRecord),
            *ledger.records(PublicationRecord),
            *ledger.records(RepublicationRecord),
            *ledger.records(ExecutionRecord),
            *ledger.records(ControlRecord),
        ]
        calls = _call_totals(ledger)
    finally:
        ledger.close()
    return RunData(name=folder.resolve().name, records=records, calls=calls, is_running=is_running)


def _call_totals(ledger: Ledger) -> CallTotals:
    counts: Counter[str] = Counter()
    for execution in ledger.executions():
        calls = ledger.read_calls(execution.execution_id)
        counts["committed"] += len(calls)
        counts["unique_tokens"] += tree_of(execution.execution_id, calls).unique_tokens if calls else 0
        for call in calls:
            _count(counts, call)
    return CallTotals(**counts)


def _count(counts: "Counter[str]", call: Call) -> None:
    counts["summed_tokens"] += call.context_tokens + len(call.output)
    counts["sampled_tokens"] += len(call.output)
    counts["handed_over"] += len(call.cell_ids) > 1
    counts[call.delivered.value] += 1
    counts[call.verdict.value] += 1
