"""What a live run measures for the look-ahead rule: costs of a cell and times outside it, from its latest calls."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from opengyre.core.errors import InputError
from opengyre.core.events import RatesMeasured
from opengyre.core.protocols import CallStore, RoleRevision
from opengyre.core.types import Call, Delivered
from opengyre.run.recorded import served_call
from opengyre.sim.fit import ServedCall, fit_decode, samples_of

CALLS_KEPT = 1024
"""The fit is made from so many calls, the latest."""
EXECUTIONS_KEPT = 256


@dataclass
class RateBook:
    """The latest calls of a run and what they cost.

    Args:
        kv_capacity_tokens: Context tokens that a cell holds.

    Example: ``note(call)`` for each committed call, ``ended(execution_id)``, then ``measured(training_token_s=6e-4)``.
    """

    kv_capacity_tokens: int
    _calls: deque[ServedCall] = field(default_factory=lambda: deque(maxlen=CALLS_KEPT))
    _outside: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=CALLS_KEPT))
    """Seconds since the execution's last call, and sampled tokens, of each call."""
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=EXECUTIONS_KEPT))
    """Sampled tokens of executions that ended."""
    _live: dict[str, tuple[float, int]] = field(default_factory=dict)
    """End of the last call, and sampled tokens so far."""

    def note(self, call: Call) -> None:
        """Take a committed call in."""
        last_s, tokens = self._live.get(call.execution_id, (call.started_s, 0))
        self._calls.append(served_call(call))
        self._outside.append((max(0.0, call.started_s - last_s), len(call.output)))
        self._live[call.execution_id] = max(last_s, call.ended_s), tokens + len(call.output)

    def ended(self, execution_id: str) -> None:
        """Note that an execution makes no more calls."""
        _, tokens = self._live.pop(execution_id, (0.0, 0))
        if tokens:
            self._lengths.append(tokens)

    def measured(self, *, training_token_s: float) -> RatesMeasured | None:
        """Return the rates of now; None while there are too few calls or no execution has ended."""
        sampled = sum(tokens for _, tokens in self._outside)
        if not self._lengths or not sampled:
            return None
        samples = list(samples_of(self._calls))
        try:
            fit = fit_decode(samples)
        except InputError:
            return None
        if fit.weights_s + fit.request_s + fit.context_token_s <= 0:  # prefill explains it all; a token takes time too
            return None
        context = sum(call.output_tokens * (call.context_tokens + call.output_tokens / 2) for call in self._calls)
        context /= sampled
        return RatesMeasured(
            decode_request_s=fit.request_s + context * fit.context_token_s,
            decode_weights_s=fit.weights_s,
            environment_token_s=sum(seconds for seconds, _ in self._outside) / sampled,
            training_token_s=training_token_s,
            context_tokens=context,
            output_tokens=sum(self._lengths) / len(self._lengths),
            prefill_token_s=fit.prefill_token_s,
            kv_capacity_tokens=float(self.kv_capacity_tokens),
        )


@dataclass
class NotingStore:
    """A store of calls that shows what is committed to a ``RateBook``; implements ``core.protocols.CallStore``."""

    store: CallStore
    book: RateBook

    async def commit(self, calls: Sequence[Call], answer: bytes) -> None:
        """Store the calls of one request."""
        await self.store.commit(calls, answer)
        for call in calls:
            self.book.note(call)

    async def committed_answer(self, execution_id: str, request_id: str) -> bytes | None:
        """Return the answer of a request id that was committed before, if any."""
        return await self.store.committed_answer(execution_id, request_id)

    async def calls(self, execution_id: str) -> Sequence[Call]:
        """Return the calls of an execution in order of ``seq``."""
        return await self.store.calls(execution_id)

    async def revise_roles(self, execution_id: str, revisions: Sequence[RoleRevision]) -> None:
        """Store roles that later evidence gave to calls."""
        await self.store.revise_roles(execution_id, revisions)

    async def record_delivery(self, execution_id: str, request_id: str, delivered: Delivered, sent_bytes: int) -> None:
        """Store what is known of the delivery of an answer."""
        await self.store.record_delivery(execution_id, request_id, delivered, sent_bytes)
