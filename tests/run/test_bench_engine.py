"""The two engines that the benchmark sets side by side do the same work."""

import pytest
import torch

from opengyre.engine.torch_engine import TorchEngine
from opengyre.model.decoder import DecoderConfig, init_parameters
from opengyre.run.bench_engine import CASES, Case, _decode_rate, _requests
from opengyre.run.bench_transformers import engine_of

CONFIG = DecoderConfig(
    vocab_size=97,
    hidden_size=32,
    layers=3,
    heads=4,
    kv_heads=2,
    mlp_size=48,
    rope_theta=100_000.0,
    norm_eps=1e-5,
    context_tokens=160,
)


def outputs(engine) -> dict[str, list[int]]:
    for request in _requests(CONFIG, 4, length=24):
        engine.submit(request)
    ended = {}
    while not engine.is_idle:
        ended.update(engine.step())
    return {call_id: answer.output.tolist() for call_id, answer in ended.items()}


def test_a_transformers_model_with_the_decoder_s_weights_samples_the_decoder_s_tokens():
    parameters = init_parameters(CONFIG, torch.Generator().manual_seed(3))
    ours = TorchEngine(CONFIG, slots=9, max_running=4, kv_tokens=1 << 16)
    ours.set_version(0, parameters)
    assert outputs(ours) == outputs(engine_of(CONFIG, parameters, 4))


def test_the_rate_counts_the_tokens_behind_the_prefill():
    case = Case(config=CONFIG, batches=(2,), length=6, repeats=1)
    engine = engine_of(CONFIG, init_parameters(CONFIG, torch.Generator().manual_seed(3)), 2)
    assert _decode_rate(engine, case, 2) > 0
    assert engine.counters.sampled_tokens == 2 * 6


@pytest.mark.parametrize("name", list(CASES))
def test_a_shape_is_called_what_it_has(name):
    config = CASES[name].config
    layer = config.hidden_size * (config.hidden_size * 2 + 2 * config.kv_heads * config.head_size + 3 * config.mlp_size)
    total = config.vocab_size * config.hidden_size + config.layers * layer
    assert total / 1e6 == pytest.approx(float(name.removesuffix("M")), rel=0.1)
