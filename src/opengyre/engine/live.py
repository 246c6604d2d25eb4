"""A call while it is in the engine, and the forms in which it leaves."""

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from opengyre.core.cells import HandedOver
from opengyre.core.errors import InvariantError
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import Finish, Int32Array, VersionRun


class Moved(Protocol):
    """Keys and values of the first tokens of a call, as far as their sizes go."""

    @property
    def version(self) -> int:
        """Version that computed all of them."""
        ...

    @property
    def length(self) -> int:
        """Tokens held."""
        ...


MovedT = TypeVar("MovedT", bound=Moved)


@dataclass(eq=False)
class LiveCall(Generic[MovedT]):
    """A call in the engine.

    Example: a call with context [5, 6] that has sampled [9] has ``length == 3``, ``sampled == 1``, and
    ``computed == 2`` until the next step computes the keys and values of the 9.
    """

    request: GenerateRequest
    tokens: Int32Array
    """[C + max_tokens] int32: context, then output; filled as it is sampled."""
    length: int
    """Context plus output so far."""
    version: int
    moved: MovedT | None = None
    """Keys and values that came with the call."""
    slot: int = -1
    computed: int = 0
    """Tokens whose keys and values are in the slot."""
    repeated: int = 0
    """Up to here, computing a token is prefill: the context, and output that another cell had computed."""
    logprobs: list[float] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)
    """[version, count, mixed] of the output."""
    is_mixed: bool = False
    prefilled: int = 0
    finish: Finish | None = None

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.length - self.computed

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

    def note_computed(self, count: int) -> int:
        """Take ``count`` computed tokens and return how many of them were prefill."""
        prefilled = max(0, min(self.repeated, self.computed + count) - self.computed)
        self.computed += count
        self.prefilled += prefilled
        return prefilled

    def generation(self) -> Generation:
        """Return the answer of a call that ended."""
        return Generation(
            output=self.output(),
            behaviour_logprobs=np.asarray(self.logprobs, np.float32),
            versions=self.version_runs(),
            finish=self.finish or Finish.ABORT,
            prefilled_tokens=self.prefilled,
        )

    def handed_over(self, kv_path: str) -> HandedOver:
        """Return what another cell needs to go on."""
        return HandedOver(
            output=self.output(),
            behaviour_logprobs=np.asarray(self.logprobs, np.float32),
            versions=self.version_runs(),
            prefilled_tokens=self.prefilled,
            kv_path=kv_path,
        )


def live_call(request: GenerateRequest, *, version: int, moved: MovedT | None) -> LiveCall[MovedT]:
    """Return a new call, or one that goes on with the tokens that it already has.

    Raises:
        InvariantError: Its tokens, logprobs and version runs do not have one length, or it has already ended.
    """
    context = len(request.context)
    tokens = np.zeros(context + request.max_tokens, np.int32)
    tokens[:context] = request.context
    live = LiveCall(request, tokens, context, version, moved, repeated=context)
    if request.output is None or not len(request.output):
        return live
    count = len(request.output)
    logprobs = 0 if request.behaviour_logprobs is None else len(request.behaviour_logprobs)
    if logprobs != count or sum(run.count for run in request.versions) != count or count >= request.max_tokens:
        raise InvariantError(
            f"call {request.call_id}: {count} output tokens of at most {request.max_tokens - 1}, "
            f"{logprobs} logprobs, version runs {request.versions}"
        )
    tokens[context : context + count] = request.output
    live.length += count
    live.repeated = live.length - 1
    live.logprobs = np.asarray(request.behaviour_logprobs, np.float32).tolist()
    live.runs = [[run.version, run.count, int(run.mixed)] for run in request.versions]
    return live
