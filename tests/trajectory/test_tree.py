import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.core.errors import InvariantError
from opengyre.core.types import Role, VersionRun
from opengyre.trajectory.admission import admit
from opengyre.trajectory.rows import rows_of, token_versions
from opengyre.trajectory.serial import tree_from_bytes, tree_to_bytes
from opengyre.trajectory.statistics import statistics_of, total_of
from opengyre.trajectory.tree import Exclusion, TrajectoryTree, TreeCall


def call(number, context, output, **more):
    values = {
        "call_id": f"c{number:04d}",
        "request_id": f"r{number:04d}",
        "agent": "main",
        "role": Role.MAIN,
        "context": np.asarray(context, np.int32),
        "output": np.asarray(output, np.int32),
        "logprobs": -np.arange(1, len(output) + 1, dtype=np.float32) - number,
        "versions": (VersionRun(number, len(output)),),
    }
    return TreeCall(**{**values, **more})


def tree_with(calls):
    tree = TrajectoryTree("e")
    for each in calls:
        tree.insert(each)
    return tree


def trained(tree, *, max_leaves=0, seed=0):
    """Trained ids and depths, in the order of the rows."""
    rows = rows_of(tree, admit(tree, max_leaves=max_leaves, seed=seed), advantage=1.0)
    return [int(token) for row in rows for token in row.tokens[row.trainable]]


def all_orders_agree(calls):
    made = {tree_to_bytes(tree_with(order)) for order in itertools.permutations(calls)}
    return len(made) == 1


def test_a_continuation_is_one_leaf_and_the_text_between_is_context():
    calls = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6])]
    tree = tree_with(calls)
    assert len(tree.candidates()) == 1
    assert trained(tree) == [3, 4, 6]
    assert all_orders_agree(calls)


def test_an_identical_retry_shares_one_node_and_one_target():
    calls = [call(0, [1], [2]), call(1, [1], [2])]
    tree = tree_with(calls)
    assert [node.ends for node in tree.nodes] == [[0, 1]]
    assert trained(tree) == [2]
    assert statistics_of(tree, []).duplicate_tokens == 1
    assert all_orders_agree(calls)


def test_a_fork_inside_an_output_shares_the_head_and_has_two_targets_from_one_source():
    calls = [call(0, [1], [2, 3]), call(1, [1], [2, 4])]
    tree = tree_with(calls)
    rows = rows_of(tree, admit(tree, max_leaves=0, seed=0), advantage=1.0)
    assert sorted(trained(tree)) == [2, 3, 4]
    assert [int(position) for row in rows for position in row.positions[row.trainable]][-1] == 2
    assert [row.tokens.tolist()[:2] for row in rows] == [[1, 2], [1, 2]]
    assert all_orders_agree(calls)


def test_sampled_beats_context_whatever_comes_first():
    calls = [call(0, [1, 2, 9], [5]), call(1, [1, 2], [9])]
    tree = tree_with(calls)
    assert sorted(trained(tree)) == [5, 9]
    assert tree_with(calls[::-1]).sampled_tokens == 2
    assert all_orders_agree(calls)


def test_a_history_that_keeps_half_of_a_reply_splits_it_and_trains_it_all():
    tree = tree_with([call(0, [1, 2], [3, 4, 5, 6]), call(1, [1, 2, 3, 4, 9], [10])])
    assert sorted(trained(tree)) == [3, 4, 5, 6, 10]


def test_stripped_thinking_is_a_fork_in_which_the_stripped_reply_is_context():
    """p[1,2]g[7,3,4], where 7 is the thought, then p[1,2,3,4,5]g[6]."""
    tree = tree_with([call(0, [1, 2], [7, 3, 4]), call(1, [1, 2, 3, 4, 5], [6])])
    rows = rows_of(tree, admit(tree, max_leaves=0, seed=0), advantage=1.0)
    by_leaf = {row.tokens.tolist()[-1]: row for row in rows}
    assert by_leaf[4].trainable.tolist() == [False, False, True, True, True]
    assert by_leaf[6].trainable.tolist() == [False] * 5 + [True]


def test_interleaved_sub_agents_are_two_leaves():
    agents = {"agent": "a", "role": Role.SUB_AGENT}, {"agent": "b", "role": Role.SUB_AGENT}
    calls = [
        call(0, [1], [2], **agents[0]),
        call(1, [5], [6], **agents[1]),
        call(2, [1, 2, 3], [4], **agents[0]),
        call(3, [5, 6, 7], [8], **agents[1]),
    ]
    tree = tree_with(calls)
    assert len(tree.candidates()) == 2
    assert sorted(trained(tree)) == [2, 4, 6, 8]
    assert all_orders_agree(calls)


def test_an_end_token_that_only_the_next_prompt_holds_is_context():
    tree = tree_with([call(0, [1], [2, 3]), call(1, [1, 2, 3, 99, 4], [5, 99])])
    assert trained(tree) == [2, 3, 5, 99]
    rows = rows_of(tree, admit(tree, max_leaves=0, seed=0), advantage=1.0)
    assert rows[0].trainable.tolist() == [False, True, True, False, False, True, True]


def test_a_replaced_stop_token_forks_one_token_earlier_and_stays_trained():
    tree = tree_with([call(0, [1], [2, 98]), call(1, [1, 2, 97, 4], [5])])
    assert sorted(trained(tree)) == [2, 5, 98]
    assert len(tree.candidates()) == 2


def test_a_poisoned_call_is_context_and_counted():
    poisoned = call(0, [1], [2, 3], logprobs=np.array([-1.0], np.float32), exclusion=Exclusion.POISONED)
    tree = tree_with([poisoned, call(1, [1, 2, 3, 4], [5])])
    assert trained(tree) == [5]
    assert statistics_of(tree, []).poisoned == 1
    assert tree.output_of(0).tolist() == [2, 3]


def test_a_summary_call_does_not_hide_the_main_leaf_it_continues():
    calls = [
        call(0, [1], [2]),
        call(1, [1, 2, 8], [3], role=Role.MAIN_SUMMARY),
        call(2, [7, 3], [4]),
    ]
    tree = tree_with(calls)
    assert statistics_of(tree, []).leaves == {"main": 2, "main-summary": 1}
    assert [leaf.role for leaf in admit(tree, max_leaves=1, seed=0)] == [Role.MAIN]
    assert sorted(trained(tree, max_leaves=3)) == [2, 3, 4]
    assert all_orders_agree(calls)


def test_roles_are_admitted_in_order_and_ownership_is_decided_after_selection():
    calls = [
        call(0, [1], [10, 11]),
        call(1, [1], [10, 12], role=Role.MAIN_SUMMARY),
        call(2, [2], [13], role=Role.SUB_AGENT, agent="s"),
        call(3, [3], [14], role=Role.SUB_AGENT_SUMMARY, agent="s"),
    ]
    tree = tree_with(calls)
    admitted = admit(tree, max_leaves=2, seed=0)
    rows = rows_of(tree, admitted, advantage=1.0)
    assert [(row.role, row.tokens[row.trainable].tolist()) for row in rows] == [
        (Role.MAIN, [10, 11]),
        (Role.MAIN_SUMMARY, [12]),
    ]
    assert [float(row.weight.sum()) for row in rows] == pytest.approx([2 / 3, 1 / 3])


def test_a_leaf_that_adds_nothing_costs_nothing():
    calls = [
        call(0, [1], [2, 3]),
        call(1, [1], [2], agent="other"),
        call(2, [5], [6], role=Role.SUB_AGENT, agent="s"),
    ]
    runs = [admit(tree_with(calls), max_leaves=2, seed=seed) for seed in range(30)]
    longer_first = [admitted for admitted in runs if admitted[0].call == 0]
    assert longer_first
    for admitted in longer_first:
        assert [(leaf.role, leaf.trained_tokens) for leaf in admitted] == [(Role.MAIN, 2), (Role.SUB_AGENT, 1)]


def test_draws_inside_a_role_follow_the_uncovered_tokens():
    calls = [call(0, [1], list(range(100, 190))), call(1, [2], list(range(200, 210)))]
    tree = tree_with(calls)
    long = sum(admit(tree, max_leaves=1, seed=seed)[0].call == 0 for seed in range(1000))
    assert 860 <= long <= 940


def test_auxiliary_calls_are_never_trained():
    aux = call(0, [1], [2], role=Role.AUXILIARY, exclusion=Exclusion.AUXILIARY)
    tree = tree_with([aux, call(1, [3], [4])])
    assert trained(tree) == [4]
    assert statistics_of(tree, []).leaves == {"main": 1, "auxiliary": 1}


def test_weights_average_inside_an_execution_first():
    """T = [4, 1, 0]: S = 2, so the weights are 1/8 each, 1/2, none."""
    sizes = [4, 1]
    trees = [tree_with([call(0, [1], list(range(2, 2 + size)))]) for size in sizes]
    weights = [
        (row.weight[row.trainable] / 2).tolist()
        for tree in trees
        for row in rows_of(tree, admit(tree, max_leaves=5, seed=0), advantage=1.0)
    ]
    assert weights == [[0.125] * 4, [0.5]]
    empty = tree_with([call(0, [1], [2], exclusion=Exclusion.ORPHAN)])
    assert rows_of(empty, admit(empty, max_leaves=5, seed=0), advantage=1.0) == []


def test_the_canonical_call_gives_logprobs_and_version_of_a_shared_target():
    late = call(1, [1], [2, 3], logprobs=np.array([-5, -6], np.float32), versions=(VersionRun(4, 2),))
    early = call(2, [1], [2, 3], logprobs=np.array([-7, -8], np.float32), versions=(VersionRun(3, 1), VersionRun(4, 1)))
    for order in ([late, early], [early, late]):
        row = rows_of(tree_with(order), admit(tree_with(order), max_leaves=0, seed=0), advantage=1.0)[0]
        assert row.behaviour_logprobs.tolist() == [0, -7, -8]
        assert row.versions.tolist() == [-1, 3, 4]


def test_one_id_for_two_different_calls_is_refused():
    tree = tree_with([call(0, [1], [2])])
    with pytest.raises(InvariantError, match="c0000"):
        tree.insert(call(0, [1], [3]))


def test_rendered_tokens_cannot_become_rows():
    tree = TrajectoryTree("e", is_approximate=True)
    tree.insert(call(0, [1], [2]))
    with pytest.raises(InvariantError, match="must not be trained"):
        rows_of(tree, admit(tree, max_leaves=0, seed=0), advantage=1.0)


def test_two_thousand_calls_on_one_path_of_a_million_tokens_need_memory_linear_in_unique_tokens():
    path = np.arange(1_000_000, dtype=np.int32)
    tree = TrajectoryTree("e")
    for number in range(2000):
        end = (number + 1) * 500
        tree.insert(call(number, path[: end - 100], path[end - 100 : end]))
    assert (tree.unique_tokens, tree.sampled_tokens, len(tree.candidates())) == (1_000_000, 200_000, 1)
    assert tree.size_bytes <= 12 * tree.unique_tokens
    assert len(trained(tree)) == 200_000
    again = tree_from_bytes(tree_to_bytes(tree))
    assert again.unique_tokens == 1_000_000


def test_a_context_given_as_tail_after_its_parent_is_the_same_tree():
    whole = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6]), call(2, [1, 2, 3, 9], [8])]
    delta = [
        whole[0],
        call(1, [5], [6], parent="c0000", shared=4),
        call(2, [9], [8], parent="c0001", shared=3),
    ]
    assert tree_to_bytes(tree_with(whole)) == tree_to_bytes(tree_with(delta))
    with pytest.raises(InvariantError, match="shares 9 tokens with c0000, which has 4"):
        tree_with(whole).insert(call(3, [5], [6], parent="c0000", shared=9))


# -- properties ---------------------------------------------------------------------------------------------------

small_path = st.lists(st.integers(0, 2), min_size=1, max_size=7)
drawn_call = st.tuples(
    small_path,
    st.lists(st.integers(0, 2), max_size=5),
    st.sampled_from(list(Exclusion)),
    st.sampled_from(list(Role)),
    st.sampled_from(["a", "b"]),
    st.integers(0, 2),
)


def made_calls(drawn):
    return [
        call(
            number,
            context,
            output,
            exclusion=exclusion,
            role=role,
            agent=agent,
            versions=(VersionRun(version, len(output)),),
        )
        for number, (context, output, exclusion, role, agent, version) in enumerate(drawn)
    ]


drawn_calls = st.lists(drawn_call, min_size=1, max_size=9).map(made_calls)


def targets_of(calls):
    return {
        (*each.context.tolist(), *each.output[: place + 1].tolist())
        for each in calls
        if each.exclusion is Exclusion.NONE
        for place in range(len(each.output))
    }


@given(drawn_calls)
def test_every_call_is_rebuilt_bit_for_bit(calls):
    tree = tree_from_bytes(tree_to_bytes(tree_with(calls)))
    for each in calls:
        index = tree.index_of(each.call_id)
        assert tree.context_of(index).tolist() == each.context.tolist()
        assert tree.output_of(index).tolist() == each.output.tolist()
        assert tree.calls[index].logprobs.tobytes() == each.logprobs.tobytes()
        assert token_versions(tree.calls[index])[0].tolist() == [each.versions[0].version] * len(each.output)


@given(drawn_calls)
def test_siblings_differ_in_their_first_token_and_depths_add_up(calls):
    tree = tree_with(calls)
    for node in [-1, *range(len(tree.nodes))]:
        firsts = [int(tree.nodes[child].tokens[0]) for child in tree.children_of(node)]
        assert len(set(firsts)) == len(firsts)
        for child in tree.children_of(node):
            assert tree.nodes[child].start == (tree.nodes[node].end if node >= 0 else 0)
    assert tree.unique_tokens <= tree.summed_tokens


@given(drawn_calls, st.randoms(use_true_random=False))
def test_the_order_of_insertion_does_not_matter(calls, random):
    shuffled = list(calls)
    random.shuffle(shuffled)
    one, other = tree_with(calls), tree_with(shuffled)
    assert tree_to_bytes(one) == tree_to_bytes(other)
    assert [one.calls[i].call_id for i in one.candidates()] == [other.calls[i].call_id for i in other.candidates()]
    assert sorted(trained(one, max_leaves=2)) == sorted(trained(other, max_leaves=2))


@given(drawn_calls)
def test_inserting_again_changes_nothing(calls):
    tree = tree_with(calls)
    before = tree_to_bytes(tree)
    for each in calls:
        tree.insert(each)
    assert tree_to_bytes(tree) == before


@given(drawn_calls)
def test_sampled_targets_are_the_union_of_the_calls_targets(calls):
    tree = tree_with(calls)
    found = set()
    for number, node in enumerate(tree.nodes):
        path = tree.path_tokens(number).tolist()
        found |= {tuple(path[: node.start + place + 1]) for place in np.flatnonzero(node.owners >= 0)}
    assert found == targets_of(calls)


@given(drawn_calls)
def test_without_a_cap_every_trainable_token_is_trained_exactly_once(calls):
    trainable = [each for each in calls if each.role is not Role.AUXILIARY or each.exclusion is not Exclusion.NONE]
    tree = tree_with(trainable)
    rows = rows_of(tree, admit(tree, max_leaves=0, seed=1), advantage=1.0)
    targets = [tuple(row.tokens[: place + 1].tolist()) for row in rows for place in np.flatnonzero(row.trainable)]
    assert sorted(targets) == sorted(targets_of(trainable))
    assert sum(float(row.weight.sum()) for row in rows) == pytest.approx(1.0 if targets else 0.0, abs=1e-5)


@given(drawn_calls, st.integers(1, 3))
def test_captured_is_trained_plus_masked_by_reason(calls, max_leaves):
    calls = [each for each in calls if each.role is not Role.AUXILIARY]
    tree = tree_with(calls)
    admitted = admit(tree, max_leaves=max_leaves, seed=3)
    figures = statistics_of(tree, admitted)
    captured = sum(len(each.output) for each in calls)
    excluded = sum(len(each.output) for each in calls if each.exclusion is not Exclusion.NONE)
    not_admitted = figures.sampled_tokens - figures.trained_tokens
    assert captured == figures.trained_tokens + not_admitted + figures.duplicate_tokens + excluded
    assert len(admitted) <= max_leaves
    rows = rows_of(tree, admitted, advantage=1.0)
    assert sum(row.trained_tokens for row in rows) == figures.trained_tokens


@given(drawn_calls, st.data())
def test_the_tree_of_a_subset_is_a_subtree(calls, data):
    some = data.draw(st.lists(st.sampled_from(calls), unique_by=lambda each: each.call_id))

    def paths(tree):
        return {
            tuple(tree.path_tokens(number)[: place + 1].tolist())
            for number, node in enumerate(tree.nodes)
            for place in range(node.start, node.end)
        }

    assert paths(tree_with(some)) <= paths(tree_with(calls))


def test_the_sum_of_executions_adds_counts_and_joins_leaves_by_role():
    one = tree_with([call(0, [1], [2])])
    other = tree_with([call(0, [1], [2, 3]), call(1, [4], [5], role=Role.SUB_AGENT)])
    total = total_of([statistics_of(tree, admit(tree, max_leaves=5, seed=0)) for tree in (one, other)])
    assert (total.calls, total.summed_tokens, total.trained_tokens) == (3, 7, 4)
    assert total.leaves == {"main": 2, "sub-agent": 1}
    assert [(leaf.role.value, leaf.trained_tokens) for leaf in total.admitted] == [("main", 3), ("sub-agent", 1)]
