"""Hooks that run again, or never come to their end: a shared store charges once what runs once."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import ToolCall
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import (
    Decision,
    ModelCallLimit,
    Outcome,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limits import Limit
from langchain_quota.quotas import Quota
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.testing import captured_decisions
from tests.agent.rules import CONFIG, cancel_at, check_history
from tests.agent.shared import (
    ANN,
    DAY,
    Clock,
    FickleStore,
    SharedScene,
    SlowStore,
    asking,
    counts,
    quota,
)
from tests.signals import Signals

USER = Quota(3, per="user_id")
SEARCHES = "search:user_id:ann"
MODEL_CALLS = "model:user_id:ann"


def limit_of(kind: str, **options: Any) -> Limit:
    options = {"quotas": [USER], **options}
    return ToolCallLimit("search", **options) if kind == "tool" else ModelCallLimit(**options)


def scene_of(
    signals: Signals, script: Any, *limits: Limit, store: Any, **options: Any
) -> SharedScene:
    scene = SharedScene(signals, script, [quota(signals, *limits, store=store)], **options)
    scene.context = ANN
    return scene


class DatabaseError(Exception):
    """The checkpointer's database is gone."""


class FailingSaver(InMemorySaver):
    """Cannot keep what a hook wrote, the first time.

    Args:
        hook: The hook.
    """

    def __init__(self, hook: str) -> None:
        super().__init__()
        self._hook = hook
        self.fails = True

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        if self.fails and self._hook in task_path:
            raise DatabaseError
        super().put_writes(config, writes, task_id, task_path)

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        kept = checkpoint["channel_values"].get("langchain_quota", {})
        written = kept.get("batch") if "after" in self._hook else kept.get("run_model")
        if self.fails and written:
            raise DatabaseError
        return super().put(config, checkpoint, metadata, new_versions)


HOOKS = {"tool": "after_model", "model": "before_model"}


@pytest.mark.parametrize("kind", ["tool", "model"])
async def test_a_checkpoint_that_failed(kind: str, signals: Signals) -> None:
    """A hook whose checkpoint failed runs again, is recognized, and is charged once."""
    store = MemoryStore()
    saver = FailingSaver(f"QuotaMiddleware.{HOOKS[kind]}")
    limit = limit_of(kind)
    scene = scene_of(signals, asking("search", "search"), limit, store=store, checkpointer=saver)

    with pytest.raises(DatabaseError):
        await scene.turn()
    assert counts(store) == ({SEARCHES: 2} if kind == "tool" else {MODEL_CALLS: 1})
    assert scene.ran == []
    saver.fails = False
    await scene.go_on()

    assert scene.ran == ["search"] * 2
    assert counts(store) == {SEARCHES: 2} if kind == "tool" else {MODEL_CALLS: 2}
    assert scene.metric(limit.name, "allowed") == 2
    scene.check()


async def test_a_checkpoint_that_failed_where_calls_have_no_ids(signals: Signals) -> None:
    """Calls without an id are recognized, too: charged once, decided once, with the same ids."""
    store = MemoryStore()
    saver = FailingSaver("QuotaMiddleware.after_model")
    limit = limit_of("tool")
    call = ToolCall(name="search", args={}, id=None, type="tool_call")
    script = asking(call, call)
    scene = scene_of(signals, script, limit, store=store, checkpointer=saver)

    with captured_decisions() as decisions:
        with pytest.raises(DatabaseError):
            await scene.turn()
        saver.fails = False
        await scene.go_on()

    assert scene.ran == ["search"] * 2
    assert counts(store) == {SEARCHES: 2}
    assert scene.metric(limit.name, "allowed") == 2
    asked = scene.state()["messages"][1].tool_calls
    judged = [each.call.id for each in decisions if each.call.kind == "tool"]
    assert judged == [each["id"] for each in asked]
    scene.check()


class Crashing(QuotaMiddleware[Any, Any]):
    """A process that dies between the decision and the checkpoint, the first times."""

    crashes = 1
    hooks: tuple[str, ...] = ("after_model",)

    def after_model(self, state: Any, runtime: Any) -> Any:
        update = super().after_model(state, runtime)
        self._crash("after_model")
        return update

    async def aafter_model(self, state: Any, runtime: Any) -> Any:
        update = await super().aafter_model(state, runtime)
        self._crash("after_model")
        return update

    def before_model(self, state: Any, runtime: Any) -> Any:
        update = super().before_model(state, runtime)
        self._crash("before_model")
        return update

    async def abefore_model(self, state: Any, runtime: Any) -> Any:
        update = await super().abefore_model(state, runtime)
        self._crash("before_model")
        return update

    def _crash(self, hook: str) -> None:
        if self.crashes and hook in self.hooks:
            self.crashes -= 1
            raise ConnectionAbortedError


def crashing(signals: Signals, *limits: Limit, store: Any, **options: Any) -> Crashing:
    made = Crashing(limits, store=store, telemetry=signals.telemetry, **options)
    made._clock = Clock()
    return made


def crashing_scene(signals: Signals, script: Any, middleware: Crashing) -> SharedScene:
    scene = SharedScene(signals, script, [middleware])
    scene.context = ANN
    return scene


async def test_hooks_that_crash_again_and_again(signals: Signals) -> None:
    """However often hooks crash and run again, what they admit is charged once."""
    store = MemoryStore()
    limits = [limit_of("tool"), limit_of("model")]
    middleware = crashing(signals, *limits, store=store)
    middleware.crashes = 3
    middleware.hooks = ("before_model", "after_model")
    scene = crashing_scene(signals, asking("search", "search"), middleware)

    with pytest.raises(ConnectionAbortedError):
        await scene.turn()
    for _ in range(2):
        with pytest.raises(ConnectionAbortedError):
            await scene.go_on()
    await scene.go_on()

    assert scene.ran == ["search"] * 2
    assert counts(store) == {SEARCHES: 2, MODEL_CALLS: 2}
    for limit in limits:
        assert scene.metric(limit.name, "allowed") == 2
    scene.check()


async def test_a_crash_in_the_last_of_the_quota(signals: Signals) -> None:
    """A hook that runs again gets the same answer: the quota's last calls are still its own."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[Quota(2, per="user_id")])
    middleware = crashing(signals, limit, store=store)
    scene = crashing_scene(signals, asking("search", "search", "search"), middleware)

    with pytest.raises(ConnectionAbortedError):
        await scene.turn()
    assert counts(store) == {SEARCHES: 2}
    await scene.go_on()

    assert scene.ran == ["search"] * 2
    assert [status for _, status in scene.answers()].count("error") == 1
    assert counts(store) == {SEARCHES: 2}
    scene.check()


async def test_a_refusal_that_crashed(signals: Signals) -> None:
    """A refused batch that is judged again is judged anew: room made meanwhile is used."""
    store = MemoryStore()
    limit = limit_of("tool")
    middleware = crashing(signals, limit, store=store)
    scene = crashing_scene(signals, asking("search", "search", "search"), middleware)
    middleware.crashes = 0
    await scene.turn()
    middleware.crashes = 1

    with pytest.raises(ConnectionAbortedError):
        await scene.turn()
    store.reset([SEARCHES])
    await scene.go_on()

    assert scene.ran == ["search"] * 6
    assert counts(store) == {SEARCHES: 3}
    assert scene.metric("tool:search", "blocked", "user_id") == 3
    assert scene.metric("tool:search", "allowed") == 6


async def test_an_error_that_is_tried_again(signals: Signals) -> None:
    """A batch that an error stopped charges nothing; resumed in a new window, it runs."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    limit = limit_of("tool", exit_behavior="error")
    middleware = quota(signals, limit, store=store, clock=clock)
    scene = SharedScene(signals, asking("search", "search"), [middleware])
    await scene.turn(context=ANN)

    for _ in range(2):
        with pytest.raises(ToolCallLimitExceededError):
            await scene.go_on() if scene.ran[2:] else await scene.turn()
    assert counts(store) == {SEARCHES: 2}
    store.reset([SEARCHES])
    await scene.go_on()

    assert scene.ran == ["search"] * 4
    assert counts(store) == {SEARCHES: 2}


async def test_a_crash_and_a_new_turn(signals: Signals) -> None:
    """A crashed batch that is not taken up stays charged: nobody knows whether it ran."""
    store = MemoryStore()
    middleware = crashing(signals, limit_of("tool"), store=store)
    scene = crashing_scene(signals, asking("search"), middleware)

    with pytest.raises(ConnectionAbortedError):
        await scene.turn()
    await scene.turn()

    assert scene.ran == ["search"]
    assert counts(store) == {SEARCHES: 2}
    check_history(scene.state()["messages"])


@pytest.mark.parametrize("back", [True, False], ids=["back", "still down"])
async def test_a_crash_while_the_store_is_down(*, back: bool, signals: Signals) -> None:
    """A call that ran without the store, crashed and ran again reaches the store once."""
    store = FickleStore(MemoryStore())
    store.down = True
    middleware = crashing(signals, limit_of("tool"), store=store, on_store_error="allow")
    scene = crashing_scene(signals, asking("search"), middleware)
    with pytest.raises(ConnectionAbortedError):
        await scene.turn()
    store.down = not back

    await scene.go_on()
    store.down = False
    await scene.turn()

    assert scene.ran == ["search"] * 2
    assert counts(store) == {SEARCHES: 2}


async def test_judged_twice(signals: Signals) -> None:
    """A batch that is judged a second time, as after a fork of the thread, is charged once."""
    store = MemoryStore()
    scene = SharedScene(
        signals,
        asking("search", "search"),
        [quota(signals, limit_of("tool"), store=store)],
        interrupt_before=["tools"],
    )
    await scene.turn(context=ANN)
    assert counts(store) == {SEARCHES: 2}

    scene.agent.update_state(CONFIG, None, as_node="model")
    await scene.go_on()
    assert counts(store) == {SEARCHES: 2}
    await scene.go_on()

    assert scene.ran == ["search"] * 2
    assert counts(store) == {SEARCHES: 2}
    assert scene.state()["langchain_quota"]["run_tools"] == {"search": 2}


async def test_judged_twice_over_the_edge_of_a_window(signals: Signals) -> None:
    """Judged again in a new window, a batch is charged there, and not in the old one."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    limit = ToolCallLimit("search", quotas=[Quota(3, per="global", window=DAY)])
    scene = SharedScene(
        signals,
        asking("search", "search"),
        [quota(signals, limit, store=store, clock=clock)],
        interrupt_before=["tools"],
    )
    await scene.turn()

    clock.now += 86_400
    scene.agent.update_state(CONFIG, None, as_node="model")
    await scene.go_on()

    assert counts(store) == {"search:global::86400:20455": 2}


async def test_a_replay(signals: Signals) -> None:
    """A thread replayed from an old checkpoint runs its tools again, and is charged again."""
    store = MemoryStore()
    scene = scene_of(
        signals, asking("search", "search"), limit_of("tool", quotas=[USER]), store=store
    )
    await scene.turn()
    (judging,) = [
        each
        for each in scene.agent.get_state_history(CONFIG)
        if each.next == ("QuotaMiddleware.after_model",) and each.values["messages"][-1].tool_calls
    ]

    await scene.agent.ainvoke(None, judging.config, context=ANN)

    assert scene.ran == ["search"] * 3
    assert counts(store) == {SEARCHES: 3}


@pytest.mark.parametrize("kind", ["tool", "model"])
@pytest.mark.parametrize("heard", [True, False], ids=["heard", "not heard"])
@pytest.mark.parametrize("then", ["a new turn", "resumed"])
async def test_cancelled_while_asking(
    *, heard: bool, kind: str, then: str, signals: Signals
) -> None:
    """A run cancelled while it asks the store leaves no charge, once the next call has asked."""
    store = SlowStore(MemoryStore(), heard=heard)
    limit = limit_of(kind)
    scene = scene_of(signals, asking("search"), limit, store=store)

    await cancel_at(store.reached, scene.turn())
    assert sum(counts(store).values()) == int(heard)
    await (scene.turn() if then == "a new turn" else scene.go_on())

    assert scene.ran == ["search"]
    assert counts(store) == {SEARCHES: 1} if kind == "tool" else {MODEL_CALLS: 2}
    assert scene.metric(limit.name, "allowed") == (1 if kind == "tool" else 2)
    check_history(scene.state()["messages"])
    # What was under way then comes too late.
    kept = counts(store)
    with pytest.raises(QuotaStoreError, match="compensated before it arrived"):
        store.kept.acquire(store.asked[0])
    assert counts(store) == kept


async def test_cancelled_and_settled_by_another(signals: Signals) -> None:
    """What a cancelled run may have charged is taken back by whoever asks next, on any thread."""
    store = SlowStore(MemoryStore(), heard=True)
    scene = scene_of(signals, asking("search"), limit_of("tool"), store=store)

    await cancel_at(store.reached, scene.turn())
    await scene.turn(context={"user_id": "bob"}, thread_id="thread-2")

    assert counts(store) == {"search:user_id:bob": 1}


async def test_cancelled_while_telling(signals: Signals) -> None:
    """Cancelled in an observer, a hook has charged; run again it is recognized."""
    store = MemoryStore()
    reached = asyncio.Event()
    seen: list[Decision] = []

    async def observer(decision: Decision) -> None:
        if decision.call.kind == "tool" and not reached.is_set():
            reached.set()
            await asyncio.Event().wait()
        seen.append(decision)

    middleware = quota(signals, limit_of("tool"), store=store, on_decision=observer)
    scene = SharedScene(signals, asking("search", "search"), [middleware])
    scene.context = ANN

    await cancel_at(reached, scene.turn())
    assert counts(store) == {SEARCHES: 2}
    await scene.go_on()

    assert scene.ran == ["search"] * 2
    assert counts(store) == {SEARCHES: 2}
    tools = [each.outcome for each in seen if each.call.kind == "tool"]
    assert tools == [Outcome.ALLOWED] * 2
    scene.check()


class Failing(AgentMiddleware[Any, Any, Any]):
    """Fails behind the quota, the first time."""

    fails = True

    def after_model(self, state: Any, runtime: Any) -> None:
        if self.fails:
            self.fails = False
            raise ConnectionAbortedError

    async def aafter_model(self, state: Any, runtime: Any) -> None:
        self.after_model(state, runtime)


async def test_a_crash_behind_the_quota(signals: Signals) -> None:
    """A hook that crashes behind the quota's runs again alone: nothing is charged again."""
    store = MemoryStore()
    scene = SharedScene(
        signals,
        asking("search"),
        [Failing(), quota(signals, limit_of("tool"), limit_of("model"), store=store)],
    )

    with pytest.raises(ConnectionAbortedError):
        await scene.turn(context=ANN)
    await scene.go_on()

    assert scene.ran == ["search"]
    assert counts(store) == {SEARCHES: 1, MODEL_CALLS: 2}
    scene.check()
