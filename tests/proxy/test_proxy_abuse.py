"""What a client can do wrong, or on purpose: it gets its status, and no other execution notices."""

import asyncio
import contextlib
import gc
import json
import time
import tracemalloc
import weakref

import pytest

from opengyre.core.chat import Message

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\n"
MIB = 1 << 20


def request_of(body):
    data = json.dumps(body).encode()
    return HEAD + b"content-length: %d\r\n\r\n%b" % (len(data), data)


async def line_to(stand, name, **options):
    return await asyncio.open_unix_connection(str(stand.folder / name), **options)


async def status_of(reader):
    return int((await asyncio.wait_for(reader.readline(), 5)).split()[1])


async def test_a_body_that_says_it_is_over_the_limit_is_refused_before_it_is_sent(standing):
    stand = await standing(body_bytes=MIB)
    await stand.open()
    reader, writer = await line_to(stand, "e")
    writer.write(HEAD + b"content-length: 1000000000000\r\n\r\n")
    assert await status_of(reader) == 413
    writer.close()
    assert not stand.engine.requests


async def test_a_body_without_a_length_is_read_up_to_the_limit_and_not_kept(standing, made):
    stand = await standing(body_bytes=MIB)
    client, other = await stand.open("a"), await stand.open("b")
    piece = b"x" * (MIB // 4)

    async def endless():
        for _ in range(200):
            yield piece

    tracemalloc.start()
    try:
        async with client.post("/v1/messages", data=endless()) as response:
            assert response.status == 413
            assert (await response.json())["error"]["type"] == "request_too_large"
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * MIB
    assert (await made.asked(other))[0] == 200


@pytest.mark.parametrize("data", [b"{", b"[" * 100_000, b'"\xff"', b"\x00" * 64, b'{"a": NaN}', b""])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
async def test_what_is_not_json_is_a_wrong_request_in_every_protocol(standing, path, data):
    stand = await standing()
    client = await stand.open()
    async with client.post(path, data=data) as response:
        assert response.status == 400
        assert "JSON" in (await response.json())["error"]["message"]
    assert not stand.engine.requests


async def test_an_open_connection_of_a_closed_execution_is_told_so_and_never_reaches_its_successor(standing, made):
    stand = await standing()
    client = await stand.open("first", path="s")
    assert (await made.asked(client))[0] == 200
    silent_reader, silent = await line_to(stand, "s")
    await asyncio.sleep(0.05)
    await stand.proxy.close_execution("first")
    successor = await stand.open("second", path="s")
    status, body = await made.asked(client)
    assert (status, body["error"]["code"]) == (410, "execution_closed")
    silent.write(request_of(HELLO))
    assert await status_of(silent_reader) == 410
    silent.close()
    assert not await stand.ledger.calls("second")
    assert (await made.asked(successor))[0] == 200
    assert len(await stand.ledger.calls("first")) == len(await stand.ledger.calls("second")) == 1


async def test_a_closed_execution_has_no_socket(standing, made):
    stand = await standing()
    await stand.open("a")
    await stand.proxy.close_execution("a")
    with pytest.raises(OSError, match=r"No such file|refused"):
        await line_to(stand, "a")


async def test_a_client_that_reads_one_byte_a_second_holds_up_nobody(standing, made):
    stand = await standing()
    _, other = await stand.open("slow"), await stand.open("b")
    stand.engine.reply = Message(role="assistant", content="x" * MIB)
    reader, writer = await line_to(stand, "slow", limit=1)
    writer.write(request_of({**HELLO, "stream": True}))
    taken = [await reader.readexactly(1)]
    stand.engine.reply = Message(role="assistant", content="done")
    started_s = time.monotonic()
    for _ in range(2):
        for _ in range(10):
            assert (await made.asked(other))[0] == 200
        await asyncio.sleep(1)
        taken.append(await reader.readexactly(1))
    assert time.monotonic() - started_s < 10
    assert b"".join(taken) == b"HTT"
    assert len(await stand.ledger.calls("b")) == 20
    (call,) = await stand.ledger.calls("slow")
    assert len(call.output) > MIB
    writer.close()


async def test_silent_connections_beyond_the_limit_are_closed_and_calls_still_come_through(standing, made):
    stand = await standing(lines=16)
    client, other = await stand.open("a"), await stand.open("b")
    silent = [await line_to(stand, "a") for _ in range(300)]
    assert (await made.asked(client))[0] == 200
    assert (await made.asked(other))[0] == 200
    await asyncio.sleep(0.2)
    assert sum(reader.at_eof() for reader, _ in silent) >= 300 - 16
    assert (await made.asked(client))[0] == 200
    for _, writer in silent:
        writer.close()


async def test_a_connection_that_never_says_anything_is_closed_after_a_while(standing, made):
    stand = await standing(silent_s=0.2)
    client = await stand.open()
    reader, writer = await line_to(stand, "e")
    begun_reader, begun = await line_to(stand, "e")
    begun.write(HEAD)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    assert await asyncio.wait_for(begun_reader.read(), 5) == b""
    writer.close()
    begun.close()
    assert (await made.asked(client))[0] == 200


async def test_calls_that_run_are_not_closed_for_newcomers(standing, made):
    stand = await standing(lines=4)
    stand.engine.delay_s = 0.5
    await stand.open()
    running = [asyncio.ensure_future(made.asked(stand.client("e"))) for _ in range(4)]
    while len(stand.engine.requests) < 4:
        await asyncio.sleep(0.01)
    reader, writer = await line_to(stand, "e")
    with contextlib.suppress(ConnectionError):
        writer.write(request_of(HELLO))
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    assert [status for status, _ in await asyncio.gather(*running)] == [200] * 4
    assert len(await stand.ledger.calls("e")) == 4


async def test_bodies_that_are_held_half_sent_are_bounded_for_each_execution(standing, made):
    stand = await standing(body_bytes=MIB, bodies=2)
    client, other = await stand.open("a"), await stand.open("b")
    lines = []
    for _ in range(4):
        reader, writer = await line_to(stand, "a")
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % MIB + b" " * (MIB - 1))
        lines.append((reader, writer))
    refused = [asyncio.ensure_future(status_of(reader)) for reader, _ in lines]
    done, waiting = await asyncio.wait(refused, timeout=1)
    assert {task.result() for task in done} == {503}
    assert len(waiting) == 2
    big = {"model": "m", "messages": [{"role": "user", "content": "x" * 10_000}]}
    assert (await made.asked(client, big))[0] == 503
    assert (await made.asked(other, big))[0] == 200
    for task in waiting:
        task.cancel()
    for _, writer in lines:
        writer.close()
    while (await made.asked(client, big))[0] != 200:
        await asyncio.sleep(0.05)


async def test_an_execution_reads_nothing_of_another_by_request_id_or_tool_call_id(standing, made):
    stand = await standing()
    first, second = await stand.open("a"), await stand.open("b")
    stand.engine.reply = made.reply(content="of a", calls=[("sh", '{"c":"ls"}')])
    headers = {"x-gyre-request-id": "r1"}
    _, body = await made.asked(first, headers=headers)
    stand.engine.reply = made.reply(content="of b")
    assert (await made.asked(second, headers=headers))[1]["choices"][0]["message"]["content"] == "of b"
    call_id = body["choices"][0]["message"]["tool_calls"][0]["id"]
    guessed = {"id": call_id, "type": "function", "function": {"name": "sh", "arguments": "{}"}}
    history = [
        *HELLO["messages"],
        {"role": "assistant", "content": None, "tool_calls": [guessed]},
        {"role": "tool", "tool_call_id": call_id, "content": "ok"},
    ]
    await made.asked(second, {"model": "m", "messages": history})
    stolen = (await stand.ledger.calls("b"))[1]
    assert stolen.parent_call_id is None
    assert b"of a" not in bytes(token for token in stolen.tail.tolist() if token < 256)
    receipt = {"request_id": "r1", "delivered": "hung_up", "sent_bytes": 1}
    async with second.post("/_shim/receipt", json=receipt) as response:
        assert response.status == 200
    (untouched,) = await stand.ledger.calls("a")
    assert untouched.delivered.value == "unknown"


async def test_what_a_closed_execution_said_is_not_kept_for_as_long_as_its_connections_are(standing, made):
    stand = await standing()
    client = await stand.open("e")
    assert (await made.asked(client))[0] == 200
    session = weakref.ref(stand.proxy._open["e"][0])
    await stand.proxy.close_execution("e")
    gc.collect()
    assert session() is None
