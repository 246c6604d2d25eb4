"""What is kept of requests and answers can be replayed and does not tell whose machine it was."""

import asyncio
import json
from pathlib import Path

import pytest

from opengyre.cli import main
from opengyre.core.chat import Message, ToolCall
from opengyre.proxy.bodies import BodyFiles
from opengyre.run.captures import read_capture

SECRETS = ("device-77", "account-88", "sk-0123456789", "installation-99")
HEADERS = {
    "authorization": "Bearer sk-0123456789",
    "x-device-id": "device-77",
    "x-codex-turn-metadata": '{"installation_id":"installation-99","request_kind":"turn"}',
}
USER = [{"role": "user", "content": "hello"}]
BODIES = [
    ("/v1/chat/completions", {"messages": USER, "user": "account-88"}),
    ("/v1/responses", {"input": "hello", "client_metadata": {"x-codex-installation-id": "installation-99"}}),
    ("/v1/messages", {"messages": USER, "max_tokens": 99, "metadata": {"user_id": '{"device_id":"device-77"}'}}),
]
SAID = Message(
    role="assistant",
    content="I look.",
    reasoning="hm",
    tool_calls=tuple(ToolCall(id="", name="sh", arguments=text) for text in ('{"c": "ls"}', '{ "c":"\\u00e9" }')),
)


@pytest.mark.parametrize("stream", [False, True])
async def test_kept_calls_are_a_capture_that_replays(standing, stream):
    stand = await standing()
    stand.engine.reply = SAID
    client = await stand.open()
    for path, body in BODIES:
        async with client.post(path, json={"model": "m", "stream": stream, **body}, headers=HEADERS) as response:
            assert response.status == 200, await response.text()
            await response.read()
    kept = BodyFiles(stand.folder / "bodies").path("e")
    assert [(call.n, call.protocol, call.status) for call in read_capture(kept)] == [
        (1, "chat", 200),
        (2, "responses", 200),
        (3, "anthropic", 200),
    ]
    assert await asyncio.to_thread(main, ["replay", str(kept)]) == 0


async def test_nothing_that_is_stored_holds_keys_or_ids_of_devices_and_accounts(standing):
    stand = await standing()
    client = await stand.open()
    home = str(Path.home())
    for path, body in BODIES:
        async with client.post(path, json={"model": "m", "cwd": f"{home}/x", **body}, headers=HEADERS) as response:
            assert response.status == 200
    assert len(await stand.ledger.calls("e")) == len(BODIES)
    stored = b"".join(path.read_bytes() for path in stand.folder.rglob("*") if path.is_file())
    assert b"request_kind" in stored
    for secret in (*SECRETS, f"{home}/x"):
        assert secret.encode() not in stored


async def test_a_refused_call_is_kept_with_its_status_and_a_body_that_is_no_json_is_not(standing, made):
    stand = await standing()
    client = await stand.open(context_tokens=10)
    assert (await made.asked(client))[0] == 400
    async with client.post("/v1/chat/completions", data=b"{") as response:
        assert response.status == 400
    (call,) = read_capture(BodyFiles(stand.folder / "bodies").path("e"))
    assert (call.status, call.response["error"]["code"]) == (400, "context_length_exceeded")


async def test_the_numbers_go_on_where_an_earlier_driver_stopped(standing, made):
    stand = await standing()
    kept = BodyFiles(stand.folder / "bodies").path("e")
    kept.parent.mkdir()
    kept.write_text(json.dumps({"n": 1, "protocol": "chat", "path": "/", "status": 500}) + "\n")
    await made.asked(await stand.open())
    assert [call.n for call in read_capture(kept)] == [1, 2]
