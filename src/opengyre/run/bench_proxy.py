"""Measures what the proxy adds to a call of a long execution; ``opengyre bench proxy``.

64 executions have talked for 150 turns: paths of 100k tokens, every reply of them recorded, bodies of 400 to 500 kB.
Then calls that extend these paths arrive as a Poisson process, from a client in a process of its own. Proxy, ledger and
sockets are the real ones; the engine answers at once, so a call's latency is what is added to the engine's.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from opengyre.core.chat import Message, Tool, ToolCall
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import Call, Finish, Int32Array, VersionRun
from opengyre.ledger.ledger import Ledger
from opengyre.proxy.dialects import chat
from opengyre.proxy.items import BodyReader
from opengyre.proxy.server import Proxy
from opengyre.proxy.session import SessionSpec
from opengyre.trajectory.match import PathIndex

Result = dict[str, Any]
EXECUTIONS = 64
TURNS = 150
TOOLS = 24
CALLS = {20.0: 600, 5.0: 150, 40.0: 600}
"""At each rate; 600 calls leave six beyond the 99th percentile."""
BUILDERS = 4
"""Executions whose paths are built at a time."""


class FourByteRenderer:
    """A template over four bytes a token, as many as a real vocabulary has; implements ``core.chat.ChatRenderer``.

    >>> renderer = FourByteRenderer()
    >>> said = Message(role="assistant", content="yes")
    >>> prompt = renderer.render([said], ())
    >>> renderer.parse(prompt, renderer.encode_reply(said), ()) == said, prompt.dtype
    (True, dtype('int32'))
    """

    stop_ids = (1 << 24,)
    is_prefix_stable = True

    def __init__(self) -> None:
        self.spent_s: list[float] = []
        """Seconds of each rendering."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        """Return the prompt, [C] int32."""
        return np.concatenate([_packed(tools), self._messages(messages)])

    def bridge(
        self, context: Int32Array, output: Int32Array, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> Int32Array | None:
        """Return what follows a prompt and its reply."""
        return self._messages(messages)

    def encode_reply(self, message: Message) -> Int32Array:
        """Return what a model that says this message samples."""
        return np.concatenate([_packed(message), np.array(self.stop_ids, np.int32)])

    def parse(self, context: Int32Array, output: Int32Array, tools: Sequence[Tool]) -> Message:
        """Return the message of a reply."""
        return msgspec.json.decode(output[:-1].tobytes().rstrip(b" "), type=Message)

    def _messages(self, messages: Sequence[Message]) -> Int32Array:
        before_s = time.perf_counter()
        tokens = _packed(messages)
        self.spent_s.append(time.perf_counter() - before_s)
        return tokens


def _packed(value: object) -> Int32Array:
    data = msgspec.json.encode(value)
    return np.frombuffer(data + b" " * (-len(data) % 4), np.int32)


@dataclass
class ReadyEngine:
    """Calls a tool at once; implements ``core.protocols.Engine``."""

    renderer: FourByteRenderer

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return a reply of some 120 tokens; it depends on the call alone."""
        text = msgspec.json.encode({"path": f"src/{request.seed % 97}.py", "why": _prose(request.seed, 300)}).decode()
        reply = Message(role="assistant", tool_calls=(ToolCall(id="", name="read_3", arguments=text),))
        output = self.renderer.encode_reply(reply)
        return Generation(
            output=output,
            behaviour_logprobs=np.full(len(output), -0.1, np.float32),
            versions=(VersionRun(0, len(output)),),
            finish=Finish.STOP,
        )


class TimedLedger:
    """A ledger that notes how long each commit took; implements the part of ``core.protocols.CallStore`` in use."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.committed_answer = ledger.committed_answer
        self.calls = ledger.calls
        self.revise_roles = ledger.revise_roles
        self.record_delivery = ledger.record_delivery
        self.spent_s: list[float] = []

    async def commit(self, calls: Sequence[Call], answer: bytes) -> None:
        """Store the calls of one request durably."""
        before_s = time.perf_counter()
        await self._ledger.commit(calls, answer)
        self.spent_s.append(time.perf_counter() - before_s)


# -- the client -----------------------------------------------------------------------------------------------


@dataclass
class Harness:
    """One execution as its client keeps it: messages as JSON texts, joined for each request.

    Example: ``Harness("/run/s1", 1).body()``.
    """

    socket: str
    seed: int
    parts: list[bytes] = field(default_factory=list)
    is_asking: bool = False

    def __post_init__(self) -> None:
        self.parts.append(_json({"role": "system", "content": _prose(self.seed, 12_000)}))
        self.parts.append(_json({"role": "user", "content": _prose(self.seed + 1, 2_000)}))

    def body(self) -> bytes:
        """Return the next request."""
        return b'{"model":"policy","messages":[' + b",".join(self.parts) + b'],"tools":' + _TOOLS + b"}"

    def take(self, answer: bytes) -> None:
        """Append an answer and the result of its tool call."""
        message = msgspec.json.decode(answer)["choices"][0]["message"]
        self.parts.append(_json(message))
        text = _prose(self.seed + len(self.parts), 1_900)
        self.parts.append(_json({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}))

    async def ask(self, client: aiohttp.ClientSession) -> float:
        """Send the next request and return the seconds until the last byte of its answer."""
        body = self.body()
        before_s = time.perf_counter()
        async with client.post("http://proxy/v1/chat/completions", data=body) as response:
            answer = await response.read()
        spent_s = time.perf_counter() - before_s
        response.raise_for_status()
        self.take(answer)
        return spent_s


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


def _prose(seed: int, length: int) -> str:
    """Return text of about so many bytes, the same for the same seed."""
    chooser = random.Random(seed)
    return " ".join(chooser.choices(_WORDS, k=length // 6))


_WORDS = [
    f"{first}{second}{third}" for first in ("pa", "to", "wi") for second in "ker" for third in ("ne", "lu\n", "s")
]
_TOOLS = _json(
    [
        {
            "type": "function",
            "function": {
                "name": f"read_{number}",
                "description": _prose(number, 600),
                "parameters": {
                    "type": "object",
                    "properties": {
                        name: {"type": "string", "description": _prose(number, 60)} for name in ("path", "why")
                    },
                },
            },
        }
        for number in range(TOOLS)
    ]
)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the client measured at one rate.

    Example: ``Load(rate_per_s=20.0, latencies_s=(0.004,), body_bytes=450_000)``.
    """

    rate_per_s: float
    latencies_s: tuple[float, ...]
    body_bytes: int
    """Of the largest request."""


def load(sockets: list[str], rate_per_s: float, calls: int, turns: int, state: str) -> bytes:
    """Build paths if there are none, send calls at a rate, and keep the clients' state in a file; in a process."""
    return _json(asyncio.run(_load(sockets, rate_per_s, calls, turns, Path(state))))


async def _load(sockets: list[str], rate_per_s: float, calls: int, turns: int, state: Path) -> Load:
    harnesses = [Harness(socket, 1000 * number) for number, socket in enumerate(sockets)]
    if state.exists():
        for harness, parts in zip(harnesses, msgspec.msgpack.decode(state.read_bytes()), strict=True):
            harness.parts = parts
    clients = [aiohttp.ClientSession(connector=aiohttp.UnixConnector(each.socket)) for each in harnesses]
    try:
        room = asyncio.Semaphore(BUILDERS)
        await asyncio.gather(*(_build(*each, turns, room) for each in zip(harnesses, clients, strict=True)))
        latencies_s = await _arrivals(harnesses, clients, rate_per_s, calls) if calls else []
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    state.write_bytes(msgspec.msgpack.encode([harness.parts for harness in harnesses]))
    largest = max(len(harness.body()) for harness in harnesses)
    return Load(rate_per_s=rate_per_s, latencies_s=tuple(latencies_s), body_bytes=largest)


async def _build(harness: Harness, client: aiohttp.ClientSession, turns: int, room: asyncio.Semaphore) -> None:
    async with room:
        while len(harness.parts) < 2 * turns:
            await harness.ask(client)


async def _arrivals(
    harnesses: list[Harness], clients: list[aiohttp.ClientSession], rate_per_s: float, calls: int
) -> list[float]:
    """Send calls as a Poisson process, each from an execution that waits for none; returns their latencies."""
    chooser = random.Random(rate_per_s)
    loop = asyncio.get_running_loop()
    at_s, latencies_s = loop.time(), []

    async def one(number: int) -> None:
        harnesses[number].is_asking = True
        latencies_s.append(await harnesses[number].ask(clients[number]))
        harnesses[number].is_asking = False

    async with asyncio.TaskGroup() as group:
        for _ in range(calls):
            at_s += chooser.expovariate(rate_per_s)
            await asyncio.sleep(at_s - loop.time())
            free = [number for number, harness in enumerate(harnesses) if not harness.is_asking]
            if free:
                group.create_task(one(chooser.choice(free)))
    return latencies_s


# -- the measurement ------------------------------------------------------------------------------------------


def run(*, executions: int = EXECUTIONS, turns: int = TURNS, calls: dict[float, int] | None = None) -> list[Result]:
    """Return the measurements: case, value, unit."""
    with tempfile.TemporaryDirectory(prefix="gyre-p") as folder:
        return asyncio.run(_run(Path(folder), executions, turns, calls or CALLS))


async def _run(folder: Path, executions: int, turns: int, calls: dict[float, int]) -> list[Result]:
    renderer, ledger = FourByteRenderer(), Ledger.open(folder)
    store = TimedLedger(ledger)
    proxy = Proxy(engine=ReadyEngine(renderer), store=store, renderer=renderer, clock=time.monotonic)
    await proxy.start()
    sockets = [str(folder / f"{number:x}") for number in range(executions)]
    for number, socket in enumerate(sockets):
        who = SessionSpec(
            execution_id=f"b{number}", group_id=number, slot=0, attempt=0, run_seed=0, context_tokens=1 << 20
        )
        await proxy.open_execution(who, Path(socket))
    loop, state, results = asyncio.get_running_loop(), folder / "state", []
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            await loop.run_in_executor(pool, load, sockets, 1.0, 0, turns, str(state))
            for rate_per_s in calls:
                renderer.spent_s.clear()
                store.spent_s.clear()
                data = await loop.run_in_executor(pool, load, sockets, rate_per_s, calls[rate_per_s], turns, str(state))
                measured = msgspec.json.decode(data, type=Load)
                parts = _parts(state, renderer, store)
                results += _results(measured, parts)
        tokens = max(call.context_tokens for call in await ledger.calls("b0"))
    finally:
        await proxy.stop()
        ledger.close()
    return [*results, {"case": "longest prompt of the first execution", "value": tokens, "unit": "tokens"}]


def _parts(state: Path, renderer: FourByteRenderer, store: TimedLedger) -> dict[str, float]:
    """Return the median seconds of each part of a call; JSON and matching on the last requests, once more."""
    json_s, match_s = [], []
    for number, parts in enumerate(msgspec.msgpack.decode(state.read_bytes())[:8]):
        harness, reader, index = Harness("", number), BodyReader(), PathIndex()
        harness.parts = parts[:-2]
        parsed = chat.parse_request(reader.read(harness.body()))
        whole = chat.parse_request({**reader.read(harness.body()), "messages": [msgspec.json.decode(p) for p in parts]})
        for place, message in enumerate(whole.messages):
            if message.role == "assistant":
                index.add(f"c{place}", index.match(whole.messages[:place], parsed.tools).keys, message)
        harness.parts = parts
        body = harness.body()
        before_s = time.perf_counter()
        parsed = chat.parse_request(reader.read(body))
        json_s.append(time.perf_counter() - before_s)
        before_s = time.perf_counter()
        index.match(parsed.messages, parsed.tools)
        match_s.append(time.perf_counter() - before_s)
    return {
        "JSON": float(np.median(json_s)),
        "matching": float(np.median(match_s)),
        "rendering": float(np.median(renderer.spent_s)),
        "commit": float(np.median(store.spent_s)),
    }


def _results(measured: Load, parts: dict[str, float]) -> list[Result]:
    rate = f"{measured.rate_per_s:g} calls/s"
    middle, tail = np.percentile(measured.latencies_s, (50, 99))
    rows: list[tuple[str, float | int, str]] = [
        (f"{rate}: p50", round(1000 * float(middle), 2), "ms"),
        (f"{rate}: p99", round(1000 * float(tail), 2), "ms"),
        *((f"{rate}: {name}, median", round(1000 * spent_s, 3), "ms") for name, spent_s in parts.items()),
        (f"{rate}: calls", len(measured.latencies_s), "calls"),
        (f"{rate}: largest body", measured.body_bytes, "bytes"),
    ]
    return [{"case": case, "value": value, "unit": unit} for case, value, unit in rows]
