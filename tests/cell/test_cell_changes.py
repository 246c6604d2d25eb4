"""What happens to live calls when their cell changes: moved keys, loss, drain, abort, silence."""

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch

from opengyre.algorithm.settings import LossSettings
from opengyre.cell.client import LocalCell
from opengyre.cell.wire import CellSettings
from opengyre.core.cells import HandedOver, WeightsRef
from opengyre.core.errors import CellLostError, InvariantError, RunError
from opengyre.core.events import Mode
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import VersionRun
from opengyre.model.decoder import DecoderConfig, init_parameters
from opengyre.model.weights import write_version

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONFIG = DecoderConfig(vocab_size=64, hidden_size=32, layers=2, heads=4, kv_heads=2, mlp_size=64, context_tokens=256)


def settings(folder: Path, **changes) -> CellSettings:
    plain = CellSettings(
        slots=48,
        max_running=32,
        kv_tokens=8192,
        context_tokens=256,
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
    return msgspec.structs.replace(plain, **changes)


def weights(folder: Path, version: int = 0) -> WeightsRef:
    parameters = init_parameters(CONFIG, torch.Generator().manual_seed(1 + version))
    return write_version(folder / f"v{version}.safetensors", CONFIG, parameters, version=version, incarnation=0)


def request(number: int, *, length: int = 60) -> GenerateRequest:
    return GenerateRequest(
        execution_id=f"e{number}",
        call_id=f"c{number}",
        context=np.random.default_rng(number).integers(0, 64, size=20 + number, dtype=np.int32),
        max_tokens=length,
        temperature=1.0,
        seed=1000 + number,
        stop_ids=(),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory):
    """Two satellites that the tests share: a process start costs seconds. Every test leaves them serving version 0."""
    folder = tmp_path_factory.mktemp("pair")
    moved = folder / "moved"
    moved.mkdir()
    cells = [LocalCell(number, settings(folder, kv_folder=str(moved))) for number in (1, 2)]
    reference = weights(folder)
    await asyncio.gather(*(cell.start(reference) for cell in cells))
    yield cells, reference, moved
    await asyncio.gather(*(cell.stop() for cell in cells))


async def sampled(cell: LocalCell, tokens: int) -> None:
    while (await cell.status()).sampled_tokens < tokens:
        await asyncio.sleep(0)


def continued(asked: GenerateRequest, partial: HandedOver) -> GenerateRequest:
    return msgspec.structs.replace(
        asked, output=partial.output, behaviour_logprobs=partial.behaviour_logprobs, versions=partial.versions
    )


async def test_sixteen_calls_move_with_their_keys_and_compute_nothing_again(pair):
    (first, second), reference, moved = pair
    asked = [request(number) for number in range(16)]
    whole = await asyncio.gather(*(first.generate(item) for item in asked))
    before = (await first.status()).sampled_tokens
    live = [asyncio.create_task(first.generate(item)) for item in asked]
    await sampled(first, before + 16 * 8)
    await first.switch(Mode.TRAINING, reference)
    partials = await asyncio.gather(*live)
    rest = await asyncio.gather(
        *(
            second.generate(continued(item, part), kv_path=part.kv_path)
            for item, part in zip(asked, partials, strict=True)
        )
    )
    assert all(part.kv_path for part in partials)
    assert not list(moved.iterdir())
    assert [answer.prefilled_tokens for answer in rest] == [0] * 16
    assert [answer.output.tolist() for answer in rest] == [answer.output.tolist() for answer in whole]
    assert (await first.status()).mode is Mode.TRAINING
    await first.switch(Mode.ROLLOUT, reference)
    again = await first.generate(asked[0])
    assert again.output.tolist() == whole[0].output.tolist()


@pytest.mark.parametrize("steps", [0, 40])
async def test_calls_of_a_cell_killed_at_any_point_sample_the_same_on_another(pair, tmp_path, steps):
    (second, _), reference, _ = pair
    first = LocalCell(0, settings(tmp_path))
    await first.start(reference)
    asked = [request(number, length=100) for number in range(4)]
    live = [asyncio.create_task(first.generate(item)) for item in asked]
    await sampled(first, steps)
    os.kill(first.process_id, signal.SIGKILL)
    ended = await asyncio.gather(*live, return_exceptions=True)
    assert all(isinstance(one, CellLostError) for one in ended)
    await asyncio.wait_for(first.lost.wait(), 10)
    answers = await asyncio.gather(*(second.generate(item) for item in asked))
    assert all(len(answer.output) == 100 for answer in answers)
    await first.stop()
    if steps:
        await first.start(reference)
        once_more = await first.generate(asked[1])
        assert once_more.output.tolist() == answers[1].output.tolist()
        await first.stop()


async def test_a_cancelled_call_frees_its_place_and_the_others_go_on(tmp_path):
    cell = LocalCell(1, settings(tmp_path, max_running=1))
    await cell.start(weights(tmp_path))
    first = asyncio.create_task(cell.generate(request(1, length=200)))
    second = asyncio.create_task(cell.generate(request(2, length=5)))
    await sampled(cell, 10)
    first.cancel()
    answer = await second
    assert isinstance(answer, Generation)
    assert len(answer.output) == 5
    assert (await cell.status()).sampled_tokens < 200
    await cell.stop()


async def test_a_drain_ends_on_the_old_weights_within_its_limit_and_on_the_new_after_it(tmp_path):
    reference, following = weights(tmp_path), weights(tmp_path, 1)
    for limit_s, expected in ((600.0, [(0, False)]), (0.0, [(0, False), (1, True)])):
        cell = LocalCell(1, settings(tmp_path, drain=True, drain_s=limit_s))
        await cell.start(reference)
        live = asyncio.create_task(cell.generate(request(1, length=200)))
        await sampled(cell, 10)
        assert await cell.load_weights(following, pinned=()) == 1
        assert [(run.version, run.mixed) for run in (await live).versions] == expected
        assert (await cell.generate(request(2))).versions == (VersionRun(1, 60),)
        await cell.stop()


async def test_loading_the_served_version_again_changes_nothing_for_live_calls(pair):
    (cell, _), reference, _ = pair
    before = (await cell.status()).sampled_tokens
    live = asyncio.create_task(cell.generate(request(1, length=100)))
    await sampled(cell, before + 10)
    assert await cell.load_weights(reference, pinned=()) == 0
    assert (await live).versions == (VersionRun(0, 100),)


async def test_what_does_not_fit_the_mode_is_refused_and_the_cell_lives_on(pair):
    (cell, _), reference, _ = pair
    with pytest.raises(InvariantError, match="mode rollout"):
        await cell.run_micro_step("a", [], step=0)
    with pytest.raises(InvariantError, match="without the optimizer"):
        await cell.close_step(0, [], executions=1)
    await cell.switch(Mode.TRAINING, reference)
    with pytest.raises(InvariantError, match="mode training"):
        await cell.generate(request(1))
    await cell.switch(Mode.ROLLOUT, reference)
    assert len((await cell.generate(request(1))).output) == 60


async def test_weights_that_cannot_be_read_are_reported_and_the_served_ones_stay(pair):
    (cell, _), reference, _ = pair
    with pytest.raises(RunError, match="absent"):
        await cell.load_weights(msgspec.structs.replace(reference, version=1, path="absent", checksum="x"), pinned=())
    assert (await cell.generate(request(1))).versions == (VersionRun(0, 60),)


async def test_an_idle_cell_uses_no_processor_time(pair):
    (cell, _), _, _ = pair
    await cell.generate(request(1))

    def ticks() -> int:
        fields = Path(f"/proc/{cell.process_id}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    await asyncio.sleep(0.3)
    assert ticks() - before <= 1


async def test_stop_ends_the_process(tmp_path):
    cell = LocalCell(1, settings(tmp_path))
    await cell.start(weights(tmp_path))
    number = cell.process_id
    await cell.stop()
    assert not Path(f"/proc/{number}").exists()
    with pytest.raises(CellLostError):
        await cell.status()
