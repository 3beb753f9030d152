"""Caps on calls at once across processes: a lease in a store for each call that runs."""

import asyncio
import random
import threading
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any

import pytest
from langchain_core.tools import StructuredTool

from langchain_quota import ConcurrencyLimit, MemoryStore
from tests.scene import Scene, asking, texts
from tests.stores import Clock, DistantStore, FickleStore
from tests.telemetry import Signals

SLOT_LEASE = 60
"""How long a place is held without a renewal, in seconds."""
CAP = 3
PATIENCE = 60
ASKED = {"messages": [("user", "hi")]}


def agent_of(
    signals: Signals, store: Any, calls: int, see: Callable[..., Any], **options: Any
) -> Any:
    """An agent whose model makes calls at once, of a tool in the form that its function has."""
    form: Any = {"coroutine" if iscoroutinefunction(see) else "func": see}
    tool = StructuredTool.from_function(**form, name="browser", description="See.")
    limit = ConcurrencyLimit("browser", max_concurrency=CAP, wait=PATIENCE)
    given: Any = {"tools": [tool], "store": store, "checkpointer": None, **options}
    return Scene(signals, asking(*["browser"] * calls), [limit], **given).agent


class Visitors:
    """Whoever sees at the same time: how many, and at most. All wait until the cap is reached."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._full = asyncio.Event()

    async def see(self) -> str:
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now >= CAP:
            self._full.set()
        try:
            await self._full.wait()
            await asyncio.sleep(0.01)
        finally:
            self.now -= 1
        return "seen"


async def taken(store: Any, expected: int) -> None:
    """Wait until as many places are taken."""
    async with asyncio.timeout(PATIENCE):
        while sum(each.used for each in store.usages("browser:*")) != expected:  # noqa: ASYNC110 - none
            await asyncio.sleep(0.01)


async def test_a_call_that_runs_long_keeps_its_place(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is renewed while a call runs, also in a thread whose run is cancelled."""
    monkeypatch.setattr("langchain_quota.features.concurrency.slot_leases.RENEWAL", 0.01)
    begun, may_end = threading.Semaphore(0), threading.Event()

    def see() -> str:
        begun.release()
        assert may_end.wait(PATIENCE)
        return "seen"

    async def asee() -> str:
        return await asyncio.to_thread(see)

    clock = Clock()
    store = FickleStore(MemoryStore(clock=clock))
    agents = [agent_of(signals, store, 1, each) for each in (see, see, asee)]
    runs = [
        asyncio.create_task(asyncio.to_thread(agents[0].invoke, ASKED)),
        *(asyncio.create_task(each.ainvoke(ASKED)) for each in agents[1:]),
    ]
    for _ in runs:
        await asyncio.to_thread(begun.acquire, timeout=PATIENCE)
    runs[1].cancel()
    for _ in range(3):
        clock.now += SLOT_LEASE + 2
        # Without renewals all would be free now.
        await taken(store, CAP)
    may_end.set()
    await asyncio.wait(runs)
    await taken(store, 0)


async def test_cancelled_calls_give_their_places_back(signals: Signals) -> None:
    """Runs are cancelled while their calls wait, ask the store or run: nothing is held then.

    Two stores are as two processes have them: together they run no more than may.
    """
    chance = random.Random(19)  # noqa: S311 - no secret
    visitors, kept = Visitors(), MemoryStore()
    stores = [DistantStore(kept), DistantStore(kept)]
    agents = [agent_of(signals, store, 4, visitors.see) for store in stores * 6]
    runs = [asyncio.create_task(each.ainvoke(ASKED)) for each in agents]
    for run in chance.sample(runs, 8):
        await asyncio.sleep(chance.uniform(0, 0.05))
        run.cancel()
    async with asyncio.timeout(PATIENCE):
        results = await asyncio.gather(*runs, return_exceptions=True)
    assert any(isinstance(each, dict) for each in results)
    assert any(isinstance(each, asyncio.CancelledError) for each in results)
    assert visitors.most == CAP
    await taken(kept, 0)


@pytest.mark.parametrize("outage", ["block", "allow"])
async def test_while_the_store_is_away(signals: Signals, outage: Any) -> None:
    """Calls are refused; or they run, held to the cap in this process, whoever makes them."""
    visitors, store = Visitors(), FickleStore(MemoryStore())
    store.down = True
    agents = [agent_of(signals, store, 4, visitors.see, on_store_error=outage) for _ in range(2)]
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
