import json

import msgspec
import numpy as np

from opengyre.cli import main
from opengyre.core.config import Config
from opengyre.core.types import (
    Call,
    Delivered,
    Execution,
    Finish,
    Kind,
    Role,
    Sampling,
    SamplingLaw,
    Verdict,
    VersionRun,
)
from opengyre.ledger.ledger import Ledger


def recorded(execution_id, number, tail, output, **more):
    values = {
        "execution_id": execution_id,
        "call_id": f"{execution_id}-c{number}",
        "seq": number,
        "request_id": f"r{number}",
        "dialect": "chat",
        "agent_key": "main",
        "role": Role.MAIN,
        "role_evidence": "header",
        "verdict": Verdict.RENDERED,
        "first_difference": -1,
        "parent_call_id": None,
        "shared": 0,
        "tail": np.array(tail, np.int32),
        "output": np.array(output, np.int32),
        "behaviour_logprobs": np.full(len(output), -0.5, np.float32),
        "versions": (VersionRun(0, len(output)),),
        "sampling": Sampling(),
        "finish": Finish.STOP,
    }
    return Call(**{**values, **more})


async def make_run(folder):
    (folder / "config.json").write_bytes(msgspec.json.encode(Config()))
    ledger = Ledger.open(folder)
    for name, kind in (("g0-s0-a0", Kind.TRAIN), ("e0", Kind.EVAL_GREEDY)):
        execution = Execution(execution_id=name, task_id="t", group_id=0, slot=0, attempt=0, version=0, kind=kind)
        await ledger.put_executions([execution])
    calls = [
        recorded("g0-s0-a0", 0, [1, 2], [3, 4]),
        recorded("g0-s0-a0", 1, [5], [6], parent_call_id="g0-s0-a0-c0", shared=4, verdict=Verdict.RESTORED),
        recorded("g0-s0-a0", 2, [9], [8], role=Role.SUB_AGENT, agent_key="s"),
        recorded("e0", 0, [1], [2], sampling=Sampling(temperature=0.0, law=SamplingLaw.GREEDY)),
    ]
    for call in calls:
        await ledger.commit([call], b"{}")
        delivered = Delivered.HUNG_UP if call.role is Role.SUB_AGENT else Delivered.COMPLETE
        await ledger.record_delivery(call.execution_id, call.request_id, delivered, 1)
    ledger.close()


async def test_the_trees_of_a_run_are_those_of_its_training_executions(tmp_path, capsys):
    await make_run(tmp_path)
    assert main(["trees", str(tmp_path), "--json", "--html", str(tmp_path / "trees.html")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [execution["execution_id"] for execution in found["executions"]] == ["g0-s0-a0"]
    totals = found["totals"]
    assert (totals["calls"], totals["summed_tokens"], totals["unique_tokens"]) == (3, 12, 8)
    assert (totals["restored"], totals["rendered"], totals["rewritten"], totals["orphan"]) == (1, 2, 0, 1)
    assert totals["admitted"] == [{"role": "main", "trained_tokens": 3}]
    assert "orphan" in (tmp_path / "trees.html").read_text()
