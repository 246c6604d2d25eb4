"""Runs one test file with pytest and reports each test that passed: ``python pytest_child.py`` with an order on stdin.

It is started by the supervisor in a process of its own, because it imports what the candidate wrote; pytest itself is
loaded before the candidate's folder can be seen. What it reports is
the nonce of each passed test, at once, so that a later hang loses nothing.
"""

import json
import os
import signal
import sys

import pytest


class TestTooSlow(BaseException):
    """A test used up its time; not an ``Exception``, so that a broad handler of the candidate does not keep it."""


class Reporter:
    """The pytest plugin: limits each test and reports what passed.

    Args:
        nonces: Test id to what is reported when it passes.
        limit_s: Seconds of one test.
        descriptor: Where it is reported.
    """

    def __init__(self, nonces: dict[str, str], limit_s: float, descriptor: int) -> None:
        self._nonces, self._limit_s, self._descriptor = nonces, limit_s, descriptor
        self._failed: set[str] = set()
        signal.signal(signal.SIGALRM, self._too_slow)

    def _too_slow(self, *_: object) -> None:
        raise TestTooSlow

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Start the clock of a test."""
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Report what was collected: the control gate freezes it."""
        for item in session.items:
            self._say("collected", item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report a test whose every phase passed."""
        if report.failed or report.skipped:
            self._failed.add(report.nodeid)
        if report.when == "teardown":
            signal.setitimer(signal.ITIMER_REAL, 0)
            if report.nodeid not in self._failed:
                self._say("passed", self._nonces.get(report.nodeid, report.nodeid))

    def _say(self, kind: str, text: str) -> None:
        os.write(self._descriptor, (json.dumps([kind, text]) + "\n").encode())


def main() -> int:
    """Carry out the order."""
    order = json.load(sys.stdin)
    sys.path[:0] = order["import_paths"]
    sys.dont_write_bytecode = True
    reporter = Reporter(order["nonces"], order["test_limit_s"], order["descriptor"])
    plugins = [part for name in order["plugins"] for part in ("-p", name)]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        order["root"],
        "--continue-on-collection-errors",
    ]
    os.chdir(order["root"])
    return int(pytest.main([*options, *plugins, order["file"]], plugins=[reporter]))


if __name__ == "__main__":
    sys.exit(main())
