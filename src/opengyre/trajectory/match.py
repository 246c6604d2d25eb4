"""Which stored call a request continues: matched by message, so that its tokens can be reused exactly.

A stored call is a path of message keys that ends in its reply. A request is walked from its first message; where the
path so far has recorded replies, an assistant message is compared with them: by ordered tool-call ids where it has any
(arguments as parsed JSON, the echoed name ignored), else by text, exact first, then normalised. Ids that collide
across sub-agents cannot be confused, because only replies of the same path are compared. Two different replies that fit
equally well are ambiguous: no restoration.

Choice: a reply whose reasoning was stripped or changed is a true fork, for the harness asks the model to go on without
it; reasoning that was only trimmed is not. The lowest bit of a key says whether an assistant wrote the message.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from opengyre.core.chat import Message, Tool
from opengyre.core.types import Verdict
from opengyre.trajectory.heads import HISTORIES_KEPT, Heads

_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Match:
    """What of a request is the path of a stored call.

    Example: ``Match(call_id="c3", covered=5, keys=(...), verdict=Verdict.RESTORED, first_difference=-1)``: the first
    five messages are call c3's request and reply, the rest has to be rendered.
    """

    call_id: str | None
    covered: int
    """Messages that the stored call covers, its reply included."""
    keys: tuple[int, ...]
    """Chained key behind each message."""
    verdict: Verdict
    """`rewritten`: behind what is covered, an assistant message stands where replies were recorded and is none of them;
    else `restored` if a stored call is continued, `rendered` if none is."""
    first_difference: int
    """First message after which no stored path goes on; -1 if the request extends one."""


class _Reply(msgspec.Struct, frozen=True, gc=False):
    call_id: str
    message: Message
    key: int


class _Walk(msgspec.Struct, frozen=True, gc=False):
    """What is known of a request behind one of its messages."""

    key: int
    place: int = 0
    """Messages up to here."""
    call_id: str | None = None
    covered: int = 0
    is_rewritten: bool = False


@dataclass
class PathIndex:
    """The stored paths of one execution.

    >>> index = PathIndex()
    >>> ask, reply = Message(role="user", content="hi"), Message(role="assistant", content="yes")
    >>> first = index.match([ask], [])
    >>> key = index.add("c1", first.keys, reply)
    >>> index.match([ask, reply, Message(role="user", content="more")], []).call_id
    'c1'
    """

    _replies: dict[int, tuple[_Reply, ...]] = field(default_factory=dict)
    """Key of a request's last message to its recorded replies."""
    _known: set[int] = field(default_factory=set)
    _walks: dict[int, Heads[_Walk]] = field(default_factory=dict)
    """By head key: the walks of the last requests, good until a reply is recorded on their way."""

    def add(self, call_id: str, request_keys: Sequence[int], reply: Message) -> int:
        """Store a call's path and return the key of its reply."""
        last = request_keys[-1] if request_keys else 0
        key = _chained(last, _reply_bytes(reply), is_reply=True)
        self._replies[last] = (*self._replies.get(last, ()), _Reply(call_id, reply, key))
        self._known.update(request_keys)
        self._known.add(key)
        for walks in self._walks.values():
            walks.cut(lambda walk: walk.key == last)
        return key

    def match(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Match:
        """Return the deepest stored call whose path the request continues."""
        walks = self._walks_from(head_key(tools)).values(messages)
        keys = tuple([walk.key for walk in walks])
        end = walks[-1] if walks else _Walk(0)
        verdict = Verdict.RENDERED if end.call_id is None else Verdict.RESTORED
        if end.is_rewritten:
            verdict = Verdict.REWRITTEN
        first_difference = next((index for index, key in enumerate(keys) if key not in self._known), -1)
        return Match(end.call_id, end.covered, keys, verdict, first_difference)

    def _walks_from(self, head: int) -> Heads[_Walk]:
        """Return the kept walks that begin with a key; those of the tools that were used longest ago go."""
        walks = self._walks.pop(head, None) or Heads(lambda message, before: self._step(message, before or _Walk(head)))
        self._walks[head] = walks
        while len(self._walks) > HISTORIES_KEPT:
            del self._walks[next(iter(self._walks))]
        return walks

    def _step(self, message: Message, before: _Walk) -> _Walk:
        """Return how far a walk has come behind one more message."""
        key, place = before.key, before.place + 1
        is_reply = message.role == "assistant"
        reply = self._fitting(key, message) if is_reply and key in self._replies else None
        if reply is not None:
            return _Walk(reply.key, place, reply.call_id, place)
        is_rewritten = before.is_rewritten or (is_reply and key in self._replies)
        key = _chained(key, _ENCODER.encode(message), is_reply=is_reply)
        return _Walk(key, place, before.call_id, before.covered, is_rewritten)

    def _fitting(self, key: int, message: Message) -> _Reply | None:
        """Return the recorded reply that an assistant message echoes, None if none or more than one does."""
        recorded = self._replies.get(key, ())
        if len(recorded) == 1 and recorded[0].message == message:
            return recorded[0]
        for fits in (_fits_ids, _fits_exactly, _fits_normalised):
            found = {reply.key: reply for reply in recorded if fits(reply.message, message)}
            if len(found) == 1:
                return next(iter(found.values()))
            if found:
                return None
        return None


def head_key(tools: Sequence[Tool]) -> int:
    """Return the key that stands before the first message: the tools as rendered."""
    return xxhash.xxh3_64_intdigest(_ENCODER.encode([(t.name, t.description, t.schema) for t in tools]))


def is_reply_key(key: int) -> bool:
    """Return whether an assistant wrote the message behind which a key stands.

    >>> index = PathIndex()
    >>> [is_reply_key(key) for key in index.match([Message(role="user"), Message(role="assistant")], []).keys]
    [False, True]
    """
    return bool(key & 1)


def _chained(key: int, data: bytes, *, is_reply: bool) -> int:
    return xxhash.xxh3_64_intdigest(data, seed=key) & ~1 | is_reply


def _reply_bytes(reply: Message) -> bytes:
    """Return what makes two replies the same: text, reasoning, ids, names, arguments as parsed."""
    calls = [(call.id, call.name, _parsed(call.arguments)) for call in reply.tool_calls]
    return msgspec.msgpack.encode((reply.content, reply.reasoning, calls), order="deterministic")


def _parsed(arguments: str) -> object:
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments


def _fits_ids(recorded: Message, echoed: Message) -> bool:
    """Whether ordered tool-call ids agree, arguments are equal as parsed JSON, and no reasoning was taken out."""
    if not echoed.tool_calls or not recorded.tool_calls:
        return False
    if recorded.reasoning.strip() != echoed.reasoning.strip():
        return False
    if [call.id for call in recorded.tool_calls] != [call.id for call in echoed.tool_calls]:
        return False
    return all(
        mine.arguments == theirs.arguments or _parsed(mine.arguments) == _parsed(theirs.arguments)
        for mine, theirs in zip(recorded.tool_calls, echoed.tool_calls, strict=True)
    )


def _fits_exactly(recorded: Message, echoed: Message) -> bool:
    if recorded.tool_calls or echoed.tool_calls:
        return False
    return (recorded.content, recorded.reasoning) == (echoed.content, echoed.reasoning)


def _fits_normalised(recorded: Message, echoed: Message) -> bool:
    if recorded.tool_calls or echoed.tool_calls:
        return False
    return (recorded.content.strip(), recorded.reasoning.strip()) == (echoed.content.strip(), echoed.reasoning.strip())
