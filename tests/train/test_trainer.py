"""The trainer: gradient sums that any split over micro-steps and cells leaves as they are; exact logprobs; the step."""

import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.algorithm.settings import LossSettings
from opengyre.core.errors import FileError, InvariantError
from opengyre.core.types import Role, Row
from opengyre.model.decoder import DecoderConfig, Parameters, init_parameters
from opengyre.model.weights import read_tensors, write_tensors
from opengyre.train.optimizer import EPSILON
from opengyre.train.settings import OptimizerSettings
from opengyre.train.trainer import Trainer, batches_of, target_logprobs

CONFIG = DecoderConfig(vocab_size=40, hidden_size=16, layers=2, heads=4, kv_heads=2, mlp_size=24, context_tokens=64)
OPTIMIZER = OptimizerSettings(learning_rate=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.0, gradient_clip=1.0)


def weights(seed: int, dtype: torch.dtype = torch.float64) -> Parameters:
    drawn = init_parameters(CONFIG, torch.Generator().manual_seed(seed))
    return {name: tensor.to(dtype) for name, tensor in drawn.items()}


def trainer(*, core: bool = True, dtype: torch.dtype = torch.float64, seed: int = 1, **changes) -> Trainer:
    return Trainer(
        CONFIG, weights(seed, dtype), version=0, loss=LossSettings(**changes), optimizer=OPTIMIZER if core else None
    )


def row(number: int, *, version: int = 0) -> Row:
    rng = np.random.default_rng(number)
    length = int(rng.integers(3, 40))
    trainable = rng.random(length) < 0.5
    trainable[0], trainable[-1] = False, True
    return Row(
        execution_id=f"e{number}",
        leaf=0,
        role=Role.MAIN,
        tokens=rng.integers(0, 40, length, dtype=np.int32),
        positions=np.arange(length, dtype=np.int32),
        trainable=trainable,
        behaviour_logprobs=np.where(trainable, -3.5 + 0.3 * rng.standard_normal(length), 0).astype(np.float32),
        versions=np.where(trainable, version, -1).astype(np.int32),
        mixed=np.zeros(length, bool),
        weight=np.where(trainable, 1 / trainable.sum(), 0).astype(np.float32),
        advantage=float(rng.standard_normal()),
        temperature=float(rng.choice([1.0, 0.7])),
    )


def sampled_under(rows: list[Row], parameters: Parameters, *, version: int) -> list[Row]:
    """Give rows the logprobs that these weights give their tokens."""
    measured = []
    for one in rows:
        tokens = torch.from_numpy(one.tokens.astype(np.int64))[None]
        temperatures = torch.full((one.trained_tokens,), one.temperature, dtype=parameters["embed"].dtype)
        values, _ = target_logprobs(CONFIG, parameters, tokens, torch.from_numpy(one.trainable)[None], temperatures)
        behaviour = np.zeros(len(one.tokens), np.float32)
        behaviour[one.trainable] = values.detach().numpy()
        versions = np.where(one.trainable, version, -1).astype(np.int32)
        measured.append(msgspec.structs.replace(one, behaviour_logprobs=behaviour, versions=versions))
    return measured


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).norm() / one[name].norm()) for name in one)


@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
    st.permutations(range(8)),
    st.sampled_from(["clipped", "truncated", "masked"]),
)
def test_any_split_over_cells_and_micro_steps_gives_the_one_cell_gradient(cell_of, order, importance):
    rows = [row(number) for number in range(8)]
    one = trainer(importance=importance)
    one.run_micro_step("all", rows, step=0)
    cells = [trainer(core=False, importance=importance) for _ in range(4)]
    for number in order:
        cells[cell_of[number]].run_micro_step(str(number), [rows[number]], step=0)
    sums = [cell.gradient_sum(0) for cell in cells]
    total = {name: sum(part[name] for part in sums) for name in sums[0]}
    assert difference(one.gradient_sum(0), total) < 1e-12


def test_in_fp32_the_split_gradient_equals_the_whole_to_1e_6():
    rows = [row(number) for number in range(16)]
    one = trainer(dtype=torch.float32)
    one.run_micro_step("all", rows, step=0)
    cells = [trainer(dtype=torch.float32) for _ in range(2)]
    for index, cell in enumerate(cells):
        cell.run_micro_step("part", rows[8 * index : 8 * index + 8], step=0)
    total = {name: tensor + cells[1].gradient_sum(0)[name] for name, tensor in cells[0].gradient_sum(0).items()}
    assert difference(one.gradient_sum(0), total) < 1e-6


def closed_on(cell_of: list[int], order: list[int], folder: Path, *, fixed_order: bool) -> Parameters:
    """Run eight micro-steps on up to three cells in an order, close the step on the core, return its weights."""
    rows = [row(number) for number in range(16)]
    cells = [
        Trainer(
            CONFIG,
            weights(1, torch.float32),
            version=0,
            loss=LossSettings(),
            optimizer=OPTIMIZER if number == 0 else None,
            fixed_order=fixed_order,
        )
        for number in range(3)
    ]
    for number in order:
        cells[cell_of[number]].run_micro_step(f"m{number}", rows[2 * number : 2 * number + 2], step=0)
    paths = []
    for number in sorted(set(cell_of) - {0}):
        paths.append(folder / f"gradient-{number}")
        cells[number].hand_in_gradient(0, paths[-1])
    cells[0].close_step(0, paths, executions=16, keep_versions=1)
    return cells[0].parameters


@settings(max_examples=20)
@given(st.lists(st.integers(0, 2), min_size=8, max_size=8), st.permutations(range(8)))
def test_with_a_fixed_order_the_next_weights_are_bitwise_those_of_one_cell(cell_of, order):
    with tempfile.TemporaryDirectory() as folder:
        one = closed_on([0] * 8, list(range(8)), Path(folder), fixed_order=True)
        many = closed_on(cell_of, list(order), Path(folder), fixed_order=True)
        assert all(torch.equal(one[name], many[name]) for name in one)


def test_without_a_fixed_order_the_bits_depend_on_it_so_the_option_does_something(tmp_path):
    one = closed_on([0] * 8, list(range(8)), tmp_path, fixed_order=False)
    shuffled = [closed_on([0] * 8, list(range(8))[::-1], tmp_path, fixed_order=False)]
    shuffled += [closed_on([number % 3 for number in range(8)], list(range(8)), tmp_path, fixed_order=False)]
    assert any(not torch.equal(one[name], other[name]) for other in shuffled for name in one)
    fixed = closed_on([0] * 8, list(range(8)), tmp_path, fixed_order=True)
    assert difference(one, fixed) < 1e-6


def test_with_a_fixed_order_a_micro_step_of_two_cells_is_refused(tmp_path):
    made = {"loss": LossSettings(), "fixed_order": True}
    core = Trainer(CONFIG, weights(1), version=0, optimizer=OPTIMIZER, **made)
    other = Trainer(CONFIG, weights(1), version=0, **made)
    for cell in (core, other):
        cell.run_micro_step("m0", [row(1)], step=0)
    other.hand_in_gradient(0, tmp_path / "gradient")
    with pytest.raises(InvariantError, match=r"m0.*two cells"):
        core.close_step(0, [tmp_path / "gradient"], executions=1, keep_versions=1)


def test_with_a_fixed_order_a_forgotten_step_leaves_nothing(tmp_path):
    one = Trainer(CONFIG, weights(1), version=0, loss=LossSettings(), fixed_order=True)
    one.run_micro_step("m0", [row(1)], step=0)
    one.forget_step(0)
    assert not any(bool(tensor.any()) for tensor in one.gradient_sum(0).values())
    one.hand_in_gradient(0, tmp_path / "gradient")
    assert read_tensors(tmp_path / "gradient")[0] == {}


def test_the_gradient_is_that_of_finite_differences():
    rows = [row(number) for number in range(3)]
    one = trainer(importance="clipped")
    one.run_micro_step("all", rows, step=0)
    gradient = one.gradient_sum(0)["layers.1.qkv"]
    row_index, column = divmod(int(gradient.abs().argmax()), gradient.shape[1])
    losses = []
    for step in (1e-6, -1e-6):
        parameters = weights(1)
        parameters["layers.1.qkv"][row_index, column] += step
        moved = Trainer(CONFIG, parameters, version=0, loss=LossSettings(importance="clipped"))
        losses.append(moved.run_micro_step("all", rows, step=0).loss)
    assert float(gradient[row_index, column]) == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-5)


def test_a_repeated_micro_step_counts_once_and_returns_what_it_returned():
    one = trainer()
    first = one.run_micro_step("a", [row(1)], step=0)
    before = {name: tensor.clone() for name, tensor in one.gradient_sum(0).items()}
    assert one.run_micro_step("a", [row(1)], step=0) is first
    assert difference(before, one.gradient_sum(0)) == 0


def test_a_forgotten_step_leaves_nothing_and_its_micro_steps_run_again():
    one, fresh = trainer(), trainer()
    one.run_micro_step("a", [row(1), row(2)], step=0)
    one.forget_step(0)
    assert all(not bool(tensor.any()) for tensor in one.gradient_sum(0).values())
    one.run_micro_step("a", [row(3)], step=0)
    fresh.run_micro_step("a", [row(3)], step=0)
    assert difference(fresh.gradient_sum(0), one.gradient_sum(0)) == 0


def test_rows_longer_than_the_policy_are_refused_before_anything_is_added():
    one = trainer()
    short = row(1)
    arrays = {
        name: np.resize(getattr(short, name), 65)
        for name in ("tokens", "positions", "behaviour_logprobs", "versions", "mixed")
    }
    trainable = np.arange(65) > 60
    weight = np.where(trainable, 0.25, 0).astype(np.float32)
    long = msgspec.structs.replace(short, **arrays, trainable=trainable, weight=weight)
    with pytest.raises(InvariantError, match=r"65 tokens.*at most 64"):
        one.run_micro_step("a", [short, long], step=0)
    assert all(not bool(tensor.any()) for tensor in one.gradient_sum(0).values())


def test_a_micro_step_of_another_step_is_refused():
    with pytest.raises(InvariantError, match="step 1 on weights of version 0"):
        trainer().run_micro_step("a", [row(1)], step=1)


def test_tokens_of_the_trained_version_are_all_checked_and_agree():
    rows = sampled_under([row(number) for number in range(5)], weights(1), version=0)
    result = trainer().run_micro_step("a", rows, step=0)
    assert result.checked_tokens == result.trained_tokens == sum(one.trained_tokens for one in rows)
    assert result.checked_difference < 1e-6
    assert result.ratio == pytest.approx(result.trained_tokens, rel=1e-6)
    assert result.kl == pytest.approx(0, abs=1e-6)


def test_tokens_of_an_older_version_are_checked_under_that_version():
    old, new = weights(1), weights(2)
    rows = sampled_under([row(number) for number in range(5)], old, version=0)
    one = trainer(core=False)
    one.load(1, new, keep_versions=3)
    result = one.run_micro_step("a", rows, step=1)
    assert result.checked_tokens > 0
    assert result.checked_difference < 1e-6
    assert result.kl > 0.01


def test_wrong_logprobs_are_seen_and_mixed_tokens_are_left_out_of_the_check():
    rows = sampled_under([row(1)], weights(1), version=0)
    shifted = msgspec.structs.replace(
        rows[0], behaviour_logprobs=np.where(rows[0].trainable, rows[0].behaviour_logprobs + 0.01, 0).astype(np.float32)
    )
    assert trainer().run_micro_step("a", [shifted], step=0).checked_difference == pytest.approx(0.01, rel=1e-3)
    mixed = msgspec.structs.replace(shifted, mixed=shifted.trainable.copy())
    assert trainer().run_micro_step("a", [mixed], step=0).checked_tokens == 0


def test_the_core_divides_by_the_executions_clips_and_steps_like_adamw(tmp_path):
    rows = [row(number) for number in range(4)]
    core, other = trainer(), trainer(core=False)
    core.run_micro_step("a", rows[:2], step=0)
    other.run_micro_step("b", rows[2:], step=0)
    other.hand_in_gradient(0, tmp_path / "gradient")
    norm, empty = core.close_step(0, [tmp_path / "gradient"], executions=4, keep_versions=2)
    one = trainer(core=False)
    one.run_micro_step("all", rows, step=0)
    plain = {name: tensor.clone().requires_grad_() for name, tensor in weights(1).items()}
    for name, tensor in one.gradient_sum(0).items():
        plain[name].grad = tensor / 4
    expected_norm = float(torch.nn.utils.clip_grad_norm_(plain.values(), 1.0))
    torch.optim.AdamW(list(plain.values()), lr=1e-2, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0).step()
    assert not empty
    assert norm == pytest.approx(expected_norm, rel=1e-9)
    assert core.version == 1
    for name, tensor in core.parameters.items():
        torch.testing.assert_close(tensor, plain[name].detach(), rtol=1e-9, atol=1e-9)
    assert all(not bool(tensor.any()) for tensor in core.gradient_sum(1).values())


@pytest.mark.parametrize("executions", [0, 3])
def test_a_step_without_gradient_advances_the_version_and_leaves_weights_and_optimizer(executions):
    core = trainer()
    norm, empty = core.close_step(0, [], executions=executions, keep_versions=2)
    assert (norm, empty, core.version) == (0.0, True, 1)
    assert difference(weights(1), core.parameters) == 0


def test_a_gradient_of_another_step_and_a_step_out_of_turn_are_refused(tmp_path):
    core, other = trainer(), trainer(core=False)
    other.run_micro_step("b", [row(1)], step=0)
    other.hand_in_gradient(0, tmp_path / "gradient")
    with pytest.raises(InvariantError, match="step 5 was to be closed on weights of version 0"):
        core.close_step(5, [], executions=1, keep_versions=2)
    core.close_step(0, [], executions=0, keep_versions=2)
    with pytest.raises(InvariantError, match="gradient of step 0, expected 1"):
        core.close_step(1, [tmp_path / "gradient"], executions=1, keep_versions=2)
    with pytest.raises(InvariantError, match="without the optimizer"):
        other.close_step(0, [], executions=1, keep_versions=2)


def test_a_saved_optimizer_goes_on_bit_for_bit(tmp_path):
    whole = trainer()
    for step in range(2):
        whole.run_micro_step(str(step), [row(step)], step=step)
        whole.close_step(step, [], executions=1, keep_versions=2)
        if step == 0:
            whole.save_optimizer(tmp_path / "optimizer")
            middle = {name: tensor.clone() for name, tensor in whole.parameters.items()}
    resumed = Trainer(CONFIG, middle, version=1, loss=LossSettings(), optimizer=OPTIMIZER)
    resumed.load_optimizer(tmp_path / "optimizer")
    resumed.run_micro_step("1", [row(1)], step=1)
    resumed.close_step(1, [], executions=1, keep_versions=2)
    for name, tensor in whole.parameters.items():
        assert torch.equal(tensor, resumed.parameters[name])


def test_an_optimizer_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "broken").write_bytes(b"nothing")
    with pytest.raises(FileError, match="not a readable safetensors file"):
        trainer().load_optimizer(tmp_path / "broken")
    write_tensors(tmp_path / "foreign", {"a": torch.zeros(2)}, {})
    with pytest.raises(FileError, match="not an optimizer state of this policy"):
        trainer().load_optimizer(tmp_path / "foreign")


@given(st.lists(st.integers(0, 10_000), max_size=40), st.integers(1, 200))
def test_batches_hold_every_row_once_and_at_most_their_tokens(numbers, tokens):
    rows = [row(number) for number in numbers]
    cut = batches_of(rows, tokens=tokens)
    assert sorted(id(one) for batch in cut for one in batch) == sorted(id(one) for one in rows)
    assert all(len(batch) == 1 or len(batch) * max(len(one.tokens) for one in batch) <= tokens for batch in cut)
