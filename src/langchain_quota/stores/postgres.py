"""Counts in PostgreSQL, shared by all processes and machines that use it."""

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from math import ceil
from typing import TYPE_CHECKING, cast
from weakref import WeakValueDictionary

from langchain_quota.core.admission import AcquireRequest, AcquireResult
from langchain_quota.runtime.event_loops import Batch
from langchain_quota.runtime.store_errors import QuotaStoreError
from langchain_quota.runtime.sync_async import T, current_mode, run_sync
from langchain_quota.stores import IDLE_TTL
from langchain_quota.stores.base import PAGE, Operation
from langchain_quota.stores.keys import COUNT, NOTES, Prefix
from langchain_quota.stores.rows import FROZEN, Name, Rows, names_of
from langchain_quota.stores.server import PREFIX, ServerStore

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

    from langchain_quota.stores.postgres_connections import Connection, Pool

with suppress(ModuleNotFoundError):
    # An extra, which is loaded now: when a store is made, an event loop may run.
    import langchain_quota.stores.postgres_connections  # noqa: F401

CLOCK = "extract(epoch FROM clock_timestamp())"
"""The time, in seconds since the Unix epoch."""

_SETUP = """
BEGIN;
SELECT pg_advisory_xact_lock(7305808869231650401);  -- two may do this at the same time
CREATE TABLE IF NOT EXISTS langchain_quota (
    id uuid PRIMARY KEY,    -- of prefix, kind and name, by their hash: names may have any length
    prefix text NOT NULL,
    kind text NOT NULL,
    name text,              -- as JSON; only where it is listed
    value text NOT NULL,    -- as JSON: when it expires, and what is kept
    due bigint NOT NULL     -- when it may be deleted, in seconds since the Unix epoch
) WITH (fillfactor = 60);   -- so that a count that is charged stays on its page
CREATE INDEX IF NOT EXISTS langchain_quota_due ON langchain_quota (due);
CREATE INDEX IF NOT EXISTS langchain_quota_listed ON langchain_quota (prefix, kind, id)
    WHERE name IS NOT NULL;
COMMIT
"""
_BEGIN = """
BEGIN ISOLATION LEVEL READ COMMITTED, READ WRITE;
SET LOCAL statement_timeout = {timeout};
SET LOCAL idle_in_transaction_session_timeout = {stalled};
SELECT FROM unnest('{{{locks}}}'::bigint[]) AS lock, pg_advisory_xact_lock(lock);
"""
"""Locks are taken in one order, so that no two requests wait for each other."""

_READ = """
SELECT NULL, ({clock})::text UNION ALL
SELECT id::text, value FROM langchain_quota WHERE id = ANY('{{{ids}}}'::uuid[])
"""
_WRITE = """
INSERT INTO langchain_quota (id, prefix, kind, name, value, due) VALUES {rows}
ON CONFLICT (id) DO UPDATE SET value = EXCLUDED.value, due = EXCLUDED.due;
"""
_DELETE = "DELETE FROM langchain_quota WHERE id = ANY('{{{ids}}}'::uuid[]);"
_CLEAN = """
DELETE FROM langchain_quota WHERE id = ANY(ARRAY(
    SELECT id FROM langchain_quota WHERE due <= {now} ORDER BY due LIMIT {most}
    FOR UPDATE SKIP LOCKED
));
"""
_LIST = """
SELECT id, name FROM langchain_quota WHERE prefix = {} AND kind = {}
AND name IS NOT NULL AND id > '{last}' AND starts_with(name, {}) ORDER BY id LIMIT {most}
"""

_LISTED = (COUNT, NOTES)
"""What is found by a pattern of keys."""

_CLEANED_EVERY, _CLEANED = 16, 100
"""After writing so many rows, on average, so many expired ones are deleted at most."""

_ROUNDED = 3600
"""When a count is deleted, in seconds: an index that changes with every charge would grow."""

_TRIES = 3
"""How often a request is tried if the server ends its transactions."""


class PostgresStore(ServerStore):
    """A `QuotaStore` in PostgreSQL, for all processes and machines that use the same prefix.

    For those whose checkpointer is PostgreSQL already. `setup()` makes its table, once. A request
    is one short transaction of two round trips: it locks and reads what it names, and writes what
    has changed. Async requests that begin at about the same time may share a transaction, in which
    they are admitted one after the other, each with its own result. No session keeps any state, so
    a pooler such as PgBouncer may share connections in its transaction mode. Requests delete what
    has expired. Counts are as durable as PostgreSQL.

    A request that is under way locks its counts. If its worker's event loop is blocked for more
    than a quarter of the timeout, the server ends the transaction, and the request is tried again.

    Args:
        source: A connection string, `postgresql://user:password@host:port/database`: the store
            makes at most 10 connections for all threads, and 10 for each event loop. Or your own
            pool, which you open and close: a `ConnectionPool` of psycopg_pool serves the sync form,
            an `AsyncConnectionPool` the async form, on its own event loop; with `autocommit=True`,
            as LangGraph's checkpointers have it, a request takes a round trip less.
        prefix: As of `RedisStore`.
        timeout: How long an operation may take: seconds above 0, at most a day. For an async
            operation it is the total, without time in which the event loop was blocked; for a sync
            operation it is each wait for the server, and connecting may take 2 seconds.
        idle_ttl: How long a count without a window is kept when nobody charges it, from a second.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds. No message has credentials.
        ModuleNotFoundError: The package psycopg is not installed; the message says what to install.

    Examples:
        Nothing is connected before the first operation:

        >>> from langchain_quota import PostgresStore
        >>> PostgresStore("postgresql://worker:secret@db.example/quotas", prefix="prod")
        PostgresStore(postgresql://worker@db.example:5432/quotas, prefix='prod')
    """

    def __init__(
        self,
        source: "str | Pool",
        *,
        prefix: Prefix = PREFIX,
        timeout: float = 1.0,
        idle_ttl: timedelta = IDLE_TTL,
    ) -> None:
        from langchain_quota.stores.postgres_connections import connections  # noqa: PLC0415 - an extra

        super().__init__(prefix, timeout, idle_ttl)
        self._server = self._connections = connections(source, timeout)
        # Those that are under way, by prefix.
        self._batches: WeakValueDictionary[str, Batch[AcquireRequest, AcquireResult]] = (
            WeakValueDictionary()
        )

    def setup(self) -> None:
        """Make the table `langchain_quota`, in the first schema of the search path, if need be.

        Raises:
            QuotaStoreError: The store failed, or the user may not make a table.
        """
        run_sync(self.asetup())

    async def asetup(self) -> None:
        """`setup`, without blocking the event loop."""
        make = partial(self._connections.send, statements=_SETUP)
        await self._in_time(lambda: self._tried(make))

    async def _admit(self, prefix: str, request: AcquireRequest) -> AcquireResult:
        if current_mode():
            batch = self._batches.get(prefix)
            if batch is None or not batch.is_open:
                batch = self._batches[prefix] = Batch(partial(self._send, prefix))
            return await batch.answer(request)
        (answer,) = await self._send(prefix, lambda: [request])
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def _send(
        self, prefix: str, take: Callable[[], Sequence[AcquireRequest]]
    ) -> Sequence[AcquireResult | BaseException]:
        """Admit requests one after the other, in one transaction."""
        return await self._change(
            prefix,
            lambda rows, _: [*map(cast(Rows, rows).answer, take())],
            names=lambda: set().union(*map(names_of, take())),
        )

    async def _change(
        self,
        prefix: str,
        operation: Operation[T],
        keys: Sequence[str] = (),
        *,
        reads: bool = False,
        names: Callable[[], set[Name]] = set,
    ) -> T:
        async def work(connection: "Connection") -> T:
            read, begin = names(), "" if reads else _BEGIN
            rows = await self._read(connection, prefix, read, begin) if read else Rows(self._idle)
            answer = operation(rows, keys)
            while not rows.names <= read:
                # From the beginning, since locks are taken in one order.
                again = f"ROLLBACK; {begin}" if begin and read else begin
                read |= rows.names
                rows = await self._read(connection, prefix, read, again)
                answer = operation(rows, keys)
            if begin:
                await self._write(connection, prefix, rows)
            return answer

        return await self._tried(work)

    def _scan(self, prefix: str, kind: str, pattern: str) -> Iterator[str]:
        last = "0" * 32
        head = json.dumps(re.split(r"[*?\[]", pattern, maxsplit=1)[0])[:-1]

        async def page(connection: "Connection") -> list[tuple[str, str]]:
            texts = (self._connections.quoted(connection, row) for row in (prefix, kind, head))
            statement = _LIST.format(*texts, last=last, most=PAGE)
            results = await self._connections.send(connection, statement)
            return self._read_by(
                lambda: [(row, str(json.loads(name))) for row, name in _table(results)]
            )

        while last:
            rows = run_sync(self._in_time(lambda: self._tried(page)))
            yield from (name for _, name in rows)
            last = rows[-1][0] if len(rows) == PAGE else ""

    async def _tried(self, work: "Callable[[Connection], Awaitable[T]]") -> T:
        """Do some work with a connection, again if the server ends the transaction."""
        for _ in range(_TRIES):
            with suppress(self._connections.ended):
                async with self._connections.taken() as connection:
                    return await work(connection)
        raise QuotaStoreError(f"{self!r}: the server ended {_TRIES} transactions")

    async def _read(
        self, connection: "Connection", prefix: str, names: set[Name], begin: str
    ) -> Rows:
        """Read what is kept under names, and lock it if a transaction is to begin."""
        by_id = {_id(prefix, name): name for name in names}
        locks = {int(row[:16], 16) - 2**63 for row, name in by_id.items() if name not in FROZEN}
        milliseconds = min(ceil(self._timeout * 1000), 2**31 - 1)
        statements = f"{begin}{_READ}".format(
            timeout=milliseconds,
            stalled=ceil(milliseconds / 4),
            locks=",".join(map(str, sorted(locks))),
            clock=CLOCK,
            ids=",".join(by_id),
        )
        results = await self._connections.send(connection, statements)

        def read() -> Rows:
            rows = _table(results)
            read = {by_id[column.replace("-", "")]: value for column, value in rows if column}
            (time,) = (float(value) for column, value in rows if not column)
            return Rows(self._idle, time, read)

        return self._read_by(read)

    async def _write(self, connection: "Connection", prefix: str, rows: Rows) -> None:
        written, gone, moment, quoted = [], [], rows.now, self._connections.quoted
        for (kind, name), text, expires in rows.changed():
            identity = _id(prefix, (kind, name))
            if text is None:
                gone.append(identity)
                continue
            listed = "NULL"
            if kind in _LISTED:
                listed = quoted(connection, json.dumps(name.removeprefix(f"{prefix}/")))
            rounded = _ROUNDED if kind == COUNT else 1
            due = min(ceil(expires / rounded) * rounded, 2**62)
            values = (f"'{identity}'", f"'{prefix}'", f"'{kind}'", listed, quoted(connection, text))
            written.append(f"({','.join(values)},{due})")
        statements = ""
        if written:
            statements += _WRITE.format(rows=",".join(written))
        if gone:
            statements += _DELETE.format(ids=",".join(gone))
        # By chance, the server's microseconds. A batch deletes more rows than it writes, too.
        if int(moment * 1e6) % _CLEANED_EVERY < len(written):
            statements += _CLEAN.format(now=int(moment), most=_CLEANED + len(written))
        await self._connections.commit(connection, statements)


def _id(prefix: str, name: Name) -> str:
    """Return the id of a row; a key may begin with the prefix."""
    kind, text = name
    if kind in _LISTED:
        text = text.removeprefix(f"{prefix}/")
    named = f"{prefix}:{kind}:{text}".encode(errors="surrogatepass")
    return sha256(named).hexdigest()[:32]


def _table(results: "Sequence[PGresult]") -> list[tuple[str, str]]:
    """Return the two columns of the last result."""
    last = results[-1]
    cells = [
        [last.get_value(row, column) or b"" for column in (0, 1)] for row in range(last.ntuples)
    ]
    return [(one.decode(), other.decode()) for one, other in cells]
