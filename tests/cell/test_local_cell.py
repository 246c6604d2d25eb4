"""Cells as real processes: exact hand-over, exact gradients, nothing lost."""

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from opengyre.algorithm.settings import LossSettings
from opengyre.cell.client import LocalCell
from opengyre.cell.wire import CellSettings
from opengyre.core.cells import HandedOver, WeightsRef
from opengyre.core.errors import CellLostError
from opengyre.core.events import Mode
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import Role, Row
from opengyre.model.decoder import DecoderConfig, init_parameters
from opengyre.model.weights import read_tensors, read_version, write_version
from opengyre.train.settings import OptimizerSettings

CONFIG = DecoderConfig(vocab_size=64, hidden_size=32, layers=2, heads=4, kv_heads=2, mlp_size=64, context_tokens=256)


def settings(folder: Path) -> CellSettings:
    return CellSettings(
        slots=48,
        max_running=32,
        kv_tokens=8192,
        context_tokens=256,
        device="cpu",
        dtype="float32",
        keep_versions=3,
        drain=False,
        loss=LossSettings(),
        optimizer=OptimizerSettings(learning_rate=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.0, gradient_clip=1.0),
        weights_folder=str(folder),
        optimizer_folder=str(folder),
        gradient_folder=str(folder),
        incarnation=0,
    )


def weights(folder: Path) -> WeightsRef:
    parameters = init_parameters(CONFIG, torch.Generator().manual_seed(1))
    return write_version(folder / "v0.safetensors", CONFIG, parameters, version=0, incarnation=0)


def request(number: int, *, length: int = 60) -> GenerateRequest:
    rng = np.random.default_rng(number)
    return GenerateRequest(
        execution_id=f"e{number}",
        call_id=f"c{number}",
        context=rng.integers(0, 64, size=20 + number, dtype=np.int32),
        max_tokens=length,
        temperature=1.0,
        seed=1000 + number,
        stop_ids=(),
    )


def rows_of(generations: list[tuple[GenerateRequest, Generation]]) -> list[Row]:
    rows = []
    for index, (asked, answer) in enumerate(generations):
        tokens = np.concatenate((asked.context, answer.output)).astype(np.int32)
        trainable = np.zeros(len(tokens), bool)
        trainable[len(asked.context) :] = True
        behaviour = np.zeros(len(tokens), np.float32)
        behaviour[len(asked.context) :] = answer.behaviour_logprobs
        rows.append(
            Row(
                execution_id=asked.execution_id,
                leaf=0,
                role=Role.MAIN,
                tokens=tokens,
                positions=np.arange(len(tokens), dtype=np.int32),
                trainable=trainable,
                behaviour_logprobs=behaviour,
                versions=np.where(trainable, 0, -1).astype(np.int32),
                mixed=np.zeros(len(tokens), bool),
                weight=np.where(trainable, 1 / trainable.sum(), 0).astype(np.float32),
                advantage=(-1.0) ** index * (1 + index),
            )
        )
    return rows


async def test_sixteen_calls_handed_over_at_once_sample_what_they_would_have_sampled_undisturbed(tmp_path):
    first, second = (LocalCell(index, settings(tmp_path)) for index in range(2))
    reference = weights(tmp_path)
    await asyncio.gather(first.start(reference), second.start(reference))
    requests = [request(number) for number in range(16)]
    undisturbed = await asyncio.gather(*(second.generate(asked) for asked in requests))
    live = [asyncio.create_task(first.generate(asked)) for asked in requests]
    while (await first.status()).sampled_tokens < 16 * 10:
        await asyncio.sleep(0)
    await first.switch(Mode.TRAINING, reference)
    partials = await asyncio.gather(*live)
    assert all(isinstance(partial, HandedOver) and len(partial.output) for partial in partials)
    for asked, partial, whole in zip(requests, partials, undisturbed, strict=True):
        moved = GenerateRequest(
            execution_id=asked.execution_id,
            call_id=asked.call_id,
            context=asked.context,
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            seed=asked.seed,
            stop_ids=(),
            output=partial.output,
            behaviour_logprobs=partial.behaviour_logprobs,
            versions=partial.versions,
        )
        rest = await second.generate(moved)
        assert isinstance(rest, Generation)
        assert isinstance(whole, Generation)
        assert rest.output.tolist() == whole.output.tolist()
        np.testing.assert_allclose(rest.behaviour_logprobs, whole.behaviour_logprobs, atol=1e-5)
        assert sum(run.count for run in rest.versions) == len(rest.output)
    await asyncio.gather(first.stop(), second.stop())


async def test_a_gradient_from_two_cells_equals_the_gradient_of_one_and_logprobs_agree_to_1e_4(tmp_path):
    cells = [LocalCell(index, settings(tmp_path)) for index in range(2)]
    reference = weights(tmp_path)
    await asyncio.gather(*(cell.start(reference) for cell in cells))
    asked = [request(number, length=30) for number in range(12)]
    answers = await asyncio.gather(*(cells[0].generate(item) for item in asked))
    rows = rows_of(list(zip(asked, answers, strict=True)))
    await asyncio.gather(*(cell.switch(Mode.TRAINING, reference) for cell in cells))

    result = await cells[0].run_micro_step("all", rows, step=0)
    assert result.checked_tokens == sum(row.trained_tokens for row in rows) > 0
    assert result.checked_difference < 1e-4
    repeated = await cells[0].run_micro_step("all", rows, step=0)
    assert repeated == result
    alone, _ = read_tensors(Path(await cells[0].hand_in_gradient(0)))
    await cells[0].forget_step(0)

    await cells[0].run_micro_step("a", rows[:5], step=0)
    await cells[1].run_micro_step("b", rows[5:], step=0)
    other = await cells[1].hand_in_gradient(0)
    mine, _ = read_tensors(Path(await cells[0].hand_in_gradient(0)))
    theirs, _ = read_tensors(Path(other))
    for name, tensor in alone.items():
        assert float((mine[name] + theirs[name] - tensor).norm()) <= 1e-6 * float(tensor.norm())

    step = await cells[0].close_step(0, [other], executions=12)
    assert step.weights.version == 1
    assert not step.empty
    _, parameters = read_version(step.weights)
    _, before = read_version(reference)
    assert any(not torch.equal(parameters[name], before[name]) for name in before)
    await asyncio.gather(*(cell.stop() for cell in cells))


async def test_an_empty_step_writes_the_same_weights_under_the_next_version(tmp_path):
    cell = LocalCell(0, settings(tmp_path))
    reference = weights(tmp_path)
    await cell.start(reference)
    result = await cell.close_step(0, [], executions=0)
    assert result.empty
    _, before = read_version(reference)
    _, after = read_version(result.weights)
    assert all(torch.equal(after[name], before[name]) for name in before)
    await cell.stop()


async def test_a_killed_cell_fails_every_pending_call_with_cell_lost(tmp_path):
    cell = LocalCell(1, settings(tmp_path))
    await cell.start(weights(tmp_path))
    pending = [asyncio.create_task(cell.generate(request(number, length=150))) for number in range(4)]
    await asyncio.sleep(0.05)

    os.kill(cell.process_id, signal.SIGKILL)
    for task in pending:
        with pytest.raises(CellLostError):
            await task
    with pytest.raises(CellLostError):
        await cell.status()
    await cell.stop()


async def test_weights_change_in_flight_marks_mixed_tokens_and_pinned_calls_keep_their_version(tmp_path):
    cell = LocalCell(0, settings(tmp_path))
    reference = weights(tmp_path)
    await cell.start(reference)
    following = asyncio.create_task(cell.generate(request(1, length=200)))
    pinned_request = request(2, length=200)

    pinned = asyncio.create_task(cell.generate(msgspec.structs.replace(pinned_request, pinned_version=0)))
    while (await cell.status()).sampled_tokens < 20:
        await asyncio.sleep(0)
    other = init_parameters(CONFIG, torch.Generator().manual_seed(2))
    changed = write_version(tmp_path / "v1.safetensors", CONFIG, other, version=1, incarnation=0)
    assert await cell.load_weights(changed, pinned=(0,)) == 1
    moved, kept = await asyncio.gather(following, pinned)
    assert [(run.version, run.mixed) for run in moved.versions] == [(0, False), (1, True)]
    assert [(run.version, run.mixed) for run in kept.versions] == [(0, False)]
    fresh = await cell.generate(request(1, length=20))
    assert [(run.version, run.mixed) for run in fresh.versions] == [(1, False)]
    assert fresh.prefilled_tokens == len(request(1).context)
    await cell.stop()
