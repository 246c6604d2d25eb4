"""The driver's clock: seconds since the start of the run, going on where a resumed run stopped."""

import time


class RunClock:
    """A monotonic clock with an offset.

    Args:
        offset_s: Where it starts, 0 for a new run.
    """

    def __init__(self, offset_s: float = 0.0) -> None:
        self._zero_s = time.monotonic() - offset_s

    def __call__(self) -> float:
        """Return the time now, in seconds."""
        return time.monotonic() - self._zero_s
