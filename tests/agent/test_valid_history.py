"""However a limit stops an agent, providers accept what the model is sent, then and afterwards."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from langchain_core.messages import BaseMessage, HumanMessage

from langchain_quota import (
    ModelCallLimit,
    ModelCallLimitExceededError,
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
    ToolCallLimitMiddleware,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import Turn, assert_valid_history
from tests.agent.rules import Scene
from tests.signals import Signals

LIMITS: list[Limit] = [
    ToolCallLimit("search", run_limit=1, exit_behavior="continue"),
    ToolCallLimit("search", run_limit=1, exit_behavior="continue", give_up_after=2),
    ToolCallLimit("search", run_limit=1, exit_behavior="end"),
    ToolCallLimit("search", run_limit=1, exit_behavior="error"),
    ModelCallLimit(run_limit=2, exit_behavior="end"),
    ModelCallLimit(run_limit=2, exit_behavior="error"),
    ModelCallLimit(run_limit=2, exit_behavior="finalize"),
]
DROP_INS: list[Callable[..., Any]] = [
    partial(ToolCallLimitMiddleware, tool_name="search", run_limit=1, exit_behavior="continue"),
    partial(ToolCallLimitMiddleware, tool_name="search", run_limit=1, exit_behavior="end"),
    partial(ToolCallLimitMiddleware, tool_name="search", run_limit=1, exit_behavior="error"),
    partial(ModelCallLimitMiddleware, run_limit=2, exit_behavior="end"),
    partial(ModelCallLimitMiddleware, run_limit=2, exit_behavior="error"),
]


def two_batches(messages: Sequence[BaseMessage]) -> Turn:
    """A script that searches twice at once, does so again, and is done."""
    newest = max(index for index, each in enumerate(messages) if isinstance(each, HumanMessage))
    asked = sum(each.type == "ai" for each in messages[newest:])
    return ["search", "search"] if asked < 2 else "done"


async def check(scene: Scene) -> None:
    """Run two turns, and hold against the providers' rules what is sent and what is left."""
    (limit,) = scene.limits
    error = limit.exit_behavior == "error"
    for _ in range(2):
        errors = (ToolCallLimitExceededError, ModelCallLimitExceededError)
        with pytest.raises(errors) if error else nullcontext():
            await scene.turn()
        messages = scene.state()["messages"]
        if error and limit.kind == "tool":
            with pytest.raises(AssertionError, match=r"calls 'search' .* and gets no answer"):
                assert_valid_history(messages)
        else:
            assert_valid_history(messages)
        assert error or messages[-1].type == "ai"
    assert len(scene.model.calls) > 1
    for call in scene.model.calls:
        assert_valid_history(call.messages)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda each: f"{each.kind} {each.exit_behavior}")
async def test_limits(limit: Limit, signals: Signals) -> None:
    """A run that a limit stops can be gone on with; calls that an error left open are answered."""
    quota = QuotaMiddleware[Any, Any]([limit], telemetry=signals.telemetry)
    await check(Scene(signals, two_batches, [quota]))


@pytest.mark.parametrize("drop_in", DROP_INS, ids=lambda each: str(each.keywords))
async def test_drop_ins(drop_in: Callable[..., Any], signals: Signals) -> None:
    """The same of the drop-ins."""
    await check(Scene(signals, two_batches, [drop_in(telemetry=signals.telemetry)]))
