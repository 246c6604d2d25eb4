"""``opengyre trees``: the trajectory trees of a run or of a file of calls, counted, printed, drawn."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash
from rich import box
from rich.table import Table

from opengyre.core.errors import FileError, InputError
from opengyre.core.types import Verdict
from opengyre.ledger.ledger import FILE_NAME, Ledger
from opengyre.report.console import console
from opengyre.report.svg import number
from opengyre.report.tree_page import DrawnTree, tree_page
from opengyre.run.folder import read_config
from opengyre.run.imports.calls import read_calls
from opengyre.run.imports.render import TextTokenizer, tree_of_import
from opengyre.trajectory.admission import admit
from opengyre.trajectory.recorded import tree_of
from opengyre.trajectory.statistics import TreeStatistics, statistics_of, total_of
from opengyre.trajectory.tree import TrajectoryTree

_ROWS_SHOWN = 30
_DETAILS_SHOWN = 8
_NUMBERS_WIDTH = 65
Found = tuple[TrajectoryTree, Sequence[Verdict], int]
"""A tree, how its prompts were made, the seed of its admission."""


class TreesResult(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints.

    Example: ``{"executions": [{"execution_id": "e1", "calls": 2, ...}], "totals": {...}}``.
    """

    executions: tuple[TreeStatistics, ...]
    totals: TreeStatistics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("sources", nargs="+", type=Path, metavar="RUN_OR_FILE", help="a run folder or a file of calls")
    add_tree_arguments(parser)
    parser.add_argument("--execution", metavar="ID", help="only this execution")


def add_tree_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``trees`` and ``import`` share."""
    parser.add_argument(
        "--max-leaves", type=_not_negative, default=5, metavar="N", help="J_max; 0: no cap (default: 5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws inside a role; a run has its own")
    parser.add_argument("--vocabulary", type=_not_negative, metavar="N", help="refuse token ids from N on")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write a picture of the trees")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _not_negative(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer, 0 or more")
    return int(text)


def main(arguments: argparse.Namespace) -> int:
    """Print the statistics of the trees."""
    drawn = []
    for source in arguments.sources:
        for tree, verdicts, seed in trees_of(source, seed=arguments.seed, vocabulary=arguments.vocabulary):
            if arguments.execution in (None, tree.execution_id):
                drawn.append(draw(tree, verdicts, max_leaves=arguments.max_leaves, seed=seed))
    if not drawn:
        wanted = f"execution {arguments.execution}" if arguments.execution else "execution with calls"
        raise InputError(f"{arguments.sources[0]}: no {wanted}")
    executions = tuple(each.statistics for each in drawn)
    title = ", ".join(source.name or str(source) for source in arguments.sources)
    write_html(arguments.html, drawn, title)
    if arguments.json:
        result = TreesResult(executions=executions, totals=total_of(executions))
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        return 0
    show(executions, title)
    return 0


def trees_of(source: Path, *, seed: int = 0, vocabulary: int | None = None) -> Iterator[Found]:
    """Yield the trees of a run's training executions, or of a file of calls.

    Choice: evaluation executions are never trained and are left out.

    Raises:
        FileError: The source is neither, or a call of the file is malformed.
    """
    if not source.is_dir():
        for imported in read_calls(source, vocabulary=vocabulary):
            yield tree_of_import(imported, TextTokenizer())[0], (), seed
        return
    if not (source / FILE_NAME).exists():
        raise FileError(f"{source}: a folder without {FILE_NAME}; expected a run or a file of calls")
    config = read_config(source)
    ledger = Ledger.open(source, read_only=True)
    try:
        for execution in ledger.executions():
            if execution.kind.is_evaluation:
                continue
            calls = ledger.read_calls(execution.execution_id)
            if calls:
                name = f"{config.run.seed}/{execution.group_id}/{execution.execution_id}"
                verdicts = [call.verdict for call in calls]
                yield tree_of(execution.execution_id, calls), verdicts, xxhash.xxh3_64_intdigest(name.encode())
    finally:
        ledger.close()


def draw(tree: TrajectoryTree, verdicts: Sequence[Verdict], *, max_leaves: int, seed: int) -> DrawnTree:
    """Return a tree with what is admitted of it and its figures."""
    admitted = admit(tree, max_leaves=max_leaves, seed=seed)
    return DrawnTree(tree=tree, admitted=admitted, statistics=statistics_of(tree, admitted, verdicts=verdicts))


def write_html(path: Path | None, drawn: Sequence[DrawnTree], title: str) -> None:
    """Write the page, if one is asked for.

    Raises:
        InputError: It cannot be written.
    """
    if path is not None:
        write_whole(path, tree_page(drawn, title=title).encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it, so that it is whole or not there.

    Raises:
        InputError: It cannot be written.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def show(executions: Sequence[TreeStatistics], title: str) -> None:
    """Print the executions and their sum."""
    table = Table(box=box.SIMPLE, title=f"trees of {title}", title_justify="left", padding=(0, 0))
    width = max(14, console().width - _NUMBERS_WIDTH)
    table.add_column("execution", no_wrap=True)
    for name in ("calls", "roots", "nodes", "leaves", "summed", "unique", "ratio", "sampled", "trained"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in sorted(executions, key=lambda one: -one.summed_tokens)[:_ROWS_SHOWN]:
        table.add_row(_cut(each.execution_id, width), *_cells(each))
    if len(executions) > _ROWS_SHOWN:
        table.add_row(f"... {len(executions) - _ROWS_SHOWN} more")
    total = total_of(executions)
    table.add_section()
    table.add_row(f"sum of {len(executions)}", *_cells(total))
    console().print(table)
    for each in executions if 1 < len(executions) <= _DETAILS_SHOWN else ():
        console().print(f"{each.execution_id}: {_roles(each)}", markup=False, soft_wrap=True)
    _show_total(total, admitted=sum(len(each.admitted) for each in executions))


def _cells(each: TreeStatistics) -> tuple[str, ...]:
    counts = (each.calls, each.roots, each.nodes, sum(each.leaves.values()))
    tokens = (number(each.summed_tokens), number(each.unique_tokens), f"{each.ratio:.1f}")
    return (*map(str, counts), *tokens, number(each.sampled_tokens), number(each.trained_tokens))


def _cut(text: str, width: int) -> str:
    """Return a text that fits, its end kept.

    >>> _cut("g00012-s03-a0", 8)
    '...03-a0'
    """
    return text if len(text) <= width else "..." + text[len(text) - width + 3 :]


def _roles(each: TreeStatistics) -> str:
    """Return leaves, admitted leaves and trained tokens of each role."""
    parts = []
    for role, leaves in each.leaves.items():
        admitted = [leaf.trained_tokens for leaf in each.admitted if leaf.role == role]
        noun = "leaf" if leaves == 1 else "leaves"
        parts.append(f"{role} {leaves} {noun}, {len(admitted)} admitted, {sum(admitted):,} tokens trained")
    return "; ".join(parts) or "no leaf"


def _show_total(total: TreeStatistics, *, admitted: int) -> None:
    trained = ", ".join(f"{leaf.trained_tokens:,} {leaf.role.value}" for leaf in total.admitted) or "none"
    leaves = ", ".join(f"{count} {role}" for role, count in total.leaves.items()) or "none"
    lines = (
        f"leaves: {leaves}; {admitted} admitted",
        f"trained tokens by the role of their leaf: {trained}",
        f"calls whose output is context: {total.orphan} orphan, {total.vanished} vanished, {total.poisoned} poisoned, "
        f"{total.truncated} cut-down law, {total.auxiliary} auxiliary; "
        f"{total.duplicate_tokens:,} tokens sampled twice at one place",
        f"prompts: {total.restored} restored, {total.rendered} rendered, {total.rewritten} rewritten",
    )
    for line in lines:
        console().print(line, markup=False, soft_wrap=True)
