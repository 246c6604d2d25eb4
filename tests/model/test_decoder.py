"""The decoder: against a plain implementation, and the cached forward against the whole one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.model.decoder import (
    DecoderConfig,
    KeyValueCache,
    forward_cached,
    forward_hidden,
    init_parameters,
    logits_of,
)

CONFIG = DecoderConfig(vocab_size=30, hidden_size=24, layers=2, heads=6, kv_heads=2, mlp_size=20, context_tokens=48)
PARAMETERS = {
    name: tensor.double() for name, tensor in init_parameters(CONFIG, torch.Generator().manual_seed(3)).items()
}


def plain(tokens: list[int]) -> torch.Tensor:
    """Logits [t, vocab] by loops over heads and positions, as the papers write them."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * weight

    def turn(x: torch.Tensor) -> torch.Tensor:
        turned = torch.empty_like(x)
        half = CONFIG.head_size // 2
        for position in range(len(x)):
            for index in range(half):
                angle = position * CONFIG.rope_theta ** (-2 * index / CONFIG.head_size)
                one, other = x[position, index], x[position, index + half]
                turned[position, index] = one * math.cos(angle) - other * math.sin(angle)
                turned[position, index + half] = other * math.cos(angle) + one * math.sin(angle)
        return turned

    x, head = PARAMETERS["embed"][tokens], CONFIG.head_size
    for layer in range(CONFIG.layers):
        weights = {
            name.split(".", 2)[2]: tensor for name, tensor in PARAMETERS.items() if name.startswith(f"layers.{layer}.")
        }
        parts = (norm(x, weights["attention_norm"]) @ weights["qkv"].T).split(head, -1)
        outputs = []
        for index in range(CONFIG.heads):
            group = index // (CONFIG.heads // CONFIG.kv_heads)
            queries, keys = turn(parts[index]), turn(parts[CONFIG.heads + group])
            values = parts[CONFIG.heads + CONFIG.kv_heads + group]
            scores = (queries @ keys.T / math.sqrt(head)).masked_fill(
                torch.ones(len(tokens), len(tokens)).triu(1).bool(), -math.inf
            )
            outputs.append(scores.softmax(-1) @ values)
        x = x + torch.cat(outputs, -1) @ weights["output"].T
        gate, up = (norm(x, weights["mlp_norm"]) @ weights["gate_up"].T).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ weights["down"].T
    return norm(x, PARAMETERS["norm"]) @ PARAMETERS["embed"].T


def test_the_forward_equals_a_plain_implementation():
    tokens = [3, 29, 0, 7, 7, 12, 5]
    ours = logits_of(PARAMETERS, forward_hidden(CONFIG, PARAMETERS, torch.tensor([tokens])))[0]
    assert float((ours - plain(tokens)).abs().max()) < 1e-11


def test_padding_behind_a_row_changes_nothing_in_it():
    short = torch.tensor([[1, 2, 3]])
    padded = torch.tensor([[1, 2, 3, 9, 9], [4, 5, 6, 7, 8]])
    alone = forward_hidden(CONFIG, PARAMETERS, short)
    assert float((forward_hidden(CONFIG, PARAMETERS, padded)[:1, :3] - alone).abs().max()) < 1e-13


@settings(max_examples=25)
@given(st.data())
def test_the_cached_forward_equals_the_whole_one_for_any_cuts_slots_and_lengths(data):
    count = data.draw(st.integers(1, 4))
    slots = data.draw(st.permutations(range(6)))[:count]
    cache = KeyValueCache(CONFIG, slots=6, dtype=torch.float64)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tokens = torch.randint(0, 30, (count, 40), generator=generator)
    done = [0] * count
    for _ in range(data.draw(st.integers(1, 4))):
        counts = [data.draw(st.integers(1, 10)) for _ in range(count)]
        new = torch.zeros(count, max(counts), dtype=torch.int64)
        for row, length in enumerate(counts):
            new[row, :length] = tokens[row, done[row] : done[row] + length]
        logits = forward_cached(
            CONFIG, PARAMETERS, cache, new, torch.tensor(slots), torch.tensor(done), torch.tensor(counts)
        )
        done = [one + length for one, length in zip(done, counts, strict=True)]
        for row in range(count):
            whole = forward_hidden(CONFIG, PARAMETERS, tokens[row : row + 1, : done[row]])[0, -1]
            assert float((logits[row] - logits_of(PARAMETERS, whole)).abs().max()) < 1e-10


def test_swapped_copied_and_exported_slots_hold_what_they_should():
    cache = KeyValueCache(CONFIG, slots=3, dtype=torch.float64)
    tokens, ones = torch.randint(0, 30, (2, 9), generator=torch.Generator().manual_seed(1)), torch.ones(2, dtype=int)
    forward_cached(CONFIG, PARAMETERS, cache, tokens, torch.tensor([0, 1]), 0 * ones, torch.tensor([9, 5]))
    first, second = cache.export(0, 9), cache.export(1, 5)
    cache.swap(0, 1, one_length=9, other_length=5)
    assert torch.equal(cache.export(1, 9), first)
    assert torch.equal(cache.export(0, 5), second)
    cache.swap(2, 1, one_length=0, other_length=9)
    assert torch.equal(cache.export(2, 9), first)
    cache.load(1, second)
    cache.copy(1, 0, 5)
    assert torch.equal(cache.export(0, 5), second)


def test_keys_of_another_shape_are_refused():
    cache = KeyValueCache(CONFIG, slots=2)
    with pytest.raises(ValueError, match="expected"):
        cache.load(0, torch.zeros(1, 2, 2, 5, 4))
    with pytest.raises(ValueError, match="at most 48"):
        cache.load(0, torch.zeros(2, 2, 2, 49, 4))


def test_too_long_a_row_is_refused_with_both_lengths():
    with pytest.raises(ValueError, match="49 tokens in a row, the policy has 48"):
        forward_hidden(CONFIG, PARAMETERS, torch.zeros(1, 49, dtype=torch.int64))
