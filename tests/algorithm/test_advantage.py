import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.algorithm.advantage import advantages

rewards = st.lists(st.one_of(st.none(), st.floats(0, 1, width=32)), max_size=12)


def test_a_dropped_execution_takes_no_part_in_mean_or_deviation():
    assert advantages([1, 0, None, 1], eps=0.0) == pytest.approx((0.70711, -1.41421, None, 0.70711), abs=1e-5)


def test_fewer_than_two_valid_or_equal_rewards_give_zero():
    assert advantages([1.0]) == (0.0,)
    assert advantages([None, 0.3, None]) == (None, 0.0, None)
    assert advantages([0.1 + 0.2, 0.1 + 0.2, 0.1 + 0.2]) == (0.0, 0.0, 0.0)
    assert advantages([]) == ()


def test_the_deviation_can_be_left_out_and_eps_is_added_to_it():
    assert advantages([1.0, 0.0], use_std=False) == (0.5, -0.5)
    assert advantages([1.0, 0.0], eps=0.5) == (0.5, -0.5)


@given(rewards)
def test_valid_advantages_sum_to_zero_and_have_unit_deviation(values):
    found = advantages(values, eps=0.0)
    assert [each is None for each in found] == [each is None for each in values]
    valid = [each for each in found if each is not None]
    assert math.fsum(valid) == pytest.approx(0.0, abs=1e-4 * max(1, len(valid)))
    if any(valid):
        assert math.fsum(each * each for each in valid) / len(valid) == pytest.approx(1.0, abs=1e-4)


@given(rewards, st.randoms(use_true_random=False))
def test_the_order_of_a_group_does_not_matter(values, random):
    order = list(range(len(values)))
    random.shuffle(order)
    found = advantages(values)
    shuffled = advantages([values[place] for place in order])
    for place, other in zip(order, shuffled, strict=True):
        assert other == (None if found[place] is None else pytest.approx(found[place], rel=1e-6, abs=1e-9))
