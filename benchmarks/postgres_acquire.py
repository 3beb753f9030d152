"""Asking a store in PostgreSQL, beside one in Redis and beside a bare `UPDATE … RETURNING`."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.optional import required
from benchmarks.report import NOTHING, Result, Table, number
from benchmarks.scenes import UNREACHED
from benchmarks.sizes import Size
from langchain_quota.core.admission import AcquireRequest

TITLE = "Requests per second in PostgreSQL"
CALLERS = (1, 64)
_NOTE = (
    "Callers on one event loop, each of which sends its next request when it has the answer to the "
    "last one; at most 10 connections, 32 to Redis. The servers run on this machine, and do not "
    "wait for the disk: one that does waits for it once for each request, bare or not."
)

Ask = Callable[[int], Awaitable[object]]
"""Sends a request for a caller."""


def measure(size: Size) -> Result:
    """Measure."""
    columns = ("request", *(f"{each} caller{'s' if each > 1 else ''}" for each in CALLERS))
    with ExitStack() as running:
        directory = running.enter_context(TemporaryDirectory(prefix="benchmark-"))
        try:
            with required():
                from tests.server.postgres import running_postgres  # noqa: PLC0415 - needs psycopg
                from tests.server.redis import running_redis  # noqa: PLC0415 - needs redis

                url = running.enter_context(running_postgres()).database()
                beside = running.enter_context(running_redis(Path(directory))).url
        except LookupError as error:
            return Result(
                [Table(TITLE, columns, [[NOTHING, f"not measured: {error}", NOTHING]])], []
            )
        rates = asyncio.run(_measure(url, beside, size))
    rows = [[what, *(number(median(each), 0) for each in found)] for what, found in rates.items()]
    return Result([Table(TITLE, columns, rows, _NOTE)], [])


async def _measure(url: str, beside: str, size: Size) -> dict[str, list[list[float]]]:
    async with _asked(url, beside) as asked:
        rates: dict[str, list[list[float]]] = {what: [[] for _ in CALLERS] for what in asked}
        # The first turn makes connections.
        for turn in range(1 + size.scrapes):
            for what, ask in asked.items():
                for column, callers in enumerate(CALLERS):
                    rate = await _rate(ask, callers, size.requests // 4)
                    if turn:
                        rates[what][column].append(rate)
    return rates


async def _rate(ask: Ask, callers: int, times: int) -> float:
    async def caller(who: int) -> None:
        for _ in range(1 + times // callers):
            await ask(who)

    started = time.perf_counter()
    await asyncio.gather(*map(caller, range(callers)))
    return callers * (1 + times // callers) / (time.perf_counter() - started)


@asynccontextmanager
async def _asked(url: str, beside: str) -> AsyncIterator[dict[str, Ask]]:
    """What sends each kind of request, by name."""
    from psycopg_pool import AsyncConnectionPool  # noqa: PLC0415 - needs psycopg

    from langchain_quota import PostgresStore, RedisStore  # noqa: PLC0415 - the same
    from tests.server.stores import batch, fresh  # noqa: PLC0415 - needs redis

    store, redis = PostgresStore(url, timeout=60), RedisStore(beside, timeout=60)
    await store.asetup()
    made: dict[tuple[int, int], AcquireRequest] = {}

    def acquiring(where: Any, limits: int, *, shared: bool) -> Ask:
        def ask(who: int) -> Awaitable[object]:
            of = 0 if shared else who
            if (limits, of) not in made:
                keys = [f"tool-{index}:user:{of}" for index in range(limits)]
                over = dict.fromkeys(keys, UNREACHED)
                made[limits, of] = batch(dict.fromkeys(keys, 1), limits=over)
            asked = made[limits, of]
            names = fresh("key"), fresh("attempt")
            answer: Awaitable[object] = where.aacquire(
                AcquireRequest(*names, asked.counters, asked.demands)
            )
            return answer

        return ask

    options: Any = {"min_size": 10, "max_size": 10, "kwargs": {"autocommit": True}, "open": False}
    async with AsyncConnectionPool(url, **options) as pool:

        def updating(*, shared: bool) -> Ask:
            async def ask(who: int) -> None:
                async with pool.connection() as connection:
                    statement = "UPDATE bare SET used = used + 1 WHERE id = %s RETURNING used"
                    await (await connection.execute(statement, [0 if shared else who])).fetchone()

            return ask

        async with pool.connection() as connection:
            await connection.execute("CREATE TABLE bare (id int PRIMARY KEY, used bigint)")
            rows = "INSERT INTO bare SELECT *, 0 FROM generate_series(0, 63)"
            await connection.execute(rows)
        yield {
            "bare `UPDATE … RETURNING`, a row for each caller": updating(shared=False),
            "bare `UPDATE … RETURNING`, one row": updating(shared=True),
            "acquire, 1 limit, a count for each caller": acquiring(store, 1, shared=False),
            "acquire, 1 limit, one count": acquiring(store, 1, shared=True),
            "acquire, 8 limits, 8 counts for each caller": acquiring(store, 8, shared=False),
            "in Redis: acquire, 1 limit, one count": acquiring(redis, 1, shared=True),
        }
    await store.aclose()
    await redis.aclose()
