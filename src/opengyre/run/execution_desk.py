"""The driver's desk for executions: starts them within the limits, scores what they leave, reports their outcome."""

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from opengyre.core.config import Config
from opengyre.core.errors import ExecutionError, InvariantError
from opengyre.core.events import AttemptDropped, Dispatched, Event, Finished, SlotClosed
from opengyre.core.records import ControlRecord, ExecutionRecord
from opengyre.core.types import (
    Dropped,
    EvaluationFailed,
    Execution,
    Kind,
    NoArtifact,
    Outcome,
    Scored,
    Task,
)
from opengyre.execute.live import HarnessEnd, LiveRunner
from opengyre.execute.scoring import SandboxedEvaluator, outcome_of
from opengyre.ledger.ledger import Ledger
from opengyre.proxy.server import Proxy
from opengyre.proxy.session import SessionSpec
from opengyre.run.groups import reward_of
from opengyre.run.router import CellRouter
from opengyre.tasks.references import has_plain_reference, reference_of, write_files
from opengyre.trajectory.marks import RoleMarks

RETRY_S = 0.5
CONTROL_EVERY = 200
"""One scoring in so many is followed by one of the task's reference."""


@dataclass
class _Clocks:
    """When things happened to an execution."""

    dispatched_s: float
    started_s: float = 0.0
    ended_s: float = 0.0
    harness_s: float = 0.0


@dataclass
class ExecutionDesk:
    """Runs executions.

    Args:
        config: Limits.
        runner: Starts harnesses.
        evaluator: Scores workspaces.
        proxy: Serves calls.
        router: Forgets executions that ended.
        ledger: Takes outcomes and records.
        clock: The driver's clock.
        post: Hands an event to the scheduler.
        sockets: Short private folder.
        marks: How the harness marks its requests.
    """

    config: Config
    runner: LiveRunner
    evaluator: SandboxedEvaluator
    proxy: Proxy
    router: CellRouter
    ledger: Ledger
    clock: Callable[[], float]
    post: Callable[[Event], None]
    sockets: Path
    marks: RoleMarks
    live: int = 0
    queued: int = 0
    _room: asyncio.Semaphore = field(init=False)
    _start_s: float = 0.0
    _number: int = 0
    _scored: int = 0

    def __post_init__(self) -> None:
        """Make the limit on live executions."""
        self._room = asyncio.Semaphore(self.config.schedule.live_limit)

    async def run(self, execution: Execution, task: Task) -> None:
        """Run one execution from the queue to its outcome; its faults end here as data."""
        clocks = _Clocks(self.clock())
        self.queued += 1
        async with self._room:
            self.queued -= 1
            self.live += 1
            try:
                outcome, end = await self._live(execution, task, clocks)
            finally:
                self.live -= 1
        await self._close(execution, outcome, end, clocks)

    async def _live(self, execution: Execution, task: Task, clocks: _Clocks) -> tuple[Outcome, HarnessEnd]:
        await self._pace()
        self._number += 1
        socket_path = self.sockets / f"{self._number:x}"
        clocks.started_s = self.clock()
        await self.proxy.open_execution(self._session(execution), socket_path)
        self.post(Dispatched(execution_id=execution.execution_id))
        end = HarnessEnd()
        try:
            async with asyncio.timeout(self.config.harness.overall_timeout_s):
                end = await self.runner.run(execution.execution_id, task, socket_path)
            clocks.ended_s, clocks.harness_s = self.clock(), end.harness_s
            self.post(Finished(execution_id=execution.execution_id))
            return await self._outcome(execution, task, end), end
        except TimeoutError:
            self.runner.stop(execution.execution_id)
            clocks.ended_s = self.clock()
            return Dropped(reason=f"overall timeout of {self.config.harness.overall_timeout_s} s"), end
        except (ExecutionError, OSError) as error:
            clocks.ended_s = clocks.ended_s or self.clock()
            return Dropped(reason=f"{type(error).__name__}: {error}"), end
        finally:
            await self.proxy.close_execution(execution.execution_id)
            self.router.release(execution.execution_id)

    async def _pace(self) -> None:
        """Keep to the starts a second that the configuration allows."""
        now_s = self.clock()
        self._start_s = max(now_s, self._start_s + 1.0 / self.config.schedule.starts_per_s)
        if self._start_s > now_s:
            await asyncio.sleep(self._start_s - now_s)

    def _session(self, execution: Execution) -> SessionSpec:
        is_evaluation = execution.kind.is_evaluation
        greedy = execution.kind is Kind.EVAL_GREEDY
        return SessionSpec(
            execution_id=execution.execution_id,
            group_id=execution.group_id,
            slot=execution.slot,
            attempt=execution.attempt,
            run_seed=self.config.run.seed,
            context_tokens=self.config.policy.context_tokens,
            kind=execution.kind,
            temperature=0.0 if greedy else self.config.rollout.temperature,
            minimum_version=0 if is_evaluation else execution.version,
            pinned_version=execution.version if is_evaluation else None,
            marks=self.marks,
        )

    async def _outcome(self, execution: Execution, task: Task, end: HarnessEnd) -> Outcome:
        """Return the outcome of an ended harness.

        Choice: a sandbox, shim or harness that never got an answer is dropped, not scored.
        """
        if end.calls == 0:
            return Dropped(reason=f"start_failed: status {end.status} {end.error}".strip())
        workspace = self.runner.workspace(execution.execution_id)
        for attempt in range(self.config.evaluation.retries + 1):
            outcome = await self.evaluator.evaluate(task, workspace, timed_out=end.timed_out)
            if not isinstance(outcome, EvaluationFailed):
                await self._control(task)
                return outcome
            await asyncio.sleep(RETRY_S * 2**attempt)
        return Dropped(reason=f"evaluation_failed: {outcome.reason}")

    async def _control(self, task: Task) -> None:
        """Now and then score a reference: a grader that broke in the middle of a run must not go unseen."""
        self._scored += 1
        if self._scored % CONTROL_EVERY or not has_plain_reference(task):
            return
        started_s = self.clock()
        with tempfile.TemporaryDirectory(prefix="gyre-c") as scratch:
            workspace = write_files(Path(scratch) / "reference", reference_of(task))
            outcome = outcome_of(task, await self.evaluator.grade(task, workspace), timed_out=False)
        reward = outcome.reward if isinstance(outcome, Scored) else None
        record = ControlRecord(
            task_id=task.task_id, reward=reward, reason=outcome.reason, started_s=started_s, ended_s=self.clock()
        )
        await self.ledger.add_record(record)

    async def _close(self, execution: Execution, outcome: Outcome, end: HarnessEnd, clocks: _Clocks) -> None:
        execution_id = execution.execution_id
        await self.ledger.put_outcome(execution_id, outcome)
        await self.ledger.add_record(self._record(execution, outcome, end, clocks))
        if isinstance(outcome, Dropped):
            self.post(AttemptDropped(execution_id=execution_id, reason=outcome.reason))
        elif reward_of(outcome) is None:
            raise InvariantError(f"execution {execution_id}: outcome {outcome} is neither valid nor dropped")
        else:
            self.runner.discard(execution_id)
            self.post(SlotClosed(execution_id=execution_id))

    def _record(self, execution: Execution, outcome: Outcome, end: HarnessEnd, clocks: _Clocks) -> ExecutionRecord:
        calls, tokens = self.ledger.call_totals(execution.execution_id)
        scored = outcome if isinstance(outcome, Scored) else None
        return ExecutionRecord(
            execution_id=execution.execution_id,
            task_id=execution.task_id,
            group_id=execution.group_id,
            kind=execution.kind,
            version=execution.version,
            dispatched_s=clocks.dispatched_s,
            started_s=clocks.started_s,
            ended_s=clocks.ended_s,
            closed_s=self.clock(),
            harness_s=clocks.harness_s,
            outcome=str(type(outcome).__struct_config__.tag),
            reward=reward_of(outcome),
            passed=scored.passed if scored else 0,
            total=scored.total if scored else outcome.total if isinstance(outcome, NoArtifact) else 0,
            timed_out=end.timed_out,
            reason=outcome.reason,
            calls=calls,
            sampled_tokens=tokens,
        )
