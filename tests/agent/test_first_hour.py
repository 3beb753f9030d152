"""Mistakes that are made with real agents in the first hour, and the sentence each leads to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langgraph.graph import MessagesState, StateGraph

from langchain_quota import (
    InlineQuotaMiddleware,
    MemoryStore,
    Quota,
    QuotaMiddleware,
    ToolCallLimit,
)
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, recording
from tests.signals import Signals, needs_inline
from tests.troubleshooting import begins, messages, raised

ASKED: Any = {"messages": [("user", "hi")]}
MISSPELT = "limits name tools that agent … does not have: …"


@dataclass
class Bench:
    """What a mistake is made with."""

    signals: Signals
    caplog: pytest.LogCaptureFixture
    monkeypatch: pytest.MonkeyPatch

    def quota(self, *limits: Any, **options: Any) -> QuotaMiddleware[Any, Any]:
        return QuotaMiddleware(limits, telemetry=self.signals.telemetry, **options)

    def inline(self, *limits: Any) -> InlineQuotaMiddleware[Any, Any]:
        return InlineQuotaMiddleware(limits, telemetry=self.signals.telemetry)

    def agent(self, *middleware: Any, **options: Any) -> Any:
        """An agent that searches once, and then is done."""
        model = ScriptedChatModel(script=[["search"], "done"])
        tools = options.pop("tools", [recording("search", [])])
        return create_agent(model, tools, middleware=middleware, **options)

    def logged(self) -> list[str]:
        return [record.getMessage() for record in self.caplog.records]


Mistake = Callable[[Bench], str]
MISTAKES: dict[str, Mistake] = {}
"""What a user sees of each mistake, by how the page says that it begins."""


def sees(message: str) -> Callable[[Mistake], Mistake]:
    def register(mistake: Mistake) -> Mistake:
        MISTAKES[message] = mistake
        return mistake

    return register


@pytest.fixture
def bench(
    signals: Signals, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Bench:
    """A bench of the test's own."""
    return Bench(signals, caplog, monkeypatch)


def inside(agent: Any) -> Any:
    """A graph with the agent as its only node."""
    return StateGraph(MessagesState).add_node("agent", agent).set_entry_point("agent").compile()


def per(bench: Bench, subject: str, **options: Any) -> Any:
    """An agent with a quota."""
    limit = ToolCallLimit("search", quotas=[Quota(9, per=subject)])
    return bench.agent(bench.quota(limit, store=MemoryStore()), **options)


NEEDS_INLINE = {
    "limit … has exit_behavior='ask', which needs QuotaMiddleware: …",
    "… and another middleware of this agent both judge around the model call",
}


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(message, marks=needs_inline if message in NEEDS_INLINE else ())
        for message in MISTAKES
    ],
)
def test_a_mistake_leads_to_a_sentence(message: str, bench: Bench) -> None:
    """The mistake, made with a real agent, shows a message that the page explains."""
    assert message in messages()
    assert begins(MISTAKES[message](bench), message)


@dataclass
class Caller:
    """A context without the name that the quota wants."""

    user: str = "ada"


class CallerDict(TypedDict):
    """The same, as a dict."""

    user: str


@pytest.mark.parametrize("schema", [Caller, CallerDict, None])
@pytest.mark.parametrize("context", [None, {"user": "ada"}], ids=["no context", "another name"])
def test_a_context_without_the_name(schema: Any, context: Any, bench: Bench) -> None:
    """Whatever the context is declared as, the sentence has the name that it lacks."""
    agent = per(bench, "user_id", context_schema=schema)
    seen = raised(ValueError, lambda: agent.invoke(ASKED, context=context))
    assert seen.endswith('call the agent with context={"user_id": …}, or an object that has it')


OFFERED = ("search", "send_mail", "calc")


async def run_of(
    bench: Bench,
    *limits: Any,
    times: int = 1,
    inside: bool = False,
    form: Form = "async",
    **options: Any,
) -> list[str]:
    """What is logged of misspelt tools in runs of an agent."""
    middleware = (bench.inline if inside else bench.quota)(*limits)
    tools = options.pop("tools", [recording(name, []) for name in OFFERED])
    for _ in range(times):
        agent = bench.agent(middleware, tools=tools, **options)
        if form == "sync":
            agent.invoke(ASKED)
        else:
            await agent.ainvoke(ASKED)
    return [seen for seen in bench.logged() if begins(seen, MISSPELT)]


async def test_a_misspelt_exclusion(bench: Bench) -> None:
    """An excluded name that is spelt like a tool is told, too."""
    [told] = await run_of(bench, ToolCallLimit(run_limit=9, exclude=["serach", "write_todos"]))
    assert told.endswith(": 'serach' (did you mean 'search'?)")


async def test_no_tools_yet(bench: Bench) -> None:
    """A request without tools is not the one that is looked at."""
    middleware = bench.quota(ToolCallLimit("serach", run_limit=9))
    for tools in ([], [recording("search", [])]):
        model = ScriptedChatModel(script=["done"])
        await create_agent(model, tools, middleware=[middleware]).ainvoke(ASKED)
    assert len([seen for seen in bench.logged() if begins(seen, MISSPELT)]) == 1


async def test_tools_of_the_provider_are_known(bench: Bench) -> None:
    """A provider's own tools have their names in dicts of several shapes."""
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "function", "function": {"name": "lookup", "parameters": {}}},
        {"type": "code_interpreter"},
    ]
    names = ["web_search", "lookup", "code_interpreter"]
    assert await run_of(bench, ToolCallLimit(names, run_limit=9), tools=tools, times=2) == []
