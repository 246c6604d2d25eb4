import string

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from opengyre.core.chat import Message, Tool, ToolCall
from opengyre.core.types import Role
from opengyre.execute.harness import load_harness, shipped_harnesses
from opengyre.trajectory.marks import Mark
from opengyre.trajectory.roles import RoleTracker


def judged(requests, marks=None):
    tracker = RoleTracker()
    for request in requests:
        mark = marks.read(request.path, request.headers, request.body) if marks else None
        tracker.observe(str(request.number), request.messages, request.tools, mark)
        if request.reply is not None:
            tracker.answered(str(request.number), request.reply)
    tracker.finish()
    return [tracker.guess_of(str(request.number)) for request in requests]


def differences(requests, guesses):
    return [
        (request.number, guess.role.value, request.truth.value, guess.evidence)
        for request, guess in zip(requests, guesses, strict=True)
        if not request.is_fault and guess.role is not request.truth
    ]


def test_roles_equal_the_ground_truth_from_the_requests_alone(session, session_name):
    requests = session(session_name)
    assert differences(requests, judged(requests)) == []


def test_roles_equal_the_ground_truth_from_what_the_harness_marks(session, session_name):
    requests = session(session_name)
    name = session_name.split("/")[0]
    marks = load_harness(name).roles if name in shipped_harnesses() else None
    assert differences(requests, judged(requests, marks)) == []


def renamed(requests):
    """Rename system texts, tools, agents and ids consistently."""
    table = str.maketrans(string.ascii_letters, string.ascii_letters[7:] + string.ascii_letters[:7])

    def message(each):
        calls = tuple(
            ToolCall(id=call.id.translate(table), name=call.name.translate(table), arguments=call.arguments)
            for call in each.tool_calls
        )
        content = each.content.translate(table) if each.role in ("system", "developer") else each.content
        ids = {"tool_calls": calls, "tool_call_id": each.tool_call_id.translate(table)}
        return msgspec.structs.replace(each, content=content, name=each.name.translate(table), **ids)

    for request in requests:
        request.messages = [message(each) for each in request.messages]
        request.tools = [Tool(name=tool.name.translate(table)) for tool in request.tools]
        request.reply = message(request.reply) if request.reply is not None else None
    return requests


def test_roles_do_not_hang_on_names(session, session_name):
    requests = renamed(session(session_name))
    assert differences(requests, judged(requests)) == []


def said(role, content="", **more):
    return Message(role=role, content=content, **more)


def calling(name, arguments, number=0):
    return said("assistant", tool_calls=(ToolCall(id=f"call_{number}", name=name, arguments=arguments),))


SHELL = [Tool(name="shell")]


def test_a_title_call_that_arrives_first_is_auxiliary_and_the_next_root_is_main():
    tracker = RoleTracker()
    title = tracker.observe("c0", [said("system", "titles"), said("user", "name: fix the bug")], [])
    tracker.answered("c0", said("assistant", "Bug fix"))
    main = tracker.observe("c1", [said("system", "agent"), said("user", "fix the bug")], SHELL)
    assert (title.role, main.role) == (Role.AUXILIARY, Role.MAIN)
    assert tracker.finish() == []


def test_a_title_call_of_a_named_agent_is_auxiliary_also_when_it_arrives_second():
    tracker, mark = RoleTracker(), Mark(agent="session-1")
    main = tracker.observe("c0", [said("system", "agent"), said("user", "fix the bug in the parser")], SHELL, mark)
    asked = [said("system", "titles"), said("user", "name this: fix the bug in the parser")]
    title = tracker.observe("c1", asked, [], mark)
    assert (main.role, title.role) == (Role.MAIN, Role.AUXILIARY)
    assert tracker.finish() == []


def test_two_sub_agents_with_the_same_prompt_are_two_agents():
    tracker = RoleTracker()
    tracker.observe("c0", [said("user", "count everything")], SHELL)
    spawn = '{"prompt": "count the files"}'
    both = tuple(ToolCall(id=f"call_{n}", name="spawn", arguments=spawn) for n in range(2))
    tracker.answered("c0", said("assistant", tool_calls=both))
    one = tracker.observe("c1", [said("system", "sub"), said("user", "count the files")], SHELL)
    tracker.answered("c1", calling("shell", "{}", 5))
    # byte for byte the same request: a second agent cannot be told from a retry, both are sub-agents
    other = tracker.observe("c2", [said("system", "sub"), said("user", "count the files")], SHELL)
    assert (one.role, other.role) == (Role.SUB_AGENT, Role.SUB_AGENT)


def test_a_memory_agent_that_reads_the_whole_history_is_auxiliary():
    tracker = RoleTracker()
    history = [said("system", "agent"), said("user", "fix the bug")]
    tracker.observe("c0", history, SHELL)
    tracker.answered("c0", said("assistant", "done, it was an off-by-one"))
    history = [said("system", "remember"), *history[1:], said("assistant", "done, it was an off-by-one")]
    memory = tracker.observe("c1", [*history, said("user", "what should be kept?")], [Tool(name="remember")])
    assert memory.role is Role.AUXILIARY


def test_an_agent_without_any_tools_becomes_main_at_the_end_at_latest():
    tracker = RoleTracker()
    assert tracker.observe("c0", [said("user", "what is 2+2?")], []).role is Role.AUXILIARY
    assert [(guess.call_id, guess.role) for guess in tracker.finish()] == [("c0", Role.MAIN)]


def test_a_plan_that_the_history_takes_in_belongs_to_its_agent():
    tracker = RoleTracker()
    tracker.observe("c0", [said("user", "make a plan for the task")], [])
    tracker.answered("c0", said("assistant", "1. look at the files 2. fix them"))
    taken_in = said("assistant", "My plan: 1. look at the files 2. fix them")
    tracker.observe("c1", [said("system", "agent"), said("user", "fix it"), taken_in, said("user", "go")], SHELL)
    assert [(guess.call_id, guess.role) for guess in tracker.revisions()] == [("c0", Role.MAIN)]


def test_a_summary_is_known_by_the_beginning_that_holds_it():
    tracker = RoleTracker()
    tracker.observe("c0", [said("system", "agent"), said("user", "fix it")], SHELL)
    tracker.answered("c0", calling("shell", '{"cmd": "ls"}'))
    history = [said("system", "agent"), said("user", "fix it"), calling("shell", '{"cmd": "ls"}')]
    asked = [*history, said("tool", "a.py", tool_call_id="call_0"), said("user", "summarise your work")]
    assert tracker.observe("c1", asked, SHELL).role is Role.MAIN
    tracker.answered("c1", said("assistant", "I listed the files; next I fix a.py"))
    beginning = said("user", "So far: I listed the files; next I fix a.py")
    assert tracker.observe("c2", [said("system", "agent"), beginning], SHELL).role is Role.MAIN
    assert [(guess.call_id, guess.role) for guess in tracker.revisions()] == [("c1", Role.MAIN_SUMMARY)]


def test_a_summary_after_which_nothing_comes_is_known_by_an_earlier_one():
    tracker, tools = RoleTracker(), [Tool(name="shell")]
    asks = said("system", "summarise what is given to you")
    tracker.observe("m1", [said("system", "s"), said("user", "do the first part of it")], tools)
    tracker.answered("m1", said("assistant", "I did the first part."))
    tracker.observe("c1", [asks, said("user", "<conversation>one</conversation>")], [])
    tracker.answered("c1", said("assistant", "The first part is done."))
    tracker.observe(
        "m2", [said("system", "s"), said("user", "Before: The first part is done."), said("user", "go")], tools
    )
    tracker.answered("m2", said("assistant", "And the second."))
    tracker.observe("c2", [asks, said("user", "<conversation>two</conversation>")], [])
    tracker.answered("c2", said("assistant", "Both parts are done."))
    tracker.finish()
    assert [tracker.guess_of(name).role.value for name in ("m1", "c1", "m2", "c2")] == [
        "main",
        "main-summary",
        "main",
        "main-summary",
    ]


def test_an_explicit_mark_beats_every_other_evidence():
    tracker = RoleTracker()
    mark = Mark(agent="s1", is_sub_agent=True, is_compaction=True)
    guess = tracker.observe("c0", [said("user", "anything")], SHELL, mark)
    assert (guess.role, guess.agent, guess.confidence) == (Role.SUB_AGENT_SUMMARY, "s1", 1.0)


def test_a_refused_compaction_is_known_by_one_that_succeeds_later():
    system, listed = said("system", "agent"), said("tool", "a.py", tool_call_id="call_0")
    history = [system, said("user", "fix it"), calling("shell", "{}"), listed]
    tracker = RoleTracker()
    tracker.observe("c0", history[:2], SHELL)
    tracker.answered("c0", calling("shell", "{}"))
    tracker.observe("c1", [*history, said("user", "summarise now")], SHELL)
    tracker.answered("c1", calling("shell", "{}", 1))
    tracker.observe("c2", history, SHELL)
    tracker.answered("c2", calling("shell", "{}", 2))
    longer = [*history, calling("shell", "{}", 2), said("tool", "b.py", tool_call_id="call_2")]
    tracker.observe("c3", [*longer, said("user", "summarise now")], SHELL)
    tracker.answered("c3", said("assistant", "I looked at both of the files"))
    tracker.observe("c4", [system, said("user", "Before: I looked at both of the files")], SHELL)
    found = {guess.call_id: guess.role for guess in tracker.revisions()}
    assert found == {"c1": Role.MAIN_SUMMARY, "c3": Role.MAIN_SUMMARY}


def test_a_memory_agent_stays_auxiliary_when_it_goes_on():
    tracker = RoleTracker()
    history = [said("user", "fix the bug"), said("assistant", "done, it was an off-by-one")]
    tracker.observe("c0", [said("system", "agent"), *history[:1]], SHELL)
    tracker.answered("c0", history[1])
    asked = [said("system", "remember"), *history, said("user", "what should be kept?")]
    tracker.observe("c1", asked, [Tool(name="remember")])
    tracker.answered("c1", calling("remember", "{}"))
    longer = [*asked, calling("remember", "{}"), said("tool", "kept", tool_call_id="call_0")]
    assert tracker.observe("c2", longer, [Tool(name="remember")]).role is Role.AUXILIARY
    assert tracker.revisions() == []


texts = st.sampled_from(
    ["", "go", "count the files now", "a long enough line of text", "first\nthen a second long line"]
)
drawn_message = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=texts,
    tool_calls=st.lists(
        st.builds(
            ToolCall,
            id=st.sampled_from(["", "c1"]),
            name=st.just("f"),
            arguments=st.sampled_from(["{", '{"p": "count the files now"}']),
        ),
        max_size=1,
    ).map(tuple),
)
drawn_request = st.tuples(
    st.lists(drawn_message, max_size=5),
    st.booleans(),
    st.one_of(st.none(), drawn_message),
    st.sampled_from(["", "a", "b"]),
)


@given(st.lists(drawn_request, max_size=10))
def test_any_sequence_of_requests_is_judged_and_revisions_agree_with_the_last_guess(requests):
    tracker, told = RoleTracker(), {}
    for number, (messages, has_tools, reply, agent) in enumerate(requests):
        mark = Mark(agent=agent) if agent else None
        told[str(number)] = tracker.observe(str(number), messages, SHELL if has_tools else [], mark)
        told |= {guess.call_id: guess for guess in tracker.revisions()}
        if reply is not None:
            tracker.answered(str(number), reply)
    told |= {guess.call_id: guess for guess in tracker.finish()}
    for call_id, guess in told.items():
        final = tracker.guess_of(call_id)
        assert (guess.role, guess.agent) == (final.role, final.agent)
        assert 0.0 < final.confidence <= 1.0
        assert final.evidence
    assert not requests or any(guess.role is not Role.AUXILIARY for guess in told.values())
