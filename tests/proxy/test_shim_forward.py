"""The shim's forwarder between real clients and a real proxy."""

import asyncio
import contextlib
import json
import re
import selectors
import socket
import threading
import time

import aiohttp
import pytest

from gyre_shim import forward
from gyre_shim.forward import Forwarder
from opengyre.core.chat import Message

BODY = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
REQUEST = HEAD + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
LONG = 1 << 20
"""More than the buffers between the shim and a client with a small window take."""


class Shim:
    """A forwarder in a thread of its own, as the shim's loop drives it."""

    def __init__(self, upstream, folder):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        self.port = self.listener.getsockname()[1]
        self.journal = folder / "journal.jsonl"
        self.selector = selectors.DefaultSelector()
        self.forwarder = Forwarder(self.selector, self.listener, str(upstream), journal=str(self.journal), prefix="r")
        self.is_over = False
        self.longest_turn_s = 0.0
        self.thread = threading.Thread(target=self.loop)
        self.thread.start()

    def loop(self):
        while not self.is_over:
            ready = self.selector.select(0.02)
            started_s = time.thread_time()
            for key, _ in ready:
                self.forwarder.on_ready(key)
            self.forwarder.on_tick(time.monotonic())
            self.longest_turn_s = max(self.longest_turn_s, time.thread_time() - started_s)

    def receipts(self):
        return [json.loads(line) for line in self.journal.read_text().splitlines()]

    async def connect(self, **options):
        end = socket.socket()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        end.connect(("127.0.0.1", self.port))
        return await asyncio.open_connection(sock=end, **options)


@pytest.fixture
async def shim(standing, tmp_path):
    stand = await standing()
    await stand.open()
    made = Shim(stand.folder / "e", tmp_path)
    made.stand = stand
    yield made
    made.is_over = True
    await asyncio.to_thread(made.thread.join)
    made.forwarder.hang_up_all()
    made.selector.close()
    made.listener.close()


async def ask(shim):
    url = f"http://127.0.0.1:{shim.port}/v1/chat/completions"
    async with aiohttp.ClientSession() as client, client.post(url, data=BODY) as response:
        return response.status, await response.text()


async def receipts_of(shim, count):
    deadline_s = time.monotonic() + 5
    while len(shim.receipts()) < count and time.monotonic() < deadline_s:
        await asyncio.sleep(0.02)
    return shim.receipts()


async def test_a_client_that_does_not_read_its_answer_holds_up_no_other(shim):
    shim.stand.engine.reply = Message(role="assistant", content="x" * LONG)
    reader, writer = await shim.connect(limit=1)
    writer.write(REQUEST)
    assert await reader.readexactly(1) == b"H"
    shim.stand.engine.reply = Message(role="assistant", content="done")
    status, text = await asyncio.wait_for(ask(shim), 10)
    assert status == 200
    assert text.endswith("data: [DONE]\n\n")
    assert [receipt["delivered"] for receipt in await receipts_of(shim, 1)] == ["complete"]
    writer.transport.abort()
    first, second = await receipts_of(shim, 2)
    assert (second["delivered"], second["request_id"]) == ("hung_up", "r-1-" + first["request_id"].split("-")[-1])
    assert second["sent_bytes"] < LONG
    assert shim.longest_turn_s < 2


async def test_a_slow_reader_gets_every_byte_and_the_receipt_says_complete_only_then(shim):
    shim.stand.engine.reply = Message(role="assistant", content="x" * LONG)
    reader, writer = await shim.connect(limit=1 << 16)
    writer.write(REQUEST)
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(0.3)
    assert not shim.receipts()
    got = 0
    while got < LONG:
        got += (await asyncio.wait_for(reader.read(1 << 16), 5)).count(b"x")
    assert [receipt["delivered"] for receipt in await receipts_of(shim, 1)] == ["complete"]
    writer.close()


async def test_a_body_over_the_limit_is_refused_by_the_shim_before_it_is_sent(shim):
    reader, writer = await shim.connect()
    writer.write(HEAD + b"content-length: 1000000000000\r\n\r\n" + b"x" * 100_000)
    assert b" 413 " in await asyncio.wait_for(reader.readline(), 5)
    assert await asyncio.wait_for(reader.read(), 5) == b"content-length: 0\r\nconnection: close\r\n\r\n"
    writer.close()
    assert (await ask(shim))[0] == 200


async def test_a_flood_of_connections_takes_no_more_than_the_limit_and_calls_come_through(shim):
    silent = [await shim.connect() for _ in range(forward.MOST_CLIENTS + 100)]
    assert (await ask(shim))[0] == 200
    assert len(shim.forwarder._clients) <= forward.MOST_CLIENTS
    for _, writer in silent:
        writer.close()
    assert (await ask(shim))[0] == 200


async def test_what_is_sent_ahead_of_an_answer_is_not_kept_without_bound(shim):
    shim.stand.engine.delay_s = 2
    reader, writer = await shim.connect()
    writer.write(REQUEST + b"x" * (1 << 20))
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    assert [receipt["delivered"] for receipt in await receipts_of(shim, 1)] == ["hung_up"]
    writer.close()


async def test_requests_that_are_sent_ahead_are_answered_in_order(shim):
    reader, writer = await shim.connect()
    writer.write(REQUEST * 3)
    for _ in range(3):
        await asyncio.wait_for(reader.readuntil(b"data: [DONE]\n\n"), 5)
    assert len(await shim.stand.ledger.calls("e")) == 3
    assert [receipt["delivered"] for receipt in await receipts_of(shim, 3)] == ["complete"] * 3
    writer.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_nothing_follows_the_last_event_so_a_client_that_closes_with_it_got_its_answer(shim, path):
    """Codex closes its connection as soon as it has read the last event, whatever frames the body."""
    asked = {"input": "hello"} if path.endswith("responses") else {"messages": [{"role": "user", "content": "hello"}]}
    body = json.dumps({"model": "m", "max_tokens": 99, "stream": True, **asked}).encode()
    ends = {"/v1/chat/completions": b"[DONE]", "/v1/responses": b"response.completed", "/v1/messages": b"message_stop"}
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    reader, writer = await shim.connect()
    writer.write(head + body)
    told = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(re.search(rb"content-length: (\d+)", told).group(1))
    data = await reader.readexactly(length)
    writer.close()
    assert data.endswith(b"\n\n")
    assert ends[path] in data
    assert [receipt["delivered"] for receipt in await receipts_of(shim, 1)] == ["complete"]
