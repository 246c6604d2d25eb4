"""The reference engine: continuous batching on one torch thread, token in, token out.

``step`` admits queued calls, computes their new context tokens, and decodes one token for every running call. Several
versions of the weights can be resident: pinned calls keep theirs, all others follow the current one.

Running calls lie in the first rows of the cache, in order, so that decoding reads keys and values without copying them;
a row changes places when a call comes or ends, not with every token.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from opengyre.core.cells import HandedOver
from opengyre.core.errors import InvariantError
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import Finish
from opengyre.engine.live import LiveCall, live_call
from opengyre.engine.moved import MovedCache, write_moved
from opengyre.engine.sampling import sample, uniform_draws
from opengyre.engine.slots import SlotBook
from opengyre.model.decoder import DecoderConfig, KeyValueCache, Parameters, forward_cached

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


class TorchEngine:
    """Continuous batching over one cache.

    Args:
        config: Shape of the decoder.
        slots: Sequences that the cache holds, running or kept for reuse.
        max_running: Calls decoded at once.
        kv_tokens: Tokens of running calls that may be resident at once, outputs at full length included.
        dtype: Number format of the cache; the weights bring their own.
        prefill_tokens: Padded tokens of a prefill pass, and new tokens of one call in one step, at most.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        slots: int,
        max_running: int,
        kv_tokens: int,
        dtype: torch.dtype = torch.float32,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        if slots <= max_running:
            raise InvariantError(f"{slots} cache slots for {max_running} running calls: expected more slots")
        self.config = config
        self.counters = EngineCounters()
        self._max_running = max_running
        self._kv_tokens = kv_tokens
        self._prefill_tokens = prefill_tokens
        self._cache = KeyValueCache(config, slots=slots, dtype=dtype)
        self._book = SlotBook(slots)
        self._row_of = list(range(slots))
        self._slot_in = list(range(slots))
        self._versions: dict[int, Parameters] = {}
        self._current = -1
        self._queue: deque[LiveCall] = deque()
        self._running: list[LiveCall] = []
        self._aborted: set[str] = set()

    # -- weights ----------------------------------------------------------------------------------------------

    def set_version(
        self, version: int, parameters: Parameters, *, keep: Iterable[int] = (), drain: bool = False
    ) -> int:
        """Make a version current and return how many calls are in flight.

        Calls in flight go on with the new weights on the keys and values they have (their tokens are marked mixed), or
        finish on the old ones with ``drain``. Pinned calls keep their version.
        """
        self.add_version(version, parameters)
        self._current = version
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

    def add_version(self, version: int, parameters: Parameters) -> None:
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

    def _mix(self, live: LiveCall) -> None:
        live.is_mixed = True
        self._book.mark_mixed(live.slot)

    def parameters(self, version: int) -> Parameters:
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

    def submit(self, request: GenerateRequest, *, moved: MovedCache | None = None) -> None:
        """Queue a call, perhaps with the keys and values that it has from another cell.

        Raises:
            InvariantError: It does not fit the positions of the policy, or asks for a version that is not resident.
        """
        needed = len(request.context) + request.max_tokens
        if needed > self.config.context_tokens or not len(request.context) or request.max_tokens < 1:
            raise InvariantError(
                f"call {request.call_id}: {len(request.context)} context + {request.max_tokens} new tokens, "
                f"expected at least 1 + 1, together at most {self.config.context_tokens}"
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

    def _export(self, live: LiveCall, folder: Path | None) -> str:
        if folder is None or live.is_mixed or not live.computed:
            return ""
        path = folder / f"moved-{live.request.call_id}"
        block = self._cache.export(self._row_of[live.slot], live.computed)
        return str(path) if write_moved(path, MovedCache(live.version, block)) else ""

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
        waiting: deque[LiveCall] = deque()
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

    def _seat(self, live: LiveCall) -> bool:
        """Give a call its slot and the keys and values that exist already."""
        placement = self._book.place(
            live.tokens[: live.length], version=live.version, execution_id=live.request.execution_id
        )
        if placement is None:
            return False
        if placement.copy_from is not None and placement.copy_from != placement.slot:
            self._cache.copy(self._row_of[placement.copy_from], self._row_of[placement.slot], placement.cached)
        live.slot, live.computed = placement.slot, placement.cached
        self._move_row(live.slot, len(self._running))
        moved, live.moved = live.moved, None
        if moved is not None and moved.version == live.version and live.computed < moved.length < live.length:
            self._cache.load(self._row_of[live.slot], moved.block)
            self.counters.moved_tokens += moved.length - live.computed
            live.computed = moved.length
            self._book.publish_prefix(live.slot, live.computed)
        self.counters.cached_tokens += placement.cached
        return True

    def _move_row(self, slot: int, row: int) -> None:
        """Bring a slot's tokens into a row; what lay there takes the row that becomes free."""
        old, other = self._row_of[slot], self._slot_in[row]
        if old == row:
            return
        lengths = self._book.slot(slot).length, self._book.slot(other).length
        self._cache.swap(old, row, one_length=lengths[0], other_length=lengths[1])
        self._row_of[slot], self._row_of[other] = row, old
        self._slot_in[row], self._slot_in[old] = slot, other

    def _prefill_groups(self, waiting: list[LiveCall]) -> list[list[LiveCall]]:
        """Cut calls that need prefill into passes of similar length and bounded padded size."""
        groups: list[list[LiveCall]] = []
        for live in sorted(waiting, key=lambda item: item.missing):
            longest = min(live.missing, self._prefill_tokens)
            if not groups or longest * (len(groups[-1]) + 1) > self._prefill_tokens:
                groups.append([])
            groups[-1].append(live)
        return groups

    def _advance(self, group: list[LiveCall], version: int) -> None:
        """Compute missing tokens of a group; where none is missing any more, sample the next."""
        counts = np.array([min(live.missing, self._prefill_tokens) for live in group], np.int64)
        tokens = np.zeros((len(group), int(counts.max())), np.int64)
        for row, live in enumerate(group):
            tokens[row, : counts[row]] = live.tokens[live.computed : live.computed + counts[row]]
        logits = forward_cached(
            self.config,
            self._versions[version],
            self._cache,
            torch.from_numpy(tokens),
            torch.tensor([self._row_of[live.slot] for live in group]),
            torch.tensor([live.computed for live in group]),
            torch.from_numpy(counts),
        )
        ready = []
        for row, (live, count) in enumerate(zip(group, counts.tolist(), strict=True)):
            prefilled = live.note_computed(count)
            self.counters.prefilled_tokens += prefilled
            self._book.slot(live.slot).length = live.computed
            if not live.missing:
                ready.append(row)
                if prefilled:
                    self._book.publish_prefix(live.slot, live.computed)
        if len(ready) < len(group):
            group, logits = [group[row] for row in ready], logits[ready]
        if group:
            self._sample(group, logits)

    def _sample(self, group: list[LiveCall], logits: torch.Tensor) -> None:
        requests = [live.request for live in group]
        seeds = np.array([request.seed for request in requests], np.uint64)
        positions = np.array([live.sampled for live in group], np.uint64)
        restricted = any(request.top_p < 1 or request.top_k for request in requests)
        ids, logprobs = sample(
            logits,
            temperatures=torch.tensor([request.temperature for request in requests]),
            draws=uniform_draws(seeds, positions),
            top_p=torch.tensor([request.top_p for request in requests]) if restricted else None,
            top_k=torch.tensor([request.top_k for request in requests]) if restricted else None,
        )
        for live, token, logprob in zip(group, ids.tolist(), logprobs.tolist(), strict=True):
            live.append(token, logprob)
        self.counters.sampled_tokens += len(group)

    def _collect(self) -> list[tuple[str, Generation]]:
        """Take the ended calls out; the last running call fills the row that becomes free."""
        ended = [live for live in self._running if live.finish is not None]
        for live in ended:
            row = self._running.index(live)
            last = self._running.pop()
            self._book.finish(live.slot, live.tokens, live.computed)
            if last is not live:
                self._running[row] = last
                self._move_row(last.slot, row)
        return [(live.request.call_id, live.generation()) for live in ended]
