"""Bodies of requests, read item by item: what an execution has sent before is not read again.

A harness sends its whole history with every call, and all but the end of it is what it sent the last time. The long
lists of a body are therefore cut into their elements without looking into them, and an element whose bytes were seen
before is what it was read as then. A list that begins with the bytes of an earlier one is only cut behind them. So a
call of a 100k-token history costs the reading of its last few messages.

Choice: keyed by the 128-bit xxh3 of the bytes, within one execution: one that builds collisions confuses itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import xxhash

from opengyre.core.errors import CallError
from opengyre.proxy.requests import Json

T = TypeVar("T")
Reader = Callable[[Any, str], Any]
"""Reads a decoded element; the text says where it stands."""
LISTS = ("messages", "input", "tools")
"""Keys of a body whose lists are read by element."""
LISTS_KEPT = 4
"""Under each key; agents whose calls take turns have a list each."""
REQUESTS_KEPT = 16
"""What was not in the last so many requests may be forgotten; it is by twice as many."""
BYTES_KEPT = 16 << 20
"""As for requests: bytes of the elements that were new in them."""
_OPEN, _COMMA = b"[,"
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_TOP = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])


class _KnownList(msgspec.Struct, frozen=True, gc=False):
    """A list that was sent: its bytes without the closing bracket, and its elements."""

    length: int
    digest: bytes
    elements: tuple[bytes, ...]
    """Digests."""

    def is_head_of(self, text: memoryview) -> bool:
        """Return whether a list is this one, or goes on from it."""
        return (
            len(text) > self.length
            and text[self.length] in b",]"
            and xxhash.xxh3_128_digest(text[: self.length]) == self.digest
        )


@dataclass
class BodyReader:
    """Reads the bodies of one execution.

    >>> reader = BodyReader()
    >>> body = reader.read(b'{"model": "m", "messages": [{"role": "user"}]}')
    >>> body["model"], read_items(body["messages"], "messages", lambda raw, where: (raw["role"], where))
    ('m', [('user', 'messages[0]')])
    """

    _lists: dict[str, list[_KnownList]] = field(default_factory=dict)
    """By key, the latest first."""
    _young: dict[Reader, dict[bytes, object]] = field(default_factory=dict)
    """What elements were read as, by their digests."""
    _old: dict[Reader, dict[bytes, object]] = field(default_factory=dict)
    _requests: int = 0
    _bytes: int = 0

    def read(self, data: bytes | bytearray) -> Json:
        """Return a body whose long lists are ``Items``.

        Raises:
            CallError: It is no JSON object.
        """
        try:
            top = _TOP.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return decoded_object(data)
        self._requests += 1
        if self._requests > REQUESTS_KEPT or self._bytes > BYTES_KEPT:
            self._old, self._young, self._requests, self._bytes = self._young, {}, 0, 0
        return {key: self._value(key, raw) for key, raw in top.items()}

    def _value(self, key: str, raw: msgspec.Raw) -> Any:  # noqa: ANN401 - any JSON
        text = memoryview(raw)
        if key not in LISTS or text[0] != _OPEN:
            return _decoded(raw)
        lists = self._lists.setdefault(key, [])
        known = next((each for each in lists if each.is_head_of(text)), None)
        if known is None:
            head, rest = tuple[bytes, ...](), _elements(raw)
        else:
            lists.remove(known)
            head = known.elements
            rest = _elements(b"[" + text[known.length + 1 :]) if text[known.length] == _COMMA else []
        digests = (*head, *map(xxhash.xxh3_128_digest, rest))
        lists.insert(0, _KnownList(len(text) - 1, xxhash.xxh3_128_digest(text[:-1]), digests))
        del lists[LISTS_KEPT:]
        return Items(self, raw, rest, digests)

    def values(self, read: Reader, items: "Items", where: str) -> list[Any]:
        """Return what elements are read as."""
        young, old = self._young.setdefault(read, {}), self._old.get(read, {})
        values: list[Any] = []
        for index, digest in enumerate(items.digests):
            value = young.get(digest)
            if value is None:
                value = old.get(digest)
                if value is None:
                    element = items.raw(index)
                    value = read(_decoded(element), f"{where}[{index}]")
                    self._bytes += len(memoryview(element))
                young[digest] = value
            values.append(value)
        return values


@dataclass
class Items:
    """The elements of a list in a body, each read when it is asked for.

    Example: ``BodyReader().read(data)["messages"].read(_message, "messages")``.
    """

    reader: BodyReader
    _text: msgspec.Raw
    _last: list[msgspec.Raw]
    """Its last elements, cut."""
    digests: tuple[bytes, ...]
    """Of all elements."""

    @property
    def digest(self) -> str:
        """Stands for the bytes of all elements."""
        return xxhash.xxh3_128_hexdigest(b"".join(self.digests))

    def raw(self, index: int) -> msgspec.Raw:
        """Return an element undecoded; one that was known and has been forgotten is cut out now."""
        if index < len(self.digests) - len(self._last):
            self._last = _elements(self._text)
        return self._last[index - len(self.digests)]

    def read(self, read: Callable[[Any, str], T], where: str) -> list[T]:
        """Return what the elements are read as; ``read`` depends on the element alone and returns no None.

        Raises:
            CallError: An element is no JSON, or ``read`` refuses it.
        """
        return self.reader.values(read, self, where)


def read_items(value: Any, where: str, read: Callable[[Any, str], T]) -> list[T]:  # noqa: ANN401 - any JSON
    """Return what the elements of a list are read as; nothing counts as an empty list.

    Raises:
        CallError: It is no list, or ``read`` refuses an element.
    """
    if value is None:
        return []
    if isinstance(value, Items):
        return value.read(read, where)
    if not isinstance(value, list):
        raise CallError(f"{where}: expected a list, got {value!r:.200}")
    return [read(element, f"{where}[{index}]") for index, element in enumerate(value)]


def decoded_object(data: bytes | bytearray) -> Json:
    """Return a body that is decoded as a whole.

    Raises:
        CallError: It is no JSON object.
    """
    body = _decoded(data)
    if not isinstance(body, dict):
        raise CallError(f"the body is {type(body).__name__}, expected an object")
    return body


def _elements(text: msgspec.Raw | bytes) -> list[msgspec.Raw]:
    elements: list[msgspec.Raw] = _decoded(text, _ELEMENTS)
    return elements


def _decoded(data: bytes | bytearray | msgspec.Raw, decoder: msgspec.json.Decoder[Any] = _ANY) -> Any:  # noqa: ANN401
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CallError(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise CallError("the body is not JSON that can be read: it is nested too deeply") from error
