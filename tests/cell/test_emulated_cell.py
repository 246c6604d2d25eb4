"""Emulated cells as real processes: the whole protocol, light, and as strict as the cells that compute."""

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest

from opengyre.algorithm.settings import LossSettings
from opengyre.cell.client import LocalCell
from opengyre.cell.emulated import write_emulated_version
from opengyre.cell.wire import CellSettings
from opengyre.core.cells import HandedOver
from opengyre.core.errors import CellLostError, InvariantError
from opengyre.core.events import Mode
from opengyre.core.protocols import GenerateRequest
from opengyre.core.types import Role, Row, VersionRun
from opengyre.engine.emulated import EmulatedCosts, ReplyTable
from opengyre.train.settings import OptimizerSettings

OPTIMIZER = OptimizerSettings(learning_rate=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.0, gradient_clip=1.0)
QUICK = EmulatedCosts(
    step_weights_s=0.002, step_request_s=0.0, train_token_s=1e-5, optimizer_s=0.0, publish_s=0.0, switch_s=0.0
)


def settings(folder: Path, *, is_core: bool = True, costs: EmulatedCosts = QUICK) -> CellSettings:
    table = ReplyTable(replies={}, end_id=63, plain_ids=60)
    (folder / "replies").write_bytes(msgspec.msgpack.encode(table))
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
        optimizer=OPTIMIZER if is_core else None,
        weights_folder=str(folder),
        optimizer_folder=str(folder),
        gradient_folder=str(folder),
        incarnation=0,
        engine="emulated",
        costs=costs,
        replies_path=str(folder / "replies"),
        kv_folder=str(folder),
    )


def request(number: int, *, length: int = 60) -> GenerateRequest:
    return GenerateRequest(
        execution_id=f"e{number}",
        call_id=f"c{number}",
        context=np.random.default_rng(number).integers(0, 60, size=20 + number, dtype=np.int32),
        max_tokens=length,
        temperature=1.0,
        seed=1000 + number,
        stop_ids=(),
    )


def row(number: int, tokens: int = 40) -> Row:
    trainable = np.arange(tokens) >= tokens // 2
    return Row(
        execution_id=f"e{number}",
        leaf=0,
        role=Role.MAIN,
        tokens=np.zeros(tokens, np.int32),
        positions=np.arange(tokens, dtype=np.int32),
        trainable=trainable,
        behaviour_logprobs=np.zeros(tokens, np.float32),
        versions=np.where(trainable, 0, -1).astype(np.int32),
        mixed=np.zeros(tokens, bool),
        weight=np.where(trainable, 1 / trainable.sum(), 0).astype(np.float32),
        advantage=1.0,
    )


async def pair(folder: Path) -> list[LocalCell]:
    cells = [LocalCell(number, settings(folder, is_core=number == 0)) for number in range(2)]
    reference = write_emulated_version(folder / "v0.safetensors", version=0, incarnation=0)
    await asyncio.gather(*(cell.start(reference) for cell in cells))
    return cells


async def sampled(cell: LocalCell, tokens: int) -> None:
    while (await cell.status()).sampled_tokens < tokens:
        await asyncio.sleep(0.001)


async def test_an_emulated_cell_hands_over_trains_and_publishes_like_one_that_computes(tmp_path):
    core, other = await pair(tmp_path)
    reference = write_emulated_version(tmp_path / "v0.safetensors", version=0, incarnation=0)
    asked = [request(number) for number in range(8)]
    whole = await asyncio.gather(*(core.generate(item) for item in asked))
    live = [asyncio.create_task(other.generate(item)) for item in asked]
    await sampled(other, 8 * 8)
    await other.switch(Mode.TRAINING, reference)
    partials = await asyncio.gather(*live)
    assert all(isinstance(one, HandedOver) and one.kv_path for one in partials)
    rest = await asyncio.gather(
        *(
            core.generate(
                msgspec.structs.replace(
                    item, output=one.output, behaviour_logprobs=one.behaviour_logprobs, versions=one.versions
                ),
                kv_path=one.kv_path,
            )
            for item, one in zip(asked, partials, strict=True)
        )
    )
    assert [answer.output.tolist() for answer in rest] == [answer.output.tolist() for answer in whole]
    result = await other.run_micro_step("a", [row(1), row(2)], step=0)
    assert (result.tokens, result.trained_tokens) == (80, 40)
    assert await other.run_micro_step("a", [row(1), row(2)], step=0) == result
    path = await other.hand_in_gradient(0)
    closed = await core.close_step(0, [path], executions=2)
    assert closed.weights.version == 1
    assert closed.weights.checksum != reference.checksum
    await core.load_weights(closed.weights, pinned=())
    await other.switch(Mode.ROLLOUT, closed.weights)
    for cell in (core, other):
        assert (await cell.generate(request(9))).versions == (VersionRun(1, 60),)
        await cell.stop()


async def test_a_micro_step_in_two_sums_is_refused_by_the_core(tmp_path):
    core, other = await pair(tmp_path)
    reference = write_emulated_version(tmp_path / "v0.safetensors", version=0, incarnation=0)
    for cell in (core, other):
        await cell.switch(Mode.TRAINING, reference)
        await cell.run_micro_step("a", [row(1)], step=0)
    with pytest.raises(InvariantError, match="counted twice"):
        await core.close_step(0, [await other.hand_in_gradient(0)], executions=1)
    with pytest.raises(InvariantError, match="step 3 on weights of version 0"):
        await core.run_micro_step("b", [row(1)], step=3)
    await asyncio.gather(core.stop(), other.stop())


async def test_an_emulated_cell_is_a_small_process_without_torch_that_can_be_killed(tmp_path):
    core, other = await pair(tmp_path)
    await other.stop()
    live = asyncio.create_task(core.generate(request(1, length=200)))
    await sampled(core, 20)
    mapped = Path(f"/proc/{core.process_id}/maps").read_text()
    assert "libtorch" not in mapped
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{core.process_id}/status").read_text().splitlines())
    assert int(fields["VmRSS"].split()[0]) < 80_000
    os.kill(core.process_id, signal.SIGKILL)
    with pytest.raises(CellLostError):
        await live
    await core.stop()


async def test_the_same_costs_give_the_same_time_however_many_cells_there_are(tmp_path):
    costs = msgspec.structs.replace(QUICK, train_token_s=0.002)
    cells = [LocalCell(number, settings(tmp_path, costs=costs)) for number in range(4)]
    reference = write_emulated_version(tmp_path / "v0.safetensors", version=0, incarnation=0)
    await asyncio.gather(*(cell.start(reference) for cell in cells))
    await asyncio.gather(*(cell.switch(Mode.TRAINING, reference) for cell in cells))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await asyncio.gather(*(cell.run_micro_step("a", [row(1, 200)], step=0) for cell in cells))
    assert 0.37 < loop.time() - began_s < 1.2  # four cells in turn would need 1.6 s
    await asyncio.gather(*(cell.stop() for cell in cells))
