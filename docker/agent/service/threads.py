"""Where threads are kept."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from psycopg import AsyncConnection
from psycopg.conninfo import make_conninfo
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool

SQLITE = "sqlite:///"


@asynccontextmanager
async def open_threads(url: str) -> AsyncIterator[BaseCheckpointSaver[Any]]:
    """Open the database of a URL, make its tables, and close it."""
    if url.startswith(SQLITE):
        async with AsyncSqliteSaver.from_conn_string(url.removeprefix(SQLITE)) as saver:
            await saver.setup()
            yield saver
        return
    async with AsyncConnectionPool[AsyncConnection[DictRow]](
        # From a database without an encoding (SQL_ASCII), text would otherwise come as bytes. For
        # a host that is gone, which answers nothing, a request would otherwise wait for minutes.
        make_conninfo(url, client_encoding="utf8", tcp_user_timeout=4_000),
        max_size=8,
        timeout=5,
        check=AsyncConnectionPool.check_connection,  # the server may have been restarted
        kwargs={"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row},
        open=False,
    ) as pool:
        async with pool.connection() as connection:
            await _make_tables(connection)
        yield AsyncPostgresSaver(pool)


async def _make_tables(connection: AsyncConnection[DictRow]) -> None:
    """Make the tables, one process at a time: replicas start together."""
    # Waiting inside PostgreSQL would be a transaction that CREATE INDEX CONCURRENTLY waits for.
    lock = "SELECT 1 AS locked WHERE pg_try_advisory_lock(487)"
    while await (await connection.execute(lock)).fetchone() is None:  # noqa: ASYNC110 - see above
        await asyncio.sleep(0.1)
    await AsyncPostgresSaver(connection).setup()
    await connection.execute("SELECT pg_advisory_unlock(487)")
