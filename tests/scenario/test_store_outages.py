"""Agents whose store fails: refused, unanswered, lost on the way; and what is counted then."""

import asyncio
import logging
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Quota,
    RedisStore,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from tests.scene import ANN, SKIPPED, Form, Scene, asking, both_forms, texts
from tests.stores import FickleStore, counts
from tests.telemetry import Signals

THREAD = "search:thread:thread-1"
UNCHECKED = "Tool call limit could not be checked, so the call was not run. Try again later."

outages = pytest.mark.parametrize("outage", ["block", "allow"])


@pytest.fixture(autouse=True)
def _only_calls_carry_corrections(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine, too, no correction is sent behind the calls of a test."""
    monkeypatch.setattr("langchain_quota.middleware.store_client._FIRST", 3600.0)


@pytest.fixture
def nobody() -> Iterator[RedisStore]:
    """A store on a port that no server listens on; the port is taken, so no other server can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield RedisStore(f"redis://:secret@127.0.0.1:{taken.getsockname()[1]}/0")


def per_user(kind: str = "tool", limit: int = 99, **options: Any) -> Limit:
    options = {"quotas": [Quota(limit, per="user_id")], **options}
    if kind == "tool":
        return ToolCallLimit("search", **options)
    return ModelCallLimit(**options) if kind == "model" else TokenLimit(**options)


def scene_of(
    signals: Signals, script: Any, *limits: Limit, outage: Any = "block", **options: Any
) -> Scene:
    return Scene(signals, script, limits, on_store_error=outage, context=ANN, **options)


def asked(signals: Signals, outcome: str, operation: str = "acquire") -> float:
    name = "langchain_quota_store_seconds_count"
    return sum(signals.samples(name, operation=operation, outcome=outcome).values())


@pytest.mark.parametrize("exit_behavior", ["continue", "end", "error"])
async def test_denied_tool_calls(
    exit_behavior: Any, nobody: RedisStore, signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """With nobody to ask, calls are refused as their limit says, with the scope `store`."""
    limit = per_user(thread_limit=9, exit_behavior=exit_behavior)
    scene = scene_of(signals, asking("search", "search", "calc"), limit, store=nobody)
    if exit_behavior == "error":
        with pytest.raises(ToolCallLimitExceededError, match="could not be checked") as caught:
            await scene.play()
        assert caught.value.decision is not None
        assert caught.value.decision.resets_at is None
    else:
        result = await scene.play()
        beside = "calc ran" if exit_behavior == "continue" else SKIPPED
        assert sorted(texts(result)) == sorted([UNCHECKED, UNCHECKED, beside])
        assert scene.last_text() == ("done" if exit_behavior == "continue" else UNCHECKED)
    # What no shared limit counts runs, unless its batch is stopped.
    assert scene.ran == (["calc"] if exit_behavior == "continue" else [])
    refused = [each for each in scene.decisions if each.outcome == "blocked"]
    assert [each.leading and each.leading.reason for each in refused] == ["store"] * 2
    assert all(each.leading and each.leading.shared for each in refused)
    blocked = [scene.metric("tool:search", "blocked", of) for of in ("store", "user_id", "thread")]
    # Of a used-up limit there is nothing to say: the calls alone are counted.
    assert blocked == [0, 0, 0]
    assert signals.samples("langchain_quota_thread_blocked_total") == {}
    assert scene.calls("blocked", "search") == 2
    assert scene.metric("tool:search", "allowed") == 0
    assert (scene.fallbacks("block"), scene.fallbacks("allow")) == (2, 0)
    assert (
        signals.errors("store", "QuotaStoreError"),
        asked(signals, "error"),
        asked(signals, "ok"),
    ) == (1, 1, 0)
    assert "store of langchain-quota failed" in caplog.text
    assert "secret" not in caplog.text
    assert "Traceback" not in caplog.text
    scene.check(answered=exit_behavior != "error")


@pytest.mark.parametrize("exit_behavior", ["end", "error", "finalize"])
@pytest.mark.parametrize("of", ["model", "token"])
async def test_denied_model_calls(
    exit_behavior: Any, of: str, nobody: RedisStore, signals: Signals
) -> None:
    """With nobody to ask, the model is not called, and the run ends as the limit says."""
    keep = {"keep": 9} if (of, exit_behavior) == ("token", "finalize") else {}
    limit = per_user(of, exit_behavior=exit_behavior, name="model", **keep)
    scene = scene_of(signals, asking("search"), limit, store=nobody)
    says = f"{of.title()}{' call' * (of == 'model')} limit could not be checked: try again later."
    if exit_behavior == "error":
        with pytest.raises(ModelCallLimitExceededError, match=says):
            await scene.play()
    else:
        await scene.play()
        assert scene.last_text() == says
    assert scene.model.calls == ()
    assert (scene.calls("blocked"), scene.metric("model", "blocked", "store")) == (1, 0)
    assert scene.fallbacks("block") == 1


@both_forms
async def test_a_store_that_is_silent(form: Form, signals: Signals) -> None:
    """A server that does not answer holds a run up for its timeout, and no longer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silence = RedisStore(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", timeout=0.2)
        options: dict[str, Any] = {"store": silence, "outage": "allow", "form": form}
        scene = scene_of(signals, asking("search"), per_user(), **options)
        async with asyncio.timeout(60):  # the store's timeout is a small part of it
            await scene.play()
    assert scene.ran == ["search"]
    assert (asked(signals, "timeout"), asked(signals, "error")) == (1, 0)
    assert scene.fallbacks("allow") == 1


def logged(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize("reads", [False, True])
@outages
async def test_one_line_for_each_outage(
    outage: Any, signals: Signals, caplog: pytest.LogCaptureFixture, *, reads: bool
) -> None:
    """It is logged once when it begins and ends, whatever it meets, and if reads work on."""
    caplog.set_level(logging.INFO, logger="langchain_quota")
    store: Any = FickleStore(MemoryStore())
    if reads:
        store.peek = store.kept.peek
    limits, given = (per_user(), per_user("model")), {"store": store, "outage": outage}
    given["tell_model"] = True
    scenes = [scene_of(signals, asking("search"), *limits, **given) for _ in range(3)]
    seen: list[tuple[int, int]] = []
    for down in (False, True, True, False, False, True, False):
        store.down = down
        for scene in scenes:
            await scene.play(thread_id=f"thread-{len(seen)}")
        seen.append((logged(caplog, "store of"), logged(caplog, "works again")))
    assert seen == [(0, 0), (1, 0), (1, 0), (2, 1), (2, 1), (3, 1), (4, 2)]
    failed = asked(signals, "error")
    assert failed is not None
    failed += asked(signals, "error", "peek")
    assert signals.errors("store", "QuotaStoreError") == failed >= 3


async def test_a_thread_that_ran_in_an_outage(signals: Signals) -> None:
    """All that ran of a thread goes ahead of its next call, the oldest first, and once."""
    store = FickleStore(MemoryStore())
    limit = ToolCallLimit("search", thread_limit=99)
    scene = scene_of(signals, asking("search"), limit, store=store, outage="allow")
    store.down = True
    for _ in range(12):
        await scene.play()
    store.down = False
    store.asked.clear()
    await scene.play()
    carried = [[each.starts[THREAD] for each in one.corrections] for one in store.asked]
    assert carried == [[*range(5)], [*range(5, 10)], [10, 11]]
    # The thread's state has the count, too: a full store may drop it.
    assert all(THREAD in each.mirrored for one in store.asked for each in one.corrections)
    assert [bool(each.demands) for each in store.asked] == [False, False, True]
    assert counts(store) == {THREAD: len(scene.ran)}
    scene.check()


class BrokenStore(MemoryStore):
    """Raises what no store should, or leaves out what refuses the calls."""

    error: type[Exception] | None

    def acquire(self, request: Any) -> Any:
        if self.error:
            raise self.error("no use")
        return super().acquire(request)._replace(refused=())


@outages
@pytest.mark.parametrize("error", [ConnectionError, TimeoutError, None])
async def test_a_store_with_a_bug(outage: Any, error: Any, signals: Signals) -> None:
    """Whatever fails in a store, it has not answered: the agent goes on, the kind is counted."""
    store = BrokenStore()
    store.error = error
    scene = scene_of(signals, asking("search"), per_user(), store=store, outage=outage)
    await scene.play()
    assert scene.ran == ["search"] * (outage == "allow")
    assert signals.errors("store", error.__name__ if error else "QuotaStoreError") == 1


@pytest.mark.parametrize("error", [KeyError, TypeError, AttributeError])
async def test_a_bug_is_no_outage(
    error: type[Exception], signals: Signals, monkeypatch: pytest.MonkeyPatch, nobody: RedisStore
) -> None:
    """A bug in the code of a store ends the run: as an outage it would switch the quota off."""

    def buggy(*_: object) -> None:
        raise error("no use")

    broken = BrokenStore()
    broken.error = error
    monkeypatch.setattr("langchain_quota.stores.redis.write_acquire", buggy)
    for store in (broken, nobody):
        scene = scene_of(signals, asking("search"), per_user(), store=store, outage="allow")
        with pytest.raises(error, match="no use"):
            await scene.play()
        assert signals.samples("langchain_quota_errors_total") == {}
        assert (scene.ran, scene.fallbacks("allow") or 0) == ([], 0)


async def test_what_waits_costs_other_requests_nothing(signals: Signals) -> None:
    """A request looks at the corrections of its own keys, however many others wait."""

    async def steps(waiting: int) -> int:
        store = FickleStore(MemoryStore())
        limit = per_user(limit=999)
        scene = scene_of(signals, asking("search"), limit, store=store, outage="allow")
        store.down, found = True, 0
        for number in range(waiting):
            await scene.play(context={"user_id": f"user-{number}"}, thread_id=number)

        def count(frame: Any, event: str, _: object) -> None:
            nonlocal found
            found += event == "call" and frame.f_code.co_filename.endswith("corrections.py")

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            await scene.play(context={"user_id": "ada"}, thread_id="one more")
        finally:
            sys.setprofile(before)
        return found

    assert await steps(10) == await steps(60)


async def test_the_advice_is_logged(signals: Signals, caplog: pytest.LogCaptureFixture) -> None:
    """A long text of a client does not push out of the log what helps against the failure."""
    # The line of one that is reachable by nobody: its name, and what the client says, are long.
    store = RedisStore(f"unix:///{'a-long-directory/' * 9}redis.sock", prefix="p" * 64)
    await scene_of(signals, asking("search"), per_user(), store=store).play()
    (line,) = (each.getMessage() for each in caplog.records if "failed" in each.getMessage())
    assert "check that Redis runs there and that the URL is right)" in line
    assert "a-long-directory/redis.sock" in line
