"""The checkpointers, and what they have stored of a thread."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver

from benchmarks.optional import required


@dataclass(frozen=True)
class Stored:
    """What is stored of a thread.

    Attributes:
        supersteps: How many it took.
        checkpoints: How many there are.
        rows: All rows, of checkpoints, of channels and of writes.
        size: The bytes in them.
    """

    supersteps: int
    checkpoints: int
    rows: int
    size: int

    def __sub__(self, other: "Stored") -> "Stored":
        return Stored(
            self.supersteps - other.supersteps,
            self.checkpoints - other.checkpoints,
            self.rows - other.rows,
            self.size - other.size,
        )


Look = Callable[[str], Awaitable[Stored]]
"""Looks up what is stored of a thread."""


@asynccontextmanager
async def memory() -> AsyncIterator[tuple[BaseCheckpointSaver[Any], Look]]:
    """A checkpointer in memory."""
    saver = InMemorySaver()

    async def look(thread: str) -> Stored:
        checkpoints = saver.storage[thread][""].values()
        sizes = [len(part[1]) for each in checkpoints for part in each[:2]]
        writes = [
            len(write[2][1])
            for key, found in saver.writes.items()
            if key[0] == thread
            for write in found.values()
        ]
        channels = [len(blob[1]) for key, blob in saver.blobs.items() if key[0] == thread]
        rows = len(checkpoints) + len(writes) + len(channels)
        return await _stored(saver, thread, rows, sum(sizes) + sum(writes) + sum(channels))

    yield saver, look


@asynccontextmanager
async def sqlite() -> AsyncIterator[tuple[BaseCheckpointSaver[Any], Look]]:
    """A checkpointer in a file of SQLite."""
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver  # noqa: PLC0415 - an extra

    sizes = """
        SELECT length(checkpoint) + length(metadata) FROM checkpoints WHERE thread_id = :thread
        UNION ALL SELECT length(value) FROM writes WHERE thread_id = :thread
    """
    with TemporaryDirectory(prefix="benchmark-") as directory:
        path = str(Path(directory) / "threads.sqlite")
        async with AsyncSqliteSaver.from_conn_string(path) as saver:

            async def look(thread: str) -> Stored:
                rows = await saver.conn.execute_fetchall(sizes, {"thread": thread})
                found = [int(row[0]) for row in rows]
                return await _stored(saver, thread, len(found), sum(found))

            yield saver, look


@asynccontextmanager
async def postgres() -> AsyncIterator[tuple[BaseCheckpointSaver[Any], Look]]:
    """A checkpointer in a PostgreSQL server on the loopback.

    Raises:
        LookupError: There is no such server.
    """
    sizes = """
        SELECT octet_length(checkpoint::text) + octet_length(metadata::text) AS size
        FROM checkpoints WHERE thread_id = %(thread)s
        UNION ALL SELECT coalesce(octet_length(blob), 0) FROM checkpoint_blobs
        WHERE thread_id = %(thread)s
        UNION ALL SELECT octet_length(blob) FROM checkpoint_writes WHERE thread_id = %(thread)s
    """
    with ExitStack() as running:
        with required():
            from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver  # noqa: PLC0415 - optional

            from tests.server.postgres import running_postgres  # noqa: PLC0415 - needs psycopg

            server = running.enter_context(running_postgres())
        async with AsyncPostgresSaver.from_conn_string(server.database()) as saver:
            await saver.setup()
            connection: Any = saver.conn

            async def look(thread: str) -> Stored:
                cursor = await connection.execute(sizes, {"thread": thread})
                found = [int(row["size"]) for row in await cursor.fetchall()]
                return await _stored(saver, thread, len(found), sum(found))

            yield saver, look


SAVERS = {"memory": memory, "SQLite": sqlite, "PostgreSQL": postgres}


async def _stored(saver: BaseCheckpointSaver[Any], thread: str, rows: int, size: int) -> Stored:
    config: Any = {"configurable": {"thread_id": thread}}
    checkpoints = [each async for each in saver.alist(config)]
    return Stored(int(checkpoints[0].metadata["step"]), len(checkpoints), rows, size)
