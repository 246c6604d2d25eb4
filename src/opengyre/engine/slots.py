"""Which cache slot holds which tokens: prefix reuse over all paths of all executions, by version.

Tokens are hashed in chained blocks, so the slot with the longest common prefix is found by looking up the request's own
blocks from the longest down. A slot's keys and values are only ever given to calls of the version that computed them.
"""

from dataclasses import dataclass, field

import numpy as np

from opengyre.core.errors import InvariantError
from opengyre.core.types import Int32Array
from opengyre.engine.blocks import BLOCK_TOKENS, block_keys
from opengyre.engine.stale import StalePrefixes


@dataclass
class Slot:
    """One cache slot.

    Example: after a call with context [1, 2] and output [3] has ended, ``tokens[:3]`` is [1, 2, 3].
    """

    index: int
    tokens: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    length: int = 0
    """Tokens whose keys and values are computed."""
    version: int | None = None
    """Version that computed all of them; None once they are mixed and must not be reused."""
    is_running: bool = False
    is_pinned: bool = False
    """Its call keeps its version whatever is published."""
    execution_id: str = ""
    used: int = 0
    """Larger is more recent."""
    keys: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Placement:
    """Where a call goes and what it need not compute.

    Example: ``Placement(slot=4, copy_from=2, cached=96)``: copy 96 tokens of slot 2 into slot 4, compute the rest.
    """

    slot: int
    copy_from: int | None
    cached: int


class SlotBook:
    """The book of cache slots.

    Args:
        slots: Number of slots.
    """

    def __init__(self, slots: int) -> None:
        self._slots = [Slot(index) for index in range(slots)]
        self._by_key: dict[int, set[int]] = {}
        self._promised: dict[int, int] = {}
        """Block key to the slot in which it is being computed."""
        self._clock = 0
        self._current = -1
        self._stale = StalePrefixes()

    @property
    def resident_tokens(self) -> int:
        """Tokens of running calls and of caches that may be reused."""
        return sum(slot.length for slot in self._slots)

    @property
    def running_tokens(self) -> int:
        """Tokens of running calls."""
        return sum(slot.length for slot in self._slots if slot.is_running)

    def slot(self, index: int) -> Slot:
        """Return a slot."""
        return self._slots[index]

    def place(
        self, context: Int32Array, *, version: int, execution_id: str, is_pinned: bool = False
    ) -> Placement | None:
        """Take a slot for a context [C] int32, or return None: not now.

        Not now means that every slot is running, or that a running call is about to compute a longer prefix of this
        context than any that is cached. At least the last token is computed anew: its logits are needed.
        """
        keys = block_keys(context, version=version)
        best, cached = self._longest_prefix(keys, context, version)
        if self._is_promised_more(keys, cached):
            return None
        cached = min(cached, len(context) - 1)
        if best is not None and not best.is_running and best.length - cached < BLOCK_TOKENS:
            chosen, source = best, None
        else:
            victim = self._victim(spare=best)
            if victim is None:
                return None
            chosen, source = victim, best.index if best is not None else None
        self._forget_keys(chosen)
        self._clock += 1
        chosen.tokens = context
        chosen.length = cached
        chosen.version = version
        chosen.is_running, chosen.is_pinned = True, is_pinned
        chosen.execution_id = execution_id
        chosen.used = self._clock
        for key in keys[cached // BLOCK_TOKENS :]:
            self._promised.setdefault(key, chosen.index)
        return Placement(chosen.index, source if cached else None, cached)

    def finish(self, index: int, tokens: Int32Array, length: int) -> None:
        """Mark a slot idle; its first ``length`` of ``tokens`` are computed and may be reused if of one version."""
        slot = self._slots[index]
        if not slot.is_running:
            raise InvariantError(f"slot {index} is finished but was not running")
        self._forget_keys(slot)
        slot.is_running = False
        slot.tokens = tokens
        slot.length = length
        if slot.version is None:
            self._stale.add(tokens[:length])
            slot.length = 0
            return
        if slot.version != self._current and not slot.is_pinned:
            self._stale.add(tokens[:length])
        slot.keys = block_keys(tokens[:length], version=slot.version)
        for key in slot.keys:
            self._by_key.setdefault(key, set()).add(index)

    def publish_prefix(self, index: int, length: int) -> None:
        """Let other calls reuse the computed context of a slot that is still running."""
        slot = self._slots[index]
        slot.length = length
        if slot.version is not None and not slot.keys:
            self._forget_keys(slot)
            slot.keys = block_keys(slot.tokens[:length], version=slot.version)
            for key in slot.keys:
                self._by_key.setdefault(key, set()).add(index)

    def publish(self, version: int) -> None:
        """A version is current from now on: what others computed is of no use to calls that are not pinned."""
        if version == self._current:
            return
        self._current = version
        self._stale.clear()
        for slot in self._slots:
            if slot.version not in (None, version) and not slot.is_running and not slot.is_pinned:
                self._stale.add(slot.tokens[: slot.length])

    def claim_stale(self, context: Int32Array, *, cached: int) -> int:
        """Return how many tokens of a context are computed again only because the weights have changed."""
        return self._stale.claim(context, cached=cached)

    def mark_mixed(self, index: int) -> None:
        """The slot's call goes on under newer weights: nobody else may reuse what it holds."""
        slot = self._slots[index]
        self._forget_keys(slot)
        slot.version = None

    def forget_version(self, version: int) -> list[int]:
        """Other weights took this version's number: nothing it computed may be reused; returns its running slots."""
        running = []
        for slot in self._slots:
            if slot.version == version:
                self.mark_mixed(slot.index)
                if slot.is_running:
                    running.append(slot.index)
                else:
                    self._stale.add(slot.tokens[: slot.length])
                    slot.length = 0
        return running

    def release(self, execution_id: str) -> None:
        """Make the execution's idle slots the first to be taken."""
        for slot in self._slots:
            if slot.execution_id == execution_id and not slot.is_running:
                slot.used = 0

    def clear(self) -> None:
        """Forget everything that is not running."""
        self._stale.clear()
        for slot in self._slots:
            if not slot.is_running:
                self._forget_keys(slot)
                slot.length, slot.version, slot.used = 0, None, 0

    def _longest_prefix(self, keys: list[int], context: Int32Array, version: int) -> tuple[Slot | None, int]:
        for count in range(len(keys), 0, -1):
            for index in self._by_key.get(keys[count - 1], ()):
                slot = self._slots[index]
                if slot.version == version:
                    return slot, _common_prefix(slot.tokens[: slot.length], context)
        return None, 0

    def _is_promised_more(self, keys: list[int], cached: int) -> bool:
        following = cached // BLOCK_TOKENS
        return following < len(keys) and keys[following] in self._promised

    def _victim(self, *, spare: Slot | None) -> Slot | None:
        idle = [slot for slot in self._slots if not slot.is_running and slot is not spare]
        if not idle:
            return spare if spare is not None and not spare.is_running else None
        return min(idle, key=lambda slot: slot.used)

    def _forget_keys(self, slot: Slot) -> None:
        for key in slot.keys:
            holders = self._by_key.get(key)
            if holders is not None:
                holders.discard(slot.index)
                if not holders:
                    del self._by_key[key]
        slot.keys = []
        if slot.is_running:
            self._promised = {key: index for key, index in self._promised.items() if index != slot.index}


def _common_prefix(one: Int32Array, other: Int32Array) -> int:
    """Return the length of the longest common prefix.

    >>> _common_prefix(np.array([1, 2, 3], np.int32), np.array([1, 2, 9, 9], np.int32))
    2
    """
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
