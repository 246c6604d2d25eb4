"""The simulate command: its table, its JSON, its page, and what it refuses."""

import json

import pytest

from opengyre.cli import main

WORKLOAD = "batch_groups = 2\ngroup_size = 4\nsteps = 6\nwarmup_steps = 0\nload = 20.0\nchunk_tokens = 20e3\n"
RULE_KEYS = {
    "rule",
    "hours_per_step",
    "trained_tokens_per_hour",
    "utilisation",
    "timeout_rate",
    "staleness_mean",
    "staleness_max",
    "bound_ratio",
}


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(WORKLOAD)
    return str(path)


def output(capsys, *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 0
    return capsys.readouterr().out


def test_the_json_has_the_keys_of_the_design_and_a_seed_gives_the_same_bytes(workload, capsys):
    first = output(capsys, workload, "--seeds", "2", "--json")
    found = json.loads(first)
    assert {"rules", "best_static", "events", "wall_s"} <= set(found)
    assert all(set(row) >= RULE_KEYS for row in found["rules"])
    assert set(found["rules"][0]["utilisation"]) == {"rollout", "training"}
    assert set(found["best_static"]) == {"training_cells", "hours_per_step"}
    assert output(capsys, workload, "--seeds", "2", "--json") == first


def test_the_best_static_split_is_the_fastest_of_all_splits(workload, capsys):
    found = json.loads(output(capsys, workload, "--rules", "static", "--json"))
    splits = json.loads(output(capsys, workload, "--rules", "static:1,static:2,static:3", "--json"))
    hours = {row["rule"]: row["hours_per_step"] for row in splits["rules"]}
    assert found["best_static"]["hours_per_step"] == min(hours.values())


def test_the_table_names_every_rule_and_the_page_shows_its_cells(workload, tmp_path, capsys):
    page = tmp_path / "page.html"
    text = output(capsys, workload, "--rules", "waterlevel,colocate", "--html", str(page))
    assert "waterlevel" in text
    assert "colocate" in text
    html = page.read_text()
    assert html.count("timeline of the cells") == 2
    assert "http" not in html.replace("http://www.w3.org", "")


def test_a_file_with_regimes_gives_a_summary(tmp_path, capsys):
    path = tmp_path / "several.toml"
    path.write_text(f"[base]\n{WORKLOAD}[regimes]\none = {{}}\ntwo = {{ phi = 0 }}\n")
    found = json.loads(output(capsys, str(path), "--rules", "waterlevel,static", "--json"))
    assert [one["workload"] for one in found["regimes"]] == ["one", "two"]
    assert found["summary"][0]["rule"] == "waterlevel"
    only = json.loads(output(capsys, str(path), "--rules", "waterlevel", "--regimes", "two", "--json"))
    assert only["workload"] == "two"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--rules", "best"), "--rules best"),
        (("--rules", "static:4"), "--rules static:4"),
        (("--rules", "waterlevel:no"), "--rules waterlevel:no"),
        (("--steps", "0"), "--steps 0"),
        (("--seeds", "0"), "--seeds 0"),
        (("--regimes", "other"), "--regimes other"),
        (("--html", "/none/page.html", "--rules", "waterlevel"), "/none/page.html"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(workload, capsys, arguments, part):
    assert main(["simulate", workload, *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert part in lines[-1]
    assert len(lines) == 1


def test_the_table_of_all_rules_fits_a_terminal_of_eighty_columns(workload, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = output(capsys, workload, "--seeds", "2")
    assert "waterlevel:1.0:0" in text
    assert "…" not in text
