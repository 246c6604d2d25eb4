"""Recorded harness sessions and made-up answers for the dialects' tests."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from opengyre.core.chat import Message, ToolCall
from opengyre.core.types import Finish
from opengyre.ledger.ledger import Ledger
from opengyre.model.text_chat import ByteRenderer
from opengyre.proxy.bodies import BodyFiles
from opengyre.proxy.dialects import anthropic, chat, gemini, responses
from opengyre.proxy.doors import DoorLimits
from opengyre.proxy.requests import Answer, AnswerChoice
from opengyre.proxy.server import Proxy
from opengyre.proxy.session import SessionSpec
from opengyre.run.replay import ScriptedEngine

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
    return SimpleNamespace(read_capture=read_capture, answered=answered, reply=reply, events_of=events_of, asked=asked)


class CountingEngine(ScriptedEngine):
    """Says one message to everybody, and keeps what it was asked."""

    def __init__(self):
        super().__init__(ByteRenderer())
        self.reply = Message(role="assistant", content="done")
        self.requests = []
        self.delay_s = 0.0

    async def generate(self, request):
        self.requests.append(request)
        await asyncio.sleep(self.delay_s)
        return await super().generate(request)


class Stand:
    """A proxy with a scripted engine and a real ledger, and clients of its executions."""

    def __init__(self, folder, limits):
        self.folder = folder
        self.engine = CountingEngine()
        self.ledger = Ledger.open(folder)
        self.proxy = Proxy(
            engine=self.engine,
            store=self.ledger,
            renderer=self.engine.renderer,
            clock=time.monotonic,
            limits=limits,
            bodies=BodyFiles(folder / "bodies"),
        )
        self.clients = []

    def spec(self, name, **changes):
        known = {"group_id": 0, "slot": 0, "attempt": 0, "run_seed": 0, "context_tokens": 1 << 24}
        return SessionSpec(execution_id=name, **{**known, "default_max_tokens": 1 << 20, **changes})

    async def open(self, name="e", path=None, **changes):
        await self.proxy.open_execution(self.spec(name, **changes), self.folder / (path or name))
        return self.client(path or name)

    def client(self, path):
        client = aiohttp.ClientSession("http://proxy", connector=aiohttp.UnixConnector(str(self.folder / path)))
        self.clients.append(client)
        return client


async def asked(client, body=None, path="/v1/chat/completions", **more):
    """Return (status, JSON) of a call."""
    body = body or {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    async with client.post(path, json=body, **more) as response:
        return response.status, await response.json()


@pytest.fixture
async def standing(tmp_path_factory):
    """Return a function that makes a stand; all are closed at the end."""
    stands = []

    async def make(**limits):
        stand = Stand(tmp_path_factory.mktemp("s"), DoorLimits(**limits))
        stands.append(stand)
        await stand.proxy.start()
        return stand

    yield make
    for stand in stands:
        for client in stand.clients:
            await client.close()
        await stand.proxy.stop()
        stand.ledger.close()
