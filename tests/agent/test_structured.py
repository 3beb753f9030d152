"""Structured output: the artificial call that delivers it is no tool call."""

from typing import Any

import pytest
from langchain.agents.structured_output import ToolStrategy
from pydantic import BaseModel

from langchain_quota import ToolCallLimitExceededError
from tests.scene import Scene, tool_limiter
from tests.signals import Signals

VALID = ("Weather", {"degrees": 20})
INVALID = ("Weather", {"degrees": "warm"})


class Weather(BaseModel):
    """The weather."""

    degrees: int


def scene_of(signals: Signals, script: Any, *middleware: Any) -> Scene:
    return Scene(signals, script, middleware, response_format=ToolStrategy(Weather))


@pytest.mark.parametrize("exit_behavior", ["end", "error"])
async def test_a_retry_in_the_next_turn(exit_behavior: Any, signals: Signals) -> None:
    """The structured answer of an earlier turn does not soften a refusal of this one."""
    scene = scene_of(
        signals,
        [[VALID], [INVALID, "search"]],
        tool_limiter(signals, run_limit=0, exit_behavior=exit_behavior),
    )

    await scene.play()
    if exit_behavior == "error":
        with pytest.raises(ToolCallLimitExceededError):
            await scene.play()
        scene.check(answered=False)
    else:
        result = await scene.play()
        assert "limit reached" in result["messages"][-1].content
        scene.check()
    assert scene.ran == []
