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

from opengyre.core.chat import Message, Tool
from opengyre.core.types import Role
from opengyre.trajectory.heads import Heads
from opengyre.trajectory.histories import (
    SYSTEM_ROLES,
    Agent,
    RoleGuess,
    SeenRequest,
    chain_of,
    holds,
    is_text,
    key_behind,
    lines_of,
    seen_request,
    texts_of,
)
from opengyre.trajectory.marks import Mark

_SPAWN_CHARACTERS = 8
_SPAWN_TAIL_CHARACTERS = 16


@dataclass
class RoleTracker:
    """Follows one execution call by call.

    >>> tracker = RoleTracker()
    >>> title = tracker.observe("c0", [Message(role="user", content="name this")], [])
    >>> main = tracker.observe("c1", [Message(role="user", content="do it")], [Tool(name="shell")])
    >>> title.role.value, main.role.value
    ('auxiliary', 'main')
    """

    _seen: list[SeenRequest] = field(default_factory=list)
    _by_id: dict[str, SeenRequest] = field(default_factory=dict)
    _by_chain: dict[int, int] = field(default_factory=dict)
    """Key of a request's last message to the place of the latest request that ends so."""
    _by_body: dict[int, SeenRequest] = field(default_factory=dict)
    _agents: list[Agent] = field(default_factory=list)
    _spawns: dict[str, int] = field(default_factory=dict)
    """Text argument of a recorded tool call to the number of sub-agents that it may still start."""
    _lines: dict[int, int] = field(default_factory=dict)
    """Line of a history, hashed, to the number of the agent whose history it is."""
    _summary_prints: set[tuple[int, int]] = field(default_factory=set)
    """System text (and no tools) of calls that were proven to be summaries."""
    _summary_closings: set[int] = field(default_factory=set)
    """Last user text of calls that continue a history and were proven to be summaries."""
    _revised: dict[str, RoleGuess] = field(default_factory=dict)
    _chains: Heads[int] = field(default_factory=lambda: Heads(key_behind))

    # -- what the user of a tracker calls ---------------------------------------------------------------------

    def observe(
        self, call_id: str, messages: Sequence[Message], tools: Sequence[Tool], mark: Mark | None = None
    ) -> RoleGuess:
        """Return what a request looks like when it arrives; ``revisions`` says what it changes of earlier calls."""
        chain = chain_of(messages, self._chains)
        seen = seen_request(call_id, len(self._seen), messages, tools, chain)
        self._judge(seen, messages, mark or Mark(), self._continued(chain, messages))
        self._seen.append(seen)
        self._by_id[call_id] = seen
        self._by_body.setdefault(seen.body, seen)
        if chain:
            self._by_chain[chain[-1]] = seen.place
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
            for text in texts_of(call.arguments):
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

    def _judge(self, seen: SeenRequest, messages: Sequence[Message], mark: Mark, continued: SeenRequest | None) -> None:
        twin = self._by_body.get(seen.body)
        if mark.agent or mark.is_sub_agent is not None or mark.is_compaction or mark.is_auxiliary:
            self._judge_marked(seen, messages, mark, continued)
        elif twin is not None:
            seen.agent, seen.is_root = twin.agent, twin.is_root
            seen.guess = _guess_like(seen.guess, twin.guess, evidence=f"same request as {twin.guess.call_id}")
        else:
            self._judge_unmarked(seen, messages, continued)

    def _judge_marked(
        self, seen: SeenRequest, messages: Sequence[Message], mark: Mark, continued: SeenRequest | None
    ) -> None:
        named = next((agent for agent in self._agents if mark.agent and agent.name == mark.agent), None)
        is_sub = mark.is_sub_agent if mark.is_sub_agent is not None else bool(named and named.is_sub)
        if mark.is_auxiliary:
            seen.guess = msgspec.structs.replace(seen.guess, agent=mark.agent, evidence="marked", confidence=1.0)
            return
        agent = named
        if agent is None and not mark.agent and not is_sub:
            agent = next((each for each in self._agents if not each.is_sub), None)
        seen.is_root = continued is None
        if not seen.has_tools and seen.is_root and not mark.is_compaction:
            self._judge_aside(seen, messages)
            return
        if agent is None:
            agent = self._new_agent(mark.agent or ("main" if not is_sub else f"sub-{len(self._agents)}"), is_sub=is_sub)
        if agent.last >= 0 and seen.is_root:
            self._note_reset(agent, seen, messages)
        self._settle(seen, agent, "marked", 1.0, is_summary=bool(mark.is_compaction))

    def _judge_unmarked(self, seen: SeenRequest, messages: Sequence[Message], continued: SeenRequest | None) -> None:
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

    def _continued(self, chain: Sequence[int], messages: Sequence[Message]) -> SeenRequest | None:
        """Return the deepest earlier request that is a proper head of these messages and is followed by a reply."""
        spoken = [message for message in messages if message.role not in SYSTEM_ROLES]
        for place in range(len(spoken) - 1, 0, -1):
            if spoken[place].role != "assistant":
                continue
            earlier = self._by_chain.get(chain[place - 1])
            if earlier is not None:
                return self._seen[earlier]
        return None

    def _judge_continuation(self, seen: SeenRequest, earlier: SeenRequest) -> None:
        agent = earlier.agent
        if agent is None and not earlier.is_root:
            seen.guess = _guess_like(seen.guess, earlier.guess, evidence=f"goes on from {earlier.guess.call_id}")
            return
        if agent is None:
            agent = self._main_or_new()
            role = Role.SUB_AGENT if agent.is_sub else Role.MAIN
            self._revise(earlier, agent, role, "its history goes on", 0.7)
        if seen.has_tools and seen.system != earlier.system and seen.toolset != earlier.toolset:
            text = "an agent's history under another system text and other tools"
            seen.guess = msgspec.structs.replace(seen.guess, evidence=text, confidence=0.6)
            return
        self._settle(seen, agent, f"goes on from {earlier.guess.call_id}", 0.95)

    def _judge_spawned(self, seen: SeenRequest, messages: Sequence[Message], prompt: str) -> None:
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

    def _judge_root(self, seen: SeenRequest, messages: Sequence[Message]) -> None:
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
        agent = self._main_or_new()
        if not agent.is_sub:
            self._settle(seen, agent, "first root with tools", 0.8)
            if summary is not None:
                self._revise(summary, agent, Role.MAIN, f"{seen.guess.call_id} holds its reply", 0.7)
        else:
            self._settle(seen, agent, "unknown system text and tools", 0.4)

    def _judge_aside(self, seen: SeenRequest, messages: Sequence[Message], prefer: Agent | None = None) -> None:
        """Judge a root without tools: a plan, a summary, a title; later requests may say more."""
        agent = prefer or self._digested(messages)
        if agent is None and self._is_like_summary(seen):
            agent = max(self._agents, key=lambda each: each.last, default=None)
        if agent is not None and agent.last >= 0:
            self._settle(seen, agent, "holds lines of the agent's history", 0.5)
            return
        text = "a root without tools"
        seen.guess = msgspec.structs.replace(seen.guess, evidence=text, confidence=0.5)

    # -- what histories tell ----------------------------------------------------------------------------------

    def _spawned(self, messages: Sequence[Message]) -> str | None:
        """Return the argument of a recorded tool call that a user message of the request is, begins or ends with."""
        for message in messages:
            if message.role == "assistant" and message.tool_calls:
                break
            text = message.content.strip()
            if message.role != "user" or len(text) < _SPAWN_CHARACTERS:
                continue
            if text in self._spawns:
                return text
            for argument in self._spawns:
                is_long = len(argument) >= _SPAWN_TAIL_CHARACTERS
                if is_long and (text.endswith(argument) or text.startswith(argument)):
                    return argument
        return None

    def _reappearing(self, messages: Sequence[Message]) -> SeenRequest | None:
        """Return the latest call whose reply text stands in the messages of a new root."""
        texts = [message.content for message in messages if message.role in ("user", "assistant")]
        for seen in reversed(self._seen):
            reply = seen.reply.content.strip() if seen.reply is not None else ""
            if reply and any(holds(text, reply) for text in texts):
                return seen
        return None

    def _known_agent(self, seen: SeenRequest, summary: SeenRequest | None) -> Agent | None:
        """Return the agent whose system text and tools a root has, or else whose tools."""
        exact = [agent for agent in self._agents if seen.fingerprint in agent.fingerprints]
        by_tools = [agent for agent in self._agents if seen.toolset in agent.toolsets]
        for found in (exact, by_tools):
            if summary is not None and summary.agent in found:
                return summary.agent
            if found:
                return max(found, key=lambda agent: agent.last)
        return None

    def _shares_head(self, agent: Agent, seen: SeenRequest) -> bool:
        """Return whether a root repeats the agent's first two messages: a rewritten history, not a reset one."""
        return agent.last >= 0 and len(seen.head) == 2 and self._seen[agent.last].head == seen.head

    def _note_reset(self, agent: Agent, root: SeenRequest, messages: Sequence[Message]) -> None:
        """The agent's history begins anew: the calls that made the new beginning were its summaries."""
        texts = [message.content for message in messages if message.role in ("user", "assistant")]
        since = [seen for seen in self._seen[agent.last + 1 :] if seen.agent in (agent, None) and seen.place]
        asides = [seen for seen in since if seen.is_root and not seen.has_tools and is_text(seen.reply)]
        proven = [seen for seen in self._seen[max(agent.last, 0) :] if self._stands_in(seen, agent, texts)]
        latest = self._seen[agent.last] if agent.last >= 0 else None
        for seen in proven:
            self._revise_to_summary(seen, agent, f"its reply stands in the new beginning {root.guess.call_id}", 0.9)
        if proven:
            bodies = {seen.body for seen in proven}
            asides = [seen for seen in asides if seen.body in bodies and seen not in proven]
        for seen in asides:
            self._revise_to_summary(seen, agent, f"stands before the new beginning {root.guess.call_id}", 0.6)
        if proven or asides or latest is None:
            return
        if not latest.is_root and latest.ends_with_user and is_text(latest.reply):
            self._revise_to_summary(latest, agent, f"the last text before the new beginning {root.guess.call_id}", 0.6)

    def _stands_in(self, seen: SeenRequest, agent: Agent, texts: Sequence[str]) -> bool:
        reply = seen.reply
        if reply is None or seen.agent not in (agent, None) or not is_text(reply):
            return False
        is_asked = seen.ends_with_user and (not seen.is_root or not seen.has_tools)
        return is_asked and any(holds(text, reply.content.strip()) for text in texts)

    def _digested(self, messages: Sequence[Message]) -> Agent | None:
        """Return the agent most of whose lines a request without tools holds."""
        votes: dict[int, int] = {}
        for message in messages:
            for line in lines_of(message.content):
                number = self._lines.get(line)
                if number is not None:
                    votes[number] = votes.get(number, 0) + 1
        return self._agents[max(votes, key=lambda number: votes[number])] if votes else None

    def _learn_lines(self, agent: Agent, messages: Sequence[Message]) -> None:
        """Remember lines that entered an agent's history behind its first reply."""
        is_behind = False
        number = self._agents.index(agent)
        for message in messages[-4:] if len(messages) > 4 else messages:
            is_behind |= message.role == "assistant" or len(messages) > 4
            if is_behind and message.role in ("user", "tool"):
                for line in lines_of(message.content):
                    self._lines.setdefault(line, number)

    # -- settling ---------------------------------------------------------------------------------------------

    def _main_or_new(self) -> Agent:
        """Return a new agent: the main one if there is none yet."""
        if any(not agent.is_sub for agent in self._agents):
            return self._new_agent(f"sub-{len(self._agents)}", is_sub=True)
        return self._new_agent("main", is_sub=False)

    def _new_agent(self, name: str, *, is_sub: bool) -> Agent:
        agent = Agent(name=name, is_sub=is_sub)
        self._agents.append(agent)
        return agent

    def _settle(
        self, seen: SeenRequest, agent: Agent, evidence: str, confidence: float, *, is_summary: bool = False
    ) -> None:
        if not is_summary and self._is_like_summary(seen):
            is_summary, evidence, confidence = True, "asks like an earlier summary", 0.8
        role = Role.SUB_AGENT if agent.is_sub else Role.MAIN
        if is_summary:
            role = _summary_role(agent)
        seen.agent = agent
        seen.guess = RoleGuess(
            call_id=seen.guess.call_id, role=role, agent=agent.name, evidence=evidence, confidence=confidence
        )

    def _revise(self, seen: SeenRequest, agent: Agent, role: Role, evidence: str, confidence: float) -> None:
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

    def _revise_to_summary(self, seen: SeenRequest, agent: Agent, evidence: str, confidence: float) -> None:
        self._revise(seen, agent, _summary_role(agent), evidence, confidence)
        self._learn_summary(seen, agent)

    def _learn_summary(self, seen: SeenRequest, agent: Agent) -> None:
        """A proven summary shows how this harness asks for one; calls that ask alike are summaries too."""
        is_other = not seen.has_tools and not any(seen.system == each[0] for each in agent.fingerprints)
        if is_other:
            self._summary_prints.add(seen.fingerprint)
        if seen.closing and not seen.is_root:
            self._summary_closings.add(seen.closing)
        for other in self._seen:
            if other is seen or other.agent is None or not self._is_like_summary(other):
                continue
            if other.guess.role is not _summary_role(other.agent):
                text = f"asks like the summary {seen.guess.call_id}"
                self._revise(other, other.agent, _summary_role(other.agent), text, 0.8)

    def _is_like_summary(self, seen: SeenRequest) -> bool:
        return seen.fingerprint in self._summary_prints or (
            bool(seen.closing) and seen.closing in self._summary_closings
        )


def _summary_role(agent: Agent) -> Role:
    return Role.SUB_AGENT_SUMMARY if agent.is_sub else Role.MAIN_SUMMARY


def _guess_like(mine: RoleGuess, other: RoleGuess, *, evidence: str) -> RoleGuess:
    """Return another call's guess under the id of this one."""
    return msgspec.structs.replace(other, call_id=mine.call_id, evidence=evidence)
