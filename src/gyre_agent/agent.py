"""The agent: a lead that delegates modules to coders, compacts its context, and finishes.

python -m gyre_agent --base-url http://127.0.0.1:8000/v1 --workspace DIR
"""

import json
import time
from dataclasses import dataclass, field
from typing import Any

from gyre_agent.client import ContextOverflow, ModelClient, ModelError, Reply
from gyre_agent.workspace import Workspace

MAIN_SYSTEM = "lead: build every module, then finish"
SUB_SYSTEM = "coder: write one module, test it, then finish"
SUB_ORDER = "write this module"
COMPACTION = "context full: summarise progress"
BAD_CALL = "bad call"
STATUS_WORDS = ("pass", "fail", "untested", "stopped")
Json = dict[str, Any]


def _tool(name: str, *parameters: str) -> Json:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


MAIN_TOOLS = [_tool("delegate", "module"), _tool("finish", "result")]
SUB_TOOLS = [
    _tool("write_file", "content"),
    _tool("append_file", "content"),
    _tool("run_tests"),
    _tool("finish", "result"),
]


@dataclass(frozen=True)
class Limits:
    """What ends an execution or an agent.

    Example: ``Limits(max_calls=20)``.
    """

    max_calls: int = 20
    main_turns: int = 10
    sub_turns: int = 6
    malformed: int = 12
    room_tokens: int = 28
    """Growth of the main context over its first answer that makes the agent compact."""
    main_reply_tokens: int = 12
    sub_reply_tokens: int = 160
    summary_tokens: int = 16
    tool_wait_s: float = 0.0
    """Seconds that a coder's tool takes beside its work: stands for slow builds and tests."""


class Exhausted(Exception):
    """The execution has used up its calls or its malformed replies."""


@dataclass
class Agent:
    """One execution.

    Args:
        client: The model.
        workspace: The files.
        limits: What ends it.
    """

    client: ModelClient
    workspace: Workspace
    limits: Limits = field(default_factory=Limits)
    calls: int = 0
    malformed: int = 0
    sub_agents: int = 0

    def run(self) -> None:
        """Work on the task until the lead finishes or a limit is reached."""
        try:
            self._lead(self.workspace.instruction())
        except (Exhausted, ContextOverflow):
            return

    # -- the lead ---------------------------------------------------------------------------------------------

    def _lead(self, instruction: str) -> None:
        sections = split_sections(instruction)
        head: list[Json] = [_system(MAIN_SYSTEM), _user(instruction)]
        messages = list(head)
        base = 0
        for _ in range(self.limits.main_turns):
            reply = self._ask(messages, MAIN_TOOLS, self.limits.main_reply_tokens, "main")
            base = base or reply.used_tokens
            name, arguments, call_id = first_call(reply.message)
            messages.append(_echo(reply.message))
            if name == "finish" and set(arguments) == {"result"}:
                return
            section = sections.get(str(arguments.get("module"))) if name == "delegate" else None
            if section is None:
                messages.append(self._bad_call(call_id))
            else:
                word = self._coder(str(arguments["module"]), section)
                messages.append(_result(call_id, f"{arguments['module']} {word} {self._left(sections)}"))
            if self.calls >= self.limits.max_calls:
                raise Exhausted
            if reply.used_tokens - base > self.limits.room_tokens:
                messages, base = self._compact(head, messages, self._left(sections)), 0

    def _left(self, sections: dict[str, str]) -> str:
        """Return the state of the work, as a list of things to do has it."""
        return " ".join(["left", *(module for module in sections if not self.workspace.has(module))])

    def _compact(self, head: list[Json], messages: list[Json], left: str) -> list[Json]:
        """Return the context that goes on after a summary; what is left to do goes beside it."""
        asked = [*messages, _user(COMPACTION)]
        reply = self._ask(asked, MAIN_TOOLS, self.limits.summary_tokens, "main", kind="compaction")
        if self.calls >= self.limits.max_calls:
            raise Exhausted
        return [*head, _user(f"{reply.message.get('content') or ''} {left}".strip())]

    # -- a coder ----------------------------------------------------------------------------------------------

    def _coder(self, module: str, section: str) -> str:
        """Run a sub-agent on one module and return its status word."""
        self.sub_agents += 1
        agent = f"sub-{self.sub_agents}"
        functions = function_names(section)
        messages = [_system(SUB_SYSTEM), _user(section + SUB_ORDER)]
        for turn in range(self.limits.sub_turns):
            reply = self._ask(messages, SUB_TOOLS, self.limits.sub_reply_tokens, agent)
            name, arguments, call_id = first_call(reply.message)
            if name == "finish" and set(arguments) == {"result"}:
                word = str(arguments["result"])
                return word if word in STATUS_WORDS[:3] else "?"
            messages.append(_echo(reply.message))
            result = self._use(name, arguments, module, functions)
            messages.append(self._bad_call(call_id) if result is None else _result(call_id, result))
            if self.calls >= self.limits.max_calls or turn == self.limits.sub_turns - 1:
                break
        return "stopped"

    def _use(self, name: str, arguments: Json, module: str, functions: list[str]) -> str | None:
        """Carry out a coder's tool call on its module; None if it is malformed."""
        if self.limits.tool_wait_s:
            time.sleep(self.limits.tool_wait_s)
        if name in ("write_file", "append_file") and set(arguments) == {"content"}:
            self.workspace.write(module, str(arguments["content"]), append=name == "append_file")
            return "saved"
        if name == "run_tests" and not arguments:
            failing = self.workspace.failing_tests(module, functions)
            return "failed " + " ".join(failing) if failing else "all passed"
        return None

    # -- the model --------------------------------------------------------------------------------------------

    def _ask(
        self, messages: list[Json], tools: list[Json], max_tokens: int, agent: str, *, kind: str = "turn"
    ) -> Reply:
        if self.calls >= self.limits.max_calls:
            raise Exhausted
        self.calls += 1
        headers = {"X-Gyre-Agent": agent, "X-Gyre-Request": kind}
        if agent != "main":
            headers["X-Gyre-Parent"] = "main"
        return self.client.complete(messages, tools=tools, max_tokens=max_tokens, headers=headers)

    def _bad_call(self, call_id: str) -> Json:
        """Count a malformed reply and return what the model is told."""
        self.malformed += 1
        if self.malformed >= self.limits.malformed:
            raise Exhausted
        return _result(call_id, BAD_CALL) if call_id else _user(BAD_CALL)


def _system(text: str) -> Json:
    return {"role": "system", "content": text}


def _user(text: str) -> Json:
    return {"role": "user", "content": text}


def _result(call_id: str, text: str) -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _echo(message: Json) -> Json:
    """Return an assistant message as it goes back into the history: only its first tool call counts."""
    echoed: Json = {"role": "assistant", "content": message.get("content")}
    if message.get("tool_calls"):
        echoed["tool_calls"] = message["tool_calls"][:1]
    return echoed


def first_call(message: Json) -> tuple[str, Json, str]:
    """Return name, arguments and id of the first tool call; an empty name if there is none that can be read."""
    calls = message.get("tool_calls") or []
    if not calls:
        return "", {}, ""
    function = calls[0]["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = {}
    return function["name"], arguments if isinstance(arguments, dict) else {}, calls[0]["id"]


def split_sections(instruction: str) -> dict[str, str]:
    """Return the part of the instruction for each module, from its ``module`` line up to the next."""
    sections: dict[str, str] = {}
    name = ""
    for line in instruction.splitlines(keepends=True):
        if line.startswith("module "):
            name = line.removeprefix("module ").strip()
            sections[name] = ""
        if name:
            sections[name] += line
    return sections


def function_names(section: str) -> list[str]:
    """Return the functions of a section in order: ``- f: square each`` names f."""
    return [line[2:].partition(":")[0] for line in section.splitlines() if line.startswith("- ")]


def run(*, base_url: str, workspace: str, settings: Json) -> int:
    """Work on the task of a workspace; returns the exit status."""
    agent = Agent(ModelClient(base_url), Workspace(workspace), Limits(**settings))
    try:
        agent.run()
    except ModelError as error:
        print(f"gyre_agent: {error}", flush=True)  # noqa: T201 - the harness's own output
        return 1
    return 0
