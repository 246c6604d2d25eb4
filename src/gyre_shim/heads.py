"""Heads of HTTP/1.1 messages. Standard library only."""

PROTOCOL_HEADER = b"x-gyre-shim: 1\r\n"
"""Says that a shim asks, and which version of the protocol it speaks."""


def header(head: bytes, name: bytes) -> bytes:
    r"""Return the value of a header by its name in lower case, empty without it.

    >>> header(b"HTTP/1.1 200 OK\r\nContent-Length: 12", b"content-length")
    b'12'
    """
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return b""


def without_close(head: bytes) -> bytes:
    """Drop ``connection: close`` from a response head: the client's connection stays."""
    lines = [line for line in head.split(b"\r\n") if line.partition(b":")[0].strip().lower() != b"connection"]
    return b"\r\n".join(lines)
