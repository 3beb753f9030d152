"""Limits that are only tried out: judged and counted in full, and what they refuse runs."""

from typing import Any

import pytest
from opentelemetry.trace import StatusCode

from langchain_quota import (
    ModelCallLimit,
    Outcome,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
    ToolCallLimitMiddleware,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import captured_decisions
from tests.agent.conftest import Order, in_order, orders
from tests.agent.rules import Scene, check_history
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
        result = await scene.turn()

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

    result = await scene.turn()

    assert result["messages"][-1].content == "done"
    assert scene.state()["thread_model_call_count"] == 3
    assert scene.state()["langchain_quota"]["run_model"] == 3
    assert calls(signals, "would_block", "model", "none") == 2
    assert scene.metric("model", "would_block", "run") == 2
    assert scene.metric("model", "allowed") == 1


async def test_spans(signals: Signals) -> None:
    """The span of a call that would be blocked says so, by which limit, and is no error."""
    scene = Scene(
        signals,
        [["search"], "done"],
        [quota(signals, ToolCallLimit(thread_limit=0, enforce=False))],
    )

    await scene.turn()

    (span,) = [each for each in signals.spans() if each.name == "check_quota tool search"]
    attributes = span.attributes or {}
    assert attributes["langchain_quota.decision"] == "would_block"
    assert attributes["langchain_quota.limit"] == "tool:*"
    assert attributes["langchain_quota.scope"] == "thread"
    assert attributes["langchain_quota.thread.used"] == 1
    assert attributes["langchain_quota.thread.limit"] == 0
    assert span.status.status_code is StatusCode.UNSET


async def test_no_crossings_and_no_subjects(signals: Signals) -> None:
    """A limit on trial is never near or exhausted, and rates no thread; one that bites does."""
    scene = Scene(
        signals,
        [["search", "search", "search"], "done"],
        [
            quota(
                signals,
                ToolCallLimit("search", thread_limit=2, near=0.5, enforce=False, name="trial"),
                ToolCallLimit(thread_limit=3, near=0.5, name="real"),
            )
        ],
    )

    await scene.turn()

    def value(name: str, limit: str, **labels: str) -> float:
        labels = {"agent": "unnamed", "limit": limit, "scope": "thread", **labels}
        return signals.value(f"langchain_quota_{name}", **labels) or 0

    assert (value("near_limit_total", "real"), value("near_limit_total", "trial")) == (1, 0)
    assert (value("exhausted_total", "real"), value("exhausted_total", "trial")) == (1, 0)
    states = {
        limit: sum(value("subjects", limit, state=state) for state in ("ok", "near", "exhausted"))
        for limit in ("real", "trial")
    }
    assert states == {"real": 1, "trial": 0}
    assert (value("limit", "real"), value("limit", "trial")) == (3, 2)


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

    await scene.turn()

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
            await scene.turn()
        assert str(raised.value) == expected
        assert raised.value.tool_name == "search"
    else:
        result = await scene.turn()
        assert result["messages"][-1].content == expected
    assert scene.ran == []


async def test_from_trial_to_earnest(signals: Signals) -> None:
    """A limit that is enforced from some day on has counted the calls of its trial."""
    trial = Scene(
        signals,
        [["search"] * 3, "done"],
        [quota(signals, ToolCallLimit("search", thread_limit=2, enforce=False))],
    )
    await trial.turn()
    earnest = Scene(
        signals,
        [["search"], "done"],
        [quota(signals, ToolCallLimit("search", thread_limit=2))],
        checkpointer=trial.agent.checkpointer,
    )

    await earnest.turn()

    assert earnest.ran == []
    assert earnest.state()["thread_tool_call_count"] == {"search": 3}
    check_history(earnest.state()["messages"])


async def test_taken_back(signals: Signals) -> None:
    """A call that would be blocked and is then refused by another limiter is not counted."""
    scene = Scene(
        signals,
        [["search", "search"], "done"],
        [
            ToolCallLimitMiddleware(run_limit=0, telemetry=signals.telemetry),
            quota(signals, ToolCallLimit("search", run_limit=1, enforce=False)),
        ],
    )

    await scene.turn()

    assert scene.ran == []
    assert scene.state()["thread_tool_call_count"]["search"] == 0
    assert scene.metric("tool:search", "allowed") == 1
    assert scene.metric("tool:search", "refunded") == 1
    assert scene.metric("tool:search", "would_block", "run") == 1
    scene.check_requests()


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

    await scene.turn()

    assert scene.ran == ["search", "search"]
    for request in scene.model.calls:
        assert request.tools == ("search", "calc")
        assert [each.text for each in request.messages if each.type == "human"] == ["hi"]
