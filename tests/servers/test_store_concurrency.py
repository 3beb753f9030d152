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
from tests.servers.stores import batch, calls, used

PROCESSES = 4
AT_ONCE = 50
LIMIT = 100
ROUNDS = 20
PATIENCE = 120
"""Seconds after which a process will not answer any more."""


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


def test_processes_share_a_quota(redis_server: RedisServer) -> None:
    """Four processes with 50 requests each at the same time: exactly 100 are admitted."""
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
