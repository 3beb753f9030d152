"""Connections to PostgreSQL: the store's own, for threads and event loops, or those of a pool."""

import asyncio
import math
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import monotonic
from typing import Any
from urllib.parse import quote
from weakref import WeakSet

try:
    import psycopg
    from psycopg import errors, generators, pq, waiting
    from psycopg.conninfo import conninfo_to_dict
    from psycopg.pq.abc import PGresult
    from psycopg.rows import TupleRow
    from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout
except ImportError as missing:
    raise ModuleNotFoundError(
        'PostgresStore needs the package psycopg: pip install "langchain-quota[postgres]"',
        name=missing.name,
    ) from missing

from langchain_quota.runtime.sync_async import PerLoop, as_async, current_mode
from langchain_quota.stores.server import Server

_CONNECTIONS = 10
"""Most connections, for all threads and for each event loop; other operations wait."""

_OPTIONS: dict[str, Any] = {"autocommit": True, "fallback_application_name": "langchain-quota"}

_FULL = "too many clients", "too many connections", "connection slots are reserved"
"""What a server says that has no connection left."""

_INTERVAL = 0.1
"""How often a wait for the server looks whether its time is over, in seconds."""

Pool = ConnectionPool[Any] | AsyncConnectionPool[Any]
Connection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
_Query = Generator[waiting.Wait, waiting.Ready | int, list[PGresult]]
_stalled: WeakSet[Connection] = WeakSet()


def connections(source: object, timeout: float) -> "Connections":
    """Return the connections of a source; a thread waits for one until the timeout."""
    if isinstance(source, ConnectionPool | AsyncConnectionPool):
        return _UserConnections(source, timeout)
    if not isinstance(source, str):
        # The value is not shown: it may have a password.
        raise TypeError(
            "source must be a connection string, or a ConnectionPool or AsyncConnectionPool of "
            f"psycopg_pool, not a {type(source).__name__}"
        )
    return _OwnedConnections(source, timeout)


def _in_time(query: _Query, seconds: float) -> _Query:
    """Run a query; raise a `TimeoutError` when it still waits after some seconds."""
    ends, ready = monotonic() + seconds, None
    while True:
        try:
            ready = yield query.send(ready)  # type: ignore[arg-type] # it begins with None
        except StopIteration as done:
            results: list[PGresult] = done.value
            return results
        if not ready and monotonic() > ends:
            raise TimeoutError


def _is_open(connection: Connection) -> bool:
    """Return whether the server keeps an idle connection open."""
    try:
        # The first takes what the server said last, the second sees that it is gone.
        connection.pgconn.consume_input()
        connection.pgconn.consume_input()
    except psycopg.OperationalError:
        return False
    return not connection.closed and connection not in _stalled


@asynccontextmanager
async def _closed_by_failures(connection: Connection) -> AsyncIterator[Connection]:
    """Close a connection whose state is unknown after a failure."""

    def heard(notice: errors.Diagnostic) -> None:
        # What comes right behind an answer is no error to libpq.
        if notice.sqlstate == Connections.ended.sqlstate:
            _stalled.add(connection)

    connection.add_notice_handler(heard)
    try:
        yield connection
    finally:
        connection.remove_notice_handler(heard)
        if connection.pgconn.transaction_status != pq.TransactionStatus.IDLE:
            connection.pgconn.finish()


class Connections(Server, ABC):
    """The connections to a database."""

    serving = (
        "a connection string, or a ConnectionPool",
        "a connection string, or an AsyncConnectionPool",
    )
    timeouts = (TimeoutError, errors.QueryCanceled, errors.ConnectionTimeout, PoolTimeout)
    failed = (psycopg.Error, OSError, UnicodeError)  # the last for a host that is no name

    ended = errors.IdleInTransactionSessionTimeout
    """The server has ended a transaction in which nothing came for too long."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    @abstractmethod
    def taken(self) -> AbstractAsyncContextManager[Connection]:
        """Yield a connection that nobody else uses meanwhile."""

    async def send(self, connection: Connection, statements: str) -> list[PGresult]:
        """Send statements together, and return the server's results."""
        pgconn = connection.pgconn
        pgconn.send_query(statements.encode())
        query = generators.execute(pgconn)
        try:
            if isinstance(connection, psycopg.Connection):
                query = _in_time(query, self._timeout)
                results = waiting.wait_selector(query, pgconn.socket, interval=_INTERVAL)
            else:
                # Not its own `wait`: if a caller is cancelled, that waits for a server that hangs.
                results = await waiting.wait_async(query, pgconn.socket, interval=_INTERVAL)
        except psycopg.OperationalError:
            # What the server said before it closed the connection says more.
            last = pgconn.get_result()
            if last is None or not last.error_field(pq.DiagnosticField.SQLSTATE):
                raise
            results = [last]
        for result in results:
            if result.status == pq.ExecStatus.FATAL_ERROR:
                raise errors.error_from_result(result)
        return results

    async def commit(self, connection: Connection, statements: str) -> None:
        """Send what ends a transaction, if the server has not ended it."""
        if not _is_open(connection):
            raise self.ended
        await self.send(connection, f"{statements}COMMIT")

    def quoted(self, connection: Connection, text: str) -> str:
        """Return a text in ASCII as it is written in a statement."""
        return bytes(pq.Escaping(connection.pgconn).escape_literal(text.encode("ascii"))).decode()

    def remedies(self, error: BaseException) -> Sequence[str]:
        """Return what helps against a failure, if that is known."""
        if isinstance(error, errors.UndefinedTable):
            return ("make the store's table once, with its method setup() or asetup()",)
        if isinstance(error, errors.InsufficientPrivilege):
            rights = "SELECT, INSERT, UPDATE and DELETE on the table langchain_quota"
            return (f"its user needs {rights}, and for setup() CREATE on the schema",)
        if isinstance(error, errors.ReadOnlySqlTransaction | errors.FeatureNotSupported):
            return ("name all hosts and target_session_attrs=read-write, if this is a standby",)
        if any(full in str(error) for full in _FULL):
            return ("raise max_connections, or connect through PgBouncer",)
        lost = isinstance(error, psycopg.OperationalError | OSError)
        if lost and not isinstance(error, PoolTimeout):
            return ("check that PostgreSQL runs there and that the connection string is right",)
        return ()


class _UserConnections(Connections):
    """The user's own pool, which the user closes; it has one of the two forms."""

    def __init__(self, pool: Pool, timeout: float) -> None:
        self.name = f"{type(pool).__module__.split('.')[0]}.{type(pool).__name__}"
        self.forms = ("async",) if isinstance(pool, AsyncConnectionPool) else ("sync",)
        super().__init__(timeout)
        self._pool = pool

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[Connection]:
        pool = self._pool
        if isinstance(pool, AsyncConnectionPool):
            async with pool.connection(self._timeout) as taken, _closed_by_failures(taken):
                yield taken
        else:
            with pool.connection(self._timeout) as connection:
                async with _closed_by_failures(connection):
                    yield connection


class _Idle:
    """The connections of all threads, or of an event loop, that are not in use."""

    def __init__(self, permits: asyncio.Semaphore | threading.Semaphore) -> None:
        self.permits = permits
        self.connections: list[Connection] = []

    def take(self) -> Connection | None:
        """Return a connection that the server has not closed, if there is one."""
        while self.connections:
            connection = self.connections.pop()
            if _is_open(connection):
                return connection
        return None

    def close(self) -> None:
        while self.connections:
            self.connections.pop().pgconn.finish()


class _SyncConnection(psycopg.Connection[TupleRow]):
    def __del__(self, *_: object) -> None:
        """It closes itself; a store that is not needed any more need not be closed."""


class _AsyncConnection(psycopg.AsyncConnection[TupleRow]):
    def __del__(self, *_: object) -> None:
        """As above."""


class _OwnedConnections(Connections):
    """Connections that are made by a connection string."""

    def __init__(self, source: str, timeout: float) -> None:
        try:
            parts = conninfo_to_dict(source)
        except psycopg.Error:
            parts = {"port": "unknown"}  # the error is not shown: it may quote the password
        host, port, database, user = (
            str(parts.get(part) or "") for part in ("host", "port", "dbname", "user")
        )
        # What is special in a password that is not percent-encoded makes it a part of these, and
        # so does an empty value: "user= password=…".
        if not re.fullmatch("[0-9,]*", port) or re.search("[@=]", host + database + user):
            raise ValueError(
                "source must be postgresql://[user:password@]host:port/database, or another "
                "connection string of PostgreSQL; percent-encode what is special in user and "
                "password of a URL"
            )
        by = f"{user}@" if (user := user or os.environ.get("PGUSER", "")) else ""
        self.name = f"postgresql://{by}{host or 'localhost'}:{port or 5432}/{database}"
        password = str(parts.get("password") or "")
        self.secrets = (source, password, quote(password, safe="")) if password else (source,)
        super().__init__(timeout)
        self._source = source
        # By process: those of a forked child's parent are not the child's.
        self._threads: dict[int, _Idle] = {}
        self._loops = PerLoop(
            lambda: _Idle(asyncio.Semaphore(_CONNECTIONS)), as_async(_Idle.close), _Idle.close
        )

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[Connection]:
        idle = await self._loops.get() if current_mode() else self._of_process()
        if isinstance(idle.permits, asyncio.Semaphore):
            await idle.permits.acquire()
        elif not idle.permits.acquire(timeout=self._timeout):
            raise TimeoutError
        try:
            connection = idle.take() or await self._connected()
            try:
                async with _closed_by_failures(connection):
                    yield connection
            finally:
                if not connection.closed:
                    idle.connections.append(connection)
        finally:
            idle.permits.release()

    def close(self) -> None:
        self._of_process().close()

    async def aclose(self) -> None:
        await self._loops.close()

    async def _connected(self) -> Connection:
        if current_mode():
            return await _AsyncConnection.connect(self._source, **_OPTIONS)
        # libpq waits for no less than 2 seconds.
        patience = max(2, math.ceil(self._timeout))
        return _SyncConnection.connect(self._source, **_OPTIONS, connect_timeout=patience)

    def _of_process(self) -> _Idle:
        idle = _Idle(threading.BoundedSemaphore(_CONNECTIONS))
        return self._threads.setdefault(os.getpid(), idle)
