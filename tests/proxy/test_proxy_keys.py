"""Executions without a shim: a key over TCP says whose request it is."""

import asyncio

import aiohttp
import pytest

from opengyre.core.errors import InputError, InvariantError

KEYS = {"a": "key-of-a-0123456789", "b": "key-of-b-0123456789"}
HELLO = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def port(standing):
    stand = await standing()
    for name, key in KEYS.items():
        stand.proxy.open_keyed(stand.spec(name), key)
    client = aiohttp.ClientSession(f"http://127.0.0.1:{await stand.proxy.listen()}")
    stand.clients.append(client)
    return stand, client


async def call(client, path, headers=None):
    async with client.post(path, json=HELLO, headers=headers) as response:
        return response.status, await response.json()


async def test_a_key_in_the_path_or_as_api_key_says_whose_call_it_is_and_the_path_goes_first(port):
    stand, client = port
    assert (await call(client, f"/x/{KEYS['a']}/v1/chat/completions"))[0] == 200
    assert (await call(client, "/v1/messages", {"x-api-key": KEYS["b"]}))[0] == 200
    assert (await call(client, "/v1/chat/completions", {"authorization": f"Bearer {KEYS['b']}"}))[0] == 200
    assert (await call(client, f"/x/{KEYS['b']}/v1/messages", {"x-api-key": KEYS["a"]}))[0] == 200
    assert len(await stand.ledger.calls("a")) == 1
    assert [each.dialect for each in await stand.ledger.calls("b")] == ["anthropic", "chat", "anthropic"]


@pytest.mark.parametrize("headers", [{}, {"x-api-key": "none"}, {"authorization": "Bearer "}, {"x-api-key": ""}])
async def test_without_a_key_that_is_known_nothing_is_served_and_models_are_not_listed(port, headers):
    stand, client = port
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/x/guess/v1/responses"):
        assert (await call(client, path, headers))[0] == 401
    async with client.get("/v1/models", headers=headers) as response:
        assert response.status == 401
    async with client.post("/_shim/receipt", json={"request_id": "r", "delivered": "complete"}) as response:
        assert response.status == 400
    assert not stand.engine.requests


async def test_the_key_of_a_closed_execution_is_gone_and_cannot_be_given_again(port):
    stand, client = port
    headers = {"x-api-key": KEYS["a"]}
    assert (await call(client, "/v1/messages", headers))[0] == 200
    await stand.proxy.close_keyed("a")
    status, body = await call(client, "/v1/chat/completions", headers)
    assert (status, body["error"]["code"]) == (410, "execution_closed")
    assert (await call(client, "/v1/messages", {"x-api-key": KEYS["b"]}))[0] == 200
    with pytest.raises(InvariantError, match="expected a new one"):
        stand.proxy.open_keyed(stand.spec("c"), KEYS["a"])


@pytest.mark.parametrize("key", ["", "short", "x" * 201, "with/slash/0123456789", KEYS["b"]])
async def test_a_key_that_could_be_guessed_or_is_taken_is_refused(port, key):
    stand, _ = port
    with pytest.raises(InvariantError, match="expected a new one of 16 to 200"):
        stand.proxy.open_keyed(stand.spec("c"), key)


async def test_probes_and_unknown_paths_need_no_key_and_do_not_repeat_it(port):
    _, client = port
    async with client.head(f"/x/{KEYS['a']}") as response:
        assert response.status == 200
    async with client.get(f"/x/{KEYS['a']}/v2/nothing") as response:
        assert response.status == 404
        assert KEYS["a"] not in await response.text()
    async with client.get(f"/x/{KEYS['a']}/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["policy"]


async def test_a_socket_serves_its_own_execution_whatever_key_is_sent(port):
    stand, _ = port
    own = await stand.open("own")
    assert (await call(own, "/v1/messages", {"x-api-key": KEYS["a"]}))[0] == 200
    assert (await call(own, f"/x/{KEYS['a']}/v1/messages"))[0] == 404
    assert not await stand.ledger.calls("a")


async def test_the_port_is_on_loopback_and_a_taken_one_is_said_in_one_line(port):
    stand, _ = port
    (server,) = stand.proxy._tcp
    host, number = server.sockets[0].getsockname()
    assert host == "127.0.0.1"
    with pytest.raises(InputError, match=f"127.0.0.1:{number}: cannot listen"):
        await stand.proxy.listen(port=number)


async def test_one_key_that_asks_too_much_at_a_time_is_refused_and_the_others_of_its_port_are_served(standing):
    stand = await standing(lines=3)
    for name, key in KEYS.items():
        stand.proxy.open_keyed(stand.spec(name), key)
    port = await stand.proxy.listen()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: p\r\nx-api-key: {KEYS['a']}\r\ncontent-length: 99\r\n\r\n{{"
    half_sent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    for _, writer in half_sent:
        writer.write(head.encode())
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        assert (await call(client, "/v1/chat/completions", {"x-api-key": KEYS["b"]}))[0] == 200
        status, body = await call(client, "/v1/chat/completions", {"x-api-key": KEYS["a"]})
        assert (status, body["error"]["code"]) == (503, "overloaded")
        for _, writer in half_sent:
            writer.close()
        await asyncio.sleep(0.05)
        assert (await call(client, "/v1/chat/completions", {"x-api-key": KEYS["a"]}))[0] == 200
