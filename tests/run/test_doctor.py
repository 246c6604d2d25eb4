import msgspec
import pytest
import xxhash

from opengyre.cli import main
from opengyre.core.cells import WeightsRef
from opengyre.core.config import decode_config
from opengyre.core.errors import InputError
from opengyre.core.events import Tick, encode_event
from opengyre.ledger.ledger import Ledger, LoggedEvent
from opengyre.run.doctor_machine import machine_findings
from opengyre.run.doctor_run import run_findings
from opengyre.run.findings import State
from opengyre.run.folder import RunFolder


@pytest.fixture
async def run(tmp_path):
    folder = RunFolder.create(tmp_path / "run", decode_config({}))
    ledger = Ledger.open(folder.path)
    weights = folder.weights / "v00000-0.safetensors"
    weights.write_bytes(b"weights")
    checksum = xxhash.xxh3_128_hexdigest(b"weights")
    reference = WeightsRef(version=0, incarnation=0, path=str(weights), checksum=checksum)
    await ledger.put_meta("weights-0", msgspec.json.encode(reference).decode())
    for seq in range(3):
        await ledger.append_event(LoggedEvent(seq, float(seq), encode_event(Tick()), ()))
    ledger.close()
    folder.close()
    return folder.path


def states(findings):
    return {finding.name: finding.state for finding in findings}


def test_the_machine_is_tried_and_every_fault_names_a_fix(tmp_path):
    findings = machine_findings(tmp_path / "not" / "there")
    assert {"python", "torch", "sandbox", "Landlock", "cores", "memory", "disk", "ray"} <= set(states(findings))
    assert states(findings)["python"] is State.GOOD
    assert states(findings)["torch"] is State.GOOD
    assert [finding.name for finding in findings if finding.state is not State.GOOD and not finding.fix] == []


async def test_a_whole_run_is_good(run):
    assert set(states(run_findings(run)).values()) == {State.GOOD}


async def test_a_changed_weight_file_is_found(run):
    (run / "weights" / "v00000-0.safetensors").write_bytes(b"other")
    found = next(finding for finding in run_findings(run) if finding.name == "checkpoints")
    assert found.state is State.BAD
    assert "expected" in found.seen


async def test_a_missing_weight_file_is_found(run):
    (run / "weights" / "v00000-0.safetensors").unlink()
    assert states(run_findings(run))["checkpoints"] is State.BAD


async def test_a_gap_in_the_event_log_is_found(run):
    ledger = Ledger.open(run)
    await ledger.append_event(LoggedEvent(7, 9.0, encode_event(Tick()), ()))
    ledger.close()
    found = next(finding for finding in run_findings(run) if finding.name == "event log")
    assert (found.state, found.seen) == (State.BAD, "event 7 follows 2")


async def test_a_torn_ledger_is_one_line(run):
    file = run / "ledger.sqlite"
    file.write_bytes(b"not a database" * 1000)
    with pytest.raises(InputError, match="not a ledger"):
        run_findings(run)


async def test_json_has_both_halves_and_the_exit_code_says_whether_all_works(run, capsys):
    (run / "weights" / "v00000-0.safetensors").unlink()
    assert main(["doctor", str(run), "--json"]) == 1
    answer = msgspec.json.decode(capsys.readouterr().out)
    assert answer["works"] is False
    assert {finding["name"] for finding in answer["run"]} >= {"ledger", "checkpoints", "disk forecast"}


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no run"):
        run_findings(tmp_path)
