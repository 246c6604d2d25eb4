"""What the look-ahead rule learns from the events: the twin's clock, lengths, and times of the machinery.

Lengths are measured on the twin's own clock V, so that a rate that is wrong by a factor is wrong for lengths by the
same factor and the predictions stay right.
"""

from collections import deque
from statistics import NormalDist

from opengyre.core.errors import InvariantError
from opengyre.core.events import (
    AttemptDropped,
    Dispatched,
    Event,
    Finished,
    GroupComplete,
    MicroStepDone,
    MicroStepReady,
    RatesMeasured,
    SlotClosed,
    StepDone,
    SwitchDone,
    WeightsPublished,
)
from opengyre.core.types import Kind
from opengyre.schedule.roster import Roster
from opengyre.schedule.twin import Rates

PRIOR_SIGMA = 0.3
"""Between and within groups, until enough groups are complete."""
ENOUGH_GROUPS = 20
KEPT_GROUPS = 128
"""Complete groups whose lengths stand for those of groups to come."""
PRIOR_GROUPS = 32
FORGET = 0.03
"""Weight of the newest group in what training costs."""


class Mean:
    """A mean that forgets: the last values weigh most.

    >>> mean = Mean(5.0)
    >>> mean.add(7.0), mean.value
    (None, 7.0)
    """

    def __init__(self, value: float, share: float = 0.2) -> None:
        self.value = value
        self._share = share
        self._is_prior = True

    def add(self, value: float) -> None:
        """Take a value in; the first one replaces the prior."""
        self.value = value if self._is_prior else self.value + self._share * (value - self.value)
        self._is_prior = False


class Meter:
    """Learns while a run goes on.

    Args:
        group_size: N.

    Example: ``meter.observe(event, now_s, roster, rollout_cells=3)`` for each event, then ``meter.rates``.
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self.tokens = 0.0
        """V now."""
        self.is_ready = False
        """Whether rates were measured."""
        self._measured = RatesMeasured(
            decode_request_s=0.0,
            decode_weights_s=0.0,
            environment_token_s=0.0,
            training_token_s=0.0,
            context_tokens=0.0,
            output_tokens=1.0,
        )
        self.rates = Rates(0.0, 0.0, 0.0, 0.0)
        self._seen_s = 0.0
        self._level, self._cells = 0, 0
        self._began: dict[str, float] = {}
        self._ended_s: dict[str, float] = {}
        self._of_group: dict[int, list[float]] = {}
        self._complete: dict[int, list[float]] = {}
        self._prefix = 0
        self._groups: deque[list[float]] = deque(maxlen=KEPT_GROUPS)
        self._cost_of_group: dict[int, float] = {}
        self._score_s, self._optimizer_s, self._publish_s, self._switch_s = (Mean(0.0) for _ in range(4))
        self._count = Mean(1.0, FORGET)
        self._trained_s = self._trained_tokens = 0.0
        self._tokens_of_group: dict[int, float] = {}
        self._last_trained_s = self._last_step_s = 0.0
        self._switch_began_s: dict[int, float] = {}

    @property
    def train_s_per_token(self) -> float:
        """Cell-seconds of training a sampled token."""
        return self._trained_s / self._trained_tokens if self._trained_tokens else 0.0

    @property
    def micro_steps(self) -> int:
        """Micro-steps of a group."""
        return max(1, round(self._count.value))

    def began(self, execution_id: str) -> float:
        """Return V at the start of an execution; now, if it has not started."""
        return self._began.get(execution_id, self.tokens)

    def begin_switch(self, cell_id: int) -> None:
        """Note that a cell was sent to another mode just now."""
        self._switch_began_s[cell_id] = self._seen_s

    def observe(self, event: Event, now_s: float, roster: Roster, *, rollout_cells: int) -> None:
        """Take one event in, after the scheduler's books have it."""
        self._advance(now_s)
        if isinstance(event, RatesMeasured):
            self._measure(event)
        elif isinstance(event, Dispatched):
            self._began[event.execution_id] = self.tokens
        elif isinstance(event, Finished):
            self._finish(event.execution_id, now_s, roster)
        elif isinstance(event, SlotClosed):
            self._score_s.add(now_s - self._ended_s.pop(event.execution_id, now_s))
        elif isinstance(event, AttemptDropped):
            self._began.pop(event.execution_id, None)
            self._ended_s.pop(event.execution_id, None)
        elif isinstance(event, GroupComplete):
            self._count.add(event.micro_steps)
            self._complete_group(event)
        elif isinstance(event, MicroStepReady):
            self._cost(event, roster)
        else:
            self._machinery(event, now_s)
        self._level, self._cells = roster.waterlevel, rollout_cells

    def _measure(self, event: RatesMeasured) -> None:
        if event.decode_request_s + event.decode_weights_s + event.environment_token_s <= 0:
            raise InvariantError(f"a token takes no time: {event}")
        self._measured, self.is_ready = event, True
        self._renew_rates()

    def _advance(self, now_s: float) -> None:
        if self.is_ready and self._level and self._cells:
            self.tokens += (now_s - self._seen_s) / self.rates.token_s(self._level, self._cells)
        self._seen_s = now_s

    def _finish(self, execution_id: str, now_s: float, roster: Roster) -> None:
        self._ended_s[execution_id] = now_s
        length = self.tokens - self._began.pop(execution_id, self.tokens)
        execution = roster.execution(execution_id)
        if execution.kind is Kind.TRAIN:
            self._of_group.setdefault(execution.group_id, []).append(length)

    def _complete_group(self, event: GroupComplete) -> None:
        """Keep the lengths of the groups before which every group is complete: the slow ones are not missing there."""
        lengths = self._of_group.pop(event.group_id, [])
        self._complete[event.group_id] = lengths
        if event.micro_steps:
            self._tokens_of_group[event.group_id] = sum(lengths)
        while self._prefix in self._complete:
            self._groups.append(self._complete.pop(self._prefix))
            self._prefix += 1

    def _cost(self, event: MicroStepReady, roster: Roster) -> None:
        """Learn what a sampled token costs in training: a ratio of sums, since a mean of ratios would be too high."""
        group = roster.groups.get(event.group_id)
        cost_s = self._cost_of_group.pop(event.group_id, 0.0) + event.cost_s
        if group is None or not group.has_arrived:
            self._cost_of_group[event.group_id] = cost_s
            return
        tokens = self._tokens_of_group.pop(event.group_id, 0.0)
        self._trained_s += cost_s - FORGET * self._trained_s
        self._trained_tokens += tokens - FORGET * self._trained_tokens

    def _machinery(self, event: Event, now_s: float) -> None:
        if isinstance(event, MicroStepDone):
            self._last_trained_s = now_s
        elif isinstance(event, StepDone):
            self._optimizer_s.add(now_s - self._last_trained_s)
            self._last_step_s = now_s
        elif isinstance(event, WeightsPublished) and event.version:
            self._publish_s.add(now_s - self._last_step_s)
        elif isinstance(event, SwitchDone):
            self._switch_s.add(now_s - self._switch_began_s.pop(event.cell_id, now_s))
        self._renew_rates()

    def _renew_rates(self) -> None:
        measured = self._measured
        self.rates = Rates(
            weights_s=measured.decode_weights_s,
            request_s=measured.decode_request_s,
            outside_s=measured.environment_token_s,
            context_tokens=measured.context_tokens,
            prefill_token_s=measured.prefill_token_s,
            kv_capacity_tokens=measured.kv_capacity_tokens,
            score_s=self._score_s.value,
            optimizer_s=self._optimizer_s.value,
            publish_s=self._publish_s.value,
            switch_s=self._switch_s.value,
        )

    # -- lengths ----------------------------------------------------------------------------------------------

    def templates(self) -> tuple[tuple[float, ...], ...]:
        """Return lengths of typical groups: complete ones, before that a lognormal law around the expected mean."""
        known = [group for group in self._groups if group]
        if len(known) >= ENOUGH_GROUPS:
            return tuple(tuple(group) for group in known)
        return prior_templates(self._measured.output_tokens, self._group_size)


def prior_templates(mean: float, group_size: int) -> tuple[tuple[float, ...], ...]:
    """Return groups of a lognormal law, with the draws spread evenly.

    >>> groups = prior_templates(100.0, 8)
    >>> 95 < sum(map(sum, groups)) / sum(map(len, groups)) < 105
    True
    """
    normal = NormalDist()
    order = [(index * 7 + 3) % PRIOR_GROUPS for index in range(PRIOR_GROUPS)]
    groups = []
    for index in order:
        between = normal.inv_cdf((index + 0.5) / PRIOR_GROUPS)
        shift = (index * 5 % PRIOR_GROUPS + 0.5) / PRIOR_GROUPS
        within = [normal.inv_cdf((slot + shift) / group_size) for slot in range(group_size)]
        groups.append(tuple(_lognormal(mean, between, own) for own in within))
    return tuple(groups)


def _lognormal(mean: float, between: float, within: float) -> float:
    return float(mean * 2.718281828459045 ** (PRIOR_SIGMA * (between + within) - PRIOR_SIGMA**2))
