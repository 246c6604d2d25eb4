"""Tells the proxy what became of each answer, over one connection that is kept. Standard library only.

A client that hung up is reported at once, for its retry may come any moment; that all went well can wait a second, and
so goes with others. A receipt is offered until the proxy acknowledges it; the journal on disk has it in any case.
"""

import itertools
import selectors
import socket
import time

from gyre_shim.heads import PROTOCOL_HEADER, header

RETRY_S = 0.1
BATCH_S = 1.0
"""How long a receipt that nobody waits for may wait for others."""
MOST_AT_ONCE = 500
"""So that a batch fits into the socket's buffer."""


class ReceiptPost:
    """Posts receipts, those that wait together.

    Args:
        selector: The shim's selector.
        upstream_path: Unix socket of the proxy.
    """

    def __init__(self, selector: selectors.BaseSelector, upstream_path: str) -> None:
        self._selector = selector
        self._upstream_path = upstream_path
        self._waiting: dict[str, bytes] = {}
        self._connection: socket.socket | None = None
        self._asked: tuple[str, ...] = ()
        """Request ids of the receipts that are on their way."""
        self._answer = b""
        self._due_s = 0.0

    @property
    def has_some(self) -> bool:
        """Whether receipts wait to be acknowledged."""
        return bool(self._waiting)

    def add(self, request_id: str, text: bytes, now_s: float, *, is_urgent: bool) -> None:
        """Take a receipt; post it now, or within ``BATCH_S``.

        Args:
            request_id: What it is about.
            text: The receipt, a JSON object on one line.
            now_s: Monotonic time.
            is_urgent: Post it at once.
        """
        if not self._waiting:
            self._due_s = now_s + BATCH_S
        self._waiting[request_id] = text
        if is_urgent:
            self.flush(now_s)

    def flush(self, now_s: float) -> None:
        """Post what waits without further delay."""
        self._due_s = now_s
        self.on_tick(now_s)

    def on_tick(self, now_s: float) -> None:
        """Post what is due, unless others are on their way."""
        if self._waiting and not self._asked and now_s >= self._due_s:
            self._post(now_s)

    def _post(self, now_s: float) -> None:
        """Post all that waits; a kept connection may have been closed meanwhile."""
        batch = dict(itertools.islice(self._waiting.items(), MOST_AT_ONCE))
        text = b"\n".join(batch.values())
        head = b"POST /_shim/receipt HTTP/1.1\r\nhost: shim\r\ncontent-type: application/x-ndjson\r\n"
        request = head + PROTOCOL_HEADER + b"content-length: %d\r\n\r\n%b" % (len(text), text)
        for _ in range(2):
            was_kept = self._connection is not None
            try:
                connection = self._connected()
                connection.sendall(request)
            except OSError:
                self._drop()
                if was_kept:
                    continue
                break
            self._asked, self._answer = tuple(batch), b""
            return
        self._due_s = now_s + RETRY_S

    def _connected(self) -> socket.socket:
        if self._connection is None:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self._upstream_path)
            except OSError:
                connection.close()
                raise
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, self._on_answer)
            self._connection = connection
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None
        self._asked = ()

    def _on_answer(self, _: object) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._give_up()
            return
        self._answer += data
        if not self._asked or not _is_whole(self._answer):
            return
        if self._answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 4")):
            for request_id in self._asked:
                self._waiting.pop(request_id, None)
            self._asked = ()
        else:
            self._give_up()

    def _give_up(self) -> None:
        """Let the connection go; receipts that were on their way are posted again a little later."""
        if self._asked:
            self._due_s = time.monotonic() + RETRY_S
        self._drop()


def _is_whole(answer: bytes) -> bool:
    """Whether an answer has arrived up to its last byte."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    length = header(head, b"content-length")
    return bool(separator) and (not length.isdigit() or len(body) >= int(length))
