"""The fluid twin: a small model of the cluster that plays a few windows ahead for one setting of the rule.

One clock V, in sampled tokens, moves all live executions at once: an execution with r tokens to go ends when V has
grown by r. With n live executions on k cells, an execution spends g seconds outside the engine and t seconds in a
decode step for each token, where t = t_w + a (n / k) t / (t + g), since only t / (t + g) of them decode at a time.
Micro-steps, switches, places in a step, publications and dispatch are played one by one; everything else is fluid.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from opengyre.schedule.places import PlaceBook
from opengyre.schedule.rules import joiners

INFINITY = math.inf
_ENDS, _SCORED, _TRAINED, _JOINED, _BACK, _STEPPED, _PUBLISHED = range(7)


@dataclass(frozen=True)
class Rates:
    """What the twin has to know of the machines.

    >>> rates = Rates(weights_s=0.014, request_s=7e-4, outside_s=0.024, context_tokens=95e3)
    >>> round(rates.token_s(4, 4), 3), round(rates.token_s(384, 4), 3)
    (0.038, 0.087)
    """

    weights_s: float
    """t_w: of a decode step, whatever the batch."""
    request_s: float
    """a: of a decode step, each active request."""
    outside_s: float
    """g: outside the engine, each token."""
    context_tokens: float
    prefill_token_s: float = 0.0
    kv_capacity_tokens: float = 0.0
    """Of a cell; 0 if unknown."""
    score_s: float = 0.0
    optimizer_s: float = 0.0
    publish_s: float = 0.0
    switch_s: float = 0.0

    def token_s(self, live: int, cells: float) -> float:
        """Return seconds in which each of ``live`` executions on ``cells`` makes one token."""
        running = self._running(live, cells)
        return (self._step_s(running, cells) + self.outside_s) * live / running

    def engine_share(self, live: int, cells: float) -> float:
        """Return the share of its time that an execution spends in the engine, where a stall can reach it."""
        running = self._running(live, cells)
        step_s = self._step_s(running, cells)
        return step_s / (step_s + self.outside_s) * running / live if step_s else 0.0

    def _running(self, live: int, cells: float) -> float:
        """Executions that are not held by the KV gate."""
        if not self.kv_capacity_tokens or not self.context_tokens:
            return float(live)
        return min(float(live), max(1.0, cells * self.kv_capacity_tokens / self.context_tokens))

    def _step_s(self, running: float, cells: float) -> float:
        load = self.weights_s + self.request_s * running / cells - self.outside_s
        return (load + math.sqrt(load * load + 4 * self.weights_s * self.outside_s)) / 2


@dataclass(frozen=True)
class Start:
    """The cluster at a publication, as the twin takes it over.

    Example: made by ``Lookahead``; times are from now, lengths in sampled tokens.
    """

    rates: Rates
    cells: int
    batch_groups: int
    group_size: int
    depth: int
    """phi + mu."""
    burst: int
    steps: int
    """Steps to play."""
    queue: int
    live: tuple[tuple[float, int], ...]
    """(tokens to go, group) of each live execution; group -1 for an evaluation."""
    open_slots: dict[int, int]
    """Group to slots that are not closed."""
    scoring: tuple[int, ...]
    """Groups, once for each slot that is being scored."""
    deadlines: dict[int, int]
    """Group to deadline in steps from now, of groups without a place."""
    arrived: tuple[int, ...]
    """Groups that wait for a place."""
    group_tokens: dict[int, float]
    """Group to the sampled tokens of all its executions, as far as known or expected."""
    places_left: int
    waiting: tuple[float, ...]
    """Seconds of each micro-step that waits."""
    running: tuple[float, ...]
    """Seconds that each running micro-step still takes."""
    idle_trainers: int
    joining: int
    returning: int
    templates: tuple[tuple[float, ...], ...]
    """Lengths of the executions of typical groups."""
    train_s_per_token: float
    """Cell-seconds of training a sampled token."""
    micro_steps: int
    """Micro-steps of a group."""
    groups_left: int
    """Groups of the run that are not dispatched."""
    speeds: dict[int, dict[int, float]] = field(default_factory=dict, compare=False)
    """Seconds a token by cells and live executions, kept for the plays to come: they meet the same loads."""


class Twin:
    """One play of the cluster from a start under one setting.

    Args:
        start: The cluster.
        theta: Of the waterlevel; 0 for a fixed number of trainers.
        floor: Of the waterlevel.

    Example: ``Twin(start, 0.7, 0).play(limit_s=math.inf)``.
    """

    def __init__(self, start: Start, theta: float, floor: int) -> None:
        self._start = start
        self._rates = start.rates
        window = start.depth * start.batch_groups * start.group_size
        self._capacity = theta * window / start.cells
        self._floor = min(floor, start.cells - 1)
        self._now_s = self._tokens = self._stalled_until_s = 0.0
        self._ends = list(start.live)
        heapq.heapify(self._ends)
        self._events: list[tuple[float, int, int]] = []
        self._level = len(start.live)
        self._open = dict(start.open_slots)
        self._deadline = dict(start.deadlines)
        self._work = dict(start.group_tokens)
        self._places = PlaceBook(start.batch_groups)
        self._left = start.places_left
        self._waiting = deque(start.waiting)
        self._busy = len(start.running)
        self._idle = start.idle_trainers
        self._joining, self._returning = start.joining, start.returning
        self._rollout = start.cells - self._busy - self._idle - self._joining - self._returning
        self._step = 0
        self._is_closing = False
        self._published = 0
        self._next_group = 1 + max([*start.open_slots, *start.deadlines, -1])
        self._sent = 0
        self._needed = -1
        """Cells that the level needed when switches were last thought of."""
        self._token_s = INFINITY
        self._may_place = True
        """Whether a group arrived or a step began since no group could take a place."""
        self.done_s: list[float] = []
        for deadline in start.deadlines.values():
            self._places.add(deadline)
        for group in start.arrived:
            self._places.arrive(group, start.deadlines[group])
        for seconds in start.running:
            self._after(seconds, _TRAINED)
        for group in start.scoring:
            self._open[group] -= 1
        for group in dict.fromkeys(start.scoring):
            if not self._open[group]:
                self._after(start.rates.score_s / 2, _SCORED, group)
        for number, kind in ((start.joining, _JOINED), (start.returning, _BACK)):
            for _ in range(number):
                self._after(start.rates.switch_s / 2, kind)

    def play(self, limit_s: float = INFINITY) -> float:
        """Return the cost of the setting in seconds, infinity if it is above the limit.

        The cost is the time of the last step and the work that is left then, spread over all cells.
        """
        self._act()
        steps = self._start.steps
        while self._step < steps:
            self._let_end(limit_s)
            if not self._events:
                return INFINITY
            event_s, kind, group = heapq.heappop(self._events)
            if event_s > limit_s:
                return INFINITY
            start_s = max(self._now_s, self._stalled_until_s)
            if event_s > start_s and self._token_s < INFINITY:
                self._tokens += (event_s - start_s) / self._token_s
            self._now_s = event_s
            self._happen(kind, group)
            self._act()
        return self._now_s + self._left_work_s()

    def _let_end(self, limit_s: float) -> None:
        """Let executions end up to the next event, or the limit.

        By itself an end gives the scheduler nothing to do, unless fewer cells are needed than before.
        """
        ends, events, capacity = self._ends, self._events, self._capacity
        while ends and self._token_s < INFINITY:
            now_s, tokens, token_s, level = self._now_s, self._tokens, self._token_s, self._level
            speeds, stalled_until_s, needed = self._speeds(), self._stalled_until_s, self._needed
            is_needed = True
            while ends and is_needed:
                start_s = now_s if now_s > stalled_until_s else stalled_until_s
                to_go = ends[0][0] - tokens
                end_s = start_s + to_go * token_s if to_go > 0 else start_s
                if end_s > limit_s or (events and end_s > events[0][0]):
                    break
                if end_s > start_s:
                    tokens += (end_s - start_s) / token_s
                now_s, last = end_s, tokens + 1e-6 * (1 + tokens)
                while ends and ends[0][0] <= last:
                    level -= 1
                    self._now_s = now_s
                    self._end(heapq.heappop(ends)[1])
                is_needed = not capacity or math.ceil(level / capacity) == needed
                if is_needed:
                    token_s = speeds.get(level) or self._speed(level)
            self._now_s, self._tokens, self._token_s, self._level = now_s, tokens, token_s, level
            if is_needed:
                return
            self._act()

    def _left_work_s(self) -> float:
        rates, cells = self._rates, self._start.cells
        token_s = rates.request_s + rates.weights_s / max(self._level / cells, 1.0)
        tokens = sum(max(0.0, end - self._tokens) for end, _ in self._ends)
        return (tokens * token_s + sum(self._waiting)) / cells

    def _after(self, seconds: float, kind: int, group: int = -1) -> None:
        heapq.heappush(self._events, (self._now_s + seconds, kind, group))

    def _end(self, group: int) -> None:
        if group >= 0:
            self._open[group] -= 1
            if not self._open[group]:
                self._after(self._rates.score_s, _SCORED, group)

    def _happen(self, kind: int, group: int) -> None:
        if kind == _SCORED:
            self._places.arrive(group, self._deadline[group])
            self._may_place = True
        elif kind == _TRAINED:
            self._busy -= 1
            self._idle += 1
        elif kind == _JOINED:
            self._joining -= 1
            self._idle += 1
        elif kind == _BACK:
            self._returning -= 1
            self._rollout += 1
        elif kind == _STEPPED:
            self._finish_step()
        elif kind == _PUBLISHED:
            self._dispatch()

    def _finish_step(self) -> None:
        self._step += 1
        self.done_s.append(self._now_s)
        self._left, self._is_closing = self._start.batch_groups, False
        self._may_place = True
        if self._step % self._start.burst == 0:
            self._published = self._step
            self._stall(self._rates.publish_s)
            self._after(self._rates.publish_s, _PUBLISHED)

    def _dispatch(self) -> None:
        start = self._start
        for _ in range(min(start.burst * start.batch_groups, start.groups_left - self._sent)):
            template = start.templates[self._sent % len(start.templates)]
            group, deadline = self._next_group, self._published + start.depth - 1
            self._next_group += 1
            self._sent += 1
            self._open[group], self._deadline[group] = len(template), deadline
            self._work[group] = sum(template)
            self._places.add(deadline)
            for length in template:
                heapq.heappush(self._ends, (self._tokens + length, group))
            self._level += len(template)

    def _stall(self, seconds: float) -> None:
        """Hold all cells up: only executions that are in the engine notice."""
        if self._level and self._rollout:
            seconds *= self._rates.engine_share(self._level, self._rollout)
        self._stalled_until_s = max(self._now_s, self._stalled_until_s) + seconds

    def _act(self) -> None:
        """What the scheduler does after each event: places, pulls, the end of a step, switches."""
        while self._may_place and self._left and not self._is_closing:
            group = self._places.take(step=self._step, places_left=self._left)
            if group is None:
                self._may_place = False
                break
            self._left -= 1
            count = self._start.micro_steps
            seconds = self._work.pop(group) * self._start.train_s_per_token / max(1, count)
            self._waiting.extend([seconds] * count)
        while self._idle and self._waiting and not self._is_closing:
            self._idle -= 1
            self._busy += 1
            self._after(self._waiting.popleft(), _TRAINED)
        if not (self._left or self._waiting or self._busy or self._is_closing):
            self._is_closing = True
            self._after(self._rates.optimizer_s, _STEPPED)
        if self._capacity:
            self._needed = math.ceil(self._level / self._capacity)
        if self._waiting or self._idle:
            self._switch()
        self._token_s = self._speed(self._level)

    def _speeds(self) -> dict[int, float]:
        """Return the known seconds a token by live executions, for the cells that roll out now."""
        return self._start.speeds.setdefault(self._rollout, {})

    def _speed(self, level: int) -> float:
        if not (level and self._rollout):
            return INFINITY
        speeds = self._speeds()
        seconds = speeds.get(level)
        if seconds is None:
            seconds = speeds[level] = self._rates.token_s(level, self._rollout)
        return seconds

    def _switch(self) -> None:
        cells = self._start.cells
        want = self._floor
        if self._capacity:
            want = max(want, min(cells - 1, cells - self._needed))
        training = self._busy + self._idle + self._joining
        number = joiners(
            want=want, training=training, joining=self._joining, waiting=len(self._waiting), queue=self._start.queue
        )
        for _ in range(min(number, self._rollout - 1)):
            moved_s = self._level / self._rollout * self._rates.context_tokens * self._rates.prefill_token_s
            self._rollout -= 1
            self._joining += 1
            self._stall(moved_s / self._rollout)
            self._after(self._rates.switch_s, _JOINED)
        while self._idle and self._busy + self._idle + self._joining > want:
            self._idle -= 1
            self._returning += 1
            self._after(self._rates.switch_s, _BACK)
