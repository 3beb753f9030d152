"""Caps on calls at once across processes: a lease in Redis for each call that runs."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from inspect import iscoroutinefunction
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.tools import StructuredTool
from prometheus_client import CollectorRegistry

from langchain_quota import ConcurrencyLimit, QuotaMiddleware, RedisStore, Telemetry
from langchain_quota.testing import ScriptedChatModel
from tests.scene import texts
from tests.server.redis import RedisServer, time_from
from tests.telemetry import Signals

SLOT_LEASE = 60
"""How long a place is held without a renewal, in seconds."""
CAP = 3
KEY = "browser:concurrency:"
PATIENCE = 120


def browser(see: Callable[..., Any]) -> StructuredTool:
    """The tool, in the form that its function has."""
    given: Any = {"coroutine" if iscoroutinefunction(see) else "func": see}
    return StructuredTool.from_function(**given, name="browser", description="See.")


def agent_of(store: RedisStore, calls: int, see: Callable[..., Any], **options: Any) -> Any:
    """An agent whose model makes calls at once, in a run of its own."""
    limit = ConcurrencyLimit("browser", max_concurrency=CAP, wait=PATIENCE)
    options.setdefault("telemetry", Telemetry(registry=CollectorRegistry()))
    quota = QuotaMiddleware([limit], store=store, **options)
    model = ScriptedChatModel(script=[["browser"] * calls, "done"])
    return create_agent(model, [browser(see)], middleware=[quota])


ASKED = {"messages": [("user", "hi")]}


class Visitors:
    """Whoever sees at the same time: how many, and at most."""

    now = most = 0

    async def see(self) -> str:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0.02)
        finally:
            self.now -= 1
        return "seen"


@asynccontextmanager
async def open_store(server: RedisServer, prefix: str) -> AsyncIterator[RedisStore]:
    """A store that is closed in the end, in both forms."""
    store = RedisStore(server.url, prefix=prefix, timeout=60)
    try:
        yield store
    finally:
        await store.aclose()
        store.close()


async def used_is(store: RedisStore, expected: int) -> None:
    """Wait until as many places are taken."""
    async with asyncio.timeout(PATIENCE):
        while await taken(store) != expected:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def taken(store: RedisStore) -> int:
    """How many places are taken."""
    (use,) = await store.apeek([KEY])
    return 0 if use is None else use.used


async def test_a_call_that_runs_long_keeps_its_place(redis_server: RedisServer) -> None:
    """The lease is renewed while a call runs, also in a thread whose run is cancelled."""
    begun, may_end = threading.Semaphore(0), threading.Event()

    def see() -> str:
        begun.release()
        assert may_end.wait(PATIENCE)
        return "seen"

    async def asee() -> str:
        begun.release()
        while not may_end.is_set():  # noqa: ASYNC110 - of other threads
            await asyncio.sleep(0.01)
        return "seen"

    prefix, now = redis_server.prefix(), int(time.time())
    with time_from(f"{prefix}:now"), redis_server.client() as client:
        client.set(f"{prefix}:now", now)
        async with open_store(redis_server, prefix) as store:
            agents = [agent_of(store, 1, each) for each in (see, see, asee)]
            runs = [
                asyncio.create_task(asyncio.to_thread(agents[0].invoke, ASKED)),
                *(asyncio.create_task(each.ainvoke(ASKED)) for each in agents[1:]),
            ]
            for _ in runs:
                await asyncio.to_thread(begun.acquire, timeout=PATIENCE)
            runs[1].cancel()
            assert await taken(store) == CAP
            # Without renewals all would be free now.
            client.set(f"{prefix}:now", now + 3 * SLOT_LEASE)
            await used_is(store, CAP)
            may_end.set()
            await asyncio.wait(runs)
            await used_is(store, 0)


async def test_cancelled_calls_give_their_places_back(redis_server: RedisServer) -> None:
    """Runs are cancelled while their calls wait, ask the store or run: nothing is held then.

    Two stores are as two processes have them: together they run no more than may.
    """
    chance = random.Random(19)  # noqa: S311 - no secret
    visitors = Visitors()
    prefix = redis_server.prefix()
    async with open_store(redis_server, prefix) as one, open_store(redis_server, prefix) as other:
        agents = [agent_of(store, 4, visitors.see) for store in (one, other) * 6]
        runs = [asyncio.create_task(each.ainvoke(ASKED)) for each in agents]
        for run in chance.sample(runs, 8):
            await asyncio.sleep(chance.uniform(0, 0.05))
            run.cancel()
        async with asyncio.timeout(PATIENCE):
            results = await asyncio.gather(*runs, return_exceptions=True)
        assert any(isinstance(each, dict) for each in results)
        assert any(isinstance(each, asyncio.CancelledError) for each in results)
        assert 0 < visitors.most <= CAP
        assert await taken(one) == 0


@pytest.mark.parametrize("outage", ["block", "allow"])
async def test_while_the_store_is_away(signals: Signals, outage: Any) -> None:
    """Calls are refused; or they run, held to the cap in this process, whoever makes them."""
    visitors = Visitors()
    store = RedisStore("redis://127.0.0.1:1/0", timeout=1)
    options: Any = {"on_store_error": outage, "telemetry": signals.telemetry}
    agents = [agent_of(store, 4, visitors.see, **options) for _ in range(2)]
    results = await asyncio.gather(*(each.ainvoke(ASKED) for each in agents))
    said = [text for result in results for text in texts(result)]
    if outage == "allow":
        assert said == ["seen"] * 8
        assert visitors.most == CAP
    else:
        assert visitors.most == 0
        assert all("could not be checked" in each for each in said)
    fallbacks = {"agent": "unnamed", "action": outage}
    counted = signals.samples("langchain_quota_store_fallbacks_total", **fallbacks)
    assert list(counted.values()) == [8]
