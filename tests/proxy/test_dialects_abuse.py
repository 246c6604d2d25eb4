"""A body with anything at any place is read or refused; nothing else comes out."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.core.errors import CallError
from opengyre.proxy.dialects import anthropic, chat, gemini, responses
from opengyre.proxy.dialects.parts import seal

READERS = {"chat": chat, "anthropic": anthropic, "responses": responses, "gemini": gemini}
SPOKEN = {
    "chat": [
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "a"}],
            "reasoning_content": "r",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "sh", "arguments": "{}"}}],
        }
    ],
    "anthropic": [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "r", "signature": "s"},
                {
                    "type": "tool_use",
                    "id": "c1",
                    "name": "sh",
                    "input": {"__unparsedToolInput": {"raw": "{", "len": 1}},
                },
            ],
        }
    ],
    "responses": [
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "r"}], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c1", "name": "sh", "arguments": "{}", "namespace": "n"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "sh", "input": "x"},
        {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
    ],
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
GEMINI_CALL = {"functionCall": {"name": "f", "args": {"a": 1}}}
ASK = {"role": "user", "content": "go"}
WHOLE = {
    "chat": {
        "messages": [ASK, *SPOKEN["chat"], {"role": "tool", "tool_call_id": "c1", "content": "ok"}, ASK],
        "tools": [{"type": "function", "function": {"name": "sh", "parameters": {"type": "object"}}}],
        "stop": ["x"],
        "tool_choice": {"type": "function", "function": {"name": "sh"}},
        "response_format": {"type": "text"},
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "n": 2,
    },
    "anthropic": {
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            ASK,
            *SPOKEN["anthropic"],
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "ok"}]},
                    {"type": "text", "text": "more"},
                ],
            },
        ],
        "tools": [{"name": "sh", "input_schema": {"type": "object"}}],
        "stop_sequences": ["x"],
        "tool_choice": {"type": "tool", "name": "sh"},
        "output_config": {"format": None},
        "max_tokens": 9,
    },
    "responses": {
        "instructions": "s",
        "input": [
            ASK,
            *SPOKEN["responses"],
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "ok"}]},
            {"type": "compaction", "encrypted_content": seal("s")},
        ],
        "tools": [
            {"type": "function", "name": "sh", "parameters": {"type": "object"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "ask", "parameters": {}}]},
            {"type": "custom", "name": "patch"},
        ],
        "tool_choice": {"type": "function", "name": "sh"},
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 9,
    },
    "gemini": {
        "contents": [
            {"role": "user", "parts": [{"text": "x"}]},
            {"role": "model", "parts": [GEMINI_CALL]},
            {"parts": [{"functionResponse": {"name": "f", "id": "1", "response": {"output": "ok"}}}]},
        ],
        "systemInstruction": {"parts": [{"text": "s"}]},
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": {}}]}],
        "generationConfig": {"maxOutputTokens": 3, "stopSequences": ["x"]},
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    },
}


def places_in(value, path=()):
    """Return the paths of all values inside a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places_in(each, (*path, key)))]


def replaced(value, path, new):
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = replaced(value[path[0]], path[1:], new)
    return copied


@settings(max_examples=300)
@given(st.data(), st.sampled_from(sorted(WHOLE)))
def test_a_body_with_anything_at_any_place_is_read_or_refused_and_nothing_else(data, name):
    body = WHOLE[name]
    path = data.draw(st.sampled_from(places_in(body)[1:]))
    changed = replaced(body, path, data.draw(JSON))
    with contextlib.suppress(CallError):
        assert READERS[name].parse_request(changed).messages


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_the_body_in_which_anything_is_put_anywhere_is_itself_read(name):
    assert READERS[name].parse_request(WHOLE[name]).messages
