"""What the role tracker keeps of a request: its history as a chain of keys, system text, tools, reply."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from opengyre.core.chat import Message, Tool
from opengyre.core.types import Role
from opengyre.trajectory.heads import Heads

LINE_CHARACTERS = 16
SYSTEM_ROLES = ("system", "developer")


class RoleGuess(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is believed of a call.

    >>> RoleGuess(call_id="c1", role=Role.MAIN, agent="main", evidence="first root with tools", confidence=0.8).agent
    'main'
    """

    call_id: str
    role: Role
    agent: str
    evidence: str
    confidence: float


@dataclass(slots=True, eq=False)
class Agent:
    """One agent of the harness, as its requests show it.

    >>> Agent(name="sub-1", is_sub=True).last
    -1
    """

    name: str
    is_sub: bool
    fingerprints: set[tuple[int, int]] = field(default_factory=set)
    toolsets: set[int] = field(default_factory=set)
    spawn: str = ""
    last: int = -1
    """Its latest request that was not set aside as summary or plan."""


class SeenRequest(msgspec.Struct, eq=False, gc=False):
    """One request as the tracker keeps it; very many of them for hours, and none is in a cycle.

    Example: ``seen_request("c0", 0, messages, tools, chain_of(messages, Heads(key_behind)))``.
    """

    guess: RoleGuess
    place: int
    agent: Agent | None
    head: tuple[int, ...]
    """Keys behind the first two messages that are no system text."""
    system: int
    toolset: int
    has_tools: bool
    ends_with_user: bool
    closing: int
    """Hash of the last user text behind a history; 0 if the request ends otherwise."""
    is_root: bool
    body: int
    reply: Message | None = None

    @property
    def fingerprint(self) -> tuple[int, int]:
        """System text and tool names."""
        return (self.system, self.toolset)


def chain_of(messages: Sequence[Message], heads: Heads[int]) -> list[int]:
    """Return a key behind each message that is no system text; it stands for all messages up to there.

    Args:
        messages: The history.
        heads: Values of ``key_behind``, kept from one request to the next.
    """
    keys = heads.values(messages)
    return [key for key, message in zip(keys, messages, strict=True) if message.role not in SYSTEM_ROLES]


def key_behind(message: Message, before: int | None) -> int:
    """Return the key behind a message, given that behind the one before it."""
    return (before or 0) if message.role in SYSTEM_ROLES else message_key(message, before or 0)


def seen_request(
    call_id: str, place: int, messages: Sequence[Message], tools: Sequence[Tool], chain: Sequence[int]
) -> SeenRequest:
    """Return a request as the tracker keeps it, given the keys of its messages."""
    system = [message.content for message in messages if message.role in SYSTEM_ROLES]
    names = sorted(tool.name for tool in tools)
    first_system = system[0] if messages and messages[0].role in SYSTEM_ROLES else ""
    toolset = hashed("\0".join(names))
    return SeenRequest(
        guess=RoleGuess(call_id=call_id, role=Role.AUXILIARY, agent="", evidence="", confidence=0.0),
        place=place,
        agent=None,
        head=tuple(chain[:2]),
        system=hashed(first_system),
        toolset=toolset,
        has_tools=bool(tools),
        ends_with_user=bool(messages) and messages[-1].role == "user",
        closing=hashed(messages[-1].content.strip()) if len(chain) > 1 and messages[-1].role == "user" else 0,
        is_root=True,
        body=hashed(f"{first_system}\0{toolset}\0{chain[-1] if chain else 0}"),
    )


def message_key(message: Message, previous: int) -> int:
    """Return the chained key of what two echoes of a message share: ids of tool calls, or text without outer space."""
    if message.tool_calls:
        return xxhash.xxh3_64_intdigest(
            "\0".join(call.id or call.name for call in message.tool_calls).encode(errors="surrogatepass"), previous
        )
    head = xxhash.xxh3_64_intdigest(f"{message.role}\0{message.tool_call_id}".encode(), previous)
    return xxhash.xxh3_64_intdigest(message.content.strip().encode(errors="surrogatepass"), head)


def texts_of(arguments: str) -> list[str]:
    """Return the text values of a tool call's arguments.

    >>> texts_of('{"prompt": " count the files ", "n": 3}')
    ['count the files']
    """
    try:
        parsed = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return []
    values = list(parsed.values()) if isinstance(parsed, dict) else []
    return [value.strip() for value in values if isinstance(value, str)]


def holds(text: str, reply: str) -> bool:
    r"""Return whether a text holds a reply, or at least half of its longer lines.

    >>> holds("Summary:\nwrote the first file\nnext: the second", "<x>\nwrote the first file\n</x>")
    True
    """
    if reply in text:
        return True
    lines = [line.strip() for line in reply.splitlines() if len(line.strip()) >= LINE_CHARACTERS]
    return bool(lines) and 2 * sum(line in text for line in lines) >= len(lines)


def lines_of(text: str) -> list[int]:
    """Return the hashes of the longer lines of a text."""
    return [hashed(line.strip()) for line in text.splitlines() if len(line.strip()) >= LINE_CHARACTERS]


def hashed(text: str) -> int:
    """Return the xxh3 of a text, 64 bits."""
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"))


def is_text(reply: Message | None) -> bool:
    """Return whether a reply is there, says something and calls no tool."""
    return reply is not None and not reply.tool_calls and bool(reply.content.strip())
