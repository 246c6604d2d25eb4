"""Policy losses as plain sums over weighted tokens, so that packing, order and cells cannot change them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from opengyre.algorithm.settings import LossSettings


@dataclass(frozen=True, kw_only=True)
class LossMeasures:
    """Sums over the trained tokens of one batch (the largest ratio for ``ratio_max``).

    Example: on-policy tokens give ``ratio == trained tokens``, ``kl == 0`` and ``truncated == 0``.
    """

    ratio: float
    ratio_max: float
    kl: float
    """Sum of (ratio - 1) - log ratio, an estimate of KL(behaviour, policy) that is never negative."""
    truncated: int
    """Tokens whose weight was capped, masked or clipped."""


def policy_loss(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    *,
    advantages: Tensor,
    weights: Tensor,
    settings: LossSettings,
) -> tuple[Tensor, LossMeasures]:
    """Return the loss, a sum over tokens, and what is reported beside it.

    Args:
        logprobs: [n] under the policy that is trained, with gradient.
        behaviour_logprobs: [n] under the weights and sampling that produced the tokens.
        advantages: [n].
        weights: [n], 1 / T_s; the division by S comes after the reduction over cells.
        settings: Importance weights.

    Source: paper, average inside an execution, then across executions (through ``weights``).
    Choice: `truncated` is min(r, cap) as a constant factor of the log-likelihood; `masked` is r inside
    [floor, cap] and 0 outside; `clipped` is the surrogate with separate lower and upper bounds.

    >>> one = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    >>> loss, _ = policy_loss(one, one, advantages=torch.tensor([1.0, 1, 1, -1]),
    ...     weights=torch.tensor([1 / 3, 1 / 3, 1 / 3, 1]), settings=LossSettings())
    >>> round(float(loss) / 2, 4)
    -1.0
    """
    log_ratio = logprobs - behaviour_logprobs
    ratio = log_ratio.detach().exp()
    if settings.importance == "clipped":
        live = log_ratio.exp()
        bounded = live.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        per_token = -torch.minimum(live * advantages, bounded * advantages)
        changed = (bounded != live) & (bounded * advantages < live * advantages)
    elif settings.importance == "truncated":
        per_token = -ratio.clamp(max=settings.importance_cap) * advantages * logprobs
        changed = ratio > settings.importance_cap
    else:
        changed = (ratio < settings.importance_floor) | (ratio > settings.importance_cap)
        per_token = -torch.where(changed, torch.zeros_like(ratio), ratio) * advantages * logprobs
    measures = LossMeasures(
        ratio=float(ratio.sum()),
        ratio_max=float(ratio.max()) if len(ratio) else 0.0,
        kl=float((ratio - 1 - log_ratio.detach()).sum()),
        truncated=int(changed.sum()),
    )
    return (weights * per_token).sum(), measures
