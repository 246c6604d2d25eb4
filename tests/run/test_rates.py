"""What a run measures for the look-ahead rule is what its calls cost."""

import random

import numpy as np
import pytest

from opengyre.core.types import Call, Finish, Role, Sampling, Verdict, VersionRun
from opengyre.ledger.ledger import Ledger
from opengyre.run.rates import CALLS_KEPT, NotingStore, RateBook


def call(execution_id, seq, *, at_s, seconds, tokens, context=200, shared=0):
    return Call(
        execution_id=execution_id,
        call_id=f"{execution_id}-c{seq}",
        seq=seq,
        request_id=f"{execution_id}-r{seq}",
        dialect="chat",
        agent_key="main",
        role=Role.MAIN,
        role_evidence="",
        verdict=Verdict.RESTORED,
        first_difference=-1,
        parent_call_id=None,
        shared=shared,
        tail=np.zeros(context - shared, np.int32),
        output=np.zeros(tokens, np.int32),
        behaviour_logprobs=np.zeros(tokens, np.float32),
        versions=(VersionRun(0, tokens),),
        sampling=Sampling(seed=1),
        finish=Finish.STOP,
        started_s=at_s,
        ended_s=at_s + seconds,
        cell_ids=(0,),
    )


def executions(number, *, wait_s, costs, chooser):
    """Yield the calls of executions that come one after the other, so that each is alone on its cell."""
    weights_s, request_s, prefill_s = costs
    now_s = 0.0
    for name in range(number):
        for seq in range(4):
            tokens, context = chooser.randint(10, 60), chooser.randint(50, 900)
            seconds = tokens * (weights_s + request_s) + context * prefill_s
            now_s += wait_s if seq else 10.0
            yield call(f"e{name}", seq, at_s=now_s, seconds=seconds, tokens=tokens, context=context)
            now_s += seconds


def test_rates_are_those_of_the_calls():
    book, calls = (
        RateBook(65536),
        list(executions(20, wait_s=0.3, costs=(0.004, 0.002, 1e-4), chooser=random.Random(1))),
    )
    for each in calls:
        book.note(each)
    for name in range(20):
        book.ended(f"e{name}")
    rates = book.measured(training_token_s=5e-4)
    sampled = sum(len(each.output) for each in calls)
    assert rates.decode_weights_s + rates.decode_request_s == pytest.approx(0.006, rel=0.05)
    assert rates.prefill_token_s == pytest.approx(1e-4, rel=0.1)
    assert rates.environment_token_s == pytest.approx(60 * 0.3 / sampled)
    assert rates.output_tokens == pytest.approx(sampled / 20)
    assert (rates.training_token_s, rates.kv_capacity_tokens) == (5e-4, 65536)


def test_nothing_is_said_before_enough_calls_are_there_and_an_execution_has_ended():
    book = RateBook(1000)
    for seq in range(30):
        book.note(call("e", seq, at_s=seq, seconds=0.5, tokens=10))
        assert book.measured(training_token_s=1.0) is None
    book.ended("e")
    assert book.measured(training_token_s=1.0) is not None
    few = RateBook(1000)
    few.note(call("e", 0, at_s=0.0, seconds=0.5, tokens=10))
    few.ended("e")
    few.ended("never seen")
    assert few.measured(training_token_s=1.0) is None


def test_old_calls_are_forgotten():
    book = RateBook(1000)
    for seq in range(3 * CALLS_KEPT):
        cost_s = 1.0 if seq < 2 * CALLS_KEPT else 0.01
        book.note(call("e", seq, at_s=20.0 * seq, seconds=10 * cost_s, tokens=10))
    book.ended("e")
    rates = book.measured(training_token_s=1.0)
    assert rates.decode_weights_s + rates.decode_request_s + 20 * rates.prefill_token_s == pytest.approx(0.01, rel=0.01)


async def test_a_store_that_notes_is_the_store_and_notes_what_was_committed(tmp_path):
    ledger, book = Ledger.open(tmp_path), RateBook(1000)
    store = NotingStore(ledger, book)
    await store.commit([call("e", 0, at_s=0.0, seconds=1.0, tokens=3)], b"answer")
    assert await store.committed_answer("e", "e-r0") == b"answer"
    assert [each.call_id for each in await store.calls("e")] == ["e-c0"]
    book.ended("e")
    assert list(book._lengths) == [3]
    ledger.close()
