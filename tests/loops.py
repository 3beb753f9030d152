"""The ways of building a loop of model and tools that a `GraphQuota` limits, each as a `Scene`."""

from collections.abc import Sequence
from typing import Any

import pytest
from langgraph.func import entrypoint, task
from langgraph.graph import add_messages

from tests.scene import Scene
from tests.telemetry import Signals

SHAPES = ("graph", "react", "functional")

shapes = pytest.mark.parametrize("shape", SHAPES)


def looped(shape: Any, signals: Signals, script: Any, limits: Sequence[Any], **given: Any) -> Scene:
    """A scene whose loop is written in one of these ways."""
    kind: Any = "graph" if shape == "functional" else shape
    scene = Scene(signals, script, limits, kind=kind, **given)
    if shape == "functional":
        scene.agent = functional(scene)
    return scene


def functional(scene: Scene) -> Any:
    """A loop in the functional API: each call is a task, so that a resumed run makes it once."""
    model, tools = scene.quota.model(scene.model, scene.tools), scene.quota.tools(scene.tools)
    saver: Any = scene.agent.checkpointer
    call, acall = task(model.invoke), task(model.ainvoke)
    run = task(lambda given: tools.invoke({"messages": given})["messages"])

    async def arun_tools(given: Any) -> Any:
        return (await tools.ainvoke({"messages": given}))["messages"]

    arun = task(arun_tools)

    @entrypoint(checkpointer=saver)
    def agent(given: Any, *, previous: Any = None) -> Any:
        messages: Any = add_messages((previous or {}).get("messages", []), given["messages"])
        while True:
            messages = add_messages(messages, [call(messages).result()])
            if not messages[-1].tool_calls:
                found = {"messages": messages}
                return entrypoint.final(value=found, save=found)
            messages = add_messages(messages, run(messages).result())

    @entrypoint(checkpointer=saver)
    async def async_agent(given: Any, *, previous: Any = None) -> Any:
        messages: Any = add_messages((previous or {}).get("messages", []), given["messages"])
        while True:
            messages = add_messages(messages, [await acall(messages)])
            if not messages[-1].tool_calls:
                found = {"messages": messages}
                return entrypoint.final(value=found, save=found)
            messages = add_messages(messages, await arun(messages))

    return agent if scene.form == "sync" else async_agent
