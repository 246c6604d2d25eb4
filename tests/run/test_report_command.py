import subprocess
import sys

import msgspec
import numpy as np
import pytest

from opengyre.cli import main
from opengyre.core.config import decode_config
from opengyre.core.errors import FileError
from opengyre.core.records import PublicationRecord, RunRecord
from opengyre.core.types import (
    Call,
    Delivered,
    Execution,
    ExecutionState,
    Finish,
    Role,
    Sampling,
    Scored,
    Verdict,
    VersionRun,
)
from opengyre.ledger.ledger import Ledger
from opengyre.run.folder import RunFolder
from opengyre.run.report import is_running
from opengyre.run.report_data import read_run


def call(seq: int, *, shared: int, tail: list[int], output: list[int], cells: tuple[int, ...] = (0,)) -> Call:
    return Call(
        execution_id="g00000-s00-a0",
        call_id=f"c{seq}",
        seq=seq,
        request_id=f"r{seq}",
        dialect="chat",
        agent_key="",
        role=Role.MAIN,
        role_evidence="first root that calls tools",
        verdict=Verdict.RESTORED if shared else Verdict.RENDERED,
        first_difference=-1,
        parent_call_id=f"c{seq - 1}" if shared else None,
        shared=shared,
        tail=np.array(tail, np.int32),
        output=np.array(output, np.int32),
        behaviour_logprobs=np.full(len(output), -0.5, np.float32),
        versions=(VersionRun(0, len(output)),),
        sampling=Sampling(seed=seq),
        finish=Finish.STOP,
        cell_ids=cells,
    )


@pytest.fixture
async def run(tmp_path):
    """A run with one execution of two calls: contexts of 4 and 7 tokens, outputs of 2 and 3."""
    folder = RunFolder.create(tmp_path / "run", decode_config({}))
    ledger = Ledger.open(folder.path)
    execution = Execution(
        execution_id="g00000-s00-a0",
        task_id="t",
        group_id=0,
        slot=0,
        attempt=0,
        version=0,
        state=ExecutionState.CLOSED,
    )
    await ledger.put_executions([execution])
    await ledger.commit([call(0, shared=0, tail=[1, 2, 3, 4], output=[5, 6])], b"a")
    await ledger.commit([call(1, shared=6, tail=[7], output=[8, 9, 10], cells=(0, 1))], b"b")
    await ledger.record_delivery("g00000-s00-a0", "r0", Delivered.COMPLETE, 10)
    await ledger.put_outcome("g00000-s00-a0", Scored(reward=0.5, passed=1, total=2))
    await ledger.add_record(
        RunRecord(incarnation=0, started_s=0.0, wall_clock="2026", cells=2, config="{}", versions={"python": "3"})
    )
    await ledger.add_record(PublicationRecord(version=1, incarnation=0, started_s=1.0, ended_s=9.5, live_calls=3))
    ledger.close()
    folder.close()
    return folder.path


async def test_tokens_and_calls_are_counted_from_the_ledger(run):
    calls = read_run(run).calls
    assert (calls.committed, calls.complete, calls.unknown) == (2, 1, 1)
    assert (calls.summed_tokens, calls.unique_tokens, calls.sampled_tokens) == (16, 10, 5)
    assert (calls.restored, calls.rendered, calls.handed_over) == (1, 1, 1)


async def test_json_is_one_object_and_writes_no_page(run, capsys):
    assert main(["report", str(run), "--json"]) == 0
    answer = msgspec.json.decode(capsys.readouterr().out)
    assert (answer["wall_s"], answer["state"]) == (9.5, "ended")
    assert not (run / "report.html").exists()


async def test_the_page_and_the_trace_are_written(run, tmp_path, capsys):
    out, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert main(["report", str(run), "--out", str(out), "--perfetto", str(trace)]) == 0
    assert out.read_text().startswith("<!doctype html>")
    assert len(msgspec.json.decode(trace.read_bytes())["traceEvents"]) == 4
    assert "1 complete, 0 hung up, 1 unknown" in " ".join(capsys.readouterr().out.split())


async def test_a_page_that_cannot_be_written_is_one_line(run, capsys):
    assert main(["report", str(run), "--out", "/nowhere/page.html"]) == 2
    assert capsys.readouterr().err == "opengyre: /nowhere/page.html: cannot be written: No such file or directory\n"


def test_a_folder_without_a_run_is_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "holds no run" in error


def test_a_run_without_a_ledger_is_refused(tmp_path):
    RunFolder.create(tmp_path / "run", decode_config({})).close()
    with pytest.raises(FileError, match=r"expected the ledger of a run"):
        read_run(tmp_path / "run")


async def test_a_run_is_running_while_its_driver_holds_the_lock(run):
    assert not is_running(run)
    folder = RunFolder.reopen(run)
    assert is_running(run)
    folder.close()
    assert not is_running(run)


async def test_a_reader_that_leaves_is_no_traceback(run):
    command = f"{sys.executable} -m opengyre.cli report {run} --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert ended.stdout == "{"
    assert ended.stderr == ""


def test_a_usage_error_is_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["report"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
