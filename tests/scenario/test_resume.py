"""Runs that stop and go on: the budget goes on with them, and a new run has a new one."""

from typing import Any

import langchain.agents.middleware as langchain_middleware
import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langgraph.checkpoint.memory import InMemorySaver

from tests.scene import CONFIG, Scene, model_limiter, tool_limiter
from tests.telemetry import Signals


def for_ever(messages: Any) -> list[str]:
    return ["search"]


@pytest.mark.parametrize("stop", ["a person", "interrupt_before", "interrupt_after"])
async def test_runs_that_stop(stop: str, signals: Signals) -> None:
    """A run's limits hold over all its approvals and breakpoints; the next run has new ones."""
    models = model_limiter(signals, run_limit=5)
    tools = tool_limiter(signals, run_limit=2, exit_behavior="end")
    if stop == "a person":
        review = HumanInTheLoopMiddleware[Any, Any]({"search": True})
        scene = Scene(signals, for_ever, [models, tools, review])
    else:
        stops: Any = {stop: ["tools", "model"]}
        scene = Scene(signals, for_ever, [tools, models], **stops)
    for run in (1, 2):
        result = await scene.play()
        while scene.agent.get_state(CONFIG).next:
            approves = "__interrupt__" in result and stop == "a person"
            approved = scene.resume({"decisions": [{"type": "approve"}]}) if approves else None
            result = await (approved or scene.go_on())
        assert scene.ran == ["search"] * 2 * run
        assert len(scene.model.calls) == 3 * run
        scene.check()


async def test_a_thread_begun_under_langchains_limiters(signals: Signals) -> None:
    """A thread begun under LangChain's limiters goes on under ours with its thread counts."""
    theirs: list[Any] = [
        langchain_middleware.ToolCallLimitMiddleware[Any, Any](thread_limit=9, run_limit=2),
        langchain_middleware.ModelCallLimitMiddleware[Any, Any](thread_limit=9, run_limit=3),
    ]
    ours = [
        tool_limiter(signals, thread_limit=3, run_limit=2),
        model_limiter(signals, thread_limit=5, run_limit=3),
    ]
    saver = InMemorySaver()
    await Scene(signals, for_ever, theirs, checkpointer=saver).play()
    scene = Scene(signals, for_ever, ours, checkpointer=saver)
    for _ in range(2):
        await scene.play()
        scene.check(before={"__all__": 2, "model": 3})
    assert scene.ran == ["search"]
    assert len(scene.model.calls) == 2
