"""Many at once: no more is admitted than there is, and no less."""

import asyncio
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection

import pytest

from langchain_quota.stores.memory import MemoryStore
from langchain_quota.stores.redis import RedisStore
from tests.servers.redis import RedisServer
from tests.servers.stores import batch, calls, slot

PROCESSES = 4
AT_ONCE = 50
LIMIT = 100
ROUNDS = 20
PATIENCE = 120
"""Seconds after which a process will not answer any more."""


async def admitted(store: MemoryStore | RedisStore, key: str, attempts: int = AT_ONCE) -> int:
    """How many of so many reservations at the same time are admitted."""
    grants = await asyncio.gather(
        *(store.areserve(calls(key, 1, limit=LIMIT, id="", attempt="")) for _ in range(attempts))
    )
    return sum(each for grant in grants for each in grant.admitted)


def worker(url: str, prefix: str, orders: Connection) -> None:
    """A process that reserves whenever it is given a key, until it is given none."""

    async def work() -> None:
        store = RedisStore(url, prefix=prefix, timeout=60)
        while key := await asyncio.to_thread(orders.recv):
            orders.send(await admitted(store, key))

    asyncio.run(work())


def test_processes_share_a_quota(redis_server: RedisServer) -> None:
    """Four processes with 50 reservations each at the same time: exactly 100 are admitted."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
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
    """More threads than there are connections, each reserving twice: exactly 100 are admitted."""

    def reserve(_: int) -> bool:
        return store.reserve(calls("search", 1, limit=LIMIT)).admitted[0]

    with ThreadPoolExecutor(60) as threads:
        assert sum(threads.map(reserve, range(120))) == LIMIT


def test_event_loops_share_a_quota(store: MemoryStore | RedisStore) -> None:
    """One store on several event loops at the same time, each in its thread."""

    def loop(_: int) -> int:
        return asyncio.run(admitted(store, "search"))

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(loop, range(4))) == LIMIT


async def test_same_reservation_at_once(store: MemoryStore | RedisStore) -> None:
    """A reservation that is made many times at once is charged once."""
    asked = [batch([slot("search", 5)], {0: 1}, {0: 1}, id="one") for _ in range(20)]
    grants = await asyncio.gather(*map(store.areserve, asked))
    assert sorted(grant.known for grant in grants) == [False] + [True] * 19
    (use,) = store.peek(["search"])
    assert use is not None
    assert use.used == 2
