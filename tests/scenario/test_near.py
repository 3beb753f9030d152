"""Who is told before a limit is reached: the log, the stream and `on_near`, each share once."""

import asyncio
import logging
from threading import Event
from typing import Any

import pytest
from langchain.agents.middleware import wrap_model_call

from langchain_quota import MemoryStore, ModelCallLimit, Quota, TokenLimit, ToolCallLimit
from tests.forked import run_python
from tests.scene import ANN, Form, Kind, Scene, both_forms, each_kind, searching, until
from tests.scene import tool_limiter as drop_in
from tests.stores import DAY, Clock, FickleStore, UnsureStore
from tests.telemetry import Signals, paid, telling

MOST_WAITING = 100
"""How many events wait for a function that is slow."""
SHARES = (0.5, 0.8, 0.95)


def limited(quota: Quota, near: Any = SHARES) -> ToolCallLimit:
    return ToolCallLimit("search", quotas=[quota], near=near)


def per_user(most: int, near: Any = SHARES) -> ToolCallLimit:
    return limited(Quota(most, per="user_id", window=DAY), near)


class Watched(Scene):
    """An agent that searches, and notes whom it is told of, and how much they have used."""

    def __init__(
        self, signals: Signals, *limits: Any, script: Any = searching, **options: Any
    ) -> None:
        self.noted = list[tuple[str | None, float | None]]()
        options = {"on_near": self.note, "context": ANN, **options}
        super().__init__(signals, script, limits, **options)

    def note(self, event: Any) -> None:
        assert event["langchain_quota_event"] == "near"
        self.noted.append((event["subject"], event["used"]))

    async def told(self, *expected: tuple[str | None, float]) -> None:
        await until(lambda: len(self.noted) >= len(expected))
        assert self.noted == [*expected]


@each_kind
async def test_a_customer_is_told_of_in_time(kind: Kind, signals: Signals) -> None:
    """A customer's quota is told at each share, once, though threads and agents share it."""
    options: Any = {"kind": kind, "store": MemoryStore()}
    first = Watched(signals, per_user(20), **options)
    second = Watched(signals, per_user(20), on_near=first.note, **options)
    for number in range(5):
        await first.play("2", thread_id=f"first {number}")
        await second.play("2", thread_id=f"second {number}")
    await first.told(("ann", 10), ("ann", 16), ("ann", 20))
    await first.play("2")
    first.check_requests()
    assert len(first.noted) == 3
    crossings = {"agent": "unnamed", "limit": "tool:search", "scope": "user_id"}
    name = "langchain_quota_crossings_total"
    assert signals.value(name, level="near", **crossings) == 3
    assert signals.value(name, level="exhausted", **crossings) == 1


async def test_only_what_is_used_is_told(signals: Signals) -> None:
    """A reserve that comes near is nothing to tell of: it is mostly given back."""
    store, seen = MemoryStore(), list[Any]()
    first, second = (
        TokenLimit(quotas=[Quota(100, per="user_id")], reserve=reserve, near=SHARES)
        for reserve in (30, 60)
    )
    # Another call holds the rest while this one is charged.
    other = Watched(signals, second, script=[paid(45)], store=store, thread_id="2")

    @wrap_model_call
    async def meanwhile(request: Any, handler: Any) -> Any:
        seen.append(store.usages()[0].used)
        await other.play()
        return await handler(request)

    options: Any = {"store": store, "on_near": other.note}
    await Watched(signals, first, meanwhile, script=[paid(10)], **options).play()
    assert seen == [30]
    await other.told(("ann", 55))


@pytest.mark.parametrize("how", ["reset", "window", "grant"])
async def test_it_is_told_again(how: str, signals: Signals) -> None:
    """A reset, a new window and a grant let a share be used again: then it is told again."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    scene = Watched(signals, per_user(20), store=store)
    await scene.play("12")
    (usage,) = store.usages()
    if how == "reset":
        store.reset([usage.key])
    elif how == "grant":
        store.grant(usage.key, 20)
    else:
        clock.now += 24 * 3600
    await scene.play("7")
    await scene.play("4")
    await scene.told(("ann", 12), ("ann", 23 if how == "grant" else 11))


@both_forms
async def test_a_thread_without_a_store(form: Form, signals: Signals) -> None:
    """The thread's state knows what was told, also of a call that was refunded; a reset ends it."""
    limit = ToolCallLimit("search", thread_limit=4, near=(0.5, 1))
    scene = Watched(signals, drop_in(telling(), "search", run_limit=1), limit, form=form)
    # Hooks after the model run in reverse: what the drop-in blocks was charged before.
    await scene.play("2")
    assert scene.used(limit) == (1, 1)
    await scene.told(("thread-1", 2))
    await scene.play("1")
    assert scene.used(limit) == (2, 1)
    await scene.play("1")
    await scene.reset()
    assert len(scene.noted) == 1
    await scene.play("2")
    await scene.told(("thread-1", 2), ("thread-1", 2))


async def test_a_jump_over_several_shares(signals: Signals) -> None:
    """Whoever uses several shares at once is told of once; a smaller share is not told later."""
    limits = TokenLimit(thread_limit=100, near=SHARES), ModelCallLimit(run_limit=9)
    scene = Watched(signals, *limits, script=[paid(90), paid(6)])
    await scene.play()
    await scene.play()
    await scene.told(("thread-1", 90), ("thread-1", 96))


async def test_one_share_and_none(signals: Signals) -> None:
    """Limits with one share, or that of the telemetry, are told once, too; dry runs are not."""
    limits = [
        ToolCallLimit("search", run_limit=5, near=0.4),
        ToolCallLimit("calc", run_limit=5),
        ToolCallLimit(run_limit=9, enforce=False, near=SHARES),
    ]
    scene = Watched(signals, *limits, script=[*[["search", "calc"]] * 4, "done"])
    await scene.play()
    await scene.told((None, 2), (None, 4))


async def test_a_webhook_that_hangs(signals: Signals) -> None:
    """It holds up no run; what waits behind it is bounded, and what is dropped is counted."""
    began, released = Event(), Event()

    def hang(event: Any) -> None:
        began.set()
        released.wait()
        scene.note(event)

    limit = ToolCallLimit("search", run_limit=2, near=SHARES)
    scene = Watched(signals, limit, on_near=hang, thread_id=None, checkpointer=None)
    await scene.play("1")
    await asyncio.to_thread(began.wait)
    for _ in range(MOST_WAITING + 2):
        await scene.play("1")
    assert signals.errors("observer", "Full") == 2
    released.set()
    await until(lambda: len(scene.noted) == MOST_WAITING + 1)


@both_forms
async def test_functions_that_are_async_or_fail(form: Form, signals: Signals) -> None:
    """An async function is awaited, in sync runs, too; what it raises is counted, and no more."""

    async def tell(event: Any) -> None:
        await asyncio.sleep(0)
        scene.note(event)
        raise ConnectionError

    limit = ToolCallLimit("search", run_limit=2, near=(0.5, 1.0))
    scene = Watched(signals, limit, form=form, on_near=tell)
    await scene.play("1")
    await scene.told((None, 1))
    await until(lambda: signals.errors("observer", "ConnectionError") == 1)


async def test_log_and_stream(caplog: pytest.LogCaptureFixture) -> None:
    """Without a function, the log and the stream are told at each share, with the subject."""
    signals = telling(subject_label={"user_id": str})
    options: Any = {"store": MemoryStore(), "stream_events": True, "on_near": None}
    scene = Watched(signals, per_user(4, (0.5, 0.75)), **options)
    with caplog.at_level(logging.INFO, "langchain_quota"):
        for number in "21":
            for event in await scene.updates({"messages": [("user", number)]}, "custom"):
                scene.note(event)
    await scene.told(("ann", 2), ("ann", 3))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition("thread-1', ")[2] for line in lines if "near" in line] == [
        "2 of 4 (quota 'user_id' of 'ann')",
        "3 of 4 (quota 'user_id' of 'ann')",
    ]


async def test_a_store_of_the_users_own(signals: Signals) -> None:
    """A store that marks nothing has the call that crosses a share tell of it, in each window."""
    clock = Clock()
    store = FickleStore(MemoryStore(clock=clock))
    of_thread = Quota(4, per="thread", window=DAY)
    for limit, who in ((per_user(4, (0.5, 1)), "ann"), (limited(of_thread, (0.5, 1)), "thread-1")):
        scene = Watched(signals, limit, store=store)
        await scene.play("3")
        await scene.play("1")
        clock.now += 24 * 3600
        await scene.play("2")
        await scene.told((who, 2), (who, 4), (who, 2))


async def test_an_outage(signals: Signals) -> None:
    """While the store is unavailable nothing is told; the next call tells what was missed."""
    store = UnsureStore()
    scene = Watched(signals, per_user(4, (0.5,)), store=store, on_store_error="allow")
    for store.down in (False, True, False):
        await scene.play("1")
    await scene.told(("ann", 3))


@pytest.mark.rest
@pytest.mark.parametrize("where", ["run", "start"], ids=["here", "in a child"])
def test_the_process_ends(where: str) -> None:
    """A process that ends waits for what was told last, but not for a function that hangs."""
    program = """
import multiprocessing, threading, time
from langchain.agents import create_agent
from langchain_quota import QuotaMiddleware, ModelCallLimit
from langchain_quota.testing import ScriptedChatModel
def tell(event):
    time.sleep(0.2)
    print("told", event["used"], flush=True)
    threading.Event().wait()
def job():
    told = [QuotaMiddleware([ModelCallLimit(run_limit=1)], on_near=tell)]
    create_agent(ScriptedChatModel(script=["Hello."]), middleware=told).invoke({"messages": "hi"})
process = multiprocessing.get_context("fork").Process(target=job)
"""
    assert run_python(f"{program}process.{where}()").stdout == "told 1\n"
