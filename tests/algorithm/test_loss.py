import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opengyre.algorithm.loss import policy_loss
from opengyre.algorithm.settings import LossSettings
from opengyre.core.types import Role, VersionRun
from opengyre.trajectory.admission import admit
from opengyre.trajectory.rows import rows_of
from opengyre.trajectory.tree import TrajectoryTree, TreeCall


def loss_of(logprobs, behaviour, advantages, weights, **settings):
    live = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    loss, measures = policy_loss(
        live,
        torch.tensor(behaviour, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.tensor(weights, dtype=torch.float64),
        settings=LossSettings(**settings),
    )
    loss.backward()
    return loss.item(), live.grad.tolist(), measures


def test_executions_are_averaged_inside_first_then_across():
    """A=+1 with logprobs -1,-2,-3 and A=-1 with -4: -1, where a mean over tokens would say +0.5."""
    logprobs = [-1.0, -2.0, -3.0, -4.0]
    loss, _, _ = loss_of(logprobs, logprobs, [1, 1, 1, -1], [1 / 3, 1 / 3, 1 / 3, 1])
    assert loss / 2 == pytest.approx(-1.0)


def forked_rows():
    """A shared target a, then b on one leaf and c on the other."""
    tree = TrajectoryTree("e")
    for number, output in enumerate(([10, 11], [10, 12])):
        tree.insert(
            TreeCall(
                call_id=f"c{number}",
                request_id=f"c{number}",
                agent="main",
                role=Role.MAIN,
                context=np.array([1], np.int32),
                output=np.array(output, np.int32),
                logprobs=np.array([-1.0, -2.0 - number], np.float32),
                versions=(VersionRun(0, 2),),
            )
        )
    return rows_of(tree, admit(tree, max_leaves=5, seed=0), advantage=1.0)


def test_a_shared_target_counts_once_in_the_loss():
    """a(-1) forks to b(-2) and c(-3): L = 2, not the 1.75 of a mean over leaves."""
    total = 0.0
    for row in forked_rows():
        chosen = row.behaviour_logprobs[row.trainable].tolist()
        total += loss_of(chosen, chosen, [1.0] * len(chosen), row.weight[row.trainable].tolist())[0]
    assert total == pytest.approx(2.0)


def test_truncated_weights_are_capped_and_masked_ones_are_zero_outside():
    behaviour = [-2.0, -2.0, -2.0]
    logprobs = [-2.0 + float(np.log(ratio)) for ratio in (0.4, 1.0, 4.0)]
    _, truncated, capped = loss_of(logprobs, behaviour, [1, 1, 1], [1, 1, 1], importance_cap=2.0)
    assert truncated == pytest.approx([-0.4, -1.0, -2.0])
    assert capped.truncated == 1
    masked = {"importance": "masked", "importance_floor": 0.5}
    for cap, expected in ((5.0, [0.0, -1.0, -4.0]), (2.0, [0.0, -1.0, 0.0])):
        _, gradient, measures = loss_of(logprobs, behaviour, [1, 1, 1], [1, 1, 1], importance_cap=cap, **masked)
        assert gradient == pytest.approx(expected)
        assert measures.truncated == expected.count(0.0)


def test_the_clipped_surrogate_has_two_bounds_and_stops_only_what_goes_too_far():
    behaviour = [-1.0] * 4
    logprobs = [-1.0 + float(np.log(ratio)) for ratio in (1.5, 1.5, 0.5, 0.5)]
    advantages = [1.0, -1.0, 1.0, -1.0]
    loss, gradient, measures = loss_of(logprobs, behaviour, advantages, [1] * 4, importance="clipped")
    assert gradient == pytest.approx([0.0, 1.5, -0.5, 0.0])
    assert loss == pytest.approx(-1.28 + 1.5 - 0.5 + 0.8)
    assert measures.truncated == 2


def test_reported_measures_are_sums_over_tokens():
    ratios = [0.5, 2.0]
    logprobs = [-3.0 + float(np.log(ratio)) for ratio in ratios]
    _, _, measures = loss_of(logprobs, [-3.0, -3.0], [1, 1], [1, 1])
    assert (measures.ratio, measures.ratio_max) == pytest.approx((2.5, 2.0))
    assert measures.kl == pytest.approx(sum(ratio - 1 - np.log(ratio) for ratio in ratios))


def test_no_tokens_give_a_loss_of_zero():
    loss, measures = policy_loss(
        *[torch.zeros(0)] * 2, advantages=torch.zeros(0), weights=torch.zeros(0), settings=LossSettings()
    )
    assert (float(loss), measures.ratio_max) == (0.0, 0.0)


token = st.tuples(st.floats(-6, -0.01), st.floats(-6, -0.01), st.floats(-2, 2), st.floats(0, 1))


@given(
    st.lists(token, min_size=1, max_size=12),
    st.sampled_from(["clipped", "truncated", "masked"]),
    st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_any_split_into_micro_steps_in_any_order_gives_the_same_loss_and_gradient(tokens, importance, places):
    whole = [list(column) for column in zip(*tokens, strict=True)]
    loss, gradient, measures = loss_of(*whole, importance=importance)
    split_loss, split_gradient, truncated = 0.0, {}, 0
    for part in (2, 0, 3, 1):
        chosen = [index for index in range(len(tokens)) if places[index] == part]
        if not chosen:
            continue
        columns = [[column[index] for index in chosen] for column in whole]
        part_loss, part_gradient, part_measures = loss_of(*columns, importance=importance)
        split_loss += part_loss
        truncated += part_measures.truncated
        split_gradient |= dict(zip(chosen, part_gradient, strict=True))
    assert split_loss == pytest.approx(loss, rel=1e-9, abs=1e-9)
    assert [split_gradient[index] for index in range(len(tokens))] == pytest.approx(gradient)
    assert truncated == measures.truncated
