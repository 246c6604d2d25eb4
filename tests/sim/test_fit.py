"""Costs that are fitted to calls come out as those that the calls were made with."""

import random

import pytest

from opengyre.core.errors import InputError
from opengyre.sim.fit import CallSample, DecodeFit, fit_decode
from opengyre.sim.lengths import JobSource
from opengyre.sim.traces import TraceCall
from opengyre.sim.workload import Workload

TRUE = DecodeFit(0.006, 0.003, 4e-7, 4e-5, 0, 0.0, 1.0)


def samples(count, *, late=0.0, noise=0.0, seed=1):
    chance = random.Random(seed)
    for _ in range(count):
        active = chance.uniform(1, 40)
        sample = CallSample(
            1.0, chance.randrange(10, 400), chance.randrange(5, 900), active, active * chance.uniform(200, 9000)
        )
        seconds = TRUE.seconds(sample) * (1 + noise * chance.gauss()) + (30.0 if chance.random() < late else 0.0)
        yield CallSample(seconds, sample.output_tokens, sample.new_tokens, sample.active, sample.context_tokens)


def costs_of(fit):
    return [fit.weights_s, fit.request_s, fit.context_token_s, fit.prefill_token_s]


def test_exact_calls_give_the_costs_back():
    fit = fit_decode(list(samples(100)))
    assert costs_of(fit) == pytest.approx(costs_of(TRUE), rel=1e-6)
    assert fit.median_error < 1e-9
    assert fit.total_ratio == pytest.approx(1.0)


def test_calls_that_waited_for_something_else_do_not_move_the_costs():
    fit = fit_decode(list(samples(400, late=0.05)))
    assert costs_of(fit) == pytest.approx(costs_of(TRUE), rel=1e-6)
    assert fit.total_ratio < 0.95


def test_no_cost_is_negative_whatever_the_noise():
    for seed in range(10):
        assert min(costs_of(fit_decode(list(samples(30, noise=0.5, seed=seed))))) >= 0


def test_too_few_calls_are_refused_with_their_number():
    with pytest.raises(InputError, match=r"19 calls.*expected at least 20"):
        fit_decode(list(samples(19)))


def test_a_trace_in_order_gives_each_place_its_own_execution():
    sessions = tuple((TraceCall(10.0, float(number + 1), 0.5),) for number in range(5))
    source = JobSource(Workload(group_size=2, trace_in_order=True), seed=3, sessions=sessions)
    places = [(group_id, slot) for group_id in range(3) for slot in range(2)]
    assert [source.job(group_id=group_id, slot=slot).tokens for group_id, slot in places] == [1, 2, 3, 4, 5, 1]
