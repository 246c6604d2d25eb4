import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.core.events import (
    CloseStep,
    Command,
    Dispatch,
    Event,
    MicroStepReady,
    Mode,
    SwitchCell,
    SwitchDone,
    WeightsPublished,
    decode_command,
    decode_event,
    encode_command,
    encode_event,
    execution_id_of,
)
from opengyre.core.types import Kind

NAMES = st.text(min_size=1, max_size=20)
WHOLE = st.integers(0, 10**9)
SECONDS = st.floats(0, 1e9, allow_nan=False)
EVENTS = st.one_of(
    st.builds(SwitchDone, cell_id=WHOLE, mode=st.sampled_from(Mode)),
    st.builds(MicroStepReady, group_id=WHOLE, micro_step_id=NAMES, rows=WHOLE, tokens=WHOLE, cost_s=SECONDS),
    st.builds(WeightsPublished, version=WHOLE, incarnation=WHOLE, cells=st.lists(WHOLE, max_size=4).map(tuple)),
)
COMMANDS = st.one_of(
    st.builds(SwitchCell, cell_id=WHOLE, mode=st.sampled_from(Mode)),
    st.builds(
        Dispatch,
        execution_id=NAMES,
        group_id=WHOLE,
        slot=WHOLE,
        attempt=WHOLE,
        kind=st.sampled_from(Kind),
        version=WHOLE,
    ),
    st.builds(
        CloseStep,
        step=WHOLE,
        groups=st.lists(WHOLE, max_size=4).map(tuple),
        contributions=st.dictionaries(WHOLE, st.lists(NAMES, max_size=3).map(tuple), max_size=3),
    ),
)


@given(EVENTS)
def test_an_event_survives_the_log(event):
    assert decode_event(encode_event(event)) == event


@given(COMMANDS)
def test_a_command_survives_the_log(command):
    assert decode_command(encode_command(command)) == command


def test_events_and_commands_have_names_of_their_own():
    names = [kind.__name__ for union in (Event, Command) for kind in union.__args__]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("data", [b'{"type":"Nothing"}', b'{"type":"Finished"}', b"[]"])
def test_what_is_no_event_is_refused(data):
    with pytest.raises(msgspec.ValidationError):
        decode_event(data)


@given(WHOLE, st.integers(0, 99), st.integers(0, 9), st.sampled_from(Kind))
def test_an_execution_id_is_a_function_of_its_place(group_id, slot, attempt, kind):
    name = execution_id_of(group_id=group_id, slot=slot, attempt=attempt, kind=kind)
    prefix, group, place, number = name[0], *name[1:].split("-")
    assert (int(group), int(place[1:]), int(number[1:])) == (group_id, slot, attempt)
    assert prefix == {Kind.TRAIN: "g", Kind.EVAL_SAMPLED: "e", Kind.EVAL_GREEDY: "d"}[kind]
