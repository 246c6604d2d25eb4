"""Just enough HTTP/1.1 to pass messages on: heads, bodies by length, in chunks or up to the end of the connection."""

from dataclasses import dataclass, field

HEAD_LIMIT_BYTES = 256 * 1024


class ProtocolError(Exception):
    """What came over the connection is not HTTP/1.1 as this program speaks it."""


@dataclass
class Head:
    """The first line and the headers of a message.

    >>> Head("GET /v1/models HTTP/1.1", [("Host", "x")]).get("host")
    'x'
    """

    first_line: str
    headers: list[tuple[str, str]] = field(default_factory=list)

    def get(self, name: str) -> str | None:
        """Return the value of the first header of that name, in whatever case."""
        for key, value in self.headers:
            if key.lower() == name:
                return value
        return None

    @property
    def status(self) -> int:
        """Status code of a response.

        Raises:
            ProtocolError: The first line is none of a response.
        """
        parts = self.first_line.split(" ", 2)
        if len(parts) < 2 or not parts[1].isdigit():
            raise ProtocolError(f"status line {self.first_line!r}: expected HTTP/1.1 and a number")
        return int(parts[1])

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection may serve another message."""
        connection = (self.get("connection") or "").lower()
        return "close" not in connection and ("HTTP/1.0" not in self.first_line or "keep-alive" in connection)

    def encode(self) -> bytes:
        """Return the head as bytes, with the empty line behind it."""
        lines = [self.first_line, *(f"{name}: {value}" for name, value in self.headers), "", ""]
        return "\r\n".join(lines).encode("latin-1")


def take_head(buffer: bytearray) -> Head | None:
    """Remove a whole head from the front of ``buffer``; None while it is not complete.

    Raises:
        ProtocolError: It is longer than ``HEAD_LIMIT_BYTES`` or a line has no colon.

    >>> buffer = bytearray(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\nrest")
    >>> take_head(buffer).headers, bytes(buffer)
    ([('Host', 'x')], b'rest')
    """
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        if len(buffer) > HEAD_LIMIT_BYTES:
            raise ProtocolError(f"a head of more than {HEAD_LIMIT_BYTES} bytes")
        return None
    lines = buffer[:end].decode("latin-1").lstrip("\r\n").split("\r\n")
    del buffer[: end + 4]
    headers = []
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon:
            raise ProtocolError(f"header line {line!r}: expected a colon")
        headers.append((name.strip(), value.strip()))
    return Head(lines[0], headers)


class Body:
    """Decodes the body of one message, piece by piece.

    >>> body = Body(Head("HTTP/1.1 200 OK", [("Transfer-Encoding", "chunked")]), is_response=True)
    >>> buffer = bytearray(b"5\\r\\nhello\\r\\n0\\r\\n\\r\\nnext")
    >>> body.take(buffer), body.is_complete, bytes(buffer)
    (b'hello', True, b'next')
    """

    def __init__(self, head: Head, *, is_response: bool) -> None:
        self.is_complete = False
        self.ends_with_connection = False
        self._chunked = (head.get("transfer-encoding") or "").lower() == "chunked"
        self._left = 0
        self._expects = "size"
        length = head.get("content-length")
        bodiless = is_response and (head.status in (204, 304) or head.status < 200)
        if bodiless:
            self._chunked = False
            self.is_complete = True
        elif self._chunked:
            pass
        elif length is not None:
            if not length.isdigit():
                raise ProtocolError(f"content-length {length!r}: expected a number")
            self._left = int(length)
            self.is_complete = self._left == 0
        elif is_response:
            self.ends_with_connection = True
        else:
            self.is_complete = True

    def take(self, buffer: bytearray) -> bytes:
        """Remove what belongs to the body from the front of ``buffer`` and return its payload.

        Raises:
            ProtocolError: A chunk is malformed.
        """
        if self.is_complete:
            return b""
        if self.ends_with_connection:
            piece = bytes(buffer)
            buffer.clear()
            return piece
        if not self._chunked:
            piece = bytes(buffer[: self._left])
            del buffer[: len(piece)]
            self._left -= len(piece)
            self.is_complete = self._left == 0
            return piece
        return self._take_chunks(buffer)

    def _take_chunks(self, buffer: bytearray) -> bytes:
        pieces = []
        while not self.is_complete:
            if self._expects == "data":
                piece = bytes(buffer[: self._left])
                del buffer[: len(piece)]
                pieces.append(piece)
                self._left -= len(piece)
                if self._left:
                    break
                self._expects = "end"
            line_end = buffer.find(b"\r\n")
            if line_end < 0:
                if len(buffer) > HEAD_LIMIT_BYTES:
                    raise ProtocolError("a chunk without an end of line")
                break
            line = bytes(buffer[:line_end])
            del buffer[: line_end + 2]
            self._read_line(line)
        return b"".join(pieces)

    def _read_line(self, line: bytes) -> None:
        if self._expects == "end":
            if line:
                raise ProtocolError(f"{line[:20]!r} behind a chunk: expected the end of the line")
            self._expects = "size"
        elif self._expects == "trailer":
            self.is_complete = not line
        else:
            try:
                self._left = int(line.split(b";", 1)[0], 16)
            except ValueError as error:
                raise ProtocolError(f"chunk size {line[:20]!r}: expected a hexadecimal number") from error
            self._expects = "data" if self._left else "trailer"


def chunk(piece: bytes) -> bytes:
    """Return a chunk of a chunked body; an empty piece gives nothing, for it would end the body.

    >>> chunk(b"hello")
    b'5\\r\\nhello\\r\\n'
    """
    return b"%x\r\n%s\r\n" % (len(piece), piece) if piece else b""


LAST_CHUNK = b"0\r\n\r\n"
