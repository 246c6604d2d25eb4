"""Executions on cells in rollout mode: exact processor sharing, placement, and the KV gate.

All active calls of a cell decode in step, so one number, the tokens V that every active call has made, moves all of
them: a call of r tokens ends when V has grown by r. V moves by 1 / (t_w + n t_c + S t_kv) a second, n active calls with
S context tokens. Only when a call starts or ends on a cell that rate changes, and only then is it computed.
"""

import heapq
from collections.abc import Callable

from opengyre.core.events import Mode
from opengyre.schedule.gate import Verdict, admit, can_resume
from opengyre.sim.lengths import Job
from opengyre.sim.workload import Workload

EPSILON_TOKENS = 1e-6
NEVER_S = float("inf")
MANY, FEW = 1.3, 0.8
"""An execution moves at its next call if its cell holds 1.3 times the mean and another less than 0.8 of it."""


class Live:
    """An execution that is dispatched and not finished.

    Example: ``Live(7, "g00000-s07-a0", 0, 7, job, 0.0)`` starts at its first chunk.
    """

    __slots__ = (
        "cell",
        "chunk",
        "execution_id",
        "group_id",
        "job",
        "key",
        "kv_tokens",
        "left",
        "slot",
        "started_s",
        "waited_s",
        "waits_since_s",
    )

    def __init__(self, key: int, execution_id: str, group_id: int, slot: int, job: Job, now_s: float) -> None:
        self.key = key
        self.execution_id = execution_id
        self.group_id = group_id
        self.slot = slot
        self.job = job
        self.chunk = 0
        self.left = job.outputs[0]
        self.cell: SimCell | None = None
        self.kv_tokens = 0.0
        self.started_s = now_s
        self.waited_s = 0.0
        self.waits_since_s = now_s


class SimCell:
    """One cell: its mode, and its calls in rollout mode.

    Example: ``SimCell(0)`` is empty and in rollout mode.
    """

    __slots__ = (
        "active",
        "busy_s",
        "calls",
        "cell_id",
        "contexts",
        "due_s",
        "kv_tokens",
        "mode",
        "reported_kv",
        "residents",
        "since_s",
        "stalled_until_s",
        "token_s",
        "tokens",
        "updated_s",
    )

    def __init__(self, cell_id: int) -> None:
        self.cell_id = cell_id
        self.mode = Mode.ROLLOUT
        self.since_s = 0.0
        self.busy_s = 0.0
        self.calls: list[tuple[float, int, Live]] = []
        self.active = 0
        self.contexts = 0.0
        self.residents: dict[int, Live] = {}
        self.kv_tokens = 0.0
        self.reported_kv = 0.0
        self.tokens = 0.0
        self.token_s = 1.0
        self.updated_s = 0.0
        self.stalled_until_s = 0.0
        self.due_s = NEVER_S

    def advance(self, now_s: float) -> None:
        """Let its calls run up to now."""
        if self.active and now_s > self.updated_s:
            start_s = max(self.updated_s, self.stalled_until_s)
            if now_s > start_s:
                self.tokens += (now_s - start_s) / self.token_s
            self.busy_s += now_s - self.updated_s
        self.updated_s = now_s

    def stall(self, now_s: float, seconds: float) -> None:
        """Add prefill, or a wait for weights, before all its calls."""
        self.stalled_until_s = max(now_s, self.stalled_until_s) + seconds

    def next_end_s(self, now_s: float) -> float:
        """When its next call ends if nothing changes."""
        if not self.calls:
            return NEVER_S
        return max(now_s, self.stalled_until_s) + max(0.0, self.calls[0][0] - self.tokens) * self.token_s


class FewestFirst:
    """Cells in rollout mode by number of residents; the one with fewest costs no walk.

    >>> order = FewestFirst()
    >>> order.put(0, 2), order.put(1, 1), order.move(1, 1, 3)
    (None, None, None)
    >>> order.fewest()
    0
    """

    def __init__(self) -> None:
        self._buckets: list[dict[int, None]] = [{}]
        self._low = 0
        self.size = 0

    def put(self, cell_id: int, number: int) -> None:
        """Take a cell in."""
        while len(self._buckets) <= number:
            self._buckets.append({})
        self._buckets[number][cell_id] = None
        self._low = min(self._low, number)
        self.size += 1

    def remove(self, cell_id: int, number: int) -> None:
        """Take a cell out."""
        del self._buckets[number][cell_id]
        self.size -= 1

    def move(self, cell_id: int, number: int, new: int) -> None:
        """Change the number of a cell."""
        self.remove(cell_id, number)
        self.put(cell_id, new)

    def fewest(self) -> int | None:
        """Return the cell with fewest residents."""
        if not self.size:
            return None
        while not self._buckets[self._low]:
            self._low += 1
        return next(iter(self._buckets[self._low]))


class Pool:
    """The cells of a simulated run.

    Args:
        workload: Costs.
        wake: Called with a time and a cell when a call of the cell may end then.

    Example: ``begin(live, now_s)`` starts the next chunk; ``ended(cell, now_s)`` returns the calls that are done.
    """

    def __init__(self, workload: Workload, wake: Callable[[float, SimCell], None]) -> None:
        self._workload = workload
        self._wake = wake
        self.cells = [SimCell(cell_id) for cell_id in range(workload.cells)]
        self._order = FewestFirst()
        for cell in self.cells:
            self._order.put(cell.cell_id, 0)
        self._residents = 0
        self._held: list[tuple[int, int, int, Live]] = []
        self._parked: list[Live] = []
        self._capacity = workload.kv_capacity_tokens
        self._weights_s, self._request_s = workload.step_weights_s, workload.request_s
        self._context_s = workload.context_token_s
        self.moved_tokens = 0.0
        self.held_s = self.parked_s = 0.0

    @property
    def waiting(self) -> int:
        """Executions that are held or parked."""
        return len(self._held) + len(self._parked)

    # -- calls ------------------------------------------------------------------------------------------------

    def begin(self, live: Live, now_s: float) -> None:
        """Start the next chunk of an execution, or what is left of it, where there is room."""
        cell = live.cell
        fewest = self._order.fewest()
        if fewest is None:
            self._leave(live)
            live.waits_since_s = now_s
            self._parked.append(live)
            return
        best = self.cells[fewest]
        if cell is None or cell.mode is not Mode.ROLLOUT:
            cell = best
        elif cell is not best:
            mean = self._residents / self._order.size
            if len(cell.residents) > MANY * mean and len(best.residents) < FEW * mean:
                cell = best
        context = live.job.contexts[live.chunk]
        own = live.kv_tokens if live.cell is cell else 0.0
        if self._workload.gate and cell.kv_tokens - own + context > self._capacity:
            verdict = admit(
                call_tokens=int(context),
                resident_tokens=int(cell.kv_tokens - own),
                capacity_tokens=int(self._capacity),
                other_tokens=int(best.kv_tokens) if best is not cell else None,
                is_oldest=all(other.group_id >= live.group_id for other in cell.residents.values()),
            )
            if verdict is Verdict.HOLD:
                self._leave(live)
                live.waits_since_s = now_s
                heapq.heappush(self._held, (live.group_id, live.slot, live.key, live))
                return
            cell = best if verdict is Verdict.MOVE else cell
        self._start(live, cell, context, now_s)

    def _start(self, live: Live, cell: SimCell, context: float, now_s: float) -> None:
        cell.advance(now_s)
        if live.cell is not cell:
            is_moved = live.chunk > 0 or live.left < live.job.outputs[0]
            self._leave(live)
            live.cell = cell
            cell.residents[live.key] = live
            self._residents += 1
            self._order.move(cell.cell_id, len(cell.residents) - 1, len(cell.residents))
            if is_moved:
                self.moved_tokens += context
                cell.stall(now_s, context * self._workload.move_s_per_token)
        cell.kv_tokens += context - live.kv_tokens
        live.kv_tokens = context
        if cell.kv_tokens > self._capacity:
            missed = 1 - self._capacity / cell.kv_tokens
            cell.stall(now_s, missed * context * self._workload.prefill_s_per_token)
        heapq.heappush(cell.calls, (cell.tokens + live.left, live.key, live))
        cell.active += 1
        cell.contexts += context
        self._rate(cell)
        self._plan(cell, now_s)

    def _rate(self, cell: SimCell) -> None:
        cell.token_s = self._weights_s + cell.active * self._request_s + cell.contexts * self._context_s

    def _plan(self, cell: SimCell, now_s: float) -> None:
        """Wake the cell when its next call ends; a wake that is too early finds nothing and plans again."""
        end_s = cell.next_end_s(now_s)
        if end_s < cell.due_s:
            cell.due_s = end_s
            self._wake(end_s, cell)

    def _leave(self, live: Live) -> None:
        cell = live.cell
        if cell is None:
            return
        del cell.residents[live.key]
        cell.kv_tokens -= live.kv_tokens
        self._residents -= 1
        live.cell, live.kv_tokens = None, 0.0
        if cell.mode is Mode.ROLLOUT:
            self._order.move(cell.cell_id, len(cell.residents) + 1, len(cell.residents))

    def ended(self, cell: SimCell, now_s: float) -> list[Live]:
        """Return the calls that are done by now; their executions stay resident."""
        cell.advance(now_s)
        cell.due_s = NEVER_S
        done: list[Live] = []
        limit = cell.tokens + EPSILON_TOKENS
        while cell.calls and (cell.calls[0][0] <= limit):
            live = heapq.heappop(cell.calls)[2]
            cell.active -= 1
            cell.contexts -= live.kv_tokens
            done.append(live)
        if done:
            self._rate(cell)
        self._plan(cell, now_s)
        return done

    def finish(self, live: Live, now_s: float) -> None:
        """Take a finished execution off its cell, which may give room to a held one."""
        cell = live.cell
        self._leave(live)
        if cell is not None and cell.mode is Mode.ROLLOUT:
            self.resume(cell, now_s)

    def resume(self, cell: SimCell, now_s: float) -> None:
        """Let held executions onto a cell while they fit, the oldest group first."""
        while self._held:
            live = self._held[0][3]
            context = live.job.contexts[live.chunk]
            fits = can_resume(
                call_tokens=int(context), resident_tokens=int(cell.kv_tokens), capacity_tokens=int(self._capacity)
            )
            if not fits:
                return
            heapq.heappop(self._held)
            self.held_s += now_s - live.waits_since_s
            live.waited_s += now_s - live.waits_since_s
            self._start(live, cell, context, now_s)

    # -- modes ------------------------------------------------------------------------------------------------

    def evict(self, cell: SimCell, now_s: float) -> None:
        """Take a cell out of rollout: its calls go on elsewhere, its other executions move at their next call."""
        cell.advance(now_s)
        self._order.remove(cell.cell_id, len(cell.residents))
        cell.mode = Mode.SWITCHING
        calls = sorted(cell.calls)
        cell.calls, cell.active, cell.contexts, cell.due_s = [], 0, 0.0, NEVER_S
        for live in list(cell.residents.values()):
            self._leave(live)
        for end, _, live in calls:
            live.left = max(EPSILON_TOKENS, end - cell.tokens)
            self.begin(live, now_s)

    def admit_cell(self, cell: SimCell) -> None:
        """Take a cell into rollout, empty."""
        cell.mode = Mode.ROLLOUT
        self._order.put(cell.cell_id, 0)

    def unpark(self, now_s: float) -> None:
        """Let the parked executions go on, and held ones where they fit."""
        if self._order.fewest() is None:
            return
        parked, self._parked = self._parked, []
        for live in sorted(parked, key=lambda one: (one.group_id, one.slot)):
            self.parked_s += now_s - live.waits_since_s
            live.waited_s += now_s - live.waits_since_s
            self.begin(live, now_s)
        for cell in self.cells:
            if not self._held:
                break
            if cell.mode is Mode.ROLLOUT:
                self.resume(cell, now_s)

    def stall_all(self, now_s: float, seconds: float) -> None:
        """Let all cells in rollout mode wait, for new weights."""
        for cell in self.cells:
            if cell.mode is Mode.ROLLOUT:
                cell.advance(now_s)
                cell.stall(now_s, seconds)
