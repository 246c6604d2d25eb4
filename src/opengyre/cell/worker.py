"""The process of one cell that computes: ``python -m opengyre.cell.worker FD``, one torch thread."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from opengyre.cell.loop import serve
from opengyre.cell.mode import Cell
from opengyre.cell.wire import CloseStep, Start
from opengyre.core.cells import MicroStepResult, StepResult, WeightsRef
from opengyre.core.types import Row
from opengyre.engine.moved import MovedCache, take_moved
from opengyre.engine.torch_engine import TorchEngine
from opengyre.model.decoder import Parameters
from opengyre.model.weights import read_version, write_version
from opengyre.train.trainer import Trainer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchCell(Cell[Parameters, MovedCache]):
    """A cell with the reference engine and the trainer.

    Example: ``TorchCell(start)`` serves calls in rollout mode.
    """

    def __init__(self, start: Start) -> None:
        settings = start.settings
        self._dtype = _DTYPES[settings.dtype]
        config, parameters = read_version(start.weights)
        engine = TorchEngine(
            config,
            slots=settings.slots,
            max_running=settings.max_running,
            kv_tokens=settings.kv_tokens,
            dtype=self._dtype,
        )
        super().__init__(start, engine)
        engine.set_version(start.weights.version, self._for_rollout(parameters))
        for reference in start.pinned:
            if reference.version != start.weights.version:
                engine.add_version(reference.version, self._read(reference, is_current=False))
        self.trainer = Trainer(
            config,
            parameters,
            version=start.weights.version,
            loss=settings.loss,
            optimizer=settings.optimizer,
            fixed_order=settings.fixed_order,
        )
        if start.optimizer_path:
            self.trainer.load_optimizer(Path(start.optimizer_path))

    def _for_rollout(self, parameters: Parameters) -> Parameters:
        return {name: tensor.detach().to(self._dtype) for name, tensor in parameters.items()}

    def _take_moved(self, path: Path) -> MovedCache | None:
        return take_moved(path)

    def _read(self, reference: WeightsRef, *, is_current: bool) -> Parameters:
        _, parameters = read_version(reference)
        if is_current:
            self.trainer.note_version(reference.version, parameters, keep_versions=self.settings.keep_versions)
        return self._for_rollout(parameters)

    def _load_training(self, weights: WeightsRef) -> None:
        if self.trainer.version != weights.version:
            _, parameters = read_version(weights)
            self.trainer.load(weights.version, parameters, keep_versions=self.settings.keep_versions)

    def run_micro_step(self, micro_step_id: str, rows: Sequence[Row], *, step: int) -> MicroStepResult:
        """Forward-backward; adds to the gradient sum of the step."""
        return self.trainer.run_micro_step(micro_step_id, rows, step=step)

    def hand_in_gradient(self, step: int) -> str:
        """Write the gradient sum to the shared folder."""
        path = Path(self.settings.gradient_folder) / f"gradient-{step:05d}-{self.cell_id}-{os.getpid()}"
        self.trainer.hand_in_gradient(step, path)
        return str(path)

    def forget_step(self, step: int) -> None:
        """Drop the gradient sum of a step."""
        self.trainer.forget_step(step)

    def close_step(self, request: CloseStep) -> StepResult:
        """Take the optimizer step; optimizer state first, then weights, both durable before the answer."""
        started_s = time.monotonic()
        settings = self.settings
        norm, empty = self.trainer.close_step(
            request.step,
            [Path(path) for path in request.gradient_paths],
            executions=request.executions,
            keep_versions=settings.keep_versions,
            rate=request.rate,
        )
        version = self.trainer.version
        name = f"v{version:05d}-{settings.incarnation}.safetensors"
        self.trainer.save_optimizer(Path(settings.optimizer_folder) / name)
        weights = write_version(
            Path(settings.weights_folder) / name,
            self.trainer.config,
            self.trainer.parameters,
            version=version,
            incarnation=settings.incarnation,
        )
        return StepResult(weights=weights, gradient_norm=norm, empty=empty, seconds=time.monotonic() - started_s)


def main(descriptor: int) -> int:
    """Serve the driver on an inherited socket."""
    torch.set_num_threads(1)
    return serve(descriptor, TorchCell)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
