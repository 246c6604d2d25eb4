"""From recorded calls to a tree: expands delta contexts and decides which outputs are context for good."""

from collections.abc import Iterator, Sequence

from opengyre.core.types import Call, Delivered, Int32Array, Role, SamplingLaw
from opengyre.trajectory.match import is_reply_key
from opengyre.trajectory.tree import Exclusion, TrajectoryTree, TreeCall, check_logprobs


def contexts_of(calls: Sequence[Call]) -> Iterator[Int32Array]:
    """Yield the whole context of each call, [C] int32; memory is linear in unique tokens.

    Raises:
        InvariantError: A parent is missing or shorter than what is shared with it.
    """
    tree = TrajectoryTree()
    for index, call in enumerate(calls):
        tree.insert(tree_call(call, Exclusion.TRUNCATED))
        yield tree.context_of(index)


def exclusion_of(call: Call, *, vanished: bool) -> Exclusion:
    """Return why a call's output is not trained."""
    if call.role is Role.AUXILIARY:
        return Exclusion.AUXILIARY
    if not check_logprobs(call.output, call.behaviour_logprobs):
        return Exclusion.POISONED
    if call.delivered is Delivered.HUNG_UP:
        return Exclusion.ORPHAN
    if call.sampling.law is not SamplingLaw.POLICY:
        return Exclusion.TRUNCATED
    return Exclusion.VANISHED if vanished else Exclusion.NONE


def vanished_calls(calls: Sequence[Call]) -> set[str]:
    """Return the ids of answers that their agent left out although it went on from the same request.

    Choice: compared by message: a later call of the agent holds the request's last key, followed by a message that is
    not an assistant's, or by the recorded reply of another call. An assistant message that is no recorded reply is a
    rewritten echo (a stripped thought) and decides nothing; neither does a compacted history, which does not hold the
    key. Linear in unique messages: a chained key stands for all messages before it.
    """
    replies = {call.message_keys[-1] for call in calls if call.message_keys}
    followers: dict[tuple[str, int], set[int]] = {}
    vanished: set[str] = set()
    for call in reversed(calls):
        keys = call.message_keys
        if len(keys) >= 2 and call.delivered is Delivered.COMPLETE:
            found = followers.get((call.agent_key, keys[-2]), set())
            others = [key for key in found if key in replies or not is_reply_key(key)]
            if others and keys[-1] not in found and len(others) == len(found):
                vanished.add(call.call_id)
        for place in range(len(keys) - 3, -1, -1):
            known = followers.setdefault((call.agent_key, keys[place]), set())
            if keys[place + 1] in known:
                break
            known.add(keys[place + 1])
    return vanished


def tree_call(call: Call, exclusion: Exclusion) -> TreeCall:
    """Return a recorded call as the tree takes it, its context as the tail behind its parent."""
    return TreeCall(
        call_id=call.call_id,
        request_id=call.request_id,
        agent=call.agent_key,
        role=call.role,
        context=call.tail,
        output=call.output,
        logprobs=call.behaviour_logprobs,
        versions=call.versions,
        exclusion=exclusion,
        temperature=call.sampling.temperature or 1.0,
        parent=call.parent_call_id,
        shared=call.shared,
    )


def tree_of(execution_id: str, calls: Sequence[Call]) -> TrajectoryTree:
    """Return the tree of an execution's recorded calls.

    Raises:
        InvariantError: A parent is missing or shorter than what is shared with it.
    """
    tree = TrajectoryTree(execution_id)
    vanished = vanished_calls(calls)
    for call in calls:
        tree.insert(tree_call(call, exclusion_of(call, vanished=call.call_id in vanished)))
    return tree
