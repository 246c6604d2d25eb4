"""Runs an installed harness through shim, sandbox and proxy against a scripted model, and judges what was recorded."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from opengyre.core.config import decode_config
from opengyre.core.types import Call, Delivered, Role, Task, Verdict
from opengyre.execute.harness import harness_plan, load_harness
from opengyre.execute.isolation import choose_isolation
from opengyre.execute.launcher import ForkServer
from opengyre.execute.live import HarnessEnd, LiveRunner, read_journals
from opengyre.ledger.ledger import Ledger
from opengyre.proxy.bodies import BodyFiles
from opengyre.proxy.server import Proxy
from opengyre.proxy.session import SessionSpec
from opengyre.run.captures import CapturedCall, read_capture
from opengyre.testing.scripted_model import INSTRUCTION, Part, ScriptedModel

EXECUTION = "live"
CACHE = Path(os.environ.get("GYRE_HARNESSES") or Path.home() / ".cache" / "opengyre" / "harnesses")
LIMIT_S = 420.0
_IGNORED_KEYS = ("cache_control",)


class LiveCase(msgspec.Struct, frozen=True, kw_only=True):
    """How a harness is installed, started and spoken to.

    Example: ``LiveCase(name="pi", part=Part(shell=("bash", '{"command" :  {command}}')), context_tokens=60_000)``.
    """

    name: str
    part: Part
    context_tokens: int
    install: str = ""
    """Where it comes from, where no harness file says so: ``pip:PACKAGE==VERSION``."""
    command: tuple[str, ...] = ()
    """How it is started, where no harness file says so."""
    roles: tuple[Role, ...] = (Role.MAIN,)
    """Roles that have to appear."""
    more: tuple[str, ...] = ()
    """Further words of the command: a second prompt."""
    rewrites: str = ""
    """What it changes in its own history."""


class LiveResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a live execution.

    Example: see ``docs/harnesses.md``, one row each.
    """

    name: str
    version: str
    end: HarnessEnd
    wall_s: float
    roles: dict[str, int]
    verdicts: dict[str, int]
    appending: int
    """Calls that only append to an earlier one, by the kept JSON alone."""
    appending_restored: int
    wrong_roles: tuple[str, ...]
    """Call, role in the ledger, true role."""
    undelivered: int
    is_finished: bool
    """Whether the model got to its last word."""
    left: dict[str, str]
    """Text files of the workspace."""
    log: str
    folder: str
    """Where all of it lies; whoever asked for the check removes it."""

    def problems(self, case: LiveCase) -> list[str]:
        """Return what is not as it should be; empty if all is well."""
        found = []
        if self.end.status != 0 or self.end.timed_out:
            found.append(f"ended with {self.end.status}, timed out: {self.end.timed_out}")
        if not self.is_finished or self.left.get("out.txt") != "café" or self.left.get("last.txt") != "last\n":
            found.append(f"the task was not finished: {self.left}")
        found += [f"role of {wrong}" for wrong in self.wrong_roles]
        found += [f"no call of role {role.value}" for role in case.roles if role.value not in self.roles]
        if self.appending_restored < 0.95 * self.appending or not self.appending:
            found.append(f"{self.appending_restored} of {self.appending} appending calls restored")
        if self.undelivered:
            found.append(f"{self.undelivered} answers not delivered in full")
        return found


def installed(name: str, install: str) -> Path:
    """Return the folder in which a harness is installed; it is installed there if it is not.

    Raises:
        subprocess.CalledProcessError: It cannot be installed.
    """
    kind, _, package = install.partition(":")
    version = package.rpartition("@")[2] if kind == "npm" else package.rpartition("==")[2]
    folder = CACHE / f"{name}-{version}"
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if kind == "npm":
        commands = [["npm", "install", "--global", "--no-audit", "--no-fund", "--prefix", str(folder), package]]
    else:
        python = getattr(sys, "_base_executable", sys.executable)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *package.split()]
        commands = [[python, "-m", "venv", str(folder)], pip]
    for command in commands:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    (folder / "done").touch()
    return folder


async def check(case: LiveCase, *, park_s: float = 0.0) -> LiveResult:
    """Install a harness if need be, run one execution of it, and return what was seen."""
    shipped = not case.command
    install = load_harness(case.name).install if shipped else case.install
    place = await asyncio.to_thread(installed, case.name, install)
    options: dict[str, Any] = {"install": str(place)}
    if not shipped:
        options["command"] = [part.replace("{install}", str(place)) for part in case.command]
    config = decode_config(
        {
            "harness": {
                "name": case.name if shipped else "command",
                "options": options,
                "timeout_s": LIMIT_S + park_s,
                "overall_timeout_s": LIMIT_S + park_s + 30,
            },
            "policy": {"context_tokens": case.context_tokens},
            "sandbox": {"memory_bytes": 8 << 30, "processes": 512, "disk_bytes": 1 << 30},
        }
    )
    folder = Path(tempfile.mkdtemp(prefix="gyre-l"))
    folder.chmod(0o755)
    server, ledger = ForkServer(folder / "log"), Ledger.open(folder)
    model = ScriptedModel(case.part, park_s=park_s)
    bodies = BodyFiles(folder / "bodies")
    proxy = Proxy(engine=model, store=ledger, renderer=model.renderer, clock=time.monotonic, bodies=bodies)
    who = SessionSpec(
        execution_id=EXECUTION,
        group_id=0,
        slot=0,
        attempt=0,
        run_seed=0,
        context_tokens=case.context_tokens,
        marks=load_harness(case.name).roles if shipped else load_harness("command").roles,
        default_max_tokens=4096,
    )
    await proxy.start()
    await server.start()
    started_s = time.monotonic()
    try:
        await proxy.open_execution(who, folder / "s")
        plan = harness_plan(config)
        plan = replace(plan, command=(*plan.command, *case.more))
        runner = LiveRunner(config, folder / "x", server, plan, isolation=choose_isolation("auto"))
        task = Task(task_id="live", format="repo", instruction=INSTRUCTION, files={"TASK.md": "see the instruction\n"})
        end = await runner.run(EXECUTION, task, folder / "s")
        wall_s = time.monotonic() - started_s
        await proxy.close_execution(EXECUTION)
        lines = [(name, line.request_id, line.delivered, line.sent_bytes) for name, line in read_journals(folder / "x")]
        await ledger.import_deliveries(lines)
        calls = ledger.read_calls(EXECUTION)
    finally:
        await proxy.stop()
        await server.stop()
        ledger.close()
    kept = read_capture(bodies.path(EXECUTION)) if calls else []
    return _result(case, install, end, wall_s, calls, kept, model, folder)


def _result(
    case: LiveCase,
    install: str,
    end: HarnessEnd,
    wall_s: float,
    calls: Sequence[Call],
    kept: Sequence[CapturedCall],
    model: ScriptedModel,
    folder: Path,
) -> LiveResult:
    asked = requests_of(kept)
    appending = [call for call in calls if only_appends(asked[call.call_id], list(asked.values()))]
    wrong = [
        f"{call.call_id}: {call.role.value} ({call.role_evidence}), truly {model.truth[call.call_id].value}"
        for call in calls
        if call.role is not model.truth[call.call_id]
    ]
    execution = folder / "x" / EXECUTION
    log = execution / "harness.log"
    return LiveResult(
        name=case.name,
        version=install.partition(":")[2].replace("==", "@").rpartition("@")[2],
        end=end,
        wall_s=wall_s,
        roles=dict(Counter(call.role.value for call in calls)),
        verdicts=dict(Counter(call.verdict.value for call in calls)),
        appending=len(appending),
        appending_restored=sum(call.verdict is Verdict.RESTORED for call in appending),
        wrong_roles=tuple(wrong),
        undelivered=sum(call.delivered is not Delivered.COMPLETE for call in calls),
        is_finished=model.is_finished,
        left={
            path.name: path.read_text(errors="replace")
            for path in sorted((execution / "workspace").glob("*.txt"))
            if path.is_file()
        },
        log=log.read_text(errors="replace")[-4000:] if log.exists() else "",
        folder=str(folder),
    )


def requests_of(kept: Sequence[CapturedCall]) -> dict[str, CapturedCall]:
    """Return the first request of each call in order of their ids; a retry of it got the same answer."""
    found: dict[str, CapturedCall] = {}
    for request in kept:
        name = re.search(rf"{EXECUTION}-c\d+", str((request.response or {}).get("id", "")))
        if request.status == 200 and name is not None:
            found.setdefault(name.group(0), request)
    return dict(sorted(found.items()))


def only_appends(call: CapturedCall, answered: Sequence[CapturedCall]) -> bool:
    """Whether a request is an earlier one with messages behind it, the first of them the model's, by its JSON alone."""
    mine = _plain(call.request or {})
    for earlier in answered:
        if earlier.n == call.n:
            break
        theirs = _plain(earlier.request or {})
        length = len(theirs.messages)
        is_longer = len(mine.messages) > length and mine.messages[:length] == theirs.messages
        if is_longer and mine.head == theirs.head and _is_models(mine.messages[length]):
            return True
    return False


class _Plain(msgspec.Struct, frozen=True):
    head: Any
    messages: list[Any]


def _plain(request: Mapping[str, Any]) -> _Plain:
    messages = request.get("messages", request.get("input", []))
    head = [request.get(key) for key in ("system", "instructions", "tools")]
    return _Plain(_stripped(head), _stripped(messages))


def _stripped(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return a JSON value without marks that are for a server's cache."""
    if isinstance(value, list):
        return [_stripped(item) for item in value]
    if isinstance(value, dict):
        return {key: _stripped(item) for key, item in value.items() if key not in _IGNORED_KEYS}
    return value


def _is_models(message: Mapping[str, Any]) -> bool:
    """Whether a message, or an item of Responses, was said by the model."""
    return message.get("role") == "assistant" or message.get("type") in (
        "function_call",
        "custom_tool_call",
        "reasoning",
    )


def table_of(results: Sequence[LiveResult]) -> str:
    """Return the rows of a Markdown table."""
    rows = [
        "| harness | calls by role | restored / rendered / rewritten | appending calls restored | wall |",
        "|---" * 5 + "|",
    ]
    for each in results:
        roles = ", ".join(f"{count} {role}" for role, count in each.roles.items())
        verdicts = " / ".join(str(each.verdicts.get(verdict.value, 0)) for verdict in Verdict)
        share = f"{each.appending_restored} of {each.appending}"
        rows.append(f"| {each.name} {each.version} | {roles} | {verdicts} | {share} | {each.wall_s:.1f} s |")
    return "\n".join(rows)
