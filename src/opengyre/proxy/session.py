"""One execution at the proxy: restores recorded tokens, seeds and clamps its calls, keeps its paths. No I/O here."""

from dataclasses import dataclass, field

import msgspec
import xxhash

from opengyre.core.chat import ChatRenderer, Message
from opengyre.core.errors import CallError, ContextOverflowError
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import (
    Call,
    Finish,
    Int32Array,
    Kind,
    Sampling,
    SamplingLaw,
    Verdict,
)
from opengyre.proxy.items import BodyReader
from opengyre.proxy.paths import Path, PathTokens
from opengyre.proxy.requests import Answer, AnswerChoice, ChatRequest
from opengyre.proxy.stopping import stopped
from opengyre.proxy.twins import Twins
from opengyre.trajectory.histories import RoleGuess
from opengyre.trajectory.marks import Mark, RoleMarks
from opengyre.trajectory.match import Match, PathIndex
from opengyre.trajectory.roles import RoleTracker


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the proxy has to know of an execution.

    Example: ``SessionSpec(execution_id="g00000-s00-a0", group_id=0, slot=0, attempt=0, run_seed=0,
    context_tokens=640)``.
    """

    execution_id: str
    group_id: int
    slot: int
    attempt: int
    run_seed: int
    context_tokens: int
    """Positions of the policy: longest prompt plus answer."""
    kind: Kind = Kind.TRAIN
    temperature: float = 1.0
    """0 = greedy."""
    minimum_version: int = 0
    pinned_version: int | None = None
    model: str = "policy"
    marks: RoleMarks = RoleMarks()
    """How the harness marks its requests."""
    default_max_tokens: int = 256
    """Where the client names no limit."""


@dataclass(frozen=True)
class Prepared:
    """A call that is ready to be sampled, with what is needed to record it."""

    request: ChatRequest
    match: Match
    guess: RoleGuess
    call_id: str
    request_id: str
    seq: int
    path: Path
    """The prompt as a path, [C]."""
    context: Int32Array
    """Its tokens."""
    parent_call_id: str | None
    shared: int
    generate: GenerateRequest
    choice_index: int
    started_s: float


@dataclass
class Session:
    """State of one execution.

    Args:
        spec: Who it is and how it samples.
        renderer: Chat to tokens and back.
    """

    spec: SessionSpec
    renderer: ChatRenderer
    is_closed: bool = False
    twins: Twins = field(default_factory=Twins)
    reader: BodyReader = field(default_factory=BodyReader)
    _paths: PathIndex = field(default_factory=PathIndex)
    _tokens: PathTokens = field(default_factory=PathTokens)
    _ordinals: dict[tuple[str, int], int] = field(default_factory=dict)
    _seq: int = 0
    _minted: int = 0
    _roles: RoleTracker = field(default_factory=RoleTracker)

    def prepare(self, request: ChatRequest, mark: Mark, *, request_id: str, now_s: float) -> list[Prepared]:
        """Return one prepared call for each choice that is asked for.

        Raises:
            CallError: The execution is closed, or the prompt does not fit the policy.
        """
        self.check_open()
        match = self._paths.match(request.messages, request.tools)
        before, added, parent, verdict = self._prompt(request, match)
        path = self._tokens.grown(before, added)
        context = path.tokens()
        match = Match(match.call_id, match.covered, match.keys, verdict, match.first_difference)
        room = self.spec.context_tokens - len(context)
        if room < 1:
            raise ContextOverflowError(len(context), self.spec.context_tokens)
        prepared = []
        for choice in range(request.choices):
            call_id = f"{self.spec.execution_id}-c{self._seq:04d}"
            guess = self._roles.observe(call_id, request.messages, request.tools, mark)
            generate = self._generate(request, mark.agent or guess.agent, context, call_id, room)
            prepared.append(
                Prepared(
                    request=request,
                    match=match,
                    guess=guess,
                    call_id=call_id,
                    request_id=request_id,
                    seq=self._seq,
                    path=path,
                    context=context,
                    parent_call_id=parent,
                    shared=0 if before is None else before.length,
                    generate=generate,
                    choice_index=choice,
                    started_s=now_s,
                )
            )
            self._seq += 1
        return prepared

    def prompt_tokens(self, request: ChatRequest) -> int:
        """Return how many tokens the prompt of a request has; nothing is recorded.

        Raises:
            CallError: The execution is closed.
        """
        self.check_open()
        before, added, _, _ = self._prompt(request, self._paths.match(request.messages, request.tools))
        return len(added) + (0 if before is None else before.length)

    def check_open(self) -> None:
        """Refuse an execution that is over.

        Raises:
            CallError: It is closed.
        """
        if self.is_closed:
            raise CallError(f"execution {self.spec.execution_id} is closed", status=410, code="execution_closed")

    def _prompt(self, request: ChatRequest, match: Match) -> tuple[Path | None, Int32Array, str | None, Verdict]:
        """Return the path that the prompt goes on from, the tokens behind it, the call of that path, the verdict."""
        if match.call_id is not None and self.renderer.is_prefix_stable:
            path, asked = self._tokens.of(match.call_id)
            tokens = path.tokens()
            added = request.messages[match.covered :]
            tail = self.renderer.bridge(tokens[:asked], tokens[asked:], added, request.tools)
            if tail is not None:
                return path, tail, match.call_id, match.verdict
        verdict = Verdict.RENDERED if match.verdict is Verdict.RESTORED else match.verdict
        return None, self.renderer.render(request.messages, request.tools), None, verdict

    def _generate(
        self, request: ChatRequest, agent: str, context: Int32Array, call_id: str, room: int
    ) -> GenerateRequest:
        spec = self.spec
        return GenerateRequest(
            execution_id=spec.execution_id,
            call_id=call_id,
            context=context,
            max_tokens=min(room, request.max_tokens or spec.default_max_tokens),
            temperature=spec.temperature,
            seed=self._seed(agent, context),
            stop_ids=self.renderer.stop_ids,
            minimum_version=spec.minimum_version,
            pinned_version=spec.pinned_version,
        )

    def _seed(self, agent: str, context: Int32Array) -> int:
        """Return the call seed: a function of what is asked, not of when.

        Choice: hash of run seed, place of the execution, agent, context, and the ordinal among equal contexts of that
        agent, so an execution is repeatable under any scheduler.
        """
        spec = self.spec
        context_hash = xxhash.xxh3_64_intdigest(context.data)
        ordinal = self._ordinals.get((agent, context_hash), 0)
        self._ordinals[agent, context_hash] = ordinal + 1
        key = (spec.run_seed, spec.kind.value, spec.group_id, spec.slot, spec.attempt, agent, context_hash, ordinal)
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(key))

    # -- after sampling ---------------------------------------------------------------------------------------

    def finish(self, prepared: Prepared, generation: Generation, *, now_s: float) -> tuple[Call, AnswerChoice]:
        """Record a sampled call in the paths and return what is stored and what is delivered."""
        parsed, generation, stop_sequence = stopped(
            generation,
            prepared.request.stop,
            lambda output: self.renderer.parse(prepared.context, output, prepared.request.tools),
        )
        reply, tool_ids = self._minted_ids(parsed)
        finish = Finish.TOOL_CALLS if reply.tool_calls and generation.finish is Finish.STOP else generation.finish
        key = self._paths.add(prepared.call_id, prepared.match.keys, reply)
        self._roles.answered(prepared.call_id, reply)
        tail = prepared.context[prepared.shared :].copy()  # a view would keep the whole context
        path = self._tokens.grown(prepared.path, generation.output)
        self._tokens.record(prepared.call_id, path, prepared.path.length)
        call = Call(
            execution_id=self.spec.execution_id,
            call_id=prepared.call_id,
            seq=prepared.seq,
            request_id=prepared.request_id,
            dialect=prepared.request.dialect,
            agent_key=prepared.guess.agent,
            role=prepared.guess.role,
            role_evidence=prepared.guess.evidence,
            verdict=prepared.match.verdict,
            first_difference=prepared.match.first_difference,
            parent_call_id=prepared.parent_call_id,
            shared=prepared.shared,
            tail=tail,
            output=generation.output,
            behaviour_logprobs=generation.behaviour_logprobs,
            versions=generation.versions,
            sampling=self._sampling(prepared),
            finish=finish,
            choice_index=prepared.choice_index,
            message_keys=(*prepared.match.keys, key),
            shared_keys=prepared.match.covered if prepared.parent_call_id is not None else 0,
            tool_ids=tool_ids,
            arguments=tuple(call.arguments for call in reply.tool_calls),
            body_hash=prepared.request.body_hash,
            prompt_tokens=len(prepared.context),
            started_s=prepared.started_s,
            ended_s=now_s,
            cell_ids=generation.cell_ids,
        )
        choice = AnswerChoice(
            message=reply, finish=finish, completion_tokens=len(generation.output), stop_sequence=stop_sequence
        )
        return call, choice

    def _sampling(self, prepared: Prepared) -> Sampling:
        law = SamplingLaw.POLICY
        if self.spec.temperature == 0:
            law = SamplingLaw.GREEDY
        elif prepared.request.truncated_law:
            law = SamplingLaw.TRUNCATED
        return Sampling(temperature=self.spec.temperature, seed=prepared.generate.seed, law=law)

    def revised_roles(self, *, is_over: bool = False) -> list[RoleGuess]:
        """Return calls that are judged differently by now, once each; at the end of the execution the last ones."""
        return self._roles.finish() if is_over else self._roles.revisions()

    def _minted_ids(self, reply: Message) -> tuple[Message, tuple[tuple[str, str], ...]]:
        """Give every tool call an id that is unique in the run."""
        minted = []
        for call in reply.tool_calls:
            minted.append(msgspec.structs.replace(call, id=f"call_{self.spec.execution_id}_{self._minted:04d}"))
            self._minted += 1
        pairs = tuple((new.id, old.id) for new, old in zip(minted, reply.tool_calls, strict=True))
        return msgspec.structs.replace(reply, tool_calls=tuple(minted)), pairs

    def answer(self, choices: list[AnswerChoice], prepared: list[Prepared], *, created_s: int) -> Answer:
        """Return the answer of a request."""
        return Answer(
            answer_id=prepared[0].call_id,
            model=self.spec.model,
            created_s=created_s,
            choices=tuple(choices),
            prompt_tokens=len(prepared[0].context),
        )
