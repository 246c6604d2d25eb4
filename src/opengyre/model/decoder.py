"""A Llama-shaped decoder of our own, as functions over a flat dict of tensors.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied head. It computes in the number format of its weights
everywhere, fp64 included, so that exactness can be tested to 1e-12.

In memory the projections are fused (``layers.0.qkv``, ``layers.0.gate_up``); files carry Hugging Face names.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

Parameters = dict[str, Tensor]
"""Fused name to tensor."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder.

    >>> DecoderConfig(vocab_size=100, hidden_size=32, layers=2, heads=4, kv_heads=2, mlp_size=64).head_size
    8
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    mlp_size: int
    context_tokens: int = 1024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in fp32."""
        return self.layers * 2 * self.kv_heads * self.head_size * 4


def init_parameters(config: DecoderConfig, generator: torch.Generator) -> Parameters:
    """Return fresh fp32 parameters.

    Standard deviation 1/sqrt(width) instead of 0.02, and queries that start aligned with keys: at this size heads that
    copy form only then (measured, ``docs/embedded-job.md``).
    """

    def normal(rows: int, columns: int, std: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * std

    width, head, kv = config.hidden_size, config.head_size, config.kv_heads
    std = width**-0.5
    parameters: Parameters = {"embed": normal(config.vocab_size, width, 0.05), "norm": torch.ones(width)}
    for layer in range(config.layers):
        keys = normal(kv * head, width, std)
        repeated = keys.view(kv, head, width).repeat_interleave(config.heads // kv, 0).reshape(-1, width)
        queries = 0.7 * repeated + 0.7 * normal(config.heads * head, width, std)
        values = normal(kv * head, width, std)
        prefix = f"layers.{layer}."
        parameters[prefix + "attention_norm"] = torch.ones(width)
        parameters[prefix + "qkv"] = torch.cat((queries, keys, values))
        parameters[prefix + "output"] = normal(width, config.heads * head, 0.5 * std)
        parameters[prefix + "mlp_norm"] = torch.ones(width)
        parameters[prefix + "gate_up"] = normal(2 * config.mlp_size, width, std)
        parameters[prefix + "down"] = normal(width, config.mlp_size, 0.5 * config.mlp_size**-0.5)
    return parameters


_TABLES: dict[tuple[int, int, float, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}


def rotary_table(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each [context_tokens, head_size]; computed in fp64 and cached by shape."""
    key = (config.context_tokens, config.head_size, config.rope_theta, dtype, device)
    if key not in _TABLES:
        half = torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size
        angles = torch.outer(torch.arange(config.context_tokens, dtype=torch.float64), config.rope_theta**-half)
        angles = torch.cat((angles, angles), -1)
        _TABLES[key] = (angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device))
    return _TABLES[key]


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary positions to heads [..., head_size]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cosine + turned * sine


def normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in the number format of x."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def split_heads(config: DecoderConfig, qkv: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries, rotated keys and values of fused [b, t, (h + 2 kv) * d] as [b, heads, t, d]."""
    batch, length, _ = qkv.shape
    heads, kv = config.heads, config.kv_heads
    parts = qkv.view(batch, length, heads + 2 * kv, config.head_size).transpose(1, 2)
    turned = rotate(parts[:, : heads + kv], cosine, sine)
    return turned[:, :heads], turned[:, heads:], parts[:, heads + kv :]


def mlp(config: DecoderConfig, parameters: Parameters, layer: int, x: Tensor) -> Tensor:
    """Return x plus the SwiGLU block of a layer."""
    prefix = f"layers.{layer}."
    fused = functional.linear(
        normalise(x, parameters[prefix + "mlp_norm"], config.norm_eps), parameters[prefix + "gate_up"]
    )
    gate, up = fused.chunk(2, -1)
    return x + functional.linear(functional.silu(gate) * up, parameters[prefix + "down"])


def forward_hidden(config: DecoderConfig, parameters: Parameters, tokens: Tensor) -> Tensor:
    """Return final hidden states [b, t, hidden] of right-padded rows [b, t] int64; gradients flow to the parameters."""
    length = tokens.shape[1]
    if length > config.context_tokens:
        raise ValueError(f"{length} tokens in a row, the policy has {config.context_tokens} positions")
    x = functional.embedding(tokens, parameters["embed"])
    cosine, sine = rotary_table(config, x.dtype, x.device)
    cosine, sine = cosine[:length], sine[:length]
    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        hidden = normalise(x, parameters[prefix + "attention_norm"], config.norm_eps)
        qkv = functional.linear(hidden, parameters[prefix + "qkv"])
        queries, keys, values = split_heads(config, qkv, cosine, sine)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        merged = attended.transpose(1, 2).reshape(*tokens.shape, config.hidden_size)
        x = x + functional.linear(merged, parameters[prefix + "output"])
        x = mlp(config, parameters, layer, x)
    return normalise(x, parameters["norm"], config.norm_eps)


def logits_of(parameters: Parameters, hidden: Tensor) -> Tensor:
    """Return logits [..., vocab] of hidden states: the head is the embedding."""
    return functional.linear(hidden, parameters["embed"])


class CacheShape(Protocol):
    """The sizes of a decoder that its cache depends on; ``DecoderConfig`` has them."""

    @property
    def layers(self) -> int:
        """Layers with keys and values."""
        ...

    @property
    def kv_heads(self) -> int:
        """Key and value heads of a layer."""
        ...

    @property
    def context_tokens(self) -> int:
        """Longest sequence."""
        ...

    @property
    def head_size(self) -> int:
        """Width of a head."""
        ...


class KeyValueCache:
    """Keys and values of up to ``slots`` sequences of up to ``context_tokens`` tokens.

    Example: ``KeyValueCache(config, slots=8)`` holds ``keys[layer]`` as [slots, kv_heads, context_tokens, head_size].
    """

    def __init__(
        self,
        config: CacheShape,
        *,
        slots: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (slots, config.kv_heads, config.context_tokens, config.head_size)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one slot to another."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def swap(self, one: int, other: int, *, one_length: int, other_length: int) -> None:
        """Exchange the first tokens of two slots."""
        if not other_length:
            self.copy(one, other, one_length)
            return
        if not one_length:
            self.copy(other, one, other_length)
            return
        length = max(one_length, other_length)
        for tensor in (*self.keys, *self.values):
            kept = tensor[one, :, :length].clone()
            tensor[one, :, :length] = tensor[other, :, :length]
            tensor[other, :, :length] = kept

    def export(self, slot: int, length: int) -> Tensor:
        """Return [layers, 2, kv_heads, length, head_size]: a copy of a slot's first tokens."""
        return torch.stack(
            [
                torch.stack((keys[slot, :, :length], values[slot, :, :length]))
                for keys, values in zip(self.keys, self.values, strict=True)
            ]
        )

    def load(self, slot: int, block: Tensor) -> None:
        """Write what ``export`` gave into a slot.

        Raises:
            ValueError: The block is not one of this shape of decoder.
        """
        kv_heads, room, head = self.keys[0].shape[1:]
        length = block.shape[3] if block.ndim == 5 else 0
        expected = (len(self.keys), 2, kv_heads, length, head)
        if block.shape != expected or length > room:
            raise ValueError(f"keys and values of shape {tuple(block.shape)}, expected {expected}, at most {room}")
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            keys[slot, :, :length] = block[layer, 0]
            values[slot, :, :length] = block[layer, 1]


@torch.no_grad()
def forward_cached(
    config: DecoderConfig,
    parameters: Parameters,
    cache: KeyValueCache,
    tokens: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
) -> Tensor:
    """Extend cached sequences and return the logits behind their last new token, [b, vocab].

    Args:
        config: Shape of the decoder.
        parameters: Weights.
        cache: Written in place.
        tokens: [b, t] int64, right-padded new tokens.
        slots: [b] int64, a slot a sequence, no slot twice; neighbouring slots in order are read without a copy.
        starts: [b] int64, tokens already cached.
        counts: [b] int64, new tokens, at least 1.
    """
    batch, length = tokens.shape
    device = tokens.device
    positions = starts[:, None] + torch.arange(length, device=device)[None]
    top = int((starts + counts).max())
    x = functional.embedding(tokens, parameters["embed"])
    cosine, sine = rotary_table(config, x.dtype, x.device)
    safe = positions.clamp(max=config.context_tokens - 1)
    cosine, sine = cosine[safe][:, None], sine[safe][:, None]
    allowed = torch.arange(top, device=device)[None, None, None, :] <= positions[:, None, :, None]
    bias = torch.zeros(allowed.shape, dtype=x.dtype, device=device).masked_fill_(~allowed, -math.inf)
    first = first_of_run(slots)
    valid = torch.arange(length, device=device)[None] < counts[:, None]
    slot_index, position_index = slots[:, None].expand(batch, length)[valid], positions[valid]
    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        hidden = normalise(x, parameters[prefix + "attention_norm"], config.norm_eps)
        qkv = functional.linear(hidden, parameters[prefix + "qkv"])
        queries, keys, values = split_heads(config, qkv, cosine, sine)
        cache.keys[layer][slot_index, :, position_index] = keys.transpose(1, 2)[valid]
        cache.values[layer][slot_index, :, position_index] = values.transpose(1, 2)[valid]
        all_keys = rows_of(cache.keys[layer][:, :, :top], slots, first)
        all_values = rows_of(cache.values[layer][:, :, :top], slots, first)
        x = x + functional.linear(_attend(config, queries, all_keys, all_values, bias), parameters[prefix + "output"])
        x = mlp(config, parameters, layer, x)
    last = x[torch.arange(batch, device=device), counts - 1]
    return logits_of(parameters, normalise(last, parameters["norm"], config.norm_eps))


def first_of_run(slots: Tensor) -> int | None:
    """Return the first slot if they are neighbours in order, else None."""
    numbers = slots.tolist()
    return numbers[0] if numbers == list(range(numbers[0], numbers[0] + len(numbers))) else None


def rows_of(cached: Tensor, slots: Tensor, first: int | None) -> Tensor:
    """Return rows of [slots, ...]: a view if they are neighbours from ``first`` on, else a copy."""
    return cached.index_select(0, slots) if first is None else cached[first : first + len(slots)]


def _attend(config: DecoderConfig, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Return attention output [b, t, hidden]; with one query the groups are folded into the query axis (no repeat)."""
    batch, _, length, _ = queries.shape
    if length == 1:
        group = config.heads // config.kv_heads
        folded = queries.reshape(batch, config.kv_heads, group, config.head_size)
        mask = bias.expand(batch, 1, group, bias.shape[-1])
        attended = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        return attended.reshape(batch, 1, config.hidden_size)
    attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, enable_gqa=True)
    return attended.transpose(1, 2).reshape(batch, length, config.hidden_size)
