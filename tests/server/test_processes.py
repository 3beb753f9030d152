"""Processes that share a server: no more is admitted than there is, and nothing is lost."""

import asyncio
import json
import logging
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from langchain_quota import Quota, TokenLimit
from langchain_quota.core.admission import AcquireRequest, AcquireResult, Correction
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores import QuotaStore
from langchain_quota.stores.postgres import PostgresStore
from langchain_quota.stores.redis import RedisStore
from tests.scene import Scene
from tests.server.postgres import PostgresServer, time_of
from tests.server.prometheus import eventually
from tests.server.redis import RedisServer, time_from
from tests.server.stores import batch, calls, correcting, used
from tests.telemetry import Signals
from tests.tokens import answer

PROCESSES = 4
LIMIT = 100
PATIENCE = 120
"""Seconds after which a process will not answer any more."""
CALLERS = 25
"""How many callers of a process are at work at the same time."""
BUDGET = 2_000_000
BOUND = 1_000
"""No call uses more than this."""
LEASE = 3600
GRANTS = 10
"""How many grants all callers of all processes give."""
KILLS = 4
CALLS_BETWEEN_KILLS = 200
KEY = "shared:global:"


CONTEXT = multiprocessing.get_context("forkserver")
"""What starts processes."""


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[RedisStore]:
    """The store beside those of the processes, and of their prefix."""
    with closing(RedisStore(redis_server.url, prefix=redis_server.prefix(), timeout=60)) as store:
        yield store


async def admitted(store: RedisStore, attempts: int) -> int:
    """How many of so many requests at the same time are admitted."""
    asked = [calls(KEY, 1, limit=LIMIT, key="", attempt="") for _ in range(attempts)]
    results = await asyncio.gather(*map(store.aacquire, asked))
    return sum(each for result in results for each in result.admitted)


@pytest.mark.parametrize("reserve", [None, 50])
async def test_what_a_call_leaves_lasts_an_hour(
    store: RedisStore, redis_server: RedisServer, signals: Signals, reserve: int | None
) -> None:
    """Beside its count, a model call under a budget leaves nothing in Redis for over an hour."""
    limit = TokenLimit(quotas=[Quota(1_000, per="global")], reserve=reserve)
    await Scene(signals, [answer(10)], [limit], store=store).play()
    with closing(redis_server.client(decode_responses=True)) as client:
        keys = [key for key in client.scan_iter() if store.prefix in key and ":count:" not in key]
        assert len(keys) == (1 if reserve is None else 3)
        assert all(0 < client.ttl(key) <= LEASE for key in keys)


async def grants(store: RedisStore) -> tuple[int, int, list[Any]]:
    """Have callers give the same grants while they ask, until they are refused.

    How many grants were given, how many calls ran, and what was logged of it.
    """
    logged = []

    class Audit(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fields = vars(record)
            if fields.get("quota_event") == "granted":
                logged.append([fields[f"quota_{each}"] for each in ("grant", "amount", "by")])

    logger = logging.getLogger("langchain_quota")
    logger.addHandler(Audit())
    logger.setLevel(logging.INFO)

    async def caller(number: int) -> tuple[int, int]:
        given, ran, who = 0, 0, f"{os.getpid()} {number}"
        for grant in range(GRANTS):
            of: Any = {"window": None, "id": f"grant {grant}", "by": who}
            given += (await store.agrant(KEY, 7, **of)).by == who
            ran += await admitted(store, 4)
        return given, ran

    made = await asyncio.gather(*(caller(each) for each in range(CALLERS)))
    ran = sum(ran for _, ran in made) + await admitted(store, LIMIT)
    return sum(given for given, _ in made), ran, logged


def worker(url: str, prefix: str, end: Connection) -> None:
    """A process that works when it is told to, and sends what came of it."""

    async def run() -> None:
        store = RedisStore(url, prefix=prefix, timeout=60)
        end.recv()
        end.send(await grants(store))

    asyncio.run(run())


def test_a_quota_and_grants(redis_server: RedisServer, store: RedisStore) -> None:
    """4 processes with 25 callers give the same grants: each once, and exactly what may run runs.

    The audit logs of all processes have each grant once, with whoever gave it.
    """
    with ExitStack() as stack:
        ends = []
        for _ in range(PROCESSES):
            here, there = CONTEXT.Pipe()
            given = (redis_server.url, str(store.prefix), there)
            process = CONTEXT.Process(target=worker, args=given, daemon=True)
            process.start()
            there.close()
            stack.callback(process.join, PATIENCE)
            ends.append(here)
        for end in ends:
            end.send("begin")
        assert all(end.poll(PATIENCE) for end in ends)
        granted, ran, logs = zip(*(end.recv() for end in ends), strict=True)
    assert (sum(granted), sum(ran)) == (GRANTS, LIMIT + 7 * GRANTS)
    kept = [[each.id, each.amount, each.by] for each in store.grants()]
    assert [amount for _, amount, _ in kept] == [7] * GRANTS
    assert sorted(entry for log in logs for entry in log) == sorted(kept)
    assert [(use.used, use.granted) for use in store.usages()] == [(sum(ran), 7 * GRANTS)]


def settled(*calls: tuple[str, int]) -> AcquireRequest:
    """That calls have used amounts."""
    return correcting(
        *(Correction(f"of {name}", {"tokens": amount}, settles=name) for name, amount in calls)
    )


async def answered(store: QuotaStore, request: AcquireRequest) -> AcquireResult:
    """The answer of a store that may be away for a while: nothing is charged twice."""
    while True:
        try:
            return await store.aacquire(request)
        except QuotaStoreError:
            await asyncio.sleep(0.02)


def opened(url: str, prefix: str) -> Any:
    """The store at a URL."""
    return (RedisStore if url.startswith("redis") else PostgresStore)(
        url, prefix=prefix, timeout=60
    )


def spender(url: str, prefix: str, diary: str, hold: int, budget: int) -> None:
    """A process whose callers hold an amount, use another, and settle, until they are refused.

    What a call has used is written down before it is settled.
    """
    written = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    chance = random.Random()  # noqa: S311 - no secret
    limited: Any = {"limits": {"tokens": budget}, "leases": {"tokens": LEASE}}

    async def caller(store: QuotaStore) -> None:
        while True:
            name = uuid4().hex
            held = batch({"tokens": hold}, key=name, attempt=uuid4().hex, **limited)
            if not (await answered(store, held)).admitted[0]:
                return
            await asyncio.sleep(chance.uniform(0, 0.01))
            used = chance.randint(1, BOUND)
            os.write(written, f"{json.dumps([name, used])}\n".encode())
            await answered(store, settled((name, used)))

    async def work() -> None:
        store = opened(url, prefix)
        await asyncio.gather(*(caller(store) for _ in range(CALLERS)))

    asyncio.run(work())


class Place:
    """Where a budget is kept.

    Args:
        server: The server.
        url: How stores reach it.
    """

    def __init__(self, server: RedisServer | PostgresServer, url: str) -> None:
        self._server, self.url, self.prefix = server, url, server.prefix()
        self.budget = BUDGET if isinstance(server, RedisServer) else BUDGET // 2

    def restart(self) -> None:
        """Restart what keeps counts over a restart."""
        if isinstance(self._server, PostgresServer):
            self._server.stop()
            self._server.start()

    @contextmanager
    def later(self, seconds: int) -> Iterator[None]:
        """Have it later by so many seconds."""
        now = int(time.time()) + seconds
        if isinstance(self._server, PostgresServer):
            with time_of(lambda: now):
                yield
        else:
            with time_from("now"), self._server.client() as client:
                client.set("now", now)
                yield


@pytest.mark.parametrize(("kind", "hold"), [("redis", BOUND), ("redis", 1), ("postgres", BOUND)])
def test_a_budget(request: pytest.FixtureRequest, tmp_path: Path, kind: str, hold: int) -> None:
    """Of 4 processes with 25 callers each some are killed: nothing is overspent, nothing is lost.

    PostgreSQL, too, is killed and started again meanwhile. With a true bound held, the budget is
    never exceeded; with less, by no more than what the calls in flight use beyond it. What the
    killed ones held is free again after its lease.
    """
    server = request.getfixturevalue(f"{kind}_server")
    url = server.url if kind == "redis" else request.getfixturevalue("postgres_url")
    place, diary = Place(server, url), tmp_path / "diary"
    diary.touch()

    def written() -> list[tuple[str, int]]:
        lines = diary.read_text().split("\n")[:-1]
        return [(name, amount) for name, amount in map(json.loads, lines)]

    with ExitStack() as stack:
        store = stack.enter_context(closing(opened(place.url, place.prefix)))

        def start() -> Any:
            given = (place.url, place.prefix, str(diary), hold, place.budget)
            process = CONTEXT.Process(target=spender, args=given, daemon=True)
            process.start()
            stack.callback(process.kill)
            return process

        alive = [start() for _ in range(PROCESSES)]
        for number in range(1, KILLS + 1):
            eventually(lambda: len(written()) > number * CALLS_BETWEEN_KILLS)  # noqa: B023 - called now
            oldest = alive.pop(0)
            assert oldest.is_alive()
            oldest.kill()
            alive.append(start())
            if number == KILLS // 2:
                place.restart()
        for process in alive:
            process.join(PATIENCE)
            assert process.exitcode == 0

        most = place.budget + PROCESSES * CALLERS * (BOUND - hold)
        (count,) = used(store, "tokens")
        assert count is not None
        assert place.budget - hold < count <= most
        # Some that were killed have not settled what they have written down. Twice is once.
        spent = written()
        for first in range(0, len(spent), 500):
            store.acquire(settled(*spent[first : first + 500]))
        total = sum(amount for _, amount in spent)
        assert total <= most
        (count,) = used(store, "tokens")
        assert count is not None
        assert count > total
        assert (count - total) % hold == 0
        with place.later(LEASE + 1):
            assert used(store, "tokens") == [total]
