"""Clients for a soak of the proxy: executions that talk for a while, hang up, ask again, ask twice, and write nonsense.

Runs in a process of its own; each client gives receipts as a shim does, for only the receiver knows what arrived. What
it says at the end is what each client knows: which answers it got.
"""

import asyncio
import contextlib
import random
import re
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

LONGEST_DELAY_S = 0.03
"""Of an answer of the soak's engine."""
_FAULTS = ("hung_up", "resent", "doubled", "refused")
_PATHS = {"chat": "/v1/chat/completions", "anthropic": "/v1/messages"}
_CALL_ID = re.compile(rb'"id": ?"[^"]*?([a-z0-9]+-c\d+)"')


class SoakResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a wave of clients knows.

    Example: ``SoakResult(answers={"s0": ["s0-c0000"]}, sent=2, hung_up=1, resent=0, doubled=0, refused=0)``.
    """

    answers: dict[str, list[str]]
    """Execution to the call ids of the answers that it got, one for each time."""
    sent: int
    hung_up: int
    resent: int
    """Requests that were sent again with the id of one that was answered."""
    doubled: int
    """Requests that were asked twice at a time."""
    refused: int
    """Nonsense, each refused with 400."""


@dataclass
class _Client:
    execution: str
    calls: int
    chance: random.Random
    http: aiohttp.ClientSession
    answers: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("sent", *_FAULTS), 0))
    history: list[dict[str, Any]] = field(default_factory=list)

    async def talk(self) -> None:
        """Ask so many times, each history one turn longer; now and then go back a few turns."""
        self.history.append({"role": "user", "content": f"{self.execution} " + self._words(300)})
        for number in range(self.calls):
            kind = self.chance.choices(("plain", *_FAULTS), (85, 5, 4, 3, 3))[0]
            if kind == "refused":
                await self._nonsense()
            await self._turn(kind, f"{self.execution}-q{number}")
            if self.chance.random() < 0.05 and len(self.history) > 5:
                del self.history[3:]
                self.history.append({"role": "user", "content": "once more " + self._words(40)})

    async def _turn(self, kind: str, request_id: str) -> None:
        dialect = self.chance.choice(("chat", "anthropic"))
        if kind == "hung_up":
            await self._hang_up(dialect, f"{request_id}-lost")
        asked = [self._ask(dialect, request_id)]
        if kind == "doubled":
            self.counts["doubled"] += 1
            asked.append(self._ask(dialect, f"{request_id}-2"))
        answered = await asyncio.gather(*asked)
        if kind == "resent":
            self.counts["resent"] += 1
            answered.append(await self._ask(dialect, request_id))
        self.answers += answered
        self.history.append({"role": "assistant", "content": f"said {answered[0]}"})
        self.history.append({"role": "user", "content": self._words(self.chance.randrange(20, 400))})

    async def _ask(self, dialect: str, request_id: str) -> str:
        """Send a request, read its answer to the end and return its call id."""
        self.counts["sent"] += 1
        async with self.http.post(_PATHS[dialect], data=self._body(), headers=_headers(request_id)) as response:
            data = await response.read()
        found = _CALL_ID.search(data)
        if response.status != 200 or found is None:
            raise RuntimeError(f"{request_id}: {response.status} {data[:200]!r}")
        await self._receipt(request_id, "complete", len(data))
        return found[1].decode()

    async def _hang_up(self, dialect: str, request_id: str) -> None:
        """Send the request that comes next and leave before its answer is read."""
        timeout = aiohttp.ClientTimeout(total=self.chance.uniform(0.0005, LONGEST_DELAY_S / 2))
        self.counts["hung_up"] += 1
        with contextlib.suppress(TimeoutError):
            async with self.http.post(
                _PATHS[dialect], data=self._body(), headers=_headers(request_id), timeout=timeout
            ) as response:
                await response.content.readany()
        await self._receipt(request_id, "hung_up", 0)

    async def _receipt(self, request_id: str, delivered: str, sent_bytes: int) -> None:
        body = {"request_id": request_id, "delivered": delivered, "sent_bytes": sent_bytes}
        async with self.http.post("/_shim/receipt", json=body) as response:
            response.raise_for_status()

    async def _nonsense(self) -> None:
        self.counts["refused"] += 1
        async with self.http.post(_PATHS["chat"], data=self._body()[:-9]) as response:
            await response.read()
        if response.status != 400:
            raise RuntimeError(f"{self.execution}: nonsense was answered with {response.status}")

    def _body(self) -> bytes:
        return msgspec.json.encode({"model": "policy", "max_tokens": 1000, "messages": self.history})

    def _words(self, count: int) -> str:
        return " ".join(self.chance.choices(("ape", "bee", "cow", "doe"), k=count))


def _headers(request_id: str) -> dict[str, str]:
    return {"x-gyre-request-id": request_id, "x-gyre-shim": "1"}


def wave(sockets: dict[str, str], calls: int, seed: int) -> bytes:
    """Let one client talk on each socket, all at a time; returns a ``SoakResult`` as JSON."""
    return msgspec.json.encode(asyncio.run(_wave(sockets, calls, seed)))


async def _wave(sockets: dict[str, str], calls: int, seed: int) -> SoakResult:
    clients = []
    for name, socket in sockets.items():
        http = aiohttp.ClientSession("http://proxy", connector=aiohttp.UnixConnector(socket))
        clients.append(_Client(name, calls, random.Random(f"{seed}-{name}"), http))
    try:
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.talk())
    finally:
        await asyncio.gather(*(client.http.close() for client in clients))
    totals = {key: sum(client.counts[key] for client in clients) for key in ("sent", *_FAULTS)}
    return SoakResult(answers={client.execution: client.answers for client in clients}, **totals)
