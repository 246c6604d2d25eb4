from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from opengyre.core.chat import Message, Tool, ToolCall
from opengyre.core.types import Role, Verdict, VersionRun
from opengyre.trajectory.admission import admit
from opengyre.trajectory.match import PathIndex
from opengyre.trajectory.rows import rows_of
from opengyre.trajectory.tree import TrajectoryTree, TreeCall


def user(text):
    return Message(role="user", content=text)


def says(text="", reasoning="", *calls):
    return Message(role="assistant", content=text, reasoning=reasoning, tool_calls=calls)


def calls(arguments, call_id="call_0", name="write"):
    return ToolCall(id=call_id, name=name, arguments=arguments)


def result(text, call_id="call_0"):
    return Message(role="tool", content=text, tool_call_id=call_id)


def index_with(*turns, tools=()):
    """Store calls; each turn is (call id, request messages, reply)."""
    index = PathIndex()
    for call_id, messages, reply in turns:
        index.add(call_id, index.match(messages, tools).keys, reply)
    return index


def test_echoed_arguments_with_other_space_and_order_are_restored():
    index = index_with(("c0", [user("go")], says("", "", calls('{"a":1,"b":[2]}'))))
    echo = says("", "", calls('{"b": [2], "a": 1}'))
    match = index.match([user("go"), echo, result("ok")], [])
    assert (match.call_id, match.covered, match.verdict) == ("c0", 2, Verdict.RESTORED)
    assert match.first_difference == 2


def test_a_tool_that_is_renamed_on_echo_is_restored():
    index = index_with(("c0", [user("go")], says("", "", calls("{}", name="Task"))))
    match = index.match([user("go"), says("", "", calls("{}", name="Agent")), result("ok")], [])
    assert match.call_id == "c0"


def test_other_arguments_under_the_same_id_are_a_rewritten_history():
    index = index_with(("c0", [user("go")], says("", "", calls('{"a":1}'))))
    match = index.match([user("go"), says("", "", calls('{"a":2}')), result("ok")], [])
    assert (match.call_id, match.verdict, match.first_difference) == (None, Verdict.REWRITTEN, 1)


def test_ids_that_collide_across_sub_agents_are_restored_from_their_own_path():
    index = index_with(
        ("c0", [user("count")], says("", "", calls('{"what":"files"}'))),
        ("c1", [user("list")], says("", "", calls('{"what":"files"}'))),
    )
    for prompt, expected in (("count", "c0"), ("list", "c1")):
        echo = says("", "", calls('{"what": "files"}'))
        assert index.match([user(prompt), echo, result("3")], []).call_id == expected


def test_two_replies_that_fit_equally_well_are_not_guessed_between():
    index = index_with(("c0", [user("go")], says("yes ")), ("c1", [user("go")], says("yes  ")))
    match = index.match([user("go"), says("yes"), user("on")], [])
    assert (match.call_id, match.verdict) == (None, Verdict.REWRITTEN)
    assert index.match([user("go"), says("yes "), user("on")], []).call_id == "c0"


def test_text_is_compared_exactly_first_then_without_surrounding_space():
    index = index_with(("c0", [user("go")], says("\n I'll start. \n", "hm\n\n")))
    assert index.match([user("go"), says("I'll start.", "hm"), user("on")], []).call_id == "c0"


def test_stripped_thinking_is_a_fork_with_or_without_tool_calls():
    for reply, echo in (
        (says("yes", "let me think"), says("yes")),
        (says("", "let me think", calls("{}")), says("", "", calls("{}"))),
    ):
        index = index_with(("c0", [user("go")], reply))
        assert index.match([user("go"), echo, user("on")], []).verdict is Verdict.REWRITTEN


def test_other_tools_or_another_system_text_are_another_path():
    index = index_with(("c0", [Message(role="system", content="s"), user("go")], says("yes")), tools=[Tool(name="a")])
    asked = [Message(role="system", content="s"), user("go"), says("yes"), user("on")]
    assert index.match(asked, [Tool(name="a")]).call_id == "c0"
    assert index.match(asked, [Tool(name="b")]).verdict is Verdict.RENDERED
    assert index.match([Message(role="system", content="t"), *asked[1:]], [Tool(name="a")]).call_id is None


def test_what_precedes_a_rewritten_reply_is_still_restored():
    first = [user("go")]
    second = [*first, says("one"), user("more")]
    index = index_with(("c0", first, says("one")), ("c1", second, says("two")))
    match = index.match([*second, says("changed"), user("on")], [])
    assert (match.call_id, match.covered, match.verdict) == ("c0", 2, Verdict.REWRITTEN)


def test_a_synthetic_assistant_message_at_a_new_root_is_rendered_not_rewritten():
    index = index_with(("c0", [user("go")], says("one")))
    match = index.match([user("summary of before"), says("Got it."), user("continue")], [])
    assert (match.call_id, match.verdict) == (None, Verdict.RENDERED)


@given(st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4), st.booleans()), min_size=1, max_size=8))
def test_every_honest_continuation_is_restored_to_its_last_call(turns):
    index, history = PathIndex(), []
    for number, (asked, answered, has_call) in enumerate(turns):
        history.append(user(asked))
        match = index.match(history, [])
        assert match.covered == len(history) - 1
        assert match.call_id == (f"c{number - 1}" if number else None)
        reply = says(answered, "", *((calls("{}", f"call_{number}"),) if has_call else ()))
        assert index.add(f"c{number}", match.keys, reply) not in match.keys
        history.append(reply)


def stand_in_call(number, context, sampled):
    return TreeCall(
        call_id=str(number),
        request_id=str(number),
        agent="",
        role=Role.MAIN,
        context=np.array(context, np.int32),
        output=np.array(sampled, np.int32),
        logprobs=np.full(len(sampled), -1, np.float32),
        versions=(VersionRun(0, len(sampled)),),
    )


def sampled_places(tree):
    """Tokens that are trained when no leaf is left out."""
    rows = rows_of(tree, admit(tree, max_leaves=0, seed=0), advantage=1.0)
    return [int(token) for row in rows for token in row.tokens[row.trainable]]


EXPECTED = {
    # session: restored, rendered, rewritten; the table in docs/trajectory.md
    "claude-code/s1d": (9, 4, 0),
    "claude-code/s2": (9, 3, 2),
    "codex/s1e": (8, 6, 0),
    "gemini-cli/s1d": (2, 2, 7),
    "mini-swe-agent/s1": (6, 1, 0),
    "mini-swe-agent/s2": (8, 1, 0),
    "openai-agents/s1": (6, 1, 0),
    "opencode/s1e": (7, 7, 0),
    "pi/s1b": (7, 4, 0),
    "pi/s2": (6, 1, 2),
    "pydantic-ai/s1": (6, 1, 0),
    "qwen-code/s1": (8, 5, 0),
    "qwen-code/s2": (8, 3, 0),
    "smolagents/s1": (3, 6, 3),
}


def test_every_recorded_session_is_matched_and_never_encodes_a_sampled_token_again(session, session_name):
    """A stand-in tokenizer: a message is one token of its own, a sampled reply three fresh ones."""
    requests = session(session_name)
    index, tree, paths, fresh = PathIndex(), TrajectoryTree(session_name), {}, iter(range(10**6))
    verdicts = []
    for request in requests:
        match = index.match(request.messages, request.tools)
        verdicts.append(match.verdict)
        head = paths[match.call_id] if match.call_id else []
        context = head + [next(fresh) for _ in request.messages[match.covered :]]
        if match.call_id is not None:
            assert context[: len(head)] == paths[match.call_id]
            assert request.messages[match.covered - 1].role == "assistant"
        if request.reply is not None:
            sampled = [next(fresh) for _ in range(3)]
            index.add(str(request.number), match.keys, request.reply)
            paths[str(request.number)] = context + sampled
            tree.insert(stand_in_call(request.number, context, sampled))
    assert verdicts[0] is Verdict.RENDERED
    assert tree.sampled_tokens == 3 * len(paths) == len(sampled_places(tree))
    counts = Counter(verdict.value for verdict in verdicts)
    assert (counts["restored"], counts["rendered"], counts["rewritten"]) == EXPECTED[session_name]


def test_a_history_that_was_seen_before_one_of_its_messages_was_sampled_is_restored_afterwards():
    index, history = PathIndex(), [user("a"), says("x"), user("b")]
    assert index.match(history, []).verdict is Verdict.RENDERED
    index.add("c0", index.match(history[:1], []).keys, says("x"))
    assert index.match(history, []).call_id == "c0"
    index.add("c1", index.match(history[:1], []).keys, says("x "))
    assert index.match(history, []).call_id == "c0"
    index.add("c2", index.match(history[:1], []).keys, says("x", "thought"))
    assert index.match([user("a"), says("x", "thought"), user("b")], []).call_id == "c2"


MESSAGES = st.sampled_from([user("a"), says("x"), says("x ")])
REQUESTS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(MESSAGES, max_size=3), st.sampled_from([None, says("x"), says("y")])),
    min_size=3,
    max_size=12,
)


@given(REQUESTS)
def test_a_match_does_not_depend_on_which_requests_were_matched_before(requests):
    """Histories that are cut back, forked and answered twice match as in an index that only holds the answers."""
    kept, history, added = PathIndex(), [], []
    for number, (head, tail, reply) in enumerate(requests):
        history = [*history[: head if head < 3 else len(history)], *tail]
        anew = PathIndex()
        for keys, each, call_id in added:
            anew.add(call_id, keys, each)
        match = kept.match(history, [])
        assert match == anew.match(history, [])
        if reply is not None:
            added.append((match.keys, reply, f"c{number}"))
            kept.add(f"c{number}", match.keys, reply)
            history = [*history, reply]
