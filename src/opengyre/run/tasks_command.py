"""Tasks: list, check, show, score, and make them."""

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from opengyre.core.config import decode_config
from opengyre.core.errors import FileError, InputError
from opengyre.core.types import NoArtifact, Outcome, Scored, Task
from opengyre.execute.container import ImageStore, engine_lack, find_engine, require_engine
from opengyre.execute.isolation import choose_isolation
from opengyre.execute.launcher import ForkServer
from opengyre.execute.live import HarnessPlan, LiveRunner
from opengyre.execute.scoring import SandboxedEvaluator, outcome_of
from opengyre.report.console import console
from opengyre.tasks.checked import write_check
from opengyre.tasks.folder import MINIREPO, located_tasks, read_task, read_tasks
from opengyre.tasks.gate import EMPTY_RUNS, REFERENCE_RUNS, GateVerdict, judge
from opengyre.tasks.nl2repo import DOCUMENT, describe, is_nl2repo
from opengyre.tasks.references import has_plain_reference, reference_of, write_files
from opengyre.tasks.repo import freeze, make_described, make_repo

MEMORY_BYTES = 2 * 1024**3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary in (("list", "list tasks"), ("check", "run the control gate"), ("show", "show a task")):
        action = actions.add_parser(name, help=summary)
        action.add_argument("tasks", metavar="TASKS", help="a task, a folder of tasks, or minirepo:SPLIT:FIRST:COUNT")
        action.add_argument("--json", action="store_true", help="print one JSON object")
    score = actions.add_parser("score", help="score a folder")
    score.add_argument("tasks", metavar="TASK")
    score.add_argument("workspace", type=Path, metavar="WORKSPACE")
    score.add_argument("--json", action="store_true", help="print one JSON object")
    make = actions.add_parser("make-repo", help="make a repo task from a descriptor and its source archive")
    make.add_argument("descriptor", type=Path, metavar="TASK_JSON", help="a descriptor, or an NL2RepoBench folder")
    make.add_argument("--archive", type=Path, metavar="FILE", help="source archive, with an NL2RepoBench folder")
    make.add_argument("--document", type=Path, metavar="FILE", help="what the agent reads (default: the readme)")
    make.add_argument("--out", type=Path, required=True, metavar="DIR")
    make.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    """Carry out one action."""
    if arguments.action == "make-repo":
        return _make(arguments)
    if arguments.action == "check":
        return _check(_located(arguments.tasks), is_json=arguments.json)
    tasks = read_tasks(arguments.tasks)
    if arguments.action == "score":
        if len(tasks) != 1:
            raise InputError(f"{arguments.tasks}: {len(tasks)} tasks, expected one")
        return _score(tasks[0], arguments.workspace, is_json=arguments.json)
    if arguments.action == "list":
        return _list(tasks, is_json=arguments.json)
    return _show(tasks, is_json=arguments.json)


# -- actions --------------------------------------------------------------------------------------------------


def _list(tasks: Sequence[Task], *, is_json: bool) -> int:
    if is_json:
        _print_json({"tasks": [_summary(task) for task in tasks]})
        return 0
    table = Table(title=f"{len(tasks)} tasks", title_justify="left")
    for name in ("task", "format", "tests", "image"):
        table.add_column(name, justify="right" if name == "tests" else "left")
    for task in tasks:
        table.add_row(task.task_id, task.format, str(len(task.test_ids)), task.image or "")
    console().print(table)
    return 0


def _summary(task: Task) -> dict[str, Any]:
    return {"task_id": task.task_id, "format": task.format, "tests": len(task.test_ids), "image": task.image}


def _show(tasks: Sequence[Task], *, is_json: bool) -> int:
    for task in tasks:
        if is_json:
            _print_json({**_summary(task), "instruction": task.instruction, "test_ids": task.test_ids})
            continue
        console().print(
            f"{task.task_id} ({task.format}), {len(task.test_ids)} tests, grader {task.grader}", markup=False
        )
        unknown = task.options.get("unknown_keys")
        if unknown:
            console().print(f"keys that are not read: {', '.join(unknown)}", markup=False)
        console().print(task.instruction, markup=False)
    return 0


def _score(task: Task, workspace: Path, *, is_json: bool) -> int:
    if not workspace.is_dir():
        raise FileError(f"{workspace}: no such folder; expected a workspace")
    require_engine([task])
    work = _with_evaluator(lambda evaluator: evaluator.evaluate(task, workspace, timed_out=False), [task])
    outcome = asyncio.run(work)
    row = outcome_row(outcome)
    if is_json:
        _print_json(row)
    else:
        console().print(f"{row['outcome']}: {row['passed']} of {row['total']}, reward {row['reward']}  {row['reason']}")
        for test, verdict in row["tests"].items():
            if verdict != "passed":
                console().print(f"  {verdict:8} {test}", markup=False)
    return 0 if isinstance(outcome, Scored | NoArtifact) else 1


def outcome_row(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as ``tasks score --json`` shows it."""
    row: dict[str, Any] = {
        "outcome": str(type(outcome).__struct_config__.tag),
        "reward": None,
        "passed": 0,
        "total": 0,
        "timed_out": False,
        "reason": outcome.reason,
        "tests": {},
    }
    if isinstance(outcome, Scored):
        row |= {key: getattr(outcome, key) for key in ("reward", "passed", "total", "timed_out", "tests")}
    elif isinstance(outcome, NoArtifact):
        row |= {"reward": 0.0, "total": outcome.total}
    return row


def _located(source: str) -> list[tuple[Path | None, Task]]:
    """Return tasks with their folders; generated ones have none."""
    if source.partition(":")[0] == MINIREPO:
        return [(None, task) for task in read_tasks(source)]
    return list(located_tasks(Path(source)))


def _check(located: Sequence[tuple[Path | None, Task]], *, is_json: bool) -> int:
    tasks = [task for _, task in located]
    verdicts = asyncio.run(_with_evaluator(lambda evaluator: check_all(evaluator, tasks), tasks))
    for (folder, task), verdict in zip(located, verdicts, strict=True):
        if folder is not None:
            write_check(folder, task, verdict)
    rows = [
        {
            "task_id": verdict.task_id,
            "accepted": verdict.is_accepted,
            "reason": verdict.reason,
            "total": verdict.total,
            "empty": verdict.empty,
            "reference": verdict.reference,
        }
        for verdict in verdicts
    ]
    if is_json:
        _print_json({"tasks": rows})
    else:
        for row in rows:
            mark = "accepted" if row["accepted"] else "refused "
            console().print(
                f"{mark} {row['task_id']}: {row['total']} tests, {row['reason']}", markup=False, soft_wrap=True
            )
    return 0 if all(verdict.is_accepted for verdict in verdicts) else 1


def _make(arguments: argparse.Namespace) -> int:
    task = _made(arguments)
    frozen = asyncio.run(_with_evaluator(lambda evaluator: freeze_task(evaluator, task, arguments.out), [task]))
    if arguments.json:
        _print_json(_summary(frozen))
    else:
        console().print(f"{arguments.out}: {len(frozen.test_ids)} tests frozen from the reference", soft_wrap=True)
    return 0


def _made(arguments: argparse.Namespace) -> Task:
    source, document = arguments.descriptor, arguments.document
    if not is_nl2repo(source):
        if arguments.archive is not None:
            raise InputError("--archive: expected only with an NL2RepoBench folder; a descriptor names its archive")
        return make_repo(source, arguments.out, document=document)
    if arguments.archive is None:
        raise InputError(f"{source}: its hidden tests are not in the benchmark; expected --archive FILE, the library")
    descriptor = describe(source, arguments.archive)
    return make_described(
        descriptor, arguments.archive, arguments.out, named=str(source), document=document or source / DOCUMENT
    )


async def freeze_task(evaluator: SandboxedEvaluator, task: Task, folder: Path) -> Task:
    """Run the reference once, write the tests that pass into the task, and return it as read again.

    Raises:
        FileError: The grader cannot run here, or nothing passes.
    """
    with tempfile.TemporaryDirectory(prefix="gyre-t") as scratch:
        workspace = write_files(Path(scratch) / "reference", reference_of(task))
        result = await evaluator.grade(task, workspace, is_freezing=True)
    passed = sorted(test for test, verdict in result.tests.items() if verdict == "passed")
    if result.error or not passed:
        shutil.rmtree(folder, ignore_errors=True)
        raise FileError(f"{folder}: the reference cannot be scored: {result.error or 'none of its tests passes'}")
    freeze(folder, tests=passed, canaries=sorted(set(result.canaries) & set(passed)), versions=result.versions)
    return read_task(folder)


# -- the control gate -----------------------------------------------------------------------------------------


async def check_all(evaluator: SandboxedEvaluator, tasks: Sequence[Task]) -> list[GateVerdict]:
    """Return the gate's verdict on each task."""
    return [await check_task(evaluator, task) for task in tasks]


async def check_task(evaluator: SandboxedEvaluator, task: Task) -> GateVerdict:
    """Run the control runs of a task and return the verdict."""
    if task.image is not None and evaluator.images is None:
        reason = f"the grader does not work here: {engine_lack(task)}"
        return GateVerdict(
            task_id=task.task_id, is_accepted=False, reason=reason, total=len(task.test_ids), empty=None, reference=None
        )
    with tempfile.TemporaryDirectory(prefix="gyre-t") as scratch:
        empty = write_files(Path(scratch) / "empty", {})
        reference = Path(scratch) / "reference"
        if has_plain_reference(task):
            write_files(reference, reference_of(task))
        else:
            reference = await _solved(evaluator, task, Path(scratch))
        runs = [await _reward(evaluator, task, empty) for _ in range(EMPTY_RUNS)]
        good = [await _reward(evaluator, task, reference) for _ in range(REFERENCE_RUNS)]
    return judge(task.task_id, total=len(task.test_ids), empty=runs, reference=good)


async def _reward(evaluator: SandboxedEvaluator, task: Task, workspace: Path) -> float | str:
    """Return the reward of one fresh grading, or why there is none."""
    outcome = outcome_of(task, await evaluator.grade(task, workspace), timed_out=False)
    return outcome.reward if isinstance(outcome, Scored) else outcome.reason


async def _solved(evaluator: SandboxedEvaluator, task: Task, folder: Path) -> Path:
    """Run a Harbor task's solution in a sandbox; what it needs and lacks shows in the reward."""
    solution = reference_of(task)
    script = solution.pop("solve.sh", "true")
    limit_s = task.scoring_limit_s
    config = decode_config({"harness": {"timeout_s": limit_s, "overall_timeout_s": 2 * limit_s}})
    plan = HarnessPlan(module="", command=("/bin/bash", "-c", script), environment={}, settings={})
    runner = LiveRunner(config, folder, evaluator.server, plan, isolation=evaluator.isolation, images=evaluator.images)
    replace = msgspec.structs.replace
    await runner.run("solution", replace(task, files={**task.files, **solution}), folder / "nobody")
    return runner.workspace("solution")


async def _with_evaluator(work: Any, tasks: Sequence[Task]) -> Any:  # noqa: ANN401 - returns what the work returns
    """Run work with an evaluator of its own and clean up behind it."""
    with tempfile.TemporaryDirectory(prefix="gyre-g") as scratch:
        folder = Path(scratch)
        folder.chmod(0o755)
        server = ForkServer(folder / "forkserver.log")
        await server.start()
        engine = find_engine() if any(task.image is not None for task in tasks) else None
        images = ImageStore(engine, folder / "images") if engine is not None else None
        isolation = choose_isolation("auto")
        evaluator = SandboxedEvaluator(
            server, folder / "s", workers=2, isolation=isolation, memory_bytes=MEMORY_BYTES, images=images
        )
        try:
            return await work(evaluator)
        finally:
            await server.stop()


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
