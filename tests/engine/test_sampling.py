"""Sampling: noise by counter, laws, logprobs of the very law."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from opengyre.engine.sampling import restrict, sample, uniform_draws


def draws(count: int, *, seed: int = 5) -> np.ndarray:
    return uniform_draws(np.full(count, seed, np.uint64), np.arange(count, dtype=np.uint64))


def test_draws_of_one_seed_are_uniform_and_uncorrelated():
    values = draws(100_000)
    counts, _ = np.histogram(values, bins=50, range=(0, 1))
    chi_square = float(((counts - 2000) ** 2 / 2000).sum())
    assert chi_square < 100  # 49 degrees of freedom: 1e-5 lies at 101
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.015


def test_draws_of_neighbouring_seeds_are_uncorrelated():
    assert abs(np.corrcoef(draws(50_000, seed=1), draws(50_000, seed=2))[0, 1]) < 0.02


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_a_draw_depends_on_seed_and_position_only(seed, position):
    alone = uniform_draws(np.array([seed], np.uint64), np.array([position], np.uint64))
    among = uniform_draws(np.array([1, seed, 3], np.uint64), np.array([9, position, position], np.uint64))
    assert alone[0] == among[1]
    assert 0 <= alone[0] < 1


def test_sampled_shares_follow_the_law_at_a_temperature():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(40_000, 4)
    ids, logprobs = sample(logits, temperatures=torch.full((40_000,), 0.7), draws=draws(40_000))
    law = torch.softmax(logits[0] / 0.7, -1)
    shares = torch.bincount(ids, minlength=4) / 40_000
    assert float((shares - law).abs().max()) < 0.01
    torch.testing.assert_close(logprobs, law.log()[ids])


def test_greedy_takes_the_largest_logit_with_logprob_zero_beside_sampled_rows():
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    ids, logprobs = sample(logits, temperatures=torch.tensor([0.0, 1.0]), draws=np.array([0.999999, 0.0]))
    assert ids.tolist() == [1, 0]
    assert logprobs[0] == 0
    torch.testing.assert_close(logprobs[1], torch.log_softmax(logits[1], -1)[0])


def test_top_k_and_top_p_keep_the_smallest_sets_and_rows_without_them_are_untouched():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4, 4)
    kept = restrict(logits, torch.tensor([1.0, 0.6, 1.0, 0.8]), torch.tensor([0, 0, 1, 3])).isfinite()
    assert kept.tolist() == [
        [True, True, True, True],
        [True, True, False, False],
        [True, False, False, False],
        [True, True, False, False],
    ]


def test_logprobs_under_a_restricted_law_are_those_of_the_restricted_law():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    ids, logprobs = sample(
        logits,
        temperatures=torch.tensor([1.0]),
        draws=np.array([0.9]),
        top_p=torch.tensor([1.0]),
        top_k=torch.tensor([2]),
    )
    assert ids.tolist() == [1]
    torch.testing.assert_close(logprobs, torch.tensor([0.3 / 0.8]).log())


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 1000))
def test_a_token_of_probability_zero_is_never_sampled(draw, seed):
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(seed))
    logits[0, ::2] = -torch.inf
    ids, logprobs = sample(logits, temperatures=torch.ones(1), draws=np.array([draw]))
    assert int(ids[0]) % 2 == 1
    assert bool(logprobs.isfinite().all())
