import json
import re
from pathlib import Path

import pytest

from opengyre.cli import main


def write_calls(path, *calls):
    path.write_text("".join(json.dumps(call) + "\n" for call in calls))
    return path


def call(context, output, **more):
    return {"execution_id": "e1", "context": context, "output": output, "logprobs": [-0.5] * len(output), **more}


def json_of(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *arguments):
    assert main(list(map(str, arguments))) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_json_has_the_figures_of_each_execution_and_their_sum(tmp_path, capsys):
    file = write_calls(
        tmp_path / "calls.jsonl",
        call([1, 2], [3, 4]),
        call([1, 2, 3, 4, 5], [6]),
        call([9], [8], execution_id="e2", role="sub-agent", agent="s"),
    )
    found = json_of(capsys, "trees", file)
    first = found["executions"][0]
    keys = {"execution_id", "calls", "roots", "nodes", "leaves", "summed_tokens", "unique_tokens", "sampled_tokens"}
    keys |= {"admitted", "orphan", "vanished", "poisoned", "restored", "rendered", "rewritten"}
    assert keys <= set(first)
    assert keys <= set(found["totals"])
    assert (first["calls"], first["summed_tokens"], first["unique_tokens"]) == (2, 10, 6)
    assert first["admitted"] == [{"role": "main", "trained_tokens": 3}]
    assert found["totals"]["leaves"] == {"main": 1, "sub-agent": 1}


def test_max_leaves_bounds_what_is_admitted_and_zero_means_no_cap(tmp_path, capsys):
    file = write_calls(tmp_path / "calls.jsonl", *[call([number], [number + 50]) for number in range(1, 9)])
    for given, expected in ((3, 3), (0, 8), (20, 8)):
        found = json_of(capsys, "trees", file, "--max-leaves", given)
        assert len(found["executions"][0]["admitted"]) == expected


def test_the_table_names_trained_tokens_by_role(tmp_path, capsys):
    file = write_calls(tmp_path / "calls.jsonl", call([1], [2]), call([1], [3], role="sub-agent", agent="s"))
    assert main(["trees", str(file)]) == 0
    text = capsys.readouterr().out
    assert "trained tokens by the role of their leaf: 1 main, 1 sub-agent" in text
    assert max(map(len, text.splitlines()[:8])) <= 80


def test_the_page_draws_a_lane_for_each_path_and_escapes_names(tmp_path, capsys):
    file = write_calls(
        tmp_path / "calls.jsonl",
        call([1, 2], [3], execution_id="<script>"),
        call([1, 4], [5], execution_id="<script>", role="sub-agent", agent="a<b"),
    )
    page = tmp_path / "trees.html"
    assert main(["trees", str(file), "--html", str(page)]) == 0
    html = page.read_text()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "a&lt;b" in html
    assert html.count("class='lane admitted'") == 2
    assert not re.search(r"(src|href)=", html)


def test_a_page_of_three_hundred_calls_has_one_lane_for_each_of_its_paths(tmp_path):
    history, calls = [1], []
    for number in range(300):
        if number % 60 == 59:
            history = [1, 1000 + number]
        calls.append(call(history, [2 * number + 10, 2 * number + 11]))
        history = [*history, 2 * number + 10, 2 * number + 11, 5]
    page = tmp_path / "trees.html"
    assert main(["trees", str(write_calls(tmp_path / "calls.jsonl", *calls)), "--html", str(page)]) == 0
    assert page.read_text().count("class='lane small'") == 6


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"context": [1], "output": [-3], "logprobs": [-1]}', "token id -3 at index 0; expected integers from 0"),
        ('{"context": [1], "output": [2], "logprobs": [0.5]}', "logprob 0.5 at index 0; expected 1 finite numbers"),
        ('{"context": [1], "output": [2, 3], "logprobs": [-1]}', "1 logprobs for 2 output tokens"),
        ('{"context": [1], "output": [2], "logprobs": [-1e999]}', "expected"),
        ('{"context": [1], "output": [2', "not JSON"),
        ('{"context": [1]}', "no context or no output"),
        ('{"context": [1], "output": [2], "lopgrobs": [-1]}', "unknown key 'lopgrobs'"),
        ('{"context": [1.5], "output": [2]}', "expected a list of integers"),
        ('{"context": [1], "output": [2], "role": "boss"}', "role 'boss'; expected one of main"),
        ('{"context": [1], "output": [99999999999999999999]}', "expected"),
        ("[1, 2]", "list, expected an object"),
        ('{"context": [1], "output": [2], "logprobs": [NaN]}', "not JSON"),
    ],
)
def test_a_wrong_line_is_named_with_file_line_and_what_was_expected(tmp_path, capsys, line, expected):
    file = tmp_path / "calls.jsonl"
    file.write_text('{"context": [1], "output": [2]}\n' + line + "\n")
    page = tmp_path / "trees.html"
    error = refusal(capsys, "trees", file, "--html", page)
    assert f"{file}:2" in error
    assert expected in error
    assert not page.exists()


def test_ids_outside_the_vocabulary_are_refused(tmp_path, capsys):
    file = write_calls(tmp_path / "calls.jsonl", call([1], [7]))
    assert "token id 7 at index 0; expected integers from 0 to 6" in refusal(capsys, "trees", file, "--vocabulary", 7)


def test_what_is_no_run_and_no_file_is_refused(tmp_path, capsys):
    assert "expected a run or a file of calls" in refusal(capsys, "trees", tmp_path)
    assert "cannot be read" in refusal(capsys, "trees", tmp_path / "absent.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "no calls" in refusal(capsys, "trees", empty)
    file = write_calls(tmp_path / "calls.jsonl", call([1], [7]))
    assert "no execution e9" in refusal(capsys, "trees", file, "--execution", "e9")
    absent = Path(tmp_path / "absent" / "trees.html")
    assert "cannot be written" in refusal(capsys, "trees", file, "--html", absent)


def test_one_id_for_two_calls_is_refused(tmp_path, capsys):
    file = write_calls(tmp_path / "calls.jsonl", call([1], [7], call_id="x"), call([1], [8], call_id="x"))
    assert "call_id 'x' stands in line 1 already" in refusal(capsys, "trees", file)
