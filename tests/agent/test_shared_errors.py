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
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limits import Limit
from langchain_quota.messages import SKIPPED
from langchain_quota.quotas import Quota
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.stores.redis import RedisStore
from langchain_quota.testing import captured_decisions
from tests.agent.conftest import Form, both_forms
from tests.agent.rules import CONFIG
from tests.agent.shared import ANN, FickleStore, SharedScene, asking, counts, quota, texts
from tests.signals import Signals

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
) -> SharedScene:
    scene = SharedScene(
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
                await scene.turn()
            assert caught.value.decision is not None
            assert caught.value.decision.leading is not None
            assert caught.value.decision.leading.reason == "store"
            assert caught.value.decision.resets_at is None
        else:
            result = await scene.turn()
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
            await scene.turn()
        assert str(caught.value) == says
        assert caught.value.decision is not None
        assert caught.value.decision.leading is not None
        assert caught.value.decision.leading.reason == "store"
    else:
        result = await scene.turn()
        assert result["messages"][-1].content == says

    assert scene.model.calls == ()
    assert scene.metric("model", "blocked", "store") == 1
    assert scene.fallbacks("deny") == 1


@pytest.mark.parametrize("exit_behavior", ["continue", "end"])
async def test_a_call_that_two_limits_deny(
    exit_behavior: Any, nobody: RedisStore, signals: Signals
) -> None:
    """With nobody to ask, the model reads once that the call was not run; own words stay."""
    quotas = [Quota(9, per="user_id")]
    limits = [
        ToolCallLimit(quotas=quotas, exit_behavior=exit_behavior, name="all tools"),
        per_user(exit_behavior=exit_behavior, name="searches"),
        ToolCallLimit("search", quotas=quotas, message="Ask the desk.", name="desk"),
    ]
    scene = scene_of(signals, asking("search"), *limits, store=nobody)

    result = await scene.turn()

    (text,) = texts(result)
    assert text == f"{UNCHECKED} Ask the desk."
    if exit_behavior == "end":
        assert str(result["messages"][-1].content).count("could not be checked") == 1
    assert scene.ran == []


async def test_a_model_call_that_two_limits_deny(nobody: RedisStore, signals: Signals) -> None:
    """With nobody to ask, the last message says once that the model was not called."""
    tokens = TokenLimit(quotas=[Quota(9, per="user_id")])
    scene = scene_of(signals, asking("search"), per_user("model"), tokens, store=nobody)

    result = await scene.turn()

    says = "Model call limit could not be checked: try again later."
    assert result["messages"][-1].content == says
    assert scene.model.calls == ()


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

    await scene.turn()
    assert scene.ran == ["search"] * 3
    await scene.turn()

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
        await scene.turn()

    assert scene.ran == (["search"] if on_store_error == "allow" else [])
    assert (asked(signals, "timeout"), asked(signals, "error")) == (1, 0)
    assert scene.fallbacks(on_store_error) == 1


async def test_credentials_are_not_logged(
    nobody: RedisStore, signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """The log of an outage says what failed, without the store's password."""
    scene = scene_of(signals, asking("search"), per_user(), store=nobody)

    await scene.turn()

    assert "store of langchain-quota failed" in caplog.text
    assert "secret" not in caplog.text


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
        await scene.turn(thread_id=f"thread-{len(seen)}")
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
        await scene.turn()

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

    result = await scene.turn()

    assert result["messages"][-1].content == "done"
    assert scene.ran == ["search"] * (4 if on_store_error == "allow" else 2)
    assert counts(store) == {SEARCHES: len(scene.ran), THREAD: len(scene.ran)}
    scene.check()


@outages
async def test_a_limit_that_is_tried_out(on_store_error: Any, signals: Signals) -> None:
    """A limit that is not enforced refuses nothing for want of a store; what ran is counted."""
    store = FickleStore(MemoryStore())
    store.down = True
    scene = scene_of(
        signals,
        asking("search", "search"),
        per_user(enforce=False),
        store=store,
        on_store_error=on_store_error,
    )

    await scene.turn()
    store.down = False
    await scene.turn(thread_id="thread-2")

    assert scene.ran == ["search"] * 4
    assert counts(store) == {SEARCHES: 4}
    denied = on_store_error == "deny"
    assert scene.metric("tool:search", "would_block", "store") == (2 if denied else 0)


async def test_a_thread_that_the_store_does_not_know(signals: Signals) -> None:
    """Allowed while the store is down, a thread from before it keeps the count in its state."""
    saver = InMemorySaver()
    limit = ToolCallLimit("search", thread_limit=3)
    before = scene_of(signals, asking("search", "search"), limit, store=None, saver=saver)
    await before.turn()
    store = FickleStore(MemoryStore())
    store.down = True
    scene = scene_of(
        signals,
        asking("search"),
        limit,
        store=store,
        saver=saver,
        on_store_error="allow",
    )
    await scene.turn()
    assert scene.ran == ["search"]

    store.down = False
    await scene.turn()

    assert scene.ran == ["search"]
    assert counts(store) == {THREAD: 3}


async def test_a_store_that_forgot_all(signals: Signals) -> None:
    """A store that comes back empty, as Redis without persistence: threads keep their counts."""
    store = FickleStore(MemoryStore())
    limit = ToolCallLimit("search", thread_limit=4)
    scene = scene_of(
        signals, asking("search", "search"), limit, store=store, on_store_error="allow"
    )
    await scene.turn()
    store.down = True
    scene.model.script = asking("search")
    await scene.turn()
    store.down = False
    store.kept = MemoryStore()
    scene.model.script = asking("search", "search")
    await scene.turn()

    assert scene.ran == ["search"] * 4
    assert counts(store) == {THREAD: 4}


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


@both_forms
async def test_a_reset_while_the_store_is_down(form: Form, signals: Signals) -> None:
    """A reset that the store does not hear of fails as a whole, and is made when it is back."""
    store = FickleStore(MemoryStore())
    middleware = quota(signals, ToolCallLimit("search", thread_limit=2), store=store)
    scene = SharedScene(signals, asking("search", "search"), [middleware], form=form)
    await scene.turn()
    store.down = True

    async def reset() -> None:
        if form == "sync":
            middleware.reset(scene.agent, CONFIG)  # type: ignore[arg-type]
        else:
            await middleware.areset(scene.agent, CONFIG)  # type: ignore[arg-type]

    with pytest.raises(QuotaStoreError, match="the store is down"):
        await reset()
    assert scene.state()["thread_tool_call_count"] == {"search": 2}
    store.down = False
    await reset()

    assert scene.state()["thread_tool_call_count"] == {}
    assert counts(store) == {}


class BrokenStore(MemoryStore):
    """Raises what no store should."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        super().__init__()
        self._error = error

    def acquire(self, request: Any) -> Any:
        raise self._error()

    async def aacquire(self, request: Any) -> Any:
        raise self._error()


@outages
@pytest.mark.parametrize("error", [KeyError, OSError, TimeoutError, ZeroDivisionError])
async def test_a_store_with_a_bug(
    on_store_error: Any, error: type[Exception], signals: Signals
) -> None:
    """Whatever a store raises, it has not answered: the agent goes on, and the kind is counted."""
    scene = scene_of(
        signals,
        asking("search"),
        per_user(),
        store=BrokenStore(error),
        on_store_error=on_store_error,
    )

    await scene.turn()

    assert scene.ran == (["search"] if on_store_error == "allow" else [])
    labels = {"component": "store", "error_type": error.__name__}
    assert signals.value("langchain_quota_errors_total", **labels) == 1


@both_forms
async def test_a_wrong_use_is_told(form: Form, signals: Signals) -> None:
    """A store that is used as it cannot be says so to the caller: that is no outage."""
    store = BrokenStore(lambda: TypeError("a client of redis.asyncio serves no sync calls"))
    scene = scene_of(signals, asking("search"), per_user(), store=store, form=form)

    with pytest.raises(TypeError, match="serves no sync calls"):
        await scene.turn()
    with suppress(TypeError):
        await scene.turn()

    assert scene.ran == []
    assert scene.fallbacks("deny") is None
