import numpy as np
import pytest

from opengyre.core.chat import Message
from opengyre.core.errors import InvariantError
from opengyre.core.types import Call, Delivered, Finish, Role, Sampling, SamplingLaw, Verdict, VersionRun
from opengyre.trajectory.admission import admit
from opengyre.trajectory.match import PathIndex
from opengyre.trajectory.recorded import contexts_of, tree_of, vanished_calls
from opengyre.trajectory.statistics import statistics_of


def recorded(number, tail, output, **more):
    values = {
        "execution_id": "e",
        "call_id": f"c{number}",
        "seq": number,
        "request_id": f"r{number}",
        "dialect": "chat",
        "agent_key": "main",
        "role": Role.MAIN,
        "role_evidence": "",
        "verdict": Verdict.RESTORED,
        "first_difference": -1,
        "parent_call_id": None,
        "shared": 0,
        "tail": np.array(tail, np.int32),
        "output": np.array(output, np.int32),
        "behaviour_logprobs": np.full(len(output), -1, np.float32),
        "versions": (VersionRun(0, len(output)),),
        "sampling": Sampling(),
        "finish": Finish.STOP,
        "delivered": Delivered.COMPLETE,
    }
    return Call(**{**values, **more})


def test_contexts_are_expanded_from_their_parents():
    calls = [
        recorded(0, [1, 2], [3, 4]),
        recorded(1, [5], [6], parent_call_id="c0", shared=4),
        recorded(2, [], [7], parent_call_id="c1", shared=3),
    ]
    assert [context.tolist() for context in contexts_of(calls)] == [[1, 2], [1, 2, 3, 4, 5], [1, 2, 3]]
    assert tree_of("e", calls).context_of(1).tolist() == [1, 2, 3, 4, 5]


def test_a_parent_that_is_missing_or_too_short_breaks_an_invariant():
    with pytest.raises(InvariantError, match="shares 2 tokens with c9, which has 0"):
        tree_of("e", [recorded(0, [1], [2], parent_call_id="c9", shared=2)])
    with pytest.raises(InvariantError, match="shares 5 tokens with c0, which has 2"):
        list(contexts_of([recorded(0, [1], [2]), recorded(1, [3], [4], parent_call_id="c0", shared=5)]))


def test_each_reason_makes_an_output_context_and_is_counted():
    calls = [
        recorded(0, [1], [2], delivered=Delivered.HUNG_UP),
        recorded(1, [3], [4], sampling=Sampling(law=SamplingLaw.TRUNCATED)),
        recorded(2, [5], [6, 7], behaviour_logprobs=np.array([-1], np.float32)),
        recorded(3, [8], [9], role=Role.AUXILIARY),
        recorded(4, [10], [11, 12], behaviour_logprobs=np.array([-1, np.nan], np.float32)),
        recorded(5, [13], [14], delivered=Delivered.UNKNOWN),
    ]
    tree = tree_of("e", calls)
    figures = statistics_of(tree, admit(tree, max_leaves=0, seed=0))
    assert (figures.orphan, figures.truncated, figures.poisoned, figures.auxiliary) == (1, 1, 2, 1)
    assert (figures.sampled_tokens, figures.trained_tokens) == (1, 1)


def user(text):
    return Message(role="user", content=text)


def says(text, reasoning=""):
    return Message(role="assistant", content=text, reasoning=reasoning)


def conversation(*turns):
    """Calls of one agent from (request messages, reply, more)."""
    index, calls = PathIndex(), []
    for number, (messages, reply, more) in enumerate(turns):
        keys = index.match(messages, []).keys
        call = recorded(number, [1], [2], message_keys=(*keys, index.add(f"c{number}", keys, reply)), **more)
        calls.append(call)
    return calls


GO, ERROR = user("go"), user("that was no valid action")


def test_an_answer_that_its_agent_left_out_has_vanished():
    calls = conversation(([GO], says("what?"), {}), ([GO, ERROR], says("ls"), {}))
    assert vanished_calls(calls) == {"c0"}


def test_of_two_answers_to_one_request_the_one_that_history_keeps_stays():
    history = [GO, says("second"), user("more")]
    calls = conversation(([GO], says("first"), {}), ([GO], says("second"), {}), (history, says("end"), {}))
    assert vanished_calls(calls) == {"c0"}


def test_a_stripped_thought_makes_no_answer_vanish():
    history = [GO, says("ls"), user("a.py")]
    calls = conversation(([GO], says("ls", "let me look"), {}), (history, says("end"), {}))
    assert vanished_calls(calls) == set()


def test_the_last_answer_and_one_before_a_compaction_have_not_vanished():
    calls = conversation(([GO], says("ls"), {}), ([user("summary: listed")], says("end"), {}))
    assert vanished_calls(calls) == set()


def test_another_agent_that_starts_alike_decides_nothing():
    calls = conversation(([GO], says("ls"), {}), ([GO, ERROR], says("ls"), {"agent_key": "other"}))
    assert vanished_calls(calls) == set()


def test_an_answer_that_was_not_delivered_is_an_orphan_not_vanished():
    calls = conversation(([GO], says("x"), {"delivered": Delivered.HUNG_UP}), ([GO, ERROR], says("ls"), {}))
    assert vanished_calls(calls) == set()
    assert statistics_of(tree_of("e", calls), []).orphan == 1
