"""Who made each call of an execution: an agent, and its role, with the evidence and how far it can be trusted.

Evidence, strongest first: what the harness marks (``marks.RoleMarks``); the same request again; a history that goes on
from a recorded reply; a user text that equals an argument of a tool call that is still pending (a spawn); the text of
an earlier reply in the first messages of a new root (a compaction); the fingerprint of system text and tool names,
learned within the execution. Nothing here names a harness, a model or a task: what a harness marks arrives as data.

A call may be judged anew when later requests show what it was: a summary is known by the history that was reset after
it, a plan by the history that took it in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from opengyre.core.chat import Message, Tool
from opengyre.core.types import Role
from opengyre.trajectory.marks import Mark

_SPAWN_CHARACTERS = 8
_SPAWN_TAIL_CHARACTERS = 16
_LINE_CHARACTERS = 16
_SYSTEM_ROLES = ("system", "developer")


class RoleGuess(msgspec.Struct, frozen=True, kw_only=True):
    """What is believed of a call.

    >>> RoleGuess(call_id="c1", role=Role.MAIN, agent="main", evidence="first root with tools", confidence=0.8).agent
    'main'
    """

    call_id: str
    role: Role
    agent: str
    evidence: str
    confidence: float


@dataclass
class _Agent:
    """One history of the harness: its requests in order."""

    name: str
    is_sub: bool
    fingerprints: set[tuple[int, int]] = field(default_factory=set)
    toolsets: set[int] = field(default_factory=set)
    spawn: str = ""
    last: int = -1
    """Its latest request that was not set aside as summary or plan."""
    first_text: str = ""


@dataclass
class _Seen:
    """One request as the tracker keeps it."""

    guess: RoleGuess
    place: int
    agent: _Agent | None
    chain: tuple[int, ...]
    system: int
    toolset: int
    has_tools: bool
    ends_with_user: bool
    is_root: bool
    body: int
    reply: Message | None = None

    @property
    def fingerprint(self) -> tuple[int, int]:
        """System text and tool names."""
        return (self.system, self.toolset)


@dataclass
class RoleTracker:
    """Follows one execution call by call.

    >>> tracker = RoleTracker()
    >>> title = tracker.observe("c0", [Message(role="user", content="name this")], [])
    >>> main = tracker.observe("c1", [Message(role="user", content="do it")], [Tool(name="shell")])
    >>> title.role.value, main.role.value
    ('auxiliary', 'main')
    """

    _seen: list[_Seen] = field(default_factory=list)
    _by_id: dict[str, _Seen] = field(default_factory=dict)
    _by_chain: dict[int, list[_Seen]] = field(default_factory=dict)
    """Key of a request's last message to the requests that end so."""
    _by_body: dict[int, _Seen] = field(default_factory=dict)
    _agents: list[_Agent] = field(default_factory=list)
    _spawns: dict[str, int] = field(default_factory=dict)
    """Text argument of a recorded tool call to the number of sub-agents that it may still start."""
    _lines: dict[int, _Agent] = field(default_factory=dict)
    """Line of a history, hashed, to the agent whose history it is."""
    _summary_prints: set[tuple[int, int]] = field(default_factory=set)
    """System text (and no tools) of calls that were proven to be summaries."""
    _revised: dict[str, RoleGuess] = field(default_factory=dict)

    # -- what the user of a tracker calls ---------------------------------------------------------------------

    def observe(
        self, call_id: str, messages: Sequence[Message], tools: Sequence[Tool], mark: Mark | None = None
    ) -> RoleGuess:
        """Return what a request looks like when it arrives; ``revisions`` says what it changes of earlier calls."""
        seen = self._read(call_id, messages, tools)
        self._judge(seen, messages, mark or Mark())
        self._seen.append(seen)
        self._by_id[call_id] = seen
        self._by_body.setdefault(seen.body, seen)
        if seen.chain:
            self._by_chain.setdefault(seen.chain[-1], []).append(seen)
        agent = seen.agent
        if agent is not None:
            if seen.guess.role in (Role.MAIN, Role.SUB_AGENT) and (seen.has_tools or not seen.is_root):
                agent.last = seen.place
                if seen.has_tools or not agent.toolsets:
                    agent.fingerprints.add(seen.fingerprint)
                if seen.has_tools:
                    agent.toolsets.add(seen.toolset)
            self._learn_lines(agent, messages)
        return seen.guess

    def answered(self, call_id: str, reply: Message) -> None:
        """Take in the reply of a call: it may start sub-agents, and later histories may hold it."""
        self._by_id[call_id].reply = reply
        for call in reply.tool_calls:
            for text in _texts(call.arguments):
                if len(text) >= _SPAWN_CHARACTERS:
                    self._spawns[text] = self._spawns.get(text, 0) + 1

    def revisions(self) -> list[RoleGuess]:
        """Return the calls that are judged differently since the last time, and forget them."""
        revised = list(self._revised.values())
        self._revised.clear()
        return revised

    def finish(self) -> list[RoleGuess]:
        """Return the last revisions at the end of an execution.

        Choice: an execution in which nothing looked like a main agent was one agent without tools.
        """
        if self._seen and not any(agent for agent in self._agents if not agent.is_sub):
            first = self._seen[0]
            agent = self._new_agent("main", is_sub=False)
            for seen in self._seen:
                if seen.agent is None and seen.fingerprint == first.fingerprint:
                    self._revise(seen, agent, Role.MAIN, "the only kind of request in the execution", 0.5)
        return self.revisions()

    def guess_of(self, call_id: str) -> RoleGuess:
        """Return what is believed of a call now."""
        return self._by_id[call_id].guess

    # -- judging ----------------------------------------------------------------------------------------------

    def _read(self, call_id: str, messages: Sequence[Message], tools: Sequence[Tool]) -> _Seen:
        system = [message.content for message in messages if message.role in _SYSTEM_ROLES]
        names = sorted(tool.name for tool in tools)
        chain: list[int] = []
        key = 0
        for message in messages:
            if message.role not in _SYSTEM_ROLES:
                key = xxhash.xxh3_64_intdigest(_message_bytes(message), seed=key)
                chain.append(key)
        first_system = system[0] if messages and messages[0].role in _SYSTEM_ROLES else ""
        toolset = _hashed("\0".join(names))
        return _Seen(
            guess=RoleGuess(call_id=call_id, role=Role.AUXILIARY, agent="", evidence="", confidence=0.0),
            place=len(self._seen),
            agent=None,
            chain=tuple(chain),
            system=_hashed(first_system),
            toolset=toolset,
            has_tools=bool(tools),
            ends_with_user=bool(messages) and messages[-1].role == "user",
            is_root=True,
            body=_hashed(f"{first_system}\0{toolset}\0{chain[-1] if chain else 0}"),
        )

    def _judge(self, seen: _Seen, messages: Sequence[Message], mark: Mark) -> None:
        twin = self._by_body.get(seen.body)
        if mark.agent or mark.is_sub_agent is not None or mark.is_compaction or mark.is_auxiliary:
            self._judge_marked(seen, messages, mark)
        elif twin is not None:
            seen.agent, seen.is_root = twin.agent, twin.is_root
            seen.guess = _guess_like(seen.guess, twin.guess, evidence=f"same request as {twin.guess.call_id}")
        else:
            self._judge_unmarked(seen, messages)

    def _judge_marked(self, seen: _Seen, messages: Sequence[Message], mark: Mark) -> None:
        named = next((agent for agent in self._agents if mark.agent and agent.name == mark.agent), None)
        is_sub = mark.is_sub_agent if mark.is_sub_agent is not None else bool(named and named.is_sub)
        if mark.is_auxiliary:
            seen.guess = msgspec.structs.replace(seen.guess, agent=mark.agent, evidence="marked", confidence=1.0)
            return
        agent = named
        if agent is None and not mark.agent and not is_sub:
            agent = next((each for each in self._agents if not each.is_sub), None)
        continued = self._continued(seen, messages)
        seen.is_root = continued is None
        if not seen.has_tools and seen.is_root and not mark.is_compaction:
            self._judge_aside(seen, messages, prefer=agent)
            return
        if agent is None:
            agent = self._new_agent(mark.agent or ("main" if not is_sub else f"sub-{len(self._agents)}"), is_sub=is_sub)
        if agent.last >= 0 and seen.is_root:
            self._note_reset(agent, seen, messages)
        self._settle(seen, agent, "marked", 1.0, is_summary=bool(mark.is_compaction))

    def _judge_unmarked(self, seen: _Seen, messages: Sequence[Message]) -> None:
        continued = self._continued(seen, messages)
        if continued is not None:
            seen.is_root = False
            self._judge_continuation(seen, continued)
            return
        claimed = self._spawned(messages)
        if claimed is not None:
            self._judge_spawned(seen, messages, claimed)
        elif not seen.has_tools:
            self._judge_aside(seen, messages)
        else:
            self._judge_root(seen, messages)

    def _continued(self, seen: _Seen, messages: Sequence[Message]) -> _Seen | None:
        """Return the deepest earlier request that is a proper head of this one and is followed by a reply."""
        spoken = [message for message in messages if message.role not in _SYSTEM_ROLES]
        for place in range(len(spoken) - 1, 0, -1):
            if spoken[place].role != "assistant":
                continue
            for earlier in reversed(self._by_chain.get(seen.chain[place - 1], [])):
                return earlier
        return None

    def _judge_continuation(self, seen: _Seen, earlier: _Seen) -> None:
        agent = earlier.agent
        if agent is None:
            agent = self._main_or_new(seen)
            role = Role.SUB_AGENT if agent.is_sub else Role.MAIN
            self._revise(earlier, agent, role, "its history goes on", 0.7)
        if seen.has_tools and seen.system != earlier.system and seen.toolset != earlier.toolset:
            text = "an agent's history under another system text and other tools"
            seen.guess = msgspec.structs.replace(seen.guess, evidence=text, confidence=0.6)
            return
        self._settle(seen, agent, f"goes on from {earlier.guess.call_id}", 0.95)

    def _judge_spawned(self, seen: _Seen, messages: Sequence[Message], prompt: str) -> None:
        known = [agent for agent in self._agents if agent.spawn == prompt]
        if self._spawns[prompt] > len(known):
            agent = self._new_agent(f"sub-{len(self._agents)}", is_sub=True)
            agent.spawn = prompt
            self._settle(seen, agent, "its first text is an argument of a tool call", 0.9)
            return
        agent = max(known, key=lambda each: each.last)
        if not seen.has_tools:
            self._judge_aside(seen, messages, prefer=agent)
            return
        self._note_reset(agent, seen, messages)
        self._settle(seen, agent, "its first text is an argument of a tool call", 0.9)

    def _judge_root(self, seen: _Seen, messages: Sequence[Message]) -> None:
        """Judge a new root that offers tools."""
        summary = self._reappearing(messages)
        agent = self._known_agent(seen, summary)
        if agent is not None:
            if self._shares_head(agent, seen):
                self._settle(seen, agent, "the same head, system text and tools", 0.8)
                return
            self._note_reset(agent, seen, messages)
            self._settle(seen, agent, "the same system text or tools after a reset", 0.7)
            return
        if summary is not None and summary.agent is not None:
            self._note_reset(summary.agent, seen, messages)
            self._settle(seen, summary.agent, f"holds the reply of {summary.guess.call_id}", 0.8)
            return
        agent = self._main_or_new(seen)
        if not agent.is_sub:
            self._settle(seen, agent, "first root with tools", 0.8)
            if summary is not None:
                self._revise(summary, agent, Role.MAIN, f"{seen.guess.call_id} holds its reply", 0.7)
        else:
            self._settle(seen, agent, "unknown system text and tools", 0.4)

    def _judge_aside(self, seen: _Seen, messages: Sequence[Message], prefer: _Agent | None = None) -> None:
        """Judge a root without tools: a plan, a summary, a title; later requests may say more."""
        agent = prefer or self._digested(messages)
        if agent is not None and agent.last >= 0:
            self._settle(seen, agent, "holds lines of the agent's history", 0.5)
            return
        text = "a root without tools"
        seen.guess = msgspec.structs.replace(seen.guess, evidence=text, confidence=0.5)

    # -- what histories tell ----------------------------------------------------------------------------------

    def _spawned(self, messages: Sequence[Message]) -> str | None:
        """Return the argument of a recorded tool call that a user message of the request is or ends with."""
        for message in messages:
            if message.role == "assistant" and message.tool_calls:
                break
            text = message.content.strip()
            if message.role != "user" or len(text) < _SPAWN_CHARACTERS:
                continue
            if text in self._spawns:
                return text
            for argument in self._spawns:
                if len(argument) >= _SPAWN_TAIL_CHARACTERS and text.endswith(argument):
                    return argument
        return None

    def _reappearing(self, messages: Sequence[Message]) -> _Seen | None:
        """Return the latest call whose reply text stands in the messages of a new root."""
        texts = [message.content for message in messages if message.role in ("user", "assistant")]
        for seen in reversed(self._seen):
            reply = seen.reply.content.strip() if seen.reply is not None else ""
            if reply and any(_holds(text, reply) for text in texts):
                return seen
        return None

    def _known_agent(self, seen: _Seen, summary: _Seen | None) -> _Agent | None:
        """Return the agent whose system text and tools a root has, or else whose tools."""
        exact = [agent for agent in self._agents if seen.fingerprint in agent.fingerprints]
        by_tools = [agent for agent in self._agents if seen.toolset in agent.toolsets]
        for found in (exact, by_tools):
            if summary is not None and summary.agent in found:
                return summary.agent
            if found:
                return max(found, key=lambda agent: agent.last)
        return None

    def _shares_head(self, agent: _Agent, seen: _Seen) -> bool:
        """Return whether a root repeats the agent's first two messages: a rewritten history, not a reset one."""
        latest = self._seen[agent.last].chain if agent.last >= 0 else ()
        return len(latest) >= 2 and len(seen.chain) >= 2 and latest[:2] == seen.chain[:2]

    def _note_reset(self, agent: _Agent, root: _Seen, messages: Sequence[Message]) -> None:
        """The agent's history begins anew: the calls that made the new beginning were its summaries."""
        role = _summary_role(agent)
        texts = [message.content for message in messages if message.role in ("user", "assistant")]
        since = [seen for seen in self._seen[agent.last + 1 :] if seen.agent in (agent, None) and seen.place]
        asides = [seen for seen in since if seen.is_root and not seen.has_tools and _is_text(seen.reply)]
        proven = [seen for seen in self._seen[max(agent.last, 0) :] if self._stands_in(seen, agent, texts)]
        latest = self._seen[agent.last] if agent.last >= 0 else None
        for seen in proven:
            self._revise(seen, agent, role, f"its reply stands in the new beginning {root.guess.call_id}", 0.9)
        if proven:
            bodies = {seen.body for seen in proven}
            asides = [seen for seen in asides if seen.body in bodies and seen not in proven]
        for seen in asides:
            self._revise(seen, agent, role, f"stands before the new beginning {root.guess.call_id}", 0.6)
        if proven or asides or latest is None:
            return
        if not latest.is_root and latest.ends_with_user and _is_text(latest.reply):
            self._revise(latest, agent, role, f"the last text before the new beginning {root.guess.call_id}", 0.6)

    def _stands_in(self, seen: _Seen, agent: _Agent, texts: Sequence[str]) -> bool:
        reply = seen.reply
        if reply is None or seen.agent not in (agent, None) or not _is_text(reply):
            return False
        is_asked = seen.ends_with_user and (not seen.is_root or not seen.has_tools)
        return is_asked and any(_holds(text, reply.content.strip()) for text in texts)

    def _digested(self, messages: Sequence[Message]) -> _Agent | None:
        """Return the agent most of whose lines a request without tools holds."""
        votes: dict[int, int] = {}
        for message in messages:
            for line in _lines(message.content):
                agent = self._lines.get(line)
                if agent is not None:
                    number = self._agents.index(agent)
                    votes[number] = votes.get(number, 0) + 1
        return self._agents[max(votes, key=lambda number: votes[number])] if votes else None

    def _learn_lines(self, agent: _Agent, messages: Sequence[Message]) -> None:
        """Remember lines that entered an agent's history behind its first reply."""
        is_behind = False
        for message in messages[-4:] if len(messages) > 4 else messages:
            is_behind |= message.role == "assistant" or len(messages) > 4
            if is_behind and message.role in ("user", "tool"):
                for line in _lines(message.content):
                    self._lines.setdefault(line, agent)

    # -- settling ---------------------------------------------------------------------------------------------

    def _main_or_new(self, seen: _Seen) -> _Agent:
        """Return a new agent: the main one if there is none yet."""
        if any(not agent.is_sub for agent in self._agents):
            return self._new_agent(f"sub-{len(self._agents)}", is_sub=True)
        return self._new_agent("main", is_sub=False)

    def _new_agent(self, name: str, *, is_sub: bool) -> _Agent:
        agent = _Agent(name=name, is_sub=is_sub)
        self._agents.append(agent)
        return agent

    def _settle(
        self, seen: _Seen, agent: _Agent, evidence: str, confidence: float, *, is_summary: bool = False
    ) -> None:
        if not is_summary and seen.fingerprint in self._summary_prints:
            is_summary, evidence, confidence = True, "the system text of an earlier summary", 0.8
        role = Role.SUB_AGENT if agent.is_sub else Role.MAIN
        if is_summary:
            role = _summary_role(agent)
        seen.agent = agent
        seen.guess = RoleGuess(
            call_id=seen.guess.call_id, role=role, agent=agent.name, evidence=evidence, confidence=confidence
        )

    def _revise(self, seen: _Seen, agent: _Agent, role: Role, evidence: str, confidence: float) -> None:
        """Judge an earlier call anew, unless the harness marked it so."""
        if seen.guess.confidence >= 1.0 and seen.guess.role is not Role.MAIN and seen.guess.role is not Role.SUB_AGENT:
            return
        seen.agent = agent
        changed = (seen.guess.role, seen.guess.agent) != (role, agent.name)
        seen.guess = RoleGuess(
            call_id=seen.guess.call_id, role=role, agent=agent.name, evidence=evidence, confidence=confidence
        )
        if changed:
            self._revised[seen.guess.call_id] = seen.guess
        is_other = not seen.has_tools and not any(seen.system == each[0] for each in agent.fingerprints)
        if role is _summary_role(agent) and is_other and seen.fingerprint not in self._summary_prints:
            self._summary_prints.add(seen.fingerprint)
            for other in self._seen:
                if other.fingerprint == seen.fingerprint and other.agent is not None and other is not seen:
                    text = f"the system text of the summary {seen.guess.call_id}"
                    self._revise(other, other.agent, _summary_role(other.agent), text, 0.8)


def _summary_role(agent: _Agent) -> Role:
    return Role.SUB_AGENT_SUMMARY if agent.is_sub else Role.MAIN_SUMMARY


def _guess_like(mine: RoleGuess, other: RoleGuess, *, evidence: str) -> RoleGuess:
    """Return another call's guess under the id of this one."""
    return msgspec.structs.replace(other, call_id=mine.call_id, evidence=evidence)


def _message_bytes(message: Message) -> bytes:
    """Return what two echoes of one message share: ids of tool calls, or text without surrounding space."""
    if message.tool_calls:
        return "\0".join(call.id or call.name for call in message.tool_calls).encode(errors="surrogatepass")
    return f"{message.role}\0{message.tool_call_id}\0{message.content.strip()}".encode(errors="surrogatepass")


def _texts(arguments: str) -> list[str]:
    """Return the text values of a tool call's arguments.

    >>> _texts('{"prompt": " count the files ", "n": 3}')
    ['count the files']
    """
    try:
        parsed = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return []
    values = list(parsed.values()) if isinstance(parsed, dict) else []
    return [value.strip() for value in values if isinstance(value, str)]


def _holds(text: str, reply: str) -> bool:
    r"""Return whether a text holds a reply, or at least half of its longer lines.

    >>> _holds("Summary:\nwrote the first file\nnext: the second", "<x>\nwrote the first file\n</x>")
    True
    """
    if reply in text:
        return True
    lines = [line.strip() for line in reply.splitlines() if len(line.strip()) >= _LINE_CHARACTERS]
    return bool(lines) and 2 * sum(line in text for line in lines) >= len(lines)


def _lines(text: str) -> list[int]:
    return [_hashed(line.strip()) for line in text.splitlines() if len(line.strip()) >= _LINE_CHARACTERS]


def _hashed(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"))


def _is_text(reply: Message | None) -> bool:
    return reply is not None and not reply.tool_calls and bool(reply.content.strip())
