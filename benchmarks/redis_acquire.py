"""Asking the shared store, beside a bare script: by the number of limits, and by many callers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.optional import required
from benchmarks.report import NOTHING, Ratio, Result, Table, divided, number
from benchmarks.scenes import UNREACHED
from benchmarks.sizes import Size
from langchain_quota.core.admission import AcquireRequest, Correction

TITLE = "Acquiring in Redis"
LIMITS = (1, 8)
BARE = "bare `EVALSHA`"
HOLD, SETTLE = "hold for a model call, 1 budget", "settle it"
CALLERS = 64
_SCRIPT = "return redis.call('INCRBY', KEYS[1], 1)"
_COMMANDS = """
redis.call('TIME')
redis.call('GET', KEYS[1])
redis.call('GET', KEYS[2])
for i = 3, #KEYS do redis.call('HMGET', KEYS[i], 'used', 'next_end') end
for i = 3, #KEYS do
  redis.call('HSET', KEYS[i], 'used', '1', 'ends', '-1', 'limit', '1')
  redis.call('EXPIREAT', KEYS[i], ARGV[1])
end
redis.call('SET', KEYS[1], 'what it has charged', 'EX', '3600')
redis.call('SET', KEYS[2], 'what it answers', 'EX', '3600')
"""
"""The commands of an acquire, without anything that decides what they do."""
_AT_ONCE = 20
"""How many requests of one kind are sent before those of the next kind."""

Ask = Callable[[], Awaitable[object]]


@dataclass
class Taken:
    """Microseconds that each request took.

    Attributes:
        clock: By the clock.
        client: The CPU time of this process.
        server: The CPU time of the server; empty if the system does not report it.
    """

    clock: list[float] = field(default_factory=list)
    client: list[float] = field(default_factory=list)
    server: list[float] = field(default_factory=list)

    @property
    def work(self) -> float:
        """The CPU time of both."""
        return median(self.client) + (median(self.server) if self.server else 0)


def name_of(limits: int) -> str:
    """The name of a request with so many limits."""
    return f"acquire, {limits} limit{'s' if limits > 1 else ''}"


def commands_of(limits: int) -> str:
    """The name of a script with the same commands, and nothing else."""
    return f"the commands of {name_of(limits)}, alone"


TARGETS = {1: (1.8, 1.8), 8: (2.3, 2.3)}
"""By the number of limits, to a bare script: by the clock, and in CPU time."""
MANY_TARGET = 1 / 0.85


def measure(size: Size) -> Result:
    """Measure."""
    with ExitStack() as running:
        directory = running.enter_context(TemporaryDirectory(prefix="benchmark-"))
        try:
            with required():
                from tests.server.redis import running_redis  # noqa: PLC0415 - needs redis

                server = running.enter_context(running_redis(Path(directory)))
        except LookupError as error:
            missing = Table(TITLE, ("what", "µs"), [[NOTHING, f"not measured: {error}"]])
            return Result([missing], ratios(None, None))
        one, many = asyncio.run(_measure(server, size))
    bare = one[BARE]
    rows = [
        [
            what,
            number(median(each.clock), 0),
            number(quantiles(each.clock, n=100)[98], 0),
            number(divided(median(each.clock), median(bare.clock))),
            number(median(each.client), 0),
            number(median(each.server), 0) if each.server else NOTHING,
            number(each.work / bare.work),
        ]
        for what, each in one.items()
    ]
    columns = ("request", "median", "p99", "ratio", "client", "server", "CPU ratio")
    note = (
        "Microseconds on one machine, one request after the other. The median and the 99th "
        "percentile (p99) are by the clock. *client* and *server* are CPU time. The ratios compare "
        f"with the {BARE} of a script that increments one key. A model call with a budget in the "
        "store takes two round trips: the last two rows."
    )
    crowd = [[what, number(median(rates), 0)] for what, rates in many.items()]
    crowd_note = (
        f"{CALLERS} callers on one event loop. Each sends its next request when it has the answer "
        "to the last one."
    )
    return Result(
        [
            Table(TITLE, columns, rows, note),
            Table("Many callers of Redis", ("request", "requests per second"), crowd, crowd_note),
        ],
        ratios(one, {what: median(rates) for what, rates in many.items()}),
    )


def ratios(one: dict[str, Taken] | None, many: dict[str, float] | None) -> list[Ratio]:
    """The targets, with what was measured, if anything was."""
    found = []
    for limits, (by_clock, by_work) in TARGETS.items():
        what = f"Redis: {name_of(limits)}, to a {BARE}"
        clock = work = floor_clock = floor_work = None
        if one is not None:
            asked, least, bare = one[name_of(limits)], one[commands_of(limits)], one[BARE]
            clock, floor_clock = (
                median(each.clock) / median(bare.clock) for each in (asked, least)
            )
            work, floor_work = (each.work / bare.work for each in (asked, least))
        found += [
            Ratio(f"{what}; by the clock", by_clock, clock, floor_clock),
            Ratio(f"{what}; in CPU time", by_work, work, floor_work),
        ]
    rate = None if many is None else many[BARE] / many[name_of(1)]
    found.append(
        Ratio(f"{CALLERS} callers: {BARE}s a second, to requests with 1 limit", MANY_TARGET, rate)
    )
    return found


async def _measure(server: Any, size: Size) -> tuple[dict[str, Taken], dict[str, list[float]]]:
    async with _asked(server.url) as asked:
        one = {what: Taken() for what in asked}
        # The first turn makes connections, and sends the script.
        for turn in range(1 + size.requests // _AT_ONCE):
            for what, ask in asked.items():
                await _taken(ask, one[what] if turn else Taken(), server.pid)
        many: dict[str, list[float]] = {BARE: [], name_of(1): []}
        for turn in range(1 + size.scrapes):
            for what, rates in many.items():
                rate = await _rate(asked[what], size.requests // 2)
                if turn:
                    rates.append(rate)
    return one, many


async def _taken(ask: Ask, taken: Taken, server: int) -> None:
    """Send some requests, one after the other."""
    worked, others = time.process_time_ns(), _cpu_time(server)
    for _ in range(_AT_ONCE):
        started = time.perf_counter_ns()
        await ask()
        taken.clock.append((time.perf_counter_ns() - started) / 1_000)
    taken.client.append((time.process_time_ns() - worked) / _AT_ONCE / 1_000)
    if others is not None:
        taken.server.append(((_cpu_time(server) or 0) - others) / _AT_ONCE / 1_000)


async def _rate(ask: Ask, times: int) -> float:
    """How many requests of many callers are answered in a second."""

    async def caller() -> None:
        for _ in range(1 + times // CALLERS):
            await ask()

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return CALLERS * (1 + times // CALLERS) / (time.perf_counter() - started)


def _cpu_time(process: int) -> int | None:
    """The nanoseconds for which a process's first thread has worked; `None` if it is not known."""
    told = Path(f"/proc/{process}/schedstat")
    return int(told.read_text().split()[0]) if told.exists() else None


@asynccontextmanager
async def _asked(url: str) -> AsyncIterator[dict[str, Ask]]:
    """What sends each kind of request, by name."""
    from redis.asyncio import Redis  # noqa: PLC0415 - needs redis

    from langchain_quota import RedisStore  # noqa: PLC0415 - needs redis
    from tests.server.stores import batch, correcting, fresh  # noqa: PLC0415 - needs redis

    store = RedisStore(url)
    client: Any = Redis.from_url(url)
    sha = await client.script_load(_SCRIPT)
    commands = await client.script_load(_COMMANDS)
    later = 2**31 - 1

    def acquiring(limits: int) -> Ask:
        keys = [f"tool-{index}:user:ada" for index in range(limits)]
        made = batch(dict.fromkeys(keys, 1), limits=dict.fromkeys(keys, UNREACHED))
        return lambda: store.aacquire(
            AcquireRequest(fresh("key"), fresh("attempt"), made.counters, made.demands)
        )

    def commanding(limits: int) -> Ask:
        keys = [f"{{langchain_quota}}:{limits}:{index}" for index in range(limits)]
        return lambda: client.evalsha(
            commands,
            *(2 + limits, *(f"{{langchain_quota}}:{fresh(each)}" for each in ("key", "attempt"))),
            *(*keys, later),
        )

    key = "model.total_tokens:user:ada"
    held: list[str] = []

    def holding() -> Awaitable[object]:
        sent = batch({key: 1}, limits={key: 10**12}, leases={key: 900})
        held.append(sent.idempotency_key)
        return store.aacquire(sent)

    def settling() -> Awaitable[object]:
        name = held.pop()
        used = Correction(f"settled-{name}", {key: 110}, settles=name)
        return store.aacquire(correcting(used))

    yield {
        "PING": client.ping,
        BARE: lambda: client.evalsha(sha, 1, "{langchain_quota}:bare"),
        **{commands_of(limits): commanding(limits) for limits in LIMITS},
        **{name_of(limits): acquiring(limits) for limits in LIMITS},
        HOLD: holding,
        SETTLE: settling,
    }
    await store.aclose()
    await client.aclose()
