"""What every reader makes: executions whose calls have token ids, or messages that are still to be rendered."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from opengyre.core.chat import Message, Tool
from opengyre.core.errors import FileError
from opengyre.core.types import Float32Array, Int32Array, Role, VersionRun
from opengyre.trajectory.tree import check_logprobs

Json = dict[str, Any]


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The token ids of a call, as the file holds them.

    Example: ``TokenRecord(context=np.array([1, 2], np.int32), output=np.array([3], np.int32), logprobs=None)``.
    """

    context: Int32Array
    """[C] int32."""
    output: Int32Array
    """[T] int32."""
    logprobs: Float32Array | None
    """[T] float32; None where the file has none, and then the call is approximate."""


class ImportedCall(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One call of another tool's file: with token ids, or with messages to render.

    Example: ``ImportedCall(call_id="c0", agent="main", role=Role.MAIN, messages=(ask,), reply=answer)``.
    """

    call_id: str
    agent: str
    role: Role
    messages: tuple[Message, ...] = ()
    reply: Message | None = None
    tools: tuple[Tool, ...] = ()
    tokens: TokenRecord | None = None
    request_id: str = ""
    versions: tuple[VersionRun, ...] | None = None


class ImportedExecution(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All calls of one execution in the order in which the file tells them.

    Example: a session file with two sub-agent files gives one execution with three agents.
    """

    execution_id: str
    calls: tuple[ImportedCall, ...]
    is_approximate: bool = False
    """The file itself says that its ids were rendered."""


def read_lines(path: Path) -> Iterator[tuple[int, Json]]:
    """Yield (line number, object) of a file of JSON lines; empty lines are skipped.

    Raises:
        FileError: The file cannot be read, or a line is not a JSON object.
    """
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FileError(f"{path}:{number}: not JSON: {error}; expected one object a line") from error
        if not isinstance(value, dict):
            raise FileError(f"{path}:{number}: {type(value).__name__}, expected an object")
        yield number, value


def read_object(path: Path) -> Json:
    """Return the JSON object that a file is.

    Raises:
        FileError: The file cannot be read or is something else.
    """
    data = read_bytes(path)
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        line = data.count(b"\n") + 1
        raise FileError(f"{path}:{line}: not JSON: {error}; expected one object") from error
    if not isinstance(value, dict):
        raise FileError(f"{path}:1: {type(value).__name__}, expected an object")
    return value


def read_bytes(path: Path) -> bytes:
    """Return what a file holds.

    Raises:
        FileError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error


def token_ids(value: Any, where: str, *, vocabulary: int | None = None) -> Int32Array:  # noqa: ANN401 - from a file
    """Return a list of token ids as an array.

    Raises:
        FileError: It is not a list of integers from 0 to below the vocabulary.
    """
    limit = vocabulary if vocabulary is not None else 2**31
    expected = f"integers from 0 to {limit - 1}"
    try:
        ids = msgspec.convert(value, list[int])
    except msgspec.ValidationError as error:
        raise FileError(f"{where}: {error}; expected a list of {expected}") from error
    if not ids:
        return np.zeros(0, np.int32)
    array = np.array(ids, np.int64) if max(ids) < 2**62 and min(ids) > -(2**62) else np.array([-1])
    wrong = np.flatnonzero((array < 0) | (array >= limit))
    if len(wrong):
        raise FileError(f"{where}: token id {ids[int(wrong[0])]} at index {int(wrong[0])}; expected {expected}")
    return array.astype(np.int32)


def logprob_list(value: Any, output: Int32Array, where: str) -> Float32Array:  # noqa: ANN401 - from a file
    """Return a list of logprobs as an array.

    Raises:
        FileError: There is not exactly one finite logprob, at most 0, for each output token.
    """
    expected = f"{len(output)} finite numbers, none above 0"
    try:
        values = np.array(msgspec.convert(value, list[float]), np.float32)
    except msgspec.ValidationError as error:
        raise FileError(f"{where}: {error}; expected {expected}") from error
    if check_logprobs(output, values):
        return values
    if len(values) != len(output):
        raise FileError(f"{where}: {len(values)} logprobs for {len(output)} output tokens; expected {expected}")
    wrong = int(np.flatnonzero(~(np.isfinite(values) & (values <= 1e-6)))[0])
    raise FileError(f"{where}: logprob {values[wrong]} at index {wrong}; expected {expected}")


def text_of(content: Any, where: str) -> str:  # noqa: ANN401 - from a file
    r"""Return the text of a message's content: a text, a list of text parts, or nothing.

    >>> text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "x")
    'a\nb'

    Raises:
        FileError: It is none of these.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise FileError(f"{where}: content is {type(content).__name__}, expected a text or a list of parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            kind = str(part.get("type", "text"))
            texts.append(str(part["text"]) if "text" in part else f"[{kind}]")
        else:
            raise FileError(f"{where}: a part is {type(part).__name__}, expected an object")
    return "\n".join(texts)
