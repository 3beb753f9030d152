"""A loop of model and tools in a StateGraph, held to limits by GraphQuota."""

import operator
import re
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.tools import BaseTool
from langgraph.constants import START
from langgraph.graph import MessagesState, StateGraph, add_messages
from langgraph.prebuilt import ToolNode
from pydantic import BaseModel

from langchain_quota import (
    GraphQuota,
    ToolCallLimit,
)
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.scene import CONFIG, Form, Scene, both_forms, check_history, recording
from tests.signals import Signals

HELLO: Any = {"messages": [("user", "hi")]}
THREAD: Any = CONFIG


def thrice(messages: list[AnyMessage]) -> Any:
    """Three searches a turn, then an answer."""
    return "done" if messages[-1].type == "tool" else ["search"] * 3


def offered(model: ScriptedChatModel) -> list[int]:
    """How many tools each request offered."""
    return [len(call.tools) for call in model.calls]


class Model(BaseModel):
    messages: Annotated[list[AnyMessage], add_messages]
    topic: str = ""


async def test_a_tool_node_of_the_users_own(signals: Signals) -> None:
    """A `ToolNode` with settings of its own runs the admitted calls; its tools are offered."""
    ran: list[str] = []

    def fail() -> None:
        raise ValueError("broken")

    node = ToolNode([recording("search", ran, fail)], handle_tool_errors="It broke.")
    limit = ToolCallLimit("search", run_limit=2)
    scene = Scene(signals, thrice, [limit], ran=ran, loop={"tools": node}, kind="graph")
    result = await scene.play()
    contents = sorted(each.content for each in result["messages"] if each.type == "tool")
    assert contents == ["It broke.", "It broke.", contents[-1]]
    assert offered(scene.model) == [1, 1]


@pytest.mark.parametrize("state", [MessagesState, Model])
@pytest.mark.parametrize(
    ("calls", "ran", "requests"),
    [
        (["fetch"], ["fetch"], 1),
        (["fetch", "fetch"], ["fetch", "fetch"], 1),
        (["fetch", "search"], ["fetch", "search"], 2),
        (["fetch"] * 3, ["fetch"] * 2, 1),
    ],
    ids=["one", "two", "beside another tool", "beside one that is refused"],
)
async def test_a_tool_that_returns_directly(
    calls: list[str], ran: list[str], requests: int, state: Any, signals: Signals
) -> None:
    """Its answer ends the loop if all calls of the batch are of such tools, as in create_agent."""
    names: list[str] = []
    fetch = recording("fetch", names)
    fetch.return_direct = True
    scene = Scene(
        signals,
        [calls, "done"],
        [ToolCallLimit("fetch", run_limit=2)],
        tools=[fetch, recording("search", names)],
        ran=names,
        state=state,
        kind="graph",
    )
    result = await scene.play()
    assert sorted(scene.ran) == ran
    assert len(scene.model.calls) == requests
    check_history(result["messages"])


async def test_two_loops_in_a_graph(signals: Signals) -> None:
    """Each has a name of its own in telemetry, and both draw on the budget of the run."""
    ran: list[str] = []
    graph = StateGraph(MessagesState)
    quota = GraphQuota([ToolCallLimit("search", run_limit=4)], telemetry=signals.telemetry)
    tools = [recording("search", ran)]
    first, second = (
        ScriptedChatModel(script=[["search"] * 3, "done"]),
        ScriptedChatModel(script=[["search"] * 3, "done"]),
    )
    graph.add_node("hand over", lambda state: {"messages": [HumanMessage("go on")]})
    quota.add_to(graph, model=first, tools=tools, name="planner", end="hand over")
    quota.add_to(graph, model=second, tools=tools, name="writer", start="hand over")
    with captured_decisions() as decisions:
        result = await graph.compile().ainvoke(HELLO)
    admitted = [each.call.agent for each in decisions if each.outcome == "allowed"]
    assert admitted.count("planner") == 3 + 2
    assert admitted.count("writer") == 1 + 2
    assert len(ran) == 4
    assert {each.name for each in result["messages"] if each.type == "ai"} == {"planner", "writer"}
    check_history(result["messages"])


@both_forms
@pytest.mark.parametrize("name", [None, "planner"])
async def test_reset(form: Form, name: str | None, signals: Signals) -> None:
    """A thread's use is set back to nothing; one that waits in mid-run is left alone."""
    limit = ToolCallLimit("search", thread_limit=3)
    scene = Scene(signals, thrice, [limit], form=form, loop={"name": name}, kind="graph")
    await scene.play()
    await scene.play()
    assert len(scene.ran) == 3
    if form == "sync":
        scene.quota.reset(scene.agent, THREAD)
    else:
        await scene.quota.areset(scene.agent, THREAD)
    assert scene.agent.get_state(CONFIG).next == ()
    await scene.play()
    assert len(scene.ran) == 6


class WithoutMessages(TypedDict):
    question: str


class Added(TypedDict):
    messages: Annotated[list[AnyMessage], operator.add]


class Replaced(TypedDict):
    messages: list[AnyMessage]


def with_model() -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {})
    graph.add_edge(START, "model")
    return graph


def already_compiled() -> Any:
    graph = with_model()
    graph.compile()
    return graph


PLAIN = ScriptedChatModel(script=[])
SEARCH: list[BaseTool] = [recording("search", [])]


@pytest.mark.parametrize(
    ("graph", "given", "error", "text"),
    [
        (lambda: StateGraph(WithoutMessages), {}, ValueError, "state has no messages"),
        (lambda: StateGraph(Replaced), {}, ValueError, "does not keep messages by their id"),
        (lambda: StateGraph(Added), {}, ValueError, "does not keep messages by their id"),
        (with_model, {}, ValueError, "has a node 'model' already"),
        (lambda: with_model().compile(), {}, TypeError, "compiled one: call add_to before"),
        (already_compiled, {}, TypeError, "compiled already"),
        (lambda: MessagesState, {}, TypeError, "graph must be a StateGraph"),
        (None, {"model": PLAIN.bind_tools(SEARCH)}, TypeError, "with tools bound"),
        (None, {"model": 3}, TypeError, "model must be a chat model, or the model's node"),
        (None, {"model": lambda state: {}, "prompt": "Hi."}, TypeError, "prompt is for a chat"),
        (None, {"tools": "search"}, TypeError, "tools must be a list of tools or a ToolNode"),
        (None, {"tools": SEARCH[0]}, TypeError, "tools must be a list of tools or a ToolNode"),
        (None, {"name": ""}, TypeError, "name must be a name or None, not ''"),
        (None, {"start": 3}, TypeError, "start must be the name of a node, START or None, not 3"),
        (None, {"end": None}, TypeError, "end must be the name of a node, or END, not None"),
    ],
)
def test_what_does_not_fit_is_an_error(
    graph: Any, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    """A graph or an argument that does not fit is named at once, with what to do."""
    to = StateGraph(MessagesState) if graph is None else graph()
    with pytest.raises(error, match=re.escape(text)):
        GraphQuota([ToolCallLimit(run_limit=1)]).add_to(
            to, **{"model": PLAIN, "tools": SEARCH, **given}
        )
