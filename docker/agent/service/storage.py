"""Where threads and quotas are kept."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiosqlite
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from psycopg import AsyncConnection
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool

from langchain_quota import MemoryStore, RedisStore
from langchain_quota.stores import QuotaStore
from service.settings import POSTGRESQL, SQLITE

CONNECT_SECONDS = 10
CHECK_SECONDS = 2
_SETUP_LOCK = 0x71756F7461  # any number that no other user of the database locks

Check = Callable[[], Awaitable[object]]
Pool = AsyncConnectionPool[AsyncConnection[DictRow]]


@dataclass(frozen=True, slots=True)
class Threads:
    """Keeps the threads.

    Attributes:
        saver: The checkpointer.
        check: Asks the database for something.
    """

    saver: BaseCheckpointSaver[Any]
    check: Check


@asynccontextmanager
async def open_threads(url: str) -> AsyncIterator[Threads]:
    """Open the database of a URL, make its tables, and close it."""
    if url.startswith(POSTGRESQL):
        async with _pool(url) as pool:
            await _set_up(pool)

            async def check_pool() -> None:
                async with pool.connection(timeout=CHECK_SECONDS) as connection:
                    await connection.execute("SELECT 1")

            yield Threads(AsyncPostgresSaver(pool), check_pool)
        return
    async with aiosqlite.connect(url.removeprefix(SQLITE)) as connection:
        saver = AsyncSqliteSaver(connection)
        await saver.setup()
        yield Threads(saver, lambda: connection.execute_fetchall("SELECT 1"))


def _pool(url: str) -> Pool:
    return AsyncConnectionPool(
        url,
        min_size=1,
        max_size=8,
        timeout=CONNECT_SECONDS,
        check=AsyncConnectionPool.check_connection,  # the server may have been restarted
        kwargs={
            "autocommit": True,
            "prepare_threshold": 0,
            "row_factory": dict_row,
            # From a database without an encoding (SQL_ASCII) text would come as bytes: no thread
            # would find its history.
            "client_encoding": "utf8",
        },
        open=False,
    )


async def _set_up(pool: Pool) -> None:
    """Make the tables, one process at a time: replicas start together."""
    async with pool.connection() as connection:
        # Waiting inside PostgreSQL would be a transaction that CREATE INDEX CONCURRENTLY waits for.
        while not await _scalar(connection, f"SELECT pg_try_advisory_lock({_SETUP_LOCK}) AS it"):  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.1)
        try:
            await AsyncPostgresSaver(connection).setup()
        finally:
            await connection.execute(f"SELECT pg_advisory_unlock({_SETUP_LOCK})")


async def _scalar(connection: AsyncConnection[DictRow], query: str) -> Any:
    row = await (await connection.execute(query)).fetchone()
    return row and row["it"]


@asynccontextmanager
async def open_quotas(url: str) -> AsyncIterator[QuotaStore]:
    """The store of a URL; without one the memory of this process."""
    if not url:
        yield MemoryStore()
        return
    store = RedisStore(url)
    try:
        yield store
    finally:
        await store.aclose()


async def reachable(check: Check) -> bool:
    """Whether a check succeeds in time."""
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            await check()
    except Exception:  # noqa: BLE001 - whatever it raises, it does not answer
        return False
    return True
