"""Thread limits in a store: concurrent runs of a thread, its state beside it, agents inside it."""

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_quota import ModelCallLimit, Quota, ToolCallLimit, usage
from langchain_quota.limits import Limit
from langchain_quota.stores.memory import MemoryStore
from tests.scene import ANN, CONFIG, Form, Scene, asking, both_forms
from tests.stores import DAY, TODAY, Clock, counts
from tests.telemetry import Signals

RUNS = 20
TWICE = asking("search", "search")
THREAD = "search:thread:thread-1"


@both_forms
async def test_concurrent_runs(form: Form, signals: Signals) -> None:
    """Of 20 runs at once on one thread with limit 3, each with one call, exactly 3 calls run."""
    store, barrier = MemoryStore(), asyncio.Barrier(RUNS)

    async def no_limit(*_: Any) -> None:
        # All runs have begun, and have loaded the thread's state, before the first is checked.
        await barrier.wait()

    limits = [
        ToolCallLimit("search", thread_limit=3, run_limit=no_limit if form == "async" else None),
        ToolCallLimit("calc", quotas=[Quota(3, per="user_id")]),
    ]
    scene = Scene(signals, asking("search", "calc"), limits, store=store, form=form)
    threads: list[Any] = [CONFIG] * RUNS
    threads += [{"configurable": {"thread_id": f"{number}"}} for number in range(RUNS)]
    given: Any = {"messages": [("user", "hi")]}
    if form == "sync":
        with ThreadPoolExecutor(RUNS) as pool:
            runs = [pool.submit(scene.agent.invoke, given, each, context=ANN) for each in threads]
        for each in runs:
            each.result()
    else:
        await asyncio.gather(
            *(scene.agent.ainvoke(given, config, context=ANN) for config in threads)
        )
    assert Counter(scene.ran) == {"search": 3 + RUNS, "calc": 3}
    assert counts(store)[THREAD] == counts(store)["calc:user_id:ann"] == 3
    assert scene.metric("tool:search", "blocked", "thread") == RUNS - 3


async def test_threads_without_a_state_are_kept(signals: Signals) -> None:
    """What only the store has is not dropped: what needs more room is refused, as in an outage."""
    limit = ToolCallLimit("search", thread_limit=3)
    store = MemoryStore(max_keys=2)
    scene = Scene(signals, asking("search"), [limit], store=store, checkpointer=None)
    for thread in ("one", "two", "three"):
        await scene.play(thread_id=thread)
    assert scene.ran == ["search"] * 2
    assert scene.fallbacks("block") == 1


@both_forms
async def test_reset(form: Form, signals: Signals) -> None:
    """A reset gives a thread its budget back, in state and store, and touches nobody else."""
    store = MemoryStore(clock=Clock())
    limits: list[Limit] = [
        ToolCallLimit("search", thread_limit=2, run_limit=2, quotas=[Quota(5, per="user_id")]),
        ToolCallLimit("calc", quotas=[Quota(1, per="thread", window=DAY)]),
        ModelCallLimit(thread_limit=9),
    ]
    scene = Scene(signals, asking("search", "search", "calc"), limits, store=store, form=form)
    await scene.play(context=ANN, thread_id="thread-2")
    await scene.play(thread_id="thread-1")
    await scene.play()
    assert len(scene.ran) == 6
    await scene.reset()
    used = usage(scene.agent.get_state(CONFIG))
    assert (dict(used.tools), used.model, dict(used.run_tools)) == ({}, 0, {})
    assert counts(store) == {
        "search:user_id:ann": 4,
        "search:thread:thread-2": 2,
        f"calc:thread:thread-2:{TODAY}": 1,
        "model:thread:thread-2": 2,
    }
    seconds = "langchain_quota_store_seconds_count"
    assert list(signals.samples(seconds, operation="reset", outcome="ok").values()) == [1]
    await scene.play()
    assert Counter(scene.ran) == {"search": 5, "calc": 3}  # of five searches a user has no more
    assert counts(store)[THREAD] == 1
