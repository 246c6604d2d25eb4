"""The ledger: everything of a run that must survive ``kill -9``, in one SQLite file.

Writes go through one thread: at once when it is idle, grouped up to 5 ms under load, synced before the writer of a call
is told. Readers use short transactions of their own connection.
"""

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import msgspec

from opengyre.core.arrays import decode_array, encode_array
from opengyre.core.errors import FileError, InvariantError, RunError
from opengyre.core.protocols import RoleRevision
from opengyre.core.records import Record
from opengyre.core.types import Call, Delivered, Dropped, Execution, Outcome, Role

FILE_NAME = "ledger.sqlite"
SCHEMA_VERSION = 2
GROUPING_S = 0.005
CHECKPOINT_BYTES = 4 << 20
"""Written since the write-ahead log was last copied into the file; as soon as nothing waits it is copied again.

Choice: after the writers were told and while none waits, not in the commit that fills the log, as SQLite does by
itself: a copy takes 10 to 20 ms, and a call waits for its commit. At four times as much it is copied in any case.
"""
_PAGE_BYTES = 4096
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE calls (
    execution_id TEXT NOT NULL, seq INTEGER NOT NULL, request_id TEXT NOT NULL, sampled_tokens INTEGER NOT NULL,
    body BLOB NOT NULL, PRIMARY KEY (execution_id, seq)) WITHOUT ROWID;
CREATE TABLE answers (
    execution_id TEXT NOT NULL, request_id TEXT NOT NULL, answer BLOB NOT NULL,
    PRIMARY KEY (execution_id, request_id)) WITHOUT ROWID;
CREATE TABLE receipts (
    execution_id TEXT NOT NULL, request_id TEXT NOT NULL, delivered TEXT NOT NULL, sent_bytes INTEGER NOT NULL,
    PRIMARY KEY (execution_id, request_id)) WITHOUT ROWID;
CREATE TABLE roles (execution_id TEXT NOT NULL, call_id TEXT NOT NULL, role TEXT NOT NULL, agent TEXT NOT NULL,
    evidence TEXT NOT NULL,
    PRIMARY KEY (execution_id, call_id)) WITHOUT ROWID;
CREATE TABLE executions (execution_id TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE outcomes (execution_id TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE events (seq INTEGER PRIMARY KEY, now_s REAL NOT NULL, event BLOB NOT NULL, commands BLOB NOT NULL);
CREATE TABLE records (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, body BLOB NOT NULL);
CREATE INDEX records_by_kind ON records (kind);
CREATE TABLE micro_steps (micro_step_id TEXT PRIMARY KEY, step INTEGER, group_id INTEGER NOT NULL, rows TEXT NOT NULL)
    WITHOUT ROWID;
"""
_CALLS = msgspec.msgpack.Decoder(Call, dec_hook=decode_array)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_array)
_OUTCOMES = msgspec.json.Decoder(Outcome)
_RECORDS = msgspec.json.Decoder(Record)
_EXECUTIONS = msgspec.json.Decoder(Execution)
R = TypeVar("R", bound=msgspec.Struct)
_Statement = tuple[str, tuple[object, ...]]


class LoggedEvent(msgspec.Struct, frozen=True):
    """One event of the scheduler's log, with the commands it caused.

    Example: ``LoggedEvent(seq=0, now_s=0.0, event=b'{"type":"Tick"}', commands=())``.
    """

    seq: int
    now_s: float
    event: bytes
    commands: tuple[bytes, ...]


class Ledger:
    """The durable record of a run; implements ``core.protocols.CallStore``.

    Example: ``ledger = Ledger.open(run_folder)``; ``await ledger.commit([call], answer)``; ``ledger.close()``.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path
        self._reader = _connect(path, read_only=read_only)
        self._queue: queue.SimpleQueue[tuple[list[_Statement], Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if not read_only:
            self._thread = threading.Thread(target=self._write_loop, name="ledger", daemon=True)
            self._thread.start()

    @classmethod
    def open(cls, folder: Path, *, read_only: bool = False) -> "Ledger":
        """Open the ledger of a run folder; a writer makes it if it is not there.

        Raises:
            FileError: There is none, it is not a ledger, or it has another schema version.
        """
        path = folder / FILE_NAME
        if not path.exists():
            if read_only:
                raise FileError(f"{path}: no such file; expected the ledger of a run")
            _create(path)
        try:
            ledger = cls(path, read_only=read_only)
            seen = ledger.meta("schema")
        except sqlite3.DatabaseError as error:
            raise FileError(f"{path}: not a ledger: {error}") from error
        if seen != str(SCHEMA_VERSION):
            ledger.close()
            raise FileError(f"{path}: schema version {seen}, expected {SCHEMA_VERSION}")
        return ledger

    def close(self) -> None:
        """Write what is queued and close."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._reader.close()

    # -- writing ----------------------------------------------------------------------------------------------

    def _submit(self, statements: list[_Statement]) -> Future[None]:
        if self._thread is None:
            raise InvariantError(f"{self.path}: a ledger opened for reading was written to")
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # who waits may be cancelled, what was handed in is written all the same
        self._queue.put((statements, done))
        return done

    async def _write(self, statements: list[_Statement]) -> None:
        await asyncio.wrap_future(self._submit(statements))

    def _write_loop(self) -> None:
        connection = _connect(self.path, read_only=False)
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        uncopied = 0
        while (first := self._queue.get()) is not None:
            items = [first]
            deadline_s = time.monotonic() + GROUPING_S
            ended = False
            while not self._queue.empty() and time.monotonic() < deadline_s:
                item = self._queue.get()
                if item is None:
                    ended = True
                    break
                items.append(item)
            _commit(connection, self.path, items)
            if ended:
                break
            uncopied += sum(_written_bytes(statements) for statements, _ in items)
            if uncopied > (CHECKPOINT_BYTES if self._queue.empty() else 4 * CHECKPOINT_BYTES):
                with contextlib.suppress(sqlite3.OperationalError):  # a full disk: the next commit says so
                    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                uncopied = 0
        connection.close()

    async def commit(self, calls: Sequence[Call], answer: bytes) -> None:
        """Store the calls of one request durably."""
        statements: list[_Statement] = [
            (
                "INSERT INTO calls VALUES (?, ?, ?, ?, ?)",
                (c.execution_id, c.seq, c.request_id, len(c.output), _ENCODER.encode(_without_shared_keys(c))),
            )
            for c in calls
        ]
        first = calls[0]
        statements.append(
            (
                "INSERT INTO answers VALUES (?, ?, ?)",
                (first.execution_id, first.request_id, answer),
            )
        )
        await self._write(statements)

    async def record_delivery(self, execution_id: str, request_id: str, delivered: Delivered, sent_bytes: int) -> None:
        """Store what the shim's journal says of an answer; the receipt may come before the call is committed."""
        await self._write(
            [
                (
                    "INSERT OR REPLACE INTO receipts VALUES (?, ?, ?, ?)",
                    (execution_id, request_id, delivered.value, sent_bytes),
                )
            ]
        )

    async def import_deliveries(self, receipts: Sequence[tuple[str, str, Delivered, int]]) -> None:
        """Store receipts (execution, request, delivered, bytes) that a shim's journal has and no proxy took."""
        await self._write(
            [
                (
                    "INSERT OR IGNORE INTO receipts VALUES (?, ?, ?, ?)",
                    (execution, request, delivered.value, sent),
                )
                for execution, request, delivered, sent in receipts
            ]
        )

    async def revise_roles(self, execution_id: str, revisions: Sequence[RoleRevision]) -> None:
        """Store roles that later evidence gave to calls."""
        if revisions:
            await self._write(
                [
                    (
                        "INSERT OR REPLACE INTO roles VALUES (?, ?, ?, ?, ?)",
                        (execution_id, guess.call_id, guess.role.value, guess.agent, guess.evidence),
                    )
                    for guess in revisions
                ]
            )

    async def put_executions(self, executions: Sequence[Execution]) -> None:
        """Store executions, replacing earlier states."""
        await self._write(
            [
                ("INSERT OR REPLACE INTO executions VALUES (?, ?)", (e.execution_id, msgspec.json.encode(e)))
                for e in executions
            ]
        )

    async def put_outcome(self, execution_id: str, outcome: Outcome) -> None:
        """Store the outcome of an execution."""
        await self._write(
            [("INSERT OR REPLACE INTO outcomes VALUES (?, ?)", (execution_id, msgspec.json.encode(outcome)))]
        )

    async def append_event(self, logged: LoggedEvent) -> None:
        """Append to the scheduler's log."""
        commands = msgspec.msgpack.encode(logged.commands)
        await self._write(
            [("INSERT INTO events VALUES (?, ?, ?, ?)", (logged.seq, logged.now_s, logged.event, commands))]
        )

    async def add_record(self, record: Record) -> None:
        """Append a record."""
        await self._write([_record_statement(record)])

    async def put_micro_steps(self, group_id: int, micro_steps: dict[str, Sequence[str]]) -> None:
        """Store which rows each micro-step of a group has, in order."""
        await self._write(
            [
                (
                    "INSERT OR REPLACE INTO micro_steps VALUES (?, NULL, ?, ?)",
                    (micro_step_id, group_id, msgspec.json.encode(list(rows)).decode()),
                )
                for micro_step_id, rows in micro_steps.items()
            ]
        )

    async def put_meta(self, key: str, value: str) -> None:
        """Store a fact of the run."""
        await self._write([("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))])

    # -- reading ----------------------------------------------------------------------------------------------

    def meta(self, key: str) -> str | None:
        """Return a fact of the run."""
        row = self._reader.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    async def committed_answer(self, execution_id: str, request_id: str) -> bytes | None:
        """Return the answer of a request id that was committed before, if any."""
        row = self._reader.execute(
            "SELECT answer FROM answers WHERE execution_id = ? AND request_id = ?", (execution_id, request_id)
        ).fetchone()
        return None if row is None else bytes(row[0])

    async def calls(self, execution_id: str) -> list[Call]:
        """Return the calls of an execution in order of ``seq``."""
        return self.read_calls(execution_id)

    def read_calls(self, execution_id: str) -> list[Call]:
        """Return the calls of an execution in order of ``seq``, with receipts and revised roles applied."""
        receipts = dict(
            self._reader.execute("SELECT request_id, delivered FROM receipts WHERE execution_id = ?", (execution_id,))
        )
        revised = {
            call_id: {"role": Role(role), "agent_key": agent, "role_evidence": evidence}
            for call_id, role, agent, evidence in self._reader.execute(
                "SELECT call_id, role, agent, evidence FROM roles WHERE execution_id = ?", (execution_id,)
            )
        }
        calls: list[Call] = []
        keys: dict[str, tuple[int, ...]] = {}
        for (body,) in self._reader.execute(
            "SELECT body FROM calls WHERE execution_id = ? ORDER BY seq", (execution_id,)
        ):
            call = _with_shared_keys(_CALLS.decode(body), keys)
            keys[call.call_id] = call.message_keys
            changes = revised.get(call.call_id, {})
            delivered = Delivered(receipts.get(call.request_id, Delivered.UNKNOWN))
            calls.append(msgspec.structs.replace(call, delivered=delivered, **changes))
        return calls

    def delivery_counts(self) -> dict[str, int]:
        """Return how many requests are complete, hung up and unknown."""
        rows = self._reader.execute(
            "SELECT COALESCE(receipts.delivered, 'unknown'), COUNT(*) FROM answers LEFT JOIN receipts "
            "USING (execution_id, request_id) GROUP BY 1"
        )
        return {"complete": 0, "hung_up": 0, "unknown": 0, **dict(rows.fetchall())}

    def call_totals(self, execution_id: str) -> tuple[int, int]:
        """Return how many calls of an execution are committed, and their sampled tokens."""
        row = self._reader.execute(
            "SELECT COUNT(*), COALESCE(SUM(sampled_tokens), 0) FROM calls WHERE execution_id = ?", (execution_id,)
        ).fetchone()
        return int(row[0]), int(row[1])

    def executions(self) -> list[Execution]:
        """Return all executions in order of their ids."""
        rows = self._reader.execute("SELECT body FROM executions ORDER BY execution_id")
        return [_EXECUTIONS.decode(body) for (body,) in rows]

    def outcomes(self) -> dict[str, Outcome]:
        """Return the outcome of each execution that has one."""
        rows = self._reader.execute("SELECT execution_id, body FROM outcomes")
        return {execution_id: _OUTCOMES.decode(body) for execution_id, body in rows}

    def outcome(self, execution_id: str) -> Outcome | None:
        """Return the outcome of one execution."""
        row = self._reader.execute("SELECT body FROM outcomes WHERE execution_id = ?", (execution_id,)).fetchone()
        return None if row is None else _OUTCOMES.decode(row[0])

    def drop_reasons(self) -> list[str]:
        """Return why executions were dropped."""
        return [outcome.reason for outcome in self.outcomes().values() if isinstance(outcome, Dropped)]

    def events(self) -> Iterator[LoggedEvent]:
        """Yield the scheduler's log in order."""
        for seq, now_s, event, commands in self._reader.execute("SELECT * FROM events ORDER BY seq").fetchall():
            yield LoggedEvent(seq, now_s, event, msgspec.msgpack.decode(commands, type=tuple[bytes, ...]))

    def records(self, kind: type[R]) -> list[R]:
        """Return the records of one type in the order in which they were written."""
        tag = kind.__struct_config__.tag
        rows = self._reader.execute("SELECT body FROM records WHERE kind = ? ORDER BY id", (tag,))
        decoded = [_RECORDS.decode(body) for (body,) in rows]
        return [record for record in decoded if isinstance(record, kind)]

    def micro_steps(self) -> dict[str, list[str]]:
        """Return the rows of each micro-step."""
        rows = self._reader.execute("SELECT micro_step_id, rows FROM micro_steps")
        return {micro_step_id: msgspec.json.decode(text, type=list[str]) for micro_step_id, text in rows}

    def size_bytes(self) -> int:
        """Return the size of the file with its write-ahead log."""
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())


def _without_shared_keys(call: Call) -> Call:
    """Return what is stored of a call; with all keys an execution would take space quadratic in its length."""
    if not call.shared_keys:
        return call
    return msgspec.structs.replace(call, message_keys=call.message_keys[call.shared_keys :])


def _with_shared_keys(call: Call, keys: dict[str, tuple[int, ...]]) -> Call:
    """Return a stored call with the keys of its parent in front."""
    if not call.shared_keys:
        return call
    before = keys.get(call.parent_call_id or "", ())
    if len(before) != call.shared_keys:
        raise InvariantError(
            f"{call.call_id}: the message keys of {call.parent_call_id}: {len(before)}, expected {call.shared_keys}"
        )
    return msgspec.structs.replace(call, message_keys=before + call.message_keys)


def _record_statement(record: Record) -> _Statement:
    tag = str(type(record).__struct_config__.tag)
    return "INSERT INTO records (kind, body) VALUES (?, ?)", (tag, msgspec.json.encode(record))


def _connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    mode = "ro" if read_only else "rw"
    connection = sqlite3.connect(
        f"file:{path}?mode={mode}", uri=True, timeout=30, isolation_level=None, check_same_thread=False
    )
    if not read_only:
        connection.execute("PRAGMA synchronous = FULL")
    return connection


def _create(path: Path) -> None:
    """Make an empty ledger under another name first: who looks at a run that starts sees a whole one or none."""
    unfinished = path.with_suffix(".new")
    try:
        unfinished.unlink(missing_ok=True)
        connection = sqlite3.connect(unfinished, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(_SCHEMA)
        connection.execute("INSERT INTO meta VALUES ('schema', ?)", (str(SCHEMA_VERSION),))
        connection.close()
        unfinished.replace(path)
    except sqlite3.OperationalError as error:
        raise RunError(f"{path}: the ledger cannot be made: {error}") from error


def _commit(connection: sqlite3.Connection, path: Path, items: list[tuple[list[_Statement], Future[None]]]) -> None:
    """Write the items in one transaction; on an error each is tried alone, so one bad item hurts only itself."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        for statements, _ in items:
            for sql, values in statements:
                connection.execute(sql, values)
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if len(items) > 1:
            for item in items:
                _commit(connection, path, [item])
            return
        items[0][1].set_exception(_translated(path, error))
        return
    for _, done in items:
        done.set_result(None)


def _written_bytes(statements: list[_Statement]) -> int:
    """Return about how many bytes statements add to the write-ahead log: their values, and pages of tree nodes."""
    values = sum(len(value) for _, values in statements for value in values if isinstance(value, bytes))
    return values + 2 * _PAGE_BYTES * len(statements)


def _translated(path: Path, error: sqlite3.Error) -> Exception:
    if isinstance(error, sqlite3.IntegrityError):
        return InvariantError(f"{path}: written twice: {error}")
    return RunError(f"{path}: cannot be written: {error}")
