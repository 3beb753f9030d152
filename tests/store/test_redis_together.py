"""Callers of RedisStore on one event loop at the same time: they share nothing but a pipeline."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from langchain_quota.core.admission import AcquireResult
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores.redis import RedisStore
from tests.server.proxy import Proxy, proxy
from tests.server.redis import RedisServer
from tests.server.stores import calls

MOST = 32
"""How many requests share a round trip."""
CALLERS = MOST + 1
"""One sends alone, and the others fill a pipeline."""
LONG = 30.0
"""The timeout of a store that is not to run into it, in seconds."""


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    """A store with a prefix of the test's own, that the server knows the script of."""
    store = RedisStore(redis_server.url, prefix=redis_server.prefix(), timeout=LONG)
    await store.aacquire(calls("first", 1))
    yield store
    await store.aclose()


@asynccontextmanager
async def held_up(
    server: RedisServer, hold: bytes, seconds: float = LONG
) -> AsyncIterator[tuple[Proxy, RedisStore]]:
    """A store whose requests with this in them are held up on their way."""
    with proxy(server.port, hold) as way:
        store = RedisStore(way.url, prefix=server.prefix(), timeout=seconds)
        yield way, store
        await store.aclose()


def asking(store: RedisStore, *keys: str) -> list[asyncio.Task[AcquireResult]]:
    """Callers who ask in one turn of the event loop."""
    return [asyncio.create_task(store.aacquire(calls(key, 1))) for key in keys]


async def test_two_connections_serve_all(store: RedisStore, redis_server: RedisServer) -> None:
    """One sends alone, all others in one pipeline; each of them gets its own answer."""
    with redis_server.client() as client:
        client.config_resetstat()
        keys = [f"key-{number}" for number in range(CALLERS)]
        for turn in range(2):
            results = await asyncio.gather(*asking(store, *keys))
            assert [result.used for result in results] == [{key: turn} for key in keys]
        # One of them is this client's own; the store has one already.
        assert client.info("stats")["total_connections_received"] <= 2
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == 2 * CALLERS
        # A server that does not know the script gets it, and counts each request once.
        client.script_flush()
    results = await asyncio.gather(*asking(store, *["search"] * CALLERS))
    assert sorted(result.used["search"] for result in results) == [*range(CALLERS)]


async def test_a_pipeline_is_not_longer_than_that(redis_server: RedisServer) -> None:
    """While the first pipeline is held up, the next ones are answered: so none waits for it."""
    async with held_up(redis_server, b"}:count:first") as (way, store):
        alone, *others = asking(store, "alone", "first", *["search"] * (2 * MOST))
        assert await asyncio.to_thread(way.held.wait, LONG)
        await asyncio.wait([alone, *others[MOST:]])
        assert not any(task.done() for task in others[:MOST])
        way.open()
        results = await asyncio.gather(*others[1:])
        assert sorted(result.used["search"] for result in results) == [*range(2 * MOST)]
        await others[0]


async def test_an_error_is_its_callers(store: RedisStore, redis_server: RedisServer) -> None:
    """What is wrong with one request fails this one only."""
    with redis_server.client() as client:
        client.set(f"{{{store.prefix}}}:count:odd", "no count")
    results = await asyncio.gather(*asking(store, "a", "b", "odd", "c"), return_exceptions=True)
    assert isinstance(failed := results.pop(2), QuotaStoreError)
    assert "WRONGTYPE" in str(failed)
    assert str(failed).endswith("under its prefix: `langchain-quota quotas show` names it")
    assert all(isinstance(each, AcquireResult) for each in results)


async def test_a_failure_is_for_all(redis_server: RedisServer) -> None:
    """The task of a pipeline ends: all who wait in it fail, and the next ones are served."""
    before = asyncio.all_tasks()
    async with held_up(redis_server, b"}:count:first") as (way, store):
        alone, *others = asking(store, "alone", *["first"] * (MOST - 1))
        assert await asyncio.to_thread(way.held.wait, LONG)
        for task in asyncio.all_tasks() - before - {alone, *others}:
            task.cancel()
        failed = await asyncio.gather(*others, return_exceptions=True)
        assert all(isinstance(each, QuotaStoreError) and not each.timed_out for each in failed)
        way.open()
        assert all(await asyncio.gather(alone, *asking(store, "a", "b", "c")))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python has no eager tasks")
async def test_eager_tasks(store: RedisStore) -> None:
    """A pipeline begins when somebody has asked, also if tasks begin when they are made."""
    asyncio.get_running_loop().set_task_factory(getattr(asyncio, "eager_task_factory"))  # noqa: B009
    results = await asyncio.gather(*asking(store, *["search"] * CALLERS))
    assert sorted(result.used["search"] for result in results) == [*range(CALLERS)]


@pytest.mark.parametrize("turns", range(3))
async def test_no_task_stays(store: RedisStore, turns: int) -> None:
    """All are cancelled, before the pipeline begins or later: it ends, and a new one begins."""
    before = asyncio.all_tasks()
    tasks = asking(store, *["search"] * CALLERS)
    # After one turn all have asked, and the pipeline has not begun.
    for _ in range(1 + turns):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    assert asyncio.all_tasks() == before
    results = await asyncio.gather(*asking(store, *["later"] * CALLERS))
    assert sorted(result.used["later"] for result in results) == [*range(CALLERS)]


async def test_each_has_its_own_time(redis_server: RedisServer) -> None:
    """Nobody answers: the time of each is over, and no task stays."""
    before = asyncio.all_tasks()
    async with held_up(redis_server, b"EVALSHA", seconds=0.3) as (_, store):
        failed = await asyncio.gather(*asking(store, *["x"] * CALLERS), return_exceptions=True)
        assert all(isinstance(each, QuotaStoreError) and each.timed_out for each in failed)
        assert asyncio.all_tasks() == before
