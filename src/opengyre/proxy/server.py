"""The HTTP face of the policy: one unix socket an execution, answers delivered only after their call is committed."""

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web

from opengyre.core.chat import ChatRenderer
from opengyre.core.errors import CallError, InputError, InvariantError
from opengyre.core.protocols import CallStore, Engine
from opengyre.core.types import Delivered
from opengyre.proxy.bodies import Asked, BodyFiles, response_of
from opengyre.proxy.dialects import COUNTERS, DIALECTS, Dialect, chat
from opengyre.proxy.doors import Door, DoorLimits, Doors, raise_file_limit
from opengyre.proxy.items import decoded_object
from opengyre.proxy.requests import Answer, ChatRequest, Json
from opengyre.proxy.session import Session, SessionSpec
from opengyre.trajectory.marks import Mark

REQUEST_ID_HEADER = "x-gyre-request-id"
SHIM_HEADER = "x-gyre-shim"
LONGEST_SOCKET_PATH_BYTES = 60
KEY_PREFIX = "/x/"
"""Before the key of an execution in the path of its base URL."""
BACKLOG = 128
"""Connections that the system keeps waiting for us, a socket."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_STREAM_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache"}
_ANSWERS = msgspec.msgpack.Decoder(Answer)


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What a shim says of an answer.

    Example: ``{"request_id": "r7", "delivered": "complete", "sent_bytes": 412}``.
    """

    request_id: str
    delivered: Delivered
    sent_bytes: int = 0


_RECEIPTS = msgspec.json.Decoder(Receipt)


class Proxy:
    """Serves every live execution on a socket of its own.

    Args:
        engine: The router.
        store: The ledger.
        renderer: Chat to tokens and back.
        clock: Seconds on the driver's clock.
        limits: What one execution can take.
        bodies: Where requests and answers are kept as they went over the wire; None: nowhere.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        store: CallStore,
        renderer: ChatRenderer,
        clock: Callable[[], float],
        limits: DoorLimits | None = None,
        bodies: BodyFiles | None = None,
    ) -> None:
        self._bodies = bodies
        self._engine = engine
        self._store = store
        self._renderer = renderer
        self._clock = clock
        self._open: dict[str, tuple[Session, Path, Door, asyncio.AbstractServer]] = {}
        self._keys: dict[str, Session | None] = {}
        """Key to session of an execution that has no socket; none once it is closed."""
        self._keyed: dict[str, str] = {}
        self._tcp: list[asyncio.AbstractServer] = []
        self._running: dict[tuple[str, str], asyncio.Future[Answer]] = {}
        self._doors = Doors(self._protocol, limits or DoorLimits())
        application = web.Application(middlewares=[self._mark_line])
        self._add_routes(application.router)
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=0.1,
            keepalive_timeout=self._doors.limits.silent_s,
        )
        self.failed: asyncio.Future[None] | None = None
        """Gets the exception of a broken invariant or a full disk: the run must stop."""

    def _add_routes(self, router: web.UrlDispatcher) -> None:
        for prefix in ("", KEY_PREFIX + "{key}"):
            for path, dialect in DIALECTS.items():
                router.add_post(prefix + path, partial(self._call, dialect))
            for path, (dialect, count_body) in COUNTERS.items():
                router.add_post(prefix + path, partial(self._count, dialect, count_body))
            router.add_get(prefix + "/v1/models", self._models)
            router.add_get(prefix + "/v1/models/{model:.+}", self._model)
        router.add_post("/_shim/receipt", self._receipt)
        router.add_route("*", "/{path:.*}", _other)

    async def start(self) -> None:
        """Make ready to open executions.

        Choice: the limit of open files is raised for the whole process; its usual 1024 is for programs that select().
        """
        raise_file_limit()
        self.failed = asyncio.get_running_loop().create_future()
        await self._runner.setup()

    async def stop(self) -> None:
        """Close every socket."""
        for server in (*self._tcp, *(server for _, _, _, server in self._open.values())):
            server.close()
        await self._runner.cleanup()
        if self.failed is not None and not self.failed.done():
            self.failed.cancel()

    async def open_execution(self, spec: SessionSpec, socket_path: Path) -> None:
        """Serve an execution on a unix socket of mode 0600.

        Raises:
            InvariantError: The path is too long, or the execution is open already.
        """
        path = str(socket_path)
        if len(path.encode()) > LONGEST_SOCKET_PATH_BYTES:
            raise InvariantError(f"{path}: {len(path.encode())} bytes, expected at most {LONGEST_SOCKET_PATH_BYTES}")
        self._check_new(spec)
        socket_path.unlink(missing_ok=True)
        session = Session(spec, self._renderer)
        door = Door(session)
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(self._doors.entrance(door), path, backlog=BACKLOG)
        socket_path.chmod(0o600)
        self._open[spec.execution_id] = (session, socket_path, door, server)

    async def close_execution(self, execution_id: str) -> None:
        """Stop serving an execution; what still asks on an open connection is told that it is over."""
        session, socket_path, door, server = self._open.pop(execution_id)
        session.is_closed = True
        server.close()
        self._doors.close(door)
        await self._store.revise_roles(execution_id, session.revised_roles(is_over=True))
        socket_path.unlink(missing_ok=True)

    async def listen(self, *, host: str = "127.0.0.1", port: int = 0) -> int:
        """Serve executions that have a key and no socket over TCP; returns the port.

        Choice: loopback unless the caller names another address, for keys and prompts travel in plain text.

        Raises:
            InputError: The address cannot be had.
        """
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(self._doors.entrance(Door(is_port=True)), host, port, backlog=BACKLOG)
        except OSError as error:
            raise InputError(f"{host}:{port}: cannot listen: {error.strerror or error}") from error
        self._tcp.append(server)
        return int(server.sockets[0].getsockname()[1])

    def open_keyed(self, spec: SessionSpec, key: str) -> None:
        """Serve an execution to whoever shows its key: as path prefix of the base URL, or as API key.

        Raises:
            InvariantError: The key is too short or taken, or the execution is open already.
        """
        self._check_new(spec)
        if not re.fullmatch(r"[\w.-]{16,200}", key, re.ASCII) or key in self._keys:
            raise InvariantError(f"the key of {spec.execution_id}: expected a new one of 16 to 200 letters and digits")
        self._keys[key] = Session(spec, self._renderer)
        self._keyed[spec.execution_id] = key

    async def close_keyed(self, execution_id: str) -> None:
        """Stop serving an execution that has a key."""
        key = self._keyed.pop(execution_id)
        session, self._keys[key] = self._keys[key], None
        if session is not None:
            session.is_closed = True
            await self._store.revise_roles(execution_id, session.revised_roles(is_over=True))

    def _check_new(self, spec: SessionSpec) -> None:
        if spec.execution_id in self._open or spec.execution_id in self._keyed:
            raise InvariantError(f"execution {spec.execution_id} is open already")

    def _protocol(self) -> web.RequestHandler:
        server = self._runner.server
        if server is None:
            raise InvariantError("the proxy serves before it was started")
        return server()

    # -- requests ---------------------------------------------------------------------------------------------

    @web.middleware
    async def _mark_line(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        with self._doors.asking(request):
            return await handler(request)

    def _session(self, request: web.Request) -> Session:
        """Return whose request this is: that of the door it came through, or of the key that it shows.

        Choice: behind a socket of its own an execution needs no key, and one that it sends is not looked at.
        """
        door = self._doors.door_of(request)
        session = door.session
        if door.is_port:
            key = key_of(request)
            if key not in self._keys:
                raise CallError(
                    "no execution has this key; expected it in the base URL or as API key",
                    status=401,
                    code="invalid_api_key",
                )
            session = self._keys[key]
        elif "key" in request.match_info:
            raise CallError("this socket is one execution's own: no key in the path", status=404, code="not_found")
        if session is None:
            raise CallError("this execution is closed", status=410, code="execution_closed")
        session.check_open()
        return session

    async def _call(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        is_streamed, asked = False, None
        request_id = request.headers.get(REQUEST_ID_HEADER, "")
        try:
            session = self._session(request)
            request_id = request_id or f"{session.spec.execution_id}-{time.monotonic_ns()}"
            async with self._doors.body(request, session.spec.execution_id) as data:
                body = session.reader.read(data)
                is_streamed = body.get("stream") is True
                if self._bodies is not None:
                    whole = decoded_object(data)
                    asked = Asked(dialect.NAME, path_of(request), request.headers, whole, time.monotonic())
                parsed = dialect.parse_request(body)
                mark = session.spec.marks.read(path_of(request), request.headers, body)
                if parsed.is_compaction:
                    mark = msgspec.structs.replace(mark, is_compaction=True)
                answer = await self._answer(session, parsed, mark, request_id, partial(_is_gone, request))
        except CallError as error:
            if self._bodies is not None and asked is not None:
                self._bodies.keep(
                    session.spec.execution_id, asked, error.status, decoded_object(dialect.error_body(error))
                )
            return _refusal(dialect, error, is_streamed=is_streamed)
        if self._bodies is not None and asked is not None:
            self._bodies.keep(session.spec.execution_id, asked, 200, response_of(dialect, parsed, answer))
        if parsed.stream:
            text = b"".join(dialect.stream_chunks(parsed, answer))
            response = web.StreamResponse(headers=_STREAM_HEADERS)
        else:
            text = dialect.answer_body(parsed, answer)
            response = web.StreamResponse(headers={"content-type": "application/json"})
        response.content_length = len(text)  # no end mark behind the last event: clients close as soon as they have it
        await self._send(session, request, request_id, response, text)
        return response

    async def _send(
        self, session: Session, request: web.Request, request_id: str, response: web.StreamResponse, text: bytes
    ) -> None:
        """Give an answer to its connection; without a shim this is all that is known of its delivery."""
        how = Delivered.HUNG_UP
        with contextlib.suppress(ConnectionError):
            await response.prepare(request)
            await response.write(text)
            await response.write_eof()
            how = Delivered.HUNG_UP if _is_gone(request) else Delivered.COMPLETE
        if SHIM_HEADER in request.headers:
            session.twins.sent(request_id)
            return
        is_counted = session.twins.is_owner(request_id)
        stored_id = session.twins.delivered(request_id, how)
        if is_counted and self._doors.door_of(request).is_port:
            sent_bytes = len(text) if how is Delivered.COMPLETE else 0
            await self._store.record_delivery(session.spec.execution_id, stored_id, how, sent_bytes)

    async def _count(
        self, dialect: Dialect, count_body: Callable[[int], bytes], request: web.Request
    ) -> web.StreamResponse:
        """Answer how many tokens a prompt has; this is no call."""
        try:
            session = self._session(request)
            async with self._doors.body(request, session.spec.execution_id) as data:
                tokens = session.prompt_tokens(dialect.parse_request(session.reader.read(data)))
        except CallError as error:
            return _refusal(dialect, error, is_streamed=False)
        return web.Response(body=count_body(tokens), content_type="application/json")

    async def _answer(
        self, session: Session, parsed: ChatRequest, mark: Mark, request_id: str, is_gone: Callable[[], bool]
    ) -> Answer:
        """Return the answer of a request: from the ledger, from a call that is running, or by sampling."""
        execution_id = session.spec.execution_id
        stored = await self._store.committed_answer(execution_id, request_id)
        if stored is not None and not session.twins.knows(request_id):
            return _ANSWERS.decode(stored)
        asked_id = session.twins.asked(request_id, (parsed.dialect, mark.agent, parsed.body_hash), is_gone)
        running = self._running.get((execution_id, asked_id))
        if running is None:
            stored = await self._store.committed_answer(execution_id, asked_id)
            if stored is not None:
                return _ANSWERS.decode(stored)
            running = self._running.get((execution_id, asked_id))
        if running is None:
            running = asyncio.ensure_future(self._sample(session, parsed, mark, asked_id))
            self._running[execution_id, asked_id] = running
            running.add_done_callback(lambda _: self._running.pop((execution_id, asked_id), None))
        try:
            return await asyncio.shield(running)
        except CallError:
            session.twins.failed(request_id)
            raise
        except Exception as error:
            if self.failed is not None and not self.failed.done():
                self.failed.set_exception(error)
            raise CallError("the run is stopping", status=503, code="unavailable") from error

    async def _sample(self, session: Session, parsed: ChatRequest, mark: Mark, request_id: str) -> Answer:
        prepared = session.prepare(parsed, mark, request_id=request_id, now_s=self._clock())
        generations = await asyncio.gather(*(self._engine.generate(item.generate) for item in prepared))
        finished = [
            session.finish(item, generation, now_s=self._clock())
            for item, generation in zip(prepared, generations, strict=True)
        ]
        answer = session.answer([choice for _, choice in finished], prepared, created_s=int(time.time()))
        await self._store.commit([call for call, _ in finished], msgspec.msgpack.encode(answer))
        revised = session.revised_roles()
        if revised:
            await self._store.revise_roles(session.spec.execution_id, revised)
        return answer

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """Answer with the policy alone, in a form that both vendors' clients read."""
        try:
            model = self._session(request).spec.model
        except CallError as error:
            return _refusal(chat, error, is_streamed=False)
        listed = {"object": "list", "data": [_model_card(model)], "has_more": False}
        return web.json_response({**listed, "first_id": model, "last_id": model})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        try:
            model = self._session(request).spec.model
            if request.match_info["model"] != model:
                raise CallError(f"no model {request.match_info['model']!r:.200}; there is {model!r}", status=404)
        except CallError as error:
            return _refusal(chat, error, is_streamed=False)
        return web.json_response(_model_card(model))

    async def _receipt(self, request: web.Request) -> web.Response:
        try:
            session = self._session(request)
            async with self._doors.body(request, session.spec.execution_id) as data:
                receipts = _RECEIPTS.decode_lines(data)
        except (CallError, msgspec.DecodeError) as error:
            return web.Response(text=str(error), status=400)
        execution_id, twins = session.spec.execution_id, session.twins
        mine = [receipt for receipt in receipts if twins.is_owner(receipt.request_id)]
        await asyncio.gather(
            *(
                self._store.record_delivery(
                    execution_id,
                    twins.delivered(receipt.request_id, receipt.delivered),
                    receipt.delivered,
                    receipt.sent_bytes,
                )
                for receipt in mine
            )
        )
        return web.Response(text="ok")


def _is_gone(request: web.Request) -> bool:
    """Whether the connection of a request is lost."""
    return request.transport is None or request.transport.is_closing()


def key_of(request: web.Request) -> str:
    """Return the key that a request shows: in its path, else as the API key of either vendor's clients."""
    if "key" in request.match_info:
        return request.match_info["key"]
    bearer = request.headers.get("authorization", "")
    return bearer[7:].strip() if bearer[:7].lower() == "bearer " else request.headers.get("x-api-key", "")


def path_of(request: web.Request) -> str:
    """Return the path of a request without the key."""
    prefix = KEY_PREFIX + request.match_info["key"] if "key" in request.match_info else ""
    return request.path.removeprefix(prefix)


async def _other(request: web.Request) -> web.Response:
    """Answer what is no call: a probe with HEAD, or a path that is not served."""
    known = {"", "/", "/v1", *DIALECTS, *COUNTERS}
    path = re.sub(f"^{KEY_PREFIX}[^/]+", "", request.path)
    if request.method == "HEAD":
        return web.Response(status=200 if path in known else 404)
    error = CallError(f"{request.method} {path:.200} is not served here", status=404, code="not_found")
    return web.Response(body=chat.error_body(error), status=404, content_type="application/json")


def _refusal(dialect: Dialect, error: CallError, *, is_streamed: bool) -> web.Response:
    events = dialect.stream_error(error) if is_streamed else None
    if events is not None:
        return web.Response(body=events, headers=_STREAM_HEADERS)
    return web.Response(body=dialect.error_body(error), status=error.status, content_type="application/json")


def _model_card(model: str) -> Json:
    card = {"id": model, "object": "model", "created": 0, "owned_by": "opengyre"}
    return {**card, "type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
