"""Advantages of a group: each valid reward against the group's mean."""

from collections.abc import Sequence

import numpy as np


def advantages(rewards: Sequence[float | None], *, eps: float = 1e-6, use_std: bool = True) -> tuple[float | None, ...]:
    """Return A_i = (R_i - mean) / (std + eps) over the valid executions; None stays None.

    With fewer than two valid rewards, or rewards that are all equal, every valid advantage is 0.

    Source: paper, group-relative advantages over valid executions.
    Choice: population standard deviation; a missing reward takes no part in mean or deviation.

    >>> [None if a is None else round(a, 4) for a in advantages([1, 0, None, 1], eps=0.0)]
    [0.7071, -1.4142, None, 0.7071]
    >>> advantages([0.5, 0.5]), advantages([1.0, None])
    ((0.0, 0.0), (0.0, None))
    """
    valid = np.array([reward for reward in rewards if reward is not None], np.float64)
    if len(valid) < 2 or bool(np.all(valid == valid[0])):
        return tuple(None if reward is None else 0.0 for reward in rewards)
    mean = float(valid.mean())
    scale = float(valid.std()) + eps if use_std else 1.0
    return tuple(None if reward is None else (reward - mean) / scale for reward in rewards)
