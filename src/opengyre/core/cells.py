"""What the driver and a cell say to each other: the interface that the local and the Ray launcher share."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from opengyre.core.events import Mode
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import Float32Array, Int32Array, Row, VersionRun


class WeightsRef(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the weights on disk.

    >>> WeightsRef(version=3, incarnation=0, path="weights/v00003.safetensors", checksum="9f").version
    3
    """

    version: int
    incarnation: int
    path: str
    checksum: str
    """Hexadecimal xxh3-128 of the file."""


class HandedOver(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A live call that left its cell before its end; the router goes on with it elsewhere."""

    output: Int32Array
    """[T0] int32."""
    behaviour_logprobs: Float32Array
    """[T0] float32."""
    versions: tuple[VersionRun, ...]
    prefilled_tokens: int = 0
    kv_path: str = ""
    """File with the call's keys and values, if the cell exported them; the reader removes it."""


class MicroStepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell measured in one micro-step; sums over its trained tokens unless said."""

    seconds: float
    tokens: int
    """Row tokens computed."""
    trained_tokens: int
    loss: float
    """Weighted sum, not yet divided by S."""
    entropy: float
    kl: float
    ratio: float
    ratio_max: float
    truncated: int
    checked_tokens: int
    checked_difference: float
    """Largest absolute difference."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The core's answer to a closed step."""

    weights: WeightsRef
    gradient_norm: float
    empty: bool
    seconds: float


class CellStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Sent by a cell at most once a second, and on change of mode."""

    cell_id: int
    mode: Mode
    running: int
    queued: int
    kv_tokens: int
    tokens_per_s: float
    sampled_tokens: int
    """Since the start of the cell."""
    prefilled_tokens: int
    recomputed_tokens: int
    """Of the prefilled ones: computed again only because the weights had changed."""
    busy_s: float
    """Since the start of the cell: time in useful work."""


class CellClient(Protocol):
    """One cell as the driver sees it. Every method raises ``CellLostError`` when the cell goes away."""

    @property
    def cell_id(self) -> int:
        """Number of the cell; 0 is the core cell."""
        ...

    async def start(self, weights: WeightsRef, *, pinned: Sequence[WeightsRef] = (), optimizer_path: str = "") -> None:
        """Start the process with these weights in rollout mode; the core also loads its optimizer."""
        ...

    async def generate(self, request: GenerateRequest, *, kv_path: str = "") -> Generation | HandedOver:
        """Sample a call here until it ends or the cell leaves rollout mode."""
        ...

    async def release(self, execution_id: str) -> None:
        """Cached keys and values of the execution may go."""
        ...

    async def load_weights(self, weights: WeightsRef, *, pinned: Sequence[int]) -> int:
        """Serve new calls with this version and keep the pinned ones; returns the calls that were in flight."""
        ...

    async def switch(self, mode: Mode, weights: WeightsRef, *, pinned: Sequence[WeightsRef] = ()) -> None:
        """Change mode.

        To training: live calls are handed over first, then the training weights are loaded. To rollout: the pinned
        versions are made resident beside ``weights``.
        """
        ...

    async def run_micro_step(self, micro_step_id: str, rows: Sequence[Row], *, step: int) -> MicroStepResult:
        """Forward-backward; adds to the cell's gradient sum of the step. Idempotent for one id and step."""
        ...

    async def hand_in_gradient(self, step: int) -> str:
        """Write the gradient sum of the step to shared memory and return its path."""
        ...

    async def close_step(
        self, step: int, gradient_paths: Sequence[str], *, executions: int, rate: float = 1.0
    ) -> StepResult:
        """Core only: add the sums, divide by ``executions`` (S), clip, step, write weights and optimizer.

        ``rate`` is the factor of the learning rate in this step.

        ``executions == 0`` writes the same weights under the next version without calling the optimizer.
        """
        ...

    async def forget_step(self, step: int) -> None:
        """Drop the gradient sum of a step (closed, or a cell was lost)."""
        ...

    async def status(self) -> CellStatus:
        """Return the present load."""
        ...

    async def stop(self) -> None:
        """End the process."""
        ...
