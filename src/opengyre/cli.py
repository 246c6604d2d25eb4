"""The ``opengyre`` command: parses, calls ``run``, prints one line for what went wrong."""

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from opengyre import __version__
from opengyre.core.errors import GyreError, InputError

COMMANDS: dict[str, ModuleType] = {}
"""Name to the module of ``run`` that has ``add_arguments(parser)`` and ``main(arguments) -> int``."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="opengyre", description="Elastic online RL of long-running agents.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").strip().splitlines()[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    parsed = build_parser().parse_args(arguments)
    try:
        return int(COMMANDS[parsed.command].main(parsed))
    except InputError as error:
        sys.stderr.write(f"opengyre: {error}\n")
        return 2
    except GyreError as error:
        sys.stderr.write(f"opengyre: {type(error).__name__}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
