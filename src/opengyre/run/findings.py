"""What ``opengyre doctor`` found, as data."""

from enum import StrEnum

import msgspec


class State(StrEnum):
    """Whether a piece works: ``bad`` stops a run, ``note`` costs something."""

    GOOD = "ok"
    NOTE = "note"
    BAD = "bad"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of the machine or of a run.

    >>> Finding(name="cores", state=State.GOOD, seen="2").fix
    ''
    """

    name: str
    state: State
    seen: str
    fix: str = ""
    """One line: what to do, or what the missing piece would give."""


def bytes_in_words(count: float) -> str:
    """Return a size with its unit.

    >>> bytes_in_words(512), bytes_in_words(3_400_000)
    ('512 B', '3.4 MB')
    """
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"
