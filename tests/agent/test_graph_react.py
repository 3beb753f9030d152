"""create_react_agent and create_supervisor, held to limits by the hooks that they take."""

import asyncio
import re
import types
from typing import Any

import pytest
from langchain_core.messages import AnyMessage
from langchain_core.tools import tool
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from pydantic import BaseModel

from langchain_quota import GraphQuota, ModelCallLimit, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, Scene, both_forms, check_history, recording
from tests.signals import Signals

pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")


HELLO: Any = {"messages": [("user", "hi")]}


def for_ever(messages: list[AnyMessage]) -> Any:
    return ["search", "search"]


@pytest.mark.parametrize("place", ["a node's function", "a task", "another state"])
async def test_without_a_model_in_a_graph_that_cannot_end(place: str, signals: Signals) -> None:
    """Where the agent is no node of a graph with its state, its first step is an error."""
    quota = GraphQuota([ModelCallLimit(run_limit=1)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=for_ever)
    agent: Any = create_react_agent(model, [recording("search", [])], **quota.react_hooks())

    async def call(_: Any) -> Any:
        return {"messages": [(await agent.ainvoke(HELLO))["messages"][-1]]}

    @entrypoint()
    async def flow(given: Any) -> Any:
        return await task(call)(given)

    schema = MessagesState if place == "another state" else agent.builder.state_schema
    graph: Any = StateGraph(schema)
    graph.add_node("agent", agent if place == "another state" else call)
    graph.add_edge(START, "agent")
    app: Any = flow if place == "a task" else graph.compile()
    with pytest.raises(RuntimeError, match=re.escape("quota.react_hooks(model, tools)")):
        await app.ainvoke(HELLO)
    assert model.calls == ()


@both_forms
async def test_without_a_model_nor_a_graph_around_it(form: Form, signals: Signals) -> None:
    """An agent that no hook can end is an error at its first step; so is one in a tool."""
    remedy = re.escape("create_react_agent(**quota.react_hooks(model, tools))")
    quota = GraphQuota([ModelCallLimit(run_limit=2)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=for_ever)
    agent = create_react_agent(model, [recording("search", [])], **quota.react_hooks())
    scene = Scene(signals, for_ever, [ModelCallLimit(run_limit=2)], form=form, kind="graph")
    scene.agent = agent
    with pytest.raises(RuntimeError, match=remedy):
        await scene.play()

    @tool
    def delegate() -> str:
        """Delegate."""
        return str(agent.invoke({"messages": [("user", "hi")]}))

    scene = Scene(
        signals, [["delegate"]], [ToolCallLimit(run_limit=2)], tools=[delegate], kind="graph"
    )
    with pytest.raises(RuntimeError, match=remedy):
        await scene.play()
    assert model.calls == ()


class Found(BaseModel):
    """What was found."""

    text: str = ""


@both_forms
@pytest.mark.parametrize("has_tools", [True, False])
@pytest.mark.parametrize("subclassed", [True, False])
async def test_a_response_format_is_an_error_before_a_call(
    form: Form,
    signals: Signals,
    *,
    has_tools: bool,
    subclassed: bool,
) -> None:
    """LangGraph would ask for it past the limits: the agent's first step says so, and the way."""
    quota = GraphQuota([ModelCallLimit(run_limit=2)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=lambda messages: "done")
    hooks = quota.react_hooks(model, [recording("search", [])] if has_tools else [])
    if subclassed:
        hooks["state_schema"] = types.new_class("Own", (hooks["state_schema"],))
    agent: Any = create_react_agent(**hooks, response_format=Found)

    call = asyncio.to_thread(agent.invoke, HELLO) if form == "sync" else agent.ainvoke(HELLO)
    with pytest.raises(RuntimeError, match=r"create_agent\(model, tools, middleware=.*format=…\)"):
        await call

    assert model.calls == ()


def test_arguments() -> None:
    """A model with its tools bound is named at once; without a model there are three arguments."""
    quota = GraphQuota([ToolCallLimit(run_limit=1)])
    bound: Any = ScriptedChatModel(script=[]).bind_tools([recording("search", [])])
    with pytest.raises(TypeError, match="with tools bound"):
        quota.react_hooks(bound)
    assert quota.react_hooks().keys() == {"pre_model_hook", "post_model_hook", "state_schema"}


@pytest.mark.parametrize(
    "limit",
    [
        ModelCallLimit(run_limit=2),
        ToolCallLimit("transfer_to_worker", run_limit=1, exit_behavior="end"),
    ],
    ids=["model calls", "hand-overs"],
)
async def test_a_supervisor_of_a_supervisor(limit: Limit, signals: Signals) -> None:
    """A limit that ends a team's run does not accuse the supervisor that goes on after it."""
    langgraph_supervisor = pytest.importorskip("langgraph_supervisor")
    make = langgraph_supervisor.create_supervisor
    worked = ScriptedChatModel(script=lambda messages: "worked")
    worker = create_react_agent(worked, [recording("search", [])], name="worker")
    lead = ScriptedChatModel(script=lambda messages: ["transfer_to_worker"])
    hooks = GraphQuota([limit], telemetry=signals.telemetry).react_hooks(name="lead")
    team = make([worker], model=lead, supervisor_name="lead", **hooks).compile(name="team")
    # No call's id of this model is one of the other's.
    to_team = {"name": "transfer_to_team", "args": {}, "id": "top_1"}
    top = ScriptedChatModel(script=[[to_team], "final answer"])
    hooks = GraphQuota([ModelCallLimit(run_limit=9)], telemetry=signals.telemetry).react_hooks()
    result = await make([team], model=top, **hooks).compile().ainvoke(HELLO)
    check_history(result["messages"])
    assert any("limit" in message.text for message in result["messages"])
    assert result["messages"][-1].text == "final answer"
    assert len(worked.calls) == 1
