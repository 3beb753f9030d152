"""Runs and threads that go on, where they stopped or under another middleware."""

from itertools import permutations
from typing import Any

import langchain.agents.middleware as langchain_middleware
import pytest
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import ModelCallLimit, ToolCallLimit
from langchain_quota.limits import Limit
from tests.scene import CONFIG, Kind, Scene, check_history, model_limiter, tool_limiter
from tests.telemetry import HAS_INLINE, Signals


def for_ever(messages: Any) -> list[str]:
    return ["search"]


@pytest.mark.parametrize("stop", ["interrupt_before", "interrupt_after"])
async def test_runs_that_stop(stop: str, signals: Signals) -> None:
    """A run's limits hold over all its breakpoints; the next run has new ones."""
    models = model_limiter(signals, run_limit=5)
    tools = tool_limiter(signals, run_limit=2, exit_behavior="end")
    stops: Any = {stop: ["tools", "model"]}
    scene = Scene(signals, for_ever, [tools, models], **stops)
    for run in (1, 2):
        await scene.play()
        while scene.agent.get_state(CONFIG).next:
            await scene.go_on()
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


KINDS: list[Kind] = ["drop-in", "quota", *(["inline"] if HAS_INLINE else [])]  # type: ignore[list-item]


@pytest.mark.parametrize("kinds", list(permutations(KINDS, 2)), ids="-".join)
async def test_swapping_on_a_running_thread(kinds: tuple[Kind, Kind], signals: Signals) -> None:
    """A thread goes on with its counts, under LangChain's keys, when another kind takes over."""
    limits: list[Limit] = [
        ModelCallLimit(thread_limit=8),
        ToolCallLimit("search", thread_limit=3),
        ToolCallLimit(thread_limit=5),
    ]
    ran = list[str]()
    options: dict[str, Any] = {"ran": ran, "checkpointer": InMemorySaver()}
    first = Scene(signals, [["search", "calc"], "done"], limits, kind=kinds[0], **options)
    await first.play()
    script = [["search"] * 3, ["calc", "calc"], "done"]
    second = await Scene(signals, script, limits, kind=kinds[1], **options).played()
    # Of three more searches two fit under search's 3, and then one calc under the 5 of all.
    assert sorted(ran) == ["calc", "calc", "search", "search", "search"]
    state = second.state()
    assert state["thread_tool_call_count"] == {"__all__": 5, "search": 3}
    assert state["thread_model_call_count"] == 5
    check_history(state["messages"])
