"""What is computed message by message, kept for the histories of the last requests: the next ones begin like them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from opengyre.core.chat import Message

T = TypeVar("T")
HISTORIES_KEPT = 4
"""Agents whose calls take turns, each of them a history."""


@dataclass
class Heads(Generic[T]):
    """Values of messages, each a function of its message and of the value before it.

    >>> lengths = Heads(lambda message, before: (before or 0) + len(message.content))
    >>> first = Message(role="user", content="four")
    >>> lengths.values([first]), lengths.values([first, Message(role="user", content="five!")])
    ([4], [4, 9])
    """

    compute: Callable[[Message, T | None], T]
    _kept: list[tuple[tuple[Message, ...], list[T]]] = field(default_factory=list)
    """The latest last."""

    def values(self, messages: Sequence[Message]) -> list[T]:
        """Return the value of each message; the list is the caller's to read, not to change."""
        history = tuple(messages)
        place, shared = self._longest(history)
        values = self._kept[place][1][:shared] if shared else []
        before = values[-1] if values else None
        for message in history[shared:]:
            before = self.compute(message, before)
            values.append(before)
        if shared and shared == len(self._kept[place][0]):
            del self._kept[place]
        self._kept.append((history, values))
        del self._kept[:-HISTORIES_KEPT]
        return values

    def cut(self, ends: Callable[[T], bool]) -> None:
        """Forget what was computed behind the first value of each history for which ``ends`` is true."""
        for place, (history, values) in enumerate(self._kept):
            end = next((index for index, value in enumerate(values[:-1], 1) if ends(value)), None)
            if end is not None:
                self._kept[place] = (history[:end], values[:end])

    def _longest(self, messages: tuple[Message, ...]) -> tuple[int, int]:
        """Return which kept history begins most like this one, and how many messages they share."""
        found = (-1, 0)
        for place in range(len(self._kept) - 1, -1, -1):
            kept = self._kept[place][0]
            shared = _shared(kept, messages, found[1])
            if shared > found[1]:
                found = (place, shared)
        return found


def _shared(mine: Sequence[Message], other: Sequence[Message], least: int) -> int:
    """Return the length of the longest common head; 0 where it cannot be longer than ``least``."""
    most = min(len(mine), len(other))
    if most <= least:
        return 0
    for index in range(most):
        if mine[index] is not other[index] and mine[index] != other[index]:
            return index
    return most
