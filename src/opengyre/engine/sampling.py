"""Sampling with counter-based noise: a token depends on (call seed, position) and the law, on nothing else.

So a call that moves between cells, or shares its batch with other calls, samples what it would have sampled alone.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform_draws(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one draw in [0, 1) for each (seed, position), [b] float64.

    Choice: two rounds of the splitmix64 finaliser over seed and position; it is a bijection of the counter, needs no
    state and vectorises.

    >>> seeds, positions = np.array([7, 7, 8], np.uint64), np.array([0, 1, 0], np.uint64)
    >>> draws = uniform_draws(seeds, positions)
    >>> bool(((draws >= 0) & (draws < 1)).all()), len(set(draws.tolist()))
    (True, 3)
    """
    with np.errstate(over="ignore"):
        state = _mixed(seeds + _GOLDEN)
        state = _mixed(state ^ ((positions + np.uint64(1)) * _GOLDEN))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def restrict(logits: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return logits [b, v] with everything outside each row's top-k and nucleus at -inf.

    Args:
        logits: [b, v], already divided by the temperature.
        top_p: [b], 1 = off.
        top_k: [b] int64, 0 = off.
    """
    ordered, order = logits.sort(-1, descending=True)
    mass = torch.softmax(ordered, -1).cumsum(-1)
    rank = torch.arange(logits.shape[-1], device=logits.device)[None]
    beyond_p = (mass - torch.softmax(ordered, -1)) >= top_p[:, None]
    beyond_k = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    removed = torch.zeros_like(beyond_p).scatter(-1, order, beyond_p | beyond_k)
    return logits.masked_fill(removed, -torch.inf)


def sample(
    logits: Tensor,
    *,
    temperatures: Tensor,
    draws: NDArray[np.float64],
    top_p: Tensor | None = None,
    top_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return sampled ids [b] int64 and their logprobs [b] under the very law they were drawn from.

    Args:
        logits: [b, v].
        temperatures: [b]; 0 means greedy, whose law puts probability 1 on the largest logit (logprob 0).
        draws: [b] float64 in [0, 1).
        top_p: [b] or None where no row restricts.
        top_k: [b] int64 or None where no row restricts.
    """
    greedy = temperatures == 0
    scaled = logits / torch.where(greedy, torch.ones_like(temperatures), temperatures)[:, None].to(logits.dtype)
    if top_p is not None and top_k is not None:
        scaled = restrict(scaled, top_p.to(scaled.dtype), top_k)
    logprobs = torch.log_softmax(scaled, -1)
    cumulative = logprobs.double().exp().cumsum(-1)
    targets = torch.from_numpy(draws).to(logits.device)[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    if bool(greedy.any()):
        ids = torch.where(greedy, logits.argmax(-1), ids)
    chosen = logprobs.gather(-1, ids[:, None])[:, 0]
    return ids, torch.where(greedy, torch.zeros_like(chosen), chosen)
