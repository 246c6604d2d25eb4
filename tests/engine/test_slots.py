"""The book of cache slots."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.core.errors import InvariantError
from opengyre.engine.blocks import BLOCK_TOKENS
from opengyre.engine.slots import SlotBook


def ramp(length: int, *, start: int = 0) -> np.ndarray:
    return np.arange(start, start + length, dtype=np.int32)


def run(book: SlotBook, tokens: np.ndarray, *, version: int = 1, execution: str = "e"):
    placement = book.place(tokens, version=version, execution_id=execution)
    assert placement is not None
    book.publish_prefix(placement.slot, len(tokens))
    book.finish(placement.slot, tokens, len(tokens))
    return placement


def test_an_extended_context_reuses_everything_in_place():
    book = SlotBook(4)
    first = run(book, ramp(50))
    second = book.place(ramp(70), version=1, execution_id="e")
    assert (second.slot, second.copy_from, second.cached) == (first.slot, None, 50)


def test_a_fork_is_copied_and_leaves_the_source_whole():
    book = SlotBook(4)
    first = run(book, ramp(100))
    forked = np.concatenate((ramp(40), ramp(20, start=500)))
    placement = book.place(forked, version=1, execution_id="e")
    assert (placement.copy_from, placement.cached) == (first.slot, 40)
    assert placement.slot != first.slot
    assert book.place(ramp(100), version=1, execution_id="e").cached == 99


def test_another_version_gets_nothing():
    book = SlotBook(4)
    run(book, ramp(64), version=1)
    assert book.place(ramp(64), version=2, execution_id="e").cached == 0


def test_a_mixed_slot_is_never_reused():
    book = SlotBook(4)
    placement = book.place(ramp(64), version=1, execution_id="e")
    book.publish_prefix(placement.slot, 64)
    book.mark_mixed(placement.slot)
    book.finish(placement.slot, ramp(64), 64)
    assert book.place(ramp(64), version=1, execution_id="e").cached == 0


def test_a_prefix_that_is_being_computed_is_waited_for():
    book = SlotBook(4)
    first = book.place(ramp(64), version=1, execution_id="a")
    assert book.place(ramp(64), version=1, execution_id="b") is None
    assert book.place(ramp(64), version=2, execution_id="b") is not None
    book.publish_prefix(first.slot, 64)
    second = book.place(ramp(64), version=1, execution_id="b")
    assert (second.copy_from, second.cached) == (first.slot, 63)


def test_a_call_that_ends_before_its_prefix_is_computed_is_not_waited_for_any_more():
    book = SlotBook(4)
    first = book.place(ramp(64), version=1, execution_id="a")
    book.finish(first.slot, ramp(64), 0)
    assert book.place(ramp(64), version=1, execution_id="b").cached == 0


def test_released_executions_lose_their_slots_first():
    book = SlotBook(3)
    run(book, ramp(20), execution="old")
    kept = run(book, ramp(20, start=100), execution="kept")
    run(book, ramp(20, start=200), execution="ended")
    book.release("ended")
    run(book, ramp(20, start=300), execution="new")
    assert book.place(ramp(40, start=100), version=1, execution_id="kept").slot == kept.slot


def test_a_version_number_with_other_weights_forgets_what_was_cached():
    book = SlotBook(4)
    run(book, ramp(64))
    running = book.place(ramp(64, start=500), version=1, execution_id="x")
    assert book.forget_version(1) == [running.slot]
    assert book.place(ramp(64), version=1, execution_id="e").cached == 0


def test_a_slot_is_finished_once():
    book = SlotBook(2)
    placement = run(book, ramp(20))
    with pytest.raises(InvariantError, match="not running"):
        book.finish(placement.slot, ramp(20), 20)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 80), st.integers(0, 60), st.integers(1, 2)), max_size=30))
def test_what_is_cached_is_always_a_true_prefix_of_the_same_version(calls):
    book = SlotBook(5)
    held: dict[int, tuple[int, np.ndarray]] = {}
    for trunk, length, fork, version in calls:
        tokens = np.concatenate((ramp(fork, start=1000 * trunk), ramp(length, start=7000 + length)))
        placement = book.place(tokens, version=version, execution_id=str(trunk))
        source = placement.slot if placement.copy_from is None else placement.copy_from
        if placement.cached:
            held_version, held_tokens = held[source]
            assert held_version == version
            assert held_tokens[: placement.cached].tolist() == tokens[: placement.cached].tolist()
        same = [
            int(np.argmin(np.append(one[: len(tokens)] == tokens[: len(one)], False)))
            for number, one in held.values()
            if number == version
        ]
        best = max([count for count in same if count >= BLOCK_TOKENS], default=0)
        assert placement.cached >= min(best, len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        held[placement.slot] = (version, tokens)
        book.publish_prefix(placement.slot, len(tokens))
        book.finish(placement.slot, tokens, len(tokens))
