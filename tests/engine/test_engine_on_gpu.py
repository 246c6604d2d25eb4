"""The reference engine on a GPU. The claim there is distributional: logprobs are those of the law, not of one order."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.engine.moved import take_moved
from opengyre.engine.torch_engine import TorchEngine
from opengyre.model.decoder import DecoderConfig, Parameters, forward_hidden, init_parameters, logits_of

pytestmark = pytest.mark.gpu
CONFIG = DecoderConfig(vocab_size=64, hidden_size=32, layers=2, heads=4, kv_heads=2, mlp_size=64, context_tokens=128)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return request.param


def weights(dtype: torch.dtype) -> Parameters:
    drawn = init_parameters(CONFIG, torch.Generator().manual_seed(1))
    return {name: tensor.to("cuda", dtype) for name, tensor in drawn.items()}


def engine(parameters: Parameters, dtype: torch.dtype) -> TorchEngine:
    one = TorchEngine(CONFIG, slots=14, max_running=6, kv_tokens=4096, dtype=dtype, device="cuda")
    one.set_version(0, parameters)
    return one


def request_of(number: int) -> GenerateRequest:
    return GenerateRequest(
        execution_id=f"e{number}",
        call_id=f"c{number}",
        context=np.random.default_rng(number).integers(0, 64, size=5 + 8 * number, dtype=np.int32),
        max_tokens=20,
        temperature=1.0,
        seed=77 + number,
        stop_ids=(),
    )


def finish(one: TorchEngine) -> dict[str, Generation]:
    ended: dict[str, Generation] = {}
    while not one.is_idle:
        ended.update(one.step())
    return ended


def check_logprobs(asked: GenerateRequest, answer: Generation, parameters: Parameters, dtype: torch.dtype) -> None:
    row = torch.from_numpy(np.concatenate((asked.context, answer.output)).astype(np.int64))[None].to("cuda")
    law = torch.log_softmax(logits_of(parameters, forward_hidden(CONFIG, parameters, row)).float(), -1)[0]
    start = len(asked.context)
    expected = law[torch.arange(start - 1, row.shape[1] - 1), row[0, start:]].detach().cpu()
    largest = float((torch.from_numpy(answer.behaviour_logprobs) - expected).abs().max())
    assert largest < (1e-3 if dtype == torch.float32 else 0.2)


def test_behaviour_logprobs_in_a_batch_are_those_of_the_plain_forward(dtype):
    parameters = weights(dtype)
    one = engine(parameters, dtype)
    asked = [request_of(number) for number in range(8)]
    for item in asked:
        one.submit(item)
    answers = finish(one)
    for item in asked:
        check_logprobs(item, answers[item.call_id], parameters, dtype)


def test_a_call_handed_over_with_its_keys_computes_nothing_again(dtype, tmp_path):
    parameters = weights(dtype)
    first, second = engine(parameters, dtype), engine(parameters, dtype)
    asked = request_of(3)
    first.submit(asked)
    for _ in range(5):
        first.step()
    ((_, partial),) = first.hand_over(tmp_path)
    continued = msgspec.structs.replace(
        asked, output=partial.output, behaviour_logprobs=partial.behaviour_logprobs, versions=partial.versions
    )
    second.submit(continued, moved=take_moved(Path(partial.kv_path)))
    answer = finish(second)["c3"]
    assert answer.prefilled_tokens == 0
    check_logprobs(asked, answer, parameters, dtype)


def test_the_next_call_of_a_path_computes_only_what_is_new(dtype):
    one = engine(weights(dtype), dtype)
    asked = request_of(4)
    one.submit(asked)
    answer = finish(one)["c4"]
    longer = np.concatenate((asked.context, answer.output, [1, 2])).astype(np.int32)
    one.submit(msgspec.structs.replace(asked, call_id="next", context=longer))
    assert finish(one)["next"].prefilled_tokens == 3
