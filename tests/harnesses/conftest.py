"""Prints what was seen of each harness as tables, for ``docs/harnesses.md``."""

import msgspec
import pytest

from opengyre.testing.live_harness import LiveResult, table_of


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter):
    reports = [each for group in ("passed", "failed") for each in terminalreporter.getreports(group)]
    for kind in ("live", "parked"):
        texts = [value for each in reports for name, value in each.user_properties if name == kind]
        results = [msgspec.json.decode(text, type=LiveResult) for text in texts]
        if results:
            terminalreporter.section(kind)
            terminalreporter.write_line(table_of(results))
