"""The ways of building a loop of model and tools that `GraphQuota` takes, each as a `Scene`."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda
from langgraph.constants import START
from langgraph.func import entrypoint, task
from langgraph.graph import StateGraph, add_messages
from langgraph.prebuilt import ToolNode, create_react_agent

from tests.scene import Scene
from tests.telemetry import Signals

SEEN = ("chat model", "call_model", "functional", "react")
"""The ways in which the library sees each request of the model."""
UNSEEN = ("functional, own calls", "hooks alone")
"""The ways in which it sees no call of the model, but its answers only."""
SHAPES = (*SEEN, "own calls", *UNSEEN)

shapes = pytest.mark.parametrize("shape", SHAPES)


def looped(shape: str, signals: Signals, script: Any, limits: Sequence[Any], **given: Any) -> Scene:
    """A scene whose loop is written in one of these ways."""
    if shape == "react":
        return Scene(signals, script, limits, kind="react", **given)

    def own(scene: Scene) -> dict[str, Any]:
        node, anode = node_of(scene, by_call_model=shape == "call_model")
        return {"model": RunnableLambda(node, anode)}

    loop = own if shape in ("call_model", "own calls") else None
    scene = Scene(signals, script, limits, kind="graph", loop=loop, **given)
    if shape.startswith("functional"):
        scene.agent = functional(scene, by_call_model=shape == "functional")
    elif shape == "hooks alone":
        scene.agent = around_react(scene)
    return scene


def node_of(scene: Scene, *, by_call_model: bool) -> tuple[Any, Any]:
    """A model's node, sync and async, which calls the model with `call_model` or by itself."""
    quota, model, tools = scene.quota, scene.model, scene.tools
    bound = model.bind_tools(tools)

    def node(state: Any) -> dict[str, list[Any]]:
        if by_call_model:
            return {"messages": [quota.call_model(model, state, tools)]}
        return {"messages": [bound.invoke(state["messages"])]}

    async def anode(state: Any) -> dict[str, list[Any]]:
        if by_call_model:
            return {"messages": [await quota.acall_model(model, state, tools)]}
        return {"messages": [await bound.ainvoke(state["messages"])]}

    return node, anode


def added(state: Any, update: Any) -> Any:
    """The state with more messages."""
    return {**state, "messages": add_messages(state["messages"], [*update["messages"]])}


def functional(scene: Scene, *, by_call_model: bool) -> Any:  # noqa: C901 - both forms
    """A loop in the functional API."""
    quota, tools, saver = scene.quota, ToolNode(scene.tools), scene.agent.checkpointer
    node, anode = node_of(scene, by_call_model=by_call_model)

    def run_tool(call: Any) -> Any:
        return tools.invoke([call])

    async def arun_tool(call: Any) -> Any:
        return await tools.ainvoke([call])

    @entrypoint(checkpointer=saver)
    def agent(given: Any, *, previous: Any = None) -> Any:
        begin, before, after = task(quota.begin), task(quota.before_model), task(quota.after_model)
        call, run = task(node), task(run_tool)
        state = begin(added(previous or {"messages": []}, given)).result()
        while (state := before(state).result())["jump_to"] != "end":
            state = after(added(state, call(state).result())).result()
            if state["jump_to"] == "end":
                break
            running = [run(each) for each in quota.open_calls(state)]
            for each in running:
                state = added(state, each.result())
        return entrypoint.final(value=state, save=state)

    @entrypoint(checkpointer=saver)
    async def async_agent(given: Any, *, previous: Any = None) -> Any:
        begin, before = task(quota.abegin), task(quota.abefore_model)
        after, call, run = task(quota.aafter_model), task(anode), task(arun_tool)
        state = await begin(added(previous or {"messages": []}, given))
        while (state := await before(state))["jump_to"] != "end":
            state = await after(added(state, await call(state)))
            if state["jump_to"] == "end":
                break
            for answers in await asyncio.gather(*map(run, quota.open_calls(state))):
                state = added(state, answers)
        return entrypoint.final(value=state, save=state)

    return agent if scene.form == "sync" else async_agent


def around_react(scene: Scene) -> Any:
    """A graph around a `create_react_agent` whose hooks do not have the model."""
    agent: Any = create_react_agent(scene.model, scene.tools, **scene.quota.react_hooks())
    graph = StateGraph(agent.builder.state_schema)
    graph.add_node("agent", agent)
    graph.add_edge(START, "agent")
    return graph.compile(checkpointer=scene.agent.checkpointer)
