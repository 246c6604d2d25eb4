"""The tokens of an execution's recorded paths, each of them once.

A path that only grows lies in one buffer, so its tokens are handed out without being put together. Where two calls go
on from the same place the first goes on in the buffer, the other begins one of its own that knows what is before it.
"""

from dataclasses import dataclass, field

import msgspec
import numpy as np

from opengyre.core.types import Int32Array

_ROOM = 1024


class _Buffer(msgspec.Struct, eq=False, gc=False):
    """Tokens that follow one another."""

    before: "Path | None"
    """The path that they go on from, if any."""
    start: int
    """Tokens before them."""
    data: Int32Array
    """Tokens, and room for more."""
    used: int
    """How many are taken."""

    def append(self, tokens: Int32Array) -> None:
        """Take more tokens; who holds a view of the earlier ones keeps it."""
        end = self.used + len(tokens)
        if end > len(self.data):
            grown = np.empty(end + end // 2 + _ROOM, np.int32)
            grown[: self.used] = self.data[: self.used]
            self.data = grown
        self.data[self.used : end] = tokens
        self.used = end


class Path(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Tokens from the first on.

    >>> paths = PathTokens()
    >>> asked = paths.grown(None, np.array([1, 2], np.int32))
    >>> once, again = (paths.grown(asked, np.array([token], np.int32)) for token in (3, 4))
    >>> once.tokens().tolist(), again.tokens().tolist(), asked.length
    ([1, 2, 3], [1, 2, 4], 2)
    """

    buffer: _Buffer
    length: int

    def tokens(self) -> Int32Array:
        """Return the tokens, [length] int32; a view where they lie in one buffer."""
        parts = [self.buffer.data[: self.length - self.buffer.start]]
        before = self.buffer.before
        while before is not None:
            parts.append(before.buffer.data[: before.length - before.buffer.start])
            before = before.buffer.before
        return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])


@dataclass
class PathTokens:
    """The recorded paths of one execution, by call."""

    _of: dict[str, Path] = field(default_factory=dict)
    _asked: dict[str, int] = field(default_factory=dict)

    def record(self, call_id: str, path: Path, asked: int) -> None:
        """Keep the path of a call, of which so many tokens are its prompt."""
        self._of[call_id], self._asked[call_id] = path, asked

    def of(self, call_id: str) -> tuple[Path, int]:
        """Return prompt and output of a call as one path, and how many tokens of it are the prompt."""
        return self._of[call_id], self._asked[call_id]

    def grown(self, path: Path | None, tokens: Int32Array) -> Path:
        """Return a path with more tokens behind it."""
        if path is None:
            buffer = _Buffer(None, 0, tokens.copy(), len(tokens))
            return Path(buffer, len(tokens))
        buffer = path.buffer
        if buffer.start + buffer.used == path.length:
            buffer.append(tokens)
        else:
            buffer = _Buffer(path, path.length, tokens.copy(), len(tokens))
        return Path(buffer, path.length + len(tokens))
