"""Where requests arrive: a connection belongs to the execution whose door it came through, and a door has limits."""

import asyncio
import resource
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from opengyre.core.errors import CallError
from opengyre.proxy.session import Session

SETTLING_S = 0.1
"""By then a connection that was accepted has its transport."""


class DoorLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one execution can take of the proxy.

    Choice: limits are per execution, so one that misbehaves runs into its own and no other sees it.

    Example: ``DoorLimits(body_bytes=1 << 20)``.
    """

    body_bytes: int = 64 * 1024 * 1024
    """Largest body of a request."""
    bodies: int = 4
    """Largest bodies that may be held at a time; smaller ones are as many as fit into the same bytes."""
    lines: int = 128
    """Connections at a time; of an execution with a key: requests that are being read or answered at a time."""
    port_lines: int = 2048
    """Connections at a time of a TCP port, which executions with keys share."""
    silent_s: float = 120.0
    """For how long a connection may say nothing, at its start or between two requests.

    Choice: longer than the 90 s for which the clients of harnesses keep idle connections, so that they close first.
    """

    @property
    def held_bytes(self) -> int:
        """Bytes of bodies of one execution that may be held at a time."""
        return self.bodies * self.body_bytes


@dataclass
class Line:
    """One connection."""

    since_s: float
    """When it was opened or last ended a request."""
    asking: int = 0
    """Requests that are being read or answered."""


@dataclass
class Door:
    """A listening socket and what came through it.

    Args:
        session: The execution that a unix socket stands for, until it is closed; at a port a key says who it is.
        is_port: Whether this is a TCP port, which executions with keys share.
    """

    session: Session | None = None
    is_port: bool = False
    is_closed: bool = False
    lines: dict[web.RequestHandler, Line] = field(default_factory=dict)


@dataclass
class _Held:
    """What an execution has open: requests that are being read or answered, and the bytes of their bodies."""

    requests: int = 0
    body_bytes: int = 0


def longest_idle(lines: list[Line]) -> int | None:
    """Return which of the connections has asked nothing for longest, if one is idle.

    >>> longest_idle([Line(since_s=1.0, asking=1), Line(since_s=3.0), Line(since_s=2.0)])
    2
    """
    idle = [index for index, line in enumerate(lines) if not line.asking]
    return min(idle, key=lambda index: lines[index].since_s, default=None)


class _Refusal(asyncio.Protocol):
    """Closes a connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class Doors:
    """All connections of the proxy.

    Args:
        make: Makes the protocol of a new connection.
        limits: What one door lets in.
    """

    def __init__(self, make: Callable[[], web.RequestHandler], limits: DoorLimits) -> None:
        self._make = make
        self.limits = limits
        self._door_of: dict[web.RequestHandler, Door] = {}
        self._held: defaultdict[str, _Held] = defaultdict(_Held)
        """By execution, of those that ask something."""

    def entrance(self, door: Door) -> Callable[[], asyncio.Protocol]:
        """Return the protocol factory of a listening socket.

        Choice: where a door is full the connection that has been idle longest goes; where none is idle the newcomer
        goes, so that work that was begun is ended.
        """

        def enter() -> asyncio.Protocol:
            self._forget_lost(door)
            if len(door.lines) >= (self.limits.port_lines if door.is_port else self.limits.lines):
                going = longest_idle(list(door.lines.values()))
                if going is None:
                    return _Refusal()
                self._close(list(door.lines)[going])
            protocol = self._make()
            door.lines[protocol] = Line(since_s=asyncio.get_running_loop().time())
            self._door_of[protocol] = door
            return protocol

        return enter

    def door_of(self, request: web.Request) -> Door:
        """Return the door that a request came through."""
        return self._door_of[request.protocol]

    def close(self, door: Door) -> None:
        """Let nobody in any more; connections that are open are told so until they have been silent for long enough.

        The execution's histories are not kept for that long.
        """
        door.is_closed, door.session = True, None
        self._forget_lost(door)
        if door.lines:
            asyncio.get_running_loop().call_later(self.limits.silent_s, self._empty, door)

    @contextmanager
    def asking(self, request: web.Request) -> Iterator[None]:
        """Mark the connection of a request as in use."""
        door = self.door_of(request)
        line = door.lines[request.protocol]
        line.asking += 1
        try:
            yield
        finally:
            line.asking -= 1
            line.since_s = asyncio.get_running_loop().time()
            if door.is_closed:
                request.protocol.close()
                self._forget(request.protocol)

    @asynccontextmanager
    async def body(self, request: web.Request, execution_id: str) -> AsyncIterator[bytearray]:
        """Read the body of a request; its bytes count against its execution until the request is answered.

        Raises:
            CallError: It is too large, or the execution holds or asks too much already.
        """
        limit = self.limits.body_bytes
        held = self._held[execution_id]
        if held.requests >= self.limits.lines:
            raise _overloaded(f"{held.requests} requests open, expected at most {self.limits.lines}")
        data = bytearray()
        held.requests += 1
        try:
            if (request.content_length or 0) > limit:
                raise _too_large(limit, request.content_length or 0)
            async for part in request.content.iter_any():
                data += part
                held.body_bytes += len(part)
                if len(data) > limit:
                    raise _too_large(limit, len(data))
                if held.body_bytes > self.limits.held_bytes:
                    raise _overloaded(
                        f"{held.body_bytes} bytes of requests open, expected at most {self.limits.held_bytes}"
                    )
            yield data
        finally:
            held.body_bytes -= len(data)
            held.requests -= 1
            if not held.requests:
                del self._held[execution_id]

    # -- connections that go ----------------------------------------------------------------------------------

    def _forget_lost(self, door: Door) -> None:
        now_s = asyncio.get_running_loop().time()
        for protocol, line in list(door.lines.items()):
            if protocol.transport is None and now_s - line.since_s > SETTLING_S:
                self._forget(protocol)

    def _forget(self, protocol: web.RequestHandler) -> None:
        door = self._door_of.get(protocol)
        if door is not None and not door.lines[protocol].asking:
            del door.lines[protocol], self._door_of[protocol]

    def _close(self, protocol: web.RequestHandler) -> None:
        if protocol.transport is None:
            asyncio.get_running_loop().call_later(SETTLING_S, protocol.force_close)
        protocol.force_close()
        self._forget(protocol)

    def _empty(self, door: Door) -> None:
        for protocol, line in list(door.lines.items()):
            if not line.asking:
                self._close(protocol)


def raise_file_limit() -> None:
    """Let this process have as many open files as the system allows it: an execution takes two and more of them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _overloaded(what: str) -> CallError:
    return CallError(f"this execution has {what}", status=503, code="overloaded")


def _too_large(limit: int, seen: int) -> CallError:
    return CallError(
        f"the body is too large: {seen} bytes or more, expected at most {limit}", status=413, code="request_too_large"
    )
