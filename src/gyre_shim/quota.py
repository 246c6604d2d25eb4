"""How much an execution may write: a watch over its folder. Standard library only."""

import os
import time

WATCH_S = 1.0
"""Between two looks, at least; a look that takes long is followed by a longer pause."""
_SHARE = 0.01
"""Largest share of time that goes into looking."""
MOST_ENTRIES = 200_000


def used_bytes(folder: str, *, limit_bytes: int) -> int:
    """Return the bytes on disk below a folder, counted until the limit is passed.

    Links are not followed; an entry without data counts 512 bytes, so that a heap of empty files is seen too.
    """
    total, entries = 0, 0
    waiting = [folder]
    while waiting:
        try:
            listing = list(os.scandir(waiting.pop()))
        except OSError:
            continue
        for entry in listing:
            try:
                details = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            entries += 1
            total += max(512, details.st_blocks * 512)
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
        if total > limit_bytes or entries > MOST_ENTRIES:
            return max(total, limit_bytes + 1)
    return total


class QuotaWatch:
    """Looks at a folder now and then.

    Args:
        folder: What is watched.
        limit_bytes: What it may hold.
    """

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._next_s = 0.0

    def is_over(self, now_s: float) -> bool:
        """Whether the folder holds too much, as far as it was looked at."""
        if now_s < self._next_s:
            return False
        started_s = time.monotonic()
        used = used_bytes(self._folder, limit_bytes=self._limit_bytes)
        self._next_s = now_s + max(WATCH_S, (time.monotonic() - started_s) / _SHARE)
        return used > self._limit_bytes
