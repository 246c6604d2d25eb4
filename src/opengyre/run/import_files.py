"""``opengyre import``: sessions of other tools as trees, and as a file of calls that ``opengyre trees`` reads."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from opengyre.core.errors import InputError
from opengyre.report.console import console
from opengyre.run.imports.atif import files_referred_to, read_atif
from opengyre.run.imports.calls import calls_to_lines
from opengyre.run.imports.claude_code import read_claude_code
from opengyre.run.imports.openai import read_openai
from opengyre.run.imports.parts import ImportedExecution
from opengyre.run.imports.render import BYTES, TextTokenizer, tree_of_import
from opengyre.run.imports.swe_agent import read_swe_agent
from opengyre.run.trees import add_tree_arguments, draw, show, write_html, write_whole
from opengyre.trajectory.statistics import TreeStatistics

FORMATS = ("claude-code", "atif", "swe-agent", "openai")


class ImportResult(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints.

    Example: ``{"executions": [{"execution_id": "s1", "calls": 12, ...}], "approximate": true, "tokenizer": "bytes"}``.
    """

    executions: tuple[TreeStatistics, ...]
    approximate: bool
    """Some token ids were rendered, or have no logprobs: never to be trained as if they had been recorded."""
    approximate_executions: tuple[str, ...]
    tokenizer: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--format", required=True, choices=FORMATS, help="what the files are")
    parser.add_argument(
        "--tokenizer", default=BYTES, metavar="FILE", help="renders what has no token ids: bytes, or a tokenizer.json"
    )
    parser.add_argument("--out", type=Path, metavar="CALLS.jsonl", help="write the calls with their token ids")
    add_tree_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Import the files; nothing is written unless all of them are right."""
    tokenizer = TextTokenizer(arguments.tokenizer)
    executions = read_files(arguments.files, arguments.format, vocabulary=arguments.vocabulary)
    drawn = []
    for execution in executions:
        tree, verdicts = tree_of_import(execution, tokenizer)
        drawn.append(draw(tree, verdicts, max_leaves=arguments.max_leaves, seed=arguments.seed))
    figures = tuple(each.statistics for each in drawn)
    approximate = tuple(each.tree.execution_id for each in drawn if each.tree.is_approximate)
    if arguments.out is not None:
        write_whole(arguments.out, calls_to_lines([each.tree for each in drawn]))
    title = ", ".join(file.name for file in arguments.files)
    write_html(arguments.html, drawn, title)
    if arguments.json:
        result = ImportResult(
            executions=figures,
            approximate=bool(approximate),
            approximate_executions=approximate,
            tokenizer=tokenizer.name,
        )
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        return 0
    show(figures, title)
    if approximate:
        text = (
            f"approximate: {len(approximate)} of {len(drawn)} executions hold ids rendered with the tokenizer "
            f"{tokenizer.name!r} or no logprobs; they can be counted and shown, never trained"
        )
        console().print(text, markup=False, soft_wrap=True)
    return 0


def read_files(files: list[Path], name: str, *, vocabulary: int | None = None) -> list[ImportedExecution]:
    """Return the executions of all files, in order.

    Choice: an ATIF file that another given file refers to is part of that one's execution.

    Raises:
        FileError: A file is not what it says.
        InputError: Two files hold an execution of the same name.
    """
    if name == "atif":
        inner = {inside.resolve() for file in files for inside in files_referred_to(file)}
        files = [file for file in files if file.resolve() not in inner] or files
    readers: dict[str, Callable[[Path], list[ImportedExecution]]] = {
        "claude-code": read_claude_code,
        "atif": lambda path: read_atif(path, vocabulary=vocabulary),
        "swe-agent": read_swe_agent,
        "openai": read_openai,
    }
    executions = [execution for file in files for execution in readers[name](file)]
    names = [execution.execution_id for execution in executions]
    twice = next((each for each in names if names.count(each) > 1), None)
    if twice is not None:
        raise InputError(f"two executions are called {twice!r}; expected every file once and distinct ids")
    return executions
