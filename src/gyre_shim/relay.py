"""One request of the harness on its way: states, what was sent, and the bytes that keep the client alive."""

import re
import socket
from dataclasses import dataclass, field

from gyre_shim.http1 import LAST_CHUNK, Body, Head, chunk

KEEP_ALIVE_S = 15.0
_STREAMED = re.compile(rb'(?<!\\)"stream"\s*:\s*true')
_HOP_HEADERS = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "proxy-connection", "expect"}
)
_COMMENT = b": waiting\n\n"
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_IGNORED = b'event: gyre.waiting\ndata: {"type": "gyre.waiting"}\n\n'


def is_streamed(body: bytes) -> bool:
    r"""Whether a request body asks for a stream, without parsing it: a quote inside a JSON string is escaped.

    >>> is_streamed(b'{"stream": true}'), is_streamed(b'{"a": "\\"stream\\": true"}')
    (True, False)
    """
    return _STREAMED.search(body) is not None


def keep_alive_bytes(target: str, *, streamed: bool) -> bytes:
    """Return what the client of a target reads and ignores while it waits.

    Choice: chat a comment, Anthropic its own ping event, Responses a data event of an unknown type (comments do not
    reset the timer of Codex), an answer that is not streamed one space (legal before JSON).

    >>> keep_alive_bytes("/v1/chat/completions", streamed=False)
    b' '
    """
    if not streamed:
        return b" "
    path = target.split("?", 1)[0]
    if path.endswith("/messages"):
        return _PING
    return _IGNORED if path.endswith("/responses") else _COMMENT


@dataclass(eq=False)
class Exchange:
    """A request of the harness and the state of its answer.

    Example: after the first 15 seconds without an answer ``head_is_ours`` is true, and a byte was sent every 15 s.
    """

    request_id: str
    head: Head
    body: bytes
    streamed: bool
    started_s: float
    last_sent_s: float
    """When the client last got a byte (or asked)."""
    client: "Client"
    upstream: "Upstream | None" = None
    attempts: int = 0
    retry_at_s: float = 0.0
    held_since_s: float | None = None
    """Since when no proxy has it."""
    head_sent: bool = False
    head_is_ours: bool = False
    is_chunked: bool = False
    sent_bytes: int = 0
    """Payload bytes of the answer given to the client, over all attempts."""
    at_boundary: bool = True
    """No event of the stream is half sent."""
    is_answered: bool = False
    """The whole answer stands in the client's buffer or beyond."""
    closes_client: bool = False

    @property
    def target(self) -> str:
        """Path of the request."""
        parts = self.head.first_line.split(" ")
        return parts[1] if len(parts) > 1 else "/"

    def upstream_request(self) -> bytes:
        """Return the request as the proxy gets it, under its id."""
        headers = [(name, value) for name, value in self.head.headers if name.lower() not in _HOP_HEADERS]
        headers = [(name, value) for name, value in headers if not name.lower().startswith("x-gyre-request-id")]
        headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        headers += [("x-gyre-request-id", self.request_id), ("x-gyre-shim", "1")]
        if self.body or self.head.first_line.startswith(("POST", "PUT", "PATCH")):
            headers.append(("content-length", str(len(self.body))))
        return Head(self.head.first_line, headers).encode() + self.body

    def own_head(self) -> bytes:
        """Return the head that is sent before the proxy has answered; from then on the call cannot fail."""
        kind = "text/event-stream" if self.streamed else "application/json"
        headers = [("content-type", kind), ("cache-control", "no-cache"), ("transfer-encoding", "chunked")]
        return Head("HTTP/1.1 200 OK", headers).encode()

    def keep_alive(self, now_s: float) -> bytes:
        """Return what the client needs now to stay, and note it; empty if nothing is due or possible."""
        if self.is_answered or now_s - self.last_sent_s < KEEP_ALIVE_S or not self.head.first_line.endswith("HTTP/1.1"):
            return b""
        if not self.head_sent:
            data = self.own_head()
            self.head_sent = self.head_is_ours = self.is_chunked = True
        elif not self.is_chunked or not self.at_boundary or (self.sent_bytes and not self.streamed):
            return b""
        else:
            data = b""
        self.last_sent_s = now_s
        return data + chunk(keep_alive_bytes(self.target, streamed=self.streamed))

    def answer_head(self, head: Head, body: Body) -> bytes:
        """Return the head of the answer for the client; empty if ours went out before."""
        if self.head_sent:
            return b""
        self.head_sent = True
        headers = [(name, value) for name, value in head.headers if name.lower() not in _HOP_HEADERS]
        has_length = head.get("content-length") is not None
        if not has_length and not body.is_complete:
            self.is_chunked = self.head.first_line.endswith("HTTP/1.1")
            if self.is_chunked:
                headers.append(("transfer-encoding", "chunked"))
            else:
                self.closes_client = True
        if self.closes_client:
            headers.append(("connection", "close"))
        return Head(head.first_line, headers).encode()

    def answer_piece(self, piece: bytes, now_s: float) -> bytes:
        """Return a piece of the answer's body as the client gets it, and count it."""
        if not piece:
            return b""
        self.sent_bytes += len(piece)
        self.last_sent_s = now_s
        self.at_boundary = piece.endswith(b"\n\n")
        return chunk(piece) if self.is_chunked else piece

    def answer_end(self) -> bytes:
        """Return what closes the answer."""
        self.is_answered = True
        return LAST_CHUNK if self.is_chunked else b""


@dataclass(eq=False)
class Client:
    """A connection of the harness."""

    connection: socket.socket
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)
    head: Head | None = None
    body: Body | None = None
    body_bytes: bytearray = field(default_factory=bytearray)
    exchange: Exchange | None = None


@dataclass(eq=False)
class Upstream:
    """A connection to the proxy; it carries an exchange, a receipt, or nothing (kept for the next)."""

    connection: socket.socket
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)
    exchange: Exchange | None = None
    receipt: dict[str, object] | None = None
    head: Head | None = None
    body: Body | None = None
    payload_bytes: int = 0
    """Payload bytes of this attempt."""
    served: int = 0
    """Messages that went well before."""
