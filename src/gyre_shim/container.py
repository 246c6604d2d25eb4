"""A container of docker or podman: the image of a task, no network but the shim. Standard library only.

The container has no network of its own; the shim enters its network namespace and listens on its loopback, so nothing
in the image has to know how to reach a unix socket.
"""

import ctypes
import os
import signal
import subprocess
from typing import Any

from gyre_shim.sandbox import CLONE_NEWNET, SandboxError

_START_S = 300.0
_END_S = 60.0
_libc = ctypes.CDLL(None, use_errno=True)


class Container:
    """One container.

    Args:
        order: ``engine`` (program), ``image``, ``id``, ``memory_bytes``, ``processes``.
        mounts: Folders of the host to where the container shows them, writable.
        workdir: Where commands start.
    """

    def __init__(self, order: dict[str, Any], mounts: dict[str, str], workdir: str) -> None:
        self._engine = order["engine"]
        self._image = order["image"]
        self._name = f"opengyre-{order['id']}-{os.getpid()}"
        self._limits = ["--memory", str(order["memory_bytes"]), "--pids-limit", str(order["processes"])]
        self._mounts = mounts
        self._workdir = workdir

    def start(self) -> None:
        """Start the container with a process that does nothing, and enter its network.

        Raises:
            SandboxError: The engine refuses.
        """
        mounts = [part for source, target in self._mounts.items() for part in ("-v", f"{source}:{target}")]
        self._run(
            "run", "-d", "--rm", "--init", "--network", "none", "--name", self._name, *self._limits,
            "--security-opt", "no-new-privileges", "--cap-drop", "ALL", *mounts, "-w", self._workdir,
            "--entrypoint", "/bin/sh", self._image, "-c", "while :; do sleep 3600; done",
        )  # fmt: skip
        process_id = self._run("inspect", "-f", "{{.State.Pid}}", self._name).strip()
        try:
            namespace = os.open(f"/proc/{process_id}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SandboxError(f"{self._engine}: the container's network cannot be reached: {error}") from error
        try:
            if _libc.setns(namespace, CLONE_NEWNET) != 0:
                raise SandboxError(f"enter the container's network: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(namespace)

    def command(self, command: list[str], environment: dict[str, str]) -> list[str]:
        """Return the host's command that runs a command inside."""
        variables = [part for key, value in environment.items() for part in ("-e", f"{key}={value}")]
        return [self._engine, "exec", "-w", self._workdir, *variables, self._name, *command]

    def write(self, path: str, text: str) -> None:
        """Write a file inside.

        Raises:
            SandboxError: The engine refuses.
        """
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
        self._run("exec", "-i", self._name, "/bin/sh", "-c", script, "sh", path, given=text)

    def remove(self) -> None:
        """End everything in the container and remove it."""
        try:
            self._run("rm", "-f", self._name, limit_s=_END_S)
        except SandboxError as error:
            os.write(2, f"gyre_shim: {error}\n".encode())

    def _run(self, *words: str, given: str | None = None, limit_s: float = _START_S) -> str:
        try:
            ended = subprocess.run(
                [self._engine, *words],
                input=given,
                stdin=subprocess.DEVNULL if given is None else None,
                capture_output=True,
                text=True,
                timeout=limit_s,
                preexec_fn=lambda: signal.set_wakeup_fd(-1),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"{self._engine} {words[0]}: {error}") from error
        if ended.returncode:
            reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
            raise SandboxError(f"{self._engine} {words[0]}: {reason}")
        return ended.stdout
