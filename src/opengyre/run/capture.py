"""``opengyre capture``: record what a harness asks of a model server, without training anything."""

import argparse
import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from opengyre.core.errors import FileError, InputError
from opengyre.proxy.dialects import DIALECTS
from opengyre.proxy.redaction import host_names, redacted_call
from opengyre.proxy.requests import Json
from opengyre.report.console import console
from opengyre.run.replay import anthropic_body

_PROTOCOLS = {"/v1/chat/completions": "chat", "/v1/messages": "anthropic"}
_HOP_HEADERS = {"connection", "content-length", "host", "accept-encoding", "transfer-encoding", "content-encoding"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("--upstream", required=True, metavar="URL", help="base URL of the model server")
    parser.add_argument(
        "--out", type=Path, default=Path("capture.jsonl"), metavar="FILE", help="(default: %(default)s)"
    )
    parser.add_argument("harness", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")


def main(arguments: argparse.Namespace) -> int:
    """Run a command against a model server and record its calls; 1 if the command fails."""
    command = arguments.harness[1:] if arguments.harness[:1] == ["--"] else arguments.harness
    if not command:
        raise InputError("capture: no command; expected -- COMMAND ... after the options")
    upstream = upstream_of(arguments.upstream)
    try:
        with arguments.out.open("wb") as file:
            status, count = asyncio.run(record(command, Recorder(upstream, lambda line: _write(file, line))))
    except OSError as error:
        raise FileError(f"{arguments.out}: cannot be written: {error.strerror}") from error
    console().print(f"{count} calls in {arguments.out}; the command ended with {status}", markup=False)
    return 0 if status == 0 else 1


def _write(file: Any, line: Json) -> None:  # noqa: ANN401 - a binary file
    file.write(msgspec.json.encode(line) + b"\n")
    file.flush()


def upstream_of(url: str) -> str:
    """Return the base URL of a server without ``/v1``.

    >>> upstream_of("http://127.0.0.1:8000/v1/")
    'http://127.0.0.1:8000'

    Raises:
        InputError: It is no http or https URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"--upstream {url}: expected a URL like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


@dataclass
class Recorder:
    """Passes everything on to a server as it comes, and notes the calls."""

    upstream: str
    note: Any
    """Takes one line of the capture."""
    count: int = 0
    _began_s: float | None = None
    _client: aiohttp.ClientSession = field(init=False)

    async def serve(self, runner_of: list[web.AppRunner]) -> int:
        """Listen on a port of loopback and return it."""
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=True)
        application = web.Application(client_max_size=1 << 28)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        runner_of.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return int(runner.addresses[0][1])

    async def close(self) -> None:
        """End the connections to the server."""
        await self._client.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOP_HEADERS}
        started_s = time.monotonic()
        self._began_s = started_s if self._began_s is None else self._began_s
        line = self._line(request, headers, body, started_s) if request.path in DIALECTS else None
        got = bytearray()
        response = web.StreamResponse()
        try:
            async with self._client.request(
                request.method, self.upstream + request.path_qs, headers=headers, data=body, allow_redirects=False
            ) as answer:
                response.set_status(answer.status)
                kind = answer.headers.get("content-type", "application/json")
                response.headers["content-type"] = kind
                await response.prepare(request)
                fault = await _carried(answer, response, got)
        except aiohttp.ClientError as error:
            return web.json_response({"error": {"message": f"upstream: {error}"}}, status=502)
        if line is not None:
            self._noted(line, bytes(got), response.status, kind, fault, started_s)
        with suppress(ConnectionError):
            await response.write_eof()
        if fault and request.transport is not None:
            request.transport.close()
        return response

    def _line(self, request: web.Request, headers: Json, body: bytes, started_s: float) -> Json:
        self.count += 1
        with suppress(msgspec.DecodeError):
            body = msgspec.json.decode(body)
        return {
            "n": self.count,
            "t": round(started_s - (self._began_s or started_s), 4),
            "protocol": _PROTOCOLS.get(request.path, "responses"),
            "method": request.method,
            "path": request.path,
            "query": request.query_string,
            "headers": headers,
            "request": body if isinstance(body, dict) else None,
        }

    def _noted(self, line: Json, got: bytes, status: int, kind: str, fault: str, started_s: float) -> None:
        response: Json | None = None
        if "event-stream" in kind:
            response, missing = aggregate(line["protocol"], got)
            fault = fault or missing
        else:
            with suppress(msgspec.DecodeError):
                response = msgspec.json.decode(got)
        whole = {**line, "dt": round(time.monotonic() - started_s, 4), "status": status, "response": response}
        self.note(redacted_call({**whole, "fault": fault} if fault else whole, host_names()))


async def _carried(answer: aiohttp.ClientResponse, response: web.StreamResponse, got: bytearray) -> str:
    """Give the answer on as it comes; returns what was wrong with it, if anything."""
    is_open = True
    try:
        async for part in answer.content.iter_any():
            got += part
            if is_open:
                try:
                    await response.write(part)
                except ConnectionError:
                    is_open = False
    except aiohttp.ClientError as error:
        return f"the server ended the answer early: {type(error).__name__}"
    return ""


# -- streams to bodies --------------------------------------------------------------------------------------------


def _events(stream: bytes) -> Iterator[Json]:
    for row in stream.splitlines():
        if row.startswith(b"data:") and row[5:].strip() != b"[DONE]":
            with suppress(msgspec.DecodeError):
                yield msgspec.json.decode(row[5:])


def aggregate(protocol: str, stream: bytes) -> tuple[Json, str]:
    """Return the body that a stream of events comes to, and what is missing of it (empty: nothing)."""
    events = list(_events(stream))
    if protocol == "anthropic":
        whole = anthropic_body(stream.replace(b"data:{", b"data: {"))
        for block, text in zip(
            (each for each in whole["content"] if each["type"] == "tool_use"), whole["_raw_tool_args"], strict=True
        ):
            with suppress(msgspec.DecodeError):
                block["input"] = msgspec.json.decode(text)
        start: Json = next((event["message"] for event in events if event.get("type") == "message_start"), {})
        ends = [event for event in events if event.get("type") == "message_delta"]
        stop = ends[-1]["delta"] if ends else {}
        is_whole = any(event.get("type") == "message_stop" for event in events)
        return {**start, **stop, **whole}, "" if is_whole else "no message_stop"
    if protocol == "responses":
        ends = [
            event["response"] for event in events if event.get("type") in ("response.completed", "response.incomplete")
        ]
        return (ends[-1], "") if ends else ({}, "no response.completed")
    return _chat_body(events), "" if b"[DONE]" in stream else "no [DONE]"


def _chat_body(events: Sequence[Json]) -> Json:
    whole: Json = {"object": "chat.completion"}
    choices: dict[int, Json] = {}
    for event in events:
        whole.update({key: event[key] for key in ("id", "model", "created", "usage") if event.get(key)})
        for part in event.get("choices", ()):
            choice = choices.setdefault(part.get("index", 0), {"message": {"role": "assistant", "content": None}})
            _extend(choice["message"], part.get("delta") or {})
            choice["finish_reason"] = part.get("finish_reason") or choice.get("finish_reason")
    whole["choices"] = [{"index": index, **choices[index]} for index in sorted(choices)]
    return whole


def _extend(message: Json, delta: Json) -> None:
    for key in ("content", "reasoning_content", "reasoning"):
        if delta.get(key):
            message[key] = (message.get(key) or "") + delta[key]
    calls = message.setdefault("tool_calls", []) if delta.get("tool_calls") else []
    for part in delta.get("tool_calls") or ():
        while len(calls) <= part.get("index", 0):
            calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[part.get("index", 0)]
        if part.get("id"):
            call["id"] = part["id"]
        for key, text in (part.get("function") or {}).items():
            call["function"][key] = call["function"].get(key, "") + (text or "")


async def record(command: Sequence[str], recorder: Recorder) -> tuple[int, int]:
    """Run a command with its base URLs set to the recorder; returns its exit status and the number of calls.

    Raises:
        InputError: The command cannot be started.
    """
    runners: list[web.AppRunner] = []
    base = f"http://127.0.0.1:{await recorder.serve(runners)}"
    urls = {"OPENAI_BASE_URL": f"{base}/v1", "OPENAI_API_BASE": f"{base}/v1", "ANTHROPIC_BASE_URL": base}
    try:
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **urls, "GYRE_BASE_URL": f"{base}/v1"}
        )
        return await process.wait(), recorder.count
    except OSError as error:
        raise InputError(f"{command[0]}: cannot be started: {error.strerror}") from error
    finally:
        await recorder.close()
        for runner in runners:
            await runner.cleanup()
