"""create_react_agent and create_supervisor, held to limits by the hooks that they take."""

import re
import types
from typing import Any

import pytest
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent

from langchain_quota import GraphQuota, ModelCallLimit, ToolCallLimit, usage
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import CONFIG, Scene, Weather, check_history, recording
from tests.telemetry import Signals

pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")

HELLO: Any = {"messages": [("user", "hi")]}
ONE: list[Limit] = [ModelCallLimit(run_limit=1)]


class Alone:
    """An agent whose hooks do not have its model, and what is built around it."""

    def __init__(self, signals: Signals, limits: list[Limit]) -> None:
        quota = GraphQuota(limits, telemetry=signals.telemetry)
        self.ran: list[str] = []
        self.model = ScriptedChatModel(script=lambda _: ["search", "search"])
        tools = [recording("search", self.ran)]
        self.agent: Any = create_react_agent(self.model, tools, **quota.react_hooks())
        self.graph: Any = StateGraph(self.agent.builder.state_schema)


async def test_hooks_alone_take_no_message_away(signals: Signals) -> None:
    """They end the graph around the agent; its messages stay, also those of a parallel node."""
    alone = Alone(signals, ONE)
    # LangGraph takes the updates of a step in the order of the nodes' names.
    alone.graph.add_node("a sibling", lambda state: {"messages": [("ai", "sibling")]})
    alone.graph.add_node("agent", alone.agent)
    alone.graph.add_edge(START, "a sibling")
    alone.graph.add_edge(START, "agent")
    result = await alone.graph.compile().ainvoke({"messages": [("user", "one"), ("user", "two")]})
    ended = "Model call limits exceeded: run limit (1/1)"
    assert {"one", "two", "sibling", ended} <= {message.text for message in result["messages"]}


@pytest.mark.parametrize("place", ["nothing", "a function", "a task", "another state"])
async def test_hooks_alone_where_nothing_can_end(place: str, signals: Signals) -> None:
    """Where the agent is no node of a graph with its state, its first step is an error."""
    alone = Alone(signals, ONE)

    async def call(_: Any = "") -> Any:
        return {"messages": [(await alone.agent.ainvoke(HELLO))["messages"][-1]]}

    @entrypoint()
    async def flow(given: Any) -> Any:
        return await task(call)(given)

    app = {"nothing": alone.agent, "a task": flow}.get(place)
    if app is None:
        graph: Any = alone.graph if place == "a function" else StateGraph(MessagesState)
        graph.add_node("agent", alone.agent if place == "another state" else call)
        graph.add_edge(START, "agent")
        app = graph.compile()
    remedy = re.escape("create_react_agent(**quota.react_hooks(model, tools))")
    with pytest.raises(RuntimeError, match=remedy):
        await app.ainvoke(HELLO, CONFIG)
    assert alone.model.calls == ()


async def test_hooks_alone_limit_tools_anywhere(signals: Signals) -> None:
    """Limits on tools, and exceptions, need neither a model nor a graph around the agent."""
    tools = ToolCallLimit("search", run_limit=3, exit_behavior="end")
    alone = Alone(signals, [tools, ModelCallLimit(run_limit=9, exit_behavior="error")])
    result = await alone.agent.ainvoke(HELLO)
    assert len(alone.ran) == 2
    assert "limit" in result["messages"][-1].content


@pytest.mark.parametrize("subclassed", [True, False])
async def test_a_response_format_is_an_error(signals: Signals, *, subclassed: bool) -> None:
    """LangGraph would ask for it past the limits: before a call, the first step says what to do."""
    scene = Scene(signals, lambda _: "done", ONE, kind="react")
    hooks = scene.quota.react_hooks(scene.model, [])
    if subclassed:
        hooks["state_schema"] = types.new_class("Own", (hooks["state_schema"],))
    scene.agent = create_react_agent(**hooks, response_format=Weather)

    with pytest.raises(RuntimeError, match=r"create_agent\(model, tools, middleware=.*format=…\)"):
        await scene.play()

    assert scene.model.calls == ()


def supervisor(signals: Signals, limit: Limit, scene: Scene) -> ScriptedChatModel:
    """Make the scene's agent a supervisor of a worker, whose model is returned."""
    make = pytest.importorskip("langgraph_supervisor").create_supervisor
    worked = ScriptedChatModel(script=lambda _: "worked")
    worker = create_react_agent(worked, [], name="worker")
    hooks = GraphQuota([limit], telemetry=signals.telemetry).react_hooks(name="boss")
    saver = scene.agent.checkpointer
    graph = make([worker], model=scene.model, supervisor_name="boss", **hooks)
    scene.agent = graph.compile(name="team", checkpointer=saver)
    return worked


@pytest.mark.parametrize(
    ("limit", "workers"),
    [
        (ModelCallLimit(run_limit=2, thread_limit=5), [2, 2, 1]),
        (ToolCallLimit("transfer_to_worker", thread_limit=3), [3, 0, 0]),
    ],
    ids=["model calls", "hand-overs"],
)
async def test_a_supervisor(limit: Limit, workers: list[int], signals: Signals) -> None:
    """Its model calls and hand-overs are limited, over the whole run and from turn to turn."""

    def script(messages: Any) -> Any:
        refused = "limit exceeded" in str(messages[-1].content)
        return "done" if refused else ["transfer_to_worker"]

    scene = Scene(signals, script)
    worked = supervisor(signals, limit, scene)
    for count in workers:
        before = len(worked.calls)
        result = await scene.play()
        assert len(worked.calls) - before == count
        check_history(result["messages"])
        assert result["messages"][-1].content != "worked"
    assert usage(scene.agent.get_state(CONFIG)).run_model <= 2


async def test_a_supervisor_of_a_supervisor(signals: Signals) -> None:
    """A limit that ends a team's run does not accuse the supervisor that goes on after it."""
    lead = Scene(signals, lambda _: ["transfer_to_worker"], checkpointer=None)
    limit = ToolCallLimit("transfer_to_worker", run_limit=1, exit_behavior="end")
    worked = supervisor(signals, limit, lead)
    # No call's id of this model is one of the other's.
    to_team = {"name": "transfer_to_team", "args": {}, "id": "top_1"}
    top = ScriptedChatModel(script=[[to_team], "final answer"])
    hooks = GraphQuota([ModelCallLimit(run_limit=9)], telemetry=signals.telemetry).react_hooks()
    make = pytest.importorskip("langgraph_supervisor").create_supervisor
    result = await make([lead.agent], model=top, **hooks).compile().ainvoke(HELLO)
    check_history(result["messages"])
    assert any("limit" in message.text for message in result["messages"])
    assert result["messages"][-1].text == "final answer"
    assert len(worked.calls) == 1
