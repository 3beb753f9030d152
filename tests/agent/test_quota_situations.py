"""QuotaMiddleware in the situations that agents get into: reviews, stops, repairs, odd batches."""

from typing import Any

import pytest
from langchain.agents.middleware import (
    HumanInTheLoopMiddleware,
)
from langchain_core.messages import RemoveMessage, ToolCall
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from langchain_quota import (
    ModelCallLimit,
    QuotaMiddleware,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from tests.scene import CONFIG, Middleware, Scene
from tests.signals import Signals

LIMITS: tuple[Limit, ...] = (
    ModelCallLimit(thread_limit=9),
    ToolCallLimit("search", run_limit=2),
    ToolCallLimit(run_limit=4),
)


"""Retries that do not wait."""


def quota(signals: Signals, *limits: Limit) -> QuotaMiddleware[Any, Any]:
    return QuotaMiddleware(limits or LIMITS, telemetry=signals.telemetry)


def reviewed(signals: Signals, *limits: Limit) -> Scene:
    """The quota first, so that it judges what the reviewer left of two searches."""
    review = HumanInTheLoopMiddleware[Any, Any]({"search": True})
    middleware: list[Middleware] = [quota(signals, *limits), review]
    return Scene(signals, [["search", "search"], "done", ["search"], "done"], middleware)


def decisions(*kinds: str) -> dict[str, Any]:
    forms: dict[str, dict[str, Any]] = {
        "approve": {"type": "approve"},
        "reject": {"type": "reject"},
        "respond": {"type": "respond", "message": "the reviewer's answer"},
        "edit": {"type": "edit", "edited_action": {"name": "calc", "args": {}}},
    }
    return {"decisions": [forms[kind] for kind in kinds]}


def call(tool: str, call_id: str) -> ToolCall:
    return ToolCall(name=tool, args={}, id=call_id, type="tool_call")


@pytest.mark.parametrize("kind", ["reject", "respond"])
async def test_review_without_running(kind: str, signals: Signals) -> None:
    """A rejected or answered call is not charged, leaves its room, and is not answered again."""
    scene = reviewed(
        signals, ToolCallLimit("search", run_limit=1, exit_behavior="error"), LIMITS[2]
    )

    await scene.play()
    await scene.resume(decisions(kind, "approve"))

    assert scene.ran == ["search"]
    scene.check()


async def test_review_edited(signals: Signals) -> None:
    """Edited calls are judged as what they became: refused by its limit, not by their own."""
    scene = reviewed(
        signals, ToolCallLimit("search", run_limit=0), ToolCallLimit("calc", run_limit=1)
    )

    await scene.play()
    await scene.resume(decisions("edit", "edit"))

    assert scene.ran == ["calc"]
    scene.check()


async def test_messages_removed(signals: Signals) -> None:
    """Messages removed between turns take nothing off the thread's counts."""
    limits = (ModelCallLimit(thread_limit=4), ToolCallLimit("search", thread_limit=2))
    scene = Scene(signals, [["search"] * 2, "done"] * 2, [quota(signals, *limits)])

    await scene.play()
    removed = {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES)]}
    scene.agent.update_state(CONFIG, removed, as_node="__start__")
    await scene.play()

    assert scene.ran == ["search"] * 2
    scene.check()
