"""Messages between the driver and a cell process: length-prefixed msgpack over a socket pair; arrays travel as bytes.

A request carries a number; the reply carries the same one. A reply is ``done`` with a body, ``handed_over`` (only to
``Generate``) or ``failed`` with the error's name and text.
"""

import struct
from typing import Literal, TypeVar

import msgspec

from opengyre.algorithm.settings import LossSettings
from opengyre.core.arrays import decode_array, encode_array
from opengyre.core.cells import WeightsRef
from opengyre.core.errors import InvariantError
from opengyre.core.events import Mode
from opengyre.core.protocols import GenerateRequest
from opengyre.core.types import Row
from opengyre.engine.emulated import EmulatedCosts
from opengyre.train.settings import OptimizerSettings

HEADER = struct.Struct("<I")
LARGEST_FRAME_BYTES = 1 << 30
T = TypeVar("T")


class CellSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell process needs to know once.

    Example: the core of a two-cell run has ``optimizer`` set, the satellite has None.
    """

    slots: int
    max_running: int
    kv_tokens: int
    context_tokens: int
    device: str
    dtype: str
    keep_versions: int
    """Versions kept for the exactness check."""
    drain: bool
    loss: LossSettings
    optimizer: OptimizerSettings | None
    weights_folder: str
    optimizer_folder: str
    gradient_folder: str
    incarnation: int
    fixed_order: bool = False
    """Gradients of micro-steps are kept apart and added in the order of their ids."""
    drain_s: float = 600.0
    """With ``drain``: calls in flight at a publication go on with the new weights after so long."""
    engine: Literal["reference", "emulated"] = "reference"
    """Which process the cell is."""
    costs: EmulatedCosts | None = None
    """Of the emulated engine."""
    replies_path: str = ""
    """Table of replies of the emulated engine."""
    kv_folder: str = ""
    """Where keys and values of handed-over calls go; empty: they are computed again by the next cell."""


class _Request(msgspec.Struct, frozen=True, kw_only=True, tag=True, eq=False):
    """Base of the requests."""


class Start(_Request, frozen=True, kw_only=True, eq=False):
    """Load weights (and the optimizer, on the core) and serve in rollout mode."""

    cell_id: int
    settings: CellSettings
    weights: WeightsRef
    pinned: tuple[WeightsRef, ...] = ()
    optimizer_path: str = ""


class Generate(_Request, frozen=True, kw_only=True, eq=False):
    """Sample a call."""

    request: GenerateRequest
    kv_path: str = ""


class Abort(_Request, frozen=True, kw_only=True, eq=False):
    """Nobody waits for a call any more."""

    call_id: str


class Release(_Request, frozen=True, kw_only=True, eq=False):
    """An execution ended."""

    execution_id: str


class LoadWeights(_Request, frozen=True, kw_only=True, eq=False):
    """Serve new calls with this version; in training mode, train on it."""

    weights: WeightsRef
    pinned: tuple[int, ...]


class Switch(_Request, frozen=True, kw_only=True, eq=False):
    """Change mode; ``pinned`` versions are loaded beside the current one."""

    mode: Mode
    weights: WeightsRef
    pinned: tuple[WeightsRef, ...] = ()


class RunMicroStep(_Request, frozen=True, kw_only=True, eq=False):
    """Forward-backward of rows."""

    micro_step_id: str
    step: int
    rows: tuple[Row, ...]


class HandInGradient(_Request, frozen=True, kw_only=True, eq=False):
    """Write the gradient sum of a step."""

    step: int


class CloseStep(_Request, frozen=True, kw_only=True, eq=False):
    """Take the optimizer step."""

    step: int
    gradient_paths: tuple[str, ...]
    executions: int
    rate: float = 1.0
    """Factor of the learning rate."""


class ForgetStep(_Request, frozen=True, kw_only=True, eq=False):
    """Drop the gradient sum of a step."""

    step: int


class Status(_Request, frozen=True, kw_only=True, eq=False):
    """Report the load."""


class Stop(_Request, frozen=True, kw_only=True, eq=False):
    """End the process."""


Request = (
    Start
    | Generate
    | Abort
    | Release
    | LoadWeights
    | Switch
    | RunMicroStep
    | HandInGradient
    | CloseStep
    | ForgetStep
    | Status
    | Stop
)


class Numbered(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """A request with its number."""

    number: int
    request: Request


class Reply(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """The answer to a numbered request; ``body`` is decoded by who knows its type."""

    number: int
    kind: Literal["done", "handed_over", "failed"]
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request failed; ``error`` is the class name."""

    error: str
    message: str


_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_array)
_REQUESTS = msgspec.msgpack.Decoder(Numbered, dec_hook=decode_array)
_REPLIES = msgspec.msgpack.Decoder(Reply)


def encode_request(number: int, request: Request) -> bytes:
    """Return the frame of a request."""
    return _framed(_ENCODER.encode(Numbered(number, request)))


def decode_request(data: bytes) -> Numbered:
    """Return the numbered request of a frame's body."""
    return _REQUESTS.decode(data)


def encode_reply(number: int, kind: Literal["done", "handed_over", "failed"], body: object) -> bytes:
    """Return the frame of a reply."""
    return _framed(_ENCODER.encode(Reply(number, kind, msgspec.Raw(_ENCODER.encode(body)))))


def decode_reply(data: bytes) -> Reply:
    """Return the reply of a frame's body."""
    return _REPLIES.decode(data)


def decode_body(body: msgspec.Raw, expected: type[T]) -> T:
    """Return the body of a reply as its type."""
    return msgspec.msgpack.decode(body, type=expected, dec_hook=decode_array)


def _framed(data: bytes) -> bytes:
    if len(data) > LARGEST_FRAME_BYTES:
        raise InvariantError(f"a frame of {len(data)} bytes, expected at most {LARGEST_FRAME_BYTES}")
    return HEADER.pack(len(data)) + data


class FrameReader:
    """Cuts a stream of bytes into frames.

    >>> reader = FrameReader()
    >>> reader.feed(HEADER.pack(2) + b"a"), reader.feed(b"b" + HEADER.pack(1))
    ([], [b'ab'])
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that are complete now."""
        self._buffer += data
        frames: list[bytes] = []
        while len(self._buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer)
            if len(self._buffer) < HEADER.size + length:
                break
            frames.append(bytes(self._buffer[HEADER.size : HEADER.size + length]))
            del self._buffer[: HEADER.size + length]
        return frames
