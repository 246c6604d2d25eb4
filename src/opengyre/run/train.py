"""Train a policy by online RL on executions of a harness."""

import argparse
import asyncio
import contextlib
import shutil
import signal
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import msgspec
import xxhash

from opengyre.core.cells import WeightsRef
from opengyre.core.config import load_config
from opengyre.core.errors import InputError
from opengyre.core.events import Event, StepDone, Tick, WeightsPublished
from opengyre.core.records import EvaluationRecord, StepRecord
from opengyre.ledger.ledger import Ledger
from opengyre.report.console import console
from opengyre.run.build import LiveRun, build_run, run_record
from opengyre.run.clock import RunClock
from opengyre.run.driver import Driver
from opengyre.run.emulated import install_scripts
from opengyre.run.folder import RunFolder
from opengyre.run.report import write_page
from opengyre.run.resume import prepare_resume
from opengyre.run.supported import check_supported
from opengyre.run.warmstart import TOKENIZER, WEIGHTS, shown_progress

INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG.toml")
    parser.add_argument("--run", type=Path, metavar="DIR", help="folder of the run (default: runs/NAME-TIME)")
    parser.add_argument("--resume", type=Path, nargs="?", const=Path(), metavar="RUN", help="go on with a run")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="override a key")


def main(arguments: argparse.Namespace) -> int:
    """Start or resume a run; returns the exit code."""
    if arguments.resume is not None:
        path = arguments.resume if arguments.resume != Path() else arguments.run
        if path is None:
            raise InputError("--resume: name the folder of the run")
        return run_folder(RunFolder.reopen(path), is_resumed=True)
    if arguments.config is None:
        raise InputError("train: name a configuration, or a run with --resume")
    config = load_config(arguments.config, arguments.set)
    check_supported(config)
    name = f"{arguments.config.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = RunFolder.create(arguments.run or Path("runs") / name, config)
    try:
        install_policy(folder)
    except BaseException:
        folder.close()
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    return run_folder(folder, is_resumed=False)


def install_policy(folder: RunFolder) -> None:
    """Put tokenizer and version 0 of the weights into a new run folder."""
    if folder.config.cells.engine == "emulated":
        install_scripts(folder)
        return
    made = shown_progress(folder.config)
    install_weights(folder, tokenizer=made / TOKENIZER, weights=made / WEIGHTS)


def install_weights(folder: RunFolder, *, tokenizer: Path, weights: Path) -> None:
    """Copy a tokenizer and weights into a new run folder as version 0."""
    shutil.copy(tokenizer, folder.path / TOKENIZER)
    shutil.copy(weights, folder.weights / "v00000-0.safetensors")


def drive_folder(folder: RunFolder, *, is_resumed: bool, is_quiet: bool = False) -> bool:
    """Drive the run of a folder and close it; False if it was interrupted."""
    ledger = Ledger.open(folder.path)
    try:
        shown = None if is_quiet else Lines().show
        return asyncio.run(drive(folder, ledger, is_resumed=is_resumed, on_change=shown))
    finally:
        ledger.close()
        folder.close()


def run_folder(folder: RunFolder, *, is_resumed: bool) -> int:
    """Drive the run of a folder to its end or to an interruption, say which, and return the exit code."""
    if not drive_folder(folder, is_resumed=is_resumed):
        console().print(
            f"interrupted; everything is saved. Go on with: opengyre train --resume {folder.path}", soft_wrap=True
        )
        return INTERRUPTED
    show_end(folder.path)
    return 0


async def drive(
    folder: RunFolder,
    ledger: Ledger,
    *,
    is_resumed: bool,
    on_change: Callable[[Driver, Event], None] | None,
) -> bool:
    """Build, start, drive and stop a run; False if it was interrupted."""
    resumed = await prepare_resume(folder, ledger) if is_resumed else None
    incarnation = resumed.incarnation if resumed is not None else 0
    clock = RunClock(resumed.now_s if resumed is not None else 0.0)
    run = build_run(folder, ledger, incarnation=incarnation, clock=clock, on_change=on_change or _say_nothing)
    first = await _first_events(run, resumed.first(run) if resumed is not None else None)
    await ledger.add_record(run_record(folder.config, incarnation=incarnation, now_s=clock()))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    driving = asyncio.create_task(_started(run, first))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({driving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if driving.done():
            driving.result()
            return True
        return False
    finally:
        stopping.cancel()
        driving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            if not driving.done():
                await driving
        await run.stop()


def _say_nothing(driver: Driver, event: Event) -> None:
    """Show no progress."""


async def _started(run: LiveRun, first: list[Event]) -> None:
    await run.start()
    await run.driver.run(first)


async def _first_events(run: LiveRun, resumed: list[Event] | None) -> list[Event]:
    """Return what the scheduler is told first."""
    if resumed is not None:
        return resumed
    path = run.folder.weights / "v00000-0.safetensors"
    weights = WeightsRef(
        version=0, incarnation=0, path=str(path), checksum=xxhash.xxh3_128_hexdigest(path.read_bytes())
    )
    await run.ledger.put_meta("weights-0", msgspec.json.encode(weights).decode())
    run.driver.cells.versions[0] = weights
    cells = tuple(range(run.folder.config.cells.count))
    return [WeightsPublished(version=0, incarnation=0, cells=cells)]


class Lines:
    """Plain progress: a line a step, a line an evaluation, and what a stalled run waits for."""

    def __init__(self) -> None:
        self._evaluations = 0

    def show(self, driver: Driver, event: Event) -> None:
        """Print what an event is worth saying."""
        if isinstance(event, StepDone):
            self._step(driver)
        if isinstance(event, Tick) and driver.is_stalled:
            console().print(f"nothing has moved for {driver.config.run.stall_s:.0f} s: {driver.scheduler.waits_for()}")
        records = driver.ledger.records(EvaluationRecord) if isinstance(event, StepDone) else []
        for record in records[self._evaluations :]:
            self._evaluations += 1
            console().print(
                f"evaluation of version {record.version} ({record.kind.value}): pass rate {record.pass_rate:.3f}, "
                f"solved {record.solved_rate:.3f} on {len(record.task_ids)} tasks",
                soft_wrap=True,
            )

    def _step(self, driver: Driver) -> None:
        record = driver.ledger.records(StepRecord)[-1]
        reward = sum(record.rewards) / max(1, len(record.rewards))
        console().print(
            f"step {record.step:3d}  {record.ended_s:6.1f} s  reward {reward:.3f}  d {max(record.staleness)}  "
            f"w {driver.scheduler.waterlevel}  rows {record.rows}/{record.leaves}  tokens {record.trained_tokens}  "
            f"entropy {record.entropy:.3f}  ratio max {record.ratio_max:.2f}  "
            f"checked {record.checked_tokens} ({record.checked_difference:.1e})",
            soft_wrap=True,
        )


def show_end(path: Path) -> None:
    """Print what the run has come to and how to look closer."""
    page = write_page(path)
    for line in (
        f"page:      {page}",
        f"trees:     opengyre trees {path} --html {path / 'trees.html'}",
        f"evaluate:  opengyre eval CONFIG.toml --weights {path}",
        f"resume:    opengyre train --resume {path}   (after an interruption)",
        "recipe:    recipes/minirepo.toml; --set section.key=value overrides a key",
    ):
        console().print(line, soft_wrap=True, markup=False)
