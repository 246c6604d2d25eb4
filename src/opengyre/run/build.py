"""Builds the objects of a live run from its folder and configuration."""

import asyncio
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from opengyre.algorithm.settings import LossSettings
from opengyre.cell.client import LocalCell
from opengyre.cell.wire import CellSettings
from opengyre.core.cells import WeightsRef
from opengyre.core.config import Config
from opengyre.core.events import Event
from opengyre.core.records import RunRecord
from opengyre.execute.container import ImageStore, find_engine
from opengyre.execute.harness import harness_plan, load_harness
from opengyre.execute.isolation import choose_isolation
from opengyre.execute.launcher import ForkServer
from opengyre.execute.live import LiveRunner, end_shims, read_journals
from opengyre.execute.scoring import SandboxedEvaluator
from opengyre.ledger.ledger import Ledger
from opengyre.model.chat import EmbeddedRenderer
from opengyre.model.tokenizer import EmbeddedTokenizer
from opengyre.proxy.bodies import BodyFiles
from opengyre.proxy.doors import DoorLimits
from opengyre.proxy.server import Proxy
from opengyre.run.cell_desk import CellDesk, shared_folder
from opengyre.run.clock import RunClock
from opengyre.run.driver import Driver
from opengyre.run.emulated import REPLIES, emulated_costs
from opengyre.run.execution_desk import ExecutionDesk
from opengyre.run.folder import RunFolder
from opengyre.run.groups import GroupBook
from opengyre.run.rates import NotingStore, RateBook
from opengyre.run.router import CellRouter
from opengyre.run.task_source import task_source
from opengyre.run.training_desk import TrainingDesk
from opengyre.run.warmstart import TOKENIZER
from opengyre.schedule.scheduler import Scheduler
from opengyre.schedule.settings import ScheduleSettings
from opengyre.tasks.folder import MINIREPO
from opengyre.train.settings import OptimizerSettings

CORE = 0
SHIM_GRACE_S = 5.0
"""How long the shims of a run have to end their harnesses."""


@dataclass
class LiveRun:
    """A built run: the driver and what has to be started and stopped around it."""

    folder: RunFolder
    ledger: Ledger
    driver: Driver
    server: ForkServer
    gradients: Path

    async def start(self) -> None:
        """Start fork server, proxy and cells."""
        await asyncio.gather(self.server.start(), self.driver.executions.proxy.start(), self.driver.cells.start())

    async def stop(self) -> None:
        """Stop everything; executions that live are ended, and their journals are read."""
        await self.driver.executions.proxy.stop()
        await end_shims(self.folder.executions, grace_s=SHIM_GRACE_S)
        await import_journals(self.folder.executions, self.ledger)
        await self.driver.cells.stop()
        await self.server.stop()
        self.driver.executions.evaluator.close()
        shutil.rmtree(self.gradients, ignore_errors=True)


async def import_journals(executions: Path, ledger: Ledger) -> None:
    """Store what the shims' journals say and no proxy was there to take."""
    lines = read_journals(executions)
    receipts = [(name, line.request_id, line.delivered, line.sent_bytes) for name, line in lines]
    if receipts:
        await ledger.import_deliveries(receipts)


def schedule_settings(config: Config) -> ScheduleSettings:
    """Return the scheduler's part of a configuration."""
    schedule, evaluation = config.schedule, config.evaluation
    return ScheduleSettings(
        cells=tuple(range(config.cells.count)),
        steps=config.run.steps,
        batch_groups=schedule.batch_groups,
        group_size=schedule.group_size,
        overlap=schedule.overlap,
        burst=schedule.burst,
        core=CORE,
        rule=schedule.rule,
        theta=schedule.theta,
        floor=schedule.floor,
        queue=schedule.queue,
        training_cells=schedule.training_cells,
        streaming=schedule.streaming,
        ahead=schedule.ahead,
        dispatch_on=schedule.dispatch_on,
        redispatch=schedule.redispatch,
        evaluate_at=tuple(sorted({min(version, config.run.steps) for version in evaluation.at})),
        evaluation_tasks=evaluation.tasks,
        evaluate_greedy=evaluation.greedy,
    )


def cell_settings(
    config: Config, folder: RunFolder, gradients: Path, *, incarnation: int, is_core: bool
) -> CellSettings:
    """Return what a cell process is told."""
    algorithm, train = config.algorithm, config.train
    optimizer = OptimizerSettings(
        learning_rate=train.learning_rate,
        beta1=train.beta1,
        beta2=train.beta2,
        weight_decay=train.weight_decay,
        gradient_clip=train.gradient_clip,
    )
    return CellSettings(
        slots=4 * config.cells.max_running,
        max_running=config.cells.max_running,
        kv_tokens=config.cells.kv_tokens,
        context_tokens=config.policy.context_tokens,
        device=config.cells.device,
        dtype=config.cells.dtype,
        keep_versions=keep_versions(config),
        fixed_order=config.cells.fixed_order,
        drain=config.rollout.publish == "drain",
        drain_s=config.rollout.drain_s,
        engine=config.cells.engine,
        costs=emulated_costs(config),
        replies_path=str(folder.path / REPLIES) if config.cells.engine == "emulated" else "",
        kv_folder="" if config.rollout.hand_over == "prefill" else str(gradients),
        loss=LossSettings(
            importance=algorithm.importance,
            importance_cap=algorithm.importance_cap,
            importance_floor=algorithm.importance_floor,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        ),
        optimizer=optimizer if is_core else None,
        weights_folder=str(folder.weights),
        optimizer_folder=str(folder.optimizer),
        gradient_folder=str(gradients),
        incarnation=incarnation,
    )


def learning_rate_factor(config: Config, step: int) -> float:
    """Return the factor of the learning rate in a step: the warm-up, times a line from 1 to ``learning_rate_end``.

    >>> from opengyre.core.config import decode_config
    >>> config = decode_config({"run": {"steps": 11}, "train": {"learning_rate_end": 0.5, "warm_up_steps": 4}})
    >>> [learning_rate_factor(config, step) for step in (0, 5, 10)]
    [0.25, 0.75, 0.5]
    """
    last = max(1, config.run.steps - 1)
    fall = 1.0 - (1.0 - config.train.learning_rate_end) * step / last
    return fall * min(1.0, (step + 1) / max(1, config.train.warm_up_steps))


def keep_versions(config: Config) -> int:
    """Return how many versions can still be needed: the staleness window and the one being made."""
    return config.schedule.overlap + config.schedule.burst + 1


def build_cells(
    folder: RunFolder,
    ledger: Ledger,
    *,
    router: CellRouter,
    gradients: Path,
    incarnation: int,
    clock: RunClock,
    post: Callable[[Event], None],
) -> CellDesk:
    """Return the desk of the cells; its ``versions`` still have to be filled."""
    config = folder.config
    cells = {
        cell_id: LocalCell(
            cell_id, cell_settings(config, folder, gradients, incarnation=incarnation, is_core=cell_id == CORE)
        )
        for cell_id in range(config.cells.count)
    }
    return CellDesk(
        cells,
        core=CORE,
        router=router,
        ledger=ledger,
        clock=clock,
        post=post,
        optimizer_folder=folder.optimizer,
    )


def build_executions(
    folder: RunFolder,
    ledger: Ledger,
    server: ForkServer,
    *,
    router: CellRouter,
    rates: RateBook,
    clock: RunClock,
    post: Callable[[Event], None],
) -> ExecutionDesk:
    """Return the desk of the executions: proxy, harness, sandbox, scoring."""
    config = folder.config
    isolation = choose_isolation(config.sandbox.kind)
    engine = None if config.tasks.source == MINIREPO else find_engine()
    images = ImageStore(engine, folder.path / "images") if engine is not None else None
    runner = LiveRunner(
        config,
        folder.executions,
        server,
        harness_plan(config),
        isolation=isolation,
        images=images,
        day=first_day(ledger),
    )
    renderer = EmbeddedRenderer(EmbeddedTokenizer.load(folder.path / TOKENIZER))
    proxy = Proxy(
        engine=router,
        store=NotingStore(ledger, rates),
        renderer=renderer,
        clock=clock,
        limits=DoorLimits(body_bytes=config.proxy.body_limit_bytes),
        bodies=BodyFiles(folder.bodies) if config.proxy.keep_bodies else None,
    )
    evaluator = SandboxedEvaluator(
        server,
        folder.path / "scoring",
        workers=config.evaluation.workers,
        isolation=isolation,
        memory_bytes=config.sandbox.memory_bytes,
        images=images,
    )
    return ExecutionDesk(
        config=config,
        runner=runner,
        evaluator=evaluator,
        proxy=proxy,
        router=router,
        ledger=ledger,
        clock=clock,
        post=post,
        sockets=folder.sockets,
        marks=load_harness(config.harness.name).roles,
    )


def build_run(
    folder: RunFolder,
    ledger: Ledger,
    *,
    incarnation: int,
    clock: RunClock,
    on_change: Callable[[Driver, Event], None],
) -> LiveRun:
    """Build a run; ``driver.cells.versions`` still has to be filled."""
    config = folder.config
    task_of = task_source(config)
    scheduler = Scheduler(schedule_settings(config))
    inbox: asyncio.Queue[Event] = asyncio.Queue()
    post = inbox.put_nowait
    router = CellRouter(kv_capacity=config.cells.kv_tokens, clock=clock)
    server = ForkServer(folder.path / "forkserver.log")
    rates = RateBook(config.cells.kv_tokens)
    executions = build_executions(folder, ledger, server, router=router, rates=rates, clock=clock, post=post)
    gradients = shared_folder(folder.sockets)
    cells = build_cells(
        folder, ledger, router=router, gradients=gradients, incarnation=incarnation, clock=clock, post=post
    )
    training = TrainingDesk(
        cells=cells,
        ledger=ledger,
        clock=clock,
        post=post,
        modes=scheduler.mode,
        incarnation=incarnation,
        keep_versions=keep_versions(config),
        rate_of=lambda step: learning_rate_factor(config, step),
    )
    driver = Driver(
        config=config,
        scheduler=scheduler,
        ledger=ledger,
        book=GroupBook(group_size=config.schedule.group_size),
        cells=cells,
        executions=executions,
        training=training,
        rates=rates,
        task_of=task_of,
        clock=clock,
        inbox=inbox,
        on_change=on_change,
    )
    return LiveRun(folder, ledger, driver, server, gradients)


def run_record(config: Config, *, incarnation: int, now_s: float) -> RunRecord:
    """Return the record of a start."""
    packages = ("opengyre", "torch", "numpy", "aiohttp", "msgspec", "tokenizers")
    return RunRecord(
        incarnation=incarnation,
        started_s=now_s,
        wall_clock=datetime.now(UTC).isoformat(timespec="seconds"),
        cells=config.cells.count,
        config=msgspec.json.encode(config).decode(),
        versions={
            "python": platform.python_version(),
            "cores": str(os.cpu_count()),
            **{name: importlib.metadata.version(name) for name in packages},
        },
    )


def first_day(ledger: Ledger) -> str:
    """Return the day on which a run began, so that a resumed one shows its harnesses the same."""
    starts = ledger.records(RunRecord)
    return (starts[0].wall_clock if starts else datetime.now(UTC).isoformat())[:10]


def weights_of(ledger: Ledger, version: int) -> WeightsRef | None:
    """Return the reference to a version that was made before, if it is known."""
    text = ledger.meta(f"weights-{version}")
    return None if text is None else msgspec.json.decode(text, type=WeightsRef)
