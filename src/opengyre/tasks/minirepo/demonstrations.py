"""Demonstrations: a scripted, noisy expert at work in the conversation of the reference harness.

Its noise is on purpose: a policy that starts too well has nothing left to learn.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from opengyre.core.chat import Message, Tool, ToolCall
from opengyre.core.errors import InvariantError
from opengyre.model.chat import EmbeddedRenderer
from opengyre.tasks.minirepo import conversation as words
from opengyre.tasks.minirepo.family import DIGITS, MODULES, STEPS, VISIBLE_INPUTS, Function, Package, random_inputs

CONFUSED = {
    "add": "sub",
    "sub": "add",
    "mul": "add",
    "mod": "mul",
    "square": "negate",
    "negate": "absolute",
    "absolute": "negate",
    "even": "odd",
    "odd": "even",
    "positive": "even",
    "above": "below",
    "below": "above",
    "reverse": "sort_down",
    "sort": "sort_down",
    "sort_down": "sort",
    "take": "skip",
    "skip": "take",
    "unique": "sort",
    "sum": "count",
    "max": "min",
    "min": "max",
    "count": "sum",
    "list": "last",
    "last": "list",
}
"""What the expert writes when it is wrong."""
_BROKEN = ("write_file", "append_file", "finish", "delegate")
"""Replies without the argument that they need."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How often the expert goes wrong.

    Example: ``Noise(wrong=0.22)`` writes a wrong step, digit or result in 22% of the functions.
    """

    wrong: float = 0.22
    missed_function: float = 0.10
    skipped_module: float = 0.12
    untested: float = 0.45
    unrepaired: float = 0.50
    early_finish: float = 0.06
    stray: float = 0.08
    """A turn that the state does not ask for, with right arguments: whatever a policy comes to prefer later, it should
    know how to say it."""
    malformed: float = 0.04
    """A reply that the harness cannot read; it is not learnt, what comes after it is."""


MOST_MALFORMED = 2
"""In one demonstration; the harness gives up at ``words.MAX_MALFORMED``."""


@dataclass
class DemonstrationContext:
    """One context of one agent: what the policy was given and what it said, as tokens.

    Example: the main agent before a compaction is one context, after it another.
    """

    tokens: list[int]
    is_output: list[bool]
    is_lead: bool
    requests: list[tuple[tuple[Message, ...], tuple[Tool, ...]]] = field(default_factory=list)
    replies: list[Message] = field(default_factory=list)


@dataclass
class _Workspace:
    """What has been written: which functions of which module pass their visible tests."""

    right: dict[str, dict[str, bool]] = field(default_factory=dict)


def call(name: str, **arguments: str) -> Message:
    """Return an assistant message that calls a tool."""
    text = msgspec.json.encode(arguments).decode()
    return Message(role="assistant", tool_calls=(ToolCall(id="", name=name, arguments=text),))


def sub_head(package: Package, module: str) -> list[Message]:
    """Return the first messages of a sub-agent."""
    return [
        Message(role="system", content=words.SUB_SYSTEM),
        Message(role="user", content=package.section(module) + words.SUB_ORDER),
    ]


class Demonstration:
    """One execution of the expert.

    Args:
        package: What is to be built.
        renderer: Turns messages into tokens; the harness compacts on token counts.
        rng: Source of the expert's choices.
        noise: How often it goes wrong.
    """

    def __init__(self, package: Package, renderer: EmbeddedRenderer, rng: random.Random, noise: Noise) -> None:
        self.contexts: list[DemonstrationContext] = []
        self._package = package
        self._renderer = renderer
        self._rng = rng
        self._noise = noise
        self._workspace = _Workspace()
        self.visible = {
            function.name: random_inputs(rng, VISIBLE_INPUTS)
            for _, functions in package.modules
            for function in functions
        }
        """Inputs of the visible tests, by function."""
        self._skipped = {module for module, _ in package.modules if rng.random() < noise.skipped_module}
        self._calls = 0
        self._malformed = 0

    def run(self) -> list[DemonstrationContext]:
        """Play the execution and return its contexts in order of their start."""
        head = (
            Message(role="system", content=words.MAIN_SYSTEM),
            Message(role="user", content=self._package.instruction()),
        )
        history = list(head)
        context = self._open(is_lead=True)
        done: list[str] = []
        base = 0
        for _ in range(words.MAX_MAIN_TURNS):
            is_bad = self._is_malformed()
            planned = call("delegate", module=self._unknown_module()) if is_bad else self._main_reply(done)
            reply = self._ask(context, history, words.MAIN_TOOLS, planned, is_learnt=not is_bad)
            base = base or len(context.tokens)
            if reply.tool_calls[0].name == "finish":
                break
            result = words.BAD_CALL if is_bad else self._delegated(reply, done)
            history += [reply, Message(role="tool", content=result)]
            if self._calls >= words.MAX_CALLS:
                break
            if len(context.tokens) - base > words.MAIN_ROOM_TOKENS:
                history.append(Message(role="user", content=words.COMPACTION))
                summary = self._ask(context, history, words.MAIN_TOOLS, self._summary(done))
                if self._calls >= words.MAX_CALLS:
                    break
                history = [*head, Message(role="user", content=f"{summary.content} {self._left()}")]
                context, base = self._open(is_lead=True), 0
        return self.contexts

    def _open(self, *, is_lead: bool) -> DemonstrationContext:
        context = DemonstrationContext([], [], is_lead)
        self.contexts.append(context)
        return context

    def _delegated(self, reply: Message, done: list[str]) -> str:
        """Play the sub-agent that a reply asks for and return what the lead is told."""
        module = msgspec.json.decode(reply.tool_calls[0].arguments)["module"]
        word = self._sub_agent(module)
        if module not in done:
            done.append(module)
        return f"{module} {word} {self._left()}"

    def _left(self) -> str:
        names = [module for module, _ in self._package.modules if module not in self._workspace.right]
        return " ".join([words.LEFT, *names])

    def _is_malformed(self) -> bool:
        is_bad = self._malformed < MOST_MALFORMED and self._rng.random() < self._noise.malformed
        self._malformed += is_bad
        return is_bad

    def _unknown_module(self) -> str:
        return self._rng.choice([name for name in MODULES if name not in dict(self._package.modules)])

    def _ask(
        self,
        context: DemonstrationContext,
        history: list[Message],
        tools: tuple[Tool, ...],
        reply: Message,
        *,
        is_learnt: bool = True,
    ) -> Message:
        """Append a request and the expert's reply to a context."""
        self._calls += 1
        prompt = self._renderer.render(history, tools).tolist()
        if prompt[: len(context.tokens)] != context.tokens:
            raise InvariantError("a demonstration's request does not extend its context")
        output = self._renderer.encode_reply(reply, tools)
        context.is_output += [False] * (len(prompt) - len(context.tokens)) + [is_learnt] * len(output)
        context.tokens = [*prompt, *output]
        context.requests.append((tuple(history), tools))
        context.replies.append(reply)
        return reply

    def _main_reply(self, done: list[str]) -> Message:
        left = [module for module, _ in self._package.modules if module not in done and module not in self._skipped]
        if self._rng.random() < self._noise.stray:
            return call("delegate", module=self._rng.choice(self._package.modules)[0])
        if not left or (done and self._rng.random() < self._noise.early_finish):
            return call("finish", result="done")
        return call("delegate", module=left[0])

    def _summary(self, done: list[str]) -> Message:
        return Message(role="assistant", content=" ".join(["built", *done]))

    def _sub_agent(self, module: str) -> str:
        """Play a sub-agent and return its status word."""
        history = sub_head(self._package, module)
        context = self._open(is_lead=False)
        plan = self._sub_replies(module)
        for turn in range(words.MAX_SUB_TURNS):
            if self._is_malformed():
                reply = Message(role="assistant", content=self._rng.choice(_BROKEN))
                self._ask(context, history, words.SUB_TOOLS, reply, is_learnt=False)
                history += [reply, Message(role="user", content=words.BAD_CALL)]
                if turn == words.MAX_SUB_TURNS - 1 or self._calls >= words.MAX_CALLS:
                    break
                continue
            reply = self._ask(context, history, words.SUB_TOOLS, next(plan))
            name = reply.tool_calls[0].name
            if name == "finish":
                return str(msgspec.json.decode(reply.tool_calls[0].arguments)["result"])
            if turn == words.MAX_SUB_TURNS - 1 or self._calls >= words.MAX_CALLS:
                break
            result = self._test_result(module) if name == "run_tests" else "saved"
            history += [reply, Message(role="tool", content=result)]
        return "stopped"

    def _test_result(self, module: str) -> str:
        failing = self._failing(module)
        return "failed " + " ".join(function.name for function in failing) if failing else "all passed"

    def _failing(self, module: str) -> list[Function]:
        right = self._workspace.right.get(module, {})
        return [function for function in self._package.functions(module) if not right.get(function.name, False)]

    def _sub_replies(self, module: str) -> Iterator[Message]:
        """Yield the expert's replies: write, test, repair, finish."""
        functions, rng, noise = self._package.functions(module), self._rng, self._noise
        kept = [function for function in functions if rng.random() >= noise.missed_function] or list(functions[:1])
        yield call("write_file", content=self._write(module, kept, replace=True))
        written = 1
        while True:
            if rng.random() < noise.stray:
                yield self._stray(module)
                continue
            if rng.random() < noise.untested:
                yield call("finish", result="untested")
            yield call("run_tests")
            failing = self._failing(module)
            if not failing:
                yield call("finish", result="pass")
            if written >= 3 or rng.random() < noise.unrepaired:
                yield call("finish", result="fail")
            yield call("append_file", content=self._write(module, failing, replace=False))
            written += 1

    def _stray(self, module: str) -> Message:
        if self._rng.random() < 0.5:
            return call("run_tests")
        function = self._rng.choice(self._package.functions(module))
        return call("append_file", content=self._write(module, [function], replace=False))

    def _write(self, module: str, functions: list[Function], *, replace: bool) -> str:
        right = self._workspace.right.setdefault(module, {})
        if replace:
            right.clear()
        source = ""
        for function in functions:
            steps, result = self._noisy(function)
            written = Function(function.name, steps, result, function.wording)
            inputs = self.visible[function.name]
            right[function.name] = all(written.compute(values) == function.compute(values) for values in inputs)
            source += function.code(steps, result)
        return source

    def _noisy(self, function: Function) -> tuple[tuple[tuple[str, int], ...], str]:
        steps, result, rng = list(function.steps), function.result, self._rng
        if rng.random() < self._noise.wrong:
            index = rng.randrange(len(steps) + 1)
            if index == len(steps):
                result = CONFUSED[result]
            elif rng.random() < 0.4 and STEPS[steps[index][0]].takes_digit:
                step, digit = steps[index]
                steps[index] = (step, rng.choice([other for other in DIGITS if other != digit]))
            else:
                steps[index] = (CONFUSED[steps[index][0]], steps[index][1])
        return tuple(steps), result
