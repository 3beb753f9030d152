"""Requests to a store in Redis or PostgreSQL, beside bare ones and those of rate limiters."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import cache, partial
from pathlib import Path
from secrets import token_hex
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import Ratio, Result, Size, Table, number, required
from benchmarks.scenes import UNREACHED
from langchain_quota.core.admission import AcquireRequest

CALLERS = (1, 64)
BARE = "Redis: bare `EVALSHA`"
TARGETS = {"Redis: 1 limit": (1.8, 1 / 0.85), "Redis: 8 limits": (2.3, None)}
"""Of requests by so many limits: the most time that they may take to a bare script, by callers."""

_SCRIPT = "return redis.call('INCRBY', KEYS[1], 1)"
_PEER = "Redis: the package `limits`"
_NOTE = (
    "Requests a second. Callers on one event loop send their next request when they have the "
    "answer to the last one; at most 10 connections to PostgreSQL, 32 to Redis. A model call with "
    "a budget in the store takes two round trips: *hold* and *settle*. `limits` counts in fixed "
    "windows, `pyrate-limiter` keeps a log of calls. The servers run on this "
    "machine, and do not wait for the disk: one that does waits for it once for each request, bare "
    "or not."
)

Ask = Callable[[int], Awaitable[object]]
"""Sends a request for a caller."""


def measure(size: Size) -> Result:
    """Measure, where there are both servers."""
    with ExitStack() as running:
        directory = running.enter_context(TemporaryDirectory(prefix="benchmark-"))
        try:
            with required():
                from tests.server.postgres import running_postgres  # noqa: PLC0415 - needs psycopg
                from tests.server.redis import running_redis  # noqa: PLC0415 - needs redis

                postgres = running.enter_context(running_postgres()).database()
                redis = running.enter_context(running_redis(Path(directory))).url
        except LookupError:
            return Result()
        rates = asyncio.run(_measure(redis, postgres, size))
    columns = ("request", *(f"{each} caller{'s' if each > 1 else ''}" for each in CALLERS))
    rows = [[what, *(number(each, 0) for each in found)] for what, found in rates.items()]
    ratios = [
        Ratio(f"{what}, {callers} at a time: time of a request, to {BARE}", most, bare / rate)
        for what, targets in TARGETS.items()
        for callers, most, bare, rate in zip(
            CALLERS, targets, rates[BARE], rates[what], strict=True
        )
        if most is not None
    ]
    peer, ours = rates[_PEER][-1], rates["Redis: 1 limit"][-1]
    what = f"Redis: 1 limit, {CALLERS[-1]} at a time: time of a request, to {_PEER}"
    ratios.append(Ratio(what, 1, peer / ours))
    return Result(Table("Requests to stores", columns, rows, _NOTE), False, ratios)


async def _measure(redis: str, postgres: str, size: Size) -> dict[str, list[float]]:
    async with _redis(redis) as in_redis, _postgres(postgres) as in_postgres:
        asked = in_redis | in_postgres
        rates: dict[str, list[list[float]]] = {what: [[] for _ in CALLERS] for what in asked}
        # The first turn makes connections, and sends the script.
        for turn in range(1 + size.scrapes):
            for what, ask in asked.items():
                for column, callers in enumerate(CALLERS):
                    rate = await _rate(ask, callers, size.requests // 4)
                    if turn:
                        rates[what][column].append(rate)
    return {what: [*map(median, found)] for what, found in rates.items()}


async def _rate(ask: Ask, callers: int, times: int) -> float:
    async def caller(who: int) -> None:
        for _ in range(1 + times // callers):
            await ask(who)

    started = time.perf_counter()
    await asyncio.gather(*map(caller, range(callers)))
    return callers * (1 + times // callers) / (time.perf_counter() - started)


@cache
def _charges(limits: int, who: int) -> AcquireRequest:
    """A call by so many limits, charged to the counts of a caller."""
    from tests.server.stores import batch  # noqa: PLC0415 - needs redis

    keys = [f"tool-{index}:user:{who}" for index in range(limits)]
    return batch(dict.fromkeys(keys, 1), limits=dict.fromkeys(keys, UNREACHED))


def _acquire(store: Any, limits: int, who: int) -> Awaitable[object]:
    asked, name = _charges(limits, who), token_hex(16)
    acquired: Awaitable[object] = store.aacquire(
        AcquireRequest(name, f"a{name}", asked.counters, asked.demands)
    )
    return acquired


@asynccontextmanager
async def _redis(url: str) -> AsyncIterator[dict[str, Ask]]:
    """What sends each kind of request to Redis, by name."""
    from limits import RateLimitItemPerDay  # noqa: PLC0415 - a peer, which only this needs
    from limits.aio.storage import RedisStorage  # noqa: PLC0415 - the same
    from limits.aio.strategies import FixedWindowRateLimiter  # noqa: PLC0415 - the same
    from pyrate_limiter import Limiter, Rate, RedisBucket  # noqa: PLC0415 - the same
    from redis.asyncio import Redis  # noqa: PLC0415 - needs redis

    from langchain_quota import RedisStore  # noqa: PLC0415 - the same
    from tests.server.stores import batch, correcting, settlement  # noqa: PLC0415 - the same

    store, client = RedisStore(url, timeout=60), Redis.from_url(url)
    sha = await client.script_load(_SCRIPT)
    key = "model.total_tokens:user:ada"
    held: list[AcquireRequest] = []
    storage = RedisStorage(f"async+{url}", implementation="redispy")
    of_limits, a_day = FixedWindowRateLimiter(storage), RateLimitItemPerDay(UNREACHED)
    rates = [Rate(UNREACHED, 86_400_000)]
    of_pyrate = Limiter(await RedisBucket.init(rates, client, "{langchain_quota}:pyrate"))

    def hold(_: int) -> Awaitable[object]:
        held.append(batch({key: 1}, limits={key: 10**12}, leases={key: 900}))
        return store.aacquire(held[-1])

    def settle(_: int) -> Awaitable[object]:
        return store.aacquire(correcting(settlement(held.pop(), {key: 110})))

    yield {
        BARE: lambda _: client.evalsha(sha, 1, "{langchain_quota}:bare"),
        _PEER: lambda _: of_limits.hit(a_day, "ada"),
        "Redis: the package `pyrate-limiter`": lambda _: of_pyrate.try_acquire_async("ada"),
        "Redis: 1 limit": lambda _: _acquire(store, 1, 0),
        "Redis: 8 limits": lambda _: _acquire(store, 8, 0),
        "Redis: hold for a model call, 1 budget": hold,
        "Redis: settle it": settle,
    }
    await store.aclose()
    await client.aclose()


@asynccontextmanager
async def _postgres(url: str) -> AsyncIterator[dict[str, Ask]]:
    """What sends each kind of request to PostgreSQL, by name."""
    from psycopg_pool import AsyncConnectionPool  # noqa: PLC0415 - needs psycopg

    from langchain_quota import PostgresStore  # noqa: PLC0415 - the same

    store = PostgresStore(url, timeout=60)
    await store.asetup()
    options: Any = {"min_size": 10, "max_size": 10, "kwargs": {"autocommit": True}, "open": False}
    async with AsyncConnectionPool(url, **options) as pool:

        async def update(who: int) -> None:
            async with pool.connection() as connection:
                statement = "UPDATE bare SET used = used + 1 WHERE id = %s RETURNING used"
                await (await connection.execute(statement, [who])).fetchone()

        async with pool.connection() as connection:
            await connection.execute("CREATE TABLE bare (id int PRIMARY KEY, used bigint)")
            rows = "INSERT INTO bare SELECT *, 0 FROM generate_series(0, 63)"
            await connection.execute(rows)
        yield {
            "PostgreSQL: bare `UPDATE … RETURNING`, one row": lambda _: update(0),
            "PostgreSQL: the same, a row for each caller": update,
            "PostgreSQL: 1 limit, one count": lambda _: _acquire(store, 1, 0),
            "PostgreSQL: 1 limit, a count for each caller": partial(_acquire, store, 1),
            "PostgreSQL: 8 limits, 8 counts for each caller": partial(_acquire, store, 8),
        }
    await store.aclose()
