"""Asking the shared store, by the number of limits."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from langchain_quota.admission import Compensation
from tests.benchmarks.optional import required
from tests.benchmarks.report import NOTHING, Ratio, Result, Table, divided, number
from tests.benchmarks.scenes import UNREACHED
from tests.benchmarks.sizes import Size

TITLE = "Acquiring in Redis"
TARGET = ("Redis acquire with 8 limits, to one with 1", 1.7)
LIMITS = (1, 8)
HOLD, SETTLE = "hold for a model call, 1 budget", "settle it"


def measure(size: Size) -> Result:
    """Measure."""
    with ExitStack() as running:
        directory = running.enter_context(TemporaryDirectory(prefix="benchmark-"))
        try:
            with required():
                from tests.servers.redis import running_redis  # noqa: PLC0415 - needs redis

                server = running.enter_context(running_redis(Path(directory)))
        except LookupError as error:
            missing = Table(TITLE, ("what", "µs"), [[NOTHING, f"not measured: {error}"]])
            return Result([missing], [Ratio(*TARGET, None)])
        taken = asyncio.run(_measure(server.url, size.requests))
    rows = [
        [what, number(median(each), 0), number(quantiles(each, n=100)[98], 0)]
        for what, each in taken.items()
    ]
    note = (
        "Microseconds by the clock, one request after the other, to a Redis on the same machine. A "
        "model call with a budget in the store takes two round trips. The first one holds an "
        "amount before the call. The second one charges what the call has used."
    )
    table = Table(TITLE, ("what", "median", "p99"), rows, note)
    least, most = (median(taken[_name(limits)]) for limits in LIMITS)
    return Result([table], [Ratio(*TARGET, divided(most, least))])


def _name(limits: int) -> str:
    return f"acquire, {limits} limit{'s' if limits > 1 else ''}"


async def _measure(url: str, times: int) -> dict[str, list[float]]:
    from redis.asyncio import Redis  # noqa: PLC0415 - an extra

    from langchain_quota import RedisStore  # noqa: PLC0415 - needs redis
    from tests.servers.stores import batch, compensating  # noqa: PLC0415 - needs redis

    store, client = RedisStore(url), Redis.from_url(url)

    def acquiring(limits: int) -> Callable[[], Awaitable[object]]:
        keys = [f"tool-{index}:user:ada" for index in range(limits)]
        most = dict.fromkeys(keys, UNREACHED)
        return lambda: store.aacquire(batch(dict.fromkeys(keys, 1), limits=most))

    key, held = "model.total_tokens:user:ada", ""

    def holding() -> Awaitable[object]:
        nonlocal held
        sent = batch({key: 1}, limits={key: 10**12}, leases={key: 900})
        held = sent.idempotency_key
        return store.aacquire(sent)

    def settling() -> Awaitable[object]:
        used = Compensation(f"settled-{held}", {key: 110}, settles=held)
        return store.aacquire(compensating(used))

    asked: dict[str, Callable[[], Awaitable[object]]] = {
        "PING": client.ping,
        **{_name(limits): acquiring(limits) for limits in LIMITS},
        HOLD: holding,
        SETTLE: settling,
    }
    taken: dict[str, list[float]] = {what: [] for what in asked}
    for turn in range(times + 10):
        for what, ask in asked.items():
            started = time.perf_counter()
            await ask()
            # At first there are connections to make, and a script to send.
            if turn >= 10:
                taken[what].append((time.perf_counter() - started) * 1e6)
    await store.aclose()
    await client.aclose()
    return taken
