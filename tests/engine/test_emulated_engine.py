"""The emulated engine: what it sleeps is the cost model's sum, what it answers is the script, wherever a call goes."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.core.errors import FileError
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import Finish, VersionRun
from opengyre.engine.emulated import (
    FORGIVEN_S,
    EmulatedCosts,
    EmulatedEngine,
    Pace,
    ReplyTable,
    ScriptedReply,
    context_key,
    read_replies,
    take_moved_tokens,
)

END = 63
COSTS = EmulatedCosts(
    step_weights_s=1.0,
    step_request_s=0.1,
    step_context_token_s=0.001,
    prefill_token_s=0.01,
    migrate_token_s=0.002,
)
NO_SCRIPTS = ReplyTable(replies={}, end_id=END, plain_ids=60)


class Waits:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


def engine(waits: Waits, table: ReplyTable = NO_SCRIPTS, **changes) -> EmulatedEngine:
    sizes = {"context_tokens": 640, "slots": 40, "max_running": 16, "kv_tokens": 1 << 20} | changes
    one = EmulatedEngine(COSTS, table, Pace(lambda: waits.now_s, waits.sleep), **sizes)
    one.set_version(0, "zero")
    return one


def request(number: int, *, context: int = 20, length: int = 10, **changes) -> GenerateRequest:
    plain = GenerateRequest(
        execution_id=f"e{number}",
        call_id=f"c{number}",
        context=np.random.default_rng(number).integers(0, 60, size=context, dtype=np.int32),
        max_tokens=length,
        temperature=1.0,
        seed=(1 << 40) + number,
        stop_ids=(),
    )
    return msgspec.structs.replace(plain, **changes)


def finish(one: EmulatedEngine) -> dict[str, Generation]:
    ended: dict[str, Generation] = {}
    for _ in range(10_000):
        if one.is_idle:
            return ended
        ended.update(one.step())
    raise AssertionError("the engine does not come to an end")


def continued(asked: GenerateRequest, partial) -> GenerateRequest:
    return msgspec.structs.replace(
        asked, output=partial.output, behaviour_logprobs=partial.behaviour_logprobs, versions=partial.versions
    )


def test_the_time_of_calls_is_the_sum_of_prefill_and_decode_steps():
    waits = Waits()
    one = engine(waits)
    for number in range(3):
        one.submit(request(number))
    began_s = waits.now_s
    assert len(finish(one)) == 3
    prefill_s = 3 * 20 * 0.01
    decode_s = sum(1.0 + 3 * 0.1 + 3 * (20 + sampled) * 0.001 for sampled in range(1, 10))
    assert waits.now_s - began_s == pytest.approx(prefill_s + decode_s - FORGIVEN_S)


def test_a_cached_prefix_takes_no_time():
    waits = Waits()
    one = engine(waits)
    asked = request(1, context=64, length=1)
    one.submit(asked)
    finish(one)
    began_s = waits.now_s
    longer = np.concatenate((asked.context, np.arange(8, dtype=np.int32)))
    one.submit(msgspec.structs.replace(asked, call_id="next", context=longer))
    assert finish(one)["next"].prefilled_tokens == 8
    assert waits.now_s - began_s == pytest.approx(8 * 0.01)


def test_a_moved_call_costs_its_migration_and_no_prefill(tmp_path):
    waits = Waits()
    first, second = engine(waits), engine(waits)
    asked = request(1)
    first.submit(asked)
    for _ in range(3):
        first.step()
    ((_, partial),) = first.hand_over(tmp_path)
    moved = take_moved_tokens(Path(partial.kv_path))
    assert not list(tmp_path.iterdir())
    began_s, length = waits.now_s, moved.length
    second.submit(continued(asked, partial), moved=moved)
    second.step()
    assert second.counters.moved_tokens == length == 20 + len(partial.output) - 1
    step_s = 1.0 + 0.1 + 0.001 * (20 + len(partial.output))
    assert waits.now_s - began_s == pytest.approx(length * 0.002 + step_s - FORGIVEN_S, abs=FORGIVEN_S)
    assert take_moved_tokens(tmp_path / "absent") is None


def test_the_process_s_own_work_is_part_of_the_time_and_idleness_is_not():
    waits = Waits()
    pace = Pace(lambda: waits.now_s, waits.sleep)
    pace.spend(1.0)
    waits.now_s += 0.4 * FORGIVEN_S
    began_s = waits.now_s
    pace.spend(1.0)
    assert waits.now_s - began_s == pytest.approx(1.0 - 0.4 * FORGIVEN_S)
    waits.now_s += 50.0
    began_s = waits.now_s
    pace.spend(1.0)
    assert waits.now_s - began_s == pytest.approx(1.0 - FORGIVEN_S)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=6), st.integers(3, 30))
def test_a_call_handed_over_at_any_points_answers_what_it_would_have_answered(moves, length):
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
    waits = Waits()
    asked = {f"c{number}": request(number, context=8 + 7 * number, length=length) for number in range(4)}
    alone = engine(waits)
    for item in asked.values():
        alone.submit(item)
    expected = {call_id: answer.output.tolist() for call_id, answer in finish(alone).items()}
    cells, here, ended = [engine(waits) for _ in range(2)], 0, {}
    for item in asked.values():
        cells[0].submit(item)
    for steps, is_moved in moves:
        for _ in range(steps):
            ended.update(cells[here].step())
        partials = cells[here].hand_over(folder if is_moved else None)
        here = 1 - here
        for call_id, partial in partials:
            moved = take_moved_tokens(Path(partial.kv_path)) if partial.kv_path else None
            cells[here].submit(continued(asked[call_id], partial), moved=moved)
    ended.update(finish(cells[here]))
    assert {call_id: answer.output.tolist() for call_id, answer in ended.items()} == expected
    assert all(answer.versions == (VersionRun(0, length),) for answer in ended.values())


def test_an_execution_follows_one_script_and_a_reply_ends_with_its_end_mark():
    waits = Waits()
    context = np.arange(20, dtype=np.int32)
    said = [ScriptedReply(script, np.array([script, script, END], np.int32).tobytes()) for script in range(8)]
    table = ReplyTable(replies={context_key(context): said}, end_id=END, plain_ids=60, scripts=8)
    one = engine(waits, table)
    for number in range(16):
        for again in range(2):
            plain = request(number, call_id=f"{number}/{again}", stop_ids=(END,), seed=again)
            one.submit(msgspec.structs.replace(plain, context=context))
    answers = finish(one)
    for number in range(16):
        first, second = answers[f"{number}/0"], answers[f"{number}/1"]
        assert first.output.tolist() == second.output.tolist()
        assert (len(first.output), first.finish) == (3, Finish.STOP)
    assert len({tuple(answer.output.tolist()) for answer in answers.values()}) > 2


def test_calls_in_flight_go_on_under_a_new_version_and_are_marked():
    one = engine(Waits())
    one.submit(request(1))
    one.step()
    assert one.set_version(1, "one") == 1
    assert [(run.version, run.mixed) for run in finish(one)["c1"].versions] == [(0, False), (1, True)]


@pytest.mark.parametrize("data", [b"", b"\x81\xa1a\x01"])
def test_a_table_that_is_none_is_refused_with_its_name(tmp_path, data):
    (tmp_path / "replies").write_bytes(data)
    with pytest.raises(FileError, match="replies: not a table"):
        read_replies(tmp_path / "replies")
