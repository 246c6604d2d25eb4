"""Supervised training of the embedded policy on batches of rows, data-parallel over a few processes of one thread.

Every process makes and computes its own part of each batch; gradients and target weights are summed over the processes,
so the result is a function of the parts and the number of processes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from opengyre.model.decoder import DecoderConfig, Parameters, forward_hidden, logits_of

SupervisedRow = tuple[list[int], list[float]]
"""Token ids and the weight of each as a target; 0 is no target."""


@dataclass(frozen=True, kw_only=True)
class SupervisedSettings:
    """Optimizer and schedule: warm-up, then cosine to a twentieth.

    Example: ``SupervisedSettings(learning_rate=2e-3, steps=1200)``.
    """

    learning_rate: float
    steps: int
    warm_up_steps: int = 30
    weight_decay: float = 0.05
    gradient_clip: float = 1.0

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step.

        >>> settings = SupervisedSettings(learning_rate=1.0, steps=100, warm_up_steps=10)
        >>> round(settings.rate_at(0), 3), round(settings.rate_at(100), 3)
        (0.1, 0.05)
        """
        warm = min(1.0, (step + 1) / self.warm_up_steps)
        return self.learning_rate * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / self.steps)))


def batches_of(rows: Sequence[SupervisedRow], *, tokens: int) -> list[list[SupervisedRow]]:
    """Return rows sorted by length and cut into batches of at most ``tokens`` padded tokens."""
    batches: list[list[SupervisedRow]] = []
    for row in sorted(rows, key=lambda item: len(item[0])):
        if not batches or len(row[0]) * (len(batches[-1]) + 1) > tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def train_supervised(
    config: DecoderConfig,
    parameters: Parameters,
    batches: Iterable[Sequence[SupervisedRow]],
    settings: SupervisedSettings,
    *,
    processes: int = 1,
    progress: Callable[[int, float], None] | None = None,
) -> Parameters:
    """Train and return the parameters; the mean is over the target weights of the whole batch.

    Args:
        config: Shape of the decoder.
        parameters: Fresh weights, the same in every process.
        batches: This process's part of each batch; every process has as many.
        settings: Optimizer and schedule.
        processes: How many share the work; with several, a gloo process group must stand.
        progress: Called with the steps done and the loss.
    """
    trained = {name: tensor.clone().requires_grad_() for name, tensor in parameters.items()}
    tensors = list(trained.values())
    optimizer = torch.optim.AdamW(
        tensors, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay, foreach=True
    )
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = _backward(config, trained, batch)
        sums = torch.tensor([loss, sum(sum(row[1]) for row in batch)])
        _divide_gradients(tensors, sums, is_shared=processes > 1)
        torch.nn.utils.clip_grad_norm_(tensors, settings.gradient_clip)
        for group in optimizer.param_groups:
            group["lr"] = settings.rate_at(step)
        optimizer.step()
        if progress is not None:
            progress(step + 1, float(sums[0] / sums[1]))
    return {name: tensor.detach() for name, tensor in trained.items()}


def _backward(config: DecoderConfig, parameters: Parameters, rows: Sequence[SupervisedRow]) -> float:
    """Add the gradient of the weighted sum over rows and return that sum."""
    longest = max(len(ids) for ids, _ in rows)
    tokens = np.zeros((len(rows), longest), np.int64)
    weights = np.zeros((len(rows), longest), np.float32)
    for index, (ids, marks) in enumerate(rows):
        tokens[index, : len(ids)] = ids
        weights[index, : len(ids)] = marks
    ids_tensor, weight = torch.from_numpy(tokens), torch.from_numpy(weights)
    mask = weight > 0
    hidden = forward_hidden(config, parameters, ids_tensor)[:, :-1][mask[:, 1:]]
    logprobs = torch.log_softmax(logits_of(parameters, hidden), -1)
    chosen = logprobs.gather(1, ids_tensor[:, 1:][mask[:, 1:]][:, None])[:, 0]
    loss = -(chosen * weight[:, 1:][mask[:, 1:]]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _divide_gradients(tensors: Sequence[torch.Tensor], sums: torch.Tensor, *, is_shared: bool) -> None:
    """Sum gradients, losses and weights over the processes in one message; divide the gradients by the weights.

    Args:
        tensors: Parameters with gradients.
        sums: [2] loss and target weight of this process; becomes those of all.
        is_shared: Whether there are other processes.
    """
    parts = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in tensors]
    flat = torch.cat([*(part.reshape(-1) for part in parts), sums])
    if is_shared:
        dist.all_reduce(flat)
        sums.copy_(flat[-2:])
    flat /= sums[1]
    start = 0
    for tensor in tensors:
        tensor.grad = flat[start : start + tensor.numel()].view_as(tensor)
        start += tensor.numel()
