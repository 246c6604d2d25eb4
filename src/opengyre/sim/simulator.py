"""A run in virtual time: the real scheduler, simulated cells. A heap of events, no clock but its own."""

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

from opengyre.core.errors import InvariantError
from opengyre.core.events import (
    CellLoad,
    CellReady,
    CloseStep,
    Command,
    Dispatch,
    Dispatched,
    Event,
    Finished,
    GroupComplete,
    MicroStepDone,
    MicroStepReady,
    Mode,
    PublishWeights,
    RatesMeasured,
    RunMicroStep,
    SlotClosed,
    StepDone,
    SwitchCell,
    SwitchDone,
    WeightsPublished,
)
from opengyre.schedule.scheduler import Scheduler
from opengyre.schedule.settings import ScheduleSettings
from opengyre.sim.lengths import Job, JobSource
from opengyre.sim.outcome import GroupWork, Outcome, Span
from opengyre.sim.pool import Live, Pool, SimCell
from opengyre.sim.traces import Session
from opengyre.sim.workload import Workload

LOAD_CHANGE = 0.05
"""A cell reports its load when its resident tokens have changed by this share of its capacity."""


class _GroupRun:
    """A group that is not complete: what of it is done so far."""

    __slots__ = ("parts", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.parts: dict[int, tuple[float, float, float]] = {}
        """Slot to output tokens, tokens times context, and time alone."""

    def work(self, group_id: int, trained_per_output: float) -> GroupWork:
        """Return the work of the group, summed in the order of its slots, whoever ended first."""
        outputs, contexts, alone = zip(*(part for _, part in sorted(self.parts.items())), strict=True)
        trained = sum(outputs) * trained_per_output
        return GroupWork(group_id, self.version, trained, sum(outputs), sum(contexts), max(alone))


class Simulator:
    """One rule on one workload with one seed.

    Args:
        workload: Sizes, costs, lengths.
        settings: The rule, and sizes that agree with the workload.
        name: Of the rule, for the outcome.
        seed: Of the lengths.
        sessions: Executions of a trace that the work is drawn from.
        on_step: Told the number of optimizer steps after each of them.
        scheduler: One that does more than the usual one, for example watch.

    Example: ``Simulator(workload, settings, name="waterlevel", seed=1).run().step_done_s``.
    """

    def __init__(
        self,
        workload: Workload,
        settings: ScheduleSettings,
        *,
        name: str,
        seed: int,
        sessions: tuple[Session, ...] = (),
        on_step: Callable[[int], None] | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        self.scheduler = Scheduler(settings) if scheduler is None else scheduler
        self.outcome = Outcome(name, seed)
        self.now_s = 0.0
        self._workload = workload
        self._settings = settings
        self._source = JobSource(workload, seed=seed, sessions=sessions)
        self._on_step = on_step
        self._queue: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._number = 0
        self._expected = self._source.expected()
        self._pool = Pool(workload, self._wake)
        self._inbox: deque[Event] = deque()
        self._groups: dict[int, _GroupRun] = {}
        self._costs: dict[str, float] = {}
        self._tokens: dict[int, float] = {}
        self._environment_s = self._done_tokens = self._done_contexts = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            Dispatch: self._dispatch,
            SwitchCell: self._switch,
            RunMicroStep: self._train,
            CloseStep: self._close,
            PublishWeights: self._publish,
        }

    def run(self) -> Outcome:
        """Run to the end.

        Raises:
            InvariantError: The run stopped before its end.
        """
        cells = tuple(range(self._workload.cells))
        self._tell(self._rates())
        self._tell(WeightsPublished(version=0, incarnation=0, cells=cells))
        while not self.scheduler.is_done:
            if not self._queue:
                raise InvariantError(f"nothing happens any more: {self.scheduler.waits_for()}")
            self.now_s, _, handler, what = heapq.heappop(self._queue)
            handler(what)
        self._end()
        return self.outcome

    def _end(self) -> None:
        for cell in self._pool.cells:
            cell.advance(self.now_s)
            self._span(cell)
        outcome = self.outcome
        outcome.moved_tokens, outcome.held_s, outcome.parked_s = (
            self._pool.moved_tokens,
            self._pool.held_s,
            self._pool.parked_s,
        )
        outcome.events = self._number
        outcome.ended_s = self.now_s
        outcome.choices = [(one.version, one.theta, one.floor, one.step_s) for one in self.scheduler.choices]
        if outcome.finished != outcome.executions or self._pool.waiting:
            raise InvariantError(f"{outcome.executions} executions dispatched, {outcome.finished} finished")

    def _after(self, seconds: float, handler: Callable[[Any], None], what: object) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.now_s + seconds, self._number, handler, what))

    def _wake(self, time_s: float, cell: SimCell) -> None:
        self._number += 1
        heapq.heappush(self._queue, (time_s, self._number, self._calls_end, cell))

    def _tell(self, event: Event) -> None:
        """Give the scheduler an event and carry out its commands; what they cause at once comes behind them."""
        self._inbox.append(event)
        if len(self._inbox) > 1:
            return
        while self._inbox:
            for command in self.scheduler.on(self._inbox[0], self.now_s):
                self._carry_out(command)
            self._inbox.popleft()

    def _carry_out(self, command: Command) -> None:
        self._handlers[type(command)](command)

    # -- executions -------------------------------------------------------------------------------------------

    def _dispatch(self, command: Dispatch) -> None:
        group = self._groups.get(command.group_id)
        if group is None:
            group = _GroupRun(command.version)
            self._groups[command.group_id] = group
        job = self._source.job(group_id=command.group_id, slot=command.slot)
        self.outcome.executions += 1
        live = Live(self.outcome.executions, command.execution_id, command.group_id, command.slot, job, self.now_s)
        self._tell(Dispatched(execution_id=command.execution_id))
        self._begin(live)

    def _begin(self, live: Live) -> None:
        self._pool.begin(live, self.now_s)
        cell = live.cell
        if (
            cell is not None
            and abs(cell.kv_tokens - cell.reported_kv) > LOAD_CHANGE * self._workload.kv_capacity_tokens
        ):
            cell.reported_kv = cell.kv_tokens
            self._tell(
                CellLoad(
                    cell_id=cell.cell_id,
                    running=cell.active,
                    queued=0,
                    kv_tokens=int(cell.kv_tokens),
                    tokens_per_s=cell.active / cell.token_s,
                )
            )

    def _calls_end(self, cell: SimCell) -> None:
        if self.now_s != cell.due_s:
            return
        for live in self._pool.ended(cell, self.now_s):
            chunk, job = live.chunk, live.job
            self._done_tokens += job.outputs[chunk]
            self._done_contexts += job.outputs[chunk] * live.kv_tokens
            self._environment_s += job.environments[chunk]
            self._after(job.environments[chunk], self._environment_ends, live)

    def _environment_ends(self, live: Live) -> None:
        live.chunk += 1
        limit_h = self._workload.timeout_h
        is_late = limit_h is not None and self.now_s - live.started_s - live.waited_s > limit_h * 3600
        if live.chunk < len(live.job.outputs) and not is_late:
            live.left = live.job.outputs[live.chunk]
            self._begin(live)
            return
        self.outcome.timed_out += is_late or live.job.is_capped
        self.outcome.finished += 1
        self._pool.finish(live, self.now_s)
        self._tell(Finished(execution_id=live.execution_id))
        self._after(self._workload.evaluate_s, self._scored, live)

    def _scored(self, live: Live) -> None:
        self._tell(SlotClosed(execution_id=live.execution_id))
        group = self._groups[live.group_id]
        group.parts[live.slot] = self._part(live.job, live.chunk)
        if len(group.parts) < self._workload.group_size:
            return
        del self._groups[live.group_id]
        work = group.work(live.group_id, self._workload.trained_per_output(live.group_id))
        trained = work.trained_tokens
        count = max(1, round(trained / self._workload.micro_step_tokens)) if trained else 0
        self.outcome.groups[live.group_id] = work
        self._tokens[live.group_id] = trained
        self._tell(GroupComplete(group_id=live.group_id, valid_slots=self._workload.group_size, micro_steps=count))
        for index in range(count):
            name = f"g{live.group_id:05d}-m{index}"
            cost_s = trained / count * self._workload.train_s_per_token
            self._costs[name] = cost_s
            self._tell(
                MicroStepReady(
                    group_id=live.group_id,
                    micro_step_id=name,
                    rows=self._workload.group_size,
                    tokens=int(trained / count),
                    cost_s=cost_s,
                )
            )

    def _part(self, job: Job, chunks: int) -> tuple[float, float, float]:
        workload = self._workload
        outputs, contexts, alone_s = 0.0, 0.0, workload.evaluate_s
        for chunk in range(chunks):
            tokens, context = job.outputs[chunk], job.contexts[chunk]
            outputs += tokens
            contexts += tokens * context
            token_s = workload.step_weights_s + workload.request_s + context * workload.context_token_s
            alone_s += tokens * token_s + job.environments[chunk]
        return outputs, contexts, alone_s

    # -- cells ------------------------------------------------------------------------------------------------

    def _span(self, cell: SimCell) -> None:
        if self.now_s > cell.since_s:
            self.outcome.spans.append(Span(cell.cell_id, cell.mode, cell.since_s, self.now_s, cell.busy_s))
        cell.since_s, cell.busy_s = self.now_s, 0.0

    def _switch(self, command: SwitchCell) -> None:
        cell = self._pool.cells[command.cell_id]
        self.outcome.switches += 1
        cell.advance(self.now_s)
        self._span(cell)
        if cell.mode is Mode.ROLLOUT:
            self._pool.evict(cell, self.now_s)
        cell.mode = Mode.SWITCHING
        self._after(self._workload.switch_s, self._switched, command)

    def _switched(self, command: SwitchCell) -> None:
        cell = self._pool.cells[command.cell_id]
        self._span(cell)
        if command.mode is Mode.ROLLOUT:
            cell.updated_s = cell.stalled_until_s = self.now_s
            cell.reported_kv = 0.0
            self._pool.admit_cell(cell)
            self._tell(CellLoad(cell_id=cell.cell_id, running=0, queued=0, kv_tokens=0, tokens_per_s=0.0))
            if self._pool.waiting:
                self._after(0.0, self._unpark, None)
        else:
            cell.mode = Mode.TRAINING
        self._tell(SwitchDone(cell_id=cell.cell_id, mode=command.mode))
        if command.mode is Mode.TRAINING:
            self._tell(CellReady(cell_id=cell.cell_id))

    def _unpark(self, _: None) -> None:
        """Behind all cells that arrive at this moment, so that they share what waits."""
        self._pool.unpark(self.now_s)

    def _train(self, command: RunMicroStep) -> None:
        self._after(self._costs[command.micro_step_id], self._trained, command)

    def _trained(self, command: RunMicroStep) -> None:
        seconds = self._costs.pop(command.micro_step_id)
        self._pool.cells[command.cell_id].busy_s += seconds
        self._tell(MicroStepDone(cell_id=command.cell_id, micro_step_id=command.micro_step_id, seconds=seconds))
        self._tell(CellReady(cell_id=command.cell_id))

    # -- steps ------------------------------------------------------------------------------------------------

    def _close(self, command: CloseStep) -> None:
        self._after(self._workload.optimizer_s, self._stepped, command)

    def _stepped(self, command: CloseStep) -> None:
        outcome = self.outcome
        outcome.step_done_s.append(self.now_s)
        outcome.step_tokens.append(sum(self._tokens.pop(group_id) for group_id in command.groups))
        for group_id in command.groups:
            age = command.step - outcome.groups[group_id].version
            outcome.staleness[age] = outcome.staleness.get(age, 0) + 1
        self._tell(StepDone(version=command.step + 1))
        if self._on_step is not None:
            self._on_step(command.step + 1)

    def _publish(self, command: PublishWeights) -> None:
        self._pool.stall_all(self.now_s, self._workload.publish_s)
        self._after(self._workload.publish_s, self._published, command)

    def _published(self, command: PublishWeights) -> None:
        cells = tuple(cell.cell_id for cell in self._pool.cells if cell.mode is Mode.ROLLOUT)
        self._tell(self._rates())
        self._tell(WeightsPublished(version=command.version, incarnation=0, cells=cells))

    def _rates(self) -> RatesMeasured:
        """What a live run measures; before the first call ended, what the workload says."""
        workload, tokens = self._workload, self._done_tokens
        expected_tokens, expected_s, expected_context = self._expected
        context = self._done_contexts / tokens if tokens else expected_context
        outside_s = (self._environment_s / tokens) if tokens else expected_s / expected_tokens
        return RatesMeasured(
            decode_request_s=workload.request_s + context * workload.context_token_s,
            decode_weights_s=workload.step_weights_s,
            environment_token_s=outside_s,
            training_token_s=workload.train_s_per_token,
            context_tokens=context,
            output_tokens=expected_tokens,
            prefill_token_s=workload.move_s_per_token,
            kv_capacity_tokens=workload.kv_capacity_tokens if workload.gate else 0.0,
        )
