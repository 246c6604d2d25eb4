from opengyre.run.bench_trees import build, make_execution
from opengyre.trajectory.admission import admit


def test_the_measured_execution_has_the_shape_of_the_budget():
    calls = make_execution()
    tree = build(calls)
    assert (len(calls), tree.summed_tokens, tree.unique_tokens) == (195, 2_611_200, 119_550)
    assert (tree.sampled_tokens, max(len(call.context) + len(call.output) for call in calls)) == (23_400, 25_830 + 120)
    assert tree.size_bytes <= 12 * tree.unique_tokens
    assert sum(leaf.trained_tokens for leaf in admit(tree, max_leaves=0, seed=0)) == 23_400
