"""The trainer of one cell: micro-steps add to a gradient sum, the core closes steps.

A gradient sum belongs to one step. The sum is not divided by S, so the sums of several cells add up to the sum that one
cell would have had.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opengyre.algorithm.loss import LossMeasures, policy_loss
from opengyre.algorithm.settings import LossSettings
from opengyre.core.cells import MicroStepResult
from opengyre.core.errors import FileError, InvariantError
from opengyre.core.types import Row
from opengyre.model.decoder import DecoderConfig, Parameters, forward_hidden, logits_of
from opengyre.model.weights import read_tensors, write_tensors
from opengyre.train.optimizer import AdamW, clip
from opengyre.train.reduction import Parts, joined, named_parts, parts_of, sum_in_order
from opengyre.train.settings import OptimizerSettings

BATCH_TOKENS = 2048
"""Padded tokens of one forward-backward at most; 1-2k is the cache sweet spot on CPUs."""
CHECK_TOKENS = 2048
"""Padded tokens of the rows that are checked under an older version, a micro-step."""


@dataclass
class _Batch:
    """Rows as padded tensors; flat arrays over the trainable tokens, row by row."""

    tokens: Tensor
    """[b, t] int64."""
    is_target: Tensor
    """[b, t] bool."""
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    temperatures: Tensor
    versions: Tensor
    mixed: Tensor


def batches_of(rows: Sequence[Row], *, tokens: int = BATCH_TOKENS) -> list[list[Row]]:
    """Return the rows sorted by length, cut so that each padded batch has at most ``tokens`` tokens."""
    cut: list[list[Row]] = []
    for row in sorted(rows, key=lambda item: len(item.tokens)):
        if not cut or len(row.tokens) * (len(cut[-1]) + 1) > tokens:
            cut.append([])
        cut[-1].append(row)
    return cut


def _padded(rows: Sequence[Row], dtype: torch.dtype) -> _Batch:
    longest = max(len(row.tokens) for row in rows)
    tokens = np.zeros((len(rows), longest), np.int64)
    is_target = np.zeros((len(rows), longest), bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = row.tokens
        is_target[index, : len(row.tokens)] = row.trainable

    def flat(values: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(values))

    counts = [row.trained_tokens for row in rows]
    return _Batch(
        tokens=torch.from_numpy(tokens),
        is_target=torch.from_numpy(is_target),
        behaviour=flat([row.behaviour_logprobs[row.trainable] for row in rows]).to(dtype),
        advantages=torch.tensor(np.repeat([row.advantage for row in rows], counts), dtype=dtype),
        weights=flat([row.weight[row.trainable] for row in rows]).to(dtype),
        temperatures=torch.tensor(np.repeat([row.temperature for row in rows], counts), dtype=dtype),
        versions=flat([row.versions[row.trainable] for row in rows]),
        mixed=flat([row.mixed[row.trainable] for row in rows]),
    )


def target_logprobs(
    config: DecoderConfig, parameters: Parameters, tokens: Tensor, is_target: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """Return logprob and entropy (without gradient) of each target token, [n], in row-major order.

    Args:
        config: Shape of the decoder.
        parameters: Weights.
        tokens: [b, t] int64, right-padded.
        is_target: [b, t] bool; never the first token of a row.
        temperatures: [n] of the calls that sampled the targets.
    """
    hidden = forward_hidden(config, parameters, tokens)[:, :-1][is_target[:, 1:]]
    logprobs = torch.log_softmax(logits_of(parameters, hidden) / temperatures[:, None], -1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, tokens[:, 1:][is_target[:, 1:]][:, None])[:, 0], entropy


class Trainer:
    """Weights under training, the gradient sum of the open step, and on the core the optimizer.

    Args:
        config: Shape of the decoder.
        parameters: Weights to start from; copied.
        loss: Loss settings.
        optimizer: Only on the core.
        fixed_order: Keep the gradients of micro-steps apart, so that their sum is the same to the bit whichever cells
            computed them in whichever order.
    """

    def __init__(
        self,
        config: DecoderConfig,
        parameters: Parameters,
        *,
        version: int,
        loss: LossSettings,
        optimizer: OptimizerSettings | None = None,
        fixed_order: bool = False,
    ) -> None:
        self.config = config
        self.version = version
        self._loss = loss
        self._parameters = {name: tensor.clone().requires_grad_() for name, tensor in parameters.items()}
        self._dtype = self._parameters["embed"].dtype
        self._past: dict[int, Parameters] = {version: {name: tensor.clone() for name, tensor in parameters.items()}}
        self._done: dict[str, MicroStepResult] = {}
        self._parts: Parts | None = {} if fixed_order else None
        self._step = -1
        self._optimizer = AdamW(self._parameters, optimizer) if optimizer is not None else None

    @property
    def parameters(self) -> Parameters:
        """A detached view of the weights; do not write to it."""
        return _detached(self._parameters)

    def load(self, version: int, parameters: Parameters, *, keep_versions: int) -> None:
        """Take over a version (satellites); the last ``keep_versions`` stay for the exactness check."""
        with torch.no_grad():
            for name, tensor in self._parameters.items():
                tensor.copy_(parameters[name])
        self._remember(version, keep_versions)

    def note_version(self, version: int, parameters: Parameters, *, keep_versions: int) -> None:
        """Keep a published version for the exactness check, without training on it."""
        self._past[version] = parameters
        for old in sorted(self._past)[: -max(1, keep_versions)]:
            if old != self.version:
                del self._past[old]

    def _remember(self, version: int, keep_versions: int) -> None:
        self.version = version
        copied = {name: tensor.detach().clone() for name, tensor in self._parameters.items()}
        self.note_version(version, copied, keep_versions=keep_versions)

    # -- micro-steps ------------------------------------------------------------------------------------------

    def run_micro_step(self, micro_step_id: str, rows: Sequence[Row], *, step: int) -> MicroStepResult:
        """Add the gradient of the rows to the sum of the step; a repetition changes nothing.

        Raises:
            InvariantError: The weights are not those of the step, or a row is longer than the policy's context.
        """
        longest = max((len(row.tokens) for row in rows), default=0)
        if longest > self.config.context_tokens:
            raise InvariantError(
                f"micro-step {micro_step_id}: a row of {longest} tokens, expected at most {self.config.context_tokens}"
            )
        if step != self.version:
            raise InvariantError(f"micro-step {micro_step_id} of step {step} on weights of version {self.version}")
        if self._step != step:
            self.forget_step(self._step)
            self._step = step
        if micro_step_id in self._done:
            return self._done[micro_step_id]
        started_s = time.monotonic()
        parts = [self._forward_backward(batch) for batch in batches_of(rows)]
        checked, difference = self._check_older(rows)
        result = MicroStepResult(
            seconds=time.monotonic() - started_s,
            tokens=sum(len(row.tokens) for row in rows),
            trained_tokens=sum(row.trained_tokens for row in rows),
            loss=sum(part.loss for part in parts),
            entropy=sum(part.entropy for part in parts),
            kl=sum(part.measures.kl for part in parts),
            ratio=sum(part.measures.ratio for part in parts),
            ratio_max=max((part.measures.ratio_max for part in parts), default=0.0),
            truncated=sum(part.measures.truncated for part in parts),
            checked_tokens=checked + sum(part.checked for part in parts),
            checked_difference=max([difference, *(part.difference for part in parts)]),
        )
        if self._parts is not None:
            self._parts[micro_step_id] = self._take_gradient()
        self._done[micro_step_id] = result
        return result

    def _take_gradient(self) -> Parameters:
        """Return the gradient that has gathered and begin anew."""
        taken = {name: tensor.grad for name, tensor in self._parameters.items() if tensor.grad is not None}
        for tensor in self._parameters.values():
            tensor.grad = None
        return taken

    def _forward_backward(self, rows: Sequence[Row]) -> "_Part":
        batch = _padded(rows, self._dtype)
        logprobs, entropy = target_logprobs(
            self.config, self._parameters, batch.tokens, batch.is_target, batch.temperatures
        )
        loss, measures = policy_loss(
            logprobs, batch.behaviour, advantages=batch.advantages, weights=batch.weights, settings=self._loss
        )
        loss.backward()  # type: ignore[no-untyped-call]
        comparable = (batch.versions == self.version) & ~batch.mixed
        checked, difference = _compare(logprobs.detach(), batch.behaviour, comparable)
        return _Part(float(loss.detach()), float(entropy.sum()), measures, checked, difference)

    @torch.no_grad()
    def _check_older(self, rows: Sequence[Row]) -> tuple[int, float]:
        """Compare behaviour logprobs of a sample of rows under the older weights that sampled them."""
        checked, worst = 0, 0.0
        for version, parameters in self._past.items():
            if version == self.version:
                continue
            eligible = [row for row in rows if bool(np.any(row.trainable & (row.versions == version) & ~row.mixed))]
            if not eligible:
                continue
            batch = _padded(batches_of(eligible, tokens=CHECK_TOKENS // 4)[0], self._dtype)
            logprobs, _ = target_logprobs(self.config, parameters, batch.tokens, batch.is_target, batch.temperatures)
            count, difference = _compare(logprobs, batch.behaviour, (batch.versions == version) & ~batch.mixed)
            checked, worst = checked + count, max(worst, difference)
        return checked, worst

    # -- gradient sums ----------------------------------------------------------------------------------------

    def gradient_sum(self, step: int) -> dict[str, Tensor]:
        """Return the gradient sum of a step: zeros where nothing was added."""
        if step != self._step:
            return {name: torch.zeros_like(tensor) for name, tensor in self._parameters.items()}
        if self._parts is not None:
            return sum_in_order(self._parts, self._parameters)
        return {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in self._parameters.items()
        }

    def hand_in_gradient(self, step: int, path: Path) -> None:
        """Write the gradient sum of a step, or its parts, to a file that the core reads."""
        if self._parts is None:
            tensors = self.gradient_sum(step)
        else:
            tensors = named_parts(self._parts) if step == self._step else {}
        write_tensors(path, tensors, {"step": str(step)})

    def forget_step(self, step: int) -> None:
        """Drop the gradient sum of a step."""
        if step == self._step:
            self._done = {}
            if self._parts is not None:
                self._parts = {}
            self._step = -1
            for tensor in self._parameters.values():
                tensor.grad = None

    # -- the core ---------------------------------------------------------------------------------------------

    def close_step(
        self, step: int, gradient_paths: Sequence[Path], *, executions: int, keep_versions: int, rate: float = 1.0
    ) -> tuple[float, bool]:
        """Add the sums of other cells, divide by S, clip, step; return gradient norm and whether it was empty.

        Paths are added in the order given, after the core's own sum; with ``fixed_order`` micro-steps in the order of
        their ids. ``rate`` is the factor of the learning rate.

        Raises:
            InvariantError: The step is not the next one, or this is not the core.
        """
        if self._optimizer is None:
            raise InvariantError(f"step {step} was to be closed on a cell without the optimizer")
        if step != self.version:
            raise InvariantError(f"step {step} was to be closed on weights of version {self.version}")
        total = self._reduced(step, [_read_gradient(path, step) for path in gradient_paths])
        empty = executions == 0 or all(not bool(tensor.any()) for tensor in total.values())
        norm = 0.0
        if not empty:
            mean = {name: tensor / executions for name, tensor in total.items()}
            norm = clip(mean, self._optimizer.settings.gradient_clip)
            self._optimizer.step(mean, rate=rate)
        self._step = step
        self.forget_step(step)
        self._remember(step + 1, keep_versions)
        return norm, empty

    def _reduced(self, step: int, handed_in: list[Parameters]) -> Parameters:
        """Return the sum over this cell and those that handed in."""
        if self._parts is not None:
            own = self._parts if step == self._step else {}
            return sum_in_order(joined([own, *map(parts_of, handed_in)]), self._parameters)
        total = {name: tensor.clone() for name, tensor in self.gradient_sum(step).items()}
        for tensors in handed_in:
            for name, tensor in tensors.items():
                total[name] += tensor
        return total

    def save_optimizer(self, path: Path) -> None:
        """Write the optimizer state durably."""
        if self._optimizer is None:
            raise InvariantError("a satellite has no optimizer to save")
        write_tensors(path, self._optimizer.state(), {"version": str(self.version)})

    def load_optimizer(self, path: Path) -> None:
        """Read what ``save_optimizer`` wrote.

        Raises:
            FileError: The file is missing or not such a file.
        """
        if self._optimizer is None:
            raise InvariantError("a satellite has no optimizer to load")
        tensors, _ = read_tensors(path)
        try:
            self._optimizer.load(tensors)
        except KeyError as error:
            raise FileError(f"{path}: not an optimizer state of this policy: {error} is missing") from error


@dataclass(frozen=True)
class _Part:
    """What one padded batch gave."""

    loss: float
    entropy: float
    measures: LossMeasures
    checked: int
    difference: float


def _read_gradient(path: Path, step: int) -> Parameters:
    tensors, metadata = read_tensors(path)
    if metadata.get("step") != str(step):
        raise InvariantError(f"{path}: gradient of step {metadata.get('step')}, expected {step}")
    return tensors


def _compare(logprobs: Tensor, behaviour: Tensor, comparable: Tensor) -> tuple[int, float]:
    if not bool(comparable.any()):
        return 0, 0.0
    return int(comparable.sum()), float((logprobs - behaviour)[comparable].abs().max())


def _detached(parameters: Parameters) -> Parameters:
    return {name: tensor.detach() for name, tensor in parameters.items()}
