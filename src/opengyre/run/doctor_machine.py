"""The machine's half of ``opengyre doctor``: each piece is tried, not guessed from a version."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from opengyre.execute.container import find_engine
from opengyre.execute.isolation import FIX, try_isolation
from opengyre.run.findings import Finding, State, bytes_in_words

_TRIAL_S = 60
_SHARED_MEMORY_BYTES = 64e6
_MEMORY_BYTES = 4e9
_DISK_BYTES = 1e9
_SOCKET_PATH_BYTES = 60
_LANDLOCK_NETWORK = 4
"""Landlock ABI from which TCP connections can be confined."""

_EXTRAS = {
    "ray": "cells on many machines",
    "vllm": "rollout cells on GPUs",
    "transformers": "policies from a transformers folder",
}


def machine_findings(folder: Path) -> list[Finding]:
    """Return what works here; ``folder`` is where runs are to lie."""
    tried: list[Callable[[], Finding]] = [
        system,
        python,
        torch,
        cores,
        memory,
        sandbox,
        containers,
        user_namespaces,
        landlock,
        bubblewrap,
        control_groups,
        shared_memory,
        sockets,
    ]
    return [*(trial() for trial in tried), disk(folder), *(extra(name) for name in _EXTRAS)]


def system() -> Finding:
    """Return whether this is Linux, which a live run needs."""
    seen = f"{platform.system()} {platform.release()}"
    if sys.platform == "linux":
        return Finding(name="system", state=State.GOOD, seen=seen)
    fix = "train needs Linux; simulate, trees, import and doctor work here"
    return Finding(name="system", state=State.BAD, seen=seen, fix=fix)


def python() -> Finding:
    """Return the interpreter."""
    good = (3, 11) <= sys.version_info < (3, 14)
    return Finding(
        name="python",
        state=State.GOOD if good else State.BAD,
        seen=platform.python_version(),
        fix="" if good else "Python 3.11, 3.12 or 3.13 is needed",
    )


def torch() -> Finding:
    """Return whether torch computes a gradient, in a process of its own with one thread."""
    code = (
        "import torch; torch.set_num_threads(1); x = torch.ones(8, requires_grad=True); (x * x).sum().backward(); "
        "print(torch.__version__, 'with CUDA' if torch.cuda.is_available() else 'on the CPU')"
    )
    said, reason = _try_python(code)
    if said:
        return Finding(name="torch", state=State.GOOD, seen=f"{said}; a cell uses one thread")
    return Finding(name="torch", state=State.BAD, seen=reason, fix="pip install -c constraints.txt torch")


def cores() -> Finding:
    """Return how many cores this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count >= 2:
        return Finding(name="cores", state=State.GOOD, seen=f"{count}, load {os.getloadavg()[0]:.1f}")
    fix = "two cells on one core take turns: the demo takes about twice as long"
    return Finding(name="cores", state=State.NOTE, seen=str(count), fix=fix)


def memory() -> Finding:
    """Return the memory that is available, cgroup limit included."""
    seen_bytes = min(_available_bytes(), _cgroup_limit_bytes())
    if seen_bytes >= _MEMORY_BYTES:
        return Finding(name="memory", state=State.GOOD, seen=f"{bytes_in_words(seen_bytes)} available")
    fix = f"the embedded job is tested with {bytes_in_words(_MEMORY_BYTES)}"
    return Finding(name="memory", state=State.NOTE, seen=f"{bytes_in_words(seen_bytes)} available", fix=fix)


def _available_bytes() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), float("inf"))


def _cgroup_limit_bytes() -> float:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        return float("inf") if text == "max" else float(text)
    return float("inf")


def sandbox() -> Finding:
    """Return which sandbox a run would take here, by making one of each kind and trying to break out."""
    trials = {kind: try_isolation(kind) for kind in ("namespaces", "landlock")}
    working = [kind for kind, trial in trials.items() if trial.works]
    if working:
        return Finding(name="sandbox", state=State.GOOD, seen=f"{working[0]} (works here: {', '.join(working)})")
    reasons = "; ".join(f"{kind}: {trial.reason}" for kind, trial in trials.items())
    return Finding(name="sandbox", state=State.BAD, seen=reasons, fix=FIX)


def containers() -> Finding:
    """Return which container engine answers."""
    engine = find_engine()
    if engine is not None:
        return Finding(name="containers", state=State.GOOD, seen=engine)
    fix = "only tasks that name an image need docker or podman; they are refused by name"
    return Finding(name="containers", state=State.NOTE, seen="no engine answers", fix=fix)


def user_namespaces() -> Finding:
    """Return whether an ordinary user may make namespaces."""
    paths = {
        "/proc/sys/user/max_user_namespaces": "0",
        "/proc/sys/kernel/unprivileged_userns_clone": "0",
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1",
    }
    for path, closed in paths.items():
        try:
            value = Path(path).read_text().strip()
        except OSError:
            continue
        if value == closed:
            setting = path.removeprefix("/proc/sys/").replace("/", ".")
            fix = f"sysctl -w {setting}={'0' if closed == '1' else '1' if 'clone' in path else '10000'}, or run as root"
            return Finding(name="user namespaces", state=State.NOTE, seen=f"{setting} = {value}", fix=fix)
    return Finding(name="user namespaces", state=State.GOOD, seen="allowed")


def landlock() -> Finding:
    """Return the kernel's Landlock version."""
    said, reason = _try_python("from gyre_shim import landlock; print(landlock.version())")
    if said and int(said) >= _LANDLOCK_NETWORK:
        return Finding(name="Landlock", state=State.GOOD, seen=f"ABI {said}")
    fix = "Linux 6.7 or newer confines files and TCP without namespaces; not needed where the sandbox works"
    return Finding(name="Landlock", state=State.NOTE, seen=f"ABI {said}" if said else reason, fix=fix)


def bubblewrap() -> Finding:
    """Return whether bubblewrap starts."""
    path = shutil.which("bwrap")
    if path is None:
        fix = "not needed: the fork server makes the same namespaces itself (apt-get install bubblewrap)"
        return Finding(name="bubblewrap", state=State.NOTE, seen="not installed", fix=fix)
    command = [path, "--unshare-all", "--ro-bind", "/", "/", "true"]
    ended, reason = _try(command)
    if ended is not None:
        return Finding(name="bubblewrap", state=State.GOOD, seen="starts (the fork server does not need it)")
    return Finding(name="bubblewrap", state=State.NOTE, seen=reason, fix="not needed where the sandbox works")


def control_groups() -> Finding:
    """Return whether memory limits by control groups can be set; rlimits hold either way."""
    root = Path("/sys/fs/cgroup")
    unified = (root / "cgroup.controllers").exists()
    place = root if unified else root / "memory"
    if os.access(place, os.W_OK) and place.exists():
        return Finding(name="control groups", state=State.GOOD, seen=f"version {2 if unified else 1}, writable")
    fix = "limits are per process (rlimits); with writable control groups they hold for a whole execution"
    return Finding(name="control groups", state=State.NOTE, seen="not writable", fix=fix)


def shared_memory() -> Finding:
    """Return the room in shared memory, where gradients and moved caches pass between cells."""
    try:
        free_bytes = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding(name="shared memory", state=State.BAD, seen=str(error), fix="mount a tmpfs at /dev/shm")
    if free_bytes >= _SHARED_MEMORY_BYTES:
        return Finding(name="shared memory", state=State.GOOD, seen=f"{bytes_in_words(free_bytes)} free")
    fix = "start the container with --shm-size=1g"
    return Finding(name="shared memory", state=State.NOTE, seen=f"{bytes_in_words(free_bytes)} free", fix=fix)


def sockets() -> Finding:
    """Return whether the temporary folder is short enough for the sockets of executions."""
    path = f"{tempfile.gettempdir()}/gyre-0123456789/g00000-s00-a0"
    seen = f"under {tempfile.gettempdir()}, {len(path.encode())} bytes of path"
    if len(path.encode()) <= _SOCKET_PATH_BYTES:
        return Finding(name="sockets", state=State.GOOD, seen=seen)
    return Finding(name="sockets", state=State.NOTE, seen=seen, fix="/tmp is used instead; it must be writable")


def disk(folder: Path) -> Finding:
    """Return the room on the disk where runs are to lie."""
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    free_bytes = shutil.disk_usage(place).free
    seen = f"{bytes_in_words(free_bytes)} free at {folder}"
    if free_bytes >= _DISK_BYTES:
        return Finding(name="disk", state=State.GOOD, seen=seen)
    return Finding(name="disk", state=State.BAD, seen=seen, fix="free space, or put the run elsewhere with --run")


def extra(name: str) -> Finding:
    """Return whether an optional package is there, and what it would give."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            name=name, state=State.NOTE, seen="not installed", fix=f"not needed on one machine; for {_EXTRAS[name]}"
        )
    return Finding(name=name, state=State.GOOD, seen=version)


def _try_python(code: str) -> tuple[str, str]:
    said, reason = _try([sys.executable, "-c", code])
    return (said or "").strip(), reason


def _try(command: list[str]) -> tuple[str | None, str]:
    """Return what a command printed (None if it failed) and the last line of why."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if ended.returncode:
        return None, (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    return ended.stdout, ""
