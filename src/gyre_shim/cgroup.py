"""Limits on a whole execution by control groups, version 1 or 2, where they can be written. Standard library only."""

import contextlib
import os
import signal
import time

ROOT = "/sys/fs/cgroup"
_PARENT = "opengyre"
_REMOVE_S = 2.0
_CONTROLLERS = ("memory", "pids")


def _is_unified(root: str) -> bool:
    return os.path.exists(f"{root}/cgroup.controllers")


def _parents(root: str) -> list[str]:
    """Return the folders below which groups are made: one, or one a controller."""
    if _is_unified(root):
        return [f"{root}/{_PARENT}"]
    return [f"{root}/{controller}/{_PARENT}" for controller in _CONTROLLERS]


def can_limit(root: str = ROOT) -> bool:
    """Whether groups can be made here; makes the parent folder that they will stand in."""
    try:
        for parent in _parents(root):
            os.makedirs(parent, exist_ok=True)
        if _is_unified(root):
            for folder in (root, f"{root}/{_PARENT}"):
                _write(f"{folder}/cgroup.subtree_control", "+memory +pids")
        return all(os.access(parent, os.W_OK) for parent in _parents(root))
    except OSError:
        return False


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


class ControlGroup:
    """The limits of one execution or grading.

    Args:
        name: Whose it is; this process's id is added.
        memory_bytes: Resident memory of all its processes.
        processes: How many processes it may have.
        root: Where control groups are mounted.

    Raises:
        OSError: The group cannot be made; ``can_limit`` tells beforehand.
    """

    def __init__(self, name: str, *, memory_bytes: int, processes: int, root: str = ROOT) -> None:
        self._folders = [f"{parent}/{name}-{os.getpid()}" for parent in _parents(root)]
        self._is_unified = _is_unified(root)
        for folder in self._folders:
            os.mkdir(folder)
        memory = "memory.max" if self._is_unified else "memory.limit_in_bytes"
        _write(f"{self._folders[0]}/{memory}", str(memory_bytes))
        with contextlib.suppress(OSError):
            _write(f"{self._folders[0]}/memory.swap.max", "0")
        _write(f"{self._folders[-1]}/pids.max", str(processes))

    def join(self) -> None:
        """Put this process, and so all its children, into the group."""
        for folder in self._folders:
            _write(f"{folder}/cgroup.procs", "0")

    @property
    def was_out_of_memory(self) -> bool:
        """Whether the kernel ended a process of the group for its memory."""
        name = "memory.events" if self._is_unified else "memory.oom_control"
        words = _read(f"{self._folders[0]}/{name}").split()
        return any(key == "oom_kill" and count != "0" for key, count in zip(words[::2], words[1::2], strict=False))

    def remove(self) -> None:
        """Kill what is left in the group and remove it."""
        deadline_s = time.monotonic() + _REMOVE_S
        for folder in self._folders:
            while os.path.isdir(folder) and time.monotonic() < deadline_s:
                for process_id in _read(f"{folder}/cgroup.procs").split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(process_id), signal.SIGKILL)
                try:
                    os.rmdir(folder)
                except OSError:
                    time.sleep(0.005)


def sweep(root: str = ROOT) -> None:
    """Remove the groups of owners that were killed: a name ends with its owner's process id."""
    for parent in _parents(root):
        for name in os.listdir(parent) if os.path.isdir(parent) else ():
            owner = name.rpartition("-")[2]
            if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
                with contextlib.suppress(OSError):
                    os.rmdir(f"{parent}/{name}")
