"""What is committed survives, is not doubled, and comes back as it was."""

import asyncio
import sqlite3
import threading

import msgspec
import numpy as np
import pytest

from opengyre.core.errors import FileError, InvariantError
from opengyre.core.events import Tick, encode_event
from opengyre.core.records import EvaluationRecord, RunRecord
from opengyre.core.types import (
    Call,
    Delivered,
    Execution,
    Finish,
    Kind,
    NoArtifact,
    Role,
    Sampling,
    Scored,
    Verdict,
    VersionRun,
)
from opengyre.ledger.ledger import FILE_NAME, Ledger, LoggedEvent
from opengyre.trajectory.histories import RoleGuess


def call(seq: int, *, execution_id: str = "e", tokens: int = 5) -> Call:
    return Call(
        execution_id=execution_id,
        call_id=f"{execution_id}-c{seq}",
        seq=seq,
        request_id=f"r{seq}",
        dialect="chat",
        agent_key="main",
        role=Role.MAIN,
        role_evidence="header",
        verdict=Verdict.RENDERED,
        first_difference=-1,
        parent_call_id=None,
        shared=0,
        tail=np.arange(tokens, dtype=np.int32),
        output=np.array([7, 8], np.int32),
        behaviour_logprobs=np.array([-0.5, -1.25], np.float32),
        versions=(VersionRun(3, 1), VersionRun(4, 1, True)),
        sampling=Sampling(seed=2**64 - 1),
        finish=Finish.STOP,
        message_keys=(1, 2**64 - 1),
    )


async def test_the_write_ahead_log_is_copied_into_the_file_while_the_ledger_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("opengyre.ledger.ledger.CHECKPOINT_BYTES", 200_000)
    ledger = Ledger.open(tmp_path)
    for seq in range(200):
        await ledger.commit([call(seq)], b"x" * 20_000)
    log, file = ((tmp_path / name).stat().st_size for name in (FILE_NAME + "-wal", FILE_NAME))
    ledger.close()
    assert file > 3_000_000
    assert log < 1_500_000


async def test_a_committed_call_comes_back_bit_for_bit_after_reopening(tmp_path):
    ledger = Ledger.open(tmp_path)
    await ledger.commit([call(0)], b"answer")
    ledger.close()
    again = Ledger.open(tmp_path, read_only=True)
    (stored,) = await again.calls("e")
    assert stored.tail.tolist() == [0, 1, 2, 3, 4]
    assert stored.behaviour_logprobs.tolist() == [-0.5, -1.25]
    assert stored.versions == (VersionRun(3, 1), VersionRun(4, 1, True))
    assert stored.sampling.seed == 2**64 - 1
    assert stored.message_keys == (1, 2**64 - 1)
    assert await again.committed_answer("e", "r0") == b"answer"
    assert await again.committed_answer("e", "r1") is None
    again.close()


async def test_message_keys_that_are_the_parents_come_back_and_are_stored_once(tmp_path):
    ledger, length = Ledger.open(tmp_path), 400
    keys, calls = (), []
    for seq in range(length):
        shared = len(keys)
        keys = (*keys, 2**63 + 3 * seq, 2**63 + 3 * seq + 1)
        parent = f"c{seq - 1}" if seq else None
        calls.append(
            msgspec.structs.replace(
                call(seq), call_id=f"c{seq}", parent_call_id=parent, message_keys=keys, shared_keys=shared
            )
        )
        await ledger.commit([calls[-1]], b"")
    assert [each.message_keys for each in ledger.read_calls("e")] == [each.message_keys for each in calls]
    ledger.close()
    assert ledger.size_bytes() < 1024 * length


async def test_a_call_whose_parent_has_other_keys_is_not_read(tmp_path):
    ledger = Ledger.open(tmp_path)
    await ledger.commit([msgspec.structs.replace(call(0), parent_call_id="gone", shared_keys=1)], b"")
    with pytest.raises(InvariantError, match="the message keys of gone: 0, expected 1"):
        ledger.read_calls("e")
    ledger.close()


async def test_a_receipt_may_come_before_or_after_its_call(tmp_path):
    ledger = Ledger.open(tmp_path)
    await ledger.record_delivery("e", "r1", Delivered.HUNG_UP, 0)
    await ledger.commit([call(0)], b"")
    await ledger.commit([call(1)], b"")
    assert ledger.delivery_counts() == {"complete": 0, "hung_up": 1, "unknown": 1}
    await ledger.record_delivery("e", "r0", Delivered.COMPLETE, 10)
    assert [c.delivered for c in await ledger.calls("e")] == [Delivered.COMPLETE, Delivered.HUNG_UP]
    await ledger.import_deliveries([("e", "r0", Delivered.HUNG_UP, 3)])
    assert ledger.delivery_counts() == {"complete": 1, "hung_up": 1, "unknown": 0}
    ledger.close()


async def test_two_calls_with_one_number_are_refused_and_hurt_nobody_else(tmp_path):
    ledger = Ledger.open(tmp_path)
    results = await asyncio.gather(
        ledger.commit([call(0)], b"a"),
        ledger.commit([call(0)], b"b"),
        ledger.commit([call(0, execution_id="other")], b"c"),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [type(None), InvariantError, type(None)]
    assert len(await ledger.calls("e")) == len(await ledger.calls("other")) == 1
    ledger.close()


async def test_a_thousand_commits_at_once_are_all_there(tmp_path):
    ledger = Ledger.open(tmp_path)
    await asyncio.gather(*(ledger.commit([call(0, execution_id=f"e{i}")], b"") for i in range(1000)))
    assert ledger.delivery_counts()["unknown"] == 1000
    assert ledger.call_totals("e5") == (1, 2)
    ledger.close()


async def test_a_writer_that_is_cancelled_hurts_neither_its_write_nor_those_after_it(tmp_path):
    ledger = Ledger.open(tmp_path)
    writers = [asyncio.create_task(ledger.commit([call(seq)], b"answer")) for seq in range(40)]
    await asyncio.sleep(0)
    for writer in writers[::2]:
        writer.cancel()
    await asyncio.gather(*writers, return_exceptions=True)
    await asyncio.wait_for(ledger.commit([call(40)], b"answer"), 5)
    assert [stored.seq for stored in await ledger.calls("e")] == list(range(41))
    ledger.close()


async def test_a_million_tokens_take_at_most_6_mb_and_a_call_at_most_1_kb_beside_them(tmp_path):
    ledger = Ledger.open(tmp_path)
    for seq in range(100):
        await ledger.commit([call(seq, tokens=10_000)], b"x" * 200)
    ledger.close()
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size <= 6_000_000
    small = tmp_path / "small"
    small.mkdir()
    ledger = Ledger.open(small)
    for seq in range(400):
        await ledger.commit([call(seq, tokens=0)], b"x" * 200)
    ledger.close()
    assert sum(file.stat().st_size for file in small.iterdir()) / 400 <= 1_200


async def test_executions_outcomes_events_and_records_come_back_in_order(tmp_path):
    ledger = Ledger.open(tmp_path)
    execution = Execution(execution_id="e", task_id="t", group_id=0, slot=0, attempt=0, version=0)
    await ledger.put_executions([execution])
    await ledger.put_outcome("e", Scored(reward=0.5, passed=1, total=2, tests={"a::f": "passed"}))
    await ledger.put_outcome("f", NoArtifact(total=3))
    for seq in range(3):
        await ledger.append_event(LoggedEvent(seq, float(seq), encode_event(Tick()), (b"{}",)))
    record = EvaluationRecord(
        version=0, kind=Kind.EVAL_GREEDY, task_ids=("t",), rewards=(None,), started_s=0.0, ended_s=1.0
    )
    await ledger.add_record(record)
    assert ledger.executions() == [execution]
    assert ledger.outcome("f") == NoArtifact(total=3)
    assert ledger.outcome("absent") is None
    assert [logged.seq for logged in ledger.events()] == [0, 1, 2]
    assert ledger.records(EvaluationRecord) == [record]
    assert ledger.records(RunRecord) == []
    guess = RoleGuess(call_id="e-c0", role=Role.AUXILIARY, agent="other", evidence="a later root", confidence=1.0)
    await ledger.revise_roles("e", [guess])
    await ledger.commit([call(0)], b"")
    (revised,) = await ledger.calls("e")
    assert (revised.role, revised.agent_key, revised.role_evidence) == (Role.AUXILIARY, "other", "a later root")
    ledger.close()


async def test_readers_see_a_live_ledger_and_may_not_write(tmp_path):
    ledger = Ledger.open(tmp_path)
    await ledger.commit([call(0)], b"")
    reader = Ledger.open(tmp_path, read_only=True)
    await ledger.commit([call(1)], b"")
    assert len(await reader.calls("e")) == 2
    with pytest.raises(InvariantError, match="opened for reading"):
        await reader.commit([call(2)], b"")
    reader.close()
    ledger.close()


def test_what_is_no_ledger_is_refused_in_one_line(tmp_path):
    with pytest.raises(FileError, match="no such file"):
        Ledger.open(tmp_path, read_only=True)
    (tmp_path / FILE_NAME).write_text("hello")
    with pytest.raises(FileError, match="not a ledger"):
        Ledger.open(tmp_path, read_only=True)


def test_another_schema_version_is_refused(tmp_path):
    Ledger.open(tmp_path).close()
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    connection.commit()
    connection.close()
    with pytest.raises(FileError, match="schema version 99, expected 2"):
        Ledger.open(tmp_path)


def test_who_looks_at_a_run_that_starts_sees_a_whole_ledger_or_none(tmp_path):
    seen: list[str] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            try:
                Ledger.open(tmp_path / str(len(made)), read_only=True).close()
            except FileError as error:
                seen.append(str(error))

    made: list[int] = []
    watcher = threading.Thread(target=look)
    watcher.start()
    for number in range(30):
        (tmp_path / str(number)).mkdir()
        Ledger.open(tmp_path / str(number)).close()
        made.append(number)
    is_over.set()
    watcher.join()
    assert seen
    assert all("no such file" in text for text in seen)
