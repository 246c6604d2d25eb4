"""Keys of token blocks, chained from the first token on: equal keys mean equal paths."""

import numpy as np
import xxhash

from opengyre.core.types import Int32Array

BLOCK_TOKENS = 16


def block_keys(tokens: Int32Array, *, version: int) -> list[int]:
    """Return a chained key for each full block of [C] int32 tokens.

    >>> a, b = np.arange(40, dtype=np.int32), np.arange(33, dtype=np.int32)
    >>> block_keys(a, version=1)[:2] == block_keys(b, version=1)
    True
    >>> block_keys(a, version=2)[0] == block_keys(a, version=1)[0]
    False
    """
    keys: list[int] = []
    key = version
    data = np.ascontiguousarray(tokens, np.int32).tobytes()
    step = 4 * BLOCK_TOKENS
    for start in range(0, len(data) - step + 1, step):
        key = xxhash.xxh3_64_intdigest(data[start : start + step], seed=key & 0xFFFFFFFFFFFFFFFF)
        keys.append(key)
    return keys
