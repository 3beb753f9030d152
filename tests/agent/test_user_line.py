"""Where a warning points: at the user's line that made what warns."""

from typing import Any

import pytest
from langchain.agents import create_agent

from langchain_quota import (
    QuotaMiddleware,
    QuotaWarning,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitMiddleware,
)
from langchain_quota.testing import ScriptedChatModel
from tests.signals import Signals

ASKED: Any = {"messages": [("user", "hi")]}
FORGETFUL = ToolCallLimit("search", thread_limit=9)


def generic(signals: Signals) -> Any:
    return QuotaMiddleware[Any, Any]([FORGETFUL], telemetry=signals.telemetry)


def drop_in(signals: Signals) -> Any:
    return ToolCallLimitMiddleware(thread_limit=9, telemetry=signals.telemetry)


def budget(signals: Signals) -> Any:
    return QuotaMiddleware([TokenLimit(run_limit=999)], telemetry=signals.telemetry)


@pytest.mark.parametrize("make", [generic, drop_in, budget])
async def test_of_a_middleware(make: Any, signals: Signals) -> None:
    """A thread limit that is forgotten, and tokens that are not reported: it is made there."""
    agent = create_agent(ScriptedChatModel(script=["A short answer."]), middleware=[make(signals)])

    with pytest.warns(QuotaWarning) as caught:
        await agent.ainvoke(ASKED)

    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, make.__code__.co_firstlineno + 1)
