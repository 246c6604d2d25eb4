"""How numpy arrays travel inside msgpack: as (dtype, bytes)."""

import typing
from typing import Any

import numpy as np


def encode_array(value: Any) -> Any:  # noqa: ANN401 - msgspec's hook takes any type
    """Return what an array becomes; msgspec's ``enc_hook``.

    >>> encode_array(np.array([65], np.int8))
    ('|i1', b'A')

    Raises:
        NotImplementedError: The value is not an array.
    """
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded")


def decode_array(expected: type, value: Any) -> Any:  # noqa: ANN401 - msgspec's hook takes any type
    """Return the array that ``encode_array`` wrote, read-only; msgspec's ``dec_hook``.

    >>> decode_array(np.ndarray, ("|i1", b"A")).tolist()
    [65]

    Raises:
        NotImplementedError: The expected type is not an array.
    """
    if typing.get_origin(expected) is np.ndarray or expected is np.ndarray:
        return np.frombuffer(value[1], np.dtype(value[0]))
    raise NotImplementedError(f"{expected} cannot be decoded")
