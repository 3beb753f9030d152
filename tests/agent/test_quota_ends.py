"""However a limit ends a run, its last message is one of the AI, with a text."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents.structured_output import ToolStrategy
from pydantic import BaseModel

from langchain_quota import (
    ModelCallLimit,
    QuotaMiddleware,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from tests.scene import Scene
from tests.signals import Signals

MESSAGES: dict[str, Any] = {
    "none": None,
    "text": "That will do.",
    "empty": "",
    "blank": lambda decision: " \n",
}
LIMITS: dict[str, Callable[..., Limit]] = {
    "end of tools": lambda **own: ToolCallLimit(run_limit=1, exit_behavior="end", **own),
    "give_up_after": lambda **own: ToolCallLimit("search", run_limit=0, give_up_after=2, **own),
    "end of model calls": lambda **own: ModelCallLimit(run_limit=2, **own),
    "finalize": lambda **own: ModelCallLimit(run_limit=2, exit_behavior="finalize", **own),
    "finalize at 0": lambda **own: ModelCallLimit(run_limit=0, exit_behavior="finalize", **own),
}

messages = pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())


class Weather(BaseModel):
    """The weather."""

    degrees: int


@pytest.mark.parametrize("limit", ["end of tools", "give_up_after", "finalize"])
async def test_a_delivered_response(limit: str, signals: Signals) -> None:
    """After a structured response no limit ends the run: no message follows it."""
    quota = QuotaMiddleware([LIMITS[limit]()], telemetry=signals.telemetry)
    scene = Scene(
        signals,
        [["search"], ["search", ("Weather", {"degrees": 20})]],
        [quota],
        response_format=ToolStrategy(Weather),
    )

    result = await scene.play()

    assert result["structured_response"] == Weather(degrees=20)
    assert result["messages"][-1].type == "tool"
    scene.check()
