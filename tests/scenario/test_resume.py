"""Runs that stop and go on: the budget goes on with them, and a new run has a new one."""

from typing import Any

import langchain.agents.middleware as langchain_middleware
import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import Limit, ModelCallLimit, RepeatLimit, TokenLimit, ToolCallLimit
from tests.scene import CONFIG, Scene, model_limiter, tool_limiter
from tests.telemetry import Signals
from tests.tokens import TOTAL, answer, spent


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


SAVED: dict[str, Any] = {
    "run": "a-run",
    "root_run": None,
    "root_used": {},
    "run_tools": {"search": 1},
    "run_model": 2,
    "thread_model": 5,
    "model_counted": False,
    "refusals": {},
    "refused": None,
    "ended": None,
    "final": "",
    "trace": None,
    "turn": "question",
    "begun_by": ["QuotaMiddleware"],
    "model_mode": "admitted",
    "owed": {},
    "thread_spent": {TOTAL: 700},
    "run_spent": {TOTAL: 200},
    "spent_by": "a-call",
    "admitted": None,
    "error": None,
    "granted": {"model/run": 1},
    "batch": None,
    "repeats": {},
}
"""What the version before kept of a thread in mid-run, beside LangChain's keys."""


async def test_a_thread_that_the_version_before_has_saved(signals: Signals) -> None:
    """It goes on in mid-run with all its counts: calls, tokens, and what a person has granted."""
    limits: list[Limit] = [
        ModelCallLimit(run_limit=3, exit_behavior="ask"),
        ToolCallLimit("search", run_limit=2),
        TokenLimit(thread_limit=800),
        RepeatLimit(9),
    ]
    script = [answer(30, ("search", {"query": each})) for each in "ab"]
    scene = Scene(signals, script, limits)
    saved = {"messages": [HumanMessage("hi", id="question")], "langchain_quota": SAVED}
    scene.agent.update_state(CONFIG, saved, as_node="QuotaMiddleware.before_agent")
    assert (scene.usage().model, scene.usage().run_model, spent(scene)) == (5, 2, (700, 200))

    result = await scene.go_on()
    # One call is left of the limit, and one of the grant.
    assert (len(scene.model.calls), scene.ran) == (2, ["search"])
    assert "__interrupt__" in result
    assert (scene.usage().run_model, dict(scene.usage().run_tools)) == (4, {"search": 2})
    assert spent(scene) == (760, 260)
    assert len(scene.state()["langchain_quota"]) <= 12
