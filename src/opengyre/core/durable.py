"""Files that are whole or not there, also after a loss of power."""

import os
from pathlib import Path

import xxhash

from opengyre.core.errors import RunError


def write_durably(path: Path, data: bytes) -> str:
    """Write a file under another name, sync it, rename it into place; returns the xxh3-128 of its bytes, hexadecimal.

    Raises:
        RunError: The disk is full or not writable.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"{path}: {len(data)} bytes cannot be written: {error.strerror}") from error
    return xxhash.xxh3_128_hexdigest(data)
