"""Continuous batching without the computation: admission, prefix reuse, versions, hand-over.

What computes stands in a subclass: the reference engine on torch, and the emulated one that sleeps. So both admit, mix
versions and hand calls over by the same code.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from opengyre.core.cells import HandedOver
from opengyre.core.errors import InvariantError
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import Finish
from opengyre.engine.live import LiveCall, MovedT, live_call
from opengyre.engine.slots import Placement, SlotBook

WeightsT = TypeVar("WeightsT")
"""What serves a version: tensors, or a name where nothing is computed."""

PREFILL_TOKENS = 4096
"""Padded tokens of one prefill pass at most, and new tokens of one call in one step at most."""


@dataclass
class EngineCounters:
    """What the engine did since its start.

    Example: ``EngineCounters(sampled_tokens=400, prefilled_tokens=120, cached_tokens=900)``.
    """

    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    """Tokens computed that were given, not sampled here."""
    cached_tokens: int = 0
    """Given tokens taken from the prefix cache."""
    moved_tokens: int = 0
    """Given tokens whose keys and values came with the call from another cell."""
    recomputed_tokens: int = 0
    """Of the prefilled ones: those that were cached until the weights changed, in whole blocks."""


class BatchingEngine(ABC, Generic[WeightsT, MovedT]):
    """Continuous batching over one cache.

    Args:
        context_tokens: Positions of a call at most, context and output.
        slots: Sequences that the cache holds, running or kept for reuse.
        max_running: Calls decoded at once.
        kv_tokens: Tokens of running calls that may be resident at once, outputs at full length included.
        prefill_tokens: Padded tokens of a prefill pass, and new tokens of one call in one step, at most.
    """

    def __init__(
        self,
        *,
        context_tokens: int,
        slots: int,
        max_running: int,
        kv_tokens: int,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        if slots <= max_running:
            raise InvariantError(f"{slots} cache slots for {max_running} running calls: expected more slots")
        self.counters = EngineCounters()
        self._max_running = max_running
        self._kv_tokens = kv_tokens
        self._prefill_tokens = prefill_tokens
        self._context_tokens = context_tokens
        self._book = SlotBook(slots)
        self._versions: dict[int, WeightsT] = {}
        self._current = -1
        self._queue: deque[LiveCall[MovedT]] = deque()
        self._running: list[LiveCall[MovedT]] = []
        self._aborted: set[str] = set()

    # -- weights ----------------------------------------------------------------------------------------------

    def set_version(self, version: int, parameters: WeightsT, *, keep: Iterable[int] = (), drain: bool = False) -> int:
        """Make a version current and return how many calls are in flight.

        Calls in flight go on with the new weights on the keys and values they have (their tokens are marked mixed), or
        finish on the old ones with ``drain``. Pinned calls keep their version.
        """
        self.add_version(version, parameters)
        self._current = version
        self._book.publish(version)
        in_flight = sum(live.request.pinned_version is None and live.version != version for live in self._running)
        if not drain:
            self.end_drain()
        needed = {version, *keep} | {live.version for live in self._running}
        needed |= {live.request.pinned_version for live in self._queue if live.request.pinned_version is not None}
        self._versions = {number: held for number, held in self._versions.items() if number in needed}
        return in_flight

    def end_drain(self) -> None:
        """Let every call that is not pinned go on with the current version."""
        for live in self._running:
            if live.request.pinned_version is None and live.version != self._current:
                live.version = self._current
                self._mix(live)

    def add_version(self, version: int, parameters: WeightsT) -> None:
        """Keep a version beside the current one, for pinned calls.

        A number that is resident with other weights (a new incarnation) loses everything that was cached under it.
        """
        held = self._versions.get(version)
        if held is not None and held is not parameters:
            running = set(self._book.forget_version(version))
            for live in self._running:
                if live.slot in running:
                    self._mix(live)
        self._versions[version] = parameters

    def _mix(self, live: LiveCall[MovedT]) -> None:
        live.is_mixed = True
        self._book.mark_mixed(live.slot)

    def parameters(self, version: int) -> WeightsT:
        """Return the weights of a resident version."""
        return self._versions[version]

    @property
    def current(self) -> int:
        """Version that new calls get unless they are pinned."""
        return self._current

    @property
    def versions(self) -> tuple[int, ...]:
        """Resident versions."""
        return tuple(self._versions)

    # -- calls ------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, *, moved: MovedT | None = None) -> None:
        """Queue a call, perhaps with the keys and values that it has from another cell.

        Raises:
            InvariantError: It does not fit the positions of the policy, or asks for a version that is not resident.
        """
        needed = len(request.context) + request.max_tokens
        if needed > self._context_tokens or not len(request.context) or request.max_tokens < 1:
            raise InvariantError(
                f"call {request.call_id}: {len(request.context)} context + {request.max_tokens} new tokens, "
                f"expected at least 1 + 1, together at most {self._context_tokens}"
            )
        pinned = request.pinned_version
        if pinned is not None and pinned not in self._versions:
            raise InvariantError(f"call {request.call_id}: version {pinned} is not resident, have {self.versions}")
        if pinned is None and self._current < request.minimum_version:
            raise InvariantError(
                f"call {request.call_id}: needs version {request.minimum_version}, the cell has {self._current}"
            )
        version = self._current if pinned is None else pinned
        self._queue.append(live_call(request, version=version, moved=moved))

    def abort(self, call_id: str) -> None:
        """Stop a call; its partial answer comes out of the next ``step`` with finish ``abort``."""
        if any(live.request.call_id == call_id for live in (*self._running, *self._queue)):
            self._aborted.add(call_id)

    def release(self, execution_id: str) -> None:
        """The execution ended: its cache may be taken first."""
        self._book.release(execution_id)

    @property
    def running(self) -> int:
        """Calls being decoded."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Calls that wait for room."""
        return len(self._queue)

    @property
    def kv_tokens(self) -> int:
        """Tokens resident for running calls."""
        return self._book.running_tokens

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._running and not self._queue

    def hand_over(self, folder: Path | None = None) -> list[tuple[str, HandedOver]]:
        """Take every call out, with the tokens it has so far; their keys and values go to files in ``folder``.

        Choice: keys and values of more than one version stay behind, so a moved call is never served from them.
        """
        handed = [(live.request.call_id, live.handed_over(self._export(live, folder))) for live in self._running]
        handed += [(live.request.call_id, live.handed_over("")) for live in self._queue]
        for live in self._running:
            self._book.finish(live.slot, live.tokens, live.computed)
        self._running, self._queue = [], deque()
        self._aborted.clear()
        return handed

    def _export(self, live: LiveCall[MovedT], folder: Path | None) -> str:
        if folder is None or live.is_mixed or not live.computed:
            return ""
        path = folder / f"moved-{live.request.call_id}"
        return str(path) if self._write_keys(live, path) else ""

    def clear_cache(self) -> None:
        """Forget all reusable keys and values."""
        self._book.clear()

    # -- one step ---------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[str, Generation]]:
        """Admit, prefill (which samples a first token), decode one token for each; return the calls that ended."""
        ended = self._drop_aborted()
        self._admit()
        for version in self._running_versions():
            waiting = [live for live in self._running if live.version == version and live.missing > 1]
            for group in self._prefill_groups(waiting):
                self._advance(group, version)
        ended += self._collect()
        for version in self._running_versions():
            decoding = [live for live in self._running if live.version == version and live.missing == 1]
            if decoding:
                self._advance(decoding, version)
        return ended + self._collect()

    def _running_versions(self) -> list[int]:
        return sorted({live.version for live in self._running})

    def _drop_aborted(self) -> list[tuple[str, Generation]]:
        if not self._aborted:
            return []
        for live in [*self._running, *self._queue]:
            if live.request.call_id in self._aborted:
                live.finish = Finish.ABORT
        self._aborted.clear()
        stopped = [live for live in self._queue if live.finish is not None]
        self._queue = deque(live for live in self._queue if live.finish is None)
        return self._collect() + [(live.request.call_id, live.generation()) for live in stopped]

    def _admit(self) -> None:
        """Let queued calls in, oldest first, as far as they fit; one whose prefix is being computed waits a step."""
        promised = sum(len(live.tokens) for live in self._running)
        waiting: deque[LiveCall[MovedT]] = deque()
        while self._queue and len(self._running) < self._max_running:
            live = self._queue[0]
            if self._running and promised + len(live.tokens) > self._kv_tokens:
                break
            self._queue.popleft()
            if live.request.pinned_version is None:
                live.version = self._current
            if not self._seat(live):
                waiting.append(live)
                continue
            promised += len(live.tokens)
            self._running.append(live)
        self._queue.extendleft(reversed(waiting))

    def _seat(self, live: LiveCall[MovedT]) -> bool:
        """Give a call its slot and the keys and values that exist already."""
        context = live.tokens[: live.length]
        is_pinned = live.request.pinned_version is not None
        placement = self._book.place(
            context, version=live.version, execution_id=live.request.execution_id, is_pinned=is_pinned
        )
        if placement is None:
            return False
        live.slot, live.computed = placement.slot, placement.cached
        self._place_keys(placement, row=len(self._running))
        moved, live.moved = live.moved, None
        if moved is not None and moved.version == live.version and live.computed < moved.length < live.length:
            self._load_keys(live.slot, moved)
            self.counters.moved_tokens += moved.length - live.computed
            live.computed = moved.length
            self._book.publish_prefix(live.slot, live.computed)
        self.counters.cached_tokens += placement.cached
        if not is_pinned:
            self.counters.recomputed_tokens += self._book.claim_stale(context, cached=live.computed)
        return True

    def _prefill_groups(self, waiting: list[LiveCall[MovedT]]) -> list[list[LiveCall[MovedT]]]:
        """Cut calls that need prefill into passes of similar length and bounded padded size."""
        groups: list[list[LiveCall[MovedT]]] = []
        for live in sorted(waiting, key=lambda item: item.missing):
            longest = min(live.missing, self._prefill_tokens)
            if not groups or longest * (len(groups[-1]) + 1) > self._prefill_tokens:
                groups.append([])
            groups[-1].append(live)
        return groups

    def _advance(self, group: list[LiveCall[MovedT]], version: int) -> None:
        """Compute missing tokens of a group; where none is missing any more, sample the next."""
        counts = [min(live.missing, self._prefill_tokens) for live in group]
        ready = [row for row, live in enumerate(group) if counts[row] == live.missing]
        samples = self._compute(group, counts, version, ready)
        for live, count in zip(group, counts, strict=True):
            prefilled = live.note_computed(count)
            self.counters.prefilled_tokens += prefilled
            self._book.slot(live.slot).length = live.computed
            if not live.missing and prefilled:
                self._book.publish_prefix(live.slot, live.computed)
        for row, (token, logprob) in zip(ready, samples, strict=True):
            group[row].append(token, logprob)
        self.counters.sampled_tokens += len(ready)

    def _collect(self) -> list[tuple[str, Generation]]:
        """Take the ended calls out; the last running call fills the row that becomes free."""
        ended = [live for live in self._running if live.finish is not None]
        for live in ended:
            row = self._running.index(live)
            last = self._running.pop()
            self._book.finish(live.slot, live.tokens, live.computed)
            if last is not live:
                self._running[row] = last
                self._move_keys(last.slot, row)
        return [(live.request.call_id, live.generation()) for live in ended]

    # -- what a subclass computes -----------------------------------------------------------------------------

    @abstractmethod
    def _compute(
        self, group: list[LiveCall[MovedT]], counts: list[int], version: int, ready: list[int]
    ) -> list[tuple[int, float]]:
        """Compute the next ``counts`` tokens of each call; return (token, logprob) of the ``ready`` rows."""

    @abstractmethod
    def _place_keys(self, placement: Placement, *, row: int) -> None:
        """Bring what is cached of a call to its slot; the call is the ``row``-th that runs."""

    @abstractmethod
    def _move_keys(self, slot: int, row: int) -> None:
        """The call in a slot is the ``row``-th that runs from now on."""

    @abstractmethod
    def _load_keys(self, slot: int, moved: MovedT) -> None:
        """Take over keys and values that came from another cell."""

    @abstractmethod
    def _write_keys(self, live: LiveCall[MovedT], path: Path) -> bool:
        """Write the keys and values of a call that leaves; whether it was possible."""
