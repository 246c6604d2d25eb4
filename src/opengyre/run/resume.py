"""Going on with a run: the log of events is the scheduler's only state, so it is replayed into a fresh one."""

import os
from dataclasses import dataclass

from opengyre.core.errors import FileError, InvariantError
from opengyre.core.events import (
    AttemptDropped,
    CellJoined,
    CellLost,
    Command,
    Dispatch,
    Event,
    GroupComplete,
    MicroStepReady,
    SlotClosed,
    StepDone,
    WeightsPublished,
    decode_command,
    decode_event,
)
from opengyre.core.records import RunRecord
from opengyre.core.types import Kind
from opengyre.execute.live import end_shims
from opengyre.ledger.ledger import Ledger, LoggedEvent
from opengyre.run.build import SHIM_GRACE_S, LiveRun, import_journals, weights_of
from opengyre.run.folder import RunFolder
from opengyre.run.groups import GroupState, execution_of, reward_of
from opengyre.schedule.roster import EVALUATION_STRIDE


@dataclass
class Resume:
    """What is known of the run that is resumed."""

    incarnation: int
    now_s: float
    log: list[LoggedEvent]

    def first(self, run: LiveRun) -> list[Event]:
        """Bring a built run to where the log ends and return what the scheduler has to be told.

        Live executions are dispatched again, complete groups keep their rows, a half-trained step is done again from
        the last optimizer step with the same groups.

        Raises:
            InvariantError: The replay gives other commands than the log.
        """
        scheduler = run.driver.scheduler
        for logged in self.log:
            commands = scheduler.on(decode_event(logged.event), logged.now_s)
            expected = [decode_command(command) for command in logged.commands]
            if commands != expected:
                raise InvariantError(f"event {logged.seq}: the replay gives {commands}, the log has {expected}")
            self._replay_books(run, decode_event(logged.event), expected)
        run.driver.next_seq = self.log[-1].seq + 1 if self.log else 0
        self._find_weights(run)
        events: list[Event] = [CellLost(cell_id=cell_id) for cell_id in scheduler.live_cells]
        events += [CellJoined(cell_id=cell_id) for cell_id in range(run.folder.config.cells.count)]
        events += [
            AttemptDropped(execution_id=execution_id, reason="driver restarted", counts=False)
            for execution_id in scheduler.open_executions()
        ]
        for group_id in scheduler.pending_groups:
            events += self._missing_reports(run, group_id)
        if scheduler.publishing is not None:
            cells = tuple(range(run.folder.config.cells.count))
            events.append(WeightsPublished(version=scheduler.publishing, incarnation=self.incarnation, cells=cells))
        return events

    def _missing_reports(self, run: LiveRun, group_id: int) -> list[Event]:
        """Return the events that a complete group still owes the scheduler."""
        group = run.driver.book.group(group_id)
        if not group.is_complete:
            return []
        is_reported, known = run.driver.scheduler.unreported(group_id)
        material = run.driver.training.materials.get(group_id) or run.driver.make_material(group)
        reports = run.driver.reports_of(group, material)
        return [
            event
            for event in reports
            if not (isinstance(event, GroupComplete) and is_reported)
            and not (isinstance(event, MicroStepReady) and event.micro_step_id in known)
        ]

    def _replay_dispatch(self, run: LiveRun, command: Dispatch) -> None:
        driver = run.driver
        task = driver.task_of(command.kind, command.group_id)
        driver.book.open(execution_of(command, task_id=task.task_id))
        if command.kind.is_evaluation:
            driver.cells.pinned.add(command.version)
            driver.evaluations.started_s.setdefault(command.version, self.now_s)

    def _replay_books(self, run: LiveRun, event: Event, commands: list[Command]) -> None:
        driver = run.driver
        for command in commands:
            if isinstance(command, Dispatch):
                self._replay_dispatch(run, command)
        match event:
            case SlotClosed(execution_id=execution_id):
                outcome = driver.ledger.outcome(execution_id)
                if outcome is None:
                    raise FileError(f"{driver.ledger.path}: execution {execution_id} has no outcome")
                self._note(run, execution_id, driver.book.close(execution_id, outcome))
            case AttemptDropped(execution_id=execution_id):
                execution = driver.book.execution(execution_id)
                if not driver.scheduler.is_slot_open(execution.group_id, execution.slot, kind=execution.kind):
                    self._note(run, execution_id, driver.book.close_empty(execution_id))
            case GroupComplete(group_id=group_id):
                driver.make_material(driver.book.group(group_id))
            case StepDone():
                for group_id in set(driver.training.materials) - set(driver.scheduler.pending_groups):
                    driver.training.forget_group(group_id)
            case _:
                pass

    def _note(self, run: LiveRun, execution_id: str, group: GroupState) -> None:
        """Note the reward of an evaluation execution."""
        execution = run.driver.book.execution(execution_id)
        if execution.kind is not Kind.TRAIN:
            rewards = run.driver.evaluations.rewards.setdefault((execution.version, execution.kind), {})
            rewards[execution.group_id % EVALUATION_STRIDE] = reward_of(group.outcomes.get(execution_id))

    def _find_weights(self, run: LiveRun) -> None:
        """Fill in the versions that are still on disk.

        Raises:
            FileError: The newest version is missing.
        """
        scheduler, cells = run.driver.scheduler, run.driver.cells
        for version in range(scheduler.step + 1):
            reference = weights_of(run.ledger, version)
            if reference is not None and os.path.exists(reference.path):
                cells.versions[version] = reference
        cells.trained = scheduler.step
        cells.published = max(0, scheduler.published) if scheduler.publishing is None else scheduler.publishing
        for version in (cells.trained, cells.published):
            if version not in cells.versions:
                raise FileError(f"{run.folder.weights}: version {version} is missing, the run cannot go on from it")
        finished = {
            version
            for version in cells.pinned
            if not any(
                run.driver.book.execution(execution_id).version == version
                for execution_id in scheduler.open_executions()
                if run.driver.book.execution(execution_id).kind.is_evaluation
            )
        }
        cells.pinned -= finished


async def prepare_resume(folder: RunFolder, ledger: Ledger) -> Resume:
    """End what is left of a run's executions, take over their journals, and read the log."""
    await end_shims(folder.executions, grace_s=SHIM_GRACE_S)
    await import_journals(folder.executions, ledger)
    log = list(ledger.events())
    starts = ledger.records(RunRecord)
    now_s = log[-1].now_s if log else 0.0
    return Resume(incarnation=len(starts), now_s=now_s, log=log)
