import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.core.config import Config, decode_config, load_config
from opengyre.core.errors import ConfigError

SECTIONS = [field.name for field in msgspec.structs.fields(Config)]


def line_of(table) -> str:
    with pytest.raises(ConfigError) as caught:
        decode_config(table)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"run": {"step": 2}}, "run.step: no such key"),
        ({"runs": {}}, "runs: no such key"),
        ({"run": {"steps": 0}}, "run.steps: Expected `int` >= 1"),
        ({"run": {"steps": "two"}}, "run.steps: Expected `int`, got `str`"),
        ({"rollout": {"temperature": 0.0}}, "rollout.temperature: Expected `float` > 0"),
        ({"schedule": {"rule": "magic"}}, "schedule.rule: Invalid enum value 'magic'"),
        ({"train": {"beta1": 1.5}}, "train.beta1: Expected `float` <= 1"),
        (
            {"schedule": {"rule": "static", "training_cells": 2}, "cells": {"count": 2}},
            "schedule.training_cells = 2: expected 1 to cells.count - 1 = 1",
        ),
        ({"schedule": {"floor": 2}}, "schedule.floor = 2: expected 0 to cells.count - 1 = 1"),
        (
            {"harness": {"timeout_s": 9.0, "overall_timeout_s": 9.0}},
            "harness.overall_timeout_s = 9.0: expected more than timeout_s = 9.0",
        ),
        ({"policy": {"kv_heads": 3}}, "policy.kv_heads = 3: expected a divisor of heads = 4"),
        ({"policy": {"hidden_size": 130}}, "policy.hidden_size = 130: expected a multiple of heads = 4"),
        ({"evaluation": {"tasks": 500}}, "evaluation.tasks = 500: expected at most tasks.heldout_count = 128"),
    ],
)
def test_a_wrong_key_is_named_with_what_was_expected(table, said):
    assert line_of(table).startswith(said)


@given(st.sampled_from(SECTIONS), st.text(st.characters(categories=["Ll"]), min_size=1, max_size=12))
def test_no_unknown_key_is_taken(section, key):
    known = {field.name for field in msgspec.structs.fields(type(getattr(Config(), section)))}
    if key not in known:
        assert line_of({section: {key: 1}}) == f"{section}.{key}: no such key"


@given(st.integers(0, 5), st.integers(1, 5), st.integers(1, 9))
def test_the_dispatch_depth_is_phi_plus_mu_times_b(phi, mu, groups):
    schedule = decode_config({"schedule": {"overlap": phi, "burst": mu, "batch_groups": groups}}).schedule
    assert schedule.dispatch_depth == (phi + mu) * groups


@given(st.integers(1, 10**6), st.floats(0.01, 10), st.booleans())
def test_a_configuration_survives_json(steps, temperature, greedy):
    config = decode_config(
        {"run": {"steps": steps}, "rollout": {"temperature": temperature}, "evaluation": {"greedy": greedy}}
    )
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config


def test_overrides_are_toml_and_a_bare_word_is_text(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[run]\nsteps = 3\n")
    config = load_config(path, ["run.steps=5", "schedule.rule=colocate", 'tasks.options.level="hard"'])
    assert (config.run.steps, config.schedule.rule, config.tasks.options) == (5, "colocate", {"level": "hard"})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps=3", "expected section.key=value"),
        ("run.steps", "expected section.key=value"),
        ("run.steps.more=1", "steps is not a section"),
        ("run.steps=many", "run.steps: Expected `int`, got `str`"),
    ],
)
def test_a_wrong_override_is_one_line(tmp_path, override, said):
    path = tmp_path / "c.toml"
    path.write_text("[run]\nsteps = 3\n")
    with pytest.raises(ConfigError, match=said):
        load_config(path, [override])


@pytest.mark.parametrize(("text", "said"), [(b"[run\n", "not TOML"), (b"\xff\xfe", "not TOML")])
def test_a_file_that_is_not_toml_is_named(tmp_path, text, said):
    path = tmp_path / "c.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=said):
        load_config(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "none.toml")
