"""The simulator against closed forms, and what must hold for every rule."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.core.events import Mode
from opengyre.sim.bounds import latency_bound_s, step_ends_s, work_bound_s
from opengyre.sim.lengths import JobSource
from opengyre.sim.outcome import Outcome, hours_per_step, shares, staleness
from opengyre.sim.rules import settings_of
from opengyre.sim.simulator import Simulator
from opengyre.sim.workload import Workload

STEADY = Workload(batch_groups=4, group_size=4, steps=20, sigma_group=0.0, sigma_execution=0.0, chunk_tokens=13e3)
"""All executions have the mean length."""
SMALL = Workload(batch_groups=3, group_size=4, steps=9, cells=3, gpus=24, load=40.0, chunk_tokens=20e3)
RULES = ("waterlevel", "lookahead", "static:1", "static:2:batch", "colocate", "colocate:sync", "waterlevel:1.0:0")


def run(workload: Workload, rule: str, seed: int = 1) -> Outcome:
    return Simulator(workload, settings_of(rule, workload), name=rule, seed=seed).run()


def changed(workload: Workload, **changes: object) -> Workload:
    return msgspec.structs.replace(workload, **changes)


def test_a_train_bound_static_split_takes_its_training_work():
    workload = changed(STEADY, phi=2, mu=1, train_token_s=900e-6, environment_s=60.0, kv_tokens_per_cell=600e6)
    trained = workload.batch_groups * workload.group_size * workload.output_tokens * workload.trained_tokens_per_output
    for cells in (1, 2):
        expected_s = trained * workload.train_s_per_token / cells + workload.optimizer_s
        outcome = run(workload, f"static:{cells}")
        assert hours_per_step(workload, outcome) * 3600 == pytest.approx(expected_s, rel=0.03)
        assert shares(outcome)["useful_training"] > 0.9 * cells / workload.cells


def test_a_latency_bound_single_group_takes_its_longest_execution():
    workload = changed(STEADY, batch_groups=1, group_size=2, cells=3, gpus=24, phi=0, mu=1, sigma_execution=0.3)
    total_s = 0.0
    for group in range(workload.steps):
        jobs = [JobSource(workload, seed=1).job(group_id=group, slot=slot) for slot in range(2)]
        alone = []
        for job in jobs:
            contexts = [workload.context_tokens(chunk) for chunk in range(len(job.outputs))]
            token_s = [workload.step_weights_s + workload.request_s + c * workload.context_token_s for c in contexts]
            alone.append(sum(map(float.__mul__, job.outputs, token_s)) + sum(job.environments))
        micro_s = sum(job.tokens for job in jobs) * workload.trained_tokens_per_output * workload.train_s_per_token
        total_s += max(alone) + workload.evaluate_s + micro_s + workload.optimizer_s + workload.publish_s
    outcome = run(workload, "static:1")
    assert outcome.step_done_s[-1] + workload.publish_s == pytest.approx(total_s, rel=0.03)


def test_a_work_bound_saturated_pool_takes_its_decoding_work():
    workload = changed(
        STEADY,
        phi=3,
        mu=1,
        group_size=8,
        step_weights_s=0.0,
        step_context_token_s=0.0,
        environment_s=0.0,
        evaluate_s=0.0,
        publish_s=0.0,
        train_token_s=1e-6,
        kv_tokens_per_cell=600e6,
    )
    tokens = workload.batch_groups * workload.group_size * workload.output_tokens
    expected_s = tokens * workload.request_s / (workload.cells - 1)
    outcome = run(workload, "static:1")
    assert hours_per_step(workload, outcome) * 3600 == pytest.approx(expected_s, rel=0.03)
    assert shares(outcome)["useful_rollout"] > 0.97 * 0.75


@pytest.mark.parametrize("rule", RULES)
def test_no_execution_is_lost_and_every_group_is_consumed_once(rule):
    outcome = run(SMALL, rule)
    assert outcome.executions == outcome.finished == SMALL.steps * SMALL.batch_groups * SMALL.group_size
    assert sum(outcome.staleness.values()) == len(outcome.groups) == SMALL.steps * SMALL.batch_groups
    assert staleness(outcome)[1] <= SMALL.phi + SMALL.mu - 1


@given(
    phi=st.integers(0, 3),
    mu=st.integers(1, 3),
    cells=st.integers(2, 5),
    seed=st.integers(0, 1000),
    rule=st.sampled_from((*RULES[:3], "colocate")),
    kv_tokens=st.sampled_from((4e6, 20e6, 60e6)),
    switch_s=st.sampled_from((0.0, 45.0, 3000.0)),
)
@settings(max_examples=25, deadline=None)
def test_every_run_ends_with_its_groups_in_time_under_any_pressure(phi, mu, cells, seed, rule, kv_tokens, switch_s):
    workload = changed(
        SMALL, phi=phi, mu=mu, cells=cells, gpus=32, kv_tokens_per_cell=kv_tokens * 5, switch_s=switch_s, steps=6
    )
    outcome = run(workload, rule, seed)
    assert outcome.finished == outcome.executions
    assert staleness(outcome)[1] <= phi + mu - 1


def test_a_seed_gives_the_same_run_and_another_seed_another():
    first, second, other = run(SMALL, "lookahead"), run(SMALL, "lookahead"), run(SMALL, "lookahead", seed=2)
    assert (first.step_done_s, first.events, first.choices) == (second.step_done_s, second.events, second.choices)
    assert first.step_done_s != other.step_done_s


def test_all_rules_have_the_same_work():
    works = []
    for rule in RULES:
        groups = run(SMALL, rule).groups.values()
        works.append({g.group_id: (g.trained_tokens, g.output_tokens, g.context_tokens, g.alone_s) for g in groups})
    assert all(work == works[0] for work in works)


def test_no_rule_is_faster_than_the_bounds():
    for rule in RULES:
        outcome = run(SMALL, rule)
        groups = outcome.groups.values()
        assert outcome.step_done_s[-1] >= step_ends_s(SMALL, groups)[-1]
        whole = changed(SMALL, warmup_steps=SMALL.steps)
        assert whole.measured_steps == (0, SMALL.steps)
        assert outcome.step_done_s[-1] / SMALL.steps >= work_bound_s(whole, groups)
        assert latency_bound_s(whole, groups) <= outcome.step_done_s[-1] / SMALL.steps


def test_only_colocate_leaves_executions_without_a_cell_in_rollout():
    parked = {rule: run(SMALL, rule).parked_s for rule in RULES}
    assert {rule for rule, seconds in parked.items() if seconds} == {"colocate", "colocate:sync"}


def test_the_spans_of_a_cell_follow_each_other_to_the_end():
    outcome = run(SMALL, "waterlevel")
    for cell in range(SMALL.cells):
        spans = [span for span in outcome.spans if span.cell_id == cell]
        assert spans[0].started_s == 0.0
        assert spans[-1].ended_s == outcome.ended_s
        assert all(one.ended_s == other.started_s for one, other in pairwise(spans))
        assert all(span.busy_s <= span.ended_s - span.started_s + 1e-6 for span in spans)
        assert all(span.busy_s == 0.0 for span in spans if span.mode is Mode.SWITCHING)


def test_the_gate_holds_executions_at_the_kv_cliff_and_is_worth_it():
    tight = changed(SMALL, batch_groups=8, kv_tokens_per_cell=40e6, phi=1, mu=2)
    gated, open_ = run(tight, "static:1"), run(changed(tight, gate=False), "static:1")
    assert gated.held_s > 0
    assert open_.held_s == 0
    assert hours_per_step(tight, gated) < hours_per_step(tight, open_)


def test_a_harness_timeout_lets_slow_rules_do_less_work():
    workload = changed(SMALL, timeout_h=1.5)
    outcome = run(workload, "static:2:batch")
    assert outcome.timed_out > run(SMALL, "static:2:batch").timed_out
    assert outcome.finished == outcome.executions


def test_drift_and_phases_change_what_later_groups_need():
    drift = changed(SMALL, trained_tokens_per_output_from=1.0, trained_tokens_per_output_to=3.0)
    assert drift.trained_per_output(0) < 1.1
    assert drift.trained_per_output(SMALL.steps * SMALL.batch_groups - 1) > 2.9
    phases = changed(SMALL, environment_factor_cycle=(1.0, 4.0), environment_cycle_steps=2)
    assert [phases.environment_factor(group) for group in (0, 5, 6, 11, 12)] == [1.0, 1.0, 4.0, 4.0, 1.0]
