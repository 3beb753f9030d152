"""However a limit ends a run, its last message is one of the AI, with a text."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage
from pydantic import BaseModel

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitMiddleware,
    Quota,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitMiddleware,
)
from langchain_quota.limits import Limit
from tests.agent.rules import Middleware, Scene
from tests.agent.shared import ANN, FickleStore, SharedScene
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


def searching(_messages: Any) -> list[str]:
    """A model that searches for ever, and never says a word."""
    return ["search"]


def check_end(result: dict[str, Any], message: Any) -> None:
    last = result["messages"][-1]
    assert isinstance(last, AIMessage)
    assert last.tool_calls == []
    if message == MESSAGES["text"]:
        assert last.text == message
    else:
        assert "limit" in last.text


@messages
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS.keys())
async def test_a_limit(limit: Callable[..., Limit], message: Any, signals: Signals) -> None:
    """Each exit behaviour that ends a run, with each kind of message."""
    quota = QuotaMiddleware([limit(message=message)], telemetry=signals.telemetry)
    scene = Scene(signals, searching, [quota])

    result = await scene.turn()

    check_end(result, message)
    scene.check()


@messages
@pytest.mark.parametrize("kind", ["tool", "model"])
async def test_a_drop_in(kind: str, message: Any, signals: Signals) -> None:
    """The drop-ins do the same."""
    options: dict[str, Any] = {
        "run_limit": 1,
        "exit_behavior": "end",
        "message": message,
        "telemetry": signals.telemetry,
    }
    limiter: Middleware = (
        ToolCallLimitMiddleware(**options)
        if kind == "tool"
        else ModelCallLimitMiddleware(**options)
    )
    scene = Scene(signals, searching, [limiter])

    result = await scene.turn()

    check_end(result, message)
    scene.check()


@messages
@pytest.mark.parametrize("kind", ["tool", "end", "finalize"])
async def test_an_outage(kind: Any, message: Any, signals: Signals) -> None:
    """So does a run that ends because the store cannot be asked."""
    quotas = [Quota(9, per="user_id")]
    limit: Limit = (
        ToolCallLimit(quotas=quotas, exit_behavior="end", message=message)
        if kind == "tool"
        else ModelCallLimit(quotas=quotas, exit_behavior=kind, message=message)
    )
    store = FickleStore(MemoryStore())
    store.down = True
    quota = QuotaMiddleware([limit], store=store, telemetry=signals.telemetry)
    scene = SharedScene(signals, searching, [quota])
    scene.context = ANN

    result = await scene.turn()

    check_end(result, message)
    assert scene.ran == []
    scene.check_requests()


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

    result = await scene.turn()

    assert result["structured_response"] == Weather(degrees=20)
    assert result["messages"][-1].type == "tool"
    scene.check()
