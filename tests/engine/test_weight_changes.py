"""What a change of weights may and may not do to calls, caches and counts. Each test names the mistake it catches."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.engine.blocks import BLOCK_TOKENS
from opengyre.engine.torch_engine import TorchEngine
from opengyre.model.decoder import DecoderConfig, Parameters, init_parameters

CONFIG = DecoderConfig(vocab_size=48, hidden_size=16, layers=1, heads=2, kv_heads=1, mlp_size=16, context_tokens=512)


def weights(seed: int) -> Parameters:
    return init_parameters(CONFIG, torch.Generator().manual_seed(seed))


WEIGHTS = [weights(seed) for seed in range(4)]


def engine(**changes) -> TorchEngine:
    sizes = {"slots": 40, "max_running": 6, "kv_tokens": 1 << 16} | changes
    one = TorchEngine(CONFIG, **sizes)
    one.set_version(0, WEIGHTS[0])
    return one


def request(number: int, *, context: int = 48, length: int = 4, **changes) -> GenerateRequest:
    plain = GenerateRequest(
        execution_id=f"e{number}",
        call_id=f"c{number}",
        context=np.random.default_rng(number).integers(0, 48, size=context, dtype=np.int32),
        max_tokens=length,
        temperature=1.0,
        seed=number,
        stop_ids=(),
    )
    return msgspec.structs.replace(plain, **changes)


def finish(one: TorchEngine) -> dict[str, Generation]:
    ended: dict[str, Generation] = {}
    while not one.is_idle:
        ended.update(one.step())
    return ended


def ask(one: TorchEngine, asked: GenerateRequest) -> Generation:
    one.submit(asked)
    return finish(one)[asked.call_id]


def after(asked: GenerateRequest, answer: Generation, *, new: int = 5) -> GenerateRequest:
    """Return the next call of the execution: what it was given, what it said, and some new tokens."""
    context = np.concatenate((asked.context, answer.output, np.arange(new))).astype(np.int32)
    return msgspec.structs.replace(asked, call_id=asked.call_id + "n", context=context)


def test_a_path_that_was_cached_and_is_asked_for_after_a_publication_is_counted_as_computed_again():
    """Mistake: the counter that nobody fills, so that publishing looks free."""
    one = engine()
    first = request(1)
    following = after(first, ask(one, first))
    assert one.counters.recomputed_tokens == 0
    one.set_version(1, WEIGHTS[1])
    assert ask(one, following).prefilled_tokens == len(following.context)
    assert one.counters.recomputed_tokens == 48  # three whole blocks; the path had 51 tokens in the cache


def test_a_call_in_flight_leaves_a_path_that_its_execution_computes_again():
    """Mistake: only looking at caches that were idle at the publication."""
    one = engine()
    first = request(1)
    one.submit(first)
    one.step()
    one.set_version(1, WEIGHTS[1])
    following = after(first, finish(one)["c1"])
    assert one.counters.recomputed_tokens == 0
    ask(one, following)
    assert one.counters.recomputed_tokens == 48


def test_a_drained_call_leaves_a_path_that_its_execution_computes_again():
    """Mistake: taking a cache that was finished after the publication for one of the new version."""
    one = engine()
    first = request(1)
    one.submit(first)
    one.step()
    one.set_version(1, WEIGHTS[1], drain=True)
    following = after(first, finish(one)["c1"])
    assert ask(one, following).prefilled_tokens == len(following.context)
    assert one.counters.recomputed_tokens == 48


def test_a_shared_prefix_is_counted_once_for_it_is_computed_once():
    """Mistake: counting what each call lacks, though the second finds what the first computes."""
    one = engine()
    first = request(1)
    ask(one, first)
    one.set_version(1, WEIGHTS[1])
    for number in range(4):
        one.submit(msgspec.structs.replace(first, call_id=f"again{number}", execution_id=f"x{number}"))
    finish(one)
    assert one.counters.recomputed_tokens == 48


def test_pinned_calls_neither_pay_for_a_publication_nor_make_others_pay():
    """Mistake: taking the cache of an evaluation for one that the publication made useless."""
    one = engine()
    pinned = request(1, pinned_version=0)
    answer = ask(one, pinned)
    one.set_version(1, WEIGHTS[1], keep=(0,))
    assert ask(one, after(pinned, answer)).prefilled_tokens == 6
    ask(one, msgspec.structs.replace(pinned, call_id="free", pinned_version=None))
    assert one.counters.recomputed_tokens == 0


def test_what_was_evicted_before_is_no_cost_of_the_publication():
    """Mistake: remembering every path that was ever seen."""
    one = engine(slots=2, max_running=1)
    first = request(1)
    ask(one, first)
    for number in (2, 3):
        ask(one, request(number))
    one.set_version(1, WEIGHTS[1])
    ask(one, msgspec.structs.replace(first, call_id="again"))
    assert one.counters.recomputed_tokens == 0


def test_a_cell_that_comes_back_from_training_does_not_count_its_empty_cache():
    """Mistake: calling the prefill behind a switch the price of a publication."""
    one = engine()
    first = request(1)
    ask(one, first)
    one.hand_over()
    one.clear_cache()
    one.set_version(1, WEIGHTS[1])
    ask(one, msgspec.structs.replace(first, call_id="again"))
    assert one.counters.recomputed_tokens == 0


def test_other_weights_under_the_same_number_cost_what_they_make_useless():
    """Mistake: comparing numbers where (number, incarnation, checksum) is the version."""
    one = engine()
    first = request(1)
    ask(one, first)
    one.set_version(0, WEIGHTS[1])
    assert ask(one, msgspec.structs.replace(first, call_id="again")).prefilled_tokens == 48
    assert one.counters.recomputed_tokens == 48


def test_the_same_version_again_costs_nothing():
    """Mistake: emptying the cache whenever weights are loaded."""
    one = engine()
    first = request(1)
    answer = ask(one, first)
    one.set_version(0, one.parameters(0))
    assert ask(one, after(first, answer)).prefilled_tokens == 6
    assert one.counters.recomputed_tokens == 0


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=14))
def test_the_count_is_the_prefill_that_the_same_calls_do_not_need_without_publications(plan):
    """Executions take turns; before some of their calls a version is published. Whole blocks are counted, no more."""
    changed, steady, version = engine(), engine(), 0
    state = {number: [request(number, context=40 + 7 * number)] * 2 for number in range(4)}
    calls = 0
    for number, is_published in plan:
        if is_published:
            version += 1
            changed.set_version(version, WEIGHTS[version % 4])
        calls += 1
        state[number] = [
            after(asked, ask(one, asked)) for one, asked in zip((changed, steady), state[number], strict=True)
        ]
        if len(state[number][0].context) > 300:
            break
    extra = changed.counters.prefilled_tokens - steady.counters.prefilled_tokens
    assert changed.counters.recomputed_tokens <= changed.counters.prefilled_tokens
    assert 0 <= extra - changed.counters.recomputed_tokens < BLOCK_TOKENS * calls
    assert steady.counters.recomputed_tokens == 0


@settings(max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.booleans())
def test_version_runs_add_up_and_only_tokens_behind_a_change_are_mixed(pauses, is_drained):
    """Mistake: marking the whole call, or none of it."""
    one = engine()
    asked = request(1, length=30)
    one.submit(asked)
    ended: dict[str, Generation] = {}
    for version, steps in enumerate(pauses, start=1):
        for _ in range(steps):
            ended.update(one.step())
        one.set_version(version, WEIGHTS[version % 4], drain=is_drained)
    ended.update(finish(one))
    runs = ended["c1"].versions
    assert sum(run.count for run in runs) == 30
    assert [run.version for run in runs] == sorted({run.version for run in runs})
    assert [run.mixed for run in runs] == [False] + [True] * (len(runs) - 1)
    if is_drained:
        assert len(runs) == 1


@pytest.mark.parametrize("published", [1, 2])
def test_a_queued_call_is_served_by_the_newest_version_from_its_first_token(published):
    """Mistake: fixing a call's version when it arrives."""
    one = engine(max_running=1, slots=4)
    one.submit(request(1, length=10))
    one.step()
    one.submit(request(2))
    for version in range(1, published + 1):
        one.set_version(version, WEIGHTS[version])
    answer = finish(one)["c2"]
    assert [(run.version, run.mixed) for run in answer.versions] == [(published, False)]
    alone = engine()
    alone.set_version(published, WEIGHTS[published])
    assert answer.output.tolist() == ask(alone, request(2)).output.tolist()
