"""Limits that are only tried out: checked and counted in full, and what they refuse runs."""

from typing import Any

import pytest

from langchain_quota import ModelCallLimit, ToolCallLimit
from langchain_quota.core.decision import Outcome
from langchain_quota.limits import Limit
from langchain_quota.testing import captured_decisions
from tests.scene import Order, Scene, in_order, orders, texts
from tests.telemetry import Signals


@pytest.mark.parametrize("exit_behavior", ["continue", "end", "error"])
async def test_tool_calls(exit_behavior: Any, signals: Signals) -> None:
    """What a dry-run limit refuses runs and is counted, whatever its exit behaviour."""
    limit = ToolCallLimit("search", run_limit=1, exit_behavior=exit_behavior, enforce=False)
    scene = Scene(signals, [["search", "search"], ["search"], "done"], [limit])
    with captured_decisions() as decisions:
        await scene.play()
    assert (scene.ran, scene.last_text()) == (["search"] * 3, "done")
    assert scene.answers() == [("search", "success")] * 3
    outcomes = [each.outcome for each in decisions if each.call.kind == "tool"]
    assert outcomes == [Outcome.ALLOWED, Outcome.WOULD_BLOCK, Outcome.WOULD_BLOCK]
    assert scene.used(limit) == (3, 3)
    counted = [scene.calls(each, "search") for each in ("allowed", "would_block", "blocked")]
    assert counted == [1, 2, 0]
    assert scene.metric("tool:search", "allowed") == 1
    assert scene.metric("tool:search", "would_block", "run") == 2
    assert scene.metric("tool:search", "blocked", "run") == 0


@pytest.mark.parametrize("exit_behavior", ["end", "error"])
async def test_model_calls(exit_behavior: Any, signals: Signals) -> None:
    """A model limit in a dry run lets the run go on to its own end."""
    limit = ModelCallLimit(run_limit=1, exit_behavior=exit_behavior, enforce=False)
    scene = Scene(signals, [["search"], ["search"], "done"], [limit])
    await scene.play()
    assert scene.last_text() == "done"
    assert scene.used(limit) == (3, 3)
    assert scene.calls("would_block") == scene.metric("model", "would_block", "run") == 2
    assert scene.metric("model", "allowed") == 1


@orders(2)
async def test_beside_one_that_bites(order: Order, signals: Signals) -> None:
    """Two thresholds over one count, the lower in a dry run: allowed, would block, blocked."""
    limits = (
        ToolCallLimit("search", run_limit=1, enforce=False, name="trial", message="A dry run."),
        ToolCallLimit("search", run_limit=2, name="real", message="For real."),
    )
    scene = Scene(signals, [["search"] * 3, "done"], in_order(order, *limits))
    result = await scene.play()
    assert scene.ran == ["search", "search"]
    assert scene.state()["thread_tool_call_count"] == {"search": 2}
    counted = [scene.calls(each, "search") for each in ("allowed", "would_block", "blocked")]
    assert counted == [1, 1, 1]
    assert scene.metric("trial", "allowed") == 1
    assert scene.metric("trial", "would_block", "run") == 2
    assert scene.metric("trial", "blocked", "run") == 0
    assert scene.metric("real", "allowed") == 2
    assert scene.metric("real", "blocked", "run") == 1
    assert sorted(texts(result)) == ["For real.", "search ran", "search ran"]


async def test_what_the_one_that_bites_says(signals: Signals) -> None:
    """The last word names the limits that bite, never one in a dry run."""
    limits: list[Limit] = [
        ToolCallLimit(thread_limit=0, exit_behavior="error", enforce=False, message="A dry run."),
        ToolCallLimit("search", run_limit=0, exit_behavior="end"),
    ]
    scene = Scene(signals, [["search"], "done"], limits)
    await scene.play()
    assert scene.last_text() == "'search' tool call limit reached: run limit exceeded (1/0 calls)."
    assert scene.ran == []


async def test_the_model_is_not_told(signals: Signals) -> None:
    """A dry-run limit is not in the note to the model, and hides no tool."""
    limits: list[Limit] = [
        ToolCallLimit("search", run_limit=1, enforce=False),
        ModelCallLimit(run_limit=1, enforce=False),
    ]
    script = [["search"], ["search"], "done"]
    scene = Scene(signals, script, limits, tell_model=True, hide_exhausted=True)
    await scene.play()
    assert scene.ran == ["search", "search"]
    for request in scene.model.calls:
        assert request.tools == ("search", "calc")
        assert [each.text for each in request.messages if each.type == "human"] == ["hi"]
