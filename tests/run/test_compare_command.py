"""Comparisons of rules: the runs that are planned, and what is made of their rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.core.config import decode_config
from opengyre.core.errors import InputError
from opengyre.run.compare import plans_of, rule_settings, summaries, summary_table, table_of

CONFIG = decode_config({"run": {"seed": 3}, "cells": {"count": 4}})


def row(rule: str, seed: int, wall_s: float, cells: int = 4) -> dict:
    return {
        "rule": rule,
        "cells": cells,
        "seed": seed,
        "wall_s": wall_s,
        "trained_tokens_per_hour": 1000 / wall_s,
        "utilisation": 0.5,
        "pass_rate": None,
        "switches": 1,
        "handed_over": 2,
        "cpu_share": 0.3,
    }


def test_runs_are_interleaved_and_every_rule_gets_the_same_seeds_and_cells():
    plans = plans_of(CONFIG, rules="waterlevel,static-3,colocate", cells="4,8", seeds=2)
    assert [name for name, _ in plans][:6] == [
        "waterlevel-k4-3",
        "static-3-k4-3",
        "colocate-k4-3",
        "waterlevel-k8-3",
        "static-3-k8-3",
        "colocate-k8-3",
    ]
    assert len({name for name, _ in plans}) == len(plans) == 12
    seen = {(plan.schedule.rule, plan.cells.count, plan.run.seed) for _, plan in plans}
    assert seen == {(rule, k, seed) for rule in ("waterlevel", "static", "colocate") for k in (4, 8) for seed in (3, 4)}
    assert {plan.schedule.training_cells for _, plan in plans if plan.schedule.rule == "static"} == {3}


@pytest.mark.parametrize(
    ("rules", "cells", "seeds"), [("fast", "", 1), ("static-x", "", 1), ("colocate-2", "", 1), ("static", "4,x", 1)]
)
def test_wrong_plans_are_refused_in_one_line(rules, cells, seeds):
    with pytest.raises(InputError, match=r"--rules .* expected"):
        plans_of(CONFIG, rules=rules, cells=cells, seeds=seeds)
    with pytest.raises(InputError, match="1 or more"):
        plans_of(CONFIG, rules="static", cells="", seeds=0)


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=2, max_size=6))
def test_ratios_are_taken_seed_by_seed_and_intervals_hold_their_means(walls):
    rows = [row("a", seed, pair[0]) for seed, pair in enumerate(walls)]
    rows += [row("b", seed, pair[1]) for seed, pair in enumerate(walls)]
    first, second = summaries(rows)
    assert first["wall_ratio"]["mean"] == pytest.approx(1.0)
    assert second["wall_ratio"]["mean"] == pytest.approx(sum(b / a for a, b in walls) / len(walls))
    for one in (first, second):
        assert one["seeds"] == len(walls)
        assert one["wall_s"]["low"] <= one["wall_s"]["mean"] <= one["wall_s"]["high"]


def test_one_seed_has_no_interval_and_the_tables_still_show_it():
    rows = [row("a", 0, 10.0), row("a", 0, 5.0, cells=8)]
    summary = summaries(rows)
    assert [(one["cells"], one["wall_s"]["low"]) for one in summary] == [(4, None), (8, None)]
    assert table_of(rows).row_count == summary_table(summary).row_count == 2


def test_a_rule_without_a_number_keeps_the_split_of_the_configuration():
    assert "training_cells" not in rule_settings("static")
