"""Processes that share budgets, and are killed or wait in crowds: nothing is overspent or lost."""

import asyncio
import json
import os
import random
import time
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from langchain.agents import create_agent
from redis.asyncio import Redis

from langchain_quota import ModelPaceMiddleware, Quota, QuotaMiddleware, TokenLimit
from langchain_quota.core.admission import AcquireRequest, AcquireResult, Correction
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores import QuotaStore
from langchain_quota.stores.postgres import PostgresStore
from langchain_quota.stores.redis import RedisStore
from langchain_quota.testing import ScriptedChatModel
from tests.forked import processes
from tests.scenario.test_model_pace import Refused
from tests.server.postgres import PostgresServer, time_of
from tests.server.prometheus import eventually
from tests.server.redis import RedisServer, time_from
from tests.server.stores import batch, correcting, used
from tests.telemetry import paid

PATIENCE = 120
"""Seconds after which a process will not answer any more."""
CALLERS = 25
"""How many callers of a process are at work at the same time."""
BUDGETS = {"redis": 2_000_000, "postgres": 1_000_000}
BOUND = 1_000
"""No call uses more than this."""
LEASE = 3600
KILLS = 4
CALLS_BETWEEN_KILLS = 200


def opened(url: str, prefix: str) -> Any:
    """The store at a URL."""
    kind = RedisStore if url.startswith("redis") else PostgresStore
    return kind(url, prefix=prefix, timeout=60)


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


async def spend(url: str, prefix: str, diary: str, hold: str, budget: str) -> None:
    """Have callers hold an amount, use another, and settle, until they are refused.

    What a call has used is written down before it is settled.
    """
    written = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    chance, store = random.Random(), opened(url, prefix)  # noqa: S311 - no secret
    limited: Any = {"limits": {"tokens": int(budget)}, "leases": {"tokens": LEASE}}

    async def caller() -> None:
        while True:
            name = uuid4().hex
            held = batch({"tokens": int(hold)}, key=name, attempt=uuid4().hex, **limited)
            if not (await answered(store, held)).admitted[0]:
                return
            # Long beside what a busy server takes, so that a kill finds calls that hold.
            await asyncio.sleep(chance.uniform(0, 0.1))
            used = chance.randint(1, BOUND)
            os.write(written, f"{json.dumps([name, used])}\n".encode())
            await answered(store, settled((name, used)))

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


@pytest.mark.parametrize(("kind", "hold"), [("redis", BOUND), ("redis", 1), ("postgres", BOUND)])
def test_a_budget(request: pytest.FixtureRequest, tmp_path: Path, kind: str, hold: int) -> None:
    """Of 4 processes with 25 callers each some are killed: nothing is overspent, nothing is lost.

    PostgreSQL, too, is killed and started again meanwhile. With a true bound held, the budget is
    never exceeded; with less, by no more than what the calls in flight use beyond it. What the
    killed ones held is free again after its lease.
    """
    server: RedisServer | PostgresServer = request.getfixturevalue(f"{kind}_server")
    url = request.getfixturevalue("postgres_url") if kind == "postgres" else server.url  # type: ignore[union-attr]
    prefix, diary, budget = server.prefix(), tmp_path / "diary", BUDGETS[kind]
    diary.touch()

    def written() -> list[tuple[str, int]]:
        lines = diary.read_text().split("\n")[:-1]
        return [(name, amount) for name, amount in map(json.loads, lines)]

    given = url, prefix, diary, hold, budget
    with processes(spend, *given, log=tmp_path / "log") as workers:
        for number in range(1, KILLS + 1):
            eventually(lambda: len(written()) > number * CALLS_BETWEEN_KILLS)  # noqa: B023 - called now
            workers.restart()
            if number == KILLS // 2 and isinstance(server, PostgresServer):
                server.stop()
                server.start()
        assert [each.wait(PATIENCE) for each in workers] == [0] * 4

    with closing(opened(url, prefix)) as store:

        def count() -> int:
            (found,) = used(store, "tokens")
            assert found is not None
            return found

        most = budget + 4 * CALLERS * (BOUND - hold)
        assert budget - hold < count() <= most
        # Some that were killed have not settled what they have written down. Twice is once.
        spent = written()
        for first in range(0, len(spent), 500):
            store.acquire(settled(*spent[first : first + 500]))
        total = sum(amount for _, amount in spent)
        assert total <= most
        assert count() > total
        assert (count() - total) % hold == 0
        with later(server, LEASE + 1):
            assert count() == total


def later(server: RedisServer | PostgresServer, seconds: int) -> AbstractContextManager[Any]:
    """Have it later at a server by so many seconds."""
    now = int(time.time()) + seconds
    if isinstance(server, PostgresServer):
        return time_of(lambda: now)
    stack = ExitStack()
    stack.enter_context(time_from("now"))
    stack.enter_context(server.client()).set("now", now)
    return stack


ASKING = ("eval", "evalsha")
"""How stores ask a server."""


async def crowd(url: str, prefix: str, kind: str) -> None:
    """Let many calls wait for the same, until a kill, and note those that end."""
    store, hour = RedisStore(url, prefix=prefix, timeout=60), "1h"
    limiter = store.rate_limiter("crowd", requests=1, tokens=10**6, window=hour)
    tokens = Quota(1, per="global", window=hour, smooth=True)
    held = QuotaMiddleware([TokenLimit(quotas=[tokens], reserve=1, wait="2h")], store=store)
    pace = ModelPaceMiddleware(store=store, wait=900)
    given: Any = {"rate_limiter": limiter, "callbacks": [limiter]} if kind == "limiter" else {}
    refused = Refused(retry_after="300") if kind == "pace" else None
    model = ScriptedChatModel(script=lambda _: refused or paid(1), keep_calls=0, **given)
    items: Any = {"limit": [held], "pace": [pace], "limiter": []}[kind]
    agent: Any = create_agent(model, middleware=items)
    server = Redis.from_url(url)

    async def run() -> None:
        with suppress(Refused):
            await agent.ainvoke({"messages": [("user", "hi")]})
        await server.incr(f"{prefix}:ended")

    first = asyncio.create_task(run())
    await asyncio.wait([first], timeout=1)
    others = [asyncio.create_task(run()) for _ in range(249)]
    await asyncio.sleep(1)
    await server.incr(f"{prefix}:begun")
    await asyncio.gather(first, *others)


@pytest.mark.parametrize("kind", ["limit", "limiter", "pace"])
def test_a_thousand_waiters_ask_little(
    redis_server: RedisServer, kind: str, tmp_path: Path
) -> None:
    """In four processes with 250 each they make at most 5 requests a second."""
    prefix = redis_server.prefix()

    def asked() -> int:
        stats: Any = client.info("commandstats")
        return sum(int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in ASKING)

    given = processes(crowd, redis_server.url, prefix, kind, log=tmp_path / "log")
    with redis_server.client() as client, given:
        assert eventually(lambda: client.exists(f"{prefix}:ended"))
        assert eventually(lambda: client.get(f"{prefix}:begun") == b"4")

        def is_calm() -> bool:
            """Whether all have asked for the first time, for which a busy machine needs long."""
            before = asked()
            time.sleep(2)
            return asked() - before <= 10

        assert eventually(is_calm)
        begin, before, ended = time.monotonic(), asked(), client.get(f"{prefix}:ended")
        time.sleep(6)
        assert asked() - before <= 5 * (time.monotonic() - begin)
        assert kind == "pace" or asked() > before
        assert client.get(f"{prefix}:ended") == ended
