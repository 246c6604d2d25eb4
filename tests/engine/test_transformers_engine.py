"""Models of transformers behind the engine: token for token what the model's own forward samples."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from opengyre.core.errors import FileError
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import VersionRun
from opengyre.engine.moved import take_moved
from opengyre.engine.sampling import uniform_draws
from opengyre.engine.transformers_engine import TransformersEngine, load_model, weights_of

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def tiny(kind: str, seed: int = 0):
    torch.manual_seed(seed)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=12)).eval()


def engine(model, **changes) -> TransformersEngine:
    sizes = {"context_tokens": 120, "slots": 14, "max_running": 6, "kv_tokens": 4096} | changes
    one = TransformersEngine(model, **sizes)
    one.set_version(0, weights_of(model))
    return one


def request(number: int, *, context: int = 20, length: int = 16) -> GenerateRequest:
    return GenerateRequest(
        execution_id=f"e{number}",
        call_id=f"c{number}",
        context=np.random.default_rng(number).integers(0, 61, size=context, dtype=np.int32),
        max_tokens=length,
        temperature=0.9,
        seed=77 + number,
        stop_ids=(),
    )


def finish(one: TransformersEngine) -> dict[str, Generation]:
    ended: dict[str, Generation] = {}
    for _ in range(1000):
        if one.is_idle:
            return ended
        ended.update(one.step())
    raise AssertionError("the engine does not come to an end")


@torch.no_grad()
def by_hand(model, asked: GenerateRequest) -> tuple[list[int], list[float]]:
    """Sample with the model's own forward, without cache or batch, inverse cumulative by numpy."""
    tokens, logprobs = asked.context.tolist(), []
    for position in range(asked.max_tokens):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
        law = torch.softmax(logits / asked.temperature, -1).numpy()
        draw = uniform_draws(np.array([asked.seed], np.uint64), np.array([position], np.uint64))[0]
        tokens.append(int(np.searchsorted(law.cumsum(), draw * law.sum(), side="right")))
        logprobs.append(float(np.log(law[tokens[-1]])))
    return tokens[len(asked.context) :], logprobs


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("prefill", [5, 4096])
def test_calls_of_any_length_in_one_batch_sample_what_the_model_samples_alone(kind, prefill):
    model = tiny(kind)
    one = engine(model, prefill_tokens=prefill)
    asked = [request(number, context=3 + 9 * number, length=10 + number) for number in range(8)]
    for item in asked:
        one.submit(item)
    answers = finish(one)
    for item in asked:
        tokens, logprobs = by_hand(model, item)
        assert answers[item.call_id].output.tolist() == tokens
        np.testing.assert_allclose(answers[item.call_id].behaviour_logprobs, logprobs, atol=1e-5)


def test_the_next_call_of_a_path_computes_only_what_is_new_and_samples_the_same():
    model = tiny("llama")
    one = engine(model)
    first = request(1, context=40)
    one.submit(first)
    answer = finish(one)["c1"]
    longer = np.concatenate((first.context, answer.output, [1, 2, 3])).astype(np.int32)
    following = msgspec.structs.replace(first, call_id="next", context=longer)
    one.submit(following)
    after = finish(one)["next"]
    assert after.prefilled_tokens == 4  # three new ones and the last sampled one, never fed before
    assert after.output.tolist() == by_hand(model, following)[0]


def test_a_call_handed_over_with_its_keys_computes_nothing_again(tmp_path):
    model = tiny("qwen3")
    first, second = engine(model), engine(model)
    asked = request(1, context=30)
    first.submit(asked)
    for _ in range(5):
        first.step()
    ((_, partial),) = first.hand_over(tmp_path)
    continued = msgspec.structs.replace(
        asked, output=partial.output, behaviour_logprobs=partial.behaviour_logprobs, versions=partial.versions
    )
    second.submit(continued, moved=take_moved(Path(partial.kv_path)))
    answer = finish(second)["c1"]
    assert answer.prefilled_tokens == 0
    assert answer.output.tolist() == by_hand(model, asked)[0]


def test_two_versions_share_one_model_and_calls_get_the_weights_they_are_served_by():
    model, other = tiny("llama"), tiny("llama", seed=5)
    one = engine(model)
    one.submit(msgspec.structs.replace(request(1), pinned_version=0))
    one.step()
    one.set_version(1, weights_of(other), keep=(0,))
    one.submit(request(2))
    answers = finish(one)
    assert answers["c1"].output.tolist() == by_hand(model, request(1))[0]
    assert answers["c2"].output.tolist() == by_hand(other, request(2))[0]
    assert answers["c2"].versions == (VersionRun(1, 16),)


def test_bfloat16_serves_and_its_logprobs_are_those_of_the_law_that_was_drawn_from():
    model = tiny("llama").to(torch.bfloat16)
    one = engine(model)
    asked = request(1)
    one.submit(asked)
    answer = finish(one)["c1"]
    row = torch.from_numpy(np.concatenate((asked.context, answer.output)).astype(np.int64))[None]
    with torch.no_grad():
        law = torch.log_softmax(model(input_ids=row, use_cache=False).logits[0].float() / 0.9, -1)
    expected = law[torch.arange(19, 35), row[0, 20:]]
    assert float((torch.from_numpy(answer.behaviour_logprobs) - expected).abs().max()) < 0.2


def test_a_saved_model_is_loaded_and_a_folder_without_one_is_refused_in_one_line(tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path / "model")
    one = engine(load_model(tmp_path / "model"))
    one.submit(request(1))
    assert finish(one)["c1"].output.tolist() == by_hand(model, request(1))[0]
    with pytest.raises(FileError, match="not a causal language model") as refused:
        load_model(tmp_path / "absent")
    assert "\n" not in str(refused.value)


def test_models_that_do_not_attend_to_everything_are_refused():
    sliding = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=8))
    with pytest.raises(FileError, match=r"sliding_attention.*expected full attention"):
        engine(sliding)
    with pytest.raises(FileError, match="128 positions, expected at least 500"):
        engine(tiny("llama"), context_tokens=500)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_logprobs_agree_with_the_model_s_own_forward(dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    model = tiny("llama").to("cuda", dtype)
    one = engine(model)
    asked = [request(number, context=3 + 9 * number) for number in range(6)]
    for item in asked:
        one.submit(item)
    answers = finish(one)
    for item in asked:
        output = answers[item.call_id].output
        row = torch.from_numpy(np.concatenate((item.context, output)).astype(np.int64))[None].to("cuda")
        with torch.no_grad():
            law = torch.log_softmax(model(input_ids=row, use_cache=False).logits[0].float() / 0.9, -1)
        start = len(item.context)
        expected = law[torch.arange(start - 1, row.shape[1] - 1), row[0, start:]].cpu()
        largest = float((torch.from_numpy(answers[item.call_id].behaviour_logprobs) - expected).abs().max())
        assert largest < (1e-3 if dtype == torch.float32 else 0.2)
