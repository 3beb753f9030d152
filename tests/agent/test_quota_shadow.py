"""Limits that are only tried out: judged and counted in full, and what they refuse runs."""

from typing import Any

import pytest

from langchain_quota import (
    ModelCallLimit,
    Outcome,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import captured_decisions
from tests.scene import Order, Scene, in_order, orders
from tests.signals import Signals


def quota(signals: Signals, *limits: Limit, **options: Any) -> QuotaMiddleware[Any, Any]:
    return QuotaMiddleware(limits, telemetry=signals.telemetry, **options)


def calls(signals: Signals, decision: str, kind: str = "tool", tool: str = "search") -> Any:
    return signals.value(
        "langchain_quota_calls_total", agent="unnamed", kind=kind, tool=tool, decision=decision
    )


@pytest.mark.parametrize("exit_behavior", ["continue", "end", "error"])
async def test_tool_calls(exit_behavior: Any, signals: Signals) -> None:
    """What a limit on trial refuses runs and is counted, whatever its exit behaviour."""
    scene = Scene(
        signals,
        [["search", "search"], ["search"], "done"],
        [
            quota(
                signals,
                ToolCallLimit("search", run_limit=1, exit_behavior=exit_behavior, enforce=False),
            )
        ],
    )

    with captured_decisions() as decisions:
        result = await scene.play()

    assert scene.ran == ["search"] * 3
    assert result["messages"][-1].content == "done"
    assert scene.answers() == [("search", "success")] * 3
    outcomes = [each.outcome for each in decisions if each.call.kind == "tool"]
    assert outcomes == [Outcome.ALLOWED, Outcome.WOULD_BLOCK, Outcome.WOULD_BLOCK]
    assert scene.state()["thread_tool_call_count"] == {"search": 3}
    assert scene.state()["langchain_quota"]["run_tools"] == {"search": 3}
    assert calls(signals, "allowed") == 1
    assert calls(signals, "would_block") == 2
    assert calls(signals, "blocked") == 0
    assert scene.metric("tool:search", "allowed") == 1
    assert scene.metric("tool:search", "would_block", "run") == 2
    assert scene.metric("tool:search", "blocked", "run") == 0
    scene.check_requests()


@pytest.mark.parametrize("exit_behavior", ["end", "error"])
async def test_model_calls(exit_behavior: Any, signals: Signals) -> None:
    """A model limit on trial lets the run go on to its own end."""
    scene = Scene(
        signals,
        [["search"], ["search"], "done"],
        [
            quota(signals, ModelCallLimit(run_limit=1, exit_behavior=exit_behavior, enforce=False)),
        ],
    )

    result = await scene.play()

    assert result["messages"][-1].content == "done"
    assert scene.state()["thread_model_call_count"] == 3
    assert scene.state()["langchain_quota"]["run_model"] == 3
    assert calls(signals, "would_block", "model", "none") == 2
    assert scene.metric("model", "would_block", "run") == 2
    assert scene.metric("model", "allowed") == 1


@orders(2)
async def test_beside_one_that_bites(order: Order, signals: Signals) -> None:
    """Two thresholds over one count, the lower on trial: allowed, would block, blocked."""
    scene = Scene(
        signals,
        [["search"] * 3, "done"],
        [
            quota(
                signals,
                *in_order(
                    order,
                    ToolCallLimit(
                        "search", run_limit=1, enforce=False, name="trial", message="On trial."
                    ),
                    ToolCallLimit("search", run_limit=2, name="real", message="For real."),
                ),
            )
        ],
    )

    await scene.play()

    assert scene.ran == ["search", "search"]
    assert scene.state()["thread_tool_call_count"] == {"search": 2}
    outcomes = [calls(signals, each) for each in ("allowed", "would_block", "blocked")]
    assert outcomes == [1, 1, 1]
    assert scene.metric("trial", "allowed") == 1
    assert scene.metric("trial", "would_block", "run") == 2
    assert scene.metric("trial", "blocked", "run") == 0
    assert scene.metric("real", "allowed") == 2
    assert scene.metric("real", "blocked", "run") == 1
    (refusal,) = [
        each for each in scene.state()["messages"] if getattr(each, "status", "") == "error"
    ]
    assert refusal.content == "For real."


@pytest.mark.parametrize("exit_behavior", ["end", "error"])
async def test_what_the_one_that_bites_says(exit_behavior: Any, signals: Signals) -> None:
    """The last word and the exception name the limits that bite, never one on trial."""
    scene = Scene(
        signals,
        [["search"], "done"],
        [
            quota(
                signals,
                ToolCallLimit(thread_limit=0, exit_behavior="error", enforce=False),
                ToolCallLimit("search", run_limit=0, exit_behavior=exit_behavior),
            )
        ],
    )
    expected = "'search' tool call limit reached: run limit exceeded (1/0 calls)."

    if exit_behavior == "error":
        with pytest.raises(ToolCallLimitExceededError) as raised:
            await scene.play()
        assert str(raised.value) == expected
        assert raised.value.tool_name == "search"
    else:
        result = await scene.play()
        assert result["messages"][-1].content == expected
    assert scene.ran == []


async def test_the_model_is_not_told(signals: Signals) -> None:
    """A limit on trial is not in the note to the model, and hides no tool."""
    scene = Scene(
        signals,
        [["search"], ["search"], "done"],
        [
            quota(
                signals,
                ToolCallLimit("search", run_limit=1, enforce=False),
                ModelCallLimit(run_limit=1, enforce=False),
                tell_model=True,
                hide_exhausted=True,
            )
        ],
    )

    await scene.play()

    assert scene.ran == ["search", "search"]
    for request in scene.model.calls:
        assert request.tools == ("search", "calc")
        assert [each.text for each in request.messages if each.type == "human"] == ["hi"]
