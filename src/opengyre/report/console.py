"""The one place that writes to the terminal: rich where it is a terminal, plain lines elsewhere."""

from functools import cache

from rich.console import Console


@cache
def console() -> Console:
    """Return the console of standard output."""
    return Console(highlight=False)
