"""What a run says while it goes: one live panel on a terminal, plain lines elsewhere."""

from collections.abc import Sequence
from types import TracebackType

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from opengyre.core.events import Mode
from opengyre.report.svg import clock, number

LINE_EVERY_S = 30.0
"""Without a terminal: seconds between two lines while no step ends."""
_COLOURS = {Mode.ROLLOUT: "blue", Mode.SWITCHING: "white", Mode.TRAINING: "yellow"}


class CellView(msgspec.Struct, frozen=True, kw_only=True):
    """A cell as the status shows it.

    >>> CellView(cell_id=0, mode=Mode.ROLLOUT, running=12).mode.value
    'rollout'
    """

    cell_id: int
    mode: Mode
    running: int = 0
    """Calls that it decodes."""
    queued: int = 0


class LiveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A moment of a run.

    Example: ``LiveStatus(now_s=61.0, started_s=0.0, step=3, steps=24, version=3, waterlevel=40)``.
    """

    now_s: float
    """Seconds since the start of the run."""
    started_s: float
    """When this driver began; differs from 0 after a resume."""
    step: int
    """Optimizer steps taken."""
    steps: int
    version: int
    waterlevel: int
    queued: int = 0
    """Executions dispatched and not yet started."""
    cells: Sequence[CellView] = ()
    reward: float | None = None
    """Mean of the last step."""
    tokens_per_s: float = 0.0
    waiting_micro_steps: int = 0
    dropped: int = 0
    first_step: int = 0
    """Steps that were taken before this driver began."""
    waits_for: str = ""
    """What a stalled run waits for."""


def remaining_s(status: LiveStatus) -> float | None:
    """Return the time that the steps left will take at the pace of this driver; None before its first step.

    >>> remaining_s(LiveStatus(now_s=60.0, started_s=0.0, step=6, steps=24, version=6, waterlevel=1))
    180.0
    """
    done = status.step - status.first_step
    if done <= 0:
        return None
    return (status.now_s - status.started_s) / done * (status.steps - status.step)


def status_line(status: LiveStatus) -> str:
    """Return a moment as one plain line.

    >>> status_line(LiveStatus(now_s=60.0, started_s=0.0, step=6, steps=24, version=6, waterlevel=9, reward=0.25))
    '1:00  step 6/24  v6  w 9  reward 0.250  0 tokens/s  3:00 left'
    """
    cells = " ".join(f"{cell.cell_id}:{cell.mode.value}({cell.running})" for cell in status.cells)
    left_s = remaining_s(status)
    parts = [
        clock(status.now_s),
        f"step {status.step}/{status.steps}",
        f"v{status.version}",
        f"w {status.waterlevel}",
        cells,
        "" if status.reward is None else f"reward {status.reward:.3f}",
        f"{number(status.tokens_per_s)} tokens/s",
        f"{status.dropped} dropped" if status.dropped else "",
        "" if left_s is None else f"{clock(left_s)} left",
        f"waits for {status.waits_for}" if status.waits_for else "",
    ]
    return "  ".join(part for part in parts if part)


class ProgressDisplay:
    """Shows the moments of a run.

    Example: ``with ProgressDisplay(console) as display: display.show(status)``.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._last: LiveStatus | None = None

    def __enter__(self) -> "ProgressDisplay":
        """Begin."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()

    def show(self, status: LiveStatus) -> None:
        """Show a moment: at once on a terminal; elsewhere when a step ended, something stalls, or time passed."""
        if self._live is not None:
            self._live.update(panel(status))
        elif is_worth_a_line(self._last, status):
            self._last = status
            self._console.print(status_line(status), soft_wrap=True, markup=False)


def is_worth_a_line(last: LiveStatus | None, status: LiveStatus) -> bool:
    """Return whether a log should get a line now."""
    return (
        last is None
        or status.step != last.step
        or status.waits_for != last.waits_for
        or status.now_s - last.now_s >= LINE_EVERY_S
    )


def panel(status: LiveStatus) -> Group:
    """Return a moment for a terminal: a bar, a line of figures, a line a cell."""
    left_s = remaining_s(status)
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(f"step {status.step}/{status.steps}", style="bold"),
        ProgressBar(total=status.steps, completed=status.step, width=40),
        Text(clock(status.now_s) + ("" if left_s is None else f", {clock(left_s)} left")),
    )
    facts = [f"version {status.version}", f"w {status.waterlevel}"]
    if status.queued:
        facts.append(f"{status.queued} queued")
    if status.reward is not None:
        facts.append(f"reward {status.reward:.3f}")
    facts.append(f"{number(status.tokens_per_s)} tokens/s")
    if status.waiting_micro_steps:
        facts.append(f"{status.waiting_micro_steps} micro-steps wait")
    if status.dropped:
        facts.append(f"{status.dropped} dropped")
    lines = [Text("  ".join(facts))]
    for cell in status.cells:
        line = Text(f"cell {cell.cell_id}  ")
        line.append(f"{cell.mode.value:<10}", style=_COLOURS[cell.mode])
        line.append("" if cell.mode is Mode.TRAINING else f"{cell.running} calls, {cell.queued} queued")
        lines.append(line)
    if status.waits_for:
        lines.append(Text(f"nothing moves; waits for {status.waits_for}", style="red"))
    return Group(head, *lines)
