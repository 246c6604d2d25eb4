"""Intervals of time and of confidence: the arithmetic under the report."""

import math
from collections.abc import Iterable, Sequence

import msgspec

Interval = tuple[float, float]

_NORMAL_975 = 1.959963984540054
_STUDENT_975 = {1: 12.7062, 2: 4.3027, 3: 3.1824}


class PairedDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Mean difference of two measurements of the same tasks with its 95% interval.

    >>> paired_difference([0.0, 0.5, 0.25, 0.25], [0.5, 1.0, 0.5, 0.75]).difference
    0.4375
    """

    difference: float
    low: float
    high: float
    pairs: int


def student_975(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t.

    Above three degrees of freedom by the Cornish-Fisher expansion, off by less than 0.001.

    >>> [round(student_975(degrees), 3) for degrees in (1, 4, 10, 127)]
    [12.706, 2.776, 2.228, 1.979]
    """
    if degrees in _STUDENT_975:
        return _STUDENT_975[degrees]
    z = _NORMAL_975
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * degrees**4)
    )


def paired_difference(first: Sequence[float | None], last: Sequence[float | None]) -> PairedDifference | None:
    """Return last minus first over the pairs where both are known, None below two pairs.

    >>> paired_difference([0.0, None, 1.0], [1.0, 1.0, None]) is None
    True
    """
    differences = [b - a for a, b in zip(first, last, strict=True) if a is not None and b is not None]
    count = len(differences)
    if count < 2:
        return None
    mean = math.fsum(differences) / count
    variance = math.fsum((value - mean) ** 2 for value in differences) / (count - 1)
    half = student_975(count - 1) * math.sqrt(variance / count)
    return PairedDifference(difference=mean, low=mean - half, high=mean + half, pairs=count)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the 95% interval of a mean, None below two values.

    >>> mean_interval([1.0])
    """
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = student_975(len(values) - 1) * math.sqrt(variance / len(values))
    return mean - half, mean + half


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, None of nothing.

    >>> mean([1.0, 2.0]), mean([])
    (1.5, None)
    """
    return math.fsum(values) / len(values) if values else None


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile by linear interpolation, 0 of nothing.

    >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5)
    2.5
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals in order that cover the same points.

    >>> union([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)])
    [(0.0, 2.0), (3.0, 4.0)]
    """
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def difference(covered: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """Return what of the first intervals the second do not cover.

    >>> difference([(0.0, 5.0)], [(1.0, 2.0), (4.0, 9.0)])
    [(0.0, 1.0), (2.0, 4.0)]
    """
    left = []
    holes = union(removed)
    for start, end in union(covered):
        place = start
        for hole_start, hole_end in holes:
            if hole_end <= place:
                continue
            if hole_start >= end:
                break
            if hole_start > place:
                left.append((place, hole_start))
            place = hole_end
        if place < end:
            left.append((place, end))
    return left


def total(intervals: Iterable[Interval]) -> float:
    """Return the length of disjoint intervals.

    >>> total([(0.0, 1.0), (2.0, 4.0)])
    3.0
    """
    return math.fsum(end - start for start, end in intervals)
