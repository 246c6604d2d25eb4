"""What a change of weights costs: tokens that were cached, may not be used any more, and are asked for again."""

import numpy as np

from opengyre.core.types import Int32Array
from opengyre.engine.blocks import BLOCK_TOKENS, block_keys

_ANY_VERSION = 0xFFFF_FFFF


class StalePrefixes:
    """Token paths whose keys and values older weights computed, by blocks of ``BLOCK_TOKENS``.

    >>> stale, path = StalePrefixes(), np.arange(40, dtype=np.int32)
    >>> stale.add(path)
    >>> stale.claim(path, cached=16), stale.claim(path, cached=16)
    (16, 0)
    """

    def __init__(self) -> None:
        self._keys: set[int] = set()

    def add(self, tokens: Int32Array) -> None:
        """Note a path [n] int32 that was cached."""
        self._keys.update(block_keys(tokens, version=_ANY_VERSION))

    def claim(self, context: Int32Array, *, cached: int) -> int:
        """Return how many tokens of a context behind the first ``cached`` have to be computed again.

        Each block is counted once: who asks for it afterwards finds what this call computes.
        """
        if not self._keys:
            return 0
        keys = block_keys(np.asarray(context, np.int32), version=_ANY_VERSION)
        known = next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self._keys), 0)
        self._keys.difference_update(keys[:known])
        return max(0, min(known * BLOCK_TOKENS, len(context)) - cached)

    def clear(self) -> None:
        """Forget everything."""
        self._keys.clear()
