"""Carries HTTP/1.1 requests from a loopback port to the proxy's unix socket, one upstream connection a request.

A request whose upstream is lost is sent again under the same id until the proxy answers. What the client has got of an
answer is not sent twice: a committed id gets the same bytes again.
"""

import contextlib
import json
import os
import selectors
import socket
import time
from dataclasses import dataclass, field

from gyre_shim.heads import PROTOCOL_HEADER, header, without_close
from gyre_shim.receipts import RETRY_S, ReceiptPost

KEEP_ALIVE_S = 15.0
LARGEST_HEAD_BYTES = 1 << 16
LARGEST_BODY_BYTES = 1 << 26
MOST_CLIENTS = 128
_ANTHROPIC_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_RESPONSES_PING = b'event: response.keepalive\ndata: {"type": "response.keepalive"}\n\n'


@dataclass
class _Upstream:
    """One request on its way to the proxy and back."""

    request_id: str
    client: "_Client"
    payload: bytes
    is_stream: bool
    path: str
    asked_s: float
    connection: socket.socket | None = None
    to_send: bytes = b""
    head: bytes = b""
    has_head: bool = False
    received: int = 0
    """Bytes of the answer that came on this connection."""
    passed: int = 0
    """Bytes of the answer that were given to the client."""
    retry_s: float = 0.0
    last_sign_s: float = 0.0
    is_answered: bool = False
    """The answer is whole; the client may not have read all of it."""
    is_chunking: bool = False
    """The shim sent its own head because the answer took long; the body is framed anew."""
    body: bytearray = field(default_factory=bytearray)
    """Whole answer of the proxy, kept only while ``is_chunking``."""


@dataclass
class _Client:
    """One connection of the harness."""

    connection: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    out: bytearray = field(default_factory=bytearray)
    current: _Upstream | None = None
    is_gone: bool = False
    is_refused: bool = False
    """What it still sends is thrown away, so that it can read the refusal."""
    thrown_away: int = 0


class Forwarder:
    """All connections of one execution.

    Args:
        selector: The shim's selector.
        listener: Listening socket inside the sandbox's network namespace.
        upstream_path: Unix socket of the proxy.
        journal: File that says of every request what became of its answer.
        prefix: Head of the request ids.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        upstream_path: str,
        *,
        journal: str,
        prefix: str,
    ) -> None:
        self._selector = selector
        self._listener = listener
        self._upstream_path = upstream_path
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._prefix = prefix
        self._number = 0
        self._clients: list[_Client] = []
        self._open: dict[str, _Upstream] = {}
        self.receipts = ReceiptPost(selector, upstream_path)
        self._away_since_s: float | None = None
        self._held_s = 0.0
        self.completed = 0
        """Answers that were delivered in full."""
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    # -- clocks -----------------------------------------------------------------------------------------------

    def held_s(self, now_s: float) -> float:
        """Return the time in which requests waited for a proxy that was away."""
        away_s = now_s - self._away_since_s if self._away_since_s is not None and self._open else 0.0
        return self._held_s + away_s

    def away_s(self, now_s: float) -> float:
        """Return for how long the proxy has been away."""
        return now_s - self._away_since_s if self._away_since_s is not None else 0.0

    def _note_away(self, now_s: float) -> None:
        if self._away_since_s is None:
            self._away_since_s = now_s

    def _note_back(self, now_s: float) -> None:
        if self._away_since_s is not None:
            self._held_s += now_s - self._away_since_s
            self._away_since_s = None

    # -- events -----------------------------------------------------------------------------------------------

    def on_ready(self, key: selectors.SelectorKey) -> None:
        """Handle one ready descriptor."""
        key.data(key.fileobj)

    def on_tick(self, now_s: float) -> None:
        """Retry lost upstreams, keep waiting clients alive, deliver receipts."""
        for upstream in list(self._open.values()):
            if upstream.is_answered:
                continue
            if upstream.connection is None and now_s >= upstream.retry_s:
                self._connect(upstream, now_s)
            if now_s - upstream.last_sign_s >= KEEP_ALIVE_S and not upstream.has_head and not upstream.client.is_gone:
                self._keep_alive(upstream, now_s)
        self.receipts.on_tick(now_s)

    def hang_up_all(self) -> None:
        """The harness is gone: note every open request as hung up."""
        for upstream in list(self._open.values()):
            self._end(upstream, "hung_up")

    def _accept(self, _: object) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._clients) >= MOST_CLIENTS:
            idle = next((client for client in self._clients if client.current is None), None)
            if idle is None:
                connection.close()
                return
            self._drop_client(idle)
        connection.setblocking(False)
        client = _Client(connection)
        self._clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._on_client(client))

    def _on_client(self, client: _Client) -> None:
        if client.out:
            self._flush(client)
        if not client.is_gone:
            self._from_client(client)

    def _from_client(self, client: _Client) -> None:
        try:
            data = client.connection.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop_client(client)
        elif client.is_refused:
            client.thrown_away += len(data)
            if client.thrown_away > LARGEST_BODY_BYTES:
                self._drop_client(client)
        else:
            client.buffer += data
            if client.current is not None and len(client.buffer) > LARGEST_HEAD_BYTES:
                self._drop_client(client)
            else:
                self._next_request(client)

    def _drop_client(self, client: _Client) -> None:
        if client.is_gone:
            return
        client.is_gone = True
        self._clients.remove(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.connection)
        client.connection.close()
        if client.current is not None:
            self._end(client.current, "hung_up")

    # -- requests ---------------------------------------------------------------------------------------------

    def _next_request(self, client: _Client) -> None:
        """Take a whole request out of the buffer and send it on."""
        if client.current is not None or client.is_refused:
            return
        end = client.buffer.find(b"\r\n\r\n", 0, LARGEST_HEAD_BYTES + 4)
        if end < 0:
            if len(client.buffer) > LARGEST_HEAD_BYTES:
                self._refuse(client, b"431 Request Header Fields Too Large")
            return
        lines = bytes(client.buffer[:end]).split(b"\r\n")
        headers = [line for line in lines[1:] if line]
        length, is_chunked = 0, False
        for line in headers:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value) if value.strip().isdigit() else 0
            is_chunked |= name.lower() == b"transfer-encoding" and b"chunked" in value.lower()
        if is_chunked:
            self._refuse(client, b"411 Length Required")
            return
        if length > LARGEST_BODY_BYTES:
            self._refuse(client, b"413 Content Too Large")
            return
        total = end + 4 + length
        if len(client.buffer) < total:
            return
        body = bytes(client.buffer[end + 4 : total])
        del client.buffer[:total]
        self._send_on(client, lines[0], headers, body)

    def _refuse(self, client: _Client, status: bytes) -> None:
        client.out += b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        client.is_refused = True
        client.buffer.clear()
        self._flush(client)

    def _send_on(self, client: _Client, line: bytes, headers: list[bytes], body: bytes) -> None:
        self._number += 1
        request_id = f"{self._prefix}-{self._number}-{os.getpid()}"
        kept = [h for h in headers if h.partition(b":")[0].lower() not in (b"connection", b"x-gyre-request-id")]
        payload = line + b"\r\n" + b"".join(header + b"\r\n" for header in kept)
        payload += b"x-gyre-request-id: " + request_id.encode() + b"\r\n" + PROTOCOL_HEADER
        payload += b"connection: close\r\n\r\n" + body
        now_s = time.monotonic()
        path = line.split(b" ")[1].decode(errors="replace") if line.count(b" ") >= 2 else "/"
        is_stream = b'"stream":true' in body or b'"stream": true' in body
        upstream = _Upstream(request_id, client, payload, is_stream, path, now_s, last_sign_s=now_s)
        client.current = upstream
        self._open[request_id] = upstream
        self._connect(upstream, now_s)

    def _connect(self, upstream: _Upstream, now_s: float) -> None:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._upstream_path)
        except OSError:
            connection.close()
            upstream.retry_s = now_s + RETRY_S
            self._note_away(now_s)
            return
        self._note_back(now_s)
        connection.setblocking(False)
        upstream.connection, upstream.to_send = connection, upstream.payload
        upstream.head, upstream.has_head, upstream.received = b"", False, 0
        upstream.body.clear()
        self._selector.register(
            connection,
            selectors.EVENT_READ | selectors.EVENT_WRITE,
            lambda _: self._from_upstream(upstream),
        )

    def _from_upstream(self, upstream: _Upstream) -> None:
        connection = upstream.connection
        if connection is None:
            return
        try:
            if upstream.to_send:
                sent = connection.send(upstream.to_send[: 1 << 20])
                upstream.to_send = upstream.to_send[sent:]
                if not upstream.to_send:
                    self._selector.modify(connection, selectors.EVENT_READ, lambda _: self._from_upstream(upstream))
            data = connection.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            self._lost(upstream)
            return
        if data:
            self._take(upstream, data)
        elif _is_whole(upstream):
            self._finish(upstream)
        else:
            self._lost(upstream)

    def _lost(self, upstream: _Upstream) -> None:
        """The proxy went away before the answer was whole: ask again under the same id."""
        self._close_upstream(upstream)
        now_s = time.monotonic()
        upstream.retry_s = now_s + RETRY_S
        self._note_away(now_s)

    def _take(self, upstream: _Upstream, data: bytes) -> None:
        """Take bytes of the answer and give the client what it has not got yet."""
        upstream.body += data
        if not upstream.has_head:
            head, separator, _ = bytes(upstream.body).partition(b"\r\n\r\n")
            if not separator:
                return
            upstream.has_head, upstream.head = True, head
        if not upstream.is_chunking:
            whole = without_close(upstream.head) + b"\r\n\r\n" + bytes(upstream.body[len(upstream.head) + 4 :])
            if len(whole) > upstream.passed:
                upstream.client.out += whole[upstream.passed :]
                upstream.passed = len(whole)
                self._flush(upstream.client)
        if _is_whole(upstream):
            self._finish(upstream)

    def _finish(self, upstream: _Upstream) -> None:
        """The answer is whole: give the rest; what became of it is known when the client has read it or gone."""
        client = upstream.client
        if upstream.request_id not in self._open or upstream.is_answered:
            return
        self._close_upstream(upstream)
        upstream.is_answered = True
        if upstream.is_chunking:
            body = _plain_body(upstream)
            client.out += b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        """Give the client what it takes; the rest goes when it is ready for more."""
        if client.is_gone:
            return
        try:
            while client.out:
                sent = client.connection.send(client.out)
                del client.out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._drop_client(client)
            return
        waits = selectors.EVENT_WRITE if client.out else 0
        self._selector.modify(client.connection, selectors.EVENT_READ | waits, lambda _: self._on_client(client))
        if client.out:
            return
        if client.is_refused:
            with contextlib.suppress(OSError):
                client.connection.shutdown(socket.SHUT_WR)
        elif client.current is not None and client.current.is_answered:
            self._end(client.current, "complete")
            self._next_request(client)

    # -- keeping alive ----------------------------------------------------------------------------------------

    def _keep_alive(self, upstream: _Upstream, now_s: float) -> None:
        """Give a waiting client a sign of life that its protocol ignores."""
        if not upstream.is_chunking:
            upstream.is_chunking = True
            kind = b"text/event-stream" if upstream.is_stream else b"application/json"
            upstream.client.out += (
                b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\ntransfer-encoding: chunked\r\n\r\n"
            )
        sign = b" "
        if upstream.is_stream:
            sign = b": waiting\n\n"
            if upstream.path.endswith("/messages"):
                sign = _ANTHROPIC_PING
            elif upstream.path.endswith("/responses"):
                sign = _RESPONSES_PING
        upstream.client.out += b"%x\r\n%b\r\n" % (len(sign), sign)
        upstream.last_sign_s = now_s
        self._flush(upstream.client)

    # -- journal and receipts ---------------------------------------------------------------------------------

    def _close_upstream(self, upstream: _Upstream) -> None:
        if upstream.connection is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(upstream.connection)
            upstream.connection.close()
            upstream.connection = None

    def _end(self, upstream: _Upstream, delivered: str) -> None:
        if self._open.pop(upstream.request_id, None) is None:
            return
        self._close_upstream(upstream)
        upstream.client.current = None
        if not upstream.path.startswith("/v1/") or upstream.path.endswith("/models"):
            return
        self.completed += delivered == "complete"
        sent_bytes = max(0, upstream.passed - len(upstream.client.out))
        receipt = {"request_id": upstream.request_id, "delivered": delivered, "sent_bytes": sent_bytes}
        text = json.dumps(receipt).encode()
        os.write(self._journal, text + b"\n")
        self.receipts.add(upstream.request_id, text, time.monotonic(), is_urgent=delivered != "complete")


def _is_whole(upstream: _Upstream) -> bool:
    """Whether the answer has all its bytes."""
    if not upstream.has_head:
        return False
    body = len(upstream.body) - len(upstream.head) - 4
    length = header(upstream.head, b"content-length")
    if length.isdigit():
        return body >= int(length)
    if header(upstream.head, b"transfer-encoding").lower() == b"chunked":
        return bytes(upstream.body[-5:]) == b"0\r\n\r\n"
    return False


def _plain_body(upstream: _Upstream) -> bytes:
    """Return the answer's body without its framing."""
    body = bytes(upstream.body[len(upstream.head) + 4 :])
    if header(upstream.head, b"transfer-encoding").lower() != b"chunked":
        return body
    parts: list[bytes] = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        count = int(size.split(b";")[0] or b"0", 16)
        if not count:
            break
        parts.append(rest[:count])
        body = rest[count + 2 :]
    return b"".join(parts)
