"""Recorded sessions of ten harnesses through the real proxy: roles, answers, bad input."""

import json
from pathlib import Path

import pytest

from opengyre import cli
from opengyre.core.chat import Message, ToolCall
from opengyre.core.types import Role
from opengyre.model.text_chat import ByteRenderer
from opengyre.run.replay import what_differs

CAPTURES = Path(__file__).parents[3] / "shared" / "captures"
SESSIONS = sorted(CAPTURES.glob("*/*.jsonl"))
RENDERER = ByteRenderer()
LINE = {
    "n": 1,
    "protocol": "chat",
    "path": "/v1/chat/completions",
    "status": 200,
    "request": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "response": {"choices": [{"message": {"role": "assistant", "content": "yes"}}]},
}


def truth_of(line):
    if line["mock_kind"] == "title":
        return Role.AUXILIARY.value
    is_summary = line["mock_kind"] == "compact"
    if line["mock_role"] == "main":
        return (Role.MAIN_SUMMARY if is_summary else Role.MAIN).value
    return (Role.SUB_AGENT_SUMMARY if is_summary else Role.SUB_AGENT).value


@pytest.mark.skipif(not SESSIONS, reason="the captures of real harnesses are not beside this checkout")
@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recorded_session_is_answered_as_it_was_and_its_roles_are_right(path, capsys):
    assert cli.main(["replay", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    lines = {line["n"]: line for line in map(json.loads, path.read_text().splitlines())}
    assert {call["n"]: call["role"] for call in result["calls"]} == {
        call["n"]: truth_of(lines[call["n"]]) for call in result["calls"]
    }
    assert [call["n"] for call in result["calls"] if call["differs"]] == []
    assert result["tree"]["calls"] == len(result["calls"]) == len(lines) - result["skipped"]


def test_an_answer_that_the_proxy_cannot_give_as_recorded_ends_with_1(tmp_path, capsys):
    told = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function"}]}
    told["tool_calls"][0]["function"] = {"name": "f", "arguments": "{}"}
    line = {**LINE, "response": {"choices": [{"message": told}]}}
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert cli.main(["replay", str(path)]) == 0
    assert "as recorded" in capsys.readouterr().out
    assert (
        what_differs(Message(role="assistant", reasoning="a"), Message(role="assistant", reasoning="b")) == "reasoning"
    )
    call = ToolCall(id="x", name="f", arguments='{"a": 1}')
    other = ToolCall(id="x", name="f", arguments='{"a":1}')
    one, two = (Message(role="assistant", tool_calls=(each,)) for each in (call, other))
    assert what_differs(one, two) == "tool calls"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no request"),
        ("{", "c.jsonl:1: not a line of a capture"),
        (json.dumps({**LINE, "protocol": "smoke"}), "protocol 'smoke', expected one of chat"),
        (json.dumps({**LINE, "request": {"messages": []}}), "call 1: messages: expected a non-empty list"),
        (json.dumps({**LINE, "n": "x"}), "c.jsonl:1"),
    ],
)
def test_what_is_no_capture_is_refused_in_one_line(tmp_path, capsys, text, said):
    path = tmp_path / "c.jsonl"
    path.write_text(text)
    assert cli.main(["replay", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_every_text_survives_the_way_to_bytes_and_back():
    message = Message(
        role="assistant",
        content="<|im_end|> \n\té",
        reasoning="\n hm \n",
        tool_calls=(ToolCall(id="", name="f", arguments='{"a": "\\u00e9"}'), ToolCall(id="", name="g", arguments="")),
    )
    assert RENDERER.parse(RENDERER.render((), ()), RENDERER.encode_reply(message), ()) == message
    user = Message(role="user", content="go")
    prompt = RENDERER.render([user], ()).tolist() + RENDERER.encode_reply(message).tolist()
    follow = RENDERER.render([user, message, user], ()).tolist()
    assert follow[: len(prompt)] == prompt
