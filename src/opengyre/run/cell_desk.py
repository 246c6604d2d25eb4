"""The driver's desk for cells: carries out switches and publications, watches for losses, notes what each cell did."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from opengyre.cell.client import LocalCell
from opengyre.core.cells import CellStatus, WeightsRef
from opengyre.core.errors import CellLostError, InvariantError
from opengyre.core.events import (
    CellJoined,
    CellLoad,
    CellLost,
    CellReady,
    Event,
    Mode,
    SwitchCell,
    SwitchDone,
    WeightsPublished,
)
from opengyre.core.records import CellSpan, PublicationRecord, RepublicationRecord, SwitchRecord
from opengyre.ledger.ledger import Ledger
from opengyre.run.router import CellRouter

POLL_S = 1.0


@dataclass
class _Span:
    """What a cell is doing since when."""

    mode: Mode
    started_s: float
    busy_s: float = 0.0
    sampled: int = 0
    trained: int = 0


class CellDesk:
    """All cells of a run.

    Args:
        cells: The cells, not started.
        core: Id of the core cell.
        router: Sends calls to those in rollout mode.
        ledger: Takes the records.
        clock: The driver's clock.
        post: Hands an event to the scheduler.
        optimizer_folder: Where the core keeps its optimizer states.
    """

    def __init__(
        self,
        cells: dict[int, LocalCell],
        *,
        core: int,
        router: CellRouter,
        ledger: Ledger,
        clock: Callable[[], float],
        post: Callable[[Event], None],
        optimizer_folder: Path,
    ) -> None:
        self.cells = cells
        self.core = core
        self.versions: dict[int, WeightsRef] = {}
        self.published = 0
        self.trained = 0
        """Newest version: what training goes on from."""
        self.pinned: set[int] = set()
        self.statuses: dict[int, CellStatus] = {}
        self._router = router
        self._ledger = ledger
        self._clock = clock
        self._post = post
        self._optimizer_folder = optimizer_folder
        self._spans: dict[int, _Span] = {}
        self._losses: list[asyncio.Task[None]] = []
        self._recomputed: dict[int, int] = {}
        """Cell to the recomputed tokens that a record has already."""
        self._reported: dict[int, tuple[int, int, int]] = {}

    # -- life -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all cells in rollout mode with the published weights, and watch them."""
        await asyncio.gather(*(self._start_cell(cell) for cell in self.cells.values()))
        self._losses = [asyncio.create_task(self._watch(cell)) for cell in self.cells.values()]

    async def _start_cell(self, cell: LocalCell) -> None:
        trained = self.versions[self.trained]
        optimizer = self._optimizer_folder / Path(trained.path).name
        path = str(optimizer) if cell.cell_id == self.core and optimizer.exists() else ""
        pinned = [self.versions[version] for version in sorted(self.pinned)]
        await cell.start(trained, pinned=pinned, optimizer_path=path)
        await self._serve_published(cell)
        self._spans[cell.cell_id] = _Span(Mode.ROLLOUT, self._clock())
        self._router.open_cell(cell)

    async def stop(self) -> None:
        """Close the books and end all processes."""
        for watcher in self._losses:
            watcher.cancel()
        await asyncio.gather(*self._losses, return_exceptions=True)
        for cell_id in self.cells:
            with contextlib.suppress(CellLostError):
                await self._close_span(cell_id, None)
        await self._note_recomputed()
        await asyncio.gather(*(cell.stop() for cell in self.cells.values()))

    async def _watch(self, cell: LocalCell) -> None:
        """Report the loss of a cell, start it again, report that it joined."""
        while True:
            await cell.lost.wait()
            self._router.close_cell(cell.cell_id)
            self._spans.pop(cell.cell_id, None)
            self._recomputed.pop(cell.cell_id, None)
            self.statuses.pop(cell.cell_id, None)
            self._post(CellLost(cell_id=cell.cell_id))
            await cell.stop()
            await self._start_cell(cell)
            self._post(CellJoined(cell_id=cell.cell_id))

    async def poll(self) -> None:
        """Ask every cell for its load once; report it to the scheduler where it changed."""
        for cell_id, cell in self.cells.items():
            with contextlib.suppress(CellLostError):
                status = await cell.status()
                self.statuses[cell_id] = status
                seen = (status.running, status.queued, status.kv_tokens)
                if status.mode is Mode.ROLLOUT and seen != self._reported.get(cell_id):
                    self._reported[cell_id] = seen
                    self._post(
                        CellLoad(
                            cell_id=cell_id,
                            running=status.running,
                            queued=status.queued,
                            kv_tokens=status.kv_tokens,
                            tokens_per_s=status.tokens_per_s,
                        )
                    )

    # -- modes ------------------------------------------------------------------------------------------------

    async def switch(self, command: SwitchCell) -> None:
        """Bring a cell into a mode and report it."""
        with contextlib.suppress(CellLostError):
            if command.mode is Mode.TRAINING:
                await self._to_training(self.cells[command.cell_id])
            else:
                await self._to_rollout(self.cells[command.cell_id])

    async def _to_training(self, cell: LocalCell) -> None:
        started_s = self._clock()
        count = self._router.close_cell(cell.cell_id)
        await self._close_span(cell.cell_id, Mode.SWITCHING)
        await cell.switch(Mode.TRAINING, self.versions[self.trained])
        while self._router.live_calls(cell.cell_id):
            await asyncio.sleep(0)
        await self._close_span(cell.cell_id, Mode.TRAINING)
        await self._ledger.add_record(
            SwitchRecord(
                cell_id=cell.cell_id,
                mode=Mode.TRAINING,
                started_s=started_s,
                ended_s=self._clock(),
                handed_over=count.handed_over,
                parked=count.parked,
                moved_tokens=count.moved_tokens,
            )
        )
        self._post(SwitchDone(cell_id=cell.cell_id, mode=Mode.TRAINING))
        self._post(CellReady(cell_id=cell.cell_id))

    async def _to_rollout(self, cell: LocalCell) -> None:
        started_s = self._clock()
        await self._close_span(cell.cell_id, Mode.SWITCHING)
        span = self._spans.get(cell.cell_id)
        await self._serve_published(cell)
        self._router.open_cell(cell)
        self._post(SwitchDone(cell_id=cell.cell_id, mode=Mode.ROLLOUT))
        await self._close_span(cell.cell_id, Mode.ROLLOUT, only=span)
        await self._ledger.add_record(
            SwitchRecord(
                cell_id=cell.cell_id,
                mode=Mode.ROLLOUT,
                started_s=started_s,
                ended_s=self._clock(),
                handed_over=0,
                parked=0,
                moved_tokens=0,
            )
        )

    async def _serve_published(self, cell: LocalCell) -> None:
        """Bring a cell into rollout mode with the published version.

        A publication may come in between and does not see this cell yet, so the version is compared again after every
        wait; the caller opens the cell to calls without waiting in between.
        """
        served = -1
        while served != self.published:
            served = self.published
            pinned = [self.versions[version] for version in sorted(self.pinned)]
            await cell.switch(Mode.ROLLOUT, self.versions[served], pinned=pinned)

    async def _close_span(self, cell_id: int, following: Mode | None, *, only: _Span | None = None) -> None:
        """Write down what a cell has done in its present mode and begin the next span.

        Args:
            cell_id: The cell.
            following: What it does next, None at the end.
            only: Do nothing if its span is another one by now.
        """
        status = self.statuses[cell_id] = await self.cells[cell_id].status()
        now_s = self._clock()
        span = self._spans.get(cell_id)
        if only is not None and span is not only:
            return
        if span is not None and now_s > span.started_s:
            await self._ledger.add_record(
                CellSpan(
                    cell_id=cell_id,
                    mode=span.mode,
                    started_s=span.started_s,
                    ended_s=now_s,
                    busy_s=min(max(0.0, status.busy_s - span.busy_s), now_s - span.started_s),
                    tokens=span.trained if span.mode is Mode.TRAINING else status.sampled_tokens - span.sampled,
                )
            )
        if following is not None:
            self._spans[cell_id] = _Span(following, now_s, status.busy_s, status.sampled_tokens)

    async def save_spans(self) -> None:
        """Write down what every cell has done so far, so that a killed run has it in its report."""
        for cell_id, span in list(self._spans.items()):
            if span.mode is not Mode.SWITCHING:
                with contextlib.suppress(CellLostError):
                    await self._close_span(cell_id, span.mode, only=span)

    def note_trained(self, cell_id: int, tokens: int) -> None:
        """Count trained tokens of a cell's present span."""
        if cell_id in self._spans:
            self._spans[cell_id].trained += tokens

    # -- weights ----------------------------------------------------------------------------------------------

    async def take_version(self, weights: WeightsRef, modes: Callable[[int], Mode]) -> None:
        """A new version exists: cells in training mode go on from it."""
        if weights.version != self.trained + 1:
            raise InvariantError(f"version {weights.version} came after version {self.trained}")
        self.versions[weights.version] = weights
        self.trained = weights.version
        for cell_id, cell in self.cells.items():
            if cell_id != self.core and modes(cell_id) is Mode.TRAINING:
                with contextlib.suppress(CellLostError):
                    await cell.switch(Mode.TRAINING, weights)

    async def publish(self, version: int, *, incarnation: int) -> None:
        """Give a version to every cell in rollout mode and report it."""
        started_s = self._clock()
        pinned = sorted(self.pinned)
        asked = [self._refresh(cell_id) for cell_id in self._router.open_cells]
        self.published, before = version, self.published
        loads: list[Awaitable[int]] = [
            self.cells[cell_id].load_weights(self.versions[version], pinned=pinned)
            for cell_id in self._router.open_cells
        ]
        refreshed = asyncio.gather(*asked)
        results = await asyncio.gather(*loads, return_exceptions=True)
        await refreshed
        await self._note_recomputed(before)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, CellLostError):
                raise result
        await self._ledger.add_record(
            PublicationRecord(
                version=version,
                incarnation=incarnation,
                started_s=started_s,
                ended_s=self._clock(),
                live_calls=sum(result for result in results if isinstance(result, int)),
            )
        )
        await self.save_spans()
        self._post(WeightsPublished(version=version, incarnation=incarnation, cells=self._router.open_cells))

    async def _refresh(self, cell_id: int) -> None:
        """Ask a cell for its counters, before it is told anything else."""
        with contextlib.suppress(CellLostError):
            self.statuses[cell_id] = await self.cells[cell_id].status()

    async def _note_recomputed(self, version: int | None = None) -> None:
        """Write down what the publication of a version (the present one) has cost since; version 0 was no change."""
        version = self.published if version is None else version
        counts = {cell_id: status.recomputed_tokens for cell_id, status in self.statuses.items()}
        tokens = sum(max(0, count - self._recomputed.get(cell_id, 0)) for cell_id, count in counts.items())
        self._recomputed.update(counts)
        if version > 0:
            await self._ledger.add_record(
                RepublicationRecord(version=version, ended_s=self._clock(), recomputed_tokens=tokens)
            )

    def forget_versions(self, keep: int) -> None:
        """Remove weight and optimizer files that nothing can need any more: all but the last ``keep`` and pinned."""
        needed = (
            {version for version in self.versions if version > self.trained - keep} | self.pinned | {self.published}
        )
        for version in sorted(set(self.versions) - needed - {0}):
            path = Path(self.versions.pop(version).path)
            path.unlink(missing_ok=True)
            (self._optimizer_folder / path.name).unlink(missing_ok=True)


def shared_folder(run_sockets: Path) -> Path:
    """Return the folder for gradients: shared memory where there is some."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK):
        folder = memory / run_sockets.name
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder
    return run_sockets
