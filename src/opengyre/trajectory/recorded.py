"""From recorded calls to a tree: expands delta contexts and decides which outputs are context for good."""

from collections.abc import Sequence

import numpy as np

from opengyre.core.errors import InvariantError
from opengyre.core.types import Call, Delivered, Int32Array, Role, SamplingLaw
from opengyre.trajectory.tree import Exclusion, TrajectoryTree, TreeCall, check_logprobs


def contexts_of(calls: Sequence[Call]) -> list[Int32Array]:
    """Return the whole context of each call, [C] int32, from the deltas.

    Raises:
        InvariantError: A parent is missing or shorter than what is shared with it.
    """
    whole: dict[str, Int32Array] = {}
    contexts = []
    for call in calls:
        context = call.tail
        if call.parent_call_id is not None and call.shared:
            parent = whole.get(call.parent_call_id)
            if parent is None or len(parent) < call.shared:
                raise InvariantError(
                    f"call {call.call_id} shares {call.shared} tokens with {call.parent_call_id}, "
                    f"which has {0 if parent is None else len(parent)}"
                )
            context = np.concatenate((parent[: call.shared], call.tail)) if len(call.tail) else parent[: call.shared]
        contexts.append(context)
        whole[call.call_id] = np.concatenate((context, call.output))
    return contexts


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

    Choice: compared by message: a later call of the agent holds the request's last key, followed by another message
    than the reply. A rewritten or compacted history does not hold the key and so decides nothing.
    """
    vanished: set[str] = set()
    for index, call in enumerate(calls):
        if len(call.message_keys) < 2 or call.delivered is not Delivered.COMPLETE:
            continue
        request_key, reply_key = call.message_keys[-2:]
        followers = [
            later.message_keys[place + 1]
            for later in calls[index + 1 :]
            if later.agent_key == call.agent_key and request_key in later.message_keys[:-2]
            for place in (later.message_keys.index(request_key),)
        ]
        if followers and reply_key not in followers:
            vanished.add(call.call_id)
    return vanished


def tree_of(execution_id: str, calls: Sequence[Call]) -> TrajectoryTree:
    """Return the tree of an execution's recorded calls."""
    tree = TrajectoryTree(execution_id)
    vanished = vanished_calls(calls)
    for call, context in zip(calls, contexts_of(calls), strict=True):
        exclusion = exclusion_of(call, vanished=call.call_id in vanished)
        logprobs = call.behaviour_logprobs
        if exclusion is Exclusion.POISONED:
            logprobs = np.zeros(len(call.output), np.float32)
        tree.insert(
            TreeCall(
                call_id=call.call_id,
                request_id=call.request_id,
                agent=call.agent_key,
                role=call.role,
                context=context,
                output=call.output,
                logprobs=logprobs,
                versions=call.versions,
                exclusion=exclusion,
                temperature=call.sampling.temperature or 1.0,
            )
        )
    return tree
