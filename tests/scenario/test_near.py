"""Who is told before a limit is reached: the log, the stream and `on_near`, each share once."""

import asyncio
import logging
from threading import Event
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware

from langchain_quota import MemoryStore, ModelCallLimit, Quota, TokenLimit, ToolCallLimit
from langchain_quota.core.admission import AcquireRequest, AcquireResult
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limits import Limit
from tests.forked import run_python
from tests.scene import (
    ANN,
    Form,
    Kind,
    Scene,
    both_forms,
    each_kind,
    searching,
    tool_limiter,
    until,
)
from tests.stores import DAY, Clock, FickleStore
from tests.telemetry import Signals, paid, telling

MOST_WAITING = 100
"""How many events wait for a function that is slow."""
SHARES = (0.5, 0.8, 0.95)
OF_ANN = Quota(20, per="user_id", window=DAY)


class Webhook(list[tuple[str | None, float | None]]):
    """Notes whom it is told of, and how much they have used."""

    def __call__(self, event: Any) -> None:
        assert event["langchain_quota_event"] == "near"
        self.append((event["subject"], event["used"]))


async def told(webhook: Webhook, *expected: tuple[str | None, float]) -> None:
    await until(lambda: len(webhook) >= len(expected))
    assert webhook == [*expected]


@each_kind
async def test_a_customer_is_told_of_in_time(kind: Kind, signals: Signals) -> None:
    """A customer's quota is told at each share, once, though threads and agents share it."""
    webhook, store = Webhook(), MemoryStore()
    limits = [ToolCallLimit("search", quotas=[OF_ANN], near=SHARES)]
    options: Any = {"kind": kind, "store": store, "context": ANN, "on_near": webhook}
    scenes = [Scene(signals, searching, limits, **options) for _ in range(2)]
    for number in range(10):
        await scenes[number % 2].play("2", thread_id=number)
    await told(webhook, ("ann", 10), ("ann", 16), ("ann", 20))
    await scenes[0].play("2")
    scenes[0].check_requests()
    assert len(webhook) == 3
    crossings = {"agent": "unnamed", "limit": "tool:search", "scope": "user_id"}
    name = "langchain_quota_crossings_total"
    assert signals.value(name, level="near", **crossings) == 3
    assert signals.value(name, level="exhausted", **crossings) == 1


async def test_only_what_is_used_is_told(signals: Signals) -> None:
    """A reserve that comes near is nothing to tell of: it is mostly given back."""
    webhook, store, seen = Webhook(), MemoryStore(), list[Any]()
    limit = TokenLimit(quotas=[Quota(100, per="user_id")], reserve=60, near=SHARES)
    # Another call holds the rest while this one is charged.
    other = Scene(signals, [paid(45)], [limit], store=store, context=ANN, on_near=webhook)

    async def play() -> None:
        seen.append(store.usages()[0].used)
        await other.play(thread_id="2")

    class Meanwhile(AgentMiddleware[Any, Any]):
        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            await play()
            return await handler(request)

    first = TokenLimit(quotas=[Quota(100, per="user_id")], reserve=30, near=SHARES)
    options: Any = {"store": store, "context": ANN, "on_near": webhook}
    await Scene(signals, [paid(10)], [first, Meanwhile()], **options).play()
    assert seen == [30]
    await told(webhook, ("ann", 55))


@pytest.mark.parametrize("how", ["reset", "window", "grant"])
async def test_it_is_told_again(how: str, signals: Signals) -> None:
    """A reset, a new window and a grant let a share be used again: then it is told again."""
    webhook, clock = Webhook(), Clock()
    store = MemoryStore(clock=clock)
    limit = ToolCallLimit("search", quotas=[OF_ANN], near=SHARES)
    scene = Scene(signals, searching, [limit], store=store, context=ANN, on_near=webhook)
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
    await told(webhook, ("ann", 12), ("ann", 23 if how == "grant" else 11))


@both_forms
async def test_a_thread_without_a_store(form: Form, signals: Signals) -> None:
    """The thread's state knows what was told, also of a call that was refunded; a reset ends it."""
    webhook = Webhook()

    limits = [ToolCallLimit("search", thread_limit=4, near=(0.5, 1))]
    later = tool_limiter(telling(), "search", run_limit=1)
    scene = Scene(signals, searching, [later, *limits], form=form, on_near=webhook)
    # Hooks after the model run in reverse: what the drop-in blocks was charged before.
    await scene.play("2")
    assert scene.used(limits[0]) == (1, 1)
    await told(webhook, ("thread-1", 2))
    await scene.play("1")
    assert scene.used(limits[0]) == (2, 1)
    await scene.play("1")
    await scene.reset()
    assert len(webhook) == 1
    await scene.play("2")
    await told(webhook, ("thread-1", 2), ("thread-1", 2))


async def test_a_jump_over_several_shares(signals: Signals) -> None:
    """Whoever uses several shares at once is told of once; a smaller share is not told later."""
    webhook = Webhook()
    limits: list[Limit] = [TokenLimit(thread_limit=100, near=SHARES), ModelCallLimit(run_limit=9)]
    scene = Scene(signals, [paid(90), paid(6)], limits, on_near=webhook)
    await scene.play()
    await scene.play()
    await told(webhook, ("thread-1", 90), ("thread-1", 96))


async def test_one_share_and_none(signals: Signals) -> None:
    """Limits with one share, or that of the telemetry, are told once, too; dry runs are not."""
    webhook = Webhook()
    limits = [
        ToolCallLimit("search", run_limit=5, near=0.4),
        ToolCallLimit("calc", run_limit=5),
        ToolCallLimit(run_limit=9, enforce=False, near=SHARES),
    ]
    script = [["search", "calc"]] * 4
    await Scene(signals, [*script, "done"], limits, on_near=webhook).play()
    await told(webhook, (None, 2), (None, 4))


async def test_a_webhook_that_hangs(signals: Signals) -> None:
    """It holds up no run; what waits behind it is bounded, and what is dropped is counted."""
    began, released, webhook = Event(), Event(), Webhook()

    def hang(event: Any) -> None:
        began.set()
        released.wait()
        webhook(event)

    limits = [ToolCallLimit("search", run_limit=2, near=SHARES)]
    scene = Scene(signals, searching, limits, on_near=hang, thread_id=None, checkpointer=None)
    await scene.play("1")
    await asyncio.to_thread(began.wait)
    for _ in range(MOST_WAITING + 2):
        await scene.play("1")
    errors = {"component": "observer", "error_type": "Full"}
    assert signals.value("langchain_quota_errors_total", **errors) == 2
    released.set()
    await until(lambda: len(webhook) == MOST_WAITING + 1)


async def test_functions_that_are_async_or_fail(signals: Signals) -> None:
    """An async function is awaited, in sync runs, too; what it raises is counted, and no more."""
    webhook = Webhook()

    async def tell(event: Any) -> None:
        await asyncio.sleep(0)
        webhook(event)
        raise ConnectionError

    limits = [ToolCallLimit("search", run_limit=2, near=(0.5, 1.0))]
    await Scene(signals, searching, limits, form="sync", on_near=tell).play("1")
    await Scene(signals, searching, limits, on_near=tell).play("1")
    await told(webhook, (None, 1), (None, 1))
    errors = {"component": "observer", "error_type": "ConnectionError"}
    await until(lambda: signals.value("langchain_quota_errors_total", **errors) == 2)


async def test_log_and_stream(caplog: pytest.LogCaptureFixture) -> None:
    """Without a function, the log and the stream are told at each share, with the subject."""
    signals = telling(subject_label={"user_id": str})
    limits = [ToolCallLimit("search", quotas=[Quota(4, per="user_id")], near=(0.5, 0.75))]
    options: Any = {"store": MemoryStore(), "context": ANN, "stream_events": True}
    scene = Scene(signals, searching, limits, **options)
    with caplog.at_level(logging.INFO, "langchain_quota"):
        asked = [{"messages": [("user", number)]} for number in "21"]
        events = [each for given in asked for each in await scene.updates(given, "custom")]
    seen = [(each["langchain_quota_event"], each["subject"], each["used"]) for each in events]
    assert seen == [("near", "ann", 2), ("near", "ann", 3)]
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition("thread-1', ")[2] for line in lines if "near" in line] == [
        "2 of 4 (quota 'user_id' of 'ann')",
        "3 of 4 (quota 'user_id' of 'ann')",
    ]


class Broken(MemoryStore):
    """A store that fails while it is down."""

    down = False

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        if self.down:
            raise QuotaStoreError("down")
        return self.acquire(request)


async def test_a_store_of_the_users_own(signals: Signals) -> None:
    """A store that marks nothing has the call that crosses a share tell of it."""
    webhook, store = Webhook(), FickleStore(MemoryStore())
    limit = ToolCallLimit("search", quotas=[Quota(4, per="user_id")], near=(0.5, 1))
    scene = Scene(signals, searching, [limit], on_near=webhook, store=store, context=ANN)
    await scene.play("3")
    await scene.play("1")
    await told(webhook, ("ann", 2), ("ann", 4))


async def test_an_outage(signals: Signals) -> None:
    """While the store is unavailable nothing is told; the next call tells what was missed."""
    webhook, store = Webhook(), Broken()
    limit = ToolCallLimit("search", quotas=[Quota(4, per="user_id")], near=(0.5,))
    options: Any = {"store": store, "context": ANN, "on_store_error": "allow"}
    scene = Scene(signals, searching, [limit], on_near=webhook, **options)
    await scene.play("1")
    store.down = True
    await scene.play("1")
    store.down = False
    await scene.play("1")
    await told(webhook, ("ann", 3))


def test_the_process_ends() -> None:
    """A process that ends waits for what was told last, but not for a function that hangs."""
    program = """
import threading, time
from langchain.agents import create_agent
from langchain_quota import QuotaMiddleware, ModelCallLimit
from langchain_quota.testing import ScriptedChatModel

def tell(event):
    time.sleep(0.2)
    print("told", event["used"], flush=True)
    threading.Event().wait()

quota = QuotaMiddleware([ModelCallLimit(run_limit=1)], on_near=tell)
agent = create_agent(ScriptedChatModel(script=["Hello."]), middleware=[quota])
agent.invoke({"messages": [("user", "hi")]})
"""
    assert run_python(program).stdout == "told 1\n"
