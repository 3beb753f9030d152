"""Agents that share quotas in a real Redis: many at once, and while it stops, hangs, comes back."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from blockbuster import blockbuster_ctx
from langchain.agents import create_agent
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import (
    ModelCallLimit,
    ModelCallLimitExceededError,
    ToolCallLimit,
    ToolCallLimitExceededError,
    ToolCallLimitMiddleware,
    usage,
)
from langchain_quota.limits import Limit
from langchain_quota.quotas import Quota
from langchain_quota.stores.redis import RedisStore
from langchain_quota.testing import ScriptedChatModel
from tests.scene import ANN, BOB, CONFIG, Scene, asking, cancel_at, recording
from tests.scene import Form as Mode
from tests.servers.redis import RedisServer, running_redis
from tests.signals import Signals
from tests.stores import DAY, TODAY, counts, quota

RUNS = 20
DEADLINE = 120
"""Seconds after which something is taken to hang: the store's timeout is a small part of it."""
PATIENT = 30
"""Seconds; a timeout for tests that are not about timeouts: the machine may be busy."""

SEARCHES = "search:user_id:ann"
THREAD = "search:thread:thread-1"

# The two forms of RedisStore are two clients.
modes = pytest.mark.parametrize("mode", ["sync", "async"])
outages = pytest.mark.parametrize("on_store_error", ["deny", "allow"])

Open = Callable[..., RedisStore]


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    """Opens stores, and closes them in the end."""
    stores = []

    def make(server: RedisServer, prefix: str, *, timeout: float = PATIENT) -> RedisStore:
        store = RedisStore(server.url, prefix=prefix, timeout=timeout)
        stores.append(store)
        return store

    yield make
    for store in stores:
        await store.aclose()


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of the test's own, which knows what it knew when it is started again."""
    with running_redis(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


def per_user(kind: str = "tool", limit: int = 99, **options: Any) -> Limit:
    options = {"quotas": [Quota(limit, per="user_id")], **options}
    return ToolCallLimit("search", **options) if kind == "tool" else ModelCallLimit(**options)


def scene_of(
    mode: Mode,
    signals: Signals,
    script: Any,
    *limits: Limit,
    store: RedisStore,
    scene_options: dict[str, Any] | None = None,
    **options: Any,
) -> Scene:
    middleware = quota(signals, *limits, store=store, **options)
    scene = Scene(signals, script, [middleware], form=mode, **(scene_options or {}))
    scene.context = ANN
    return scene


@modes
async def test_two_workers(
    mode: Mode, redis_server: RedisServer, opened: Open, signals: Signals
) -> None:
    """Two workers with connections of their own share the quotas of users, threads and all."""
    prefix = redis_server.prefix()
    limit = ToolCallLimit(
        "search",
        quotas=[Quota(3, per="user_id", window=DAY), Quota(5, per="global")],
        thread_limit=4,
    )
    stores = [opened(redis_server, prefix) for _ in range(2)]
    first, second = (
        scene_of(mode, signals, asking("search", "search"), limit, store=each) for each in stores
    )

    await first.play(context=ANN)
    await second.play(context=ANN)
    assert (len(first.ran), len(second.ran)) == (2, 1)
    await second.play(context=BOB)
    await first.play(context=BOB, thread_id="thread-2")

    assert (len(first.ran), len(second.ran)) == (3, 2)
    assert counts(stores[0]) == {
        f"search:user_id:ann:{TODAY}": 3,
        f"search:user_id:bob:{TODAY}": 2,
        "search:global:": 5,
        "search:thread:thread-1": 4,
        "search:thread:thread-2": 1,
    }
    assert usage(second.agent.get_state(CONFIG)).tools == {"search": 4}


@pytest.mark.parametrize("checkpointer", [True, False], ids=["checkpointer", "none"])
async def test_concurrent_runs(
    *, checkpointer: bool, redis_server: RedisServer, opened: Open, signals: Signals
) -> None:
    """Of 20 concurrent `ainvoke` on one thread with limit 3, exactly 3 calls run."""
    store = opened(redis_server, redis_server.prefix())
    barrier = asyncio.Barrier(RUNS)

    async def no_limit(state: Any, runtime: Any) -> None:
        # All runs have begun, and have loaded the thread's state, before the first is judged.
        await barrier.wait()

    scene = scene_of(
        "async",
        signals,
        asking("search"),
        ToolCallLimit("search", thread_limit=3, run_limit=no_limit),
        store=store,
        scene_options={"checkpointer": InMemorySaver() if checkpointer else None},
    )

    async with asyncio.timeout(DEADLINE):
        await asyncio.gather(*(scene.play() for _ in range(RUNS)))

    assert scene.ran == ["search"] * 3
    assert counts(store) == {THREAD: 3}
    assert scene.metric("tool:search", "blocked", "thread") == RUNS - 3


async def test_concurrent_runs_in_threads(
    redis_server: RedisServer, opened: Open, signals: Signals
) -> None:
    """Of 20 concurrent `invoke` on one thread with limit 3, exactly 3 calls run."""
    store = opened(redis_server, redis_server.prefix())
    scene = scene_of(
        "sync", signals, asking("search"), ToolCallLimit("search", thread_limit=3), store=store
    )
    given = {"messages": [("user", "hi")]}
    loop = asyncio.get_running_loop()

    with ThreadPoolExecutor(RUNS) as pool:
        runs = [loop.run_in_executor(pool, scene.agent.invoke, given, CONFIG) for _ in range(RUNS)]
        await asyncio.gather(*runs)

    assert scene.ran == ["search"] * 3
    assert counts(store) == {THREAD: 3}


@modes
@pytest.mark.parametrize("name", [None, "researcher"])
async def test_an_agent_inside_a_tool(
    mode: Mode, name: str | None, redis_server: RedisServer, opened: Open, signals: Signals
) -> None:
    """A sub-agent with a store of the same prefix draws on its parent's thread."""
    prefix = redis_server.prefix()
    stores = [opened(redis_server, prefix) for _ in range(2)]
    limit = ToolCallLimit("search", thread_limit=3)
    ran: list[str] = []
    asked: Any = {"messages": [("user", "do it")]}
    child: Any = create_agent(
        ScriptedChatModel(script=asking("search", "search")),
        tools=[recording("search", ran)],
        middleware=[quota(signals, limit, store=stores[0])],
        name=name,
    )

    def ask() -> str:
        return str(child.invoke(asked)["messages"][-1].content)

    async def aask() -> str:
        return str((await child.ainvoke(asked))["messages"][-1].content)

    scene = scene_of(
        mode,
        signals,
        asking("search", "delegate"),
        limit,
        store=stores[1],
        scene_options={
            "tools": [
                recording("search", ran),
                StructuredTool.from_function(ask, aask, name="delegate", description="delegate"),
            ]
        },
    )

    await scene.play()

    assert ran == ["search"] * 3
    assert counts(stores[0]) == {THREAD: 3}


@modes
async def test_a_reset(
    mode: Mode, redis_server: RedisServer, opened: Open, signals: Signals
) -> None:
    """A reset gives a thread its budget back in Redis and in its state, and touches no user's."""
    store = opened(redis_server, redis_server.prefix())
    middleware = quota(signals, per_user(thread_limit=2), store=store)
    scene = Scene(signals, asking("search", "search"), [middleware], form=mode)
    await scene.play(context=ANN)

    if mode == "sync":
        middleware.reset(scene.agent, CONFIG)  # type: ignore[arg-type]
    else:
        await middleware.areset(scene.agent, CONFIG)  # type: ignore[arg-type]

    assert counts(store) == {SEARCHES: 2}
    await scene.play()
    assert scene.ran == ["search"] * 4
    assert counts(store) == {SEARCHES: 4, THREAD: 2}


@modes
@outages
@pytest.mark.parametrize("exit_behavior", ["continue", "end", "error"])
async def test_stopped_in_mid_run(
    mode: Mode,
    on_store_error: Any,
    exit_behavior: Any,
    *,
    durable: RedisServer,
    opened: Open,
    signals: Signals,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Redis stops in mid-run, and is there again for the next: the counts are of what ran."""
    store = opened(durable, durable.prefix())
    answers = iter([["search"], ["search", "search"], "done", ["search"], "done"])

    def script(_: Any) -> Any:
        answer = next(answers)
        if answer == ["search", "search"]:
            durable.stop()
        return answer

    limit = per_user(thread_limit=99, exit_behavior=exit_behavior)
    scene = scene_of(mode, signals, script, limit, store=store, on_store_error=on_store_error)
    raises = (on_store_error, exit_behavior) == ("deny", "error")

    if raises:
        with pytest.raises(ToolCallLimitExceededError) as caught:
            await scene.play()
        assert caught.value.decision is not None
        assert caught.value.decision.leading is not None
        assert caught.value.decision.leading.reason == "store"
    else:
        await scene.play()
    denied = on_store_error == "deny"
    assert scene.ran == ["search"] * (1 if denied else 3)
    assert scene.metric("tool:search", "blocked", "store") == (2 if denied else 0)
    assert scene.fallbacks(on_store_error) == 2
    labels = {"component": "store", "error_type": "QuotaStoreError"}
    assert signals.value("langchain_quota_errors_total", **labels) == 1
    name = "langchain_quota_store_seconds_count"
    assert signals.value(name, operation="acquire", outcome="error") == 1

    durable.start()
    scene.model.script = asking("search")
    await scene.play()

    assert scene.ran == ["search"] * (2 if denied else 4)
    assert counts(store) == {SEARCHES: len(scene.ran), THREAD: len(scene.ran)}
    assert signals.value(name, operation="acquire", outcome="ok") == 2
    said = [each.getMessage() for each in caplog.records if "store of" in each.getMessage()]
    assert ["failed" in said[0], "works again" in said[1], len(said)] == [True, True, 2]
    scene.check()


@modes
@outages
@pytest.mark.parametrize("exit_behavior", ["end", "error"])
async def test_stopped_before_the_model(
    mode: Mode,
    on_store_error: Any,
    exit_behavior: Any,
    *,
    durable: RedisServer,
    opened: Open,
    signals: Signals,
) -> None:
    """Redis stops between two model calls of a run: denied, the second is not made."""
    store = opened(durable, durable.prefix())

    def script(messages: Any) -> Any:
        if messages[-1].type != "human":
            return "done"
        durable.stop()
        return ["search"]

    limit = per_user("model", exit_behavior=exit_behavior)
    scene = scene_of(mode, signals, script, limit, store=store, on_store_error=on_store_error)
    denied = on_store_error == "deny"

    if denied and exit_behavior == "error":
        with pytest.raises(ModelCallLimitExceededError, match="could not be checked"):
            await scene.play()
    else:
        result = await scene.play()
        says = "Model call limit could not be checked: try again later." if denied else "done"
        assert result["messages"][-1].content == says
    assert len(scene.model.calls) == (1 if denied else 2)
    durable.start()
    scene.model.script = lambda messages: "done"
    await scene.play()

    assert counts(store) == {"model:user_id:ann": len(scene.model.calls)}


@modes
@outages
async def test_paused_in_mid_run(
    mode: Mode, on_store_error: Any, durable: RedisServer, opened: Open, signals: Signals
) -> None:
    """Redis hangs in mid-run and hears later of what it did not answer: it counts what ran."""
    store = opened(durable, durable.prefix(), timeout=1)
    answers = iter([["search"], ["search", "search"], "done"])

    def script(_: Any) -> Any:
        answer = next(answers)
        if answer == ["search", "search"]:
            durable.pause()
        return answer

    scene = scene_of(
        mode, signals, script, per_user(thread_limit=99), store=store, on_store_error=on_store_error
    )

    async with asyncio.timeout(DEADLINE):
        await scene.play()
    denied = on_store_error == "deny"
    assert scene.ran == ["search"] * (1 if denied else 3)
    assert scene.fallbacks(on_store_error) == 2
    name = "langchain_quota_store_seconds_count"
    assert signals.value(name, operation="acquire", outcome="timeout") == 1

    durable.resume()
    scene.model.script = asking("search")
    await scene.play()

    assert scene.ran == ["search"] * (2 if denied else 4)
    assert counts(store) == {SEARCHES: len(scene.ran), THREAD: len(scene.ran)}
    scene.check()


@modes
async def test_restarted_empty(mode: Mode, tmp_path: Path, opened: Open, signals: Signals) -> None:
    """Redis comes back without what it knew: threads go on with the counts in their states."""
    with running_redis(tmp_path) as server:
        store = opened(server, server.prefix())
        limit = ToolCallLimit("search", thread_limit=3)
        scene = scene_of(mode, signals, asking("search", "search"), limit, store=store)

        await scene.play()
        server.stop()
        server.start()
        await scene.play()

        assert scene.ran == ["search"] * 3
        assert counts(store) == {THREAD: 3}


async def test_cancelled_while_it_is_paused(
    durable: RedisServer, opened: Open, signals: Signals
) -> None:
    """A run cancelled while Redis hangs leaves no charge, though Redis hears of it later."""
    store = opened(durable, durable.prefix(), timeout=1)
    reached = asyncio.Event()

    async def no_limit(state: Any, runtime: Any) -> None:
        # The last thing before the store is asked.
        if runtime.context == BOB:
            durable.pause()
            reached.set()

    limit = ToolCallLimit("search", quotas=[Quota(99, per="user_id")], run_limit=no_limit)
    scene = scene_of("async", signals, asking("search"), limit, store=store)
    await scene.play()

    await cancel_at(reached, scene.play(context=BOB, thread_id="thread-2"))
    durable.resume()
    await scene.play(context=ANN, thread_id="thread-1")

    assert scene.ran == ["search"] * 2
    assert counts(store) == {SEARCHES: 2}


class Phases:
    """Agents that search again and again, until they are told that it is enough."""

    def __init__(self, signals: Signals, action: str) -> None:
        self._signals = signals
        self._action = action
        self._searches = 0
        self._lock = threading.Lock()
        self.enough = threading.Event()

    def script(self, _: Any) -> Any:
        return "done" if self.enough.is_set() else ["search", "search"]

    def search(self) -> str:
        with self._lock:
            self._searches += 1
        return "found"

    async def asearch(self) -> str:
        return self.search()

    @property
    def ran(self) -> int:
        return self._searches

    def fallbacks(self) -> float:
        name = "langchain_quota_store_fallbacks_total"
        labels = {"agent": "unnamed", "action": self._action}
        return self._signals.value(name, **labels) or 0

    def answered(self) -> float:
        name = "langchain_quota_store_seconds_count"
        return self._signals.value(name, operation="acquire", outcome="ok") or 0

    async def more(self, what: Callable[[], float]) -> None:
        """Wait until there is a good deal more of something."""
        before = what()
        async with asyncio.timeout(DEADLINE):
            while what() < before + 10:  # noqa: ASYNC110 - what it waits for has no event
                await asyncio.sleep(0.01)


@modes
@outages
@pytest.mark.parametrize("outage", ["stopped", "paused"])
async def test_outages_under_load(
    mode: Mode,
    on_store_error: Any,
    outage: str,
    *,
    durable: RedisServer,
    opened: Open,
    signals: Signals,
) -> None:
    """Eight agents run on while Redis stops or hangs, twice: in the end it counts what ran."""
    store = opened(durable, durable.prefix(), timeout=0.5)
    phases = Phases(signals, on_store_error)
    limits = [
        ToolCallLimit("search", quotas=[Quota(10**9, per="user_id")], thread_limit=10**9),
    ]
    middleware = quota(signals, *limits, store=store, on_store_error=on_store_error)
    search = StructuredTool.from_function(
        phases.search, phases.asearch, name="search", description="Search."
    )
    agent: Any = create_agent(
        ScriptedChatModel(script=phases.script), [search], middleware=[middleware]
    )
    loop = asyncio.get_running_loop()
    given = {"messages": [("user", "hi")]}

    def one(number: int, pool: ThreadPoolExecutor) -> Any:
        config = {"configurable": {"thread_id": f"thread-{number % 4}"}}
        if mode == "async":
            return agent.ainvoke(given, config, context=ANN)
        return loop.run_in_executor(pool, lambda: agent.invoke(given, config, context=ANN))

    async def outages_happen() -> None:
        try:
            for _ in range(2):
                await phases.more(phases.answered)
                await asyncio.to_thread(durable.stop if outage == "stopped" else durable.pause)
                await phases.more(phases.fallbacks)
                await asyncio.to_thread(durable.start if outage == "stopped" else durable.resume)
            await phases.more(phases.answered)
        finally:
            phases.enough.set()

    with ThreadPoolExecutor(8) as pool:
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(outages_happen(), *(one(number, pool) for number in range(8)))
            # Whatever is still to be compensated is compensated with the next calls.
            client = middleware._store
            assert client is not None
            while True:
                phases.enough.clear()
                ending = asyncio.ensure_future(one(0, pool))
                await phases.more(phases.answered)
                phases.enough.set()
                await ending
                if not client._pending:
                    break

    kept = counts(store)
    assert kept.pop(SEARCHES) == phases.ran
    assert sum(kept.values()) == phases.ran
    labels = {"agent": "unnamed", "limit": "tool:search", "scope": "none", "decision": "allowed"}
    assert signals.value("langchain_quota_limit_decisions_total", **labels) == phases.ran


def failures(signals: Signals) -> dict[str, float]:
    """What failed, by type; a `BlockingError` would end up here."""
    return {
        sample.labels["error_type"]: sample.value
        for family in signals.registry.collect()
        for sample in family.samples
        if sample.name == "langchain_quota_errors_total"
    }


async def test_the_event_loop_is_not_blocked(
    redis_server: RedisServer, opened: Open, signals: Signals
) -> None:
    """Reserving, refusing, settling, telling what is left and resetting block the loop nowhere."""
    store = opened(redis_server, redis_server.prefix())
    drop_in = ToolCallLimitMiddleware[Any, Any](
        tool_name="search", run_limit=1, limit_name="drop-in", telemetry=signals.telemetry
    )
    middleware = quota(
        signals,
        per_user(limit=3, thread_limit=9),
        per_user("model", limit=9),
        store=store,
        tell_model=True,
        hide_exhausted=True,
    )
    script = asking("search", "search")
    scene = Scene(signals, script, [drop_in, middleware])

    with blockbuster_ctx():
        await scene.play(context=ANN)
        await scene.play()
        await middleware.areset(scene.agent, CONFIG)  # type: ignore[arg-type]
        for _ in range(3):
            await scene.play()
        await store.aclose()

    assert scene.ran == ["search"] * 3
    assert failures(signals) == {}


@outages
async def test_an_outage_does_not_block_the_event_loop(
    on_store_error: Any, durable: RedisServer, opened: Open, signals: Signals
) -> None:
    """A Redis that is stopped, hangs and comes back blocks the event loop nowhere."""
    store = RedisStore(durable.url, prefix=durable.prefix(), timeout=1)
    scene = scene_of(
        "async",
        signals,
        asking("search"),
        per_user(),
        store=store,
        on_store_error=on_store_error,
    )

    with blockbuster_ctx():
        await scene.play()
    durable.pause()
    with blockbuster_ctx():
        await scene.play()
    durable.resume()
    durable.stop()
    with blockbuster_ctx():
        await scene.play()
    durable.start()
    with blockbuster_ctx():
        await scene.play()
        await store.aclose()

    assert len(scene.ran) == (2 if on_store_error == "deny" else 4)
    # Of a busy machine the loop may be late by itself, which is an error of its own kind.
    assert sum(failures(signals).values()) == 2
    assert counts(opened(durable, store.prefix)) == {SEARCHES: len(scene.ran)}
