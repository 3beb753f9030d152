"""Caps on calls at once, through real agents: nobody is over, nobody is stuck, all is visible."""

import asyncio
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ToolRetryMiddleware
from langchain_core.messages import AnyMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.graph import MessagesState, StateGraph, add_messages
from langgraph.prebuilt import ToolNode, create_react_agent
from langgraph.types import Command, interrupt
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
    ToolCallLimit,
    usage,
)
from langchain_quota.middleware._slots import PROCESS, Slot
from langchain_quota.testing import ScriptedChatModel
from tests.agent.conftest import Form, both_forms
from tests.agent.rules import Scene
from tests.conftest import Signals, needs_inline

CALLS = 50
CAP = 3
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
            self._together.wait(20)
            while self.ran <= self._together.parties != 1 and not PROCESS._lines:
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
    """How many calls of this process wait."""
    return sum(map(len, PROCESS._lines.values()))


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until something is so."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No test leaves a slot of this process taken."""
    yield
    assert PROCESS.running("browser") == PROCESS.running("__all__") == 0


@both_forms
async def test_no_more_run_than_may(signals: Signals, form: Form) -> None:
    """Of 50 calls of one message 3 run at a time, and all of them run. Their waits are measured.

    LangGraph starts all of them at once, in the sync form in threads.
    """
    browser = Browser(CAP if form == "sync" else 1)
    calls = 12 if form == "sync" else CALLS
    quota = QuotaMiddleware([ToolCallLimit("browser", at_once=CAP)], telemetry=signals.telemetry)
    scene = Scene(signals, [["browser"] * calls, "done"], [quota], tools=[browser.tool], form=form)
    result = await scene.turn()
    assert answers(result) == ["seen"] * calls
    assert (browser.most, browser.ran) == (CAP, calls)
    waits = {"agent": "unnamed", "limit": "tool:browser", "decision": "allowed"}
    assert signals.value("langchain_quota_wait_seconds_count", **waits) == calls
    assert (signals.value("langchain_quota_wait_seconds_sum", **waits) or 0) > 0
    spans = [each for each in signals.spans() if each.name == "wait_for_quota tool browser"]
    assert spans
    for span in spans:
        assert span.attributes is not None
        waited, ends, starts = (
            span.attributes["langchain_quota.waited"],
            span.end_time,
            span.start_time,
        )
        assert waited == pytest.approx(((ends or 0) - (starts or 0)) / 1e9, abs=1e-6)
        assert span.attributes["langchain_quota.at_once.limit"] == CAP
        assert "langchain_quota.run.used" not in span.attributes


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
    result = await scene.turn()
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
    assert "limit" in answers(await scene.turn())[-1]
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
    await scene.turn()
    await scene.turn()
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
    assert sorted(answers(await scene.turn())) == ["at_once: 1", "run: 2", "seen"]


async def test_a_limit_on_trial_lets_nobody_wait(signals: Signals) -> None:
    """A call that would have waited runs at once, and is measured."""
    browser = Browser()
    browser.may_end.clear()
    limit = ToolCallLimit("browser", at_once=1, enforce=False)
    quota = QuotaMiddleware([limit], telemetry=signals.telemetry)
    scene = Scene(signals, [["browser"] * 3, "done"], [quota], tools=[browser.tool])
    running = asyncio.create_task(scene.turn())
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
    await scene.turn()
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
    other = PROCESS.take(("browser",), {}, 0)
    result = await scene.turn()
    PROCESS.give_back(other)
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
    first = asyncio.create_task(scenes[0].turn())
    await browser.opened.wait()
    second, third = (asyncio.create_task(each.turn()) for each in scenes[1:])
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
    running = asyncio.create_task(scene.turn())
    await asyncio.wait_for(ran.wait(), 20)
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
    await scene.turn()
    assert PROCESS.running("browser") == 0
    with pytest.raises(ValueError, match="yes"):
        await scene.invoke(Command(resume="yes"))
    assert ran == 2


async def test_retries_around(signals: Signals) -> None:
    """After a retry middleware, each try needs its own slot; a refusal is not retried."""
    tries = 0

    async def fails() -> str:
        nonlocal tries
        tries += 1
        assert PROCESS.running("browser") == 1
        raise ValueError("broken")

    tool = StructuredTool.from_function(coroutine=fails, name="browser", description="Fail.")
    retry: Any = ToolRetryMiddleware(max_retries=2, initial_delay=0, jitter=False)
    limit = ToolCallLimit("browser", at_once=1, wait=0)
    quota = QuotaMiddleware([limit], telemetry=signals.telemetry)
    script = [["browser"], "done", ["browser"], "done"]
    scene = Scene(signals, script, [retry, quota], tools=[tool])
    other = PROCESS.take(("browser",), {}, 0)
    (refused,) = answers(await scene.turn())
    PROCESS.give_back(other)
    assert BUSY in refused
    assert tries == 0
    waits = {"agent": "unnamed", "limit": "tool:browser"}
    waited = "langchain_quota_wait_seconds_count"
    assert signals.value(waited, **waits, decision="blocked") == 1
    await scene.turn()
    assert tries == signals.value(waited, **waits, decision="allowed") == 3


@both_forms
async def test_a_retry_that_waits_in_vain(signals: Signals, form: Form) -> None:
    """A call that has run, and waits in vain when it is tried again, stays counted."""
    others: list[Slot] = []

    def fails() -> str:
        # Another one comes first while the retry pauses.
        others.append(Slot(("browser",), {"browser": 1}, int))
        PROCESS._ask(others[0])
        raise ValueError("broken")

    async def afails() -> str:
        return fails()

    tool = StructuredTool.from_function(fails, afails, name="browser", description="Fail.")
    retry: Any = ToolRetryMiddleware(max_retries=1, initial_delay=0, jitter=False)
    store = MemoryStore()
    limit = ToolCallLimit("browser", at_once=1, wait=0, quotas=[Quota(5, per="global")])
    quota = QuotaMiddleware([limit], store=store, telemetry=signals.telemetry)
    script = [["browser"], "done", "done"]
    scene = Scene(signals, script, [retry, quota], tools=[tool], form=form)
    (refused,) = answers(await scene.turn())
    PROCESS.give_back(*others)
    assert BUSY in refused
    await scene.turn()
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
        async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
            assert PROCESS.running("browser") == 1
            answer = await handler(request)
            return answer.model_copy(update={"content": f"{answer.content}, and checked"})

    quota = Mine([ToolCallLimit("browser", at_once=1)], telemetry=signals.telemetry)
    scene = Scene(signals, [["browser", "browser"], "done"], [quota], tools=[Browser().tool])
    assert answers(await scene.turn()) == ["seen, and checked"] * 2


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
