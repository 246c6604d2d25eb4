"""What the dialects have in common: texts out of content parts, raw arguments, hashes, server-sent events."""

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from opengyre.core.chat import Message
from opengyre.core.errors import CallError
from opengyre.proxy.items import Items
from opengyre.proxy.requests import Json

ENCODER = msgspec.json.Encoder()
_SEAL = "gyre1."
_TEXT_KINDS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")


def read_objects(value: Any, where: str) -> list[Json]:  # noqa: ANN401 - whatever the client sent
    """Return a list of objects; nothing counts as an empty one.

    Raises:
        CallError: It is something else.
    """
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise CallError(f"{where}: expected a list of objects, got {value!r:.200}")
    return value


def read_object(value: Any, where: str) -> Json:  # noqa: ANN401 - whatever the client sent
    """Return an object; nothing counts as an empty one.

    Raises:
        CallError: It is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CallError(f"{where}: expected an object, got {value!r:.200}")
    return value


def read_string(raw: Json, key: str, where: str) -> str:
    """Return a text that has to be there.

    Raises:
        CallError: It is missing or no text.
    """
    value = raw.get(key)
    if not isinstance(value, str):
        raise CallError(f"{where}.{key}: expected a text, got {value!r:.200}")
    return value


def read_text(content: Any, where: str, *, separator: str = "\n") -> str:  # noqa: ANN401 - whatever the client sent
    """Return the text of a content: nothing, a text, or text parts.

    Choice: the parts of a user, a system or a tool are put on lines of their own, those of an assistant follow one
    another directly, for they were one text when they were sampled.

    Raises:
        CallError: A part is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_KINDS:
            raise CallError(f"{where}: part of type {kind!r}; this policy reads text only")
        texts.append(str(part.get("refusal") or "" if kind == "refusal" else part.get("text") or ""))
    return separator.join(texts)


def read_limit(value: Any, where: str) -> int | None:  # noqa: ANN401 - whatever the client sent
    """Return a token limit.

    Raises:
        CallError: It is no positive integer.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise CallError(f"{where}: expected a positive integer, got {value!r:.200}")
    return value


def read_stops(value: Any, where: str) -> tuple[str, ...]:  # noqa: ANN401 - whatever the client sent
    """Return stop sequences.

    Raises:
        CallError: It is neither a text nor a list of texts.
    """
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise CallError(f"{where}: expected a text or a list of texts, got {value!r:.200}")
    return tuple(each for each in stops if each)


def body_hash(body: Json, volatile: Sequence[str]) -> int:
    """Return the hash of a body without the keys that a retry may change; of lists read by element, their digest's.

    Choice: keys are taken in the order in which they came, for a retry comes from the same client.
    """
    kept = {
        key: value.digest if isinstance(value, Items) else value for key, value in body.items() if key not in volatile
    }
    return xxhash.xxh3_64_intdigest(ENCODER.encode(kept))


def compact(value: object) -> str:
    """Return a value as JSON text without spaces, keys in the order in which they are.

    >>> compact({"b": 1, "a": "é"})
    '{"b":1,"a":"é"}'
    """
    return ENCODER.encode(value).decode()


def object_in(text: str) -> Json | None:
    """Return the object that an argument text is, None if it is none.

    >>> object_in('{"a": 1}'), object_in("[1]"), object_in("{")
    ({'a': 1}, None, None)
    """
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return None
    return value if isinstance(value, dict) else None


def seal(text: str) -> str:
    """Return a text as the opaque string that a client sends back unread.

    >>> unseal(seal("a thought"))
    'a thought'
    """
    return _SEAL + base64.b64encode(text.encode()).decode()


def unseal(value: object) -> str | None:
    """Return the text of an opaque string, None if it is not one of ours."""
    if not isinstance(value, str) or not value.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(value[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def merged(messages: Sequence[Message]) -> Message:
    """Return the one assistant message that the parts of an answer make."""
    return Message(
        role="assistant",
        content="".join(message.content for message in messages),
        reasoning="".join(message.reasoning for message in messages),
        tool_calls=tuple(call for message in messages for call in message.tool_calls),
    )


def event(name: str, data: Json) -> bytes:
    """Return a named server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + ENCODER.encode(data) + b"\n\n"
