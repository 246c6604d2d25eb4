"""What a workload file may say, and the one line that refuses the rest."""

from pathlib import Path

import pytest

from opengyre.core.errors import ConfigError, FileError
from opengyre.sim.workload import load_workloads

RECIPES = Path(__file__).parents[2] / "recipes/workloads"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_workload_is_read(path):
    assert load_workloads(path)


def test_a_regime_changes_only_what_it_names():
    found = load_workloads(RECIPES / "regimes.toml")
    base, burst = found["overlap-1-2"], found["burst-4"]
    differing = [name for name in base.__struct_fields__ if getattr(base, name) != getattr(burst, name)]
    assert len(found) == 24
    assert differing == ["phi", "mu"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("cells = 0", "cells = 0"),
        ("mu = 0", "mu = 0"),
        ("phi = -1", "phi = -1"),
        ("zells = 3", "zells"),
        ('load = "much"', "load"),
        ("load = 0", "load = 0"),
        ("gpus = 3", "gpus = 3"),
        ("kv_tokens_per_cell = 1e5", "kv_tokens_per_cell"),
        ("context_low_tokens = 2e5", "context_high_tokens"),
        ("environment_factor_cycle = [1, -4]", "environment_factor_cycle"),
        ("seeds = []", "seeds"),
        ("async_training_cells = 4", "async_training_cells"),
        ("trained_tokens_per_output_to = 4", "trained_tokens_per_output_from"),
        ("[published]\nelastic = 3", "published"),
    ],
)
def test_an_impossible_workload_is_refused_in_one_line_that_names_the_key(tmp_path, text, key):
    path = tmp_path / "w.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_workloads(path)
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("w.toml: ")


def test_a_wrong_regime_is_named(tmp_path):
    path = tmp_path / "w.toml"
    path.write_text("[base]\ncells = 4\n[regimes]\nodd = { mu = 0 }\n")
    with pytest.raises(ConfigError, match=r"regimes\.odd: mu = 0"):
        load_workloads(path)


def test_a_file_that_is_no_toml_or_not_there_is_refused(tmp_path):
    path = tmp_path / "w.toml"
    path.write_text("cells = ")
    with pytest.raises(FileError, match=r"w\.toml"):
        load_workloads(path)
    with pytest.raises(FileError, match="expected a workload"):
        load_workloads(tmp_path / "none.toml")
