"""What is not stored of a call: keys, ids of accounts and devices, the names of this host."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SECRET_HEADER = re.compile(r"authorization|api-?key|cookie|token|account|organi[sz]ation|project|device|installation")
_SECRET_NAMES = r"(?:user|account|device|organization|installation)_(?:id|uuid)|(?:x-codex-)?installation[-_]id"
_SECRET_KEY = re.compile(f"{_SECRET_NAMES}|safety_identifier|user")
_IN_TEXT = re.compile(rf'(\\*"(?:{_SECRET_NAMES})\\*"\s*:\s*\\*")[^"\\]+')
"""The same in JSON that is written into a text."""
_SPOKEN = ("messages", "input", "system", "instructions", "tools", "contents")
"""Parts of a request that the model reads: they keep everything but the names of the host."""
REDACTED = "redacted"


def host_names() -> dict[str, str]:
    """Return texts that tell whose machine this is, and what stands for them.

    Choice: a home folder directly below the root (``/root``) is only taken out where something follows it, for its
    name alone is a common word of paths.
    """
    home = str(Path.home()).rstrip("/")
    if not home:
        return {}
    if home.count("/") < 2:
        return {f"{home}/": "/home-of-user/"}
    return {home: "/home-of-user"}


def redacted_call(line: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a line of a capture without what tells whose machine and account it was.

    >>> line = {"headers": {"X-Api-Key": "sk-1", "turn": '{"device_id": "d"}'}, "response": {"at": "/Users/ann/x"},
    ...         "request": {"user": "ann", "messages": [{"user": "kept"}], "metadata": {"account_id": "7"}}}
    >>> redacted_call(line, {"/Users/ann": "/home-of-user"}) == {
    ...     "headers": {"turn": '{"device_id": "redacted"}'}, "response": {"at": "/home-of-user/x"},
    ...     "request": {"user": "redacted", "messages": [{"user": "kept"}], "metadata": {"account_id": "redacted"}}}
    True
    """
    headers = {key: each for key, each in line["headers"].items() if not _SECRET_HEADER.search(key.lower())}
    request = line["request"]
    if isinstance(request, dict):
        spoken = {key: without_names(request[key], names) for key in _SPOKEN if key in request}
        request = {**_without_ids({key: request[key] for key in request if key not in spoken}, names), **spoken}
        request = {key: request[key] for key in line["request"]}
    response = without_names(line["response"], names)
    return {**line, "headers": _without_ids(headers, names), "request": request, "response": response}


def without_names(value: Any, names: Mapping[str, str]) -> Any:  # noqa: ANN401 - any JSON
    """Return a JSON value in which the names of this host are replaced.

    >>> without_names(["/Users/ann/x", 1], {"/Users/ann": "/home-of-user"})
    ['/home-of-user/x', 1]
    """
    if isinstance(value, str):
        for name, other in names.items():
            value = value.replace(name, other)
        return value
    if isinstance(value, list):
        return [without_names(item, names) for item in value]
    if isinstance(value, dict):
        return {key: without_names(item, names) for key, item in value.items()}
    return value


def _without_ids(value: Any, names: Mapping[str, str]) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(value, str):
        return _IN_TEXT.sub(rf"\g<1>{REDACTED}", without_names(value, names))
    if isinstance(value, list):
        return [_without_ids(item, names) for item in value]
    if isinstance(value, dict):
        return {
            key: REDACTED if _SECRET_KEY.fullmatch(key) and isinstance(item, str) else _without_ids(item, names)
            for key, item in value.items()
        }
    return value
