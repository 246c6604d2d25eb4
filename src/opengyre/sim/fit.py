"""Costs of a cell from what a live run measured: decode and prefill by least squares over calls, the rest by means."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from opengyre.core.errors import InputError

KEPT = 0.9
"""Share of the calls that the fit is made from: those that it explains best. A call may have waited for a switch."""
ROUNDS = 5
FEWEST_CALLS = 20


@dataclass(frozen=True)
class CallSample:
    """A call that one cell served from its start to its end.

    Example: ``CallSample(seconds=1.2, output_tokens=40, new_tokens=12, active=7.5, context_tokens=2400.0)``.
    """

    seconds: float
    output_tokens: int
    new_tokens: int
    """Context tokens that its parent call does not have."""
    active: float
    """Mean number of calls on its cell while it ran, itself included."""
    context_tokens: float
    """Mean context tokens of those calls in all."""


@dataclass(frozen=True)
class ServedCall:
    """When and where a call was served, and its size.

    Example: ``ServedCall(started_s=3.0, ended_s=4.2, cell_ids=(1,), output_tokens=40, new_tokens=12,
    context_tokens=310)``.
    """

    started_s: float
    ended_s: float
    cell_ids: tuple[int, ...]
    output_tokens: int
    new_tokens: int
    """Context tokens that its parent call does not have."""
    context_tokens: int


@dataclass(frozen=True)
class DecodeFit:
    """A decode step takes ``weights_s + n request_s + S context_token_s``, a new context token ``prefill_token_s``.

    Example: ``fit_decode(samples).request_s``.
    """

    weights_s: float
    request_s: float
    context_token_s: float
    prefill_token_s: float
    calls: int
    median_error: float
    """Median over all calls of |predicted - measured| / measured."""
    total_ratio: float
    """Predicted over measured seconds of all calls."""

    def seconds(self, sample: CallSample) -> float:
        """Return what a call is predicted to take."""
        step_s = self.weights_s + sample.active * self.request_s + sample.context_tokens * self.context_token_s
        return sample.output_tokens * step_s + sample.new_tokens * self.prefill_token_s


def fit_decode(samples: Sequence[CallSample]) -> DecodeFit:
    """Fit the four costs, none below 0, to relative errors of the calls.

    Raises:
        InputError: There are too few calls.
    """
    if len(samples) < FEWEST_CALLS:
        raise InputError(f"{len(samples)} calls were served by one cell each: expected at least {FEWEST_CALLS} to fit")
    seconds = np.array([each.seconds for each in samples])
    tokens = np.array([each.output_tokens for each in samples], float)
    active = np.array([each.active for each in samples])
    contexts = np.array([each.context_tokens for each in samples])
    news = np.array([each.new_tokens for each in samples], float)
    columns = np.stack([tokens, tokens * active, tokens * contexts, news], axis=1) / seconds[:, None]
    kept = np.arange(len(samples))
    for _ in range(ROUNDS):
        costs = not_negative_least_squares(columns[kept], np.ones(len(kept)))
        errors = np.abs(columns @ costs - 1.0)
        kept = np.sort(np.argsort(errors, kind="stable")[: max(FEWEST_CALLS, int(KEPT * len(samples)))])
    weights_s, request_s, context_token_s, prefill_token_s = (float(cost) for cost in costs)
    total = float(((columns @ costs) * seconds).sum() / seconds.sum())
    return DecodeFit(
        weights_s, request_s, context_token_s, prefill_token_s, len(samples), float(np.median(errors)), total
    )


def not_negative_least_squares(columns: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return x >= 0 that minimises |columns x - wanted|, by trying every set of columns.

    >>> matrix = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> [float(round(each, 6)) for each in not_negative_least_squares(matrix, np.array([1.0, -1.0, 0.5]))]
    [0.75, 0.0]
    """
    many = columns.shape[1]
    best, least = np.zeros(many), float(wanted @ wanted)
    for size in range(1, many + 1):
        for chosen in combinations(range(many), size):
            part = columns[:, list(chosen)]
            found = np.linalg.lstsq(part, wanted, rcond=None)[0]
            rest = part @ found - wanted
            if (found >= 0).all() and float(rest @ rest) < least:
                best, least = np.zeros(many), float(rest @ rest)
                best[list(chosen)] = found
    return best


@dataclass(frozen=True)
class Interval:
    """When a call was on a cell, and the context tokens that it held there.

    Example: ``Interval(started_s=3.0, ended_s=4.2, tokens=310.0)``.
    """

    started_s: float
    ended_s: float
    tokens: float


def mean_loads(intervals: Sequence[Interval]) -> list[tuple[float, float]]:
    """Return for each call of a cell how many calls and how many context tokens were on it, as means over its time.

    >>> mean_loads([Interval(0.0, 2.0, 100.0), Interval(1.0, 2.0, 50.0)])
    [(1.5, 125.0), (2.0, 150.0)]
    """
    starts = np.array([each.started_s for each in intervals])
    ends = np.array([each.ended_s for each in intervals])
    tokens = np.array([each.tokens for each in intervals])
    times, place = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    first, last = place[: len(intervals)], place[len(intervals) :]
    found = []
    for weights in (np.ones(len(intervals)), tokens):
        change = np.zeros(len(times))
        np.add.at(change, first, weights)
        np.add.at(change, last, -weights)
        area = np.concatenate([[0.0], np.cumsum(np.cumsum(change)[:-1] * np.diff(times))])
        found.append((area[last] - area[first]) / np.maximum(ends - starts, 1e-9))
    return [(float(active), float(context)) for active, context in zip(*found, strict=True)]


def samples_of(calls: Iterable[ServedCall]) -> Iterator[CallSample]:
    """Yield a sample of each call that one cell served from its start to its end."""
    of_cell: dict[int, list[ServedCall]] = defaultdict(list)
    for call in calls:
        if call.ended_s > call.started_s and call.output_tokens:
            for cell_id in call.cell_ids:
                of_cell[cell_id].append(call)
    for on_cell in of_cell.values():
        spans = [
            Interval(call.started_s, call.ended_s, call.context_tokens + call.output_tokens / 2) for call in on_cell
        ]
        for call, (active, context) in zip(on_cell, mean_loads(spans), strict=True):
            if len(call.cell_ids) == 1:
                seconds = call.ended_s - call.started_s
                yield CallSample(seconds, call.output_tokens, call.new_tokens, active, context)
