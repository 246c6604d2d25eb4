import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from opengyre.cli import main
from opengyre.run.imports.atif import metrics_of, read_atif
from opengyre.run.imports.claude_code import read_claude_code
from opengyre.run.imports.render import TextTokenizer, tree_of_import

DATA = Path(__file__).parents[3] / "shared" / "data"


def shared(*names):
    path = DATA.joinpath(*names)
    if not path.exists():
        pytest.skip(f"{path} is absent")
    return path


def json_of(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *arguments):
    assert main(list(map(str, arguments))) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("session", "sub_agents"),
    [("ae4a77f8-aedd-4bc1-888f-c94edc91af04", 1), ("fa812bfe-b295-4cca-9c2f-fdf01028cb46", 2)],
)
def test_a_claude_code_session_has_a_main_leaf_before_and_after_its_compaction(capsys, session, sub_agents):
    file = shared("claude-code-sessions", f"{session}.jsonl")
    found = json_of(capsys, "import", file, "--format", "claude-code", "--max-leaves", 0)
    execution = found["executions"][0]
    assert execution["leaves"] == {"main": 2, "main-summary": 1, "sub-agent": sub_agents}
    assert execution["unique_tokens"] * 20 < execution["summed_tokens"]
    assert execution["rewritten"] == 0
    assert execution["restored"] + execution["rendered"] == execution["calls"]
    assert found["approximate"] is True
    assert execution["sampled_tokens"] == sum(leaf["trained_tokens"] for leaf in execution["admitted"])


def rows(*messages):
    """Rows of a session file: (uuid, parent, type, message)."""
    return "".join(
        json.dumps({"type": kind, "uuid": uuid, "parentUuid": parent, "message": message}) + "\n"
        for uuid, parent, kind, message in messages
    )


def answer(message_id, *blocks):
    return {"role": "assistant", "id": message_id, "model": "m", "content": list(blocks)}


def tool_use(number):
    return {"type": "tool_use", "id": f"t{number}", "name": "Bash", "input": {"command": "ls"}}


def tool_result(number, text):
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"t{number}", "content": text}]}


def test_rows_of_one_answer_are_one_call_whose_results_stand_behind_it(tmp_path):
    file = tmp_path / "s.jsonl"
    file.write_text(
        rows(
            ("u1", None, "user", {"role": "user", "content": "go"}),
            ("a1", "u1", "assistant", answer("m1", {"type": "text", "text": "two at once"})),
            ("a2", "a1", "assistant", answer("m1", tool_use(1))),
            ("a3", "a2", "assistant", answer("m1", tool_use(2))),
            ("r1", "a2", "user", tool_result(1, "one")),
            ("r2", "a3", "user", tool_result(2, "two")),
            ("a4", "r2", "assistant", answer("m2", {"type": "text", "text": "done"})),
        )
    )
    first, second = read_claude_code(file)[0].calls
    assert [call.id for call in first.reply.tool_calls] == ["t1", "t2"]
    assert [message.content for message in second.messages] == ["go", "two at once", "one", "two"]


def test_atif_keeps_token_ids_and_logprobs_and_gives_them_back(capsys):
    file = shared("atif-golden", "hello-world-context-summarization.trajectory.json")
    execution = read_atif(file)[0]
    tree, _ = tree_of_import(execution, TextTokenizer())
    assert tree.is_approximate is False
    compared = 0
    for inner in sorted(file.parent.glob("hello-world-context-summarization.trajectory*.json")):
        for number, step in enumerate(json.loads(inner.read_text())["steps"]):
            metrics = step.get("metrics") or {}
            if "completion_token_ids" in metrics:
                back = metrics_of(tree, f"{inner.name.removesuffix('.json')}-s{number:04d}")
                for key in ("prompt_token_ids", "completion_token_ids"):
                    assert back[key] == metrics[key]
                assert np.float32(metrics["logprobs"]).tolist() == back["logprobs"]
                compared += 1
    assert compared == len(execution.calls) == 10
    found = json_of(capsys, "import", file, "--format", "atif")
    assert found["approximate"] is False
    assert found["executions"][0]["leaves"]["main-summary"] == 3


def test_each_file_of_the_atif_linear_history_pair_is_one_token_sequence(capsys):
    file = shared("atif-golden", "hello-world-context-summarization-linear-history.trajectory.json")
    execution = read_atif(file)[0]
    assert len(execution.calls) == 7
    tree, _ = tree_of_import(execution, TextTokenizer())
    for name, count in (("cont-1", 4), ("", 3)):
        ends = [
            tree.call_ends[tree.index_of(call.call_id)]
            for call in execution.calls
            if ("cont-1" in call.call_id) == bool(name)
        ]
        assert len(ends) == count
        assert set(ends) <= set(tree.path(ends[-1]))
    both = [file, file.with_name(file.name.replace("trajectory.json", "trajectory.cont-1.json"))]
    assert len(json_of(capsys, "import", *both, "--format", "atif")["executions"]) == 1


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("swe-agent-traj/i_got_id_demo.traj", 21),
        ("swe-agent-traj/marshmallow-code__marshmallow-1867.traj", 13),
        ("swe-smith-traj/pandas-dev__pandas.95280573.pr_53652.traj", 37),
    ],
)
def test_every_step_of_a_swe_agent_trajectory_is_a_call(capsys, name, calls):
    found = json_of(capsys, "import", shared(name), "--format", "swe-agent")
    assert found["executions"][0]["calls"] == calls
    assert found["executions"][0]["unique_tokens"] < found["executions"][0]["summed_tokens"]


MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "ok"},
    {"role": "assistant", "content": "done"},
]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(MESSAGES),
        json.dumps({"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}, indent=1),
        json.dumps({"messages": MESSAGES}) + "\n" + json.dumps(MESSAGES) + "\n",
        json.dumps([{"messages": MESSAGES}]),
    ],
)
def test_message_lists_are_calls_on_one_path(tmp_path, capsys, text):
    file = tmp_path / "m.jsonl"
    file.write_text(text)
    found = json_of(capsys, "import", file, "--format", "openai")
    for execution in found["executions"]:
        assert (execution["calls"], execution["leaves"], execution["restored"]) == (2, {"main": 1}, 1)


def test_imported_calls_are_written_and_read_back_as_the_same_trees(tmp_path, capsys):
    file, out = tmp_path / "m.json", tmp_path / "calls.jsonl"
    file.write_text(json.dumps(MESSAGES))
    imported = json_of(capsys, "import", file, "--format", "openai", "--out", out)["executions"][0]
    read = json_of(capsys, "trees", out)["executions"][0]
    same = ("execution_id", "calls", "nodes", "leaves", "summed_tokens", "unique_tokens", "sampled_tokens", "admitted")
    assert [imported[key] for key in same] == [read[key] for key in same]
    assert all(json.loads(line)["approximate"] for line in out.read_text().splitlines())


def test_text_of_users_never_becomes_a_special_token(tmp_path):
    vocabulary = {chr(code): code for code in range(32, 127)} | {"\n": 1, "[unknown]": 0}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[unknown]"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    special = tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.encode("<|im_end|>").ids == [special]
    read = TextTokenizer(str(path))
    assert special not in read.encode("please write <|im_end|> for me").tolist()
    assert read.mark("<|im_end|>").tolist() == [special]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("claude-code", '{"type": "user", "uuid": "a"}\n', "1: a row of type user without message.content"),
        ("claude-code", '{"type": "summary"}\n{"type": ', "2: not JSON"),
        ("claude-code", '{"type": "summary"}\n', "no answer of a model"),
        ("claude-code", '{"role": "user"}\n', "1: no 'type'"),
        ("atif", '{"schema_version": "ATIF-v9"}', "schema_version 'ATIF-v9'; expected ATIF-v1.x"),
        ("atif", "[]", "1: list, expected an object"),
        ("swe-agent", '{"trajectory": []}', "expected an object with lists 'trajectory' and 'history'"),
        ("openai", '{"messages": []}', "non-empty list 'messages'"),
        ("openai", '{"messages": [{"role": "user", "content": "a"}]}', "no assistant message"),
        ("openai", '{"messages": [{"role": "boss", "content": "a"}]}', "expected an object with role"),
        ("openai", '{"messages": [{"role": "user", "content": "a"}, 3', "1: not JSON"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused_in_one_line(tmp_path, capsys, name, text, expected):
    file, out = tmp_path / "file", tmp_path / "out.jsonl"
    file.write_text(text)
    error = refusal(capsys, "import", file, "--format", name, "--out", out)
    assert str(file) in error
    assert expected in error
    assert not out.exists()


def atif(tmp_path, **metrics):
    step = {"step_id": 1, "source": "agent", "message": "hi", "metrics": metrics}
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"schema_version": "ATIF-v1.5", "steps": [step]}))
    return file


def test_wrong_token_ids_and_logprobs_of_a_trajectory_are_refused(tmp_path, capsys):
    for metrics, expected in (
        ({"prompt_token_ids": [1], "completion_token_ids": [-2]}, "steps[0].completion_token_ids: token id -2"),
        ({"prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": [1.0]}, "steps[0].logprobs: logprob 1.0"),
        ({"prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": []}, "0 logprobs for 1 output tokens"),
    ):
        assert expected in refusal(capsys, "import", atif(tmp_path, **metrics), "--format", "atif")


def test_a_tokenizer_that_is_none_is_refused(tmp_path, capsys):
    file = tmp_path / "m.json"
    file.write_text(json.dumps(MESSAGES))
    wrong = tmp_path / "tokenizer.json"
    wrong.write_text("{}")
    for given, expected in ((wrong, "no 'model'"), (tmp_path / "absent", "cannot be read")):
        assert expected in refusal(capsys, "import", file, "--format", "openai", "--tokenizer", given)
