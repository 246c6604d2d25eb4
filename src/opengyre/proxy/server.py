"""The HTTP face of the policy: one unix socket an execution, answers delivered only after their call is committed."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from aiohttp import web

from opengyre.core.chat import ChatRenderer
from opengyre.core.errors import CallError, InvariantError
from opengyre.core.protocols import CallStore, Engine
from opengyre.core.types import Delivered
from opengyre.proxy.dialects import chat
from opengyre.proxy.requests import Answer, ChatRequest, Json
from opengyre.proxy.session import Session, SessionSpec
from opengyre.trajectory.marks import Mark

REQUEST_ID_HEADER = "x-gyre-request-id"
LONGEST_SOCKET_PATH_BYTES = 60
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
        body_limit_bytes: Largest request body.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        store: CallStore,
        renderer: ChatRenderer,
        clock: Callable[[], float],
        body_limit_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self._engine = engine
        self._store = store
        self._renderer = renderer
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        """Socket path to session."""
        self._sites: dict[str, tuple[str, web.UnixSite]] = {}
        self._running: dict[tuple[str, str], asyncio.Future[Answer]] = {}
        application = web.Application(client_max_size=body_limit_bytes)
        application.router.add_post("/v1/chat/completions", self._chat)
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/_shim/receipt", self._receipt)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=0.1)
        self.failed: asyncio.Future[None] | None = None
        """Gets the exception of a broken invariant or a full disk: the run must stop."""

    async def start(self) -> None:
        """Make ready to open executions."""
        self.failed = asyncio.get_running_loop().create_future()
        await self._runner.setup()

    async def stop(self) -> None:
        """Close every socket."""
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
        if spec.execution_id in self._sites:
            raise InvariantError(f"execution {spec.execution_id} is open already")
        socket_path.unlink(missing_ok=True)
        site = web.UnixSite(self._runner, path)
        await site.start()
        socket_path.chmod(0o600)
        self._sessions[path] = Session(spec, self._renderer)
        self._sites[spec.execution_id] = (path, site)

    async def close_execution(self, execution_id: str) -> None:
        """Stop serving an execution."""
        path, site = self._sites.pop(execution_id)
        session = self._sessions.pop(path)
        session.is_closed = True
        await site.stop()
        await self._store.revise_roles(execution_id, session.revised_roles(is_over=True))
        Path(path).unlink(missing_ok=True)

    # -- requests ---------------------------------------------------------------------------------------------

    def _session(self, request: web.Request) -> Session:
        transport = request.transport
        path = transport.get_extra_info("sockname") if transport is not None else None
        session = self._sessions.get(str(path))
        if session is None:
            raise CallError("no such execution", status=404, code="execution_unknown")
        return session

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            session = self._session(request)
            body = await _decoded(request)
            parsed = chat.parse_request(body)
            mark = session.spec.marks.read(request.path, request.headers, body)
            answer = await self._answer(session, parsed, mark, request.headers.get(REQUEST_ID_HEADER, ""))
        except CallError as error:
            return web.Response(body=chat.error_body(error), status=error.status, content_type="application/json")
        if not parsed.stream:
            return web.Response(body=chat.answer_body(answer), content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            await response.write(b"".join(chat.stream_chunks(answer, include_usage=parsed.include_usage)))
            await response.write_eof()
        return response

    async def _answer(self, session: Session, parsed: ChatRequest, mark: Mark, request_id: str) -> Answer:
        """Return the answer of a request id: from the ledger, from the call that is running, or by sampling."""
        execution_id = session.spec.execution_id
        request_id = request_id or f"{execution_id}-{time.monotonic_ns()}"
        stored = await self._store.committed_answer(execution_id, request_id)
        if stored is not None:
            return _ANSWERS.decode(stored)
        running = self._running.get((execution_id, request_id))
        if running is None:
            running = asyncio.ensure_future(self._sample(session, parsed, mark, request_id))
            self._running[execution_id, request_id] = running
            running.add_done_callback(lambda _: self._running.pop((execution_id, request_id), None))
        try:
            return await asyncio.shield(running)
        except CallError:
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

    async def _models(self, request: web.Request) -> web.Response:
        model = self._session(request).spec.model
        return web.json_response({"object": "list", "data": [{"id": model, "object": "model", "owned_by": "opengyre"}]})

    async def _receipt(self, request: web.Request) -> web.Response:
        try:
            session = self._session(request)
            receipt = _RECEIPTS.decode(await request.read())
        except (CallError, msgspec.DecodeError) as error:
            return web.Response(text=str(error), status=400)
        await self._store.record_delivery(
            session.spec.execution_id, receipt.request_id, receipt.delivered, receipt.sent_bytes
        )
        return web.Response(text="ok")


async def _decoded(request: web.Request) -> Json:
    try:
        body = msgspec.json.decode(await request.read())
    except msgspec.DecodeError as error:
        raise CallError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise CallError(f"the body is {type(body).__name__}, expected an object")
    return body
