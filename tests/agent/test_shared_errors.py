"""Agents whose store fails: refused, unanswered, lost on the way; and what is counted then."""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import (
    ModelCallLimit,
    ModelCallLimitExceededError,
    Outcome,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from langchain_quota.messages import SKIPPED
from langchain_quota.quotas import Quota
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.stores.redis import RedisStore
from langchain_quota.testing import captured_decisions
from tests.scene import ANN, Form, Scene, asking, both_forms, texts
from tests.signals import Signals
from tests.stores import FickleStore, counts, quota

DEADLINE = 60
"""Seconds after which a run is taken to hang: its store's timeout is a small part of it."""

SEARCHES = "search:user_id:ann"
MODEL_CALLS = "model:user_id:ann"
THREAD = "search:thread:thread-1"
UNCHECKED = (
    "Tool call limit could not be checked, so the call of 'search' was not run. Try again later."
)

outages = pytest.mark.parametrize("on_store_error", ["deny", "allow"])


@pytest.fixture
def nobody() -> Iterator[RedisStore]:
    """A store on a port that no server listens on; the port is taken, so no other server can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield RedisStore(f"redis://:secret@127.0.0.1:{taken.getsockname()[1]}/0")


@pytest.fixture
def silence() -> Iterator[RedisStore]:
    """A store on a port whose server never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield RedisStore(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", timeout=0.2)


def per_user(kind: str = "tool", limit: int = 9, **options: Any) -> Limit:
    options = {"quotas": [Quota(limit, per="user_id")], **options}
    return ToolCallLimit("search", **options) if kind == "tool" else ModelCallLimit(**options)


def scene_of(
    signals: Signals,
    script: Any,
    *limits: Limit,
    store: Any,
    saver: InMemorySaver | None = None,
    form: Form = "async",
    **options: Any,
) -> Scene:
    scene = Scene(
        signals,
        script,
        [quota(signals, *limits, store=store, **options)],
        checkpointer=saver or InMemorySaver(),
        form=form,
    )
    scene.context = ANN
    return scene


def failures(signals: Signals) -> float | None:
    return signals.value(
        "langchain_quota_errors_total", component="store", error_type="QuotaStoreError"
    )


def asked(signals: Signals, outcome: str) -> float | None:
    name = "langchain_quota_store_seconds_count"
    return signals.value(name, operation="acquire", outcome=outcome)


@pytest.mark.parametrize("exit_behavior", ["continue", "end", "error"])
async def test_denied_tool_calls(exit_behavior: Any, nobody: RedisStore, signals: Signals) -> None:
    """With nobody to ask, calls are refused as their limit says, with the scope `store`."""
    limit = per_user(thread_limit=9, exit_behavior=exit_behavior)
    scene = scene_of(signals, asking("search", "search", "calc"), limit, store=nobody)

    with captured_decisions() as decisions:
        if exit_behavior == "error":
            with pytest.raises(ToolCallLimitExceededError, match="could not be checked") as caught:
                await scene.play()
            assert caught.value.decision is not None
            assert caught.value.decision.leading is not None
            assert caught.value.decision.leading.reason == "store"
            assert caught.value.decision.resets_at is None
        else:
            result = await scene.play()
            assert sorted(texts(result)) == sorted(
                [UNCHECKED, UNCHECKED, "calc ran" if exit_behavior == "continue" else SKIPPED]
            )
            assert result["messages"][-1].content == (
                "done" if exit_behavior == "continue" else UNCHECKED
            )

    # What no shared limit counts runs, unless its batch is stopped.
    assert scene.ran == (["calc"] if exit_behavior == "continue" else [])
    refused = [each for each in decisions if each.outcome is Outcome.BLOCKED]
    assert [each.leading and each.leading.reason for each in refused] == ["store"] * 2
    assert scene.metric("tool:search", "blocked", "store") == 2
    assert scene.metric("tool:search", "blocked", "user_id") == 0
    assert scene.metric("tool:search", "blocked", "thread") == 0
    assert scene.metric("tool:search", "allowed") == 0
    assert scene.fallbacks("deny") == 2
    assert scene.fallbacks("allow") == 0
    assert (failures(signals), asked(signals, "error"), asked(signals, "ok")) == (1, 1, 0)
    scene.check(answered=exit_behavior != "error")


@pytest.mark.parametrize("exit_behavior", ["end", "error", "finalize"])
async def test_denied_model_calls(exit_behavior: Any, nobody: RedisStore, signals: Signals) -> None:
    """With nobody to ask, the model is not called, and the run ends as the limit says."""
    limit = per_user("model", exit_behavior=exit_behavior)
    scene = scene_of(signals, asking("search"), limit, store=nobody)
    says = "Model call limit could not be checked: try again later."

    if exit_behavior == "error":
        with pytest.raises(ModelCallLimitExceededError) as caught:
            await scene.play()
        assert str(caught.value) == says
        assert caught.value.decision is not None
        assert caught.value.decision.leading is not None
        assert caught.value.decision.leading.reason == "store"
    else:
        result = await scene.play()
        assert result["messages"][-1].content == says

    assert scene.model.calls == ()
    assert scene.metric("model", "blocked", "store") == 1
    assert scene.fallbacks("deny") == 1


async def test_allowed_calls(nobody: RedisStore, signals: Signals) -> None:
    """Allowed without the store, thread and run limits hold by the state; quotas do not."""
    limits = [
        per_user(limit=0, thread_limit=5, run_limit=3),
        per_user("model", limit=0, thread_limit=9),
    ]
    scene = scene_of(
        signals,
        asking("search", "search", "search", "search"),
        *limits,
        store=nobody,
        on_store_error="allow",
    )

    await scene.play()
    assert scene.ran == ["search"] * 3
    await scene.play()

    assert scene.ran == ["search"] * 5
    assert scene.metric("tool:search", "blocked", "run") == 1
    assert scene.metric("tool:search", "blocked", "thread") == 2
    assert scene.metric("tool:search", "blocked", "store") == 0
    assert scene.fallbacks("allow") == 4 + 4 + 4  # tool calls of both turns, and model calls
    assert scene.fallbacks("deny") == 0
    scene.check()


@both_forms
@outages
async def test_a_store_that_is_silent(
    form: Form, on_store_error: Any, silence: RedisStore, signals: Signals
) -> None:
    """A server that does not answer holds a run up for its timeout, and no longer."""
    scene = scene_of(
        signals,
        asking("search"),
        per_user(),
        store=silence,
        on_store_error=on_store_error,
        form=form,
    )

    async with asyncio.timeout(DEADLINE):
        await scene.play()

    assert scene.ran == (["search"] if on_store_error == "allow" else [])
    assert (asked(signals, "timeout"), asked(signals, "error")) == (1, 0)
    assert scene.fallbacks(on_store_error) == 1


def logged(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in each.getMessage() for each in caplog.records)


@outages
async def test_one_line_for_each_outage(
    on_store_error: Any, signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """An outage is logged once, however many calls it meets, and once when it is over."""
    caplog.set_level(logging.INFO, logger="langchain_quota")
    store = FickleStore(MemoryStore())
    scene = scene_of(
        signals,
        asking("search"),
        per_user(limit=99),
        per_user("model", limit=99),
        store=store,
        on_store_error=on_store_error,
    )
    seen: list[tuple[int, int]] = []

    for down in (False, True, True, False, False, True, False):
        store.down = down
        await scene.play(thread_id=f"thread-{len(seen)}")
        seen.append((logged(caplog, "store of"), logged(caplog, "works again")))

    assert seen == [(0, 0), (1, 0), (1, 0), (2, 1), (2, 1), (3, 1), (4, 2)]
    failed = asked(signals, "error")
    assert failed is not None
    assert failures(signals) == failed >= 3


@both_forms
@outages
@pytest.mark.parametrize("hears", [True, False], ids=["answers lost", "not heard"])
async def test_counts_after_an_outage(
    form: Form, on_store_error: Any, *, hears: bool, signals: Signals
) -> None:
    """When the store is back, it counts what ran and nothing else, heard of or not."""
    store = FickleStore(MemoryStore())
    store.hears = hears
    limits = [per_user(limit=99, thread_limit=99), per_user("model", limit=99)]
    scene = scene_of(
        signals,
        asking("search", "calc"),
        *limits,
        store=store,
        on_store_error=on_store_error,
        form=form,
    )

    for down in (False, True, True, False, True, False):
        store.down = down
        await scene.play()

    searches, models = sum(each == "search" for each in scene.ran), len(scene.model.calls)
    assert (searches, models) == ((3, 6) if on_store_error == "deny" else (6, 12))
    assert counts(store) == {SEARCHES: searches, THREAD: searches, MODEL_CALLS: models}
    scene.check()


@outages
async def test_the_middle_of_a_run(on_store_error: Any, signals: Signals) -> None:
    """A store that fails in mid-run and comes back in it: the run goes on, the counts are right."""
    store = FickleStore(MemoryStore())
    answers = iter([["search"], ["search", "search"], ["search"], "done"])
    downs = iter([False, True, False, False])

    def script(_: Any) -> Any:
        store.down = next(downs)
        return next(answers)

    scene = scene_of(
        signals, script, per_user(thread_limit=9), store=store, on_store_error=on_store_error
    )

    result = await scene.play()

    assert result["messages"][-1].content == "done"
    assert scene.ran == ["search"] * (4 if on_store_error == "allow" else 2)
    assert counts(store) == {SEARCHES: len(scene.ran), THREAD: len(scene.ran)}
    scene.check()


async def test_many_runs_in_one_outage(signals: Signals, caplog: pytest.LogCaptureFixture) -> None:
    """Many threads run in one outage: one log line, and the store gets every call later."""
    store = FickleStore(MemoryStore())
    store.down = True
    scene = scene_of(
        signals,
        asking("search"),
        per_user(limit=999),
        store=store,
        on_store_error="allow",
    )

    async def run(number: int) -> None:
        await scene.agent.ainvoke(
            {"messages": [("user", "hi")]},
            {"configurable": {"thread_id": f"thread-{number}"}},
            context=ANN,
        )

    await asyncio.gather(*map(run, range(40)))
    store.down = False
    # A few corrections go with each request.
    for number in range(8):
        await run(1000 + number)

    assert logged(caplog, "store of") == 2  # failed, and works again
    assert scene.ran == ["search"] * 48
    assert counts(store) == {SEARCHES: 48}


class BrokenStore(MemoryStore):
    """Raises what no store should."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        super().__init__()
        self._error = error

    def acquire(self, request: Any) -> Any:
        raise self._error()

    async def aacquire(self, request: Any) -> Any:
        raise self._error()


@both_forms
async def test_a_wrong_use_is_told(form: Form, signals: Signals) -> None:
    """A store that is used as it cannot be says so to the caller: that is no outage."""
    store = BrokenStore(lambda: TypeError("a client of redis.asyncio serves no sync calls"))
    scene = scene_of(signals, asking("search"), per_user(), store=store, form=form)

    with pytest.raises(TypeError, match="serves no sync calls"):
        await scene.play()
    with suppress(TypeError):
        await scene.play()

    assert scene.ran == []
    assert scene.fallbacks("deny") is None
