"""Retries and second samples, by clients that hang up and ask again."""

import asyncio
import json
import time

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.core.types import Delivered
from opengyre.proxy.twins import Twins

HELLO = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
KEY = "key-of-a-0123456789"


async def until_delivered(stand, name, how):
    """Return the only call of an execution once its delivery is noted; that comes after the answer."""
    deadline_s = time.monotonic() + 5
    while True:
        (call,) = await stand.ledger.calls(name)
        if call.delivered is how or time.monotonic() > deadline_s:
            return call
        await asyncio.sleep(0.01)


@pytest.fixture
async def keyed(standing):
    stand = await standing()
    stand.proxy.open_keyed(stand.spec("a"), KEY)
    client = aiohttp.ClientSession(f"http://127.0.0.1:{await stand.proxy.listen()}", headers={"x-api-key": KEY})
    stand.clients.append(client)
    return stand, client


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_client_that_times_out_and_asks_again_gets_the_answer_of_the_call_in_flight(keyed, made, path):
    stand, client = keyed
    stand.engine.delay_s = 0.6
    with pytest.raises(TimeoutError):
        await made.asked(client, HELLO, path, timeout=aiohttp.ClientTimeout(total=0.2))
    status, _ = await made.asked(client, {**HELLO, "max_tokens": 8, "stream": False}, path)
    assert status == 200
    assert len(stand.engine.requests) == 1
    call = await until_delivered(stand, "a", Delivered.COMPLETE)
    assert call.delivered is Delivered.COMPLETE


async def test_a_retry_after_the_call_was_committed_gets_its_answer_and_is_committed_once(keyed, made):
    stand, client = keyed
    stand.engine.delay_s = 0.4
    with pytest.raises(TimeoutError):
        await made.asked(client, HELLO, timeout=aiohttp.ClientTimeout(total=0.2))
    await asyncio.sleep(0.6)
    lost = await until_delivered(stand, "a", Delivered.HUNG_UP)
    assert lost.delivered is Delivered.HUNG_UP
    _, body = await made.asked(client, HELLO)
    assert body["id"].endswith(lost.call_id)
    call = await until_delivered(stand, "a", Delivered.COMPLETE)
    assert call.delivered is Delivered.COMPLETE
    await made.asked(client, HELLO)
    assert len(await stand.ledger.calls("a")) == 2


async def test_a_twin_with_an_open_or_a_completed_connection_is_a_second_sample(keyed, made):
    stand, client = keyed
    stand.engine.delay_s = 0.2
    await asyncio.gather(made.asked(client, HELLO), made.asked(client, HELLO))
    await made.asked(client, HELLO)
    assert len(await stand.ledger.calls("a")) == 3
    assert len({request.seed for request in stand.engine.requests}) == 3


async def test_behind_a_shim_the_receipt_says_that_an_answer_was_lost(standing, made):
    stand = await standing()
    client = await stand.open()
    shim = {"x-gyre-shim": "1"}
    first = await made.asked(client, HELLO, headers={**shim, "x-gyre-request-id": "r1"})
    await made.asked(client, HELLO, headers={**shim, "x-gyre-request-id": "r2"})
    assert len(stand.engine.requests) == 2
    await client.post("/_shim/receipt", json={"request_id": "r1", "delivered": "hung_up", "sent_bytes": 10})
    again = await made.asked(client, HELLO, headers={**shim, "x-gyre-request-id": "r3"})
    assert again == first
    await client.post("/_shim/receipt", json={"request_id": "r3", "delivered": "complete", "sent_bytes": 99})
    await made.asked(client, HELLO, headers={**shim, "x-gyre-request-id": "r4"})
    calls = await stand.ledger.calls("e")
    assert [(call.request_id, call.delivered.value) for call in calls] == [
        ("r1", "complete"),
        ("r2", "unknown"),
        ("r4", "unknown"),
    ]


async def test_a_refused_request_is_looked_at_anew_when_it_comes_again(keyed, made):
    stand, client = keyed
    await stand.proxy.close_keyed("a")
    stand.proxy.open_keyed(stand.spec("b", context_tokens=20), "key-of-b-0123456789")
    headers = {"x-api-key": "key-of-b-0123456789"}
    long = {**HELLO, "messages": [{"role": "user", "content": "hello " * 30}]}
    for _ in range(2):
        status, body = await made.asked(client, long, headers=headers)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert not stand.engine.requests


async def test_other_words_are_no_retry_whatever_became_of_the_first(keyed, made):
    stand, client = keyed
    stand.engine.delay_s = 0.4
    with pytest.raises(TimeoutError):
        await made.asked(client, HELLO, timeout=aiohttp.ClientTimeout(total=0.1))
    other = json.loads(json.dumps(HELLO).replace("hello", "hullo"))
    await made.asked(client, other)
    assert len(await stand.ledger.calls("a")) == 2


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["complete", "hung_up", "open"])), max_size=30))
def test_an_answer_is_given_again_only_after_it_was_lost_and_each_loss_answers_one_retry(asked):
    twins = Twins()
    lost = {"a": [], "b": []}
    for number, (key, then) in enumerate(asked):
        got = twins.asked(f"r{number}", key, lambda: False)
        assert got == (lost[key].pop(0) if lost[key] else f"r{number}")
        twins.sent(f"r{number}")
        if then != "open":
            assert twins.delivered(f"r{number}", Delivered(then)) == got
        if then == "hung_up":
            lost[key] = sorted([*lost[key], got], key=lambda name: int(name[1:]))
