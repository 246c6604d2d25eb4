"""Values that are kept from one history to the next are those that would be computed anew."""

from hypothesis import given
from hypothesis import strategies as st

from opengyre.core.chat import Message
from opengyre.trajectory.heads import HISTORIES_KEPT, Heads

HISTORIES = st.lists(st.lists(st.sampled_from("abc"), max_size=6), min_size=1, max_size=20)


def texts(letters):
    return [Message(role="user", content=letter) for letter in letters]


def so_far(message, before):
    return (before or "") + message.content


@given(HISTORIES)
def test_the_values_of_a_history_do_not_depend_on_those_before_it(histories):
    heads = Heads(so_far)
    for letters in histories:
        assert heads.values(texts(letters)) == ["".join(letters[: end + 1]) for end in range(len(letters))]


@given(HISTORIES, st.sampled_from(["a", "ab", "abc"]))
def test_behind_a_value_that_is_cut_all_is_computed_anew(histories, ending):
    computed = []

    def compute(message, before):
        computed.append(so_far(message, before))
        return computed[-1]

    heads = Heads(compute)
    for letters in histories:
        heads.values(texts(letters))
    heads.cut(lambda value: value == ending)
    computed.clear()
    longer = [*ending, "a", "b"]
    assert heads.values(texts(longer)) == ["".join(longer[: end + 1]) for end in range(len(longer))]
    assert computed[-2:] == ["".join(longer[:-1]), "".join(longer)]


def test_agents_that_take_turns_are_each_gone_on_with():
    computed = []

    def compute(message, before):
        computed.append(message.content)
        return so_far(message, before)

    heads = Heads(compute)
    for turn in range(1, 6):
        for agent in range(HISTORIES_KEPT):
            heads.values(texts([str(agent), *"x" * turn]))
    assert len(computed) == HISTORIES_KEPT * 6  # each message once
