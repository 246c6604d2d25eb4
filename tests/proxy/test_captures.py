"""Every request and every answer of the recorded sessions of ten harnesses is read."""

import json

import msgspec
import pytest

from opengyre.core.types import Verdict
from opengyre.trajectory.match import PathIndex

SESSIONS = {
    "claude-code/s1d": 13,
    "claude-code/s2": 14,
    "codex/s1e": 14,
    "gemini-cli/s1d": 11,
    "mini-swe-agent/s1": 7,
    "mini-swe-agent/s2": 9,
    "openai-agents/s1": 7,
    "opencode/s1e": 14,
    "pi/s1b": 11,
    "pi/s2": 9,
    "pydantic-ai/s1": 7,
    "qwen-code/s1": 13,
    "qwen-code/s2": 11,
    "smolagents/s1": 12,
}
VERBATIM = ("codex/s1e", "openai-agents/s1", "mini-swe-agent/s1", "mini-swe-agent/s2")
ORDER_CHANGES = ("claude-code/s1d", "claude-code/s2", "pydantic-ai/s1", "opencode/s1e")
INVALID = "invalid"


def delivered(lines):
    return [dialect.parse_response(line["response"]) for dialect, line in lines if line["status"] == 200]


def echoed(lines):
    """Return every assistant message of every request."""
    return [
        message
        for dialect, line in lines
        for message in dialect.parse_request(line["request"]).messages
        if message.role == "assistant"
    ]


def ids_of(message):
    return tuple(call.id for call in message.tool_calls)


def with_parsed_arguments(message):
    """Return what has to be equal in an echo: text, thought, ids, names, arguments without key order and spaces."""
    return message.content, message.reasoning, [(c.id, c.name, parsed(c.arguments)) for c in message.tool_calls]


def parsed(text):
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@pytest.mark.parametrize("name", SESSIONS)
def test_every_request_and_answer_is_read(made, name):
    lines = made.read_capture(name)
    assert len(lines) == SESSIONS[name]
    for dialect, line in lines:
        request = dialect.parse_request(line["request"])
        assert request.messages
        assert request.messages[-1].content or request.messages[-1].role == "tool"
        assert request.stream is bool(line["request"].get("stream", False))
        offered = [tool for tool in line["request"].get("tools") or () if tool.get("type") != "web_search"]
        assert bool(request.tools) is bool(offered)
        for message in request.messages:
            assert message.role in ("system", "developer", "user", "assistant", "tool")
            assert (message.role == "tool") is bool(message.tool_call_id)
        if line["status"] == 200:
            message = dialect.parse_response(line["response"])
            assert message.content or message.reasoning or message.tool_calls


@pytest.mark.parametrize("name", VERBATIM)
def test_an_echoed_answer_equals_the_delivered_one_byte_for_byte(made, name):
    lines = made.read_capture(name)
    answers = {ids_of(message): message for message in delivered(lines) if message.tool_calls}
    echoes = [message for message in echoed(lines) if message.tool_calls]
    assert echoes
    for message in echoes:
        answer = answers[ids_of(message)]
        assert message == msgspec.structs.replace(answer, reasoning=message.reasoning)
        assert message.reasoning == answer.reasoning


@pytest.mark.parametrize("name", ORDER_CHANGES)
def test_an_echoed_answer_equals_the_delivered_one_but_for_key_order_and_spaces(made, name):
    lines = made.read_capture(name)
    answers = {ids_of(message): message for message in delivered(lines) if message.tool_calls}
    echoes = [message for message in echoed(lines) if message.tool_calls and message.tool_calls[0].name != INVALID]
    assert echoes
    for message in echoes:
        assert with_parsed_arguments(message) == with_parsed_arguments(answers[ids_of(message)])


def test_arguments_of_claude_code_are_the_text_that_was_streamed(made):
    lines = made.read_capture("claude-code/s2")
    for dialect, line in lines:
        if line["status"] == 200:
            calls = dialect.parse_response(line["response"]).tool_calls
            assert [call.arguments for call in calls] == line["response"].get("_raw_tool_args", [])


def test_arguments_that_claude_code_could_not_read_come_back_raw(made):
    lines = made.read_capture("claude-code/s2")
    texts = {call.arguments for message in echoed(lines) for call in message.tool_calls}
    assert '{"command": "echo bad", "description": "unterminated' in texts


def test_the_client_header_of_claude_code_is_not_part_of_the_prompt(made):
    for dialect, line in made.read_capture("claude-code/s1d"):
        assert "x-anthropic-billing-header" in json.dumps(line["request"]["system"])
        (system,) = [m for m in dialect.parse_request(line["request"]).messages if m.role == "system"]
        assert "x-anthropic-billing-header" not in system.content


def test_a_compaction_text_behind_tool_results_is_a_user_message_of_its_own(made):
    lines = made.read_capture("claude-code/s1d")
    compactions = [(d, line) for d, line in lines if line["mock_kind"] == "compact"]
    assert len(compactions) == 2
    for dialect, line in compactions:
        roles = [message.role for message in dialect.parse_request(line["request"]).messages]
        assert roles[-2:] == ["tool", "user"]


def test_agent_tools_in_a_namespace_of_codex_are_tools_and_its_search_is_left_out(made):
    dialect, line = made.read_capture("codex/s1e")[0]
    request = dialect.parse_request(line["request"])
    names = [tool.name for tool in request.tools]
    assert "spawn_agent" in names
    assert request.wires["spawn_agent"].namespace == "multi_agent_v1"
    assert "web_search" not in names
    assert len(names) == len(set(names)) == 12


def test_stop_texts_of_smolagents_are_read_and_do_not_cut_the_law_down(made):
    lines = made.read_capture("smolagents/s1")
    requests = [dialect.parse_request(line["request"]) for dialect, line in lines]
    assert requests[0].stop == ("<end_plan>",)
    assert not requests[0].truncated_law
    assert requests[1].stop == ("Observation:", "Calling tools:")
    assert requests[1].tool_choice == "required"
    assert requests[1].truncated_law


def test_results_of_gemini_find_their_calls_with_and_without_ids(made):
    for dialect, line in made.read_capture("gemini-cli/s1d"):
        waiting = set()
        for message in dialect.parse_request(line["request"]).messages:
            if message.role == "assistant":
                waiting = {call.id for call in message.tool_calls}
            elif message.role == "tool":
                assert message.tool_call_id in waiting
                waiting.remove(message.tool_call_id)


REWRITES = {
    "gemini-cli/s1d": 5,
    "pi/s2": 2,
    "smolagents/s1": 3,
}
"""Calls before whose end the harness itself rewrote an answer: dropped thoughts, repaired JSON, calls told as text."""


def raw_history(line):
    """Return the messages as captured, without the cache marks that move from call to call."""
    body = line["request"]
    history = body.get("messages") or body.get("input") or body.get("contents")
    text = json.dumps(history if isinstance(history, list) else [history])
    return json.loads(text.replace(', "cache_control": {"type": "ephemeral"}', ""))


def appends(line, answered):
    """Whether a request repeats a whole earlier request under the same tools and goes on: by its JSON alone."""
    history, tools = raw_history(line), line["request"].get("tools")
    return any(
        earlier["request"].get("tools") == tools
        and len(raw_history(earlier)) < len(history)
        and history[: len(raw_history(earlier))] == raw_history(earlier)
        and any(message.get("role") in ("assistant", "model") or "type" in message for message in history[1:])
        for earlier in answered
    )


@pytest.mark.parametrize("name", SESSIONS)
def test_a_call_that_only_appends_is_restored_unless_the_harness_rewrote_an_answer(made, name):
    index, answered, verdicts = PathIndex(), [], []
    for dialect, line in made.read_capture(name):
        request = dialect.parse_request(line["request"])
        match = index.match(request.messages, request.tools)
        if appends(line, answered):
            verdicts.append(match.verdict)
        if line["status"] == 200:
            answered.append(line)
            index.add(str(line["n"]), match.keys, dialect.parse_response(line["response"]))
    rewritten = REWRITES.get(name, 0)
    assert verdicts.count(Verdict.REWRITTEN) == rewritten
    assert verdicts.count(Verdict.RESTORED) == len(verdicts) - rewritten > 0
