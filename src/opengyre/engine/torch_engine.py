"""The reference engine: continuous batching on one torch thread, token in, token out.

``step`` admits queued calls, computes their new context tokens, and decodes one token for every running call. Several
versions of the weights can be resident: pinned calls keep theirs, all others follow the current one.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from opengyre.core.cells import HandedOver
from opengyre.core.errors import InvariantError
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import Finish, Int32Array, VersionRun
from opengyre.engine.sampling import sample, uniform_draws
from opengyre.engine.slots import SlotBook
from opengyre.model.decoder import DecoderConfig, KeyValueCache, Parameters, forward_cached

PREFILL_TOKENS = 4096
"""Padded tokens of one prefill pass at most."""


@dataclass
class _Live:
    """A call in the engine."""

    request: GenerateRequest
    tokens: Int32Array
    """[context_tokens] int32: context, then output; filled as it is sampled."""
    length: int
    """Context plus output so far."""
    version: int
    slot: int = -1
    computed: int = 0
    """Tokens whose keys and values are in the slot."""
    logprobs: list[float] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)
    """[version, count, mixed] of the output."""
    is_mixed: bool = False
    prefilled: int = 0
    finish: Finish | None = None

    @property
    def sampled(self) -> int:
        """Output tokens so far."""
        return self.length - len(self.request.context)

    def output(self) -> Int32Array:
        """Return the output so far, [T] int32."""
        return self.tokens[len(self.request.context) : self.length].copy()

    def version_runs(self) -> tuple[VersionRun, ...]:
        """Return the version runs of the output."""
        return tuple(VersionRun(version, count, bool(mixed)) for version, count, mixed in self.runs)

    def append(self, token: int, logprob: float) -> None:
        """Take a sampled token."""
        self.tokens[self.length] = token
        self.length += 1
        self.logprobs.append(logprob)
        mixed = int(self.is_mixed)
        if self.runs and self.runs[-1][0] == self.version and self.runs[-1][2] == mixed:
            self.runs[-1][1] += 1
        else:
            self.runs.append([self.version, 1, mixed])
        if token in self.request.stop_ids:
            self.finish = Finish.STOP
        elif self.sampled >= self.request.max_tokens:
            self.finish = Finish.LENGTH


@dataclass
class EngineCounters:
    """What the engine did since its start.

    Example: ``EngineCounters(sampled_tokens=400, prefilled_tokens=120, cached_tokens=900)``.
    """

    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    """Context tokens computed."""
    cached_tokens: int = 0
    """Context tokens taken from the prefix cache."""


class TorchEngine:
    """Continuous batching over one cache.

    Args:
        config: Shape of the decoder.
        slots: Sequences that the cache holds, running or kept for reuse.
        max_running: Calls decoded at once.
        kv_tokens: Tokens of running calls that may be resident at once, outputs at full length included.
        dtype: Number format of the cache; the weights bring their own.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        slots: int,
        max_running: int,
        kv_tokens: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if slots <= max_running:
            raise InvariantError(f"{slots} cache slots for {max_running} running calls: expected more slots")
        self.config = config
        self.counters = EngineCounters()
        self._max_running = max_running
        self._kv_tokens = kv_tokens
        self._cache = KeyValueCache(config, slots=slots, dtype=dtype)
        self._book = SlotBook(slots)
        self._versions: dict[int, Parameters] = {}
        self._current = -1
        self._queue: deque[_Live] = deque()
        self._running: list[_Live] = []
        self._aborted: set[str] = set()

    # -- weights ----------------------------------------------------------------------------------------------

    def set_version(
        self, version: int, parameters: Parameters, *, keep: Iterable[int] = (), drain: bool = False
    ) -> int:
        """Make a version current and return how many calls are in flight.

        Calls in flight go on with the new weights on the keys and values they have (their tokens are marked mixed), or
        finish on the old ones with ``drain``. Pinned calls keep their version.
        """
        self._versions[version] = parameters
        self._current = version
        in_flight = 0
        for live in self._running:
            if live.request.pinned_version is None and live.version != version:
                in_flight += 1
                if not drain:
                    live.version = version
                    live.is_mixed = True
                    self._book.mark_mixed(live.slot)
        needed = {version, *keep} | {live.version for live in self._running}
        needed |= {live.request.pinned_version for live in self._queue if live.request.pinned_version is not None}
        self._versions = {number: held for number, held in self._versions.items() if number in needed}
        return in_flight

    def add_version(self, version: int, parameters: Parameters) -> None:
        """Keep a version beside the current one, for pinned calls."""
        self._versions[version] = parameters

    @property
    def current(self) -> int:
        """Version that new calls get unless they are pinned."""
        return self._current

    @property
    def versions(self) -> tuple[int, ...]:
        """Resident versions."""
        return tuple(self._versions)

    # -- calls ------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> None:
        """Queue a call.

        Raises:
            InvariantError: It does not fit the positions of the policy, or asks for a version that is not resident.
        """
        needed = len(request.context) + request.max_tokens
        if needed > self.config.context_tokens or not len(request.context):
            raise InvariantError(
                f"call {request.call_id}: {len(request.context)} context + {request.max_tokens} new tokens, "
                f"expected 1 to {self.config.context_tokens}"
            )
        pinned = request.pinned_version
        if pinned is not None and pinned not in self._versions:
            raise InvariantError(f"call {request.call_id}: version {pinned} is not resident, have {self.versions}")
        if pinned is None and self._current < request.minimum_version:
            raise InvariantError(
                f"call {request.call_id}: needs version {request.minimum_version}, the cell has {self._current}"
            )
        tokens = np.zeros(needed, np.int32)
        tokens[: len(request.context)] = request.context
        live = _Live(request, tokens, len(request.context), self._current if pinned is None else pinned)
        if request.output is not None and len(request.output):
            _resume(live, request)
        self._queue.append(live)

    def abort(self, call_id: str) -> None:
        """Stop a call; its partial answer comes out of the next ``step`` with finish ``abort``."""
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

    def hand_over(self) -> list[tuple[str, HandedOver]]:
        """Take every call out, with the tokens it has so far."""
        leaving = [*self._running, *self._queue]
        for live in self._running:
            self._book.finish(live.slot, live.tokens, live.computed)
        self._running, self._queue = [], deque()
        return [
            (
                live.request.call_id,
                HandedOver(
                    output=live.output(),
                    behaviour_logprobs=np.asarray(live.logprobs, np.float32),
                    versions=live.version_runs(),
                    prefilled_tokens=live.prefilled,
                ),
            )
            for live in leaving
        ]

    def clear_cache(self) -> None:
        """Forget all reusable keys and values."""
        self._book.clear()

    # -- one step ---------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[str, Generation]]:
        """Admit, prefill, decode one token for each running call; return the calls that ended."""
        ended = self._drop_aborted()
        self._admit()
        for version in sorted({live.version for live in self._running}):
            batch = [live for live in self._running if live.version == version]
            waiting = [live for live in batch if live.length - live.computed > 1]
            decoding = [live for live in batch if live.length - live.computed == 1]
            for group in _prefill_groups(waiting):
                self._advance(group, version)
            if decoding:
                self._advance(decoding, version)
        return ended + self._collect()

    def _drop_aborted(self) -> list[tuple[str, Generation]]:
        if not self._aborted:
            return []
        for live in [*self._running, *self._queue]:
            if live.request.call_id in self._aborted:
                live.finish = Finish.ABORT
        self._aborted.clear()
        stopped = [live for live in self._queue if live.finish is not None]
        self._queue = deque(live for live in self._queue if live.finish is None)
        return self._collect() + [(live.request.call_id, _generation(live)) for live in stopped]

    def _admit(self) -> None:
        promised = sum(len(live.tokens) for live in self._running)
        while self._queue and len(self._running) < self._max_running:
            live = self._queue[0]
            if self._running and promised + len(live.tokens) > self._kv_tokens:
                return
            if live.request.pinned_version is None:
                live.version = self._current
            placement = self._book.place(
                live.tokens[: live.length], version=live.version, execution_id=live.request.execution_id
            )
            if placement is None:
                return
            self._queue.popleft()
            if placement.copy_from is not None and placement.copy_from != placement.slot:
                self._cache.copy(placement.copy_from, placement.slot, placement.cached)
            live.slot, live.computed = placement.slot, placement.cached
            self.counters.cached_tokens += placement.cached
            promised += len(live.tokens)
            self._running.append(live)

    def _advance(self, group: list[_Live], version: int) -> None:
        """Compute the missing tokens of a group and sample one token for each."""
        counts = np.array([live.length - live.computed for live in group], np.int64)
        tokens = np.zeros((len(group), int(counts.max())), np.int64)
        for row, live in enumerate(group):
            tokens[row, : counts[row]] = live.tokens[live.computed : live.length]
        logits = forward_cached(
            self.config,
            self._versions[version],
            self._cache,
            torch.from_numpy(tokens),
            torch.tensor([live.slot for live in group]),
            torch.tensor([live.computed for live in group]),
            torch.from_numpy(counts),
        )
        for live, count in zip(group, counts.tolist(), strict=True):
            live.computed = live.length
            if count > 1:
                live.prefilled += count
                self.counters.prefilled_tokens += count
                self._book.publish_prefix(live.slot, live.computed)
            else:
                self._book.slot(live.slot).length = live.computed
        ids, logprobs = self._draw(group, logits)
        for live, token, logprob in zip(group, ids, logprobs, strict=True):
            live.append(token, logprob)
        self.counters.sampled_tokens += len(group)

    def _draw(self, group: list[_Live], logits: torch.Tensor) -> tuple[list[int], list[float]]:
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
        return ids.tolist(), logprobs.tolist()

    def _collect(self) -> list[tuple[str, Generation]]:
        ended = [live for live in self._running if live.finish is not None]
        if not ended:
            return []
        self._running = [live for live in self._running if live.finish is None]
        for live in ended:
            self._book.finish(live.slot, live.tokens, live.computed)
        return [(live.request.call_id, _generation(live)) for live in ended]


def _generation(live: _Live) -> Generation:
    return Generation(
        output=live.output(),
        behaviour_logprobs=np.asarray(live.logprobs, np.float32),
        versions=live.version_runs(),
        finish=live.finish or Finish.ABORT,
        prefilled_tokens=live.prefilled,
    )


def _resume(live: _Live, request: GenerateRequest) -> None:
    """Give a handed-over call the tokens it already has."""
    if request.output is None or request.behaviour_logprobs is None:
        raise InvariantError(f"call {request.call_id}: output without logprobs")
    count = len(request.output)
    if len(request.behaviour_logprobs) != count or sum(run.count for run in request.versions) != count:
        raise InvariantError(
            f"call {request.call_id}: {count} output tokens, {len(request.behaviour_logprobs)} logprobs, "
            f"version runs {request.versions}"
        )
    live.tokens[live.length : live.length + count] = request.output
    live.length += count
    live.logprobs = [float(value) for value in request.behaviour_logprobs]
    live.runs = [[run.version, run.count, int(run.mixed)] for run in request.versions]


def _prefill_groups(waiting: list[_Live]) -> list[list[_Live]]:
    """Cut calls that need prefill into passes of similar length and at most ``PREFILL_TOKENS`` padded tokens."""
    groups: list[list[_Live]] = []
    longest = 0
    for live in sorted(waiting, key=lambda item: item.length - item.computed):
        longest = max(longest, live.length - live.computed)
        if not groups or longest * (len(groups[-1]) + 1) > PREFILL_TOKENS:
            groups.append([])
            longest = live.length - live.computed
        groups[-1].append(live)
    return groups
