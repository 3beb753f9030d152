"""Thread limits in a store: concurrent runs of a thread, its state beside it, agents inside it."""

from collections import Counter
from typing import Any

import pytest

from langchain_quota import ModelCallLimit, ToolCallLimit, usage
from langchain_quota.limits import Limit
from langchain_quota.quotas import Quota
from langchain_quota.stores.memory import MemoryStore
from tests.scene import ANN, CONFIG, Form, Scene, asking, both_forms
from tests.signals import Signals
from tests.stores import DAY, TODAY, counts, quota


def scene_of(
    signals: Signals,
    script: Any,
    *limits: Limit,
    store: Any = None,
    form: Form = "async",
    **options: Any,
) -> Scene:
    return Scene(signals, script, [quota(signals, *limits, store=store)], **options, form=form)


OF_THREADS = {
    "thread limit": ToolCallLimit("search", thread_limit=2),
    "quota": ToolCallLimit("search", quotas=[Quota(2)]),
    "both": ToolCallLimit("search", thread_limit=9, quotas=[Quota(2, name="total")]),
    "model": ModelCallLimit(quotas=[Quota(3)], exit_behavior="end"),
}
"""Limits that allow a thread two tool calls, or three model calls."""


def called(scene: Scene, limit: Limit) -> int:
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
            await scene.play(thread_id=thread)
            calls, budget = (2, 3) if limit.kind == "model" else (1, 2)
            left = budget - turns * calls
            assert called(scene, limit) - before == max(0, min(calls, left)), (thread, turns)

    assert store.occupancy == (3, 3, 3)
    assert signals.value("langchain_quota_errors_total", component="store") is None


async def test_threads_without_a_state_are_kept(signals: Signals) -> None:
    """What only the store has is not dropped: what needs more room is refused, as in an outage."""
    limit = ToolCallLimit("search", thread_limit=3)
    scene = scene_of(
        signals, asking("search"), limit, store=MemoryStore(max_keys=2), checkpointer=None
    )
    for thread in ("one", "two", "three"):
        await scene.play(thread_id=thread)
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
    scene = Scene(signals, asking("search", "search", "calc"), [middleware], form=form)
    await scene.play(context=ANN, thread_id="thread-2")
    await scene.play(thread_id="thread-1")
    await scene.play()
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
    await scene.play()
    assert Counter(scene.ran) == {"search": 5, "calc": 3}  # of five searches a user has no more
    assert counts(store)["search:thread:thread-1"] == 1
