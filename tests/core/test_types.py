import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.core.errors import (
    CallError,
    ConfigError,
    ExecutionError,
    FileError,
    GyreError,
    InputError,
    InvariantError,
    SandboxError,
)
from opengyre.core.records import CellSpan, EvaluationRecord, ExecutionRecord, Record
from opengyre.core.types import (
    EXECUTION_TRANSITIONS,
    Dropped,
    EvaluationFailed,
    ExecutionState,
    Kind,
    NoArtifact,
    Outcome,
    Role,
    Row,
    Scored,
)

OUTCOMES = st.one_of(
    st.builds(Scored, reward=st.floats(0, 1), passed=st.integers(0, 9), total=st.integers(0, 9)),
    st.builds(NoArtifact, reason=st.text(max_size=9)),
    st.builds(EvaluationFailed, reason=st.text(max_size=9)),
    st.builds(Dropped, reason=st.text(max_size=9)),
)


def row(**changes):
    arrays = {
        "tokens": np.array([1, 2, 3], np.int32),
        "positions": np.arange(3, dtype=np.int32),
        "trainable": np.array([False, False, True]),
        "behaviour_logprobs": np.array([0, 0, -0.5], np.float32),
        "versions": np.array([-1, -1, 0], np.int32),
        "mixed": np.zeros(3, np.bool_),
        "weight": np.array([0, 0, 1], np.float32),
    }
    return Row(execution_id="e", leaf=0, role=Role.MAIN, advantage=1.0, **{**arrays, **changes})


def test_a_row_counts_its_targets():
    assert row().trained_tokens == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": np.array([1, 2], np.int32)}, "unequal length"),
        ({"weight": np.array([0, 1, 1], np.float32)}, "weight on a token that is not trainable"),
        ({"weight": np.zeros(3, np.float32)}, "none on one that is"),
        (
            {"trainable": np.array([True, False, True]), "weight": np.array([0.5, 0, 0.5], np.float32)},
            "first token of a path",
        ),
    ],
)
def test_a_row_that_breaks_its_rules_cannot_be_made(changes, said):
    with pytest.raises(InvariantError, match=said):
        row(**changes)


@given(st.one_of(st.floats(max_value=-1e-9), st.floats(min_value=1.0000001)))
def test_a_reward_outside_0_to_1_cannot_be_made(reward):
    with pytest.raises(InvariantError, match="lies outside"):
        Scored(reward=reward, passed=0, total=1)


@given(OUTCOMES)
def test_an_outcome_survives_json_with_its_kind(outcome):
    again = msgspec.json.decode(msgspec.json.encode(outcome), type=Outcome)
    assert again == outcome
    assert type(again) is type(outcome)


def test_closed_is_where_every_execution_can_end_and_nothing_leaves_it():
    assert set(EXECUTION_TRANSITIONS) == set(ExecutionState)
    assert EXECUTION_TRANSITIONS[ExecutionState.CLOSED] == frozenset()
    reached = {state for state, after in EXECUTION_TRANSITIONS.items() if ExecutionState.CLOSED in after}
    assert reached == set(ExecutionState) - {ExecutionState.CLOSED}


def test_roles_stand_in_the_order_of_admission():
    assert [role.value for role in Role] == ["main", "main-summary", "sub-agent", "sub-agent-summary", "auxiliary"]


@given(st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 1.0])), max_size=20))
def test_a_dropped_task_is_left_out_of_a_pass_rate(rewards):
    record = EvaluationRecord(
        version=0,
        kind=Kind.EVAL_SAMPLED,
        task_ids=tuple(str(number) for number in range(len(rewards))),
        rewards=tuple(rewards),
        started_s=0.0,
        ended_s=1.0,
    )
    valid = [reward for reward in rewards if reward is not None]
    assert record.pass_rate * len(valid) == pytest.approx(sum(valid))
    assert record.solved_rate * len(valid) == pytest.approx(valid.count(1.0))


def test_every_record_has_a_tag_of_its_own():
    tags = [kind.__struct_config__.tag for kind in Record.__args__]
    assert len(tags) == len(set(tags))
    assert {CellSpan, ExecutionRecord} <= set(Record.__args__)


def test_whose_fault_an_error_is_can_be_told_from_its_type():
    assert issubclass(ConfigError, InputError)
    assert issubclass(FileError, InputError)
    assert issubclass(SandboxError, ExecutionError)
    assert not issubclass(ExecutionError, InputError)
    assert not issubclass(InvariantError, ExecutionError)
    assert all(issubclass(kind, GyreError) for kind in (InputError, ExecutionError, InvariantError, CallError))


def test_a_call_error_carries_its_status():
    error = CallError("too long", status=413, code="context_length_exceeded")
    assert (str(error), error.status, error.code) == ("too long", 413, "context_length_exceeded")
