"""What a recorded run says of its work and its costs: executions to simulate again, and samples to fit costs to."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from opengyre.core.config import Config
from opengyre.core.errors import InputError
from opengyre.core.events import (
    CloseStep,
    MicroStepDone,
    MicroStepReady,
    StepDone,
    WeightsPublished,
    decode_command,
    decode_event,
)
from opengyre.core.records import ExecutionRecord, PublicationRecord, SwitchRecord
from opengyre.core.types import Call, Kind
from opengyre.ledger.ledger import FILE_NAME, Ledger
from opengyre.run.folder import read_config
from opengyre.sim.fit import CallSample, ServedCall, samples_of
from opengyre.sim.traces import Session, TraceCall

VALID = ("scored", "no_artifact")


@dataclass
class StepTimes:
    """What the scheduler's log says of training.

    Example: ``step_times(ledger).micro_steps["g0-m0"]`` is (tokens, seconds).
    """

    micro_steps: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Micro-step to (row tokens, seconds of its forward-backward)."""
    optimizer_s: list[float] = field(default_factory=list)
    """From the close of a step to its end."""
    started_s: float = 0.0
    """The first publication."""
    ended_s: float = 0.0
    """The last step."""
    steps: int = 0


@dataclass(frozen=True)
class Recorded:
    """A recorded run.

    Example: ``read_recorded(Path("runs/first")).sessions[0]`` is slot 0 of group 0.
    """

    config: Config
    sessions: tuple[Session, ...]
    """Training executions by group and slot."""
    calls: tuple[CallSample, ...]
    times: StepTimes
    publish_s: tuple[float, ...]
    switch_s: tuple[float, ...]
    evaluate_s: tuple[float, ...]
    """From the end of a harness to its outcome."""


def is_run(path: Path) -> bool:
    """Return whether a path is the folder of a run."""
    return (path / FILE_NAME).is_file()


def read_recorded(folder: Path) -> Recorded:
    """Return what the ledger of a run says of its work and its costs.

    Raises:
        FileError: The folder holds no run.
        InputError: No group of it was consumed.
    """
    ledger = Ledger.open(folder, read_only=True)
    try:
        config = read_config(folder)
        ends = [end for end in ledger.records(ExecutionRecord) if end.calls]
        calls = {end.execution_id: ledger.read_calls(end.execution_id) for end in ends}
        trained = _trained(ends)
        sessions = tuple(_in_order(trained, calls, config.schedule.group_size))
        times = step_times(ledger)
        publications, switches = ledger.records(PublicationRecord), ledger.records(SwitchRecord)
    finally:
        ledger.close()
    if not sessions or not times.steps:
        raise InputError(f"{folder}: no optimizer step is done; expected a run that trained")
    return Recorded(
        config=config,
        sessions=sessions,
        calls=tuple(samples_of(served_call(call) for of_one in calls.values() for call in of_one)),
        times=times,
        publish_s=tuple(each.ended_s - each.started_s for each in publications if each.version),
        switch_s=tuple(each.ended_s - each.started_s for each in switches),
        evaluate_s=tuple(max(0.0, end.closed_s - end.ended_s) for end in trained),
    )


def recorded_sessions(folder: Path) -> tuple[Session, ...]:
    """Return the training executions of a run by group and slot.

    Raises:
        FileError: The folder holds no ledger.
        InputError: It holds no run, or no execution has ended validly.
    """
    ledger = Ledger.open(folder, read_only=True)
    try:
        trained = _trained(ledger.records(ExecutionRecord))
        calls = {end.execution_id: ledger.read_calls(end.execution_id) for end in trained}
    finally:
        ledger.close()
    if not trained:
        raise InputError(f"{folder}: no execution has ended validly; expected a run with some")
    return tuple(_in_order(trained, calls, read_config(folder).schedule.group_size))


def _trained(ends: Iterable[ExecutionRecord]) -> list[ExecutionRecord]:
    return [end for end in ends if end.calls and end.kind is Kind.TRAIN and end.outcome in VALID]


def step_times(ledger: Ledger) -> StepTimes:
    """Return what the scheduler's log says of training."""
    times = StepTimes()
    closed_s, tokens_of = 0.0, dict[str, int]()
    for logged in ledger.events():
        match decode_event(logged.event):
            case WeightsPublished(version=0):
                times.started_s = logged.now_s
            case MicroStepReady(micro_step_id=name, tokens=tokens):
                tokens_of[name] = tokens
            case MicroStepDone(micro_step_id=name, seconds=seconds):
                times.micro_steps[name] = (tokens_of[name], seconds)
            case StepDone():
                times.optimizer_s.append(logged.now_s - closed_s)
                times.ended_s, times.steps = logged.now_s, times.steps + 1
        if any(isinstance(decode_command(command), CloseStep) for command in logged.commands):
            closed_s = logged.now_s
    return times


def _in_order(ends: Iterable[ExecutionRecord], calls: dict[str, list[Call]], group_size: int) -> Iterator[Session]:
    """Yield the executions by group and slot; where one was dropped, another of its group stands in."""
    groups: dict[int, list[ExecutionRecord]] = defaultdict(list)
    for end in sorted(ends, key=lambda each: (each.group_id, each.execution_id)):
        groups[end.group_id].append(end)
    for _, members in sorted(groups.items()):
        for slot in range(group_size):
            end = members[slot % len(members)]
            yield session_of(end, calls[end.execution_id])


def session_of(end: ExecutionRecord, calls: list[Call]) -> Session:
    """Return an execution as a trace has it.

    The time from the start of its harness to its first call stands with the time behind the last one.
    """
    ordered = sorted(calls, key=lambda call: call.started_s)
    gaps = [max(0.0, after.started_s - call.ended_s) for call, after in pairwise(ordered)]
    gaps.append(max(0.0, end.ended_s - ordered[-1].ended_s) + max(0.0, ordered[0].started_s - end.started_s))
    return tuple(
        TraceCall(float(call.context_tokens), float(len(call.output)), gap)
        for call, gap in zip(ordered, gaps, strict=True)
        if len(call.output)
    )


def served_call(call: Call) -> ServedCall:
    """Return what a fit has to know of a call."""
    return ServedCall(
        started_s=call.started_s,
        ended_s=call.ended_s,
        cell_ids=call.cell_ids,
        output_tokens=len(call.output),
        new_tokens=len(call.tail),
        context_tokens=call.context_tokens,
    )
