"""Recorded harness sessions and made-up answers for the dialects' tests."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from opengyre.core.chat import Message, ToolCall
from opengyre.core.types import Finish
from opengyre.proxy.dialects import anthropic, chat, gemini, responses
from opengyre.proxy.requests import Answer, AnswerChoice

CAPTURES = Path(__file__).parents[3] / "shared" / "captures"
READERS = {"chat": chat, "anthropic": anthropic, "responses": responses, "gemini": gemini}


def read_capture(name):
    """Return (dialect, line) of ``harness/session``; skips where the captures are not at hand."""
    path = CAPTURES / f"{name}.jsonl"
    if not path.exists():
        pytest.skip("the captures of real harnesses are not beside this checkout (../shared/captures)")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(READERS[line["protocol"]], line) for line in lines]


def answered(message, *more, finish=None, stop_sequence=""):
    """Return an answer with one choice for each message."""
    choices = tuple(
        AnswerChoice(
            message=each,
            finish=finish or (Finish.TOOL_CALLS if each.tool_calls else Finish.STOP),
            completion_tokens=7,
            stop_sequence=stop_sequence,
        )
        for each in (message, *more)
    )
    return Answer(answer_id="e-c0001", model="policy", created_s=1764550000, choices=choices, prompt_tokens=12)


def reply(content="", reasoning="", calls=()):
    """Return an assistant message; calls are (name, argument text)."""
    made = tuple(
        ToolCall(id=f"call_e_{number:04d}", name=name, arguments=arguments)
        for number, (name, arguments) in enumerate(calls)
    )
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=made)


def events_of(chunks):
    """Return (name, data) of server-sent events."""
    events = []
    for block in b"".join(chunks).decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if lines and lines["data"] != "[DONE]":
            events.append((lines.get("event", ""), json.loads(lines["data"])))
    return events


@pytest.fixture
def made():
    """The helpers above, for test modules."""
    return SimpleNamespace(read_capture=read_capture, answered=answered, reply=reply, events_of=events_of)
