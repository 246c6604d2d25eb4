"""The one place that writes to the terminal: rich where it is a terminal, plain lines elsewhere."""

from collections.abc import Sequence
from functools import cache

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


@cache
def console() -> Console:
    """Return the console of standard output."""
    return Console(highlight=False)


def plain_table(title: str, names: Sequence[str], *, left: Sequence[str] = ("rule",), gap: int = 0) -> Table:
    """Return an empty table of narrow columns, as `simulate` prints them: figures stand at the right.

    Args:
        title: Above it.
        names: Of the columns.
        left: Columns of text.
        gap: Spaces on both sides of a column.

    >>> [column.justify for column in plain_table("t", ("rule", "h/step")).columns]
    ['left', 'right']
    """
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, gap), pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table
