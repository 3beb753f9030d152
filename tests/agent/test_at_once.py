"""Caps on calls at once, through real agents: nobody is over, nobody is stuck, all is visible."""

import asyncio
import gc
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ToolRetryMiddleware
from langchain_core.messages import AnyMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.graph import MessagesState, StateGraph, add_messages
from langgraph.prebuilt import ToolNode, create_react_agent
from langgraph.types import Command, interrupt
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from langchain_quota import (
    Decision,
    GraphQuota,
    InlineQuotaMiddleware,
    MemoryStore,
    Outcome,
    Quota,
    QuotaMiddleware,
    RepeatLimit,
    Telemetry,
    ToolCallLimit,
    usage,
)
from langchain_quota.middleware._semaphores import PROCESS
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, Scene, both_forms
from tests.signals import Signals, needs_inline

CALLS = 50
CAP = 3
PATIENCE = 60
"""Seconds after which something is stuck."""
BUSY = "other calls were running, and at most 1 call of 'browser' may run at the same time"


class Browser:
    """A tool that notes how many of its calls run at the same time.

    Args:
        together: How many threads have to run, and others to wait, before the first one ends.
    """

    def __init__(self, together: int = 1) -> None:
        self._lock = threading.Lock()
        self._together = threading.Barrier(together)
        self.running = self.most = self.ran = 0
        self.opened = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()

    def _begin(self) -> None:
        with self._lock:
            self.running += 1
            self.ran += 1
            self.most = max(self.most, self.running)

    def _end(self) -> str:
        with self._lock:
            self.running -= 1
        return "seen"

    def open(self) -> str:
        self._begin()
        try:
            self._together.wait(PATIENCE)
            while self.ran <= self._together.parties != 1 and not waiting():
                time.sleep(0.001)
        finally:
            self._end()
        return "seen"

    async def aopen(self) -> str:
        self._begin()
        try:
            self.opened.set()
            await asyncio.sleep(0.001)
            await self.may_end.wait()
        finally:
            self._end()
        return "seen"

    @property
    def tool(self) -> BaseTool:
        return StructuredTool.from_function(
            self.open, self.aopen, name="browser", description="See a page."
        )


def answers(result: dict[str, Any]) -> list[str]:
    """What the calls were answered, in order."""
    return [str(each.content) for each in result["messages"] if each.type == "tool"]


def waiting() -> int:
    """How many calls of this process wait for a page."""
    return PROCESS.of("browser").waiting


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    asyncio.run(until(condition))


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until something is so."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


ASKED: Any = {"messages": [("user", "hi")]}


def agent_of(tool: BaseTool, calls: int = 1, **options: Any) -> Any:
    """An agent that opens pages, by default one at a time."""
    limit = ToolCallLimit("browser", **{"at_once": 1, "wait": PATIENCE, **options})
    quota = QuotaMiddleware([limit], telemetry=Telemetry(registry=CollectorRegistry()))
    model = ScriptedChatModel(script=[["browser"] * calls, "done"])
    return create_agent(model, [tool], middleware=[quota])


def has_room() -> bool:
    """Whether a page may be opened now, if no other one is open."""
    return answers(agent_of(Browser().tool, wait=0).invoke(ASKED)) == ["seen"]


@contextmanager
def busy() -> Iterator[None]:
    """Another agent's page is open."""
    opened, may_end = threading.Event(), threading.Event()

    def browser() -> None:
        opened.set()
        may_end.wait(PATIENCE)

    tool = StructuredTool.from_function(browser, name="browser", description="See a page.")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(agent_of(tool).invoke, ASKED)
        assert opened.wait(PATIENCE)
        try:
            yield
        finally:
            may_end.set()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No test leaves a place of this process taken."""
    yield
    assert has_room()


@both_forms
async def test_no_more_run_than_may(signals: Signals, form: Form) -> None:
    """Of 50 calls of one message 3 run at a time, and all of them run. Their waits are measured.

    LangGraph starts all of them at once, in the sync form in threads.
    """
    browser = Browser(CAP if form == "sync" else 1)
    calls = 12 if form == "sync" else CALLS
    quota = QuotaMiddleware([ToolCallLimit("browser", at_once=CAP)], telemetry=signals.telemetry)
    scene = Scene(signals, [["browser"] * calls, "done"], [quota], tools=[browser.tool], form=form)
    result = await scene.play()
    assert answers(result) == ["seen"] * calls
    assert (browser.most, browser.ran) == (CAP, calls)
    waits = {"agent": "unnamed", "limit": "tool:browser", "decision": "allowed"}
    assert signals.value("langchain_quota_wait_seconds_count", **waits) == calls
    assert (signals.value("langchain_quota_wait_seconds_sum", **waits) or 0) > 0


@pytest.mark.parametrize(
    "kind", [QuotaMiddleware, pytest.param(InlineQuotaMiddleware, marks=needs_inline)]
)
async def test_who_waits_in_vain_is_refused(
    signals: Signals, kind: type[QuotaMiddleware[Any, Any]]
) -> None:
    """A call that may not run in time is answered, seen by all who look on, and given back.

    It counts neither in the thread's state nor in the store, and the next one may run.
    """
    seen: list[Decision] = []
    store, browser = MemoryStore(), Browser()
    limits = [ToolCallLimit("browser", at_once=1, wait=0, quotas=[Quota(2, per="global")])]
    limits.append(ToolCallLimit("browser", name="thread", thread_limit=2))
    quota = kind(limits, store=store, on_decision=seen.append, telemetry=signals.telemetry)
    script = [["browser", "browser"], ["browser"], "done", ["browser"], "done"]
    scene = Scene(signals, script, [quota], tools=[browser.tool])
    result = await scene.play()
    assert browser.ran == 2
    assert [BUSY in each for each in answers(result)] == [False, True, False]
    (refusal,) = [each for each in seen if each.outcome is Outcome.BLOCKED]
    (status,) = refusal.refused_by
    assert (status.refusal_scope, status.used("at_once"), status.threshold("at_once")) == (
        "at_once",
        2,
        1,
    )
    limit = {"agent": "unnamed", "limit": "tool:browser"}
    counted = "langchain_quota_limit_decisions_total"
    assert signals.value(counted, **limit, scope="at_once", decision="blocked") == 1
    assert signals.value(counted, **limit, scope="none", decision="refunded") == 1
    waits = signals.value("langchain_quota_wait_seconds_count", **limit, decision="blocked")
    assert waits == 1
    assert {each.key: each.used for each in store.usages()} == {
        "browser:global:": 2,
        "browser:thread:thread-1": 2,
    }
    # A new run finds both used up: neither more nor less.
    assert "limit" in answers(await scene.play())[-1]
    assert browser.ran == 2


async def test_a_thread_counts_what_ran(signals: Signals) -> None:
    """A run that ends with a call refused for want of a slot does not leave it in the counts."""
    browser = Browser()
    limits = [
        ToolCallLimit("browser", at_once=1, wait=0, thread_limit=5),
    ]
    quota = QuotaMiddleware(limits, telemetry=signals.telemetry)
    script = [["browser", "browser", "browser"], "done", "done"]
    scene = Scene(signals, script, [quota], tools=[browser.tool])
    await scene.play()
    await scene.play()
    config = {"configurable": {"thread_id": "thread-1"}}
    assert usage(scene.agent.get_state(config)).tools == {"browser": 1}


async def test_words_of_ones_own(signals: Signals) -> None:
    """A message that is a function tells by the scope that the call has waited in vain."""

    def words(decision: Decision) -> str:
        (status,) = decision.refused_by
        return f"{status.scope}: {status.threshold(str(status.scope))}"

    limit = ToolCallLimit("browser", at_once=1, wait=0, run_limit=2, message=words)
    quota = QuotaMiddleware([limit], telemetry=signals.telemetry)
    script = [["browser"] * 3, "done"]
    scene = Scene(signals, script, [quota], tools=[Browser().tool])
    assert sorted(answers(await scene.play())) == ["at_once: 1", "run: 2", "seen"]


async def test_a_limit_on_trial_lets_nobody_wait(signals: Signals) -> None:
    """A call that would have waited runs at once, and is measured."""
    browser = Browser()
    browser.may_end.clear()
    limit = ToolCallLimit("browser", at_once=1, enforce=False)
    quota = QuotaMiddleware([limit], telemetry=signals.telemetry)
    scene = Scene(signals, [["browser"] * 3, "done"], [quota], tools=[browser.tool])
    running = asyncio.create_task(scene.play())
    await until(lambda: browser.running == 3)
    browser.may_end.set()
    assert answers(await running) == ["seen"] * 3
    labels = {"agent": "unnamed", "limit": "tool:browser"}
    waits = "langchain_quota_wait_seconds_count"
    assert signals.value(waits, **labels, decision="would_block") == 2
    assert signals.value(waits, **labels, decision="allowed") == 1
    counted = "langchain_quota_limit_decisions_total"
    assert signals.value(counted, **labels, scope="at_once", decision="would_block") == 2


async def test_a_limit_on_trial_beside_one_that_holds(signals: Signals) -> None:
    """What a call waits for one limit is measured, also where another one would refuse the call."""
    limits = [
        ToolCallLimit("browser", name="held", at_once=1),
        ToolCallLimit("browser", name="tried", at_once=1, enforce=False),
    ]
    quota = QuotaMiddleware(limits, telemetry=signals.telemetry)
    scene = Scene(signals, [["browser"] * 3, "done"], [quota], tools=[Browser().tool])
    await scene.play()
    waits = "langchain_quota_wait_seconds_count"
    held, tried = ({"agent": "unnamed", "limit": each} for each in ("held", "tried"))
    assert signals.value(waits, **held, decision="allowed") == 3
    assert signals.value(waits, **tried, decision="would_block") == 2


@pytest.mark.parametrize("urls", ["aaaa", "abcd"])
async def test_a_wait_in_vain_is_no_repetition(signals: Signals, urls: str) -> None:
    """A call that has not run is neither repeated by the next one, nor has its tool failed."""

    async def browser(url: str) -> str:
        return url

    tool = StructuredTool.from_function(coroutine=browser, name="browser", description="See.")
    cap = ToolCallLimit("browser", at_once=1, wait=0)
    quota = QuotaMiddleware([cap, RepeatLimit(2)], telemetry=signals.telemetry)
    script = [*([("browser", {"url": url})] for url in urls), "done"]
    scene = Scene(signals, script, [quota], tools=[tool])
    with busy():
        result = await scene.play()
    assert [BUSY in each for each in answers(result)] == [True] * 4


async def test_agents_of_a_process_share_a_cap(signals: Signals) -> None:
    """Two agents, made one after the other, with a middleware each: together no more than one.

    A run that is cancelled while its call waits, and one whose call runs, leave no slot taken.
    """
    browser = Browser()
    browser.may_end.clear()
    scenes = [
        Scene(
            signals,
            [["browser"], "done"],
            [QuotaMiddleware([ToolCallLimit("browser", at_once=1)], telemetry=signals.telemetry)],
            tools=[browser.tool],
        )
        for _ in range(3)
    ]
    first = asyncio.create_task(scenes[0].play())
    await browser.opened.wait()
    second, third = (asyncio.create_task(each.play()) for each in scenes[1:])
    await until(lambda: waiting() == 2)
    second.cancel()
    first.cancel()
    await asyncio.wait([first, second])
    browser.may_end.set()
    assert answers(await third) == ["seen"]
    assert (browser.most, browser.ran) == (1, 2)
    labels = {"agent": "unnamed", "limit": "tool:browser", "decision": "cancelled"}
    assert signals.value("langchain_quota_wait_seconds_count", **labels) == 1


async def test_limits_on_one_tool_and_on_all(signals: Signals) -> None:
    """A tool under two caps keeps to both, and one that waits for the first keeps no other out."""
    browser, ran = Browser(), asyncio.Event()
    browser.may_end.clear()

    async def search() -> str:
        ran.set()
        return "found"

    limits = [ToolCallLimit("browser", at_once=1), ToolCallLimit(at_once=2)]
    quota = QuotaMiddleware(limits, telemetry=signals.telemetry)
    tool = StructuredTool.from_function(coroutine=search, name="search", description="Search.")
    script = [["browser", "browser", "search"], "done"]
    scene = Scene(signals, script, [quota], tools=[browser.tool, tool])
    running = asyncio.create_task(scene.play())
    await asyncio.wait_for(ran.wait(), PATIENCE)
    browser.may_end.set()
    await running
    assert (browser.most, browser.ran) == (1, 2)


async def test_an_interrupt_and_an_error_free_the_slot(signals: Signals) -> None:
    """A tool that asks a human keeps nobody waiting meanwhile; nor does one that fails."""
    ran = 0

    async def asks() -> str:
        nonlocal ran
        ran += 1
        answer = interrupt("Go on?")
        raise ValueError(answer)

    tool = StructuredTool.from_function(coroutine=asks, name="browser", description="Ask.")
    quota = QuotaMiddleware(
        [ToolCallLimit("browser", at_once=1, wait=0)], telemetry=signals.telemetry
    )
    scene = Scene(signals, [["browser"], "done"], [quota], tools=[tool])
    await scene.play()
    assert has_room()
    with pytest.raises(ValueError, match="yes"):
        await scene.invoke(Command(resume="yes"))
    assert ran == 2


async def test_retries_around(signals: Signals) -> None:
    """After a retry middleware, each try needs its own slot; a refusal is not retried."""
    tries = 0

    async def fails() -> str:
        nonlocal tries
        tries += 1
        assert not await asyncio.to_thread(has_room)
        raise ValueError("broken")

    tool = StructuredTool.from_function(coroutine=fails, name="browser", description="Fail.")
    retry: Any = ToolRetryMiddleware(max_retries=2, initial_delay=0, jitter=False)
    limit = ToolCallLimit("browser", at_once=1, wait=0)
    quota = QuotaMiddleware([limit], telemetry=signals.telemetry)
    script = [["browser"], "done", ["browser"], "done"]
    scene = Scene(signals, script, [retry, quota], tools=[tool])
    with busy():
        (refused,) = answers(await scene.play())
    assert BUSY in refused
    assert tries == 0
    waits = {"agent": "unnamed", "limit": "tool:browser"}
    waited = "langchain_quota_wait_seconds_count"
    assert signals.value(waited, **waits, decision="blocked") == 1
    await scene.play()
    assert tries == signals.value(waited, **waits, decision="allowed") == 3


@both_forms
async def test_a_retry_that_waits_in_vain(signals: Signals, form: Form) -> None:
    """A call that has run, and waits in vain when it is tried again, stays counted."""
    others = ExitStack()

    def fails() -> str:
        raise ValueError("broken")

    async def afails() -> str:
        return fails()

    def another_comes_first(_: Exception) -> bool:
        others.enter_context(busy())
        return True

    tool = StructuredTool.from_function(fails, afails, name="browser", description="Fail.")
    retry: Any = ToolRetryMiddleware(
        max_retries=1, initial_delay=0, jitter=False, retry_on=another_comes_first
    )
    store = MemoryStore()
    limit = ToolCallLimit("browser", at_once=1, wait=0, quotas=[Quota(5, per="global")])
    quota = QuotaMiddleware([limit], store=store, telemetry=signals.telemetry)
    script = [["browser"], "done", "done"]
    scene = Scene(signals, script, [retry, quota], tools=[tool], form=form)
    with others:
        (refused,) = answers(await scene.play())
    assert BUSY in refused
    await scene.play()
    assert [each.used for each in store.usages()] == [1]
    config = {"configurable": {"thread_id": "thread-1"}}
    assert usage(scene.agent.get_state(config)).tools == {"browser": 1}


def test_agents_without_a_cap_pay_nothing(signals: Signals) -> None:
    """Without `at_once` there is no hook around tool calls, and no node for tools that are not."""
    plain = QuotaMiddleware([ToolCallLimit("browser", run_limit=1)], telemetry=signals.telemetry)
    assert type(plain).wrap_tool_call is AgentMiddleware.wrap_tool_call
    agent = create_agent(ScriptedChatModel(script=[]), middleware=[plain])
    assert "tools" not in agent.nodes
    capped = QuotaMiddleware([ToolCallLimit("browser", at_once=1)], telemetry=signals.telemetry)
    assert isinstance(capped, QuotaMiddleware)
    assert capped.name == plain.name
    assert type(capped).awrap_tool_call is not AgentMiddleware.awrap_tool_call


async def test_a_hook_of_a_subclass_runs_inside(signals: Signals) -> None:
    """A subclass's own `awrap_tool_call` is called when the call has its slot."""

    class Mine(QuotaMiddleware[Any, Any]):
        def __init__(self) -> None:
            limits = [ToolCallLimit("browser", at_once=1)]
            super().__init__(limits, telemetry=signals.telemetry)

        async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
            assert not await asyncio.to_thread(has_room)
            answer = await handler(request)
            return answer.model_copy(update={"content": f"{answer.content}, and checked"})

    quota = Mine()
    scene = Scene(signals, [["browser", "browser"], "done"], [quota], tools=[Browser().tool])
    assert answers(await scene.play()) == ["seen, and checked"] * 2


async def test_a_graph_of_ones_own(signals: Signals) -> None:
    """The tools of a `GraphQuota` wait, too; a node that would not is refused."""
    browser = Browser()
    quota = GraphQuota([ToolCallLimit("browser", at_once=2)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=[["browser"] * 6, "done"])
    graph = StateGraph(MessagesState)
    with pytest.raises(ValueError, match=r"quota\.tool_node\(tools\)"):
        quota.add_to(graph, model=model, tools=ToolNode([browser.tool]))
    quota.add_to(graph, model=model, tools=quota.tool_node([browser.tool], tags=["of mine"]))
    compiled: Any = graph.compile()
    result = await compiled.ainvoke({"messages": [("user", "hi")]})
    assert answers(result) == ["seen"] * 6
    assert (browser.most, browser.ran) == (2, 6)


async def test_a_graph_whose_state_is_a_class(signals: Signals) -> None:
    """Tools get no counts there: what a refused call was charged is given back with the next."""

    class Notes(BaseModel):
        messages: Annotated[list[AnyMessage], add_messages]

    store, browser = MemoryStore(), Browser()
    limit = ToolCallLimit("browser", at_once=1, wait=0, quotas=[Quota(9, per="global")])
    quota = GraphQuota([limit], store=store, telemetry=signals.telemetry)
    model = ScriptedChatModel(script=[["browser"] * 3, ["browser"], "done"])
    graph = StateGraph(Notes)
    quota.add_to(graph, model=model, tools=[browser.tool])
    compiled: Any = graph.compile()
    await compiled.ainvoke({"messages": [("user", "hi")]})
    assert {each.key: each.used for each in store.usages()} == {"browser:global:": 2}
    assert browser.ran == 2


async def test_a_react_agent(signals: Signals) -> None:
    """The tools that `react_hooks` passes on to `create_react_agent` wait, too."""
    browser = Browser()
    quota = GraphQuota([ToolCallLimit("browser", at_once=2)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=[["browser"] * 6, "done"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        agent: Any = create_react_agent(**quota.react_hooks(model, [browser.tool]))
    assert answers(await agent.ainvoke({"messages": [("user", "hi")]})) == ["seen"] * 6
    assert (browser.most, browser.ran) == (2, 6)


class Work:
    """What threads do: it takes real time, and nothing that is cancelled ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.may_end = threading.Event()
        self.running = self.most = self.ran = 0

    def do(self) -> str:
        with self._lock:
            self.running += 1
            self.ran += 1
            self.most = max(self.most, self.running)
        assert self.may_end.wait(PATIENCE)
        with self._lock:
            self.running -= 1
        return "seen"


class SyncTool(BaseTool):
    """A tool without an async form, which keeps what it has done."""

    name: str = "browser"
    description: str = "See a page."
    work: Any
    calls: int = 0

    def _run(self) -> str:
        self.calls += 1
        return str(self.work.do())


class OwnAsyncTool(SyncTool):
    """A tool whose async form is its own."""

    async def _arun(self) -> str:
        self.calls += 1
        return "seen"


def sync_tool(work: Work) -> BaseTool:
    """A function as a tool."""
    return StructuredTool.from_function(work.do, name="browser", description="See a page.")


@pytest.mark.parametrize("make", [sync_tool, lambda work: SyncTool(work=work)])
@pytest.mark.parametrize("store", [None, MemoryStore()])
async def test_a_cancelled_run_does_not_end_its_sync_tool(
    make: Callable[[Work], BaseTool], store: MemoryStore | None
) -> None:
    """Of 20 runs that are cancelled while their tools run in threads, never more than 2 do so."""
    work = Work()
    tool = make(work)
    limit = ToolCallLimit("browser", at_once=2, wait=PATIENCE)

    def agent() -> Any:
        telemetry = Telemetry(registry=CollectorRegistry())
        quota = QuotaMiddleware([limit], store=store, telemetry=telemetry)
        model = ScriptedChatModel(script=[["browser"], "done"])
        return create_agent(model, [tool], middleware=[quota])

    first = [asyncio.create_task(agent().ainvoke(ASKED)) for _ in range(2)]
    await until(lambda: work.running == 2)
    others = [asyncio.create_task(agent().ainvoke(ASKED)) for _ in range(18)]
    await until(lambda: waiting() == 18)
    for each in (*first, *others[:9]):
        each.cancel()
    await asyncio.wait([*first, *others[:9]])
    # Whoever came next would run now.
    assert not await asyncio.to_thread(has_room)
    assert work.running == 2
    work.may_end.set()
    assert [answers(each) for each in await asyncio.gather(*others[9:])] == [["seen"]] * 9
    await until(lambda: not work.running)
    assert (work.most, work.ran) == (2, 11)
    if isinstance(tool, SyncTool):
        assert tool.calls == 11


@contextmanager
def left_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that may be closed before its tasks have ended."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # it says that a task was left
    yield loop
    gc.collect()


LEFT = pytest.mark.filterwarnings(
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning",
    "ignore:coroutine .* was never awaited:RuntimeWarning",
)
"""Others, too, cannot end what they do in a loop that is closed, and Python says so."""


@LEFT
@pytest.mark.parametrize("cancelled", [True, False])
def test_an_event_loop_that_ends_before_the_thread_of_its_tool(cancelled: bool) -> None:  # noqa: FBT001
    """The place is kept until the thread has ended: the loop is closed, and the run is gone."""
    work = Work()
    with left_loop() as loop:
        run = loop.create_task(agent_of(sync_tool(work)).ainvoke(ASKED))
        loop.run_until_complete(until(lambda: work.running == 1))
        if cancelled:
            run.cancel()
            loop.run_until_complete(asyncio.wait([run]))
        loop.close()
        assert not has_room()
        work.may_end.set()
        eventually(has_room)
        del run
    assert has_room()
    assert work.ran == 1


async def test_a_tool_stays_the_tool_that_it_is() -> None:
    """A hook inside gets a tool of the same class; what a tool keeps in itself stays there."""
    seen: list[object] = []

    class Looks(AgentMiddleware[Any, Any, Any]):
        async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
            seen.append(request.tool)
            return await handler(request)

    work = Work()
    work.may_end.set()
    for kind in (SyncTool, OwnAsyncTool):
        tool = kind(work=work)
        quota = QuotaMiddleware(
            [ToolCallLimit("browser", at_once=1)], telemetry=Telemetry(registry=CollectorRegistry())
        )
        model = ScriptedChatModel(script=[["browser", "browser"], "done"])
        agent: Any = create_agent(model, [tool], middleware=[quota, Looks()])
        assert answers(await agent.ainvoke(ASKED)) == ["seen"] * 2
        assert [type(each) for each in seen] == [kind, kind]
        assert tool.calls == 2
        seen.clear()


def test_threads_and_loops_share_a_cap() -> None:
    """Sync agents in 8 threads and async agents in 3 event loops: never more than 3, all run."""
    browser = Browser()

    # LangChain switches warnings off while a tool is made: not safe in several threads.
    agents = [agent_of(browser.tool, 2, at_once=CAP) for _ in range(32)]

    async def loop(own: Sequence[Any]) -> list[str]:
        results = await asyncio.gather(*(each.ainvoke(ASKED) for each in own))
        return [said for each in results for said in answers(each)]

    with ThreadPoolExecutor(11) as threads:
        loops = [threads.submit(asyncio.run, loop(agents[n : n + 8])) for n in (0, 8, 16)]
        runs = [threads.submit(each.invoke, ASKED) for each in agents[24:]]
        assert all(each.result(PATIENCE) == ["seen"] * 16 for each in loops)
        assert all(answers(each.result(PATIENCE)) == ["seen"] * 2 for each in runs)
    assert (browser.most, browser.ran) == (CAP, 64)


@pytest.mark.parametrize("seed", range(3))
async def test_cancelled_calls_leave_no_place_taken(seed: int) -> None:
    """Runs are cancelled while their calls wait or run, some give up: the others all run."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    browser = Browser()
    agents = [
        agent_of(browser.tool, at_once=CAP, wait=chance.choice([0, 0.005, PATIENCE]))
        for _ in range(CALLS)
    ]
    runs = [asyncio.create_task(each.ainvoke(ASKED)) for each in agents]
    for run in chance.sample(runs, CALLS // 2):
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(chance.choice([0, 0.001]))
        run.cancel()
    async with asyncio.timeout(PATIENCE):
        await asyncio.wait(runs)
    assert 0 < browser.most <= CAP


async def test_who_comes_first_is_served_first() -> None:
    """Calls that wait run in the order in which they came."""
    order: list[int] = []

    async def browser(number: int) -> None:
        order.append(number)

    tool = StructuredTool.from_function(coroutine=browser, name="browser", description="See.")
    calls: Any = [("browser", {"number": number}) for number in range(10)]
    quota = QuotaMiddleware(
        [ToolCallLimit("browser", at_once=1)], telemetry=Telemetry(registry=CollectorRegistry())
    )
    model = ScriptedChatModel(script=[calls, "done"])
    agent: Any = create_agent(model, [tool], middleware=[quota])
    with busy():
        run = asyncio.create_task(agent.ainvoke(ASKED))
        await until(lambda: waiting() == 10)
    await run
    assert order == [*range(10)]


@LEFT
def test_a_place_goes_on_from_a_loop_that_is_closed() -> None:
    """Calls that wait in a loop that is gone keep nobody behind them from running."""
    with left_loop() as loop:
        with busy():
            left = loop.create_task(agent_of(Browser().tool, CALLS).ainvoke(ASKED))
            loop.run_until_complete(until(lambda: waiting() == CALLS))
            loop.close()
        assert has_room()
        assert not left.done()
        del left


def test_a_wait_may_be_longer_than_a_thread_can_wait() -> None:
    """A sync call with such a `wait` waits as one with a shorter one does."""
    with ThreadPoolExecutor(1) as threads, busy():
        run = threads.submit(agent_of(Browser().tool, wait=1e300).invoke, ASKED)
        eventually(lambda: waiting() == 1 or run.done())
    assert answers(run.result(PATIENCE)) == ["seen"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_begins_anew() -> None:
    """What runs in the parent does not run in the child, and the child's end changes nothing."""
    children: list[int] = []

    def browser() -> str:
        child = os.fork()
        if not child:
            os._exit(0 if has_room() else 1)
        children.append(os.waitpid(child, 0)[1])
        return "has room" if has_room() else "full"

    tool = StructuredTool.from_function(browser, name="browser", description="See.")
    assert answers(agent_of(tool).invoke(ASKED)) == ["full"]
    assert children == [0]
