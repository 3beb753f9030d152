"""Structured output: the artificial call that delivers it is no tool call."""

from itertools import permutations
from typing import Any

import pytest
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage
from pydantic import BaseModel

from langchain_quota import ToolCallLimitExceededError
from tests.agent.conftest import Order, in_order, orders
from tests.agent.rules import Scene, model_limiter, tool_limiter
from tests.signals import Signals

EXIT_BEHAVIORS = ["continue", "end", "error"]

VALID = ("Weather", {"degrees": 20})
INVALID = ("Weather", {"degrees": "warm"})


class Weather(BaseModel):
    """The weather."""

    degrees: int


class Other(BaseModel):
    """Another answer."""

    text: str


def scene_of(signals: Signals, script: Any, *middleware: Any) -> Scene:
    return Scene(signals, script, middleware, response_format=ToolStrategy(Weather))


@pytest.mark.parametrize("exit_behavior", EXIT_BEHAVIORS)
async def test_valid(exit_behavior: Any, signals: Signals) -> None:
    """A structured answer over a limit of 0 is delivered: not charged, blocked or answered."""
    scene = scene_of(
        signals, [[VALID]], tool_limiter(signals, run_limit=0, exit_behavior=exit_behavior)
    )

    result = await scene.turn()

    assert result["structured_response"] == Weather(degrees=20)
    assert scene.answers() == [("Weather", "success")]
    assert scene.signals.value("langchain_quota_errors_total") is None
    scene.check()


@pytest.mark.parametrize("exit_behavior", EXIT_BEHAVIORS)
async def test_retried(exit_behavior: Any, signals: Signals) -> None:
    """A structured answer that is retried is not charged, and its error is its only answer."""
    scene = scene_of(
        signals,
        [[INVALID], ["search"], [INVALID], [VALID]],
        tool_limiter(signals, run_limit=1, exit_behavior=exit_behavior),
        model_limiter(signals, run_limit=9),
    )

    result = await scene.turn()

    assert result["structured_response"] == Weather(degrees=20)
    assert scene.ran == ["search"]
    scene.check()


@pytest.mark.parametrize("exit_behavior", EXIT_BEHAVIORS)
async def test_a_limit_named_like_it(exit_behavior: Any, signals: Signals) -> None:
    """A limit on the name of the structured answer does not touch it."""
    scene = scene_of(
        signals,
        [[INVALID], [VALID]],
        tool_limiter(signals, "Weather", run_limit=0, exit_behavior=exit_behavior),
    )

    result = await scene.turn()

    assert result["structured_response"] == Weather(degrees=20)
    scene.check()


@pytest.mark.parametrize("exit_behavior", EXIT_BEHAVIORS)
@pytest.mark.parametrize("batch", [[VALID, "search"], ["search", VALID]], ids=["before", "behind"])
async def test_refusals_beside_a_success(exit_behavior: Any, batch: Any, signals: Signals) -> None:
    """Beside a delivered structured answer a refusal only refuses: no raise, no last word."""
    scene = scene_of(
        signals, [batch], tool_limiter(signals, run_limit=0, exit_behavior=exit_behavior)
    )

    result = await scene.turn()

    assert result["structured_response"] == Weather(degrees=20)
    assert [message.type for message in result["messages"]] == ["human", "ai", "tool", "tool"]
    assert scene.ran == []
    scene.check()


@orders(2)
@pytest.mark.parametrize("behaviors", list(permutations(EXIT_BEHAVIORS, 2)), ids="-".join)
async def test_refusals_of_two_beside_a_success(
    order: Order, behaviors: tuple[Any, Any], signals: Signals
) -> None:
    """Two limiters beside a delivered structured answer refuse, and what they admit runs."""
    scene = scene_of(
        signals,
        [["search", "calc", VALID, "search"]],
        *in_order(
            order,
            tool_limiter(signals, run_limit=2, exit_behavior=behaviors[0]),
            tool_limiter(signals, "search", run_limit=1, exit_behavior=behaviors[1]),
        ),
    )

    result = await scene.turn()

    assert result["structured_response"] == Weather(degrees=20)
    assert not isinstance(result["messages"][-1], AIMessage)
    assert sorted(scene.ran) == ["calc", "search"]
    scene.check()


async def test_a_refusal_beside_a_retry(signals: Signals) -> None:
    """`error` also raises beside a structured answer that is retried."""
    scene = scene_of(
        signals, [[INVALID, "search"]], tool_limiter(signals, run_limit=0, exit_behavior="error")
    )

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()

    assert scene.ran == []
    scene.check(answered=False)


@pytest.mark.parametrize("exit_behavior", ["end", "error"])
async def test_a_retry_in_the_next_turn(exit_behavior: Any, signals: Signals) -> None:
    """The structured answer of an earlier turn does not soften a refusal of this one."""
    scene = scene_of(
        signals,
        [[VALID], [INVALID, "search"]],
        tool_limiter(signals, run_limit=0, exit_behavior=exit_behavior),
    )

    await scene.turn()
    if exit_behavior == "error":
        with pytest.raises(ToolCallLimitExceededError):
            await scene.turn()
        scene.check(answered=False)
    else:
        result = await scene.turn()
        assert "limit reached" in result["messages"][-1].content
        scene.check()
    assert scene.ran == []


async def test_two_structured_answers_at_once(signals: Signals) -> None:
    """Two structured answers in one batch are both retried, and neither is charged."""
    scene = Scene(
        signals,
        [["search"], [VALID, ("Other", {"text": "hm"})], [VALID]],
        [tool_limiter(signals, run_limit=1)],
        response_format=ToolStrategy(Weather | Other),
    )

    result = await scene.turn()

    assert result["structured_response"] == Weather(degrees=20)
    assert scene.ran == ["search"]
    scene.check()
