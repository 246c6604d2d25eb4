"""The judged table from figures of single regimes."""

import json

import msgspec
import pytest

from opengyre.cli import main as opengyre
from opengyre.core.errors import InputError
from opengyre.run.judged_table import judged, main


def study(name: str, hours: dict[str, list[float]], split: float | None) -> dict[str, object]:
    rows = [
        {
            "rule": rule,
            "hours_per_step": sum(values) / len(values),
            "hours_per_step_by_seed": values,
            "bound_ratio": 1.2,
            "staleness_max": 2,
        }
        for rule, values in hours.items()
    ]
    best = None if split is None else {"training_cells": 1, "hours_per_step": split}
    return {"workload": name, "rules": rows, "best_static": best}


def test_a_rule_is_held_against_the_best_baseline_seed_by_seed():
    hours = {"waterlevel": [2.0, 4.0], "colocate": [9.0, 9.0], "static:1": [3.0, 4.0], "static:2:batch": [8.0, 8.0]}
    row = judged(study("one", hours, 3.5), "waterlevel")
    assert row["best"] == "static:1"
    assert row["over_best_by_seed"] == (1.0, 1.5)
    assert row["over_best"] == pytest.approx(1.5**0.5)
    assert row["over_split"] == pytest.approx(3.5 / 3.0)


def test_an_elastic_rule_is_no_baseline():
    with pytest.raises(InputError, match="a baseline among them"):
        judged(study("one", {"waterlevel": [2.0], "lookahead": [1.0]}, None), "waterlevel")


def test_the_least_ratio_names_its_regime(tmp_path, capsys):
    files = []
    for name, own in (("good", 2.0), ("bad", 4.0)):
        hours = {"waterlevel": [own], "lookahead": [own], "colocate": [3.0]}
        files.append(tmp_path / f"{name}.json")
        files[-1].write_bytes(msgspec.json.encode(study(name, hours, 3.0)))
    assert main([str(file) for file in files]) == 0
    assert "at least 0.750 times the best baseline (bad)" in capsys.readouterr().out


def test_a_file_of_something_else_is_refused_in_one_line(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text("[]")
    assert main([str(other)]) == 2
    assert capsys.readouterr().err.startswith(f"{other}: expected what")


def test_it_reads_what_the_command_prints(tmp_path, capsys):
    workload = tmp_path / "two.toml"
    workload.write_text("cells = 2\nbatch_groups = 2\ngroup_size = 2\nsteps = 6\n")
    assert opengyre(["simulate", str(workload), "--json", "--seeds", "2"]) == 0
    text = capsys.readouterr().out
    figures = tmp_path / "two.json"
    figures.write_text(text)
    assert main([str(figures)]) == 0
    assert f"| two | 2 | {judged(json.loads(text), 'lookahead')['hours']:.3f} |" in capsys.readouterr().out
