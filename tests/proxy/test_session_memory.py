import tracemalloc

import numpy as np

from opengyre.core.chat import Message
from opengyre.core.protocols import Generation
from opengyre.core.types import Finish, VersionRun
from opengyre.model.text_chat import ByteRenderer
from opengyre.proxy.requests import ChatRequest
from opengyre.proxy.session import Session, SessionSpec
from opengyre.trajectory.marks import Mark


def talk(session, turns, words):
    """Ask so many times, each history one turn longer; return the recorded calls."""
    history, calls = [Message(role="system", content="be brief")], []
    for turn in range(turns):
        history.append(Message(role="user", content=f"{turn} {words}"))
        request = ChatRequest(dialect="chat", model="policy", messages=tuple(history))
        (prepared,) = session.prepare(request, Mark(), request_id=f"r{turn}", now_s=0.0)
        output = np.array([*b"yes %d" % turn, *session.renderer.stop_ids], np.int32)
        generation = Generation(
            output=output,
            behaviour_logprobs=np.zeros(len(output), np.float32),
            versions=(VersionRun(0, len(output)),),
            finish=Finish.STOP,
        )
        call, choice = session.finish(prepared, generation, now_s=0.0)
        history.append(choice.message)
        calls.append((prepared, call))
    return calls


def new_session():
    spec = SessionSpec(execution_id="e", group_id=0, slot=0, attempt=0, run_seed=0, context_tokens=1 << 24)
    return Session(spec, ByteRenderer())


def test_every_context_is_its_parents_context_and_output_with_a_tail():
    whole = {}
    for prepared, call in talk(new_session(), 12, "words"):
        before = whole[call.parent_call_id] if call.parent_call_id else np.empty(0, np.int32)
        assert call.shared == len(before)
        assert np.array_equal(prepared.context, np.concatenate((before, call.tail)))
        whole[call.call_id] = np.concatenate((prepared.context, call.output))


def test_the_keys_that_a_call_shares_are_its_parents():
    keys = {None: ()}
    for _, call in talk(new_session(), 12, "words"):
        assert call.message_keys[: call.shared_keys] == keys[call.parent_call_id]
        assert len(call.message_keys) == call.shared_keys + 2 + (call.parent_call_id is None)
        keys[call.call_id] = call.message_keys


def test_memory_grows_with_unique_tokens_and_not_with_their_sum():
    session = new_session()
    tracemalloc.start()
    try:
        unique = sum(len(call.tail) + len(call.output) for _, call in talk(session, 120, "word " * 200))
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 16 * unique
