"""A run's half of ``opengyre doctor``: is its ledger whole, are its checkpoints there, does the disk suffice."""

import shutil
import sqlite3
from pathlib import Path

import msgspec
import xxhash

from opengyre.core.cells import WeightsRef
from opengyre.core.config import Config
from opengyre.core.records import StepRecord
from opengyre.ledger.ledger import FILE_NAME, Ledger
from opengyre.run.findings import Finding, State, bytes_in_words
from opengyre.run.folder import read_config


def run_findings(path: Path) -> list[Finding]:
    """Return the state of a run folder.

    Raises:
        InputError: The folder holds no run, or no ledger.
    """
    config = read_config(path)
    ledger = Ledger.open(path, read_only=True)
    try:
        steps = ledger.records(StepRecord)
        return [
            ledger_file(path),
            event_log(ledger),
            calls(ledger),
            deliveries(ledger),
            checkpoints(path, ledger),
            forecast(path, config, done=len({step.step for step in steps})),
        ]
    finally:
        ledger.close()


def ledger_file(path: Path) -> Finding:
    """Return whether the ledger's pages are whole."""
    file = path / FILE_NAME
    connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=30)
    try:
        said = [str(row[0]) for row in connection.execute("PRAGMA quick_check(3)")]
    except sqlite3.DatabaseError as error:
        said = [str(error)]
    finally:
        connection.close()
    size = bytes_in_words(file.stat().st_size)
    if said == ["ok"]:
        return Finding(name="ledger", state=State.GOOD, seen=f"whole, {size}")
    return Finding(name="ledger", state=State.BAD, seen="; ".join(said), fix="restore the run folder from a copy")


def event_log(ledger: Ledger) -> Finding:
    """Return whether the scheduler's log has every number once and times that do not run back."""
    expected, last_s, backwards = 0, 0.0, 0
    for logged in ledger.events():
        if logged.seq != expected:
            seen = f"event {logged.seq} follows {expected - 1}"
            return Finding(name="event log", state=State.BAD, seen=seen, fix="the run cannot be resumed")
        backwards += logged.now_s < last_s
        expected, last_s = expected + 1, max(last_s, logged.now_s)
    if backwards:
        return Finding(name="event log", state=State.BAD, seen=f"{backwards} events run back in time")
    return Finding(name="event log", state=State.GOOD, seen=f"{expected} events without a gap")


def calls(ledger: Ledger) -> Finding:
    """Return whether the calls of each execution are numbered from 0 and their token counts agree."""
    count, faults = 0, []
    for execution in ledger.executions():
        for place, call in enumerate(ledger.read_calls(execution.execution_id)):
            count += 1
            tokens = len(call.output)
            sums = (len(call.behaviour_logprobs), sum(run.count for run in call.versions))
            if call.seq != place or sums != (tokens, tokens):
                faults.append(call.call_id)
    if faults:
        seen = f"{len(faults)} of {count} calls are wrong, the first is {faults[0]}"
        return Finding(name="calls", state=State.BAD, seen=seen, fix="opengyre trees RUN shows the execution")
    return Finding(name="calls", state=State.GOOD, seen=f"{count}, numbered without a gap")


def deliveries(ledger: Ledger) -> Finding:
    """Return whether each committed answer has a receipt."""
    counts = ledger.delivery_counts()
    seen = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    if counts["unknown"]:
        fix = "live executions report at the end of an answer; after a run none should be unknown"
        return Finding(name="deliveries", state=State.NOTE, seen=seen, fix=fix)
    return Finding(name="deliveries", state=State.GOOD, seen=seen)


def checkpoints(path: Path, ledger: Ledger) -> Finding:
    """Return whether the newest weights are the ones that the ledger names, and their optimizer is there."""
    newest = _newest(ledger)
    if newest is None:
        return Finding(name="checkpoints", state=State.BAD, seen="no version is named in the ledger")
    file = path / "weights" / Path(newest.path).name
    if not file.exists():
        return Finding(name="checkpoints", state=State.BAD, seen=f"{file} is missing", fix="the run cannot be resumed")
    checksum = xxhash.xxh3_128_hexdigest(file.read_bytes())
    if checksum != newest.checksum:
        seen = f"{file} has checksum {checksum}, expected {newest.checksum}"
        return Finding(name="checkpoints", state=State.BAD, seen=seen, fix="the run cannot be resumed")
    if newest.version and not (path / "optimizer" / file.name).exists():
        seen = f"version {newest.version} has no optimizer state"
        return Finding(name="checkpoints", state=State.NOTE, seen=seen, fix="a resume starts AdamW afresh")
    return Finding(name="checkpoints", state=State.GOOD, seen=f"version {newest.version}, checksum as recorded")


def _newest(ledger: Ledger) -> WeightsRef | None:
    found = None
    version = 0
    while (text := ledger.meta(f"weights-{version}")) is not None:
        found = msgspec.json.decode(text, type=WeightsRef)
        version += 1
    return found


def forecast(path: Path, config: Config, *, done: int) -> Finding:
    """Return whether the disk holds the rest of the run at the rate so far."""
    used = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    free_bytes = shutil.disk_usage(path).free
    if not done:
        seen = f"{bytes_in_words(used)} used, {bytes_in_words(free_bytes)} free, no step yet"
        return Finding(name="disk forecast", state=State.GOOD, seen=seen)
    left = max(0, config.run.steps - done)
    needed = used / done * left
    seen = f"{bytes_in_words(used)} after {done} steps, {bytes_in_words(needed)} more for {left}"
    if needed < free_bytes:
        return Finding(name="disk forecast", state=State.GOOD, seen=f"{seen}, {bytes_in_words(free_bytes)} free")
    fix = f"free {bytes_in_words(needed - free_bytes)}, or raise run.checkpoint_every"
    return Finding(name="disk forecast", state=State.BAD, seen=seen, fix=fix)
