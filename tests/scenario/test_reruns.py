"""A shared store charges once what runs once, and takes back what does not run.

Hooks run again, or never come to their end; calls are refused by others.
"""

import asyncio
import gc
from collections import Counter
from typing import Any

import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware, after_model, hook_config
from langchain_core.messages import ToolCall

from langchain_quota import MemoryStore, ModelCallLimit, Quota, QuotaMiddleware, ToolCallLimit
from langchain_quota.errors import QuotaStoreError, ToolCallLimitExceededError
from langchain_quota.limits import Limit
from tests import scene as scenes
from tests.scene import ANN, CONFIG, Scene, asking, cancel_at, check_history, tool_limiter, until
from tests.stores import DAY, Clock, FickleStore, SlowStore, UnsureStore, counts, quota
from tests.telemetry import Signals

SEARCHES = "search:user_id:ann"
MODEL_CALLS = "model:user_id:ann"
TWICE = asking("search", "search")


def per_user(of: str = "search", most: int = 9) -> Limit:
    quotas = [Quota(most, per="user_id")]
    return ModelCallLimit(quotas=quotas) if of == "model" else ToolCallLimit(of, quotas=quotas)


class Crashing(QuotaMiddleware[Any, Any]):
    """A process that dies between the decision and the checkpoint, so many times in each hook."""

    crashes: Counter[str]

    @hook_config(can_jump_to=["end"])
    async def aafter_model(self, state: Any, runtime: Any) -> Any:
        return self._crash("after_model", await super().aafter_model(state, runtime))

    @hook_config(can_jump_to=["end"])
    async def abefore_model(self, state: Any, runtime: Any) -> Any:
        return self._crash("before_model", await super().abefore_model(state, runtime))

    def _crash(self, hook: str, update: Any) -> Any:
        if self.crashes[hook]:
            self.crashes = self.crashes - Counter([hook])
            raise ConnectionAbortedError
        return update


@pytest.mark.parametrize("call_id", ["call-", None])
async def test_hooks_that_crash_again_and_again(call_id: str | None, signals: Signals) -> None:
    """However often hooks crash and run again, what they admit is charged and decided once."""
    store = MemoryStore()
    calls = [ToolCall(name="search", args={}, id=call_id and f"{call_id}{n}") for n in "12"]
    limits = [per_user("search", 3), per_user("model", 3)]
    held = Crashing(limits, store=store, telemetry=signals.telemetry)
    held.crashes = Counter(before_model=1, after_model=2)
    scene = Scene(signals, asking(*calls), [held], context=ANN)
    for crashes in (scene.play, scene.go_on, scene.go_on):
        with pytest.raises(ConnectionAbortedError):
            await crashes()
    await scene.go_on()
    assert scene.ran == ["search"] * 2
    assert counts(store) == {SEARCHES: 2, MODEL_CALLS: 2}
    assert (scene.metric("tool:search", "allowed"), scene.metric("model", "allowed")) == (2, 2)
    checked = [each.call.id for each in scene.decisions if each.call.kind == "tool"]
    assert checked == [each["id"] for each in scene.state()["messages"][1].tool_calls]
    scene.check()


@scenes.each_kind
async def test_an_id_that_comes_again(kind: Any, signals: Signals) -> None:
    """A call that no store checks is decided once, though a call of a store had the same id."""
    turns = [[ToolCall(name=name, args={}, id="1")] for name in ("search", "calc")]
    store = MemoryStore()
    scene = Scene(signals, [*turns, "done"], [per_user()], kind=kind, store=store, context=ANN)
    await scene.play()
    assert scene.ran == ["search", "calc"]
    assert [each.call.tool for each in scene.decisions] == ["search", "calc"]
    assert counts(store)[SEARCHES] == 1


@pytest.mark.parametrize("days", [0, 1])
async def test_checked_twice(days: int, signals: Signals) -> None:
    """Checked again, as after a fork of the thread, a batch is charged once, in its last window."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    limit = ToolCallLimit("search", quotas=[Quota(3, per="global", window=DAY)])
    scene = await Scene(signals, TWICE, [limit], store=store, interrupt_before=["tools"]).played()
    clock.now += days * 86_400
    scene.agent.update_state(CONFIG, None, as_node="model")
    await scene.go_on()
    await scene.go_on()
    assert scene.ran == ["search"] * 2
    assert counts(store) == {f"search:global::86400:{20454 + days}": 2}


@pytest.mark.parametrize("of", ["search", "model"])
@pytest.mark.parametrize("heard", [True, False], ids=["heard", "not heard"])
@pytest.mark.parametrize("then", ["a new turn", "resumed", "on another thread"])
@scenes.either
async def test_cancelled_while_asking(
    *, heard: bool, of: str, then: str, kind: Any, signals: Signals
) -> None:
    """A run cancelled while it asks the store leaves no charge, once the next call has asked."""
    store = SlowStore(MemoryStore(), heard=heard)
    limit = per_user(of)
    scene = Scene(signals, asking("search"), [limit], kind=kind, store=store, context=ANN)
    await cancel_at(store.reached, scene.play())
    assert sum(counts(store).values()) == int(heard)
    if then == "on another thread":
        scene.context, scene.thread_id = {"user_id": "bob"}, "thread-2"
    await (scene.go_on() if then == "resumed" else scene.play())
    assert scene.ran == ["search"]
    user = scene.context["user_id"]
    ran = 1 if of == "search" else 2
    assert counts(store) == {f"{of}:user_id:{user}": ran}
    assert scene.metric(limit.name, "allowed") == ran
    check_history(scene.state()["messages"])
    # What was under way then comes too late.
    kept = counts(store)
    with pytest.raises(QuotaStoreError, match="corrected before it arrived"):
        store.kept.acquire(store.asked[0])
    assert counts(store) == kept


@scenes.orders(2)
@scenes.either
async def test_beside_a_drop_in_that_raises(order: Any, kind: Any, signals: Signals) -> None:
    """What was charged before it raised stays charged."""
    store = MemoryStore()
    drop_in = tool_limiter(signals, "search", run_limit=1, exit_behavior="error")
    items: list[Any] = scenes.in_order(order, per_user("search"), drop_in)
    scene = Scene(signals, TWICE, items, kind=kind, store=store, context=ANN)
    with pytest.raises(ToolCallLimitExceededError):
        await scene.play()
    scene.model.script = asking("search")
    await scene.play()
    # The last of the list checks first; the inline one checks before all others.
    charged = 2 if kind == "inline" or order == (1, 0) else 0
    assert counts(store) == {SEARCHES: charged + 1}


async def test_cancelled_while_refunding(signals: Signals) -> None:
    """What was decided is seen though the run is cancelled then; resumed, it is seen once."""
    store = UnsureStore()
    store.happens, store.lost = asyncio.Event().wait, 2
    items = tool_limiter(signals, "search", run_limit=1), quota(signals, per_user(), store=store)
    scene = Scene(signals, TWICE, items, context=ANN)
    running = asyncio.create_task(scene.play())
    await until(lambda: store.lost == 0)
    running.cancel()
    await asyncio.wait([running])
    assert scene.calls("blocked", "search") == 1
    await scene.go_on()
    assert (counts(store), scene.calls("blocked", "search")) == ({SEARCHES: 1}, 1)


class Second(QuotaMiddleware[Any, Any]):
    """A second middleware of an agent, told apart by its class."""


@pytest.mark.parametrize("outage", ["block", "allow"])
async def test_a_store_that_goes_down_between_two(outage: Any, signals: Signals) -> None:
    """Two middlewares with one store charge a call once, also if only the first one reaches it."""
    store = FickleStore(MemoryStore())
    options: Any = {"store": store, "on_store_error": outage}
    first, limit = quota(signals, per_user("search"), **options), per_user("search", 5)
    second = Second([limit], telemetry=signals.telemetry, **options)
    up = [store]

    @after_model
    def goes_down(state: Any, runtime: Any) -> None:
        while up:
            up.pop().down = True

    scene = await Scene(signals, TWICE, [second, goes_down, first], context=ANN).played()
    assert scene.ran == (["search"] * 2 if outage == "allow" else [])
    store.down = False
    scene.model.script = asking("search")
    await scene.play()
    assert counts(store) == {SEARCHES: len(scene.ran)}


async def test_two_stores_in_one_agent(signals: Signals) -> None:
    """A second store in one agent is refused at the first run: a charge names none of both."""
    limits = [per_user("search", 3)]
    first, other = quota(signals, *limits, store=MemoryStore()), MemoryStore()
    second = Second(limits, store=other, telemetry=signals.telemetry)
    for items in ([first, second], [second, first]):
        scene = Scene(signals, TWICE, items, context=ANN)
        with pytest.raises(RuntimeError, match="of this agent have two stores: give them the same"):
            await scene.play()
        assert scene.ran == []
    # The same store twice, beside a middleware without one, is as good as one middleware.
    third = quota(signals, per_user("search"), store=other)
    stack: list[Any] = [second, tool_limiter(signals, run_limit=9), third]
    for each in (stack, stack[::-1]):
        other.reset([SEARCHES])
        scene = Scene(signals, TWICE, each, context=ANN)
        for _ in range(3):
            await scene.play()
        assert scene.ran == ["search"] * 3
        assert counts(other) == {SEARCHES: 3}


@pytest.mark.filterwarnings("ignore:HumanInTheLoopMiddleware is listed")
async def test_a_resume_in_another_process(signals: Signals) -> None:
    """A drop-in that goes on where the other's store is not found leaves a blocked call charged."""
    store, people = MemoryStore(), HumanInTheLoopMiddleware[Any, Any]({"search": True})
    items: list[Any] = [tool_limiter(signals, "search", run_limit=1), people]
    scene = Scene(signals, TWICE, [*items, quota(signals, per_user(), store=store)], context=ANN)
    await scene.play()
    scene = Scene(signals, TWICE, items, context=ANN, checkpointer=scene.agent.checkpointer)
    gc.collect()
    await scene.resume({"decisions": [{"type": "approve"}] * 2})
    assert (scene.ran, counts(store)) == (["search"], {SEARCHES: 2})
