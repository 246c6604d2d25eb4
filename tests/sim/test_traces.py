"""Traces of three formats, and the one line that refuses a broken one."""

import json
from pathlib import Path

import pytest

from opengyre.core.errors import ConfigError, FileError
from opengyre.sim.study import Runner
from opengyre.sim.traces import TraceCall, load_trace
from opengyre.sim.workload import Workload

SHARED = Path(__file__).parents[3] / "shared/data"


def agentic(path: Path, requests: list[dict[str, object]]) -> Path:
    path.write_text(json.dumps({"id": path.stem, "requests": requests}))
    return path


def test_a_file_of_an_agentic_trace_is_one_execution_with_its_gaps(tmp_path):
    nested = [{"t": 40.0, "in": 500, "out": 9, "api_time": 1.0}]
    path = agentic(
        tmp_path / "t.json",
        [
            {"t": 0.0, "in": 1000, "out": 10, "api_time": 5.0},
            {"t": 25.0, "in": 1100, "out": 20, "api_time": 5.0},
            {"t": 40.0, "type": "subagent", "requests": nested},
        ],
    )
    assert load_trace(path) == ((TraceCall(1000, 10, 20.0), TraceCall(1100, 20, 10.0), TraceCall(500, 9, 0.0)),)
    assert load_trace(tmp_path) == load_trace(path)


def test_an_execution_without_calls_is_left_out(tmp_path):
    agentic(tmp_path / "empty.json", [])
    whole = agentic(tmp_path / "whole.json", [{"t": 0.0, "in": 1000, "out": 10}])
    assert load_trace(tmp_path) == load_trace(whole)


def test_a_trace_without_any_call_is_refused(tmp_path):
    with pytest.raises(FileError, match="holds no call with sampled tokens"):
        load_trace(agentic(tmp_path / "empty.json", []))


def test_calls_that_extend_one_anothers_blocks_are_one_execution(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [(0, [0, 1, 2]), (1000, [0, 7, 8]), (4000, [0, 1, 3, 4])]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": at, "input_length": 600, "output_length": 5, "hash_ids": blocks})
            for at, blocks in rows
        )
    )
    assert load_trace(path) == ((TraceCall(600, 5, 4.0), TraceCall(600, 5, 0.0)), (TraceCall(600, 5, 0.0),))


def test_a_row_of_a_table_is_an_execution_of_one_call(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n")
    assert load_trace(path) == ((TraceCall(4808, 10, 0.0),),)


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("t.csv", "TIMESTAMP,ContextTokens\n", "t.csv:1: column GeneratedTokens is missing"),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,1\n2023-11-16 18:17:02,1,1\n",
            "t.csv:3: TIMESTAMP",
        ),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,x,1\n", "t.csv:2: ContextTokens"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 1, "hash_ids": []}', "t.jsonl:1: output_length"),
        ("t.jsonl", "{", "t.jsonl:1: "),
        ("t.json", '{"requests": [{"t": 5, "in": 1, "out": 1}, {"t": 4, "in": 1, "out": 1}]}', "requests[1]: t = 4"),
        ("t.json", "{}", "requests: missing"),
        ("t.json", '{"requests": []}', "no call"),
        ("t.txt", "", "expected a folder"),
        ("t.csv", None, "expected a trace"),
    ],
)
def test_a_broken_trace_is_refused_in_one_line_that_names_the_row(tmp_path, name, text, part):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(FileError) as caught:
        load_trace(path)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_traced_workload_runs_and_all_rules_have_its_work(tmp_path):
    calls = [{"t": 10.0 * n, "in": 1000 + n, "out": 100, "api_time": 1.0} for n in range(20)]
    path = agentic(tmp_path / "t.json", calls)
    workload = Workload(batch_groups=2, group_size=2, steps=6, trace=str(path), warmup_steps=0)
    runner = Runner(workload, (1,))
    works = [sorted(runner.result(rule).outcomes[0].groups.items()) for rule in ("waterlevel", "lookahead", "static:1")]
    assert works[0] == works[1] == works[2]
    assert works[0][0][1].output_tokens == 2 * 20 * 100


def test_a_context_that_no_cell_holds_is_refused(tmp_path):
    path = agentic(tmp_path / "t.json", [{"t": 0.0, "in": 10**9, "out": 1}])
    with pytest.raises(ConfigError, match="kv_tokens_per_cell"):
        Runner(Workload(trace=str(path)), (1,))


@pytest.mark.parametrize(
    ("name", "executions"),
    [
        ("agentic-kv-traces", 39),
        ("mooncake-trace/conversation_trace.jsonl", 1000),
        ("azure-llm-2023/AzureLLMInferenceTrace_code.csv", 8000),
    ],
)
def test_the_public_traces_are_read(name, executions):
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not beside this checkout")
    sessions = load_trace(path)
    assert len(sessions) >= executions
    assert all(call.output_tokens > 0 for session in sessions for call in session)
