"""Calls that no limiter checks, in runs with limits: which are counted, and which are not."""

import logging
from typing import Any

import pytest
from langchain.agents.middleware import ModelRetryMiddleware, SummarizationMiddleware
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, ToolCall
from langchain_core.tools import BaseTool
from langgraph.graph import START, MessagesState, StateGraph

from langchain_quota import ModelCallLimit, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import INVALID, VALID, Form, Scene, Weather, both_forms, recording
from tests.telemetry import Signals, needs_inline, telling
from tests.tokens import tool

GO: dict[str, Any] = {"messages": [("user", "Go!")]}
LIMITS: list[Limit] = [ModelCallLimit(run_limit=99), ToolCallLimit(run_limit=99)]
NAME = "langchain_quota_unchecked_calls_total"
SEARCH = recording("search", [])


@pytest.fixture
def watched() -> Signals:
    """Telemetry that counts calls which no limiter checks."""
    return telling(count_unchecked_calls=True)


def agent(watched: Signals, *script: Any, items: Any = (), **options: Any) -> Any:
    """An agent without a memory; with items it has limits."""
    return Scene(watched, list(script), items, **{"checkpointer": None, **options}).agent


def asking(*others: tuple[Any, Any]) -> BaseTool:
    """A tool that calls other runnables, each with what it is given."""

    async def arun() -> None:
        for runnable, given in others:
            await runnable.ainvoke(given)

    return tool("ask", lambda: [runnable.invoke(given) for runnable, given in others], arun)


@pytest.mark.parametrize("kind", ["quota", "drop-in", pytest.param("inline", marks=needs_inline)])
async def test_a_limited_agent_in_a_tool(kind: Any, watched: Signals) -> None:
    """A sub-agent with limits is checked from its first call on, whichever limiter it has."""
    for limits in (LIMITS, LIMITS[:1], LIMITS[1:]):
        child = agent(watched, ["search"], "found", items=limits, kind=kind, name="child")
        parent = agent(watched, ["ask"], "done", items=LIMITS, tools=[asking((child, GO))])
        await parent.ainvoke(GO)
    assert watched.samples(NAME) == {}


@both_forms
async def test_an_agent_in_a_tool(
    form: Form, watched: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """A sub-agent without limits is counted with its model and its tool; its parent is not.

    Each kind of call is logged once, in whatever run, with its agent and what to do.
    """
    child = agent(watched, *[["search"] * 3, "found"] * 3, name="child")
    script: Any = [["ask", "search"], ["ask"], "done", ["ask"], "done"]
    parent = Scene(watched, script, LIMITS, tools=[asking((child, GO)), SEARCH], form=form)
    with caplog.at_level(logging.WARNING, "langchain_quota"):
        await parent.play()
        await parent.play()
    assert watched.samples(NAME) == {("child", "model"): 6, ("child", "tool"): 9}
    model_line, tool_line = caplog.records
    assert "model call of agent 'child'" in model_line.getMessage()
    assert "tool call of agent 'child'" in tool_line.getMessage()
    for remedy in ("QuotaMiddleware", "with_limits(", "GraphQuota(…).model(…)", NAME):
        assert remedy in model_line.getMessage()


async def test_the_log_is_bounded(
    watched: Signals, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many names agents have, so many kinds of calls are logged."""
    monkeypatch.setattr("langchain_quota.telemetry.recorder._MAX_FIRST_LINES", 3)
    chatty = ScriptedChatModel(script=lambda messages: "hm")
    models = [chatty.with_config(metadata={"lc_agent_name": f"agent {n}"}) for n in range(5)]
    tool = asking(*((each, "Hm?") for each in models))
    with caplog.at_level(logging.WARNING, "langchain_quota"):
        parent = agent(watched, ["ask"], "done", items=LIMITS, tools=[tool], name="parent")
        await parent.ainvoke(GO)
    assert [each.name for each in caplog.records] == ["langchain_quota"] * 3


def twins(call_id: str | None = None) -> AIMessage:
    call = ToolCall(name="search", args={}, id=call_id, type="tool_call")
    return AIMessage("", tool_calls=[call, call])


RETRIES = ModelRetryMiddleware[Any](max_retries=2, initial_delay=0, jitter=False)
THREE: list[Any] = [["search"] * 3, ["search"], "done"]
FAILS = ConnectionError()
TOLD: dict[str, Any] = {"response_format": ToolStrategy(Weather)}
ORDINARY: dict[str, tuple[list[Any], list[Any], dict[str, Any]]] = {
    "a quota": (THREE, LIMITS, {}),
    "model calls only": (THREE, LIMITS[:1], {}),
    "stacked": (THREE, [*LIMITS, ToolCallLimit("search", run_limit=9)], {"kind": "drop-in"}),
    "calls without ids": ([twins(), "done"], LIMITS, {}),
    "calls with one id": ([twins("one"), "done"], LIMITS, {}),
    "a structured response": ([["search"], [INVALID], [VALID]], LIMITS, TOLD),
    "retries": ([FAILS, ["search"], FAILS, "done"], [*LIMITS, RETRIES], {}),
}


@pytest.mark.parametrize("case", ORDINARY.values(), ids=ORDINARY.keys())
async def test_ordinary_agents(case: Any, watched: Signals) -> None:
    """All calls of an agent with any limiter of ours are checked, whatever stands beside it."""
    script, items, options = case
    await agent(watched, *script, items=items, tools=[SEARCH], **options).ainvoke(GO)
    assert watched.samples(NAME) == {}


def summarizing(watched: Signals) -> Any:
    short = SummarizationMiddleware(
        ScriptedChatModel(script=["So."]), trigger=("messages", 2), keep=("messages", 1)
    )
    return agent(watched, ["search"], "done", items=[*LIMITS, short])


def calling(watched: Signals) -> Any:
    by_hand = ToolCall(name="search", args={}, id="by hand", type="tool_call")
    tool = asking((ScriptedChatModel(script=["hm"]), "Hm?"), (SEARCH, {}), (SEARCH, by_hand))
    return agent(watched, ["ask"], "done", items=LIMITS, tools=[tool])


def before_the_first_limiter(watched: Signals) -> Any:
    child = agent(watched, "found", items=LIMITS, name="child")
    return agent(watched, ["ask"], "done", tools=[asking((child, GO))])


def loop_by_hand(watched: Signals) -> Any:
    async def loop(state: MessagesState) -> dict[str, Any]:
        asked = await ScriptedChatModel(script=[["search"]]).ainvoke(state["messages"])
        return {"messages": [asked, await SEARCH.ainvoke(asked.tool_calls[0])]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("loop", loop)
    graph.add_node("agent", agent(watched, "done", items=LIMITS))
    graph.add_edge(START, "loop")
    graph.add_edge("loop", "agent")
    return graph.compile()


def supervisor(watched: Signals) -> Any:
    package = pytest.importorskip("langgraph_supervisor")
    workers = [
        agent(watched, ["search"], "found", items=items, name=name)
        for name, items in (("limited", LIMITS), ("bare", []))
    ]
    own = ScriptedChatModel(script=[["transfer_to_limited"], ["transfer_to_bare"], "done"])
    return package.create_supervisor(workers, model=own).compile()


@pytest.mark.parametrize(
    ("make", "own", "bare"),
    [
        (summarizing, (1, 0), (0, 0)),
        (calling, (1, 2), (0, 0)),
        (before_the_first_limiter, (2, 1), (0, 0)),
        (loop_by_hand, (1, 1), (0, 0)),
        (supervisor, (3, 2), (2, 1)),
    ],
)
async def test_what_is_counted(make: Any, own: Any, bare: Any, watched: Signals) -> None:
    """What a run calls beside its limited agents is counted, with the agent that called it."""
    await make(watched).ainvoke(GO)
    found = watched.samples(NAME)
    for name, (models, tools) in (("unnamed", own), ("bare", bare)):
        assert found.pop((name, "model"), 0) == models
        assert found.pop((name, "tool"), 0) == tools
    assert found == {}
