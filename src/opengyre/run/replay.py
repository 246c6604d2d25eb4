"""``opengyre replay``: a recorded harness session through the real proxy, answered as it was answered then."""

import argparse
import asyncio
import importlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec
import numpy as np
from rich import box
from rich.table import Table

from opengyre.core.chat import ChatRenderer, Message, ToolCall
from opengyre.core.errors import CallError, FileError, InputError
from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import Call, Finish, Int32Array, VersionRun
from opengyre.execute.harness import load_harness, shipped_harnesses
from opengyre.ledger.ledger import Ledger
from opengyre.model.text_chat import ByteRenderer
from opengyre.proxy.dialects import DIALECTS, anthropic, chat, gemini, responses
from opengyre.proxy.requests import Json
from opengyre.proxy.server import REQUEST_ID_HEADER, Proxy
from opengyre.proxy.session import SessionSpec
from opengyre.report.console import console
from opengyre.run.captures import CapturedCall, read_capture
from opengyre.run.trees import draw
from opengyre.trajectory.marks import RoleMarks
from opengyre.trajectory.recorded import tree_of
from opengyre.trajectory.statistics import TreeStatistics

EXECUTION = "replay"
CONTEXT_TOKENS = 1 << 30
_READERS = {"chat": chat, "responses": responses, "anthropic": anthropic, "gemini": gemini}
_HOP_HEADERS = {"connection", "content-length", "host", "accept-encoding", "transfer-encoding", "content-encoding"}


class ReplayedCall(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one captured request.

    Example: ``{"n": 3, "role": "main", "verdict": "restored", "first_difference": 7, "differs": ""}``.
    """

    n: int
    role: str
    verdict: str
    first_difference: int
    differs: str
    """Which part of the delivered answer is not the captured one; empty if none."""


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints."""

    calls: tuple[ReplayedCall, ...]
    tree: TreeStatistics
    skipped: int
    """Requests that no model answered: errors and dropped streams of the recording."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("capture", type=Path, metavar="CAPTURE.jsonl")
    parser.add_argument(
        "--harness", metavar="NAME", help="whose marks to read (default: the name of the file's folder)"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="of a model (default: one token a byte, in a plain format)"
    )
    parser.add_argument(
        "--format", default="auto", metavar="NAME", help="of that model's messages, such as qwen3 (default: looked up)"
    )
    parser.add_argument("--max-leaves", type=int, default=5, metavar="N", help="J_max (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    """Replay a capture; 1 if a harness would have received other content."""
    calls = read_capture(arguments.capture)
    marks = marks_of(arguments.harness, arguments.capture)
    renderer = renderer_of(arguments.tokenizer, arguments.format)
    sent = replay(calls, marks, name=arguments.capture, max_leaves=arguments.max_leaves, renderer=renderer)
    result = asyncio.run(sent)
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        _show(result, arguments.capture.name)
    return 1 if any(call.differs for call in result.calls) else 0


def marks_of(name: str | None, capture: Path) -> RoleMarks:
    """Return the marks of a named harness, else of the one that the file's folder is named after.

    Raises:
        InputError: No harness of that name is shipped.
    """
    if name is None:
        folder = capture.resolve().parent.name
        return load_harness(folder).roles if folder in shipped_harnesses() else RoleMarks()
    if name not in shipped_harnesses():
        raise InputError(f"--harness {name}: expected one of {', '.join(shipped_harnesses())}")
    return load_harness(name).roles


class SpeakingRenderer(ChatRenderer, Protocol):
    """A renderer that also knows how its model would say a message."""

    def encode_reply(self, message: Message) -> Int32Array:
        """Return the tokens of a reply, its end included."""
        ...


def renderer_of(tokenizer: Path | None, form: str) -> SpeakingRenderer:
    """Return the format of a model's messages; without a tokenizer one that needs none.

    Raises:
        FileError: The folder holds no tokenizer.
        InputError: The format is unknown, or the packages that know the formats of models are not installed.
    """
    if tokenizer is None:
        if form != "auto":
            raise InputError(f"--format {form}: expected --tokenizer beside it")
        return ByteRenderer()
    try:
        packaged = importlib.import_module("opengyre.model.packaged_chat")
    except ImportError as error:
        raise InputError(f"--tokenizer: {error}; expected pip install 'opengyre[transformers]'") from error
    renderer: SpeakingRenderer = packaged.load_renderer(tokenizer, form)
    return renderer


@dataclass
class ScriptedEngine:
    """Says what it is told to say next; implements ``core.protocols.Engine``."""

    renderer: SpeakingRenderer
    reply: Message = field(default_factory=lambda: Message(role="assistant"))

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the reply as if it had been sampled."""
        output = self.renderer.encode_reply(self.reply)
        return Generation(
            output=output,
            behaviour_logprobs=np.full(len(output), -0.1, np.float32),
            versions=(VersionRun(0, len(output)),),
            finish=Finish.STOP,
        )


async def replay(
    calls: list[CapturedCall], marks: RoleMarks, *, name: Path, max_leaves: int, renderer: SpeakingRenderer
) -> ReplayResult:
    """Send every request that a model answered to a proxy over its socket, in order.

    Raises:
        FileError: A request is refused by its dialect; the message names the call.
    """
    answered = [call for call in calls if call.status == 200 and call.response and call.request and not call.fault]
    with tempfile.TemporaryDirectory(prefix="gyre-r") as scratch:
        ledger = Ledger.open(Path(scratch))
        engine = ScriptedEngine(renderer)
        proxy = Proxy(engine=engine, store=ledger, renderer=engine.renderer, clock=time.monotonic)
        await proxy.start()
        socket = Path(scratch) / "s"
        who = {"execution_id": EXECUTION, "group_id": 0, "slot": 0, "attempt": 0, "run_seed": 0}
        spec = msgspec.convert({**who, "context_tokens": CONTEXT_TOKENS}, SessionSpec)
        spec = msgspec.structs.replace(spec, marks=marks, default_max_tokens=CONTEXT_TOKENS)
        await proxy.open_execution(spec, socket)
        try:
            async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as client:
                differences = await _sent(answered, engine, client, name)
            await proxy.close_execution(EXECUTION)
            stored = list(await ledger.calls(EXECUTION))
        finally:
            await proxy.stop()
            ledger.close()
    return _result(answered, stored, differences, len(calls) - len(answered), max_leaves)


async def _sent(
    calls: list[CapturedCall], engine: ScriptedEngine, client: aiohttp.ClientSession, name: Path
) -> list[str]:
    """Send the requests one after the other; returns for each what of its answer differs."""
    ids = _Ids()
    differences = []
    for call in calls:
        reader = _READERS.get(call.protocol)
        if reader is None:
            raise FileError(f"{name}: call {call.n}: protocol {call.protocol!r}, expected one of {', '.join(_READERS)}")
        try:
            recorded = reader.parse_response(call.response or {})
            ids.learn_echoes(reader.parse_request(call.request or {}).messages)
        except CallError as error:
            raise FileError(f"{name}: call {call.n}: {error}") from error
        engine.reply = recorded
        delivered = await _ask(call, ids.minted, client, name)
        differences.append(what_differs(recorded, delivered))
        ids.learn(recorded, delivered)
    return differences


@dataclass
class _Ids:
    """Which id of this proxy stands for which id of the recording."""

    minted: dict[str, str] = field(default_factory=dict)
    _nameless: list[ToolCall] = field(default_factory=list)
    """Delivered calls that had no id in the recording: the harness made one up."""

    def learn(self, recorded: Message, delivered: Message) -> None:
        """Note the ids of an answer."""
        for old, new in zip(recorded.tool_calls, delivered.tool_calls, strict=False):
            if old.id:
                self.minted[old.id] = new.id
            else:
                self._nameless.append(new)

    def learn_echoes(self, messages: Sequence[Message]) -> None:
        """Find out which delivered call an id that the harness made up stands for: same tool, same arguments."""
        unknown = [call for message in messages for call in message.tool_calls if call.id not in self.minted]
        for call in unknown:
            same = next((each for each in self._nameless if _is_same(each, call)), None)
            if same is not None and call.id:
                self.minted[call.id] = same.id
                self._nameless.remove(same)


def _is_same(one: ToolCall, other: ToolCall) -> bool:
    if one.name != other.name:
        return False
    try:
        return bool(msgspec.json.decode(one.arguments) == msgspec.json.decode(other.arguments))
    except msgspec.DecodeError:
        return one.arguments == other.arguments


async def _ask(call: CapturedCall, minted: Mapping[str, str], client: aiohttp.ClientSession, name: Path) -> Message:
    """Send one request with the ids that this proxy gave, and return the message that comes back."""
    body, path = dict(call.request or {}), call.path
    if call.protocol == "gemini":
        body, path = as_chat(body), "/v1/chat/completions"
    is_streamed = call.protocol == "anthropic"
    body = {**replaced(body, minted), "stream": is_streamed}
    body.pop("stream_options", None)
    headers = {key: value for key, value in call.headers.items() if key.lower() not in _HOP_HEADERS}
    headers[REQUEST_ID_HEADER] = f"{EXECUTION}-{call.n}"
    async with client.post(f"http://proxy{path}", json=body, headers=headers) as response:
        data = await response.read()
    if response.status != 200:
        said = data[:200].decode(errors="replace")
        raise FileError(f"{name}: call {call.n}: the proxy answered {response.status}: {said}")
    return DIALECTS[path].parse_response(anthropic_body(data) if is_streamed else msgspec.json.decode(data))


def anthropic_body(stream: bytes) -> Json:
    """Return the body that a stream of Anthropic events comes to, with the argument text as it was streamed.

    Choice: this dialect is replayed as a stream, for only there the text of arguments is delivered as it was written.
    """
    blocks: dict[int, Json] = {}
    raw: dict[int, str] = {}
    for line in stream.splitlines():
        if not line.startswith(b"data: "):
            continue
        event = msgspec.json.decode(line[6:])
        index = event.get("index", -1)
        if event["type"] == "content_block_start":
            blocks[index] = dict(event["content_block"])
        elif event["type"] == "content_block_delta":
            _extend(blocks[index], raw, index, event["delta"])
    texts = [raw.get(index, "") for index in sorted(blocks) if blocks[index]["type"] == "tool_use"]
    return {"role": "assistant", "content": [blocks[index] for index in sorted(blocks)], "_raw_tool_args": texts}


def _extend(block: Json, raw: dict[int, str], index: int, delta: Json) -> None:
    if delta["type"] == "input_json_delta":
        raw[index] = raw.get(index, "") + delta["partial_json"]
        return
    for key in ("text", "thinking", "signature"):
        if key in delta:
            block[key] = block.get(key, "") + delta[key]


def as_chat(body: Json) -> Json:
    """Return a Gemini request as chat completions: that protocol is read, not served."""
    request = gemini.parse_request(body)
    tools = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.schema}}
        for t in request.tools
    ]
    return {"model": "policy", "messages": [_chat_message(message) for message in request.messages], "tools": tools}


def _chat_message(message: Message) -> Json:
    out: Json = {"role": message.role, "content": message.content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        out["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return out


def replaced(value: Any, names: Mapping[str, str]) -> Any:  # noqa: ANN401 - any JSON
    """Return a JSON value in which texts that are keys of ``names`` are exchanged.

    >>> replaced({"id": "a", "of": ["a", "b"]}, {"a": "x"})
    {'id': 'x', 'of': ['x', 'b']}
    """
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, list):
        return [replaced(item, names) for item in value]
    if isinstance(value, dict):
        return {key: replaced(item, names) for key, item in value.items()}
    return value


def what_differs(recorded: Message, delivered: Message) -> str:
    """Return the first part of an answer that is not the recorded one; ids are the proxy's own.

    >>> what_differs(Message(role="assistant", content="a"), Message(role="assistant", content="b"))
    'content'
    """
    if recorded.content != delivered.content:
        return "content"
    if recorded.reasoning != delivered.reasoning:
        return "reasoning"
    kept = [(call.name, call.arguments) for call in recorded.tool_calls]
    return "" if kept == [(call.name, call.arguments) for call in delivered.tool_calls] else "tool calls"


def _result(
    asked: list[CapturedCall], stored: list[Call], differences: list[str], skipped: int, max_leaves: int
) -> ReplayResult:
    rows = tuple(
        ReplayedCall(
            n=call.n,
            role=record.role.value,
            verdict=record.verdict.value,
            first_difference=record.first_difference,
            differs=difference,
        )
        for call, record, difference in zip(asked, stored, differences, strict=True)
    )
    drawn = draw(tree_of(EXECUTION, stored), [call.verdict for call in stored], max_leaves=max_leaves, seed=0)
    return ReplayResult(calls=rows, tree=drawn.statistics, skipped=skipped)


def _show(result: ReplayResult, name: str) -> None:
    table = Table(box=box.SIMPLE, title=f"replay of {name}", title_justify="left")
    for column in ("call", "role", "verdict", "first difference", "delivered"):
        table.add_column(column, justify="right" if column in ("call", "first difference") else "left")
    for call in result.calls:
        difference = str(call.first_difference) if call.first_difference >= 0 else ""
        said = f"other {call.differs}" if call.differs else "as recorded"
        table.add_row(str(call.n), call.role, call.verdict, difference, said)
    console().print(table)
    tree = result.tree
    leaves = ", ".join(f"{count} {role}" for role, count in tree.leaves.items())
    console().print(
        f"{tree.calls} calls, {tree.roots} roots, {tree.nodes} nodes, leaves: {leaves}; {tree.summed_tokens:,} tokens "
        f"summed, {tree.unique_tokens:,} unique ({tree.ratio:.1f}x), {tree.sampled_tokens:,} sampled; "
        f"{result.skipped} requests that no model answered",
        markup=False,
        soft_wrap=True,
    )
