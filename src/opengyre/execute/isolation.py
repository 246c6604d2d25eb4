"""Which way of confining executions works on this machine: the strongest is tried first, and each is really tried."""

import subprocess
import sys
from typing import Literal

import msgspec

from opengyre.core.errors import SandboxError

_TRIAL_S = 60
FIX = (
    "allow user namespaces (sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or run as root), use Linux 6.7 "
    'or newer for Landlock, or write sandbox.kind = "none" in the configuration'
)


class Isolation(msgspec.Struct, frozen=True, kw_only=True):
    """How executions and gradings are confined.

    Example: ``Isolation(kind="namespaces", has_control_groups=True)``.
    """

    kind: Literal["namespaces", "landlock", "none"]
    has_control_groups: bool = False
    """Memory and processes are limited for an execution as a whole, not only process by process."""


class _Trial(msgspec.Struct, frozen=True):
    works: bool
    control_groups: bool = False
    reason: str = ""


def choose_isolation(wanted: Literal["auto", "bubblewrap", "landlock", "none"]) -> Isolation:
    """Return the isolation that the configuration wants and the machine can give.

    ``bubblewrap`` means its namespaces; the fork server makes them itself. ``auto``: namespaces, else Landlock.

    Raises:
        SandboxError: Nothing that is wanted works here; the message says why and how to mend it.
    """
    if wanted == "none":
        return Isolation(kind="none")
    order: tuple[Literal["namespaces", "landlock"], ...] = {
        "auto": ("namespaces", "landlock"),
        "bubblewrap": ("namespaces",),
        "landlock": ("landlock",),
    }[wanted]  # type: ignore[assignment]
    reasons = []
    for kind in order:
        trial = try_isolation(kind)
        if trial.works:
            return Isolation(kind=kind, has_control_groups=trial.control_groups)
        reasons.append(f"{kind}: {trial.reason}")
    raise SandboxError(f"no sandbox works here ({'; '.join(reasons)}): {FIX}")


def try_isolation(kind: str) -> _Trial:
    """Confine a small process in one way and return whether it was held; see ``gyre_shim.trial``."""
    command = [sys.executable, "-m", "gyre_shim.trial", kind]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_S)
        return msgspec.json.decode(ended.stdout, type=_Trial)
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        return _Trial(works=False, reason=f"the trial said nothing: {error}")
