"""Tokens of paths are what was put on them, wherever they fork."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proxy.paths import PathTokens


def array(tokens):
    return np.array(tokens, np.int32)


@given(st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=30))
def test_every_path_keeps_its_tokens_while_others_grow_from_any_place(growths):
    paths, known, views = PathTokens(), [(None, [])], []
    for place, added in growths:
        before, tokens = known[place % len(known)]
        path = paths.grown(before, array(added))
        known.append((path, [*tokens, *added]))
        views.append((path.tokens(), [*tokens, *added]))
    for path, tokens in known[1:]:
        assert path.tokens().tolist() == tokens
        assert path.length == len(tokens)
    for view, tokens in views:
        assert view.tolist() == tokens


def test_a_path_that_only_grows_is_handed_out_without_a_copy():
    paths = PathTokens()
    path = paths.grown(None, array([1]))
    for token in range(2000):
        path = paths.grown(path, array([token]))
    assert path.tokens().base is path.buffer.data
    assert path.tokens().dtype == np.int32
