"""Thread limits in a store: concurrent runs of a thread, its state beside it, agents inside it."""

import asyncio
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import ModelCallLimit, QuotaWarning, ToolCallLimit, usage
from langchain_quota.limits import Limit
from langchain_quota.quotas import Quota
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.testing import ScriptedChatModel
from tests.agent.conftest import Form, both_forms
from tests.agent.rules import CONFIG, recording
from tests.agent.shared import ANN, DAY, TODAY, SharedScene, asking, counts, quota
from tests.signals import Signals

RUNS = 20
DEADLINE = 60
"""Seconds after which runs that should meet are taken to have been run one by one."""


def scene_of(
    signals: Signals,
    script: Any,
    *limits: Limit,
    store: Any = None,
    form: Form = "async",
    **options: Any,
) -> SharedScene:
    return SharedScene(
        signals, script, [quota(signals, *limits, store=store)], **options, form=form
    )


@both_forms
@pytest.mark.parametrize("checkpointer", [True, False], ids=["checkpointer", "none"])
async def test_concurrent_runs(form: Form, *, checkpointer: bool, signals: Signals) -> None:
    """Of 20 runs at once on one thread with limit 3, each with one call, exactly 3 calls run."""
    store = MemoryStore()
    barrier = asyncio.Barrier(RUNS)

    async def no_limit(state: Any, runtime: Any) -> None:
        # All runs have begun, and have loaded the thread's state, before the first is judged.
        await barrier.wait()

    scene = scene_of(
        signals,
        asking("search"),
        ToolCallLimit("search", thread_limit=3, run_limit=no_limit if form == "async" else None),
        store=store,
        checkpointer=InMemorySaver() if checkpointer else None,
        form=form,
    )

    if form == "async":
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*(scene.turn() for _ in range(RUNS)))
    else:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(RUNS) as pool:
            given = {"messages": [("user", "hi")]}
            runs = [
                loop.run_in_executor(pool, scene.agent.invoke, given, CONFIG) for _ in range(RUNS)
            ]
            await asyncio.gather(*runs)

    assert scene.ran == ["search"] * 3
    assert counts(store) == {"search:thread:thread-1": 3}
    assert scene.metric("tool:search", "allowed") == 3
    assert scene.metric("tool:search", "blocked", "thread") == RUNS - 3


async def test_concurrent_model_calls(signals: Signals) -> None:
    """Of 20 runs at once on one thread with 3 model calls, exactly 3 call the model."""
    store = MemoryStore()
    scene = scene_of(signals, asking(), ModelCallLimit(thread_limit=3), store=store)
    scene.model.script = lambda messages: "done"

    results = await asyncio.gather(*(scene.turn() for _ in range(RUNS)))

    assert len(scene.model.calls) == 3
    assert counts(store) == {"model:thread:thread-1": 3}
    ended = Counter(str(each["messages"][-1].content) for each in results)
    assert ended["Model call limits exceeded: thread limit (3/3)"] == RUNS - 3


async def test_concurrent_users(signals: Signals) -> None:
    """Of 20 threads at once of each of two users, each user has exactly 3 calls."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[Quota(3, per="user_id", window=DAY)])
    scene = scene_of(signals, asking("search"), limit, store=store)

    await asyncio.gather(
        *(
            scene.agent.ainvoke(
                {"messages": [("user", "hi")]},
                {"configurable": {"thread_id": f"{user}-{number}"}},
                context={"user_id": user},
            )
            for number in range(RUNS)
            for user in ("ann", "bob")
        )
    )

    assert counts(store) == {f"search:user_id:ann:{TODAY}": 3, f"search:user_id:bob:{TODAY}": 3}
    assert scene.ran == ["search"] * 6


async def test_the_state_is_a_mirror(signals: Signals) -> None:
    """After each run the thread's state says what the store says, whoever else charged it."""
    store = MemoryStore()
    limits: list[Limit] = [
        ToolCallLimit("search", thread_limit=9),
        ToolCallLimit(thread_limit=20),
        ModelCallLimit(thread_limit=30),
    ]
    scene = scene_of(signals, asking("search", "calc"), *limits, store=store)
    # Another agent on the same thread, with a state of its own.
    other = scene_of(signals, asking("search"), *limits, store=store)

    for _ in range(2):
        await scene.turn()
        await other.turn()
        await scene.turn()
        used = usage(scene.agent.get_state(CONFIG))
        assert counts(store) == {
            "search:thread:thread-1": used.tools["search"],
            "__all__:thread:thread-1": used.tools["__all__"],
            "model:thread:thread-1": used.model,
        }
    assert counts(store)["search:thread:thread-1"] == 6
    labels = {"agent": "unnamed", "limit": "tool:search", "thread_id": "thread-1"}
    assert signals.value("langchain_quota_thread_used", **labels) == 6
    assert dict(usage(scene.agent.get_state(CONFIG)).run_tools) == {"search": 1, "__all__": 2}


async def test_a_thread_that_gets_a_store(signals: Signals) -> None:
    """A thread with counts in its state goes on with them once there is a store."""
    saver = InMemorySaver()
    limits: list[Limit] = [ToolCallLimit("search", thread_limit=3), ModelCallLimit(thread_limit=9)]
    before = scene_of(signals, asking("search", "search"), *limits, checkpointer=saver)
    await before.turn()
    store = MemoryStore()
    scene = scene_of(signals, asking("search", "search"), *limits, store=store, checkpointer=saver)

    await scene.turn()

    assert scene.ran == ["search"]
    assert counts(store) == {"search:thread:thread-1": 3, "model:thread:thread-1": 4}
    await scene.turn()
    assert scene.ran == ["search"]
    # Another thread begins at nothing.
    await scene.turn(thread_id="thread-2")
    assert scene.ran == ["search"] * 3


async def test_a_thread_that_loses_its_store(signals: Signals) -> None:
    """Without the store again, a thread goes on with what its state has mirrored."""
    saver = InMemorySaver()
    limit = ToolCallLimit("search", thread_limit=3)
    shared = scene_of(
        signals, asking("search", "search"), limit, store=MemoryStore(), checkpointer=saver
    )
    await shared.turn()
    scene = scene_of(signals, asking("search", "search"), limit, checkpointer=saver)

    await scene.turn()

    assert scene.ran == ["search"]


async def test_a_thread_whose_store_was_emptied(signals: Signals) -> None:
    """Where a store has forgotten a thread, it goes on with the count in the thread's state."""
    saver = InMemorySaver()
    limit = ToolCallLimit("search", thread_limit=3)
    ran: list[str] = []
    for store in (MemoryStore(), MemoryStore()):
        scene = scene_of(
            signals,
            asking("search", "search"),
            limit,
            store=store,
            checkpointer=saver,
            ran=ran,
        )
        await scene.turn()

    assert ran == ["search"] * 3
    assert counts(store) == {"search:thread:thread-1": 3}


OF_THREADS = {
    "thread limit": ToolCallLimit("search", thread_limit=2),
    "quota": ToolCallLimit("search", quotas=[Quota(2)]),
    "both": ToolCallLimit("search", thread_limit=9, quotas=[Quota(2, name="total")]),
    "model": ModelCallLimit(quotas=[Quota(3)], exit_behavior="end"),
}
"""Limits that allow a thread two tool calls, or three model calls."""


def called(scene: SharedScene, limit: Limit) -> int:
    return len(scene.model.calls if limit.kind == "model" else scene.ran)


@pytest.mark.parametrize("limit", OF_THREADS.values(), ids=OF_THREADS)
async def test_more_threads_than_a_store_keeps(limit: Limit, signals: Signals) -> None:
    """Threads with a state come and go without end, and each has its own count when it is back."""
    store = MemoryStore(max_keys=3)
    scene = scene_of(signals, asking("search"), limit, store=store)
    threads = [f"thread-{number}" for number in range(5)]

    for turns in range(3):
        for thread in threads:
            before = called(scene, limit)
            await scene.turn(thread_id=thread)
            calls, budget = (2, 3) if limit.kind == "model" else (1, 2)
            left = budget - turns * calls
            assert called(scene, limit) - before == max(0, min(calls, left)), (thread, turns)

    assert store.occupancy == (3, 3, 3)
    assert signals.value("langchain_quota_errors_total", component="store") is None


async def test_a_dropped_count_comes_back_as_all_runs_left_it(signals: Signals) -> None:
    """The state has what others charged to the thread, too: it is not given anew."""
    store = MemoryStore(max_keys=2)
    limits: list[Limit] = [ToolCallLimit("search", quotas=[Quota(4)])]
    other = scene_of(signals, asking("search", "search"), *limits, store=store)
    scene = scene_of(signals, asking("search"), *limits, store=store)
    await other.turn()
    await scene.turn()
    for number in range(3):
        await other.turn(thread_id=f"other-{number}")
    assert "search:thread:thread-1" not in counts(store)

    await scene.turn()
    await scene.turn()

    assert scene.ran == ["search"] * 2
    assert counts(store)["search:thread:thread-1"] == 4


async def test_threads_without_a_state_are_kept(signals: Signals) -> None:
    """What only the store has is not dropped: what needs more room is refused, as in an outage."""
    limit = ToolCallLimit("search", thread_limit=3)
    scene = scene_of(
        signals, asking("search"), limit, store=MemoryStore(max_keys=2), checkpointer=None
    )
    for thread in ("one", "two", "three"):
        await scene.turn(thread_id=thread)
    assert scene.ran == ["search"] * 2
    assert scene.fallbacks("deny") == 1


@both_forms
async def test_reset(form: Form, signals: Signals) -> None:
    """A reset gives a thread its budget back, in state and store, and touches nobody else."""
    store = MemoryStore()
    limits: list[Limit] = [
        ToolCallLimit("search", thread_limit=2, quotas=[Quota(5, per="user_id")]),
        ToolCallLimit("calc", quotas=[Quota(1, window=DAY)]),
        ModelCallLimit(thread_limit=9),
    ]
    middleware = quota(signals, *limits, store=store)
    scene = SharedScene(signals, asking("search", "search", "calc"), [middleware], form=form)
    await scene.turn(context=ANN, thread_id="thread-2")
    await scene.turn(thread_id="thread-1")
    await scene.turn()
    assert len(scene.ran) == 6

    if form == "sync":
        middleware.reset(scene.agent, CONFIG)  # type: ignore[arg-type]
    else:
        await middleware.areset(scene.agent, CONFIG)  # type: ignore[arg-type]

    used = usage(scene.agent.get_state(CONFIG))
    assert (dict(used.tools), used.model) == ({}, 0)
    assert counts(store) == {
        "search:user_id:ann": 4,
        "search:thread:thread-2": 2,
        f"calc:thread:thread-2:{TODAY}": 1,
        "model:thread:thread-2": 2,
    }
    await scene.turn()
    assert Counter(scene.ran) == {"search": 5, "calc": 3}  # of five searches a user has no more
    assert counts(store)["search:thread:thread-1"] == 1


@pytest.mark.parametrize("kind", ["tool", "model"])
async def test_no_warning_with_a_thread(kind: str, signals: Signals) -> None:
    """With a store and a thread's id a thread limit needs no checkpointer: it holds over runs."""
    store = MemoryStore()
    limit: Limit = (
        ToolCallLimit("search", thread_limit=1)
        if kind == "tool"
        else ModelCallLimit(thread_limit=1)
    )
    scene = scene_of(signals, asking("search"), limit, store=store, checkpointer=None)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await scene.turn()
        await scene.turn()

    assert len(scene.ran) == 1
    assert list(counts(store).values()) == [1]


async def test_a_warning_without_a_thread(signals: Signals) -> None:
    """Without a thread's id there is nothing to count by, and the thread limit warns."""
    store = MemoryStore()
    limit = ToolCallLimit("search", thread_limit=1)
    scene = scene_of(signals, asking("search"), limit, store=store, checkpointer=None)

    with pytest.warns(QuotaWarning, match="thread limit"):
        await scene.turn(thread_id=None)
    await scene.turn()

    assert scene.ran == ["search"] * 2
    assert counts(store) == {}


def delegate(child: Any, times: int = 1) -> BaseTool:
    """A tool that asks another agent, so many times."""
    asked = {"messages": [("user", "do it")]}

    def ask() -> str:
        results = [child.invoke(asked) for _ in range(times)]
        return str(results[-1]["messages"][-1].content)

    async def aask() -> str:
        results = [await child.ainvoke(asked) for _ in range(times)]
        return str(results[-1]["messages"][-1].content)

    return StructuredTool.from_function(ask, aask, name="delegate", description="delegate")


# Under `invoke` a tool runs in another thread, in a copy of the context.
@both_forms
@pytest.mark.parametrize("name", [None, "researcher"])
@pytest.mark.parametrize("parent", [None, "boss"])
async def test_an_agent_inside_a_tool(
    form: Form, parent: str | None, name: str | None, signals: Signals
) -> None:
    """A sub-agent with the same store draws on its parent's thread, in every invocation."""
    store = MemoryStore()
    limit = ToolCallLimit("search", thread_limit=3)
    ran: list[str] = []
    child = create_agent(
        ScriptedChatModel(script=asking("search", "search")),
        tools=[recording("search", ran)],
        middleware=[quota(signals, limit, store=store)],
        name=name,
    )
    scene = scene_of(
        signals,
        asking("search", "delegate"),
        limit,
        store=store,
        tools=[recording("search", ran), delegate(child)],
        ran=ran,
        name=parent,
        form=form,
    )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await scene.turn()
        assert ran == ["search"] * 3
        await scene.turn()

    assert ran == ["search"] * 3
    assert counts(store) == {"search:thread:thread-1": 3}
    # The parent's next judgement has brought its state up to date.
    assert usage(scene.agent.get_state(CONFIG)).tools["search"] == 3


@pytest.mark.parametrize("checkpointer", [True, False], ids=["checkpointer", "none"])
async def test_many_invocations_of_a_sub_agent(*, checkpointer: bool, signals: Signals) -> None:
    """Each invocation of a sub-agent is charged: in one tool, in parallel ones, run after run."""
    store = MemoryStore()
    limits: list[Limit] = [
        ToolCallLimit("search", thread_limit=99),
        ModelCallLimit(thread_limit=99),
    ]
    ran: list[str] = []
    child = create_agent(
        ScriptedChatModel(script=asking("search")),
        tools=[recording("search", ran)],
        middleware=[quota(signals, *limits, store=store)],
    )
    scene = scene_of(
        signals,
        asking("delegate", "delegate"),
        *limits,
        store=store,
        tools=[delegate(child, times=3)],
        checkpointer=InMemorySaver() if checkpointer else None,
    )

    await scene.turn()
    await scene.turn()

    assert len(ran) == 2 * 2 * 3
    assert counts(store) == {
        "search:thread:thread-1": 12,
        "model:thread:thread-1": 2 * (2 + 2 * 3 * 2),
    }


async def test_a_sub_agents_user(signals: Signals) -> None:
    """A sub-agent that is given the context draws on the same user's quota."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[Quota(3, per="user_id")])
    ran: list[str] = []
    child: Any = create_agent(
        ScriptedChatModel(script=asking("search", "search")),
        tools=[recording("search", ran)],
        middleware=[quota(signals, limit, store=store)],
    )
    given: Any = {"messages": [("user", "do it")]}

    def ask() -> str:
        return str(child.invoke(given, context=ANN)["messages"][-1].content)

    async def aask() -> str:
        return str((await child.ainvoke(given, context=ANN))["messages"][-1].content)

    scene = scene_of(
        signals,
        asking("search", "search", "delegate"),
        limit,
        store=store,
        tools=[
            recording("search", ran),
            StructuredTool.from_function(ask, aask, name="delegate", description="delegate"),
        ],
    )

    await scene.turn(context=ANN)

    assert ran == ["search"] * 3
    assert counts(store) == {"search:user_id:ann": 3}
