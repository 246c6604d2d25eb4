"""The router: sends each call to a cell in rollout mode, hands it over when its cell leaves, parks it if none is left.

Where a call goes is decided by ``choose_cell``, a pure function; the class moves requests and waits.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from opengyre.core.cells import CellClient, HandedOver
from opengyre.core.errors import CellLostError, InvariantError
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import VersionRun


@dataclass(frozen=True)
class CellView:
    """What the choice of a cell looks at.

    Example: ``CellView(cell_id=0, running=12, kv_tokens=3_400, kv_capacity=65_536)``.
    """

    cell_id: int
    running: int
    kv_tokens: int
    kv_capacity: int


def choose_cell(cells: Iterable[CellView], *, tokens: int, last_cell: int | None) -> int | None:
    """Return the cell for a call of ``tokens`` tokens, or None if there is no cell.

    The cell that served the execution last keeps it (its cache is warm) unless it carries more than 1.3 times the
    mean load and another less than 0.8 times, or the call does not fit its cache any more.

    Choice: the two factors are those of the scheduling study, where an execution moves at a call boundary.

    >>> a, b = CellView(0, 10, 900, 1000), CellView(1, 3, 0, 1000)
    >>> choose_cell([a, b], tokens=50, last_cell=0)
    1
    >>> choose_cell([CellView(0, 4, 900, 1000), b], tokens=50, last_cell=0)
    0
    >>> choose_cell([], tokens=50, last_cell=None) is None
    True
    """
    views = list(cells)
    if not views:
        return None
    fitting = [view for view in views if view.kv_tokens + tokens <= view.kv_capacity] or views
    lightest = min(fitting, key=lambda view: (view.running, view.kv_tokens, view.cell_id))
    mean = sum(view.running for view in views) / len(views)
    for view in fitting:
        if view.cell_id == last_cell:
            overloaded = view.running > 1.3 * mean + 1 and lightest.running < 0.8 * mean
            return lightest.cell_id if overloaded else view.cell_id
    return lightest.cell_id


@dataclass
class _Seat:
    """One cell as the router sees it."""

    client: CellClient
    accepts: bool = False
    calls: dict[str, int] = field(default_factory=dict)
    """Call id to its tokens."""
    emptied: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class HandOverCount:
    """What one departure moved; filled while the live calls of a cell leave it."""

    handed_over: int = 0
    parked: int = 0
    moved_tokens: int = 0


class CellRouter:
    """Routes calls to cells in rollout mode; implements ``core.protocols.Router``.

    Args:
        kv_capacity: Tokens of cache in a cell.
        on_prefill: Called with the tokens that were computed a second time because a call moved.
        clock: Seconds on the driver's clock.
    """

    def __init__(self, *, kv_capacity: int, clock: Callable[[], float]) -> None:
        self._kv_capacity = kv_capacity
        self._clock = clock
        self._seats: dict[int, _Seat] = {}
        self._last_cell: dict[str, int] = {}
        self._departures: dict[int, HandOverCount] = {}
        self._parked: set[asyncio.Future[None]] = set()
        self.parked_s = 0.0
        """Time that calls spent without a cell, summed."""
        self.calls_served = 0
        self.calls_moved = 0

    # -- membership -------------------------------------------------------------------------------------------

    def open_cell(self, client: CellClient) -> None:
        """Let a cell in rollout mode take calls; parked calls go on."""
        seat = self._seats.setdefault(client.cell_id, _Seat(client))
        seat.client = client
        seat.accepts = True
        for waiter in self._parked:
            if not waiter.done():
                waiter.set_result(None)

    def close_cell(self, cell_id: int) -> HandOverCount:
        """Stop sending calls to a cell; the counter fills as its live calls leave."""
        seat = self._seats.get(cell_id)
        if seat is not None:
            seat.accepts = False
        count = HandOverCount()
        self._departures[cell_id] = count
        return count

    @property
    def open_cells(self) -> tuple[int, ...]:
        """Cells that take calls."""
        return tuple(cell_id for cell_id, seat in self._seats.items() if seat.accepts)

    @property
    def parked_calls(self) -> int:
        """Calls that wait for a cell."""
        return len(self._parked)

    def live_calls(self, cell_id: int) -> int:
        """Calls that a cell is serving."""
        seat = self._seats.get(cell_id)
        return len(seat.calls) if seat is not None else 0

    # -- calls ------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one call to its end, on as many cells as it takes."""
        cells: list[int] = []
        prefilled = 0
        kv_path = ""
        while True:
            cell_id = await self._place(request)
            seat = self._seats[cell_id]
            seat.calls[request.call_id] = len(request.context) + request.max_tokens
            if not cells or cells[-1] != cell_id:
                cells.append(cell_id)
            try:
                answer = await seat.client.generate(request, kv_path=kv_path)
            except CellLostError:
                seat.accepts = False
                kv_path = ""
                continue
            finally:
                seat.calls.pop(request.call_id, None)
            prefilled += answer.prefilled_tokens
            if isinstance(answer, Generation):
                self.calls_served += 1
                self._last_cell[request.execution_id] = cell_id
                return msgspec.structs.replace(answer, cell_ids=tuple(cells), prefilled_tokens=prefilled)
            request, kv_path = _continued(request, answer), answer.kv_path
            self._note_move(cell_id, request)

    def _note_move(self, cell_id: int, request: GenerateRequest) -> None:
        self.calls_moved += 1
        count = self._departures.get(cell_id)
        if count is None:
            raise InvariantError(f"cell {cell_id} handed over call {request.call_id} but was not told to leave")
        sampled = 0 if request.output is None else len(request.output)
        count.moved_tokens += len(request.context) + sampled
        if self.open_cells:
            count.handed_over += 1
        else:
            count.parked += 1

    async def _place(self, request: GenerateRequest) -> int:
        """Return a cell for the call; waits while there is none."""
        started_s = None
        while True:
            chosen = choose_cell(
                self._views(),
                tokens=len(request.context) + request.max_tokens,
                last_cell=self._last_cell.get(request.execution_id),
            )
            if chosen is not None:
                if started_s is not None:
                    self.parked_s += self._clock() - started_s
                return chosen
            if started_s is None:
                started_s = self._clock()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._parked.add(waiter)
            try:
                await waiter
            finally:
                self._parked.discard(waiter)

    def _views(self) -> list[CellView]:
        return [
            CellView(cell_id, len(seat.calls), sum(seat.calls.values()), self._kv_capacity)
            for cell_id, seat in self._seats.items()
            if seat.accepts
        ]

    def release(self, execution_id: str) -> None:
        """Forget where the execution was served; the driver tells the cells."""
        self._last_cell.pop(execution_id, None)


def _continued(request: GenerateRequest, partial: HandedOver) -> GenerateRequest:
    """Return the request that goes on where a departed cell stopped.

    Raises:
        InvariantError: The partial answer does not extend what the request already had.
    """
    had = 0 if request.output is None else len(request.output)
    if len(partial.output) < had or sum(run.count for run in partial.versions) != len(partial.output):
        raise InvariantError(
            f"call {request.call_id}: handed over with {len(partial.output)} tokens, version runs "
            f"{partial.versions}, after {had} tokens"
        )
    changes: dict[str, Any] = {
        "output": partial.output,
        "behaviour_logprobs": partial.behaviour_logprobs,
        "versions": _merged(partial.versions),
    }
    return msgspec.structs.replace(request, **changes)


def _merged(runs: tuple[VersionRun, ...]) -> tuple[VersionRun, ...]:
    """Join neighbouring runs of one version.

    >>> _merged((VersionRun(1, 2), VersionRun(1, 3), VersionRun(2, 1)))
    (VersionRun(version=1, count=5, mixed=False), VersionRun(version=2, count=1, mixed=False))
    """
    joined: list[VersionRun] = []
    for run in runs:
        if joined and (joined[-1].version, joined[-1].mixed) == (run.version, run.mixed):
            joined[-1] = VersionRun(run.version, joined[-1].count + run.count, run.mixed)
        elif run.count:
            joined.append(run)
    return tuple(joined)
