"""Supervised training of the embedded policy on batches of rows, data-parallel over a few processes of one thread.

Every process sees every batch and computes its share of the rows; gradients are summed, so the result is a function of
the batches and the number of processes.
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
    rank: int = 0,
    processes: int = 1,
    progress: Callable[[int, float], None] | None = None,
) -> Parameters:
    """Train and return the parameters; the mean is over the target weights of the whole batch.

    Args:
        config: Shape of the decoder.
        parameters: Fresh weights, the same in every process.
        batches: The same batches in every process.
        settings: Optimizer and schedule.
        rank: This process; with several, a gloo process group must stand.
        processes: How many share the work.
        progress: Called with the steps done and this process's share of the loss.
    """
    trained = {name: tensor.clone().requires_grad_() for name, tensor in parameters.items()}
    tensors = list(trained.values())
    optimizer = torch.optim.AdamW(
        tensors, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay, foreach=True
    )
    for step, batch in enumerate(batches):
        ordered = sorted(batch, key=lambda row: len(row[0]))
        total = sum(sum(row[1]) for row in ordered)
        optimizer.zero_grad()
        loss = _backward(config, trained, ordered[rank::processes], total)
        if processes > 1:
            _sum_gradients(tensors)
        torch.nn.utils.clip_grad_norm_(tensors, settings.gradient_clip)
        for group in optimizer.param_groups:
            group["lr"] = settings.rate_at(step)
        optimizer.step()
        if progress is not None:
            progress(step + 1, loss * processes)
    return {name: tensor.detach() for name, tensor in trained.items()}


def _backward(config: DecoderConfig, parameters: Parameters, rows: Sequence[SupervisedRow], total: float) -> float:
    """Add the gradient of this process's rows and return their share of the loss."""
    if not rows:
        return 0.0
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
    loss = -(chosen * weight[:, 1:][mask[:, 1:]]).sum() / total
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _sum_gradients(tensors: Sequence[torch.Tensor]) -> None:
    """Sum the gradients over the processes in one message."""
    parts = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in tensors]
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat)
    start = 0
    for tensor in tensors:
        tensor.grad = flat[start : start + tensor.numel()].view_as(tensor)
        start += tensor.numel()
