"""Measures the core seconds of one embedded execution outside engine and trainer; ``opengyre bench execution``.

Everything is the real part but the engine: fork server, shim, sandbox, harness, proxy, ledger, grader. The engine is a
scripted expert, so that the same work is done each time. Counted is the CPU time of this process (proxy, ledger,
driver) and of the fork server with all it ever started.
"""

import asyncio
import os
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from opengyre.core.config import Config, decode_config
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import Finish, Outcome, Task, VersionRun
from opengyre.execute.isolation import choose_isolation
from opengyre.execute.launcher import ForkServer
from opengyre.execute.live import HarnessPlan, LiveRunner
from opengyre.execute.scoring import SandboxedEvaluator
from opengyre.ledger.ledger import Ledger
from opengyre.model.chat import EmbeddedRenderer
from opengyre.proxy.server import Proxy
from opengyre.proxy.session import SessionSpec
from opengyre.tasks.minirepo import conversation as words
from opengyre.tasks.minirepo.demonstrations import call
from opengyre.tasks.minirepo.family import Package
from opengyre.tasks.minirepo.tasks import minirepo_package, minirepo_task, reference_files
from opengyre.tasks.minirepo.vocabulary import train_tokenizer

Result = dict[str, Any]
EXECUTIONS = 32
AT_ONCE = 8
VOCABULARY = 836


@dataclass
class Script:
    """How the expert works.

    Example: ``Script(tests=2)`` runs the visible tests of each module twice.
    """

    modules: int = 99
    writes: int = 1
    tests: int = 1


@dataclass
class Expert:
    """Answers the calls of every execution as a flawless policy would; implements ``core.protocols.Engine``."""

    renderer: EmbeddedRenderer
    script: Script = field(default_factory=Script)
    packages: dict[str, Package] = field(default_factory=dict)
    _done: dict[str, list[str]] = field(default_factory=dict)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the expert's reply at once."""
        text = self.renderer.text_of(request.context)
        output = np.array(self._reply(request.execution_id, text), np.int32)
        return Generation(
            output=output,
            behaviour_logprobs=np.zeros(len(output), np.float32),
            versions=(VersionRun(0, len(output)),),
            finish=Finish.STOP,
        )

    def _reply(self, execution_id: str, text: str) -> list[int]:
        package = self.packages[execution_id]
        if words.MAIN_SYSTEM in text:
            return self._lead(package, self._done.setdefault(execution_id, []), text)
        module = text.partition("<user>module ")[2].partition("\n")[0]
        content = "".join(function.code() for function in package.functions(module))
        if text.count("<asst>write_file") < self.script.writes:
            reply = call("write_file", content=content)
        elif text.count("<asst>run_tests") < self.script.tests:
            reply = call("run_tests")
        else:
            reply = call("finish", result="pass")
        return self.renderer.encode_reply(reply, words.SUB_TOOLS)

    def _lead(self, package: Package, done: list[str], text: str) -> list[int]:
        if text.endswith(words.COMPACTION + "<end><asst>"):
            return self.renderer.encode_text(" ".join(["built", *done]))
        left = [module for module, _ in package.modules[: self.script.modules] if module not in done]
        done += left[:1]
        reply = call("delegate", module=left[0]) if left else call("finish", result="done")
        return self.renderer.encode_reply(reply, words.MAIN_TOOLS)


@dataclass
class Stand:
    """All parts of an execution around the expert."""

    folder: Path
    config: Config
    expert: Expert
    ledger: Ledger
    proxy: Proxy
    server: ForkServer
    runner: LiveRunner
    evaluator: SandboxedEvaluator
    tasks: list[tuple[Package, Task]]
    """Made beforehand: a run makes a task once for a whole group."""
    number: int = 0

    async def execute(self, *, is_scored: bool = True) -> tuple[int, Outcome | None]:
        """Run one execution and return its calls and outcome."""
        self.number += 1
        index, execution_id = self.number, f"bench-{self.number}"
        package, task = self.tasks[index % len(self.tasks)]
        self.expert.packages[execution_id] = package
        path = self.folder / f"{index:x}"
        spec = SessionSpec(
            execution_id=execution_id, group_id=index, slot=0, attempt=0, run_seed=0, context_tokens=1024
        )
        await self.proxy.open_execution(spec, path)
        end = await self.runner.run(execution_id, task, path)
        outcome = None
        if is_scored:
            workspace = self.runner.workspace(execution_id)
            outcome = await self.evaluator.evaluate(task, workspace, timed_out=False)
        await self.proxy.close_execution(execution_id)
        self.runner.discard(execution_id)
        return end.calls, outcome

    def cpu_s(self) -> float:
        """Return the CPU seconds of this process and of the fork server with its ended children."""
        mine = resource.getrusage(resource.RUSAGE_SELF)
        fields = Path(f"/proc/{self.server.process_id}/stat").read_text().rpartition(")")[2].split()
        theirs = sum(int(value) for value in fields[11:15]) / os.sysconf("SC_CLK_TCK")
        return mine.ru_utime + mine.ru_stime + theirs

    async def measure(self, script: Script, *, is_scored: bool = False) -> tuple[float, float]:
        """Return CPU seconds and calls of one execution under a script, means over many."""
        self.expert.script = script
        room = asyncio.Semaphore(AT_ONCE)

        async def one() -> int:
            async with room:
                return (await self.execute(is_scored=is_scored))[0]

        before_s = self.cpu_s()
        calls = await asyncio.gather(*(one() for _ in range(EXECUTIONS)))
        return (self.cpu_s() - before_s) / EXECUTIONS, sum(calls) / EXECUTIONS

    async def scoring_s(self) -> float:
        """Return the CPU seconds of scoring one reference workspace."""
        workspaces = []
        for index, (package, _) in enumerate(self.tasks):
            path = self.folder / f"reference-{index}"
            path.mkdir()
            for name, text in reference_files(package).items():
                (path / name).write_text(text)
            workspaces.append(path)
        before_s = self.cpu_s()
        for (_, task), path in zip(self.tasks, workspaces, strict=True):
            await self.evaluator.grade(task, path)
        return (self.cpu_s() - before_s) / EXECUTIONS


def run() -> list[Result]:
    """Return the measurements: case, value, unit."""
    with tempfile.TemporaryDirectory(prefix="gyre-b") as folder:
        return asyncio.run(_run(Path(folder)))


async def _run(folder: Path) -> list[Result]:
    stand, speed_s = await _built(folder, time.monotonic), _additions_s()
    try:
        await stand.execute()
        shortest_s, shortest = await stand.measure(Script(modules=0))
        plain_s, plain = await stand.measure(Script(writes=2, tests=0))
        tested_s, _ = await stand.measure(Script(writes=1, tests=1))
        total_s, calls = await stand.measure(Script(), is_scored=True)
        scoring_s = await stand.scoring_s()
    finally:
        await stand.server.stop()
        await stand.proxy.stop()
        stand.ledger.close()
    modules = sum(len(minirepo_package("train", index).modules) for index in range(1, 400)) / 399
    call_s = (plain_s - shortest_s) / (plain - shortest)
    return [
        {
            "case": "start of sandbox, shim and harness",
            "value": round(shortest_s - shortest * call_s, 4),
            "unit": "core-s",
        },
        {"case": "a call in harness, shim and proxy", "value": round(call_s, 4), "unit": "core-s"},
        {
            "case": "a visible test run beside its call",
            "value": round((tested_s - plain_s) / modules, 4),
            "unit": "core-s",
        },
        {"case": "scoring, canaries included", "value": round(scoring_s, 4), "unit": "core-s"},
        {"case": "calls of an execution", "value": round(calls, 1), "unit": "calls"},
        {"case": "an execution in all", "value": round(total_s, 4), "unit": "core-s"},
        {
            "case": "ten million additions, before / after",
            "value": f"{speed_s:.2f} / {_additions_s():.2f}",
            "unit": "s",
        },
    ]


def _additions_s() -> float:
    """Return the CPU seconds of a fixed loop: what a core of this machine is worth at this moment."""
    before_s, total = time.process_time(), 0
    for number in range(10_000_000):
        total += number
    return time.process_time() - before_s


async def _built(folder: Path, clock: Callable[[], float]) -> Stand:
    config = decode_config({})
    expert = Expert(EmbeddedRenderer(train_tokenizer(VOCABULARY)))
    ledger = Ledger.open(folder)
    proxy = Proxy(engine=expert, store=ledger, renderer=expert.renderer, clock=clock)
    server = ForkServer(folder / "forkserver.log")
    await asyncio.gather(proxy.start(), server.start())
    plan = HarnessPlan(module="gyre_agent.agent", command=(), environment={}, settings={"max_calls": 40})
    isolation = choose_isolation("auto")
    runner = LiveRunner(config, folder / "x", server, plan, isolation=isolation)
    evaluator = SandboxedEvaluator(server, folder / "s", workers=2, isolation=isolation, memory_bytes=1 << 29)
    tasks = [(minirepo_package("train", index), minirepo_task("train", index)) for index in range(EXECUTIONS)]
    return Stand(folder, config, expert, ledger, proxy, server, runner, evaluator, tasks)
