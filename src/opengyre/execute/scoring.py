"""Scoring: grade the retained workspace of an execution in a clean sandbox and turn the result into an outcome."""

import asyncio
import hashlib
import importlib.util
import os
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec

from opengyre.core.errors import SandboxError
from opengyre.core.types import EvaluationFailed, NoArtifact, Outcome, Scored, Task
from opengyre.execute.container import ImageStore
from opengyre.execute.isolation import Isolation
from opengyre.execute.launcher import ForkServer
from opengyre.execute.live import sandbox_of


class GradeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the grader wrote.

    Example: ``GradeResult(grader="gyre-grade-2", tests={"amber::zoom": "passed"})``.
    """

    grader: str = ""
    tests: dict[str, str] = {}
    tampering: list[str] = []
    uncanaried: list[str] = []
    error: str = ""
    refused: list[str] = []
    reward: float | None = None
    """From a task's own script."""
    collected: list[str] = []
    canaries: list[str] = []
    """Tests whose canaries fail on what was graded; asked for while a task is frozen."""
    versions: dict[str, str] = {}


class SandboxedEvaluator:
    """Grades workspaces; implements ``core.protocols.Evaluator``.

    Args:
        server: Fork server that starts the graders.
        scratch: Folder for copies of workspaces.
        workers: Gradings at once.
        isolation: How graders are confined.
        memory_bytes: Limit of a candidate's process.
        images: Images of tasks that name one.
    """

    def __init__(
        self,
        server: ForkServer,
        scratch: Path,
        *,
        workers: int,
        isolation: Isolation,
        memory_bytes: int,
        images: ImageStore | None = None,
    ) -> None:
        self.server = server
        self._scratch = scratch
        self._room = asyncio.Semaphore(workers)
        self.isolation = isolation
        self.images = images
        self._memory_bytes = memory_bytes
        self._known: dict[str, GradeResult] = {}
        self._graded_now: dict[str, asyncio.Lock] = {}
        self._number = 0
        scratch.mkdir(parents=True, exist_ok=True)

    async def evaluate(self, task: Task, workspace: Path, *, timed_out: bool) -> Outcome:
        """Return the outcome of a workspace.

        Identical artifacts of one task are graded once.
        """
        artifacts = find_artifacts(task, workspace)
        if not artifacts:
            reason = "harness timeout, no artifact" if timed_out else "no artifact"
            return NoArtifact(reason=reason, total=len(task.test_ids))
        result = await self._graded_once(_fingerprint(task, workspace), task, workspace)
        return outcome_of(task, result, timed_out=timed_out)

    async def _graded_once(self, key: str, task: Task, workspace: Path) -> GradeResult:
        """Grade, or take what an identical workspace got, also one that is being graded at this moment."""
        async with self._graded_now.setdefault(key, asyncio.Lock()):
            result = self._known.get(key)
            if result is None:
                result = await self.grade(task, workspace)
                if not result.error:
                    self._known[key] = result
        self._graded_now.pop(key, None)
        return result

    async def grade(self, task: Task, workspace: Path, *, is_freezing: bool = False) -> GradeResult:
        """Return the grader's own words on a workspace, without the memory of earlier ones.

        Args:
            task: What is graded.
            workspace: Folder of the candidate.
            is_freezing: Find out which canaries fail instead of holding them against the candidate.
        """
        async with self._room:
            return await self._grade(task, workspace, is_freezing=is_freezing)

    async def _grade(self, task: Task, workspace: Path, *, is_freezing: bool) -> GradeResult:
        self._number += 1
        name = f"grading-{os.getpid()}-{self._number}"
        result_path = self._scratch / f"{name}.json"
        try:
            status = await self.server.launch(self._order(name, task, workspace, result_path, is_freezing))
            if status is None or not result_path.exists():
                return GradeResult(error=f"the grading process ended with {status} and no result")
            return msgspec.json.decode(result_path.read_bytes(), type=GradeResult)
        except (SandboxError, msgspec.DecodeError, OSError) as error:
            return GradeResult(error=str(error))
        finally:
            result_path.unlink(missing_ok=True)

    def _order(self, name: str, task: Task, workspace: Path, result_path: Path, is_freezing: bool) -> dict[str, Any]:
        return {
            **sandbox_of(task, self.isolation, self.images, is_light=task.format == "minirepo"),
            **_grader_order(task, is_freezing=is_freezing),
            "id": name,
            "kind": "grading",
            "workspace": str(workspace),
            "scratch": str(self._scratch),
            "result": str(result_path),
            "log": str(self._scratch / "grading.log"),
            "hidden_files": task.hidden_files,
            "limit_s": task.scoring_limit_s,
            "user": self.server.next_user(),
            "memory_bytes": self._memory_bytes,
        }

    def close(self) -> None:
        """Remove the scratch folder."""
        shutil.rmtree(self._scratch, ignore_errors=True)


def _grader_order(task: Task, *, is_freezing: bool) -> dict[str, Any]:
    """Return which grader scores a task, and what only that grader reads."""
    if task.format == "minirepo":
        return {"grader": "functions", "test_files": sorted(task.hidden_files)}
    if task.format == "harbor":
        options = task.options
        return {"grader": "script", "environment": options["environment"]}
    supervisor = Path(importlib.util.find_spec("gyre_grade").origin or "").parent / "pytest_grade.py"  # type: ignore[union-attr]
    return {
        "grader": "pytest",
        "test_files": task.options["test_files"],
        "tests": list(task.test_ids),
        "canaries": None if is_freezing else task.options["canaries"],
        "needs": task.options["needs"],
        "python": sys.executable,
        "supervisor": str(supervisor),
        "shown": sorted({sys.prefix, str(supervisor.parent)}),
    }


def find_artifacts(task: Task, workspace: Path) -> list[Path]:
    """Return the regular files of the workspace that match the task's artifact patterns and are not its own files."""
    found = []
    for path in sorted(workspace.rglob("*")):
        name = path.relative_to(workspace).as_posix()
        is_plain = path.is_file() and not path.is_symlink()
        if is_plain and name not in task.files and any(fnmatch(name, pattern) for pattern in task.artifact):
            found.append(path)
    return found


def outcome_of(task: Task, result: GradeResult, *, timed_out: bool) -> Outcome:
    """Return the outcome of a grading: reward = passed / frozen total, missing tests failed.

    >>> task = Task(task_id="t", format="minirepo", instruction="", test_ids=("a::f", "a::g"))
    >>> outcome_of(task, GradeResult(tests={"a::f": "passed"}), timed_out=False).reward
    0.5
    """
    if result.error:
        return EvaluationFailed(reason=result.error)
    if result.reward is not None:
        passed = int(result.reward == 1.0)
        return Scored(reward=result.reward, passed=passed, total=1, timed_out=timed_out, tests=result.tests)
    tests = {test: result.tests.get(test, "missing") for test in task.test_ids}
    passed = sum(verdict == "passed" for verdict in tests.values())
    return Scored(
        reward=passed / max(1, len(tests)),
        passed=passed,
        total=len(tests),
        timed_out=timed_out,
        reason="tampering" if result.tampering else "",
        tests=tests,
    )


def _fingerprint(task: Task, workspace: Path) -> str:
    """Return a hash of task and workspace files."""
    digest = hashlib.blake2b(task.task_id.encode(), digest_size=16)
    frozen = (task.test_ids, task.grader, task.hidden_files, task.image)
    digest.update(msgspec.json.encode(frozen, order="deterministic"))
    for path in sorted(workspace.rglob("*")):
        if path.is_file() and not path.is_symlink():
            digest.update(path.relative_to(workspace).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
