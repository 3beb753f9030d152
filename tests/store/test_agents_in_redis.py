"""Agents whose quotas and threads are in a real Redis: at once, in each other, and reset."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from langchain_quota import ModelCallLimit, Quota, ToolCallLimit, usage
from langchain_quota.stores.redis import RedisStore
from tests.scene import ANN, BOB, CONFIG, Form, Scene, asking, both_forms, tool_limiter
from tests.server.redis import RedisServer
from tests.stores import DAY, TODAY, Clock, counts
from tests.telemetry import Signals

RUNS = 20
DEADLINE = 120
"""Seconds after which something hangs."""
SEARCHES, THREAD = "search:user_id:ann", "search:thread:thread-1"
Worker = Callable[[], Any]


@pytest.fixture
async def worker(redis_server: RedisServer) -> AsyncIterator[Worker]:
    """Opens the stores of workers, which share a prefix and no connection."""
    prefix = redis_server.prefix()
    stores: list[Any] = []

    def make() -> Any:
        stores.append(RedisStore(redis_server.url, prefix=prefix, timeout=30))
        stores[-1].clock = Clock()
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()


@both_forms
async def test_two_workers(form: Form, worker: Worker, signals: Signals) -> None:
    """Two workers with connections of their own share the quotas of users, threads and all."""
    quotas = [Quota(3, per="user_id", window=DAY), Quota(5, per="global")]
    limit = ToolCallLimit("search", quotas=quotas, thread_limit=4)
    script = asking("search", "search")
    first, second = (
        Scene(signals, script, [limit], store=worker(), form=form, context=ANN) for _ in range(2)
    )
    await first.play()
    await second.play()
    assert (len(first.ran), len(second.ran)) == (2, 1)
    await second.play(context=BOB)
    await first.play(context=BOB, thread_id="thread-2")
    assert (len(first.ran), len(second.ran)) == (3, 2)
    assert counts(worker()) == {
        f"search:user_id:ann:{TODAY}": 3,
        f"search:user_id:bob:{TODAY}": 2,
        "search:global:": 5,
        "search:thread:thread-1": 4,
        "search:thread:thread-2": 1,
    }
    assert usage(second.agent.get_state(CONFIG)).tools == {"search": 4}


async def test_a_month_of_two_workers(worker: Worker, signals: Signals) -> None:
    """Two workers share a month of Berlin, up to its last second; then they share the next one."""
    quota = Quota(3, per="user_id", window="month", tz="Europe/Berlin", starts=31)
    limit, clock, stores = ToolCallLimit("search", quotas=[quota]), Clock(), [worker(), worker()]
    for store in stores:
        store.clock = clock
    script = asking("search", "search")
    scenes = [Scene(signals, script, [limit], store=each, context=ANN) for each in stores]
    for text in ("2026-02-27T22:59:59Z", "2026-02-27T23:00:00Z"):
        clock.now = datetime.fromisoformat(text).timestamp()
        for scene in scenes:
            await scene.play()
    assert [each.ran for each in scenes] == [["search"] * 4, ["search"] * 2]
    uses = [each for each in stores[0].usages("search:user_id:*") if each.used]
    ends = {each.expires_at: (each.used, each.limit) for each in uses}
    assert ends == {
        datetime.fromisoformat(f"2026-{day}").timestamp(): (3, 3)
        for day in ("02-28T00:00+01:00", "03-31T00:00+02:00")
    }


@pytest.mark.parametrize("kept", [True, False], ids=["checkpointer", "none"])
async def test_concurrent_runs(*, kept: bool, worker: Worker, signals: Signals) -> None:
    """Of 20 concurrent `ainvoke` on one thread with limit 3, exactly 3 calls run."""
    barrier = asyncio.Barrier(RUNS)

    async def no_limit(state: Any, runtime: Any) -> None:
        # All runs have begun, and have loaded the thread's state, before the first is checked.
        await barrier.wait()

    limit = ToolCallLimit("search", thread_limit=3, run_limit=no_limit)
    store = worker()
    options: Any = {} if kept else {"checkpointer": None}
    scene = Scene(signals, asking("search"), [limit], store=store, **options)
    async with asyncio.timeout(DEADLINE):
        await asyncio.gather(*(scene.play() for _ in range(RUNS)))
    assert scene.ran == ["search"] * 3
    assert counts(store) == {THREAD: 3}
    assert scene.metric("tool:search", "blocked", "thread") == RUNS - 3


@both_forms
async def test_a_reset(form: Form, worker: Worker, signals: Signals) -> None:
    """A reset gives a thread its budget back in Redis and in its state, and touches no user's."""
    store = worker()
    limit = ToolCallLimit("search", thread_limit=2, quotas=[Quota(99, per="user_id")])
    script = asking("search", "search")
    scene = Scene(signals, script, [limit], store=store, form=form, context=ANN)
    await scene.play()
    if form == "sync":
        scene.quota.reset(scene.agent, CONFIG)
    else:
        await scene.quota.areset(scene.agent, CONFIG)
    assert counts(store) == {SEARCHES: 2}
    await scene.play()
    assert scene.ran == ["search"] * 4
    assert counts(store) == {SEARCHES: 4, THREAD: 2}


async def test_the_event_loop_is_not_blocked(worker: Worker, signals: Signals) -> None:
    """Reserving, refusing, settling, telling what is left and resetting block the loop nowhere."""
    store = worker()
    drop_in = tool_limiter(signals, "search", run_limit=1, limit_name="drop-in")
    limits: list[Any] = [
        ToolCallLimit("search", thread_limit=9, quotas=[Quota(3, per="user_id")]),
        ModelCallLimit(quotas=[Quota(9, per="user_id")]),
    ]
    options: Any = {"tell_model": True, "hide_exhausted": True, "context": ANN, "store": store}
    scene = Scene(signals, asking("search", "search"), [drop_in, *limits], **options)
    with blockbuster_ctx():
        for _ in range(2):
            await scene.play()
        await scene.quota.areset(scene.agent, CONFIG)
        for _ in range(3):
            await scene.play()
        await store.aclose()
    assert scene.ran == ["search"] * 3
    # A call that blocks would be one of these.
    families = signals.registry.collect()
    assert [each.name for each in families if "errors" in each.name and each.samples] == []
