"""Processor sharing on a cell, and where executions are placed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.sim.lengths import Job
from opengyre.sim.pool import FewestFirst, Live, Pool
from opengyre.sim.workload import Workload

ONE_CELL = Workload(
    cells=1, gpus=8, load=1.0, step_weights_s=1.0, step_request_s=1.0, step_context_token_s=0.0, context_low_tokens=10,
    context_high_tokens=10, prefill_token_s=0.5,
)  # fmt: skip


class Wakes:
    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, time_s: float, cell: object) -> None:
        self.times.append(time_s)


def live(key: int, tokens: float, group: int = 0) -> Live:
    return Live(key, f"e{key}", group, key, Job([tokens, tokens], [0.0, 0.0], [10.0, 10.0], is_capped=False), 0.0)


def test_two_calls_share_a_cell_and_the_rate_changes_when_one_ends():
    wakes = Wakes()
    pool = Pool(ONE_CELL, wakes)
    short, long = live(1, 10.0), live(2, 30.0)
    pool.begin(short, 0.0)
    assert wakes.times == [20.0]
    pool.begin(long, 0.0)
    cell = pool.cells[0]
    assert pool.ended(cell, 20.0) == []
    assert wakes.times[-1] == pytest.approx(30.0)
    assert pool.ended(cell, 30.0) == [short]
    assert wakes.times[-1] == pytest.approx(30.0 + 20 * 2.0)
    assert pool.ended(cell, 70.0) == [long]
    assert cell.busy_s == pytest.approx(70.0)


def test_a_call_that_goes_on_elsewhere_is_prefilled_there_and_keeps_its_tokens():
    wakes = Wakes()
    pool = Pool(Workload(**{**ONE_CELL_FIELDS, "cells": 2, "gpus": 16}), wakes)
    one = live(1, 10.0)
    pool.begin(one, 0.0)
    first, second = one.cell, pool.cells[1]
    assert first is pool.cells[0]
    pool.evict(first, 8.0)
    assert one.cell is second
    assert one.left == pytest.approx(6.0)
    assert pool.moved_tokens == 10.0
    assert wakes.times[-1] == pytest.approx(8.0 + 10 * 0.5 + 6 * 2.0)


ONE_CELL_FIELDS = {name: getattr(ONE_CELL, name) for name in ONE_CELL.__struct_fields__}


def test_without_a_cell_in_rollout_an_execution_is_parked_and_goes_on_later():
    pool = Pool(ONE_CELL, Wakes())
    one = live(1, 10.0)
    pool.begin(one, 0.0)
    pool.evict(pool.cells[0], 4.0)
    assert pool.waiting == 1
    pool.admit_cell(pool.cells[0])
    pool.cells[0].updated_s = 9.0
    pool.unpark(9.0)
    assert pool.waiting == 0
    assert pool.parked_s == pytest.approx(5.0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 1)), max_size=60))
def test_the_cell_with_fewest_residents_is_found_without_a_walk(moves):
    order, counts = FewestFirst(), dict.fromkeys(range(4), 0)
    for cell in counts:
        order.put(cell, 0)
    for cell, change in moves:
        if cell not in counts or counts[cell] + change < 0:
            continue
        order.move(cell, counts[cell], counts[cell] + change)
        counts[cell] += change
        assert counts[order.fewest()] == min(counts.values())
