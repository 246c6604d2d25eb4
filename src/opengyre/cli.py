"""The ``opengyre`` command: parses, calls ``run``, prints one line for what went wrong."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from opengyre import __version__
from opengyre.core.errors import GyreError, InputError

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("opengyre.run.train", "train a policy by online RL on executions of a harness"),
    "eval": ("opengyre.run.evaluate", "evaluate weights on held-out tasks, sampled and greedy"),
    "compare": ("opengyre.run.compare", "compare rules by live runs of equal work on this machine"),
    "simulate": ("opengyre.run.simulate", "compare rules in virtual time, at any size"),
    "trees": ("opengyre.run.trees", "show the trajectory trees of a run or of a file of calls"),
    "replay": ("opengyre.run.replay", "feed a recorded harness session through the real proxy"),
    "capture": ("opengyre.run.capture", "record what a harness asks of a model server, no training"),
    "import": ("opengyre.run.import_files", "turn sessions of other tools into trajectory trees"),
    "report": ("opengyre.run.report", "show what a run has come to: tables, an HTML page, JSON, a trace"),
    "tasks": ("opengyre.run.tasks_command", "list, check, show, score and make tasks"),
    "ps": ("opengyre.run.ps", "list the live executions of a run"),
    "stop": ("opengyre.run.stop", "end the executions that a dead driver left"),
    "bench": ("opengyre.run.bench", "measure the budgets on this machine"),
    "doctor": ("opengyre.run.doctor", "say what works on this machine; check a run"),
    "warmstart": ("opengyre.run.warmstart", "make the embedded policy that a run starts from"),
}
"""Name to (module, summary); the module has ``add_arguments(parser)`` and ``main(arguments) -> int``.

Choice: modules are named, not imported, so that ``opengyre doctor`` does not load torch to say that torch is absent.
"""

PIPE_CLOSED = 128 + signal.SIGPIPE
INTERRUPTED = 130


class OneLineParser(argparse.ArgumentParser):
    """A parser whose usage errors are one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print the error and where help is, without the usage text."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        only: Load the arguments of this command alone; of the others the parser knows the name and the summary.
    """
    parser = OneLineParser(prog="opengyre", description="Elastic online RL of long-running agents.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module_name, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == only:
            load(module_name).add_arguments(command)
    return parser


def load(module_name: str) -> ModuleType:
    """Return the module of a command."""
    return importlib.import_module(module_name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted.

    A reader that closed our standard output (``| head``) ends the command with 141, as the shell expects.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        named = next((word for word in given if not word.startswith("-")), None)
        parsed = build_parser(only=named).parse_args(given)
        code = int(load(COMMANDS[parsed.command][0]).main(parsed))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except InputError as error:
        sys.stderr.write(f"opengyre: {error}\n")
        return 2
    except GyreError as error:
        sys.stderr.write(f"opengyre: {type(error).__name__}: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("opengyre: interrupted\n")
        return INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
