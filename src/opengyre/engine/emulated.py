"""The emulated engine: a cost model that sleeps instead of computing, behind the same admission, cache and hand-over.

What it answers was written down beforehand: a table from contexts to replies. So a harness gets tokens it can use, and
a call that changes cells goes on with the reply that it began.
"""

import time
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import xxhash

from opengyre.core.errors import FileError
from opengyre.core.protocols import GenerateRequest
from opengyre.core.types import Int32Array
from opengyre.engine.batching import BatchingEngine
from opengyre.engine.live import LiveCall
from opengyre.engine.slots import Placement

Seconds = float
FORGIVEN_S = 0.02
"""What the process's own work may take between two sleeps without making the emulated cell slower."""


class EmulatedCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a cell takes for its work, in seconds; names and meaning are those of a simulated workload.

    >>> costs = EmulatedCosts(step_weights_s=0.01, step_request_s=0.001, step_context_token_s=0.0)
    >>> round(costs.decode_s(calls=10, context_tokens=5000), 6)
    0.02
    """

    step_weights_s: float = 0.004
    """Of a decode step: weights and launch."""
    step_request_s: float = 0.0005
    """Of a decode step: each running call."""
    step_context_token_s: float = 4e-7
    """Of a decode step: KV read, each context token of all running calls."""
    prefill_token_s: float = 4e-5
    """Prefill of a context token that is not in the cell's prefix cache."""
    migrate_token_s: float = 4e-7
    """Taking over the KV of a token from another cell instead."""
    train_token_s: float = 3e-4
    """Forward-backward of a row token."""
    optimizer_s: float = 0.3
    """Reduction of the sums and optimizer step."""
    publish_s: float = 0.3
    """Publication of weights to a cell in rollout mode, which waits."""
    switch_s: float = 0.5
    """Change of a cell's mode."""

    def __post_init__(self) -> None:
        """Refuse negative times."""
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 0 or more seconds")

    def decode_s(self, *, calls: int, context_tokens: int) -> Seconds:
        """Return the time of a step that decodes one token for each of ``calls`` with that many tokens in all."""
        return self.step_weights_s + calls * self.step_request_s + context_tokens * self.step_context_token_s


class Pace:
    """Spends time by sleeping; what the process itself took since the last sleep counts as part of it.

    Choice: without that the books of 8 cells on 2 cores would be added to the costs, and more under load.

    Args:
        clock: Monotonic seconds.
        sleep: Waits.
    """

    def __init__(
        self, clock: Callable[[], Seconds] = time.monotonic, sleep: Callable[[Seconds], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._due_s = 0.0

    def spend(self, seconds: Seconds) -> None:
        """Let ``seconds`` pass from when the last spending ended, at most ``FORGIVEN_S`` ago."""
        now_s = self._clock()
        self._due_s = max(self._due_s, now_s - FORGIVEN_S) + seconds
        if self._due_s > now_s:
            self._sleep(self._due_s - now_s)


class ScriptedReply(msgspec.Struct, frozen=True, array_like=True):
    """A reply that one script gives to a context; ``tokens`` are int32 bytes, the end mark included."""

    script: int
    tokens: bytes


class ReplyTable(msgspec.Struct, frozen=True, kw_only=True):
    """Replies by context. An execution follows one script as long as its contexts are that script's.

    >>> context, reply = np.array([5, 6], np.int32), np.array([7, 1], np.int32)
    >>> table = ReplyTable(replies={context_key(context): [ScriptedReply(0, reply.tobytes())]}, end_id=1, plain_ids=8)
    >>> table.reply(context, execution_id="e0", seed=3).tolist()
    [7, 1]
    >>> 2 <= len(table.reply(reply, execution_id="e0", seed=3)) and table.knows(reply)
    False
    """

    replies: dict[int, list[ScriptedReply]]
    """Context key to what the scripts say there."""
    end_id: int
    """Ends a made-up reply."""
    plain_ids: int
    """Made-up replies have ids below this."""
    scripts: int = 1
    mean_tokens: float = 12.0
    """Mean length of a made-up reply to a context that no script knows."""

    def knows(self, context: Int32Array) -> bool:
        """Whether a script has a reply to a context [C] int32."""
        return context_key(context) in self.replies

    def reply(self, context: Int32Array, *, execution_id: str, seed: int) -> Int32Array:
        """Return the reply to a context [C] int32: a function of its arguments, [T] int32, T >= 1."""
        known = self.replies.get(context_key(context))
        if known is None:
            draws = np.random.default_rng([seed & 0xFFFFFFFF, seed >> 32])
            made_up = draws.integers(0, self.plain_ids, size=draws.geometric(1 / self.mean_tokens))
            return np.append(made_up, self.end_id).astype(np.int32)
        script = script_of(execution_id, self.scripts)
        chosen = next((one for one in known if one.script == script), known[seed % len(known)])
        return np.frombuffer(chosen.tokens, np.int32)


def script_of(execution_id: str, scripts: int) -> int:
    """Return which of ``scripts`` scripts an execution follows."""
    return xxhash.xxh3_64_intdigest(execution_id.encode()) % scripts


def context_key(context: Int32Array) -> int:
    """Return the key of a context [C] int32 in a table of replies."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(context, np.int32).tobytes())


def read_replies(path: Path) -> ReplyTable:
    """Read a table of replies.

    Raises:
        FileError: The file is missing or no such table.
    """
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=ReplyTable)
    except (OSError, msgspec.DecodeError) as error:
        raise FileError(f"{path}: not a table of scripted replies: {error}") from error


class MovedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a call moves with it.

    >>> MovedTokens(version=3, length=96).length
    96
    """

    version: int
    length: int


class EmulatedEngine(BatchingEngine[str, MovedTokens]):
    """Continuous batching that takes the time of a cost model; weights are names.

    Args:
        costs: The cost model.
        replies: What the calls answer.
        pace: Spends the time.
        context_tokens: Positions of a call at most.
        slots: Sequences that the cache remembers.
        max_running: Calls decoded at once.
        kv_tokens: Tokens of running calls that may be resident at once.
    """

    def __init__(
        self,
        costs: EmulatedCosts,
        replies: ReplyTable,
        pace: Pace,
        *,
        context_tokens: int,
        slots: int,
        max_running: int,
        kv_tokens: int,
    ) -> None:
        super().__init__(context_tokens=context_tokens, slots=slots, max_running=max_running, kv_tokens=kv_tokens)
        self._costs = costs
        self._table = replies
        self._pace = pace
        self._replies: WeakKeyDictionary[LiveCall[MovedTokens], Int32Array] = WeakKeyDictionary()

    def _compute(
        self, group: list[LiveCall[MovedTokens]], counts: list[int], version: int, ready: list[int]
    ) -> list[tuple[int, float]]:
        if max(counts) > 1:
            self._pace.spend(sum(counts) * self._costs.prefill_token_s)
        else:
            self._pace.spend(self._costs.decode_s(calls=len(group), context_tokens=sum(one.length for one in group)))
        return [(self._token(group[row]), 0.0) for row in ready]

    def _token(self, live: LiveCall[MovedTokens]) -> int:
        reply = self._replies.get(live)
        if reply is None:
            reply = self._replies[live] = self._reply(live.request)
        return int(reply[live.sampled % len(reply)])

    def _reply(self, request: GenerateRequest) -> Int32Array:
        return self._table.reply(request.context, execution_id=request.execution_id, seed=request.seed)

    def _place_keys(self, placement: Placement, *, row: int) -> None:
        """Nothing is held."""

    def _move_keys(self, slot: int, row: int) -> None:
        """Nothing is held."""

    def _load_keys(self, slot: int, moved: MovedTokens) -> None:
        self._pace.spend(moved.length * self._costs.migrate_token_s)

    def _write_keys(self, live: LiveCall[MovedTokens], path: Path) -> bool:
        try:
            path.write_bytes(msgspec.json.encode(MovedTokens(version=live.version, length=live.computed)))
        except OSError:
            path.unlink(missing_ok=True)
            return False
        return True


def take_moved_tokens(path: Path) -> MovedTokens | None:
    """Read and remove what another emulated engine wrote; None if it is gone or broken, which costs a prefill."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=MovedTokens)
    except (OSError, msgspec.DecodeError):
        return None
    finally:
        path.unlink(missing_ok=True)
