"""The engine: exact under any batch, schedule of hand-overs and change of weights; computes only what is new."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.core.errors import InvariantError
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import Finish, VersionRun
from opengyre.engine.moved import MovedCache, take_moved, write_moved
from opengyre.engine.sampling import uniform_draws
from opengyre.engine.torch_engine import TorchEngine
from opengyre.model.decoder import DecoderConfig, Parameters, forward_hidden, init_parameters, logits_of

CONFIG = DecoderConfig(vocab_size=48, hidden_size=32, layers=2, heads=4, kv_heads=2, mlp_size=48, context_tokens=128)
EXACT = torch.float64


def weights(seed: int, dtype: torch.dtype = EXACT) -> Parameters:
    drawn = init_parameters(CONFIG, torch.Generator().manual_seed(seed))
    return {name: tensor.to(dtype) for name, tensor in drawn.items()}


WEIGHTS = weights(1)
OTHER = weights(2)


def engine(*, dtype: torch.dtype = EXACT, running: int = 16, kv_tokens: int = 10_000, prefill: int = 4096):
    made = TorchEngine(
        CONFIG, slots=running + 8, max_running=running, kv_tokens=kv_tokens, dtype=dtype, prefill_tokens=prefill
    )
    made.set_version(0, {name: tensor.to(dtype) for name, tensor in WEIGHTS.items()})
    return made


def request(number: int, *, context: int = 20, length: int = 20, **changes) -> GenerateRequest:
    drawn = np.random.default_rng(number).integers(0, 48, size=context, dtype=np.int32)
    plain = GenerateRequest(
        execution_id=f"e{number}",
        call_id=f"c{number}",
        context=drawn,
        max_tokens=length,
        temperature=1.0,
        seed=77 + number,
        stop_ids=(),
    )
    return msgspec.structs.replace(plain, **changes)


def finish(one: TorchEngine) -> dict[str, Generation]:
    ended: dict[str, Generation] = {}
    for _ in range(10_000):
        if one.is_idle:
            return ended
        ended.update(one.step())
    raise AssertionError("the engine does not come to an end")


def alone(asked: GenerateRequest, **options) -> Generation:
    one = engine(**options)
    one.submit(asked)
    return finish(one)[asked.call_id]


def by_hand(asked: GenerateRequest, parameters: Parameters) -> tuple[list[int], list[float]]:
    """Sample without cache or batch: the whole forward for every token, inverse cumulative by numpy."""
    tokens, logprobs = asked.context.tolist(), []
    for position in range(asked.max_tokens):
        hidden = forward_hidden(CONFIG, parameters, torch.tensor([tokens]))[0, -1]
        law = torch.softmax(logits_of(parameters, hidden) / asked.temperature, -1).numpy()
        draw = uniform_draws(np.array([asked.seed], np.uint64), np.array([position], np.uint64))[0]
        token = int(np.searchsorted(law.cumsum(), draw * law.sum(), side="right"))
        tokens.append(token)
        logprobs.append(float(np.log(law[token])))
    return tokens[len(asked.context) :], logprobs


def continued(asked: GenerateRequest, partial) -> GenerateRequest:
    return msgspec.structs.replace(
        asked, output=partial.output, behaviour_logprobs=partial.behaviour_logprobs, versions=partial.versions
    )


def test_a_call_samples_what_the_plain_forward_samples_token_for_token():
    asked = request(3, temperature=0.8)
    tokens, logprobs = by_hand(asked, WEIGHTS)
    answer = alone(asked)
    assert answer.output.tolist() == tokens
    np.testing.assert_allclose(answer.behaviour_logprobs, logprobs, atol=1e-6)


def test_behaviour_logprobs_in_fp32_in_a_batch_equal_the_plain_forward_to_1e_4():
    parameters = weights(1, torch.float32)
    one = engine(dtype=torch.float32)
    asked = [request(number, context=10 + 5 * number, length=30) for number in range(12)]
    for item in asked:
        one.submit(item)
    answers = finish(one)
    for item in asked:
        answer = answers[item.call_id]
        row = torch.from_numpy(np.concatenate((item.context, answer.output)).astype(np.int64))[None]
        law = torch.log_softmax(logits_of(parameters, forward_hidden(CONFIG, parameters, row)), -1)[0]
        start = len(item.context)
        expected = law[torch.arange(start - 1, row.shape[1] - 1), row[0, start:]]
        assert float((torch.from_numpy(answer.behaviour_logprobs) - expected).abs().max()) < 1e-4


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 25)), min_size=1, max_size=12), st.integers(3, 64))
def test_tokens_do_not_depend_on_the_batch_or_the_size_of_a_prefill_pass(shapes, prefill):
    one = engine(running=5, prefill=prefill)
    asked = [request(number, context=shape[0], length=shape[1]) for number, shape in enumerate(shapes)]
    for item in asked:
        one.submit(item)
    answers = finish(one)
    for item in asked:
        assert answers[item.call_id].output.tolist() == alone(item).output.tolist()
        assert len(answers[item.call_id].output) == item.max_tokens


@settings(max_examples=40)
@given(st.data())
def test_a_call_handed_over_at_any_points_samples_what_it_would_have_sampled_undisturbed(data):
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
    cells = [engine(running=6, prefill=data.draw(st.integers(4, 40))) for _ in range(2)]
    asked = {f"c{number}": request(number, context=8 + 7 * number, length=18) for number in range(4)}
    expected = {call_id: alone(item).output.tolist() for call_id, item in asked.items()}
    for item in asked.values():
        cells[0].submit(item)
    ended: dict[str, Generation] = {}
    here = 0
    for steps, is_moved in data.draw(st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=6)):
        for _ in range(steps):
            ended.update(cells[here].step())
        partials = cells[here].hand_over(folder if is_moved else None)
        assert cells[here].is_idle
        here = 1 - here
        for call_id, partial in partials:
            moved = take_moved(Path(partial.kv_path)) if partial.kv_path else None
            cells[here].submit(continued(asked[call_id], partial), moved=moved)
    ended.update(finish(cells[here]))
    assert {call_id: answer.output.tolist() for call_id, answer in ended.items()} == expected
    for answer in ended.values():
        assert answer.versions == (VersionRun(0, len(answer.output)),)
        assert len(answer.behaviour_logprobs) == len(answer.output)


def test_a_moved_call_computes_no_token_again(tmp_path):
    first, second = engine(), engine()
    asked = request(1, context=50)
    first.submit(asked)
    for _ in range(5):
        first.step()
    ((_, partial),) = first.hand_over(tmp_path)
    moved = take_moved(Path(partial.kv_path))
    assert not Path(partial.kv_path).exists()
    second.submit(continued(asked, partial), moved=moved)
    answer = finish(second)[asked.call_id]
    assert answer.prefilled_tokens == 0
    assert second.counters.prefilled_tokens == 0
    assert second.counters.moved_tokens == moved.length
    assert answer.output.tolist() == alone(asked).output.tolist()


def test_a_call_that_moved_without_its_keys_computes_all_it_had(tmp_path):
    first, second = engine(), engine()
    asked = request(1, context=50)
    first.submit(asked)
    for _ in range(5):
        first.step()
    ((_, partial),) = first.hand_over()
    assert partial.kv_path == ""
    second.submit(continued(asked, partial))
    assert finish(second)[asked.call_id].prefilled_tokens == 50 + len(partial.output) - 1


def test_keys_and_values_of_another_version_are_not_used(tmp_path):
    first, second = engine(), engine()
    second.set_version(1, OTHER)
    asked = request(1)
    first.submit(asked)
    first.step()
    ((_, partial),) = first.hand_over(tmp_path)
    second.submit(continued(asked, partial), moved=take_moved(Path(partial.kv_path)))
    answer = finish(second)[asked.call_id]
    assert second.counters.moved_tokens == 0
    assert [(run.version, run.mixed) for run in answer.versions] == [(0, False), (1, False)]


def test_a_mixed_call_leaves_its_keys_and_values_behind(tmp_path):
    one = engine()
    one.submit(request(1))
    one.step()
    one.set_version(1, OTHER)
    one.step()
    ((_, partial),) = one.hand_over(tmp_path)
    assert partial.kv_path == ""
    assert not list(tmp_path.iterdir())


def test_a_lost_or_broken_file_of_keys_costs_a_prefill_only(tmp_path):
    assert take_moved(tmp_path / "absent") is None
    broken = tmp_path / "broken"
    broken.write_bytes(b"nonsense")
    assert take_moved(broken) is None
    assert not broken.exists()
    assert not write_moved(tmp_path / "no" / "folder", MovedCache(0, torch.zeros(1, 2, 1, 1, 2)))


def test_the_next_call_of_a_path_computes_only_what_is_new_across_forks_too():
    one = engine()
    first = request(1, context=40, length=10)
    one.submit(first)
    answer = finish(one)[first.call_id]
    path = np.concatenate((first.context, answer.output))
    following = np.concatenate((path, [1, 2, 3, 4, 5])).astype(np.int32)
    one.submit(msgspec.structs.replace(first, call_id="n", context=following))
    assert finish(one)["n"].prefilled_tokens == 6  # five new tokens and the last sampled one, never fed before
    fork = np.concatenate((path[:44], [7] * 9)).astype(np.int32)
    one.submit(msgspec.structs.replace(first, call_id="fork", context=fork))
    assert finish(one)["fork"].prefilled_tokens == 9
    one.submit(msgspec.structs.replace(first, call_id="again", context=following))
    assert finish(one)["again"].prefilled_tokens == 1


def test_calls_that_arrive_together_compute_their_common_prefix_once():
    one = engine()
    head = np.random.default_rng(0).integers(0, 48, size=64, dtype=np.int32)
    for number in range(8):
        context = np.concatenate((head, [number, number])).astype(np.int32)
        one.submit(msgspec.structs.replace(request(number), context=context))
    answers = finish(one)
    assert len(answers) == 8
    assert one.counters.prefilled_tokens == 66 + 7 * 2


def test_cached_keys_are_never_given_to_a_new_call_of_another_version():
    one = engine()
    asked = request(1, context=64)
    one.submit(asked)
    finish(one)
    one.set_version(1, OTHER)
    one.submit(msgspec.structs.replace(asked, call_id="new"))
    answer = finish(one)["new"]
    assert answer.prefilled_tokens == 64
    assert answer.output.tolist() == by_hand(asked, OTHER)[0]


def test_keys_are_not_reused_when_other_weights_take_the_same_version_number():
    one = engine()
    asked = request(1, context=64)
    one.submit(asked)
    finish(one)
    one.set_version(0, OTHER)
    one.submit(msgspec.structs.replace(asked, call_id="new"))
    assert finish(one)["new"].output.tolist() == by_hand(asked, OTHER)[0]


def test_the_cache_of_a_call_that_saw_two_versions_is_reused_by_none():
    one = engine()
    asked = request(1, context=64)
    one.submit(asked)
    one.step()
    one.set_version(1, OTHER)
    first = finish(one)[asked.call_id]
    assert [(run.version, run.mixed) for run in first.versions] == [(0, False), (1, True)]
    assert sum(run.count for run in first.versions) == asked.max_tokens
    one.submit(msgspec.structs.replace(asked, call_id="new"))
    assert finish(one)["new"].prefilled_tokens == 64


def test_in_flight_calls_take_the_new_weights_at_once_and_keep_their_keys():
    one = engine()
    asked = request(1, length=12)
    one.submit(asked)
    one.step()
    before = one.counters.prefilled_tokens
    assert one.set_version(1, OTHER) == 1
    answer = finish(one)[asked.call_id]
    assert one.counters.prefilled_tokens == before
    assert answer.output.tolist() != alone(asked).output.tolist()


def test_draining_calls_finish_on_their_weights_and_new_ones_get_the_new():
    one = engine()
    asked = request(1)
    one.submit(asked)
    one.step()
    assert one.set_version(1, OTHER, drain=True) == 1
    one.submit(request(2))
    answers = finish(one)
    assert answers["c1"].output.tolist() == alone(asked).output.tolist()
    assert answers["c1"].versions == (VersionRun(0, 20),)
    assert answers["c2"].versions == (VersionRun(1, 20),)
    assert answers["c2"].output.tolist() == by_hand(request(2), OTHER)[0]


def test_the_end_of_a_drain_moves_the_rest_to_the_current_version():
    one = engine()
    one.submit(request(1))
    one.step()
    one.set_version(1, OTHER, drain=True)
    one.step()
    one.end_drain()
    assert [(run.version, run.mixed) for run in finish(one)["c1"].versions] == [(0, False), (1, True)]


def test_pinned_calls_keep_their_version_through_publications_and_others_never_get_it():
    one = engine()
    one.submit(request(1, pinned_version=0))
    one.step()
    one.set_version(1, OTHER, keep=(0,))
    one.submit(request(2, pinned_version=0))
    one.submit(request(3))
    one.set_version(2, weights(3), keep=(0,))
    answers = finish(one)
    for number, version in ((1, 0), (2, 0), (3, 2)):
        assert answers[f"c{number}"].versions == (VersionRun(version, 20),)
    assert answers["c2"].output.tolist() == alone(request(2)).output.tolist()
    assert set(one.versions) == {0, 2}


def test_a_version_that_no_call_and_no_pin_needs_is_let_go():
    one = engine()
    one.set_version(1, OTHER)
    assert one.versions == (1,)
    with pytest.raises(InvariantError, match="version 0 is not resident"):
        one.submit(request(1, pinned_version=0))


def test_a_call_is_never_served_by_weights_older_than_it_may_be():
    with pytest.raises(InvariantError, match="needs version 3, the cell has 0"):
        engine().submit(request(1, minimum_version=3))


def test_a_stop_id_ends_a_call_and_belongs_to_the_output():
    whole = alone(request(1)).output.tolist()
    answer = alone(request(1, stop_ids=(whole[6],)))
    assert answer.output.tolist() == whole[: whole.index(whole[6]) + 1]
    assert answer.finish is Finish.STOP
    assert alone(request(1)).finish is Finish.LENGTH


def test_an_aborted_call_gives_what_it_has_and_frees_its_place():
    one = engine(running=1)
    one.submit(request(1))
    one.submit(request(2))
    one.step()
    one.abort("c1")
    ((call_id, answer),) = one.step()
    assert (call_id, answer.finish) == ("c1", Finish.ABORT)
    assert 0 < len(answer.output) < 20
    one.submit(request(3))
    one.abort("c3")
    assert [call_id for call_id, _ in one.step()] == ["c3"]
    assert finish(one)["c2"].output.tolist() == alone(request(2)).output.tolist()


def test_aborting_an_unknown_call_does_not_hit_a_later_one_of_that_name():
    one = engine()
    one.abort("c1")
    one.submit(request(1))
    assert finish(one)["c1"].finish is Finish.LENGTH


@pytest.mark.parametrize(("context", "length"), [(0, 5), (120, 9), (5, 0)])
def test_a_call_that_does_not_fit_is_refused_with_its_sizes(context, length):
    with pytest.raises(InvariantError, match=f"{context} context"):
        engine().submit(request(1, context=context, length=length))


def test_calls_are_admitted_by_capacity_in_order_of_arrival():
    one = engine(kv_tokens=100)
    for number in range(4):
        one.submit(request(number, context=20, length=20))
    one.step()
    assert (one.running, one.queued) == (2, 2)
    seen = []
    while not one.is_idle:
        assert one.kv_tokens <= 100
        seen += [call_id for call_id, _ in one.step()]
    assert seen == ["c0", "c1", "c2", "c3"]


def test_a_call_larger_than_the_capacity_still_runs_alone():
    one = engine(kv_tokens=30)
    one.submit(request(1, context=40))
    assert len(finish(one)["c1"].output) == 20


def test_greedy_and_top_k_one_choose_the_same_tokens():
    greedy = alone(request(1, temperature=0.0))
    assert greedy.output.tolist() == alone(request(1, top_k=1)).output.tolist()
    assert set(greedy.behaviour_logprobs.tolist()) == {0.0}


def test_tokens_that_came_without_logprobs_are_refused():
    with pytest.raises(InvariantError, match="2 output tokens"):
        engine().submit(request(1, output=np.array([1, 2], np.int32), versions=(VersionRun(0, 2),)))


def test_hand_over_takes_every_call_running_or_queued():
    one = engine(running=3)
    for number in range(7):
        one.submit(request(number))
    one.step()
    partials = dict(one.hand_over())
    assert sorted(partials) == [f"c{number}" for number in range(7)]
    assert sum(len(partial.output) > 0 for partial in partials.values()) == 3
    assert one.is_idle
