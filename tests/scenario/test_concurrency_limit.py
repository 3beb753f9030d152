"""Caps on calls at once, through real agents: nobody is over, nobody is stuck, all is visible."""

import asyncio
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import cycle
from typing import Any

import anyio
import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import AIMessage, ToolCall
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.types import interrupt

from langchain_quota import (
    ConcurrencyLimit,
    Decision,
    MemoryStore,
    Quota,
    QuotaMiddleware,
    RepeatLimit,
    TimeLimit,
    ToolCallLimit,
)
from tests.scene import ANN, PATIENCE, Kind, Scene, asking, either, recording, texts, until
from tests.stores import Clock, DistantStore, FickleStore, counts
from tests.telemetry import Signals, per_call

CAP = 3
SLOT_LEASE = 60
"""How long a place is held without a renewal, in seconds."""
BUSY = "other calls were running, and at most 1 call of 'browser' may run at the same time"
ASKED: Any = {"messages": [("user", "hi")]}
BROWSER = {"agent": "unnamed", "limit": "concurrency:browser"}
WAITS = "langchain_quota_wait_seconds"
ONE_OR_NONE = ConcurrencyLimit("browser", max_concurrency=1, wait=0)


def tool(run: Any, arun: Any = None) -> BaseTool:
    return StructuredTool.from_function(run, arun, name="browser", description="See a page.")


class Browser:
    """Notes how many calls run at once. If not `ends`, they wait for a test or to be `full`."""

    def __init__(self, *, ends: bool = True, full: int = 0, is_sync: bool = False) -> None:
        self._lock, self._full = threading.Lock(), full
        self.running = self.most = self.ran = 0
        self.may_end = threading.Event()
        if ends:
            self.may_end.set()
        self.tool = tool(self.open, None if is_sync else self.aopen)

    def _count(self, change: int) -> None:
        with self._lock:
            self.running += change
            self.ran += change > 0
            self.most = max(self.most, self.running)
            if self.running == self._full:
                self.may_end.set()

    def open(self) -> str:
        self._count(1)
        try:
            assert self.may_end.wait(PATIENCE)
        finally:
            self._count(-1)
        return "seen"

    async def aopen(self) -> str:
        self._count(1)
        try:
            await until(self.may_end.is_set)
            await asyncio.sleep(0.01 if self._full else 0.001)
        finally:
            self._count(-1)
        return "seen"


def agent_of(
    signals: Signals, tool: Any, calls: int = 1, *, most: int = 1, wait: Any = PATIENCE, **own: Any
) -> Any:
    """An agent that opens pages, by default one at a time."""
    limit = ConcurrencyLimit("browser", max_concurrency=most, wait=wait)
    script = [["browser"] * calls, "done"]
    options: Any = {"tools": [tool], "checkpointer": None, **own}
    return Scene(signals, script, [limit], **options).agent


def has_room(signals: Signals) -> bool:
    """Whether a page may be opened now, if no other one is open."""
    return texts(agent_of(signals, Browser().tool, wait=0).invoke(ASKED)) == ["seen"]


@contextmanager
def busy(signals: Signals) -> Iterator[None]:
    """Another agent's page is open."""
    browser = Browser(ends=False)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(agent_of(signals, browser.tool).invoke, ASKED)
        while not browser.running:
            pass
        try:
            yield
        finally:
            browser.may_end.set()


@pytest.fixture(autouse=True)
def _nothing_is_left(signals: Signals) -> Iterator[None]:
    """No test leaves a place of this process taken."""
    yield
    assert has_room(signals)


def test_threads_and_loops_share_a_cap(signals: Signals) -> None:
    """Sync agents in 8 threads and async agents in 3 event loops: never more than 3, all run."""
    browser = Browser()
    # LangChain switches warnings off while a tool is made: not safe in several threads.
    agents = [agent_of(signals, browser.tool, 2, most=CAP) for _ in range(32)]

    async def loop(own: list[Any]) -> list[str]:
        results = await asyncio.gather(*(each.ainvoke(ASKED) for each in own))
        return [said for each in results for said in texts(each)]

    with ThreadPoolExecutor(11) as threads:
        loops = [threads.submit(asyncio.run, loop(agents[n : n + 8])) for n in (0, 8, 16)]
        runs = [threads.submit(each.invoke, ASKED) for each in agents[24:]]
        assert all(each.result(PATIENCE) == ["seen"] * 16 for each in loops)
        assert all(texts(each.result(PATIENCE)) == ["seen"] * 2 for each in runs)
    assert (browser.most <= CAP, browser.ran) == (True, 64)
    assert signals.value(f"{WAITS}_count", **BROWSER, decision="allowed") == 64
    assert (signals.value(f"{WAITS}_sum", **BROWSER, decision="allowed") or 0) > 0


@either
async def test_who_waits_in_vain_is_refused(signals: Signals, kind: Kind) -> None:
    """A call that may not run in time is answered, seen by all who look on, and given back."""
    seen: list[Decision] = []
    store, browser = MemoryStore(), Browser()
    limits: list[Any] = [
        ONE_OR_NONE,
        ToolCallLimit("browser", quotas=[Quota(2, per="global")]),
        ToolCallLimit("browser", name="thread", thread_limit=2),
    ]
    script = [["browser", "browser"], ["browser"], "done", ["browser"], "done"]
    options: dict[str, Any] = {"kind": kind, "store": store, "on_decision": seen.append}
    scene = await Scene(signals, script, limits, tools=[browser.tool], **options).played()
    assert browser.ran == 2
    assert [BUSY in each for each in texts(scene.result)] == [False, True, False]
    (refusal,) = [each for each in seen if each.outcome == "blocked"]
    (status,) = refusal.refused_by
    count: Any = status.count_of(status.refusal_scope)
    assert (count.scope, count.used, count.limit) == ("concurrency", 2, 1)
    assert scene.metric("concurrency:browser", "blocked", "concurrency") == 1
    assert scene.metric("tool:browser", "refunded") == 1
    assert signals.value(f"{WAITS}_count", **BROWSER, decision="blocked") == 1
    assert counts(store) == {"browser:global:": 2, "browser:thread:thread-1": 2}
    # A new run finds both used up: neither more nor less.
    assert "limit" in texts(await scene.play())[-1]
    assert (scene.usage().tools, browser.ran) == ({"browser": 2}, 2)


async def test_who_waits_in_vain_without_a_store_stays_charged(signals: Signals) -> None:
    """Where the state alone counts a call, nothing is taken back because of its answer."""
    browser = Browser()
    limits: list[Any] = [ONE_OR_NONE, ToolCallLimit("browser", thread_limit=3)]
    scene = Scene(signals, asking("browser", "browser"), limits, tools=[browser.tool])
    for _ in range(2):
        await scene.play()
    assert (browser.ran, scene.usage().tools) == (2, {"browser": 3})
    assert scene.metric("tool:browser", "refunded") == 0


class Beside(QuotaMiddleware[Any, Any]):
    """A middleware without the store of another one."""


@pytest.mark.parametrize("is_beside", [False, True])
async def test_what_waits_in_vain_is_given_back_in_each_thread(
    *, is_beside: bool, signals: Signals
) -> None:
    """Calls with the ids of another thread, or run again for another user, are given back once."""
    store, browser = MemoryStore(), Browser()
    calls = [ToolCall(name="browser", args={}, id=each, type="tool_call") for each in "ab"]
    cached = AIMessage("", id="cached", tool_calls=calls)
    cap = Beside([ONE_OR_NONE], telemetry=signals.telemetry) if is_beside else ONE_OR_NONE
    items: list[Any] = [ToolCallLimit("browser", quotas=[Quota(9, per="user_id")]), cap]

    def script(messages: Any) -> Any:
        return "done" if messages[-1].type == "tool" else cached

    scene = Scene(signals, script, items, tools=[browser.tool], store=store)
    for thread in ("one", "two"):
        await scene.play(thread_id=thread, context=ANN)
    steps = [each async for each in scene.agent.aget_state_history(scene.config)]
    at = next(each.config for each in steps if each.next == ("tools", "tools"))
    with busy(signals):
        await scene.agent.ainvoke(None, at, context={"user_id": "bob"})
    assert (browser.ran, counts(store)) == (2, {"browser:user_id:ann": 2})


@pytest.mark.parametrize(
    ("kind", "ran"), [("graph", 0), ("graph", 1), pytest.param("quota", 0, marks=per_call)]
)
async def test_a_call_whose_node_runs_again(kind: Kind, ran: int, signals: Signals) -> None:
    """A call that did not run, or was only reviewed, is given back; one that ran stays charged."""
    store, browser, reviewed = MemoryStore(), Browser(), kind == "quota"
    tools = [browser.tool, recording("pause", [], lambda: interrupt("Sure?"))]
    limits: list[Any] = [ONE_OR_NONE, ToolCallLimit("browser", quotas=[Quota(9, per="global")])]
    if reviewed:
        limits.append(HumanInTheLoopMiddleware({"browser": True}, interrupt_mode="per_call"))
    script = asking("browser", *["pause"] * (not reviewed))
    scene = Scene(signals, script, limits, kind=kind, store=store, tools=tools)
    with nullcontext() if ran or reviewed else busy(signals):
        await scene.play()
    await until(lambda: has_room(signals))
    with busy(signals) if ran or reviewed else nullcontext():
        await scene.resume({"type": "approve"} if reviewed else "yes")
    assert BUSY in texts(scene.result)[0]
    assert (browser.ran, counts(store).get("browser:global:", 0)) == (ran, ran)


async def test_a_dry_run_lets_nobody_wait(signals: Signals) -> None:
    """A call that would have waited runs at once, and is measured."""
    browser = Browser(ends=False)
    limit = ConcurrencyLimit("browser", max_concurrency=1, enforce=False)
    scene = Scene(signals, [["browser"] * 3, "done"], [limit], tools=[browser.tool])
    running = asyncio.create_task(scene.play())
    await until(lambda: browser.running == 3)
    browser.may_end.set()
    assert texts(await running) == ["seen"] * 3
    for decision, calls in (("would_block", 2), ("allowed", 1)):
        assert signals.value(f"{WAITS}_count", **BROWSER, decision=decision) == calls
    assert scene.metric("concurrency:browser", "would_block", "concurrency") == 2


@pytest.mark.parametrize("urls", ["aaaa", "abcd"])
async def test_a_wait_in_vain_is_no_repetition(signals: Signals, urls: str) -> None:
    """A call that has not run is neither repeated by the next one, nor has its tool failed."""

    def browser(url: str) -> str:
        return url

    limits: list[Any] = [ONE_OR_NONE, RepeatLimit(2)]
    script = [*([("browser", {"url": url})] for url in urls), "done"]
    scene = Scene(signals, script, limits, tools=[tool(browser)])
    with busy(signals):
        result = await scene.play()
    assert [BUSY in each for each in texts(result)] == [True] * 4


class SyncTool(BaseTool):
    """A tool without an async form, which keeps what it has done."""

    name: str = "browser"
    description: str = "See a page."
    browser: Any
    calls: int = 0

    def _run(self) -> str:
        self.calls += 1
        return str(self.browser.open())


async def test_a_cancelled_run_does_not_end_its_sync_tool(signals: Signals) -> None:
    """Of 20 runs that are cancelled while their tools run in threads, never more than 2 do so."""
    browser = Browser(ends=False)
    tool = SyncTool(browser=browser)
    agents = [agent_of(signals, tool, most=2) for _ in range(20)]
    first = [asyncio.create_task(each.ainvoke(ASKED)) for each in agents[:2]]
    await until(lambda: browser.running == 2)
    others = [asyncio.create_task(each.ainvoke(ASKED)) for each in agents[2:]]
    await until(lambda: signals.value("langchain_quota_waiting_calls", **BROWSER) == 18)
    gone = [*first, *others[:9]]
    for each in gone:
        each.cancel()
    await asyncio.wait(gone)
    # Whoever came next would run now.
    assert not await asyncio.to_thread(has_room, signals)
    assert browser.running == 2
    browser.may_end.set()
    assert [texts(each) for each in await asyncio.gather(*others[9:])] == [["seen"]] * 9
    await until(lambda: not browser.running)
    assert (browser.most, browser.ran, tool.calls) == (2, 11, 11)


def test_an_event_loop_that_ends_before_the_thread_of_its_tool(signals: Signals) -> None:
    """The place is kept until the thread has ended: the loop is closed, and the run is gone."""
    browser = Browser(ends=False, is_sync=True)
    with ThreadPoolExecutor() as threads:
        loop = asyncio.new_event_loop()
        loop.set_default_executor(threads)
        run = loop.create_task(agent_of(signals, browser.tool).ainvoke(ASKED))
        loop.run_until_complete(until(lambda: browser.running == 1))
        run.cancel()
        loop.run_until_complete(asyncio.wait([run]))
        loop.close()
        assert not has_room(signals)
        browser.may_end.set()
        asyncio.run(until(lambda: has_room(signals)))
    assert browser.ran == 1


async def test_a_reader_who_hangs_up(signals: Signals) -> None:
    """A tool that LangGraph leaves running has its slot as long, and no longer than its limit."""
    browser = Browser(ends=False)
    limits: list[Any] = [ConcurrencyLimit("browser", max_concurrency=1), TimeLimit(call_limit=0.5)]
    scene = Scene(signals, asking("browser"), limits, tools=[browser.tool], checkpointer=None)

    async def read() -> None:
        async for _ in scene.agent.astream(ASKED, stream_mode="custom"):
            pass

    # As Starlette does it.
    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await until(lambda: browser.running)
        group.cancel_scope.cancel()
    await until(lambda: not browser.running)
    await until(lambda: has_room(signals))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_begins_anew(signals: Signals) -> None:
    """What runs in the parent does not run in the child, and the child's end changes nothing."""
    children: list[int] = []

    def browser() -> str:
        child = os.fork()
        if not child:
            os._exit(0 if has_room(signals) else 1)
        children.append(os.waitpid(child, 0)[1])
        return "has room" if has_room(signals) else "full"

    assert texts(agent_of(signals, tool(browser)).invoke(ASKED)) == ["full"]
    assert children == [0]


@pytest.mark.parametrize("taken", [True, False], ids=["taken by another", "free"])
async def test_a_lost_slot_is_reported(
    *, taken: bool, signals: Signals, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that stood still for longer than its lease says so when it goes on, once."""
    leases = "langchain_quota.features.concurrency.slot_leases"
    monkeypatch.setattr(f"{leases}.RENEWAL", 0.01)
    clock, browser = Clock(), Browser(ends=False)
    store = FickleStore(MemoryStore(clock=clock))
    limit = ConcurrencyLimit("browser", max_concurrency=1)
    scene = Scene(signals, asking("browser"), [limit], store=store, tools=[browser.tool])

    playing = asyncio.create_task(scene.play())
    await until(lambda: len(store.asked) > 2)
    assert signals.errors("store", "LostLeaseError") == 0
    if taken:
        # Nothing is renewed meanwhile.
        with store.kept._lock:
            clock.now += 62
            other = store.asked[-1]
            other = other._replace(idempotency_key="other", attempt_id="other", corrections=())
            assert store.kept.acquire(other).admitted == (True,)
    else:
        monkeypatch.setattr(f"{leases}.SLOT_LEASE", 0.0)
    await until(lambda: signals.errors("store", "LostLeaseError") > 0)
    before = len(store.asked)
    monkeypatch.setattr(f"{leases}.SLOT_LEASE", 60)
    await until(lambda: len(store.asked) > before + 2)
    browser.may_end.set()
    await playing
    assert signals.errors("store", "LostLeaseError") == 1 or not taken
    said = [each.getMessage() for each in caplog.records]
    (line,) = [each for each in said if "lost its slot" in each]
    assert "'browser'" in line


def taken(store: Any) -> int:
    """How many places are taken in a store."""
    return sum(each.used for each in store.usages("browser:*"))


async def test_a_call_that_runs_long_keeps_its_place(signals: Signals, monkeypatch: Any) -> None:
    """Its lease is renewed, in one request with all others of the process, until it ends."""
    monkeypatch.setattr("langchain_quota.features.concurrency.slot_leases.RENEWAL", 0.01)
    clock = Clock()
    store = FickleStore(MemoryStore(clock=clock))
    browser, in_threads = Browser(ends=False), Browser(ends=False, is_sync=True)
    tools = (in_threads.tool, in_threads.tool, browser.tool)
    agents = [agent_of(signals, each, most=CAP, store=store) for each in tools]
    runs = [
        asyncio.create_task(asyncio.to_thread(agents[0].invoke, ASKED)),
        *(asyncio.create_task(each.ainvoke(ASKED)) for each in agents[1:]),
    ]
    await until(lambda: (in_threads.running, browser.running) == (2, 1))
    runs[1].cancel()
    for _ in range(3):
        clock.now += SLOT_LEASE + 2
        # Without renewals all would be free now.
        await until(lambda: taken(store) == CAP)
    await until(lambda: len(store.asked[-1].demands) == CAP)
    browser.may_end.set()
    await until(lambda: taken(store) == CAP - 1)
    await until(lambda: len(store.asked[-1].demands) == CAP - 1)
    in_threads.may_end.set()
    await asyncio.wait(runs)
    await until(lambda: taken(store) == 0)


async def test_a_store_without_a_sync_form(signals: Signals, monkeypatch: Any) -> None:
    """Its event loop renews the leases of its calls, and a request may overtake an older one."""
    monkeypatch.setattr("langchain_quota.features.concurrency.slot_leases.RENEWAL", 0.01)
    clock, browser = Clock(), Browser(ends=False)
    store: Any = FickleStore(MemoryStore(clock=clock))
    store.forms, delays = ("async",), cycle((0.02, 0.0))

    async def aacquire(request: Any) -> Any:
        await asyncio.sleep(next(delays))
        return store.acquire(request)

    store.aacquire = aacquire
    agents = [agent_of(signals, browser.tool, most=CAP, store=store) for _ in range(CAP)]
    runs = [asyncio.create_task(each.ainvoke(ASKED)) for each in agents]
    await until(lambda: browser.running == CAP)
    for _ in range(2):
        clock.now += SLOT_LEASE + 2
        await until(lambda: taken(store) == CAP)
    browser.may_end.set()
    await asyncio.gather(*runs)
    await until(lambda: taken(store) == 0)
    # What was overtaken is no outage.
    assert signals.samples("langchain_quota_errors_total") == {}


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("seed", range(6))
async def test_cancelled_calls_leave_no_place_taken(
    signals: Signals, seed: int, *, stored: bool
) -> None:
    """Runs are cancelled while their calls wait, ask the store or run: the others all run.

    Without a store some give up. Two stores are as two processes have them.
    """
    chance = random.Random(seed)  # noqa: S311 - no secret
    browser, kept = Browser(ends=False, full=CAP), MemoryStore()
    stores = [DistantStore(kept), DistantStore(kept)] if stored else [None]
    waits = [PATIENCE] if stored else [0, 0.005, PATIENCE]
    agents = [
        agent_of(signals, browser.tool, 4, most=CAP, wait=chance.choice(waits), store=store)
        for store in stores * (12 // len(stores))
    ]
    runs = [asyncio.create_task(each.ainvoke(ASKED)) for each in agents]
    await until(lambda: browser.running)
    for run in chance.sample(runs, 8):
        await asyncio.sleep(chance.uniform(0, 0.005))
        run.cancel()
    async with asyncio.timeout(PATIENCE):
        results = await asyncio.gather(*runs, return_exceptions=True)
    assert {type(each) for each in results} == {dict, asyncio.CancelledError}
    assert browser.most == CAP
    await until(lambda: taken(kept) == 0)


@pytest.mark.parametrize("outage", ["block", "allow"])
async def test_while_the_store_is_away(signals: Signals, outage: Any) -> None:
    """Calls are refused; or they run, held to the cap in this process, whoever makes them."""
    browser, store = Browser(ends=False, full=CAP), FickleStore(MemoryStore())
    store.down = True
    options: Any = {"most": CAP, "store": store, "on_store_error": outage}
    agents = [agent_of(signals, browser.tool, 4, **options) for _ in range(2)]
    results = await asyncio.gather(*(each.ainvoke(ASKED) for each in agents))
    said = [text for result in results for text in texts(result)]
    if outage == "allow":
        assert said == ["seen"] * 8
        assert browser.most == CAP
    else:
        assert browser.most == 0
        assert all("could not be checked" in each for each in said)
    fallbacks = "langchain_quota_store_fallbacks_total"
    assert [*signals.samples(fallbacks, agent="unnamed", action=outage).values()] == [8]


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("caps", [(1, 3), (3, 1)])
async def test_the_lowest_of_two_caps_holds(caps: Any, signals: Signals, *, stored: bool) -> None:
    """Only the lower cap's calls run at once, and in order. Metrics say that calls wait for it."""
    browser, order, shown, kept = Browser(), list[str](), set[Any](), MemoryStore()

    async def browse(text: str) -> str:
        gauge = signals.samples("langchain_quota_waiting_calls", agent="unnamed")
        shown.update(limit for limit, number in gauge.items() if number)
        order.append(text)
        return await browser.aopen()

    limits = [ConcurrencyLimit("browser", max_concurrency=n, name=f"cap-{n}") for n in caps]
    scene = asking(*(("browser", {"text": each}) for each in "abcd")), limits
    stores = [DistantStore(kept), DistantStore(kept)] if stored else [None]
    scenes = [Scene(signals, *scene, store=one, tools=[tool(None, browse)]) for one in stores]
    for result in await asyncio.gather(*(each.play() for each in scenes)):
        assert texts(result) == ["seen"] * 4
    assert (browser.most, [*dict.fromkeys(order)], shown) == (1, [*"abcd"], {("cap-1",)})
    assert not signals.value(f"{WAITS}_sum", agent="unnamed", limit="cap-3", decision="allowed")


@pytest.mark.parametrize("waits", [(0, 3600), (3600, 0)])
async def test_the_shorter_of_two_waits_holds(waits: tuple[int, int], signals: Signals) -> None:
    """A call that one of its caps keeps no longer is refused, while the other would wait on."""
    refused = asyncio.Event()
    slow = recording("search", [], refused.wait)
    limits = [ConcurrencyLimit("search", max_concurrency=1, wait=n, name=f"for-{n}") for n in waits]
    learn: Any = lambda one: refused.set() if one.outcome == "blocked" else None  # noqa: E731
    await Scene(signals, asking(*["search"] * 2), limits, tools=[slow], on_decision=learn).play()
    assert signals.value(f"{WAITS}_count", decision="blocked", agent="unnamed", limit="for-0") == 1
