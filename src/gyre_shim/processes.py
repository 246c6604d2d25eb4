"""Every process of an execution, where no process namespace ends them with their first one. Standard library only."""

import contextlib
import ctypes
import os
import signal
import time

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(ancestor: int) -> list[int]:
    """Return the processes below one, from ``/proc``."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    waiting = [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def end_descendants(*, limit_s: float = 10.0) -> int:
    """Kill and reap every descendant of this process; returns how many are left when the time is up.

    All are stopped before any is killed, so that none forks while another dies.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        living = descendants(os.getpid())
        for which in (signal.SIGSTOP, signal.SIGKILL):
            for process_id in living:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process_id, which)
        _reap()
        living = descendants(os.getpid())
        if not living or time.monotonic() > deadline_s:
            return len(living)
        time.sleep(0.005)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def processes_of_user(user: int) -> int:
    """Return how many processes a user has."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                count += os.stat(f"/proc/{name}").st_uid == user
    return count
