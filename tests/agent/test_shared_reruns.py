"""Hooks that run again, or never come to their end: a shared store charges once what runs once."""

from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.messages import ToolCall
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import (
    ModelCallLimit,
    QuotaMiddleware,
    ToolCallLimit,
)
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limits import Limit
from langchain_quota.quotas import Quota
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.testing import captured_decisions
from tests.scene import ANN, CONFIG, Scene, asking, cancel_at, check_history
from tests.signals import Signals
from tests.stores import DAY, Clock, FickleStore, SlowStore, counts, quota

USER = Quota(3, per="user_id")
SEARCHES = "search:user_id:ann"
MODEL_CALLS = "model:user_id:ann"


def limit_of(kind: str, **options: Any) -> Limit:
    options = {"quotas": [USER], **options}
    return ToolCallLimit("search", **options) if kind == "tool" else ModelCallLimit(**options)


def scene_of(signals: Signals, script: Any, *limits: Limit, store: Any, **options: Any) -> Scene:
    scene = Scene(signals, script, [quota(signals, *limits, store=store)], **options)
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
            await scene.play()
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


def crashing_scene(signals: Signals, script: Any, middleware: Crashing) -> Scene:
    scene = Scene(signals, script, [middleware])
    scene.context = ANN
    return scene


@pytest.mark.parametrize("back", [True, False], ids=["back", "still down"])
async def test_a_crash_while_the_store_is_down(*, back: bool, signals: Signals) -> None:
    """A call that ran without the store, crashed and ran again reaches the store once."""
    store = FickleStore(MemoryStore())
    store.down = True
    middleware = crashing(signals, limit_of("tool"), store=store, on_store_error="allow")
    scene = crashing_scene(signals, asking("search"), middleware)
    with pytest.raises(ConnectionAbortedError):
        await scene.play()
    store.down = not back

    await scene.go_on()
    store.down = False
    await scene.play()

    assert scene.ran == ["search"] * 2
    assert counts(store) == {SEARCHES: 2}


async def test_judged_twice_over_the_edge_of_a_window(signals: Signals) -> None:
    """Judged again in a new window, a batch is charged there, and not in the old one."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    limit = ToolCallLimit("search", quotas=[Quota(3, per="global", window=DAY)])
    scene = Scene(
        signals,
        asking("search", "search"),
        [quota(signals, limit, store=store, clock=clock)],
        interrupt_before=["tools"],
    )
    await scene.play()

    clock.now += 86_400
    scene.agent.update_state(CONFIG, None, as_node="model")
    await scene.go_on()

    assert counts(store) == {"search:global::86400:20455": 2}


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

    await cancel_at(store.reached, scene.play())
    assert sum(counts(store).values()) == int(heard)
    await (scene.play() if then == "a new turn" else scene.go_on())

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

    await cancel_at(store.reached, scene.play())
    await scene.play(context={"user_id": "bob"}, thread_id="thread-2")

    assert counts(store) == {"search:user_id:bob": 1}
