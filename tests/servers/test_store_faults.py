"""A store in Redis behind a faulty network: what is reported, and what is counted in the end."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Literal, cast

import pytest
import redis.asyncio

from langchain_quota.admission import AcquireRequest, AcquireResult
from langchain_quota.errors import EventLoopBlockedError, QuotaStoreError
from langchain_quota.middleware._corrections import COMPENSATED_AT_ONCE
from langchain_quota.middleware._store import StoreClient
from langchain_quota.stores import QuotaStore, QuotaUsage, deadline
from langchain_quota.stores.redis import RedisStore
from langchain_quota.telemetry import recorder_of
from tests.judged import KEY, request_of
from tests.servers.proxy import Proxy, late, lost, piecemeal, proxy, replaced, reset
from tests.servers.redis import RedisServer
from tests.servers.stores import calls
from tests.signals import Signals

Mode = Literal["sync", "async"]
modes = pytest.mark.parametrize("mode", ["sync", "async"])

SHORT = 0.4
"""The timeout of a store that may run into it, in seconds."""
LONG = 30.0
"""The timeout of a store that is not to."""
CALLERS = 60


Stores = Callable[..., RedisStore]


@pytest.fixture
def way(redis_server: RedisServer) -> Iterator[Proxy]:
    """A way to Redis."""
    with proxy(redis_server.port) as way:
        yield way


class Counting:
    """A store that notes how many corrections it is brought, and hands on what it is asked."""

    def __init__(self, store: RedisStore) -> None:
        self.store = store
        self.brought: list[int] = []
        self.most_at_once = 0
        self._travelling = 0
        self._lock = Lock()

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        with self._noting(request):
            return self.store.acquire(request)

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        with self._noting(request):
            return await self.store.aacquire(request)

    @contextmanager
    def _noting(self, request: AcquireRequest) -> Iterator[None]:
        brought = len(request.compensations)
        with self._lock:
            self.brought.append(brought)
            self._travelling += brought
            self.most_at_once = max(self.most_at_once, self._travelling)
        try:
            yield
        finally:
            with self._lock:
                self._travelling -= brought


class Callers:
    """Ask a store as the hooks do, and let calls run if it does not answer."""

    def __init__(self, mode: Mode, store: Counting, signals: Signals) -> None:
        self._mode = mode
        self.store = store
        recorder = recorder_of(signals.telemetry)
        self._client = StoreClient(cast("QuotaStore", store), "allow", recorder)
        self.ran = 0

    async def call(self) -> bool:
        """Make a call; whether the store answered."""
        request = request_of(most=10**6)
        if self._mode == "sync":
            await asyncio.to_thread(self._client.acquire, request)
        else:
            await self._client.aacquire(request)
        self.ran += 1
        return request.answered

    async def calls(self, number: int) -> list[bool]:
        """Make so many at the same time."""
        return await asyncio.gather(*(self.call() for _ in range(number)))

    async def all_counted(self) -> None:
        """Make calls until nothing is left to be told, and check that all that ran is counted."""
        await self.call()
        while self.store.brought[-1]:
            await self.call()
        (use,) = await self.store.store.apeek([KEY])
        assert use == QuotaUsage(KEY, self.ran, 10**6, None)


@pytest.fixture
async def stores(way: Proxy, redis_server: RedisServer) -> AsyncIterator[Stores]:
    """Makes stores behind the proxy, with one prefix."""
    prefix, made = redis_server.prefix(), []

    def make(timeout: float = SHORT) -> RedisStore:
        made.append(RedisStore(way.url, prefix=prefix, timeout=timeout))
        return made[-1]

    yield make
    for store in made:
        await store.aclose()


class TestOutages:
    """The corrections for a store that is back."""

    @modes
    async def test_many_callers(
        self, mode: Mode, way: Proxy, stores: Stores, signals: Signals
    ) -> None:
        """What ran in an outage reaches the store once, a few corrections with each request."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(CALLERS))
        store = Counting(stores())
        callers = Callers(mode, store, signals)
        way.blackhole()
        for _ in range(3):
            assert not any(await callers.calls(CALLERS))
        assert 0 < store.most_at_once <= COMPENSATED_AT_ONCE

        way.heal()
        store.store = stores(LONG)
        store.brought.clear()
        # Nobody is held up for the sake of others' corrections.
        assert all(await callers.calls(CALLERS))
        for _ in range(3 * CALLERS // COMPENSATED_AT_ONCE):
            await callers.call()
        assert store.most_at_once <= COMPENSATED_AT_ONCE
        # What was under way when the network healed may have arrived, too.
        assert sum(store.brought) <= 3 * CALLERS
        await callers.all_counted()

    @modes
    async def test_every_fault(
        self, mode: Mode, way: Proxy, stores: Stores, signals: Signals
    ) -> None:
        """Whatever happens to replies, in the end every call that ran is counted once."""
        callers = Callers(mode, Counting(stores()), signals)
        faults = [lost, reset, late(2 * SHORT), replaced(b":1\r\n"), piecemeal, late(0.01)]
        for fault in faults:
            await callers.call()
            way.fail(fault)
            await callers.calls(3)
            way.heal()
        way.blackhole()
        assert not await callers.call()
        way.heal()
        callers.store.store = stores(LONG)
        await callers.all_counted()


class TestEventLoop:
    """A reply that waits while something blocks the event loop."""

    @pytest.mark.parametrize("connected", [True, False])
    async def test_reply_that_is_there(self, way: Proxy, stores: Stores, connected: bool) -> None:  # noqa: FBT001 - a parameter
        """A question is answered, however long the event loop was blocked meanwhile."""
        store = stores()
        if connected:
            await asyncio.gather(*(store.aacquire(calls("search", 1)) for _ in range(6)))
        asked = [asyncio.create_task(store.aacquire(calls("search", 1))) for _ in range(6)]
        await asyncio.sleep(0)
        time.sleep(3 * SHORT)  # noqa: ASYNC251 - the fault
        results = await asyncio.gather(*asked)
        assert [each.admitted for each in results] == [(True,)] * 6

    async def test_reply_at_the_last_moment(
        self, stores: Stores, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A reply that is there when the last part of the timeout passes is read."""
        monkeypatch.setattr(deadline, "_TICKS", 1)
        store = stores()
        await store.aacquire(calls("search", 1))
        asked = asyncio.create_task(store.aacquire(calls("search", 1)))
        await asyncio.sleep(0)
        time.sleep(2 * SHORT)  # noqa: ASYNC251 - the fault
        assert (await asked).admitted == (True,)

    async def test_again_and_again(self, redis_server: RedisServer) -> None:
        """Connecting takes many turns of the event loop, and each of them may be held up."""
        with redis_server.client() as client:
            client.script_flush()
        url = redis_server.url.removesuffix("/0") + "/1"
        store = RedisStore(url, prefix=redis_server.prefix(), timeout=0.1)
        asked = asyncio.create_task(store.aacquire(calls("search", 1)))
        while not asked.done():
            await asyncio.sleep(0)
            time.sleep(0.1)  # noqa: ASYNC251 - the fault
        assert asked.result().admitted == (True,)
        await store.aclose()

    async def test_no_reply(self, way: Proxy, stores: Stores, signals: Signals) -> None:
        """If no reply comes even then, error and metrics name the event loop."""
        store = stores()
        client = StoreClient(store, "allow", recorder_of(signals.telemetry))
        await client.aacquire(request_of())
        way.blackhole()
        asked = asyncio.create_task(store.aacquire(calls("search", 1)))
        request = request_of()
        told = asyncio.create_task(client.aacquire(request))
        await asyncio.sleep(0)
        time.sleep(3 * SHORT)  # noqa: ASYNC251 - the fault
        with pytest.raises(
            EventLoopBlockedError, match=r"event loop was blocked for 1\.\d s"
        ) as failed:
            await asked
        assert failed.value.timed_out
        await told
        assert not request.answered
        name = "langchain_quota_errors_total"
        assert signals.value(name, component="store", error_type="EventLoopBlockedError") == 1
        name = "langchain_quota_store_seconds_count"
        assert signals.value(name, operation="acquire", outcome="timeout") == 1

        # It is not blocked any more, and there is still no reply.
        silent: type[QuotaStoreError] = EventLoopBlockedError
        while silent is EventLoopBlockedError:  # the machine may be busy
            with pytest.raises(QuotaStoreError, match="no answer within") as unanswered:
                await store.aacquire(calls("search", 1))
            silent = unanswered.type
        assert silent is QuotaStoreError

    async def test_always_blocked(self, way: Proxy, stores: Stores) -> None:
        """An event loop that is blocked for ever does not have a question wait for ever."""
        store = stores(0.1)
        way.blackhole()
        asked = asyncio.create_task(store.aacquire(calls("search", 1)))
        turns = 0
        while not asked.done() and turns < 100:
            turns += 1
            await asyncio.sleep(0)
            time.sleep(0.05)  # noqa: ASYNC251 - the fault
        assert asked.done()
        with pytest.raises(EventLoopBlockedError):
            await asked

    async def test_cancelled(self, way: Proxy, stores: Stores) -> None:
        """Who is cancelled while the event loop is blocked is cancelled, reply or not."""
        store = stores()
        await store.aacquire(calls("search", 1))
        way.blackhole()
        asked = asyncio.create_task(store.aacquire(calls("search", 1)))
        await asyncio.sleep(0)
        asked.cancel()
        time.sleep(3 * SHORT)  # noqa: ASYNC251 - the fault
        with pytest.raises(asyncio.CancelledError):
            await asked

    async def test_client_with_a_timeout(self, way: Proxy) -> None:
        """A client of your own keeps its timeout; the error says what made it run out."""
        async with redis.asyncio.Redis.from_url(way.url, socket_timeout=SHORT) as client:
            store = RedisStore(client, timeout=1.5 * SHORT)
            await store.aacquire(calls("search", 1))
            way.blackhole()
            asked = asyncio.create_task(store.aacquire(calls("search", 1)))
            await asyncio.sleep(0)
            time.sleep(3 * SHORT)  # noqa: ASYNC251 - the fault
            with pytest.raises(EventLoopBlockedError):
                await asked
