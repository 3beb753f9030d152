"""Charges that a shared store takes back: calls that others refuse, edit or answer do not count."""

from typing import Any

import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import ToolCall
from pydantic import BaseModel

from langchain_quota import (
    ModelCallLimit,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from langchain_quota.quotas import Quota
from langchain_quota.stores.memory import MemoryStore
from tests.agent.conftest import Order, in_order, orders
from tests.agent.rules import CONFIG, Middleware, check_history, recording, tool_limiter
from tests.agent.shared import ANN, FickleStore, SharedScene, asking, counts, quota
from tests.signals import Signals

SEARCHES = "search:user_id:ann"
CALCS = "calc:user_id:ann"
MODEL_CALLS = "model:user_id:ann"


def per_user(tool: str, limit: int = 9, **options: Any) -> ToolCallLimit:
    return ToolCallLimit(tool, quotas=[Quota(limit, per="user_id")], **options)


def scene_of(signals: Signals, script: Any, *middleware: Middleware) -> SharedScene:
    scene = SharedScene(signals, script, middleware)
    scene.context = ANN
    return scene


def call(tool: str, call_id: str) -> ToolCall:
    return ToolCall(name=tool, args={}, id=call_id, type="tool_call")


@orders(2)
@pytest.mark.parametrize("exit_behavior", ["continue", "end", "error"])
@pytest.mark.parametrize("settles", ["tool", "model"])
async def test_beside_a_drop_in(
    order: Order, exit_behavior: Any, settles: str, signals: Signals
) -> None:
    """What a drop-in beside it refuses is taken back, by the next hook that asks the store."""
    store = MemoryStore()
    limits: list[Limit] = [per_user("search"), per_user("calc")]
    if settles == "model":
        limits.append(ModelCallLimit(quotas=[Quota(99, per="user_id")]))
    drop_in: Middleware = tool_limiter(
        signals, "search", run_limit=1, exit_behavior=exit_behavior, limit_name="drop-in"
    )
    middleware: Middleware = quota(signals, *limits, store=store)
    scene = scene_of(
        signals, asking("search", "search", "calc"), *in_order(order, middleware, drop_in)
    )

    if exit_behavior == "error":
        with pytest.raises(ToolCallLimitExceededError):
            await scene.turn()
    else:
        await scene.turn()
    scene.model.script = asking("calc") if settles == "tool" else lambda messages: "done"
    await scene.turn()

    ran = sum(each == "search" for each in scene.ran)
    assert ran == (1 if exit_behavior == "continue" else 0)
    kept = counts(store)
    assert kept.pop(SEARCHES, 0) == ran
    assert kept.pop(CALCS, 0) == sum(each == "calc" for each in scene.ran)
    assert kept.pop(MODEL_CALLS, len(scene.model.calls)) == len(scene.model.calls)
    assert kept == {}
    assert scene.state()["langchain_quota"].get("pending_refunds", {}) == {}
    scene.check()


@orders(2)
async def test_beside_a_limit_of_the_same_name(order: Order, signals: Signals) -> None:
    """What an `error` of another limit of the same name stopped is taken back from the store."""
    store = MemoryStore()
    scene = scene_of(
        signals,
        [["search", "search"], ["search"], "done"],
        *in_order(
            order,
            quota(signals, per_user("search"), store=store),
            tool_limiter(signals, "search", run_limit=1, exit_behavior="error"),
        ),
    )

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    await scene.turn()

    assert scene.ran == ["search"]
    assert counts(store) == {SEARCHES: 1}
    assert scene.state()["thread_tool_call_count"] == {"search": 1}


async def test_a_store_that_is_down_when_it_is_owed(signals: Signals) -> None:
    """A refund waits in the thread until the store is back."""
    store = FickleStore(MemoryStore())
    drop_in: Middleware = tool_limiter(signals, "search", run_limit=1, limit_name="drop-in")
    scene = scene_of(
        signals,
        asking("search", "search"),
        drop_in,
        quota(signals, per_user("search"), store=store),
    )
    await scene.turn()
    assert counts(store) == {SEARCHES: 2}
    store.down = True
    await scene.turn()
    assert counts(store) == {SEARCHES: 2}
    store.down = False

    await scene.turn()
    # The refund of the second search of this turn is pending now.
    assert counts(store) == {SEARCHES: 3}
    scene.model.script = asking("search")
    await scene.turn()

    assert scene.ran == ["search"] * 3
    assert counts(store) == {SEARCHES: 3}
    scene.check()


class Second(QuotaMiddleware[Any, Any]):
    """Another middleware of the kind in one agent."""


@orders(2)
@pytest.mark.parametrize("refused", [True, False])
async def test_two_with_one_store(order: Order, *, refused: bool, signals: Signals) -> None:
    """Two of them in one agent charge each call once to each count, and only what runs."""
    store = MemoryStore()
    first = quota(signals, per_user("search"), per_user("calc"), store=store)
    second = Second(
        [
            ToolCallLimit(
                "search",
                name="second",
                quotas=[Quota(1 if refused else 9, per="global"), Quota(9, per="user_id")],
            )
        ],
        store=store,
        telemetry=signals.telemetry,
    )
    scene = scene_of(signals, asking("search", "search", "calc"), *in_order(order, first, second))

    await scene.turn()
    # Makes the pending refund.
    scene.model.script = asking("calc")
    await scene.turn()

    searches = 1 if refused else 2
    assert sorted(scene.ran) == ["calc"] * 2 + ["search"] * searches
    assert counts(store) == {SEARCHES: searches, CALCS: 2, "search:global:": searches}
    scene.check()


def review(*kinds: str) -> dict[str, Any]:
    """A reviewer's decisions; an edited call becomes one of calc."""
    edited = {"edited_action": {"name": "calc", "args": {}}}
    return {
        "decisions": [
            {"type": kind, "message": "no", **(edited if kind == "edit" else {})} for kind in kinds
        ]
    }


@pytest.mark.parametrize("kind", ["reject", "respond", "edit"])
async def test_a_review_before_it(kind: str, signals: Signals) -> None:
    """Judged after a review: what it rejects or answers is not charged, an edit as it became."""
    store = MemoryStore()
    scene = scene_of(
        signals,
        asking("search", "search"),
        quota(signals, per_user("search"), per_user("calc"), store=store),
        HumanInTheLoopMiddleware({"search": True}),
    )

    await scene.turn()
    assert counts(store) == {}
    await scene.resume(review("approve", kind))

    assert sorted(scene.ran) == (["calc", "search"] if kind == "edit" else ["search"])
    assert counts(store) == {SEARCHES: 1} | ({CALCS: 1} if kind == "edit" else {})
    scene.check()


async def test_a_review_behind_it(signals: Signals) -> None:
    """Judged before a review, what was admitted stays charged while a person thinks, and after."""
    store = MemoryStore()
    scene = scene_of(
        signals,
        asking("search", "search", "search"),
        HumanInTheLoopMiddleware({"search": True}),
        quota(signals, per_user("search", 2), store=store),
    )

    await scene.turn()
    assert counts(store) == {SEARCHES: 2}
    await scene.resume(review("approve", "approve", "approve"))

    assert scene.ran == ["search"] * 2
    assert counts(store) == {SEARCHES: 2}
    check_history(scene.state()["messages"])


@orders(2)
async def test_an_abandoned_review(order: Order, signals: Signals) -> None:
    """A batch that a review never let through is charged as little in the store as in the state."""
    store = MemoryStore()
    review_first: Middleware = HumanInTheLoopMiddleware({"search": True})
    middleware: Middleware = quota(
        signals,
        ToolCallLimit("search", thread_limit=9, quotas=[Quota(9, per="user_id")]),
        store=store,
    )
    scene = scene_of(
        signals, asking("search", "search"), *in_order(order, middleware, review_first)
    )

    await scene.turn()
    scene.model.script = asking("search")
    await scene.turn()
    await scene.resume(review("approve"))

    assert scene.ran == ["search"]
    kept = scene.state()["thread_tool_call_count"]["search"]
    assert counts(store) == {SEARCHES: kept, "search:thread:thread-1": kept}
    # Behind the review nothing was charged; before it, nothing tells it from a crashed tool.
    assert kept == (1 if order == (0, 1) else 3)


async def test_a_stopped_batch_between_two(signals: Signals) -> None:
    """A batch that one limit stops is charged to none of them, whatever they admitted."""
    store = MemoryStore()
    scene = scene_of(
        signals,
        asking("search", "calc"),
        quota(
            signals,
            per_user("search", 0, exit_behavior="end"),
            per_user("calc"),
            ToolCallLimit(thread_limit=9),
            store=store,
        ),
    )

    await scene.turn()

    assert scene.ran == []
    assert counts(store) == {}
    scene.check()


@pytest.mark.parametrize("limit", [1, 2])
async def test_duplicate_ids(limit: int, signals: Signals) -> None:
    """Calls of one id are one: all run, each charged, or none does and nothing is charged."""
    store = MemoryStore()
    scene = scene_of(
        signals,
        asking(call("search", "same"), call("search", "same"), call("search", "other")),
        quota(signals, per_user("search", limit), store=store),
    )

    await scene.turn()

    assert scene.state()["thread_tool_call_count"]["search"] == limit
    assert counts(store) == {SEARCHES: limit}
    assert scene.metric("tool:search", "allowed") == limit
    assert scene.ran == (["search"] if limit == 1 else ["search"] * 2)


async def test_an_id_used_again(signals: Signals) -> None:
    """A model that gives every call of every message one id: each message's is charged."""
    store = MemoryStore()
    scene = scene_of(
        signals,
        [[call("search", "same")], [call("search", "same")], "done"] * 2,
        quota(signals, per_user("search", 3), store=store),
    )

    await scene.turn()
    await scene.turn()

    assert scene.ran == ["search"] * 3
    assert counts(store) == {SEARCHES: 3}
    scene.check()


async def test_duplicate_ids_that_a_drop_in_refuses(signals: Signals) -> None:
    """Calls of one id that another limiter refuses are taken back together."""
    store = MemoryStore()
    drop_in: Middleware = tool_limiter(signals, "search", run_limit=1, limit_name="drop-in")
    scene = scene_of(
        signals,
        [[call("search", "same"), call("search", "same")], "done", ["search"], "done"],
        drop_in,
        quota(signals, per_user("search"), store=store),
    )

    await scene.turn()
    assert scene.ran == []
    await scene.turn()

    assert scene.ran == ["search"]
    assert counts(store) == {SEARCHES: 1}
    scene.check()


class Weather(BaseModel):
    """The weather."""

    degrees: int


@pytest.mark.parametrize("exit_behavior", ["continue", "end", "error"])
async def test_structured_output(exit_behavior: Any, signals: Signals) -> None:
    """The call that delivers a structured answer is not charged; one beside it does not run."""
    store = MemoryStore()
    scene = SharedScene(
        signals,
        [["search"], ["search", ("Weather", {"degrees": 20})]],
        [
            quota(
                signals,
                per_user("search", 1, exit_behavior=exit_behavior),
                per_user("Weather", 0, exit_behavior=exit_behavior),
                store=store,
            )
        ],
        response_format=ToolStrategy(Weather),
    )

    result = await scene.turn(context=ANN)

    assert result["structured_response"] == Weather(degrees=20)
    assert scene.ran == ["search"]
    assert counts(store) == {SEARCHES: 1}
    scene.check()


def crash() -> None:
    raise ConnectionAbortedError


async def test_a_tool_that_crashed(signals: Signals) -> None:
    """A tool that crashed had started: it stays charged, in store and state."""
    store = MemoryStore()
    limit = ToolCallLimit(thread_limit=9, quotas=[Quota(9, per="user_id")])
    ran: list[str] = []
    scene = SharedScene(
        signals,
        asking("flaky"),
        [quota(signals, limit, store=store)],
        tools=[recording("flaky", ran, crash), "calc"],
    )

    with pytest.raises(ConnectionAbortedError):
        await scene.turn(context=ANN)
    with pytest.raises(ConnectionAbortedError):
        await scene.go_on()
    scene.model.script = asking("calc")
    await scene.turn()

    assert scene.ran == ["calc"]
    assert counts(store) == {"__all__:user_id:ann": 2, "__all__:thread:thread-1": 2}
    assert scene.state()["thread_tool_call_count"] == {"__all__": 2}


async def test_an_abandoned_batch_that_a_drop_in_held(signals: Signals) -> None:
    """A batch that another limiter's error stopped never started: the next turn takes it back."""
    store = MemoryStore()
    drop_in: Middleware = tool_limiter(signals, "calc", run_limit=0, exit_behavior="error")
    limit = ToolCallLimit(thread_limit=9, quotas=[Quota(9, per="user_id")])
    scene = scene_of(
        signals, asking("search", "search", "calc"), drop_in, quota(signals, limit, store=store)
    )

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    assert counts(store) == {"__all__:user_id:ann": 3, "__all__:thread:thread-1": 3}
    scene.model.script = asking("search")
    await scene.turn()

    assert scene.ran == ["search"]
    assert counts(store) == {"__all__:user_id:ann": 1, "__all__:thread:thread-1": 1}
    scene.check()


@orders(2)
async def test_a_drop_in_while_the_store_is_down(order: Order, signals: Signals) -> None:
    """A call that an outage admits and another limit refuses never reaches the store."""
    store = FickleStore(MemoryStore())
    store.down = True
    drop_in: Middleware = tool_limiter(signals, "search", run_limit=1, limit_name="drop-in")
    middleware: Middleware = quota(signals, per_user("search"), store=store, on_store_error="allow")
    scene = scene_of(signals, asking("search", "search"), *in_order(order, middleware, drop_in))

    await scene.turn()
    store.down = False
    scene.model.script = asking("search")
    await scene.turn()

    assert scene.ran == ["search"] * 2
    assert counts(store) == {SEARCHES: 2}
    scene.check()


async def test_judged_again_while_the_store_is_down(signals: Signals) -> None:
    """A batch that the store has charged, and that is judged again without it, is charged once."""
    store = FickleStore(MemoryStore())
    scene = SharedScene(
        signals,
        asking("search", "search"),
        [quota(signals, per_user("search"), store=store, on_store_error="allow")],
        interrupt_before=["tools"],
    )
    await scene.turn(context=ANN)
    store.down = True
    scene.agent.update_state(CONFIG, None, as_node="model")
    await scene.go_on()
    await scene.go_on()
    store.down = False
    await scene.turn()
    await scene.go_on()

    assert scene.ran == ["search"] * 4
    assert counts(store) == {SEARCHES: 4}
