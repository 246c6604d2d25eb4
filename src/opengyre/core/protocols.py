"""The interfaces between packages; ``run`` builds what implements them and passes it in."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from opengyre.core.types import Call, Delivered, Finish, Float32Array, Int32Array, Outcome, Role, Task, VersionRun


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What an engine needs to sample one call.

    A handed-over call arrives with the tokens it already has in ``output``; sampling noise depends only on
    ``(seed, position in the output)``, so it goes on as if it had never moved.

    Example: ``GenerateRequest(execution_id="g0-s0-a0", call_id="c1", context=np.array([5, 6], np.int32),
    max_tokens=16, temperature=1.0, seed=7, stop_ids=(5,))``.
    """

    execution_id: str
    call_id: str
    context: Int32Array
    """[C] int32."""
    max_tokens: int
    """Upper bound on the whole output, tokens already sampled included."""
    temperature: float
    """0 means greedy."""
    seed: int
    """Unsigned 64 bits."""
    stop_ids: tuple[int, ...]
    """A sampled stop id ends the call and is part of the output."""
    top_p: float = 1.0
    top_k: int = 0
    minimum_version: int = 0
    """No older weights may serve it (v_d of its execution)."""
    pinned_version: int | None = None
    """If set, exactly these weights serve it (evaluation)."""
    output: Int32Array | None = None
    """[T0] int32 already sampled."""
    behaviour_logprobs: Float32Array | None = None
    """[T0] float32."""
    versions: tuple[VersionRun, ...] = ()


class Generation(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A sampled answer. ``len(output) == len(behaviour_logprobs) == sum of counts of versions``."""

    output: Int32Array
    """[T] int32."""
    behaviour_logprobs: Float32Array
    """[T] float32: log-probability under the very law that was sampled from."""
    versions: tuple[VersionRun, ...]
    finish: Finish
    cell_ids: tuple[int, ...] = ()
    prefilled_tokens: int = 0
    """Context tokens computed for this call (not taken from a cache), over all cells that served it."""


class Engine(Protocol):
    """Token in, token out. The router implements it over many cells, a cell client over one."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one call to its end.

        Raises:
            CellLostError: The only cell that could serve it went away (never from the router).
        """
        ...


class Router(Engine, Protocol):
    """Sends calls to cells in rollout mode, hands them over, parks them when no cell can take them."""

    def release(self, execution_id: str) -> None:
        """Forget the execution: its cached keys and values may go."""
        ...


class RoleRevision(Protocol):
    """A call's role as later evidence has it; ``trajectory.histories.RoleGuess`` is one."""

    @property
    def call_id(self) -> str:
        """The call."""
        ...

    @property
    def role(self) -> Role:
        """Its role."""
        ...

    @property
    def agent(self) -> str:
        """Its agent."""
        ...

    @property
    def evidence(self) -> str:
        """Why."""
        ...


class CallStore(Protocol):
    """Where committed calls live; the ledger implements it."""

    async def commit(self, calls: Sequence[Call], answer: bytes) -> None:
        """Store the calls of one request (one for each choice) durably; returns only when they survive ``kill -9``.

        ``answer`` is the dialect-independent answer that a repeated request id gets again.
        """
        ...

    async def committed_answer(self, execution_id: str, request_id: str) -> bytes | None:
        """Return the answer of a request id that was committed before, if any."""
        ...

    async def calls(self, execution_id: str) -> Sequence[Call]:
        """Return the calls of an execution in order of ``seq``."""
        ...

    async def revise_roles(self, execution_id: str, revisions: Sequence["RoleRevision"]) -> None:
        """Store roles that later evidence gave to calls."""
        ...

    async def record_delivery(self, execution_id: str, request_id: str, delivered: Delivered, sent_bytes: int) -> None:
        """Store what the shim's journal says of an answer."""
        ...


class Evaluator(Protocol):
    """Scores a retained workspace in a clean sandbox."""

    async def evaluate(self, task: Task, workspace: Path, *, timed_out: bool) -> Outcome:
        """Return the outcome; an evaluator that broke returns ``EvaluationFailed`` and never raises for a candidate."""
        ...
