"""The live driver: events in, commands out. It decides nothing; the scheduler does.

Every event gets its number and time here, is logged with the commands it caused, and only then are the commands carried
out. So a log fed to a fresh scheduler gives the same commands, and a resumed run knows what had been ordered.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from opengyre.core.config import Config
from opengyre.core.errors import InvariantError, RunError
from opengyre.core.events import (
    AttemptDropped,
    CloseStep,
    Command,
    Dispatch,
    DropExecution,
    Event,
    GroupComplete,
    MicroStepReady,
    PublishWeights,
    RunMicroStep,
    SlotClosed,
    StepDone,
    SwitchCell,
    Tick,
    WakeAt,
    WeightsPublished,
    encode_command,
    encode_event,
)
from opengyre.core.records import EvaluationRecord
from opengyre.core.types import Execution, Kind, Task
from opengyre.ledger.ledger import Ledger, LoggedEvent
from opengyre.run.cell_desk import POLL_S, CellDesk
from opengyre.run.execution_desk import ExecutionDesk
from opengyre.run.groups import GroupBook, GroupState, execution_of, reward_of
from opengyre.run.material import GroupMaterial, material_of, row_name
from opengyre.run.rates import RateBook
from opengyre.run.training_desk import TrainingDesk
from opengyre.schedule.roster import EVALUATION_STRIDE
from opengyre.schedule.scheduler import Scheduler

SPENT_SHARE = 0.25


@dataclass
class EvaluationTable:
    """Rewards of the evaluations that are running."""

    rewards: dict[tuple[int, Kind], dict[int, float | None]] = field(default_factory=dict)
    started_s: dict[int, float] = field(default_factory=dict)


@dataclass
class Driver:
    """One live run.

    Args:
        config: The run's configuration.
        scheduler: Decides.
        ledger: Remembers.
        book: Groups and their outcomes.
        cells: Desk of the cells.
        executions: Desk of the executions.
        training: Desk of the optimizer steps.
        rates: What the calls say of the cells.
        task_of: Returns the task of a dispatched group.
        clock: Seconds since the start of the run.
        inbox: Events that wait.
        on_change: Called after each event, for the status display.
    """

    config: Config
    scheduler: Scheduler
    ledger: Ledger
    book: GroupBook
    cells: CellDesk
    executions: ExecutionDesk
    training: TrainingDesk
    rates: RateBook
    task_of: Callable[[Kind, int], Task]
    clock: Callable[[], float]
    inbox: "asyncio.Queue[Event]"
    on_change: Callable[["Driver", Event], None]
    next_seq: int = 0
    evaluations: EvaluationTable = field(default_factory=EvaluationTable)
    _tasks: asyncio.TaskGroup | None = None
    _progress_s: float = 0.0
    _warned: bool = False

    async def run(self, first: list[Event]) -> None:
        """Drive the run to its end.

        Args:
            first: Events to begin with: the publication of version 0, or what a resume has to report.

        Raises:
            RunError: The run cannot go on.
            InvariantError: A rule of the design is broken.
        """
        for event in first:
            self.inbox.put_nowait(event)
        try:
            async with asyncio.TaskGroup() as group:
                self._tasks = group
                watchers = [group.create_task(coroutine) for coroutine in (self._poll(), self._watch(), self._guard())]
                while not self.scheduler.is_done or not self.inbox.empty():
                    event = await self.inbox.get()
                    for each in (*self._rates_before(event), event):
                        await self._take(each)
                for watcher in watchers:
                    watcher.cancel()
        except* (RunError, InvariantError) as errors:
            raise _first_of(errors) from None

    def _rates_before(self, event: Event) -> list[Event]:
        """Return what the look-ahead rule is told before a publication."""
        if self.config.schedule.rule != "lookahead" or not isinstance(event, WeightsPublished):
            return []
        rates = self.rates.measured(training_token_s=self.training.token_s)
        return [] if rates is None else [rates]

    async def _take(self, event: Event) -> None:
        now_s = self.clock()
        commands = self.scheduler.on(event, now_s)
        logged = tuple(encode_command(command) for command in commands)
        await self.ledger.append_event(LoggedEvent(self.next_seq, now_s, encode_event(event), logged))
        self.next_seq += 1
        await self._carry_out(commands)
        await self._follow(event)
        self.on_change(self, event)

    # -- commands ---------------------------------------------------------------------------------------------

    async def _carry_out(self, commands: list[Command]) -> None:
        dispatches = [command for command in commands if isinstance(command, Dispatch)]
        if dispatches:
            await self._dispatch(dispatches)
        for command in commands:
            match command:
                case SwitchCell():
                    self._spawn(self.cells.switch(command))
                case RunMicroStep():
                    self._spawn(self.training.run_micro_step(command))
                case CloseStep():
                    self._spawn(self.training.close_step(command))
                case PublishWeights(version=version):
                    self._spawn(self.cells.publish(version, incarnation=self.training.incarnation))
                case DropExecution(execution_id=execution_id):
                    self.executions.runner.stop(execution_id)
                case WakeAt(now_s=now_s):
                    self._spawn(self._wake(now_s))
                case Dispatch():
                    pass

    async def _dispatch(self, dispatches: list[Dispatch]) -> None:
        started: list[tuple[Execution, Task]] = []
        for dispatch in dispatches:
            task = self.task_of(dispatch.kind, dispatch.group_id)
            execution = execution_of(dispatch, task_id=task.task_id)
            self.book.open(execution)
            started.append((execution, task))
            if dispatch.kind.is_evaluation:
                self.cells.pinned.add(dispatch.version)
                self.evaluations.started_s.setdefault(dispatch.version, self.clock())
        await self.ledger.put_executions([execution for execution, _ in started])
        for execution, task in started:
            self._spawn(self.executions.run(execution, task))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        if self._tasks is None:
            raise InvariantError("the driver carries out commands only while it runs")
        self._tasks.create_task(coroutine)

    async def _wake(self, now_s: float) -> None:
        await asyncio.sleep(max(0.0, now_s - self.clock()))
        self.inbox.put_nowait(Tick())

    # -- what follows from an event ---------------------------------------------------------------------------

    async def _follow(self, event: Event) -> None:
        """Keep the books that are the driver's: groups, evaluations, the share of spent groups."""
        match event:
            case SlotClosed(execution_id=execution_id):
                self.rates.ended(execution_id)
                outcome = self.ledger.outcome(execution_id)
                if outcome is None:
                    raise InvariantError(f"execution {execution_id} closed its slot without a recorded outcome")
                await self._closed(self.book.execution(execution_id), self.book.close(execution_id, outcome))
            case AttemptDropped(execution_id=execution_id):
                self.rates.ended(execution_id)
                execution = self.book.execution(execution_id)
                if not self.scheduler.is_slot_open(execution.group_id, execution.slot, kind=execution.kind):
                    await self._closed(execution, self.book.close_empty(execution_id))
            case StepDone():
                self._check_spent()
            case _:
                return
        self._progress_s = self.clock()
        self._warned = False

    async def _closed(self, execution: Execution, group: GroupState) -> None:
        if execution.kind.is_evaluation:
            await self._evaluated(execution, group)
        elif group.is_complete:
            await self.complete_group(group)

    async def complete_group(self, group: GroupState) -> None:
        """Make rows of a complete group and report it with its micro-steps."""
        material = self.make_material(group)
        await self.ledger.put_micro_steps(
            group.group_id,
            {name: [row_name(row) for row in rows] for name, rows in material.micro_steps.items()},
        )
        for event in self.reports_of(group, material):
            self.inbox.put_nowait(event)

    def reports_of(self, group: GroupState, material: GroupMaterial) -> list[Event]:
        """Return what the scheduler is told of a complete group."""
        reports: list[Event] = [
            GroupComplete(
                group_id=group.group_id,
                valid_slots=len(group.valid_executions),
                micro_steps=len(material.micro_steps),
            )
        ]
        for name, rows in material.micro_steps.items():
            tokens = sum(len(row.tokens) for row in rows)
            reports.append(
                MicroStepReady(
                    group_id=group.group_id,
                    micro_step_id=name,
                    rows=len(rows),
                    tokens=tokens,
                    cost_s=tokens * self.training.token_s,
                )
            )
        return reports

    def make_material(self, group: GroupState) -> GroupMaterial:
        """Return (and hand to the training desk) what a complete group trains."""
        calls = {execution_id: self.ledger.read_calls(execution_id) for execution_id in group.valid_executions}
        material = material_of(group, calls, self.config)
        self.training.take_group(material)
        return material

    async def _evaluated(self, execution: Execution, group: GroupState) -> None:
        """Note the reward of an evaluation execution; the last one writes the record."""
        key = (execution.version, execution.kind)
        rewards = self.evaluations.rewards.setdefault(key, {})
        outcome = group.outcomes.get(execution.execution_id)
        rewards[execution.group_id % EVALUATION_STRIDE] = reward_of(outcome)
        if len(rewards) < self.config.evaluation.tasks:
            return
        first = execution.group_id - execution.group_id % EVALUATION_STRIDE
        await self.ledger.add_record(
            EvaluationRecord(
                version=execution.version,
                kind=execution.kind,
                task_ids=tuple(self.task_of(execution.kind, first + index).task_id for index in sorted(rewards)),
                rewards=tuple(rewards[index] for index in sorted(rewards)),
                started_s=self.evaluations.started_s.get(execution.version, 0.0),
                ended_s=self.clock(),
            )
        )
        kinds = 2 if self.config.evaluation.greedy else 1
        done = [kind for version, kind in self.evaluations.rewards if version == execution.version]
        full = all(
            len(self.evaluations.rewards[execution.version, kind]) == self.config.evaluation.tasks for kind in done
        )
        if len(done) == kinds and full:
            self.evaluations.started_s.pop(execution.version, None)
            self.cells.pinned.discard(execution.version)

    def _check_spent(self) -> None:
        groups, spent = self.scheduler.step * self.config.schedule.batch_groups, self.scheduler.spent_groups
        if groups >= 2 * self.config.schedule.batch_groups and spent > SPENT_SHARE * groups:
            reasons = sorted({record for record in self.ledger.drop_reasons()})
            raise RunError(
                f"{spent} of {groups} groups are spent, expected at most a quarter: {'; '.join(reasons[:5])}"
            )

    # -- watchers ---------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self.cells.poll()

    async def _watch(self) -> None:
        """Say what the run waits for when nothing has moved for ``stall_s``."""
        while True:
            await asyncio.sleep(1.0)
            if self.clock() - self._progress_s > self.config.run.stall_s and not self._warned:
                self._warned = True
                self.on_change(self, Tick())

    @property
    def is_stalled(self) -> bool:
        """Whether nothing has moved for ``stall_s``."""
        return self._warned

    async def _guard(self) -> None:
        """Stop the run when the proxy found a broken invariant or a full disk."""
        failed = self.executions.proxy.failed
        if failed is not None:
            await failed


def _first_of(errors: BaseExceptionGroup[Exception]) -> Exception:
    """Return the first single exception of a group, without recursion."""
    waiting: list[BaseException] = [errors]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting = [*error.exceptions, *waiting]
        elif isinstance(error, Exception):
            return error
    return RunError("the run stopped without a reason")
