"""The level set: which settings and readings agree with published ratios."""

import pytest

from opengyre.core.errors import ConfigError
from opengyre.sim.levels import Measured, Setting, agreements, measure, rules, targets
from opengyre.sim.workload import Published, Workload

PUBLISHED = Published(elastic_h=1.0, async_h=2.0, colocate=(1.2, 1.4))
SETTING = Setting(load=2.5, training_factor=1.0, phi=1, mu=2)


def measured(**hours):
    defaults = {"waterlevel:1.0:0": 9.0, "waterlevel": 1.0, "colocate": 1.3, "colocate:sync": 3.0}
    splits = {"static:1": 2.0, "static:1:batch": 2.5, "static:2": 1.1, "static:2:batch": 1.94}
    return Measured(SETTING, {**defaults, **splits, **hours})


def test_a_reading_agrees_if_both_ratios_lie_within_five_percent():
    found = list(agreements(measured(), PUBLISHED))
    assert [(one.elastic, one.asynchronous, one.colocate) for one in found] == [
        ("waterlevel", "static:1", "colocate"),
        ("waterlevel", "static:2:batch", "colocate"),
    ]
    assert {one.over_best_static for one in found} == {1.1}


@pytest.mark.parametrize(("colocate", "agrees"), [(1.13, False), (1.15, True), (1.46, True), (1.48, False)])
def test_a_published_range_is_widened_by_five_percent_on_both_sides(colocate, agrees):
    assert any(agreements(measured(colocate=colocate), PUBLISHED)) is agrees


def test_a_batch_split_is_a_reading_of_async_but_not_the_best_static_one():
    assert measured(**{"static:2:batch": 0.5}).over_best_static("waterlevel") == 1.1


def test_without_published_figures_there_is_nothing_to_replicate():
    for published in (None, Published(elastic_h=1.0, async_h=2.0), Published(async_h=2.0, colocate_h=2.0)):
        with pytest.raises(ConfigError, match="published: expected hours or ratios of both"):
            targets(published)


def test_a_setting_is_measured_with_every_rule_on_its_own_load_and_window():
    workload = Workload(cells=2, gpus=16, batch_groups=2, group_size=2, steps=8)
    light, heavy = (measure(workload, Setting(load, 1.0, 1, 1), (1,)) for load in (1.0, 5.0))
    assert list(light.hours) == rules(2)
    assert all(light.hours[rule] < heavy.hours[rule] for rule in rules(2))
