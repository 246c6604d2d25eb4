"""A version is number, incarnation and checksum: a cell never serves other weights than those it was told to."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from opengyre.algorithm.settings import LossSettings
from opengyre.cell.wire import CellSettings, Generate, Start
from opengyre.cell.worker import TorchCell
from opengyre.core.cells import WeightsRef
from opengyre.core.errors import FileError
from opengyre.core.events import Mode
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import VersionRun
from opengyre.model.decoder import DecoderConfig, init_parameters
from opengyre.model.weights import write_version

CONFIG = DecoderConfig(vocab_size=64, hidden_size=16, layers=1, heads=2, kv_heads=1, mlp_size=16, context_tokens=128)


def weights(folder: Path, version: int, seed: int, *, incarnation: int = 0) -> WeightsRef:
    parameters = init_parameters(CONFIG, torch.Generator().manual_seed(seed))
    path = folder / f"v{version}-{incarnation}.safetensors"
    return write_version(path, CONFIG, parameters, version=version, incarnation=incarnation)


def cell(folder: Path, reference: WeightsRef) -> TorchCell:
    settings = CellSettings(
        slots=20,
        max_running=8,
        kv_tokens=4096,
        context_tokens=128,
        device="cpu",
        dtype="float32",
        keep_versions=3,
        drain=False,
        loss=LossSettings(),
        optimizer=None,
        weights_folder=str(folder),
        optimizer_folder=str(folder),
        gradient_folder=str(folder),
        incarnation=0,
    )
    return TorchCell(Start(cell_id=1, settings=settings, weights=reference))


def ask(one: TorchCell, name: str = "c") -> Generation:
    asked = GenerateRequest(
        execution_id="e",
        call_id=name,
        context=np.arange(40, dtype=np.int32),
        max_tokens=20,
        temperature=1.0,
        seed=7,
        stop_ids=(),
    )
    one.submit(Generate(request=asked))
    ended: dict[str, Generation] = {}
    while name not in ended:
        ended.update(one.step())
    return ended[name]


def test_a_new_incarnation_of_a_served_number_is_read_and_its_calls_compute_their_context(tmp_path):
    """Mistake: comparing version numbers only, as a resume that rolled back would make a cell do."""
    one = cell(tmp_path, weights(tmp_path, 3, seed=1))
    first = ask(one)
    other = weights(tmp_path, 3, seed=2, incarnation=1)
    one.load_weights(other, ())
    second = ask(one, "d")
    assert second.versions == (VersionRun(3, 20),)
    assert second.prefilled_tokens == 40
    assert second.output.tolist() == ask(cell(tmp_path, other)).output.tolist()
    assert second.output.tolist() != first.output.tolist()
    assert one.status().recomputed_tokens == 32


def test_a_file_that_is_not_what_its_reference_says_is_refused_and_the_served_version_stays(tmp_path):
    """Mistake: trusting the name of a file that another run, or half a write, left there."""
    one = cell(tmp_path, weights(tmp_path, 0, seed=1))
    first = ask(one)
    reference = weights(tmp_path, 1, seed=2)
    wrong = msgspec.structs.replace(reference, checksum="0" * 32)
    for refused in (wrong, msgspec.structs.replace(reference, path=str(tmp_path / "absent"))):
        with pytest.raises(FileError):
            one.load_weights(refused, ())
        again = ask(one, f"after {refused.path} {refused.checksum}")
        assert again.versions == (VersionRun(0, 20),)
        assert again.output.tolist() == first.output.tolist()


def test_a_cell_back_from_training_serves_the_published_version_not_the_one_it_trained_on(tmp_path):
    """Mistake: serving what the trainer has in memory."""
    published, trained = weights(tmp_path, 0, seed=1), weights(tmp_path, 1, seed=2)
    one = cell(tmp_path, published)
    first = ask(one)
    one.switch(Mode.TRAINING, trained, ())
    assert one.trainer.version == 1
    one.switch(Mode.ROLLOUT, published, ())
    again = ask(one, "again")
    assert again.versions == (VersionRun(0, 20),)
    assert again.output.tolist() == first.output.tolist()
    assert again.prefilled_tokens == 40
    assert one.status().recomputed_tokens == 0
