"""Calls that no limiter judges, in runs with limits: which are counted, and which are not."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    PIIMiddleware,
    TodoListMiddleware,
    ToolRetryMiddleware,
)
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, ToolCall
from langchain_core.tools import BaseTool, StructuredTool
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from langchain_quota import (
    InlineQuotaMiddleware,
    ModelCallLimit,
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitMiddleware,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import CONFIG, Form, both_forms, recording
from tests.signals import needs_inline

GO: dict[str, Any] = {"messages": [("user", "Go!")]}
LIMITS: list[Limit] = [ModelCallLimit(run_limit=99), ToolCallLimit(run_limit=99)]
NAME = "langchain_quota_unjudged_calls_total"


class Watched:
    """A `Telemetry` that counts calls which no limiter judges, and what it has counted."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.telemetry = Telemetry(registry=self.registry, count_unjudged_calls=True)

    def quota(self) -> QuotaMiddleware[Any, Any]:
        return QuotaMiddleware[Any, Any](LIMITS, telemetry=self.telemetry)

    def inline(self) -> QuotaMiddleware[Any, Any]:
        return InlineQuotaMiddleware[Any, Any](LIMITS, telemetry=self.telemetry)

    def models(self) -> ModelCallLimitMiddleware[Any, Any]:
        return ModelCallLimitMiddleware(run_limit=99, telemetry=self.telemetry)

    def tools(self, tool_name: str | None = None) -> ToolCallLimitMiddleware[Any, Any]:
        return ToolCallLimitMiddleware(tool_name=tool_name, run_limit=99, telemetry=self.telemetry)

    @property
    def unjudged(self) -> dict[tuple[str, str], float]:
        """How many calls, by agent and kind."""
        return {
            (sample.labels["agent"], sample.labels["kind"]): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == NAME
        }


LIMITERS = [
    pytest.param(lambda watched: watched.quota(), id="quota"),
    pytest.param(lambda watched: watched.tools(), id="tool calls only"),
    pytest.param(lambda watched: watched.models(), id="model calls only"),
    pytest.param(lambda watched: watched.inline(), id="inline", marks=needs_inline),
]


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def search() -> BaseTool:
    return recording("search", [])


def new_agent(*given: Any, **options: Any) -> Any:
    """An agent, typed so that it takes any input."""
    return create_agent(*given, **options)


def model(*script: Any) -> ScriptedChatModel:
    return ScriptedChatModel(script=list(script))


def asking(name: str, *others: Any) -> BaseTool:
    """A tool that calls other runnables, and what it calls."""
    pairs = list(zip(others[::2], others[1::2], strict=True))

    def run() -> str:
        for runnable, given in pairs:
            runnable.invoke(given)
        return "asked"

    async def arun() -> str:
        for runnable, given in pairs:
            await runnable.ainvoke(given)
        return "asked"

    return StructuredTool.from_function(run, arun, name=name, description=name)


async def play(agent: Any, form: Form = "async", given: Any = GO) -> None:
    if form == "sync":
        agent.invoke(given, CONFIG)
    else:
        await agent.ainvoke(given, CONFIG)


@both_forms
async def test_an_agent_in_a_tool(form: Form, watched: Watched, search: BaseTool) -> None:
    """A sub-agent without limits is counted with its model and its tool; its parent is not."""
    child = new_agent(model(["search"], "found"), [search], name="child")
    parent = new_agent(
        model(["ask", "search"], "done"),
        [asking("ask", child, GO), search],
        middleware=[watched.quota()],
        name="parent",
    )

    await play(parent, form)

    assert watched.unjudged == {("child", "model"): 2, ("child", "tool"): 1}


@pytest.mark.parametrize("limiter", LIMITERS)
async def test_a_limited_agent_in_a_tool(
    limiter: Callable[[Watched], Any], watched: Watched, search: BaseTool
) -> None:
    """A sub-agent with limits is judged from its first call on, whichever limiter it has."""
    child = new_agent(
        model(["search"], "found"), [search], middleware=[limiter(watched)], name="child"
    )
    parent = new_agent(
        model(["ask"], "done"), [asking("ask", child, GO)], middleware=[watched.quota()]
    )

    await play(parent)

    assert watched.unjudged == {}


async def test_the_log(
    watched: Watched, search: BaseTool, caplog: pytest.LogCaptureFixture
) -> None:
    """Each kind of call is logged once, in whatever run, with its agent and what to do."""
    child = new_agent(
        ScriptedChatModel(script=lambda messages: "found" if len(messages) > 1 else ["search"] * 3),
        [search],
        name="child",
    )
    agent = new_agent(
        model(["ask"], ["ask"], "done", ["ask"], "done"),
        [asking("ask", child, GO)],
        middleware=[watched.quota()],
    )

    with caplog.at_level(logging.WARNING, "langchain_quota"):
        await agent.ainvoke(GO)
        await agent.ainvoke(GO)

    assert watched.unjudged == {("child", "model"): 6, ("child", "tool"): 9}
    model_line, tool_line = caplog.records
    assert "model call of agent 'child'" in model_line.getMessage()
    assert "tool call of agent 'child'" in tool_line.getMessage()
    for remedy in ("QuotaMiddleware", "with_limits(", ".react_hooks()", NAME):
        assert remedy in model_line.getMessage()


class Answer(BaseModel):
    """An answer."""

    text: str


def once_failing() -> BaseTool:
    tries = iter([True])

    def flaky() -> str:
        if next(tries, False):
            raise ConnectionError
        return "worked"

    async def aflaky() -> str:
        return flaky()

    return StructuredTool.from_function(flaky, aflaky, name="flaky", description="flaky")


def fresh(call_id: str | None = None) -> AIMessage:
    call = ToolCall(name="search", args={}, id=call_id, type="tool_call")
    return AIMessage("", tool_calls=[call, call])


AT_ONCE: dict[str, Any] = {"initial_delay": 0, "jitter": False}

ORDINARY: dict[str, tuple[list[Any], Callable[[Watched], list[Any]], dict[str, Any]]] = {
    "a quota": ([["search"] * 3, ["search"], "done"], lambda w: [w.quota()], {}),
    "model calls only": ([["search"] * 3, "done"], lambda w: [w.models()], {}),
    "tool calls only": ([["search"] * 3, "done"], lambda w: [w.tools()], {}),
    "another tool's calls": ([["search"] * 3, "done"], lambda w: [w.tools("flaky")], {}),
    "stacked": ([["search"] * 3, "done"], lambda w: [w.tools(), w.models(), w.tools("search")], {}),
    "calls without ids": ([fresh(), "done"], lambda w: [w.quota()], {}),
    "calls with one id": ([fresh("one"), "done"], lambda w: [w.quota()], {}),
    "a refused call": (
        [["search"] * 3, ["search"], "done"],
        lambda w: [ToolCallLimitMiddleware(run_limit=2, telemetry=w.telemetry)],
        {},
    ),
    "a structured response": (
        [["search"], [("Answer", {"text": 1})], [("Answer", {"text": "yes"})]],
        lambda w: [w.quota()],
        {"response_format": ToolStrategy(Answer)},
    ),
    "model retries": (
        [ConnectionError(), ["search"], ConnectionError(), "done"],
        lambda w: [w.quota(), ModelRetryMiddleware(max_retries=2, **AT_ONCE)],
        {},
    ),
    "model fallbacks": (
        [ConnectionError(), "done"],
        lambda w: [w.quota(), ModelFallbackMiddleware(model(["search"]))],
        {},
    ),
    "tool retries": (
        [["flaky"], "done"],
        lambda w: [ToolRetryMiddleware(max_retries=2, **AT_ONCE), w.quota()],
        {},
    ),
    "PII and todos": (
        [["search", ("write_todos", {"todos": []})], "done"],
        lambda w: [PIIMiddleware("email"), TodoListMiddleware(), w.quota()],
        {},
    ),
}


@pytest.mark.parametrize("case", ORDINARY.values(), ids=ORDINARY.keys())
@both_forms
async def test_ordinary_agents(case: Any, form: Form, watched: Watched, search: BaseTool) -> None:
    """All calls of an agent with any limiter of ours are judged, whatever stands beside it."""
    script, middleware, options = case
    agent = new_agent(
        model(*script), [search, once_failing()], middleware=middleware(watched), **options
    )

    await play(agent, form)

    assert watched.unjudged == {}
