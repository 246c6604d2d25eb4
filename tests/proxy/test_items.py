"""A body is read as if it were the first one of its execution, whatever was sent before."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.core.errors import CallError
from opengyre.proxy import items
from opengyre.proxy.dialects import anthropic, chat, responses
from opengyre.proxy.items import BodyReader, Items, read_items

TEXTS = st.text(max_size=5)
MESSAGES = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS})
STEPS = st.lists(
    st.tuples(st.integers(0, 6), st.lists(MESSAGES, max_size=3), st.sampled_from([None, 2])), min_size=1, max_size=50
)
"""Of each request: how many messages of the last one stay, what is appended, how the JSON is laid out."""


@settings(max_examples=60, deadline=None)
@given(STEPS, st.booleans())
def test_a_body_that_shares_anything_with_earlier_ones_is_read_as_if_it_stood_alone(steps, forgets):
    reader, history = BodyReader(), []
    for kept, added, indent in steps:
        history = [*history[: kept if kept < 6 else len(history)], *added]
        body = {"model": "m", "messages": history, "stream": True}
        data = json.dumps(body, indent=indent).encode()
        if forgets:
            reader._young.clear()
            reader._old.clear()
        read = reader.read(data)
        assert {**read, "messages": read_items(read["messages"], "messages", as_it_is)} == body


def as_it_is(raw, _):
    return raw


@pytest.mark.parametrize("dialect", [chat, anthropic, responses])
def test_every_dialect_makes_of_a_second_request_what_it_makes_of_the_whole_body(dialect):
    key = "input" if dialect is responses else "messages"
    tool = {"name": "look", "type": "custom" if dialect is responses else "function", "function": {"name": "look"}}
    first = {"model": "m", key: [{"role": "user", "content": "go"}], "tools": [tool]}
    second = {**first, key: [*first[key], {"role": "assistant", "content": "yes"}, {"role": "user", "content": "on"}]}
    reader = BodyReader()
    dialect.parse_request(reader.read(json.dumps(first).encode()))
    whole, known = (dialect.parse_request(each) for each in (second, reader.read(json.dumps(second).encode())))
    assert (known.messages, known.tools) == (whole.messages, whole.tools)


def test_what_was_sent_before_is_not_read_again():
    reader, looked_at = BodyReader(), []

    def look(raw, where):
        looked_at.append(where)
        return raw["content"]

    history = []
    for number in range(40):
        history.append({"content": f"text {number}"})
        body = reader.read(json.dumps({"messages": history}).encode())
        assert read_items(body["messages"], "messages", look)[-1] == f"text {number}"
    assert looked_at == [f"messages[{number}]" for number in range(40)]


def test_what_is_not_sent_any_more_is_forgotten():
    reader = BodyReader()
    for number in range(4 * items.REQUESTS_KEPT):
        body = reader.read(json.dumps({"messages": [{"content": number}]}).encode())
        read_items(body["messages"], "messages", as_it_is)
    kept = [value for memo in (reader._young, reader._old) for found in memo.values() for value in found.values()]
    assert len(kept) <= 2 * (items.REQUESTS_KEPT + 1)
    assert len(reader._lists["messages"]) == items.LISTS_KEPT


def test_large_elements_are_forgotten_sooner(monkeypatch):
    monkeypatch.setattr(items, "BYTES_KEPT", 1000)
    reader = BodyReader()
    for number in range(items.REQUESTS_KEPT):
        body = reader.read(json.dumps({"messages": [f"{number:0900}"]}).encode())
        read_items(body["messages"], "messages", as_it_is)
    kept = [value for memo in (reader._young, reader._old) for found in memo.values() for value in found.values()]
    assert len(kept) <= 4


def test_the_hash_of_a_retry_is_that_of_the_first_request_and_no_other():
    hashes = []
    reader = BodyReader()
    for extra, text in (({"stream": True}, "go"), ({"stream": False}, "go"), ({}, "stop"), ({"model": "n"}, "go")):
        data = json.dumps({"model": "m", **extra, "messages": [{"role": "user", "content": text}]}).encode()
        hashes.append(chat.parse_request(reader.read(data)).body_hash)
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"messages": [{"role": "user"}, 3]}', r"messages\[1\]: expected an object with a role, got 3"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not JSON"),
        (b'{"messages": [{"role": "user"},]}', "not JSON"),
        (b'{"messages": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}", "nested too deeply"),
        (b'{"messages": {}}', "messages: expected a list"),
        (b'{"messages": []}', "messages: expected a non-empty list"),
        (b"[1]", "the body is list, expected an object"),
        (b'{"messages": ', "not JSON"),
    ],
)
def test_a_malformed_body_is_refused_with_its_place_also_behind_a_good_one(data, says):
    reader = BodyReader()
    chat.parse_request(reader.read(b'{"messages": [{"role": "user"}]}'))
    for _ in range(2):
        with pytest.raises(CallError, match=says):
            chat.parse_request(reader.read(data))


def test_a_list_that_was_known_and_forgotten_is_cut_again():
    reader = BodyReader()
    first = reader.read(b'{"messages": [1, 2]}')["messages"]
    assert isinstance(first, Items)
    again = reader.read(b'{"messages": [1, 2, 3]}')["messages"]
    assert again.read(as_it_is, "messages") == [1, 2, 3]
