"""Retries: a request whose twin lost its client before the last byte gets the twin's answer; others are samples."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from opengyre.core.types import Delivered


@dataclass
class _Asked:
    """A request that was sampled, or is being sampled, and whose answer no client is known to have."""

    request_id: str
    owner: str
    """Request id of who waits for the answer now: its own, or that of a retry."""
    key: Hashable
    is_gone: Callable[[], bool]
    hung_up: bool = False


@dataclass
class Twins:
    """The requests of one execution whose delivery is open.

    Choice: a retry is a request whose twin (same dialect, agent and body, `stream` and token limits aside) lost its
    client before the last byte. A twin with an open or a completed connection makes it a second sample. One lost twin
    answers one retry; the oldest comes first.

    >>> twins, here, gone = Twins(), lambda: False, lambda: True
    >>> twins.asked("r1", "body", gone), twins.asked("r2", "body", here), twins.asked("r3", "body", here)
    ('r1', 'r1', 'r3')
    """

    _of_key: dict[Hashable, list[_Asked]] = field(default_factory=dict)
    _of_id: dict[str, _Asked] = field(default_factory=dict)

    def knows(self, request_id: str) -> bool:
        """Return whether the delivery of a request is open."""
        return request_id in self._of_id

    def asked(self, request_id: str, key: Hashable, is_gone: Callable[[], bool]) -> str:
        """Return the request id whose answer this request gets: its own, or that of a twin.

        Args:
            request_id: Its own id.
            key: What twins have in common.
            is_gone: Whether the connection it came by is lost.
        """
        twin = self._of_id.get(request_id)
        if twin is None:
            lost = (each for each in self._of_key.get(key, ()) if each.hung_up or each.is_gone())
            twin = next(lost, None)
        if twin is None:
            twin = _Asked(request_id, request_id, key, is_gone)
            self._of_key.setdefault(key, []).append(twin)
        twin.owner, twin.is_gone, twin.hung_up = request_id, is_gone, False
        self._of_id[request_id] = twin
        return twin.request_id

    def sent(self, request_id: str) -> None:
        """The whole answer was given to the connection; whether its client got it is said later."""
        twin = self._owned(request_id)
        if twin is not None and not twin.is_gone():
            twin.is_gone = _never

    def delivered(self, request_id: str, how: Delivered) -> str:
        """Note what became of an answer; returns the request id that the calls are stored under.

        What is said of a request whose twin has taken over is of no account: its answer is the twin's by now.
        """
        known = self._of_id.get(request_id)
        twin = self._owned(request_id)
        if twin is not None and how is Delivered.COMPLETE:
            self._drop(twin)
        elif twin is not None:
            twin.hung_up = True
        return known.request_id if known is not None else request_id

    def failed(self, request_id: str) -> None:
        """There is no answer: the next request with this body is a new one."""
        twin = self._owned(request_id)
        if twin is not None:
            self._drop(twin)

    def is_owner(self, request_id: str) -> bool:
        """Return whether what is said of this request counts: no twin has taken its answer over."""
        known = self._of_id.get(request_id)
        return known is None or known.owner == request_id

    def _owned(self, request_id: str) -> _Asked | None:
        twin = self._of_id.get(request_id)
        return twin if twin is not None and twin.owner == request_id else None

    def _drop(self, twin: _Asked) -> None:
        self._of_id = {request_id: each for request_id, each in self._of_id.items() if each is not twin}
        rest = [each for each in self._of_key[twin.key] if each is not twin]
        if rest:
            self._of_key[twin.key] = rest
        else:
            del self._of_key[twin.key]


def _never() -> bool:
    return False
