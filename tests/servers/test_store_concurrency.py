"""Many at once: no more is admitted than there is, and no less."""

import asyncio
import json
import logging
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from uuid import uuid4

import pytest

from langchain_quota.admission import AcquireRequest, Compensation
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.stores.redis import RedisStore
from tests.servers.prometheus import eventually
from tests.servers.redis import RedisServer, time_from
from tests.servers.stores import batch, calls, compensating, used

PROCESSES = 4
AT_ONCE = 50
LIMIT = 100
ROUNDS = 20
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


async def admitted(store: MemoryStore | RedisStore, key: str, attempts: int = AT_ONCE) -> int:
    """How many of so many requests at the same time are admitted."""
    results = await asyncio.gather(
        *(store.aacquire(calls(key, 1, limit=LIMIT, key="", attempt="")) for _ in range(attempts))
    )
    return sum(each for result in results for each in result.admitted)


def worker(url: str, prefix: str, orders: Connection) -> None:
    """A process that asks whenever it is given a key, until it is given none."""

    async def work() -> None:
        store = RedisStore(url, prefix=prefix, timeout=60)
        while key := await asyncio.to_thread(orders.recv):
            orders.send(await admitted(store, key))

    asyncio.run(work())


@pytest.fixture
def context() -> ForkServerContext:
    """What starts processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def test_processes_share_a_quota(redis_server: RedisServer, context: ForkServerContext) -> None:
    """Four processes with 50 requests each at the same time: exactly 100 are admitted."""
    prefix = redis_server.prefix()
    with ExitStack() as stack:
        ends = []
        for _ in range(PROCESSES):
            here, there = context.Pipe()
            process = context.Process(
                target=worker, args=(redis_server.url, prefix, there), daemon=True
            )
            process.start()
            there.close()
            stack.callback(process.join, PATIENCE)
            stack.callback(here.send, None)
            ends.append(here)
        rounds = []
        for number in range(ROUNDS):
            for end in ends:
                end.send(f"round-{number}")
            assert all(end.poll(PATIENCE) for end in ends)
            rounds.append(sum(end.recv() for end in ends))
    assert rounds == [LIMIT] * ROUNDS
    with closing(RedisStore(redis_server.url, prefix=prefix, timeout=60)) as store:
        assert [use.used for use in store.usages()] == [LIMIT] * ROUNDS


@contextmanager
def audit_log() -> Iterator[list[tuple[str, int, str]]]:
    """Id, amount and giver of each grant that this process logs."""
    logged: list[tuple[str, int, str]] = []

    class Audit(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fields = vars(record)
            if fields.get("quota_event") == "granted":
                logged.append((fields["quota_grant"], fields["quota_amount"], fields["quota_by"]))

    handler, logger = Audit(), logging.getLogger("langchain_quota")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield logged
    finally:
        logger.removeHandler(handler)


def granter(url: str, prefix: str, orders: Connection) -> None:
    """A process whose callers all give the same grants while they ask, until they are refused."""

    async def caller(store: RedisStore, key: str, number: int) -> tuple[int, int]:
        given, ran = 0, 0
        for grant in range(GRANTS):
            made = await store.agrant(key, 7, id=f"grant {grant}", by=f"{os.getpid()} {number}")
            given += made.by == f"{os.getpid()} {number}"
            ran += await admitted(store, key, 4)
        return given, ran

    async def work() -> None:
        store = RedisStore(url, prefix=prefix, timeout=60)
        while key := await asyncio.to_thread(orders.recv):
            with audit_log() as logged:
                made = await asyncio.gather(*(caller(store, key, each) for each in range(CALLERS)))
            ran = sum(ran for _, ran in made) + await admitted(store, key, LIMIT)
            orders.send((sum(given for given, _ in made), ran, logged))

    asyncio.run(work())


def test_processes_give_a_grant_once(redis_server: RedisServer, context: ForkServerContext) -> None:
    """4 processes with 25 callers give the same grants: each once, and no call more runs.

    The audit logs of all processes have each grant once, with whoever gave it.
    """
    prefix = redis_server.prefix()
    with ExitStack() as stack:
        ends = []
        for _ in range(PROCESSES):
            here, there = context.Pipe()
            process = context.Process(
                target=granter, args=(redis_server.url, prefix, there), daemon=True
            )
            process.start()
            there.close()
            stack.callback(process.join, PATIENCE)
            stack.callback(here.send, None)
            ends.append(here)
        for end in ends:
            end.send("shared:global:")
        assert all(end.poll(PATIENCE) for end in ends)
        given, ran, logs = zip(*(end.recv() for end in ends), strict=True)
    assert (sum(given), sum(ran)) == (GRANTS, LIMIT + 7 * GRANTS)
    with closing(RedisStore(redis_server.url, prefix=prefix, timeout=60)) as store:
        kept = store.grants()
        assert [each.amount for each in kept] == [7] * GRANTS
        logged = [entry for log in logs for entry in log]
        assert sorted(logged) == sorted((each.id, each.amount, each.by) for each in kept)
        assert [(use.used, use.granted) for use in store.usages()] == [(sum(ran), 7 * GRANTS)]


def spender(url: str, prefix: str, diary: str, hold: int) -> None:
    """A process whose callers hold an amount, use another, and settle, until they are refused.

    What a call has used is written down before it is settled.
    """
    written = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    chance = random.Random()  # noqa: S311 - no secret

    async def call(store: RedisStore) -> bool:
        held = batch(
            {"tokens": hold},
            limits={"tokens": BUDGET},
            leases={"tokens": LEASE},
            key=uuid4().hex,
            attempt=uuid4().hex,
        )
        if not (await store.aacquire(held)).admitted[0]:
            return False
        await asyncio.sleep(chance.uniform(0, 0.01))
        used = chance.randint(1, BOUND)
        name = held.idempotency_key
        os.write(written, f"{json.dumps([name, used])}\n".encode())
        await store.aacquire(settled((name, used)))
        return True

    async def caller(store: RedisStore) -> None:
        while await call(store):
            pass

    async def work() -> None:
        store = RedisStore(url, prefix=prefix, timeout=60)
        await asyncio.gather(*(caller(store) for _ in range(CALLERS)))

    asyncio.run(work())


def settled(*calls: tuple[str, int]) -> AcquireRequest:
    """That calls have used amounts."""
    return compensating(
        *(Compensation(f"of {name}", {"tokens": amount}, settles=name) for name, amount in calls)
    )


@pytest.mark.parametrize("hold", [BOUND, 1])
def test_processes_share_a_budget(
    redis_server: RedisServer, context: ForkServerContext, tmp_path: Path, hold: int
) -> None:
    """Of 4 processes with 25 callers each some are killed: nothing is overspent, nothing is lost.

    With a true bound held, the budget is never exceeded; with less, by no more than what the calls
    in flight use beyond it. What the killed ones held is free again after its lease.
    """
    diary, prefix = tmp_path / "diary", redis_server.prefix()
    diary.touch()

    def written() -> list[tuple[str, int]]:
        lines = diary.read_text().split("\n")[:-1]
        return [(name, amount) for name, amount in map(json.loads, lines)]

    with ExitStack() as stack:

        def start() -> multiprocessing.process.BaseProcess:
            given = (redis_server.url, prefix, str(diary), hold)
            process = context.Process(target=spender, args=given, daemon=True)
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
        for process in alive:
            process.join(PATIENCE)
            assert process.exitcode == 0

    with (
        closing(RedisStore(redis_server.url, prefix=prefix, timeout=60)) as store,
        redis_server.client() as client,
    ):
        most = BUDGET + PROCESSES * CALLERS * (BOUND - hold)
        (count,) = used(store, "tokens")
        assert count is not None
        assert BUDGET - hold < count <= most
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
        with time_from("now"):
            client.set("now", int(time.time()) + LEASE + 1)
            assert used(store, "tokens") == [total]


@pytest.fixture(params=["memory", "redis"])
def store(
    request: pytest.FixtureRequest, redis_server: RedisServer
) -> Iterator[MemoryStore | RedisStore]:
    """A store of each kind."""
    if request.param == "memory":
        yield MemoryStore()
        return
    with closing(RedisStore(redis_server.url, prefix=redis_server.prefix(), timeout=60)) as made:
        yield made


async def test_tasks_share_a_quota(store: MemoryStore | RedisStore) -> None:
    """More tasks than there are connections, on one event loop: exactly 100 are admitted."""
    assert await admitted(store, "search", attempts=300) == LIMIT


def test_threads_share_a_quota(store: MemoryStore | RedisStore) -> None:
    """More threads than there are connections, each asking twice: exactly 100 are admitted."""

    def acquire(_: int) -> bool:
        return store.acquire(calls("search", 1, limit=LIMIT)).admitted[0]

    with ThreadPoolExecutor(60) as threads:
        assert sum(threads.map(acquire, range(120))) == LIMIT


def test_event_loops_share_a_quota(store: MemoryStore | RedisStore) -> None:
    """One store on several event loops at the same time, each in its thread."""

    def loop(_: int) -> int:
        return asyncio.run(admitted(store, "search"))

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(loop, range(4))) == LIMIT


async def test_same_request_at_once(store: MemoryStore | RedisStore) -> None:
    """A request that is made many times at once is charged once."""
    asked = [batch({"search": 1}, {"search": 1}, key="one") for _ in range(20)]
    results = await asyncio.gather(*map(store.aacquire, asked))
    assert sorted(result.replayed for result in results) == [False] + [True] * 19
    assert used(store, "search") == [2]
