"""Every command of the command line can be loaded and says what it is."""

import importlib
import inspect
import subprocess
import sys

import pytest

from opengyre.cli import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_module_has_arguments_and_a_main(name):
    module = importlib.import_module(COMMANDS[name][0])
    assert list(inspect.signature(module.add_arguments).parameters)[0:1] == ["parser"]
    assert list(inspect.signature(module.main).parameters)[0:1] == ["arguments"]
    assert COMMANDS[name][1].strip()


def test_help_loads_no_heavy_package():
    code = "import sys, opengyre.cli as c; c.build_parser(); print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
