"""Human review of tool calls, in every order."""

from inspect import signature
from typing import Any, Literal

import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware

from tests.scene import Scene, tool_limiter
from tests.signals import Signals

Review = Literal["approve", "reject", "respond", "edit"]

per_call = pytest.mark.skipif(
    "interrupt_mode" not in signature(HumanInTheLoopMiddleware).parameters,
    reason="this LangChain has no per-call review: pip install -U langchain",
)


def review(kind: Review, tool: str = "calc") -> dict[str, Any]:
    match kind:
        case "respond":
            return {"type": "respond", "message": "the reviewer's answer"}
        case "edit":
            return {"type": "edit", "edited_action": {"name": tool, "args": {}}}
        case _:
            return {"type": kind}


def decisions(*kinds: Review) -> dict[str, Any]:
    return {"decisions": [review(kind) for kind in kinds]}


def scene_of(
    signals: Signals, *middleware: Any, script: Any = (["search", "search"], "done")
) -> Scene:
    return Scene(signals, list(script), middleware)


async def test_limiter_first_edited(signals: Signals) -> None:
    """Limiter first: an edited call is charged as the tool that it became."""
    scene = scene_of(
        signals,
        tool_limiter(signals, "search", run_limit=1),
        tool_limiter(signals, "calc", run_limit=1),
        HumanInTheLoopMiddleware({"search": True}),
    )

    await scene.play()
    await scene.resume(decisions("approve", "edit"))

    assert sorted(scene.ran) == ["calc", "search"]
    scene.check()


async def test_limiter_first_edited_out_of_a_refused_tool(signals: Signals) -> None:
    """Limiter first: a call edited away from an exhausted tool runs, and is not charged to it."""
    scene = scene_of(
        signals,
        tool_limiter(signals, "search", run_limit=0),
        HumanInTheLoopMiddleware({"search": True}),
    )

    await scene.play()
    await scene.resume(decisions("edit", "approve"))

    assert scene.ran == ["calc"]
    scene.check()
