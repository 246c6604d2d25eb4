"""Files and visible tests. Candidate code runs in a forked child, never in the agent's own process."""

import contextlib
import os
import resource
import select
import signal
import sys
import time
import types

TEST_CPU_S = 2
TEST_WALL_S = 6.0


class Workspace:
    """The folder that the agent works in.

    Args:
        folder: Where modules and visible tests lie.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def instruction(self) -> str:
        """Return the task's text."""
        with open(os.path.join(self._folder, "TASK.md")) as file:
            return file.read()

    def has(self, module: str) -> bool:
        """Whether a module has been written."""
        return os.path.exists(os.path.join(self._folder, f"{module}.py"))

    def write(self, module: str, content: str, *, append: bool) -> None:
        """Write or extend a module."""
        with open(os.path.join(self._folder, f"{module}.py"), "a" if append else "w") as file:
            file.write(content)

    def failing_tests(self, module: str, names: list[str]) -> list[str]:
        """Return which of the named functions fail their visible tests, in order.

        A function passes only if its test returned: whatever kills or hangs the child fails the rest.
        """
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            try:
                self._run_tests(module, names, writing)
            finally:
                os._exit(0)
        os.close(writing)
        passed = _read_until_closed(reading, TEST_WALL_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return [name for name in names if name not in passed]

    def _run_tests(self, module: str, names: list[str], writing: int) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (TEST_CPU_S, TEST_CPU_S + 1))
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        scope = self._loaded(module)
        if scope is None:
            return
        for name in names:
            test = scope.get(f"test_{name}")
            with contextlib.suppress(BaseException):
                if not callable(test):
                    continue
                test()
                os.write(writing, name.encode() + b"\n")

    def _loaded(self, module: str) -> dict[str, object] | None:
        """Return the names of the visible test file, with the module it imports from loaded."""
        made = types.ModuleType(module)
        scope: dict[str, object] = {"__name__": f"test_{module}"}
        is_loaded = False
        with contextlib.suppress(BaseException):
            with open(os.path.join(self._folder, f"{module}.py")) as file:
                exec(compile(file.read(), f"{module}.py", "exec"), made.__dict__)
            sys.modules[module] = made
            with open(os.path.join(self._folder, f"test_{module}.py")) as file:
                exec(compile(file.read(), f"test_{module}.py", "exec"), scope)
            is_loaded = True
        return scope if is_loaded else None


def _read_until_closed(reading: int, limit_s: float) -> set[str]:
    received = b""
    deadline_s = time.monotonic() + limit_s
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline_s - time.monotonic()))
        data = os.read(reading, 4096) if ready else b""
        if not data:
            os.close(reading)
            return {line.decode(errors="replace") for line in received.split(b"\n")}
        received += data
