"""The scheduler: a state machine from events to commands. No clock, no randomness, no I/O.

The live driver and the simulator run this object; a log of events fed to a fresh one gives the same commands.
"""

from collections.abc import Callable

from opengyre.core.errors import InvariantError
from opengyre.core.events import (
    AttemptDropped,
    CellJoined,
    CellLoad,
    CellLost,
    CellReady,
    CloseStep,
    Command,
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
    Tick,
    WeightsPublished,
)
from opengyre.core.types import Kind
from opengyre.schedule.cells import CellBook
from opengyre.schedule.lookahead import Books, Choice, Lookahead
from opengyre.schedule.open_step import OpenStep
from opengyre.schedule.roster import Roster
from opengyre.schedule.rules import RuleView, SwitchRule, plain_rule_of
from opengyre.schedule.settings import ScheduleSettings
from opengyre.schedule.state import MicroStepState


class Scheduler:
    """Owns dispatch, the mode of each cell, which groups a step takes, when a step closes, and publication.

    Args:
        settings: Sizes, window and rule.

    Example: ``Scheduler(settings).on(WeightsPublished(version=0, incarnation=0, cells=(0, 1)), 0.0)`` returns the
    first ``Dispatch`` commands.
    """

    def __init__(self, settings: ScheduleSettings) -> None:
        self.settings = settings
        plain = plain_rule_of(settings)
        self._lookahead = Lookahead(settings) if plain is None else None
        self._rule: SwitchRule = plain or self._lookahead or Lookahead(settings)
        self._cells = CellBook(settings.cells)
        self._roster = Roster(settings)
        self._open = OpenStep(streaming=settings.streaming, batch_groups=settings.batch_groups)
        self._books = Books(self._roster, self._open, self._cells)
        self._step = 0
        self._published = -1
        self._publishing: int | None = None
        self._unpublished: list[int] = []
        self._is_closing = False
        self._spent = 0
        self._handlers: dict[type, Callable[..., list[Command]]] = {
            Tick: self._on_nothing,
            RatesMeasured: self._on_nothing,
            Dispatched: self._on_dispatched,
            Finished: self._on_finished,
            SlotClosed: self._on_slot_closed,
            AttemptDropped: self._on_attempt_dropped,
            GroupComplete: self._on_group_complete,
            MicroStepReady: self._on_micro_step_ready,
            MicroStepDone: self._on_micro_step_done,
            CellLoad: self._on_cell_load,
            CellReady: self._on_cell_ready,
            SwitchDone: self._on_switch_done,
            CellLost: self._on_cell_lost,
            CellJoined: self._on_cell_joined,
            StepDone: self._on_step_done,
            WeightsPublished: self._on_weights_published,
        }

    def on(self, event: Event, now_s: float) -> list[Command]:
        """Take one event and return the commands it causes, in order.

        Args:
            event: What happened.
            now_s: Time of the event; kept out of all decisions but those of rules that ask for it.

        Raises:
            InvariantError: The event contradicts what is known; the message has the values.
        """
        commands = self._handlers[type(event)](event)
        self._take_places()
        commands += self._feed()
        commands += self._close()
        if self._lookahead is not None:
            self._books.step, self._books.published = self._step, self._published
            self._lookahead.observe(event, now_s, self._books)
        commands += self._switch()
        return commands

    # -- what others may read ---------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether all steps are done, published and every evaluation is closed."""
        return (
            self._step >= self.settings.steps
            and self._published >= self.settings.steps
            and not self._roster.open_evaluations
        )

    @property
    def step(self) -> int:
        """The open step, which is also the number of optimizer steps taken."""
        return self._step

    @property
    def published(self) -> int:
        """The version that cells in rollout mode have; -1 before the start."""
        return self._published

    @property
    def waterlevel(self) -> int:
        """w: executions dispatched and not finished."""
        return self._roster.waterlevel

    @property
    def waiting(self) -> int:
        """q: micro-steps of the open step that no cell has pulled."""
        return self._open.waiting

    @property
    def open_groups(self) -> tuple[int, ...]:
        """Groups that have a place in the open step."""
        return self._open.group_ids

    @property
    def pending_groups(self) -> tuple[int, ...]:
        """Training groups that are dispatched and not consumed."""
        return tuple(group.group_id for group in self._roster.groups.values() if group.kind is Kind.TRAIN)

    @property
    def publishing(self) -> int | None:
        """The version that was ordered to be published and is not yet."""
        return self._publishing

    def unreported(self, group_id: int) -> tuple[bool, frozenset[str]]:
        """Return whether a group was reported complete, and which of its micro-steps are known."""
        group = self._roster.groups[group_id]
        return group.is_complete, frozenset(group.micro_steps)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What the look-ahead rule has chosen so far; empty with other rules."""
        return () if self._lookahead is None else tuple(self._lookahead.choices)

    @property
    def spent_groups(self) -> int:
        """Consumed groups with fewer than two valid slots."""
        return self._spent

    @property
    def live_cells(self) -> tuple[int, ...]:
        """Cells that are not lost."""
        return tuple(self._cells)

    def mode(self, cell_id: int) -> Mode:
        """Return the mode of a cell; a cell on its way is switching."""
        cell = self._cells.cell(cell_id)
        return cell.mode if cell.mode is cell.target else Mode.SWITCHING

    def open_executions(self) -> tuple[str, ...]:
        """Return executions whose outcome is not known."""
        return tuple(state.execution_id for state in self._roster.executions.values() if state.is_open)

    def is_slot_open(self, group_id: int, slot: int, *, kind: Kind = Kind.TRAIN) -> bool:
        """Whether a slot still waits for an outcome."""
        group = self._roster.group(group_id, kind)
        return group is not None and not group.slots[slot].is_closed

    def waits_for(self) -> str:
        """Return in words what the open step waits for."""
        if self._step >= self.settings.steps:
            return f"{len(self._roster.open_evaluations)} evaluation executions"
        if self._is_closing:
            return f"the optimizer step {self._step} on the core cell"
        running = [f"{m.micro_step_id} on cell {m.running_on}" for m in self._open.running()]
        if running or self.waiting:
            return f"step {self._step}: {self.waiting} micro-steps wait, running {', '.join(running) or 'none'}"
        late = [group for group in self._roster.groups.values() if group.step is None and not group.has_arrived]
        named = [
            f"group {group.group_id} slots {[i for i, slot in enumerate(group.slots) if not slot.is_closed]}"
            for group in sorted(late, key=lambda group: (group.deadline, group.group_id))[:3]
        ]
        return f"step {self._step}: {len(self.open_groups)} of {self.settings.batch_groups} places; {'; '.join(named)}"

    # -- executions and groups --------------------------------------------------------------------------------

    def _on_nothing(self, _: Event) -> list[Command]:
        return []

    def _on_dispatched(self, event: Dispatched) -> list[Command]:
        self._roster.execution(event.execution_id)
        return []

    def _on_finished(self, event: Finished) -> list[Command]:
        self._roster.finish(event.execution_id)
        return []

    def _on_slot_closed(self, event: SlotClosed) -> list[Command]:
        self._roster.close_slot(event.execution_id)
        return []

    def _on_attempt_dropped(self, event: AttemptDropped) -> list[Command]:
        return self._roster.drop_attempt(event.execution_id, counts=event.counts, step=self._step)

    def _on_group_complete(self, event: GroupComplete) -> list[Command]:
        self._roster.complete_group(event.group_id, valid_slots=event.valid_slots, micro_steps=event.micro_steps)
        return []

    def _on_micro_step_ready(self, event: MicroStepReady) -> list[Command]:
        self._roster.add_micro_step(event.group_id, MicroStepState(event.micro_step_id, event.cost_s))
        return []

    def _on_weights_published(self, event: WeightsPublished) -> list[Command]:
        if event.version < self._published or event.version > self._step:
            raise InvariantError(f"version {event.version} was published; expected {self._published} to {self._step}")
        if event.version != self._publishing and self._published >= 0:
            raise InvariantError(f"version {event.version} was published; expected {self._publishing}")
        self._published = event.version
        self._publishing = None
        depth = self.settings.dispatch_depth
        limit = event.version * self.settings.batch_groups + depth
        if self.settings.dispatch_on == "consumption":
            limit = self._step * self.settings.batch_groups + depth
        evaluation, training = (
            self._roster.dispatch_evaluation(event.version),
            self._roster.dispatch_training(limit, version=event.version),
        )
        dispatches = evaluation + training if event.version == 0 else training + evaluation
        return [*dispatches, *self._publish()]

    def _publish(self) -> list[Command]:
        """Order the next publication: one at a time and in order, so that no cell goes back a version."""
        if self._publishing is not None or not self._unpublished:
            return []
        self._publishing = self._unpublished.pop(0)
        return [PublishWeights(version=self._publishing)]

    # -- steps ------------------------------------------------------------------------------------------------

    def _take_places(self) -> None:
        """Give places of the open step to complete groups."""
        settings = self.settings
        if self._step >= settings.steps or self._is_closing:
            return
        while not self._open.is_full:
            chosen = self._roster.places.take(step=self._step, places_left=self._open.places_left)
            if chosen is None:
                return
            group = self._roster.groups[chosen]
            if settings.dispatch_on == "publication" and self._step - group.version > settings.staleness_bound:
                raise InvariantError(
                    f"group {chosen} of version {group.version} in step {self._step}: staleness "
                    f"{self._step - group.version}, expected at most {settings.staleness_bound}"
                )
            group.step = self._step
            self._open.take(group)

    def _feed(self) -> list[Command]:
        """Answer the pulls of idle cells in training mode."""
        if self._is_closing or not self._open.waiting or not self._cells.can_feed:
            return []
        commands: list[Command] = []
        for cell_id in self._cells.idle_trainers():
            name = self._open.pull(cell_id)
            if name is None:
                break
            self._cells.run(cell_id, name)
            commands.append(RunMicroStep(cell_id=cell_id, micro_step_id=name, step=self._step))
        return commands

    def _close(self) -> list[Command]:
        """Close the step when B groups are consumed and nothing waits or runs."""
        if self._is_closing or self._step >= self.settings.steps:
            return []
        if not self._open.is_full or self._open.is_busy or self.settings.core not in self._cells:
            return []
        self._is_closing = True
        return [
            CloseStep(step=self._step, groups=self._open.group_ids, contributions=self._open.contributions()),
        ]

    def _on_micro_step_done(self, event: MicroStepDone) -> list[Command]:
        cell = self._cells.get(event.cell_id)
        if cell is None or not self._open.finish(event.micro_step_id, event.cell_id):
            raise InvariantError(f"micro-step {event.micro_step_id} was not running on cell {event.cell_id}")
        cell.running = None
        return []

    def _on_step_done(self, event: StepDone) -> list[Command]:
        if not self._is_closing or event.version != self._step + 1:
            raise InvariantError(f"version {event.version} after step {self._step} (closing: {self._is_closing})")
        for group in self._open.clear():
            del self._roster.groups[group.group_id]
            self._spent += group.valid_slots < 2
        self._is_closing = False
        self._step = event.version
        commands: list[Command] = []
        if self.settings.dispatch_on == "consumption":
            limit = self._step * self.settings.batch_groups + self.settings.dispatch_depth
            commands += self._roster.dispatch_training(limit, version=self._published)
        if self._step % self.settings.burst == 0 or self._step == self.settings.steps:
            self._unpublished.append(self._step)
            commands += self._publish()
        return commands

    # -- cells ------------------------------------------------------------------------------------------------

    def _on_cell_load(self, event: CellLoad) -> list[Command]:
        cell = self._cells.get(event.cell_id)
        if cell is not None:
            cell.kv_tokens, cell.tokens_per_s = event.kv_tokens, event.tokens_per_s
        return []

    def _on_cell_ready(self, event: CellReady) -> list[Command]:
        self._cells.ask(event.cell_id)
        return []

    def _on_switch_done(self, event: SwitchDone) -> list[Command]:
        self._cells.arrive(event.cell_id, event.mode)
        return []

    def _on_cell_lost(self, event: CellLost) -> list[Command]:
        """Return the cell's micro-steps to the queue, done ones too: their sums are gone with it."""
        self._cells.lose(event.cell_id)
        if self._open.lose(event.cell_id) or event.cell_id == self.settings.core:
            self._is_closing = False
        return []

    def _on_cell_joined(self, event: CellJoined) -> list[Command]:
        self._cells.join(event.cell_id)
        return []

    def _view(self) -> RuleView:
        return RuleView(
            settings=self.settings,
            cells=self._cells,
            waterlevel=self._roster.waterlevel,
            waiting=self._open.waiting,
            is_batch_ready=self._open.is_full,
            is_step_busy=self._is_closing or self._open.is_busy,
        )

    def _switch(self) -> list[Command]:
        """Let the rule decide, then make sure that live executions keep a cell."""
        commands: list[Command] = []
        for cell_id, mode in self._rule.switches(self._view()):
            self._cells.turn(cell_id, mode)
            commands.append(SwitchCell(cell_id=cell_id, mode=mode))
        if not self._rule.parks and self._cells and self._roster.waterlevel:
            commands += self._recall()
        return commands

    def _recall(self) -> list[Command]:
        """Bring a trainer back where losses left no cell in rollout mode; without one the invariant is broken."""
        if self._cells.training < len(self._cells):
            return []
        idle = [cell for cell in self._cells.values() if cell.mode is Mode.TRAINING and cell.running is None]
        if not idle:
            return []
        self._cells.turn(idle[0].cell_id, Mode.ROLLOUT)
        return [SwitchCell(cell_id=idle[0].cell_id, mode=Mode.ROLLOUT)]
