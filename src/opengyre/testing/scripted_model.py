"""A model that plays a part: it reads the prompt as a policy would, and makes a harness show what it can do.

The part: two tool calls, a sub-agent where the harness has a tool for it, long outputs until the harness compacts its
history, one more call, the end. What each answer was meant to be is kept beside it, as the truth about its role.
"""

import asyncio
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from opengyre.core.chat import Message, ToolCall
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import Finish, Int32Array, Role, VersionRun
from opengyre.model.text_chat import ByteRenderer

MAIN_MARK, SUB_MARK = "MAINTASK", "SUBTASK-A"
INSTRUCTION = f"{MAIN_MARK}: write a file, list the files, have a helper look at them, and say when all is done."
SUB_INSTRUCTION = f"{SUB_MARK}: list the files and report."
SUMMARY = "<analysis>\nthinking about it\n</analysis>\n<summary>\n{mark} summary: out.txt is written.\n</summary>"
MOST_GROWTH = 14
"""Long outputs after which a harness that did not compact does not do so."""
_ASKS_TITLE = "generate a title"
_OPEN = 256


@dataclass(frozen=True)
class Prompt:
    """A prompt as text again.

    Example: ``read_prompt(ByteRenderer().render([Message(role="user", content="hi")], []))``.
    """

    tools: str
    """Names and descriptions of what is offered; empty if nothing is."""
    messages: tuple[Message, ...]

    def texts(self) -> str:
        """Return the texts of all messages, system texts aside."""
        return "\n".join(each.content for each in self.messages if each.role not in ("system", "developer"))


def read_prompt(context: Int32Array) -> Prompt:
    """Return what a prompt of ``ByteRenderer`` says; the head of the reply at its end is left out.

    >>> read_prompt(ByteRenderer().render([Message(role="user", content="hi")], [])).messages[0].content
    'hi'
    """
    starts = np.flatnonzero(context == _OPEN).tolist()
    messages = []
    for start, stop in itertools.pairwise(starts):
        part = context[start + 1 : stop]
        end_of_role = int(np.flatnonzero(part == ord("\n"))[0])
        role = _text(part[:end_of_role])
        body = part[end_of_role + 1 :]
        is_reply = role == "assistant"
        said = ByteRenderer().parse(body[:0], body, ()) if is_reply else Message(role=role, content=_text(body))
        messages.append(said)
    return Prompt(tools=_text(context[: starts[0]]), messages=tuple(messages))


def _text(tokens: Int32Array) -> str:
    return bytes(tokens[tokens < 256].astype(np.uint8)).decode(errors="surrogatepass")


@dataclass(frozen=True, kw_only=True)
class Part:
    """How the tools of one harness are called.

    Example: ``Part(shell=("bash", '{{"command" :  {command}}}'))``; ``{command}`` is a JSON string.
    """

    shell: tuple[str, str]
    """Name of the tool that runs a command, and its arguments as a format: odd spacing on purpose."""
    spawn: tuple[str, str] | None = None
    """Name of the tool that starts a sub-agent, and its arguments; ``{prompt}`` is a JSON string."""
    wait: tuple[str, str] | None = None
    """Name of the tool that waits for a sub-agent, and its arguments; ``{agent}`` is a JSON string."""
    agent_pattern: str = ""
    """Finds the name of a started sub-agent in the result of ``spawn``."""
    summary_asks: str = ""
    """What a request for a summary says in its last message, where such a request offers tools."""
    growth: str = "seq 100000 103500"
    """Command with a long output."""
    growths: int = MOST_GROWTH
    """How often it is run at most; 0: the harness does not compact."""
    final_command: str = ""
    """Command that ends the harness, where a text does not."""


@dataclass
class ScriptedModel:
    """Plays the part; implements ``core.protocols.Engine``.

    Args:
        part: The tools of the harness.
        park_s: For how long the second call of the main agent is kept waiting.
    """

    part: Part
    park_s: float = 0.0
    truth: dict[str, Role] = field(default_factory=dict)
    """Call id to what the request was."""
    compacted: bool = False
    is_finished: bool = False
    """Whether the main agent said its last word."""
    renderer: ByteRenderer = field(default_factory=ByteRenderer)
    _main: Iterator[Message] = field(init=False)
    _sub: Iterator[Message] = field(init=False)
    _last_result: str = ""

    def __post_init__(self) -> None:
        self._main, self._sub = self._main_moves(), self._sub_moves()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the next words of whoever asks."""
        prompt = read_prompt(request.context)
        self.truth[request.call_id], reply = self._answer(prompt)
        if self.park_s and sum(role is Role.MAIN for role in self.truth.values()) == 2:
            await asyncio.sleep(self.park_s)
        output = self.renderer.encode_reply(reply)[: request.max_tokens]
        return Generation(
            output=output,
            behaviour_logprobs=np.full(len(output), -0.1, np.float32),
            versions=(VersionRun(0, len(output)),),
            finish=Finish.STOP if output[-1] == self.renderer.stop_ids[0] else Finish.LENGTH,
        )

    def _answer(self, prompt: Prompt) -> tuple[Role, Message]:
        said = prompt.texts()
        last = prompt.messages[-1].content
        is_main = MAIN_MARK in said or SUB_MARK not in said
        if not prompt.tools and any(_ASKS_TITLE in message.content.lower() for message in prompt.messages):
            return Role.AUXILIARY, _says("Files and a helper")
        if not prompt.tools or (self.part.summary_asks and self.part.summary_asks in last):
            self.compacted |= is_main
            text = _says(SUMMARY.format(mark=MAIN_MARK if is_main else SUB_MARK))
            return Role.MAIN_SUMMARY if is_main else Role.SUB_AGENT_SUMMARY, text
        self._last_result = last
        if is_main:
            return Role.MAIN, next(self._main)
        return Role.SUB_AGENT, next(self._sub)

    def _main_moves(self) -> Iterator[Message]:
        part = self.part
        yield self._runs("\n I'll start. \n\n", "printf 'caf\\303\\251' > out.txt")
        yield self._runs("", "cat out.txt; ls")
        if part.spawn is not None:
            yield _calls("Now a helper.", part.spawn, prompt=SUB_INSTRUCTION)
            if part.wait is not None:
                found = re.search(part.agent_pattern, self._last_result)
                yield _calls("", part.wait, agent=found.group(1) if found else "nobody")
        for _ in range(part.growths):
            if self.compacted:
                break
            yield self._runs("", part.growth)
        yield self._runs("", "echo last > last.txt; cat last.txt")
        self.is_finished = True
        while True:
            yield self._runs("", part.final_command) if part.final_command else _says("All done.\n")

    def _sub_moves(self) -> Iterator[Message]:
        yield self._runs("Looking.", "ls -la")
        while True:
            yield _says("SUB RESULT: one file.\n")

    def _runs(self, text: str, command: str) -> Message:
        return _calls(text, self.part.shell, command=command)


def _says(text: str) -> Message:
    return Message(role="assistant", content=text)


def _calls(text: str, tool: tuple[str, str], **values: str) -> Message:
    name, arguments = tool
    for key, value in values.items():
        arguments = arguments.replace(f"{{{key}}}", _quoted(value))
    return Message(role="assistant", content=text, tool_calls=(ToolCall(id="", name=name, arguments=arguments),))


def _quoted(text: str) -> str:
    r"""Return a JSON string that escapes more than it has to, as models do.

    >>> _quoted("é/x")
    '"\\u00e9\\/x"'
    """
    escapes: Callable[[str], str] = lambda c: {'"': '\\"', "\\": "\\\\", "\n": "\\n", "/": "\\/"}.get(  # noqa: E731
        c, c if c.isascii() else f"\\u{ord(c):04x}"
    )
    return '"' + "".join(map(escapes, text)) + '"'
