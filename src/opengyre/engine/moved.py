"""Keys and values of a call that changes cells, as a file in shared memory; the reader removes it."""

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_NAME = "keys_and_values"


@dataclass(frozen=True, eq=False)
class MovedCache:
    """Keys and values of the first tokens of a call.

    Example: ``MovedCache(version=3, block=block)`` with ``block`` [layers, 2, kv_heads, 96, head_size] holds 96 tokens
    that version 3 computed, all of them.
    """

    version: int
    block: Tensor

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.block.shape[3]


def write_moved(path: Path, moved: MovedCache) -> bool:
    """Write a file; not synced, for it is only worth something while both cells live.

    Returns:
        Whether it was written: without room the call is computed again elsewhere.
    """
    try:
        save_file({_NAME: moved.block.contiguous()}, path, {"version": str(moved.version)})
    except (OSError, SafetensorError):
        path.unlink(missing_ok=True)
        return False
    return True


def take_moved(path: Path) -> MovedCache | None:
    """Read and remove a file; None if it is gone or not readable, which costs a prefill and nothing else."""
    try:
        with safe_open(path, framework="pt") as file:
            moved = MovedCache(int((file.metadata() or {})["version"]), file.get_tensor(_NAME).clone())
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    finally:
        path.unlink(missing_ok=True)
    return moved
