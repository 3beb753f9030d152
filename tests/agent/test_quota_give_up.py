"""`give_up_after`: a model that will not listen ends its run after so many refusals."""

from typing import Any

import pytest
from langchain.agents.structured_output import ToolStrategy
from pydantic import BaseModel

from langchain_quota import (
    Outcome,
    QuotaMiddleware,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import captured_decisions
from tests.scene import Scene
from tests.signals import Signals

REACHED = "'search' tool call limit reached: run limit exceeded"


class Weather(BaseModel):
    """The weather."""

    degrees: int


def scene_of(signals: Signals, script: Any, *limits: Limit, **options: Any) -> Scene:
    quota = QuotaMiddleware(limits, telemetry=signals.telemetry)
    return Scene(signals, script, [quota], **options)


def stubborn(_messages: Any) -> list[str]:
    """A model that searches for ever."""
    return ["search"]


def last_text(result: dict[str, Any]) -> str:
    return str(result["messages"][-1].content)


@pytest.mark.parametrize("refusals", [1, 2, 5])
async def test_one_by_one(refusals: int, signals: Signals) -> None:
    """The run ends with the refusal that is one too many, and not before."""
    scene = scene_of(
        signals, stubborn, ToolCallLimit("search", run_limit=2, give_up_after=refusals)
    )

    result = await scene.play()

    assert scene.ran == ["search", "search"]
    assert len(scene.model.calls) == 2 + refusals
    assert scene.answers() == [("search", "success")] * 2 + [("search", "error")] * refusals
    assert last_text(result) == f"{REACHED} (3/2 calls)."
    assert scene.metric("tool:search", "blocked", "run") == refusals
    scene.check()


async def test_several_in_a_batch(signals: Signals) -> None:
    """Every refused call of a batch counts, and the batch that goes too far runs nothing."""
    scene = scene_of(
        signals,
        [["search", "search"], ["calc"], ["calc", "search", "search"], "never"],
        ToolCallLimit("search", run_limit=1, give_up_after=3),
        ToolCallLimit(run_limit=9),
    )

    with captured_decisions() as decisions:
        result = await scene.play()

    assert sorted(scene.ran) == ["calc", "search"]
    assert last_text(result) == f"{REACHED} (3/1 calls)."
    last_batch = [(each.call.tool, each.outcome) for each in decisions[-3:]]
    assert last_batch == [
        ("calc", Outcome.SKIPPED),
        ("search", Outcome.BLOCKED),
        ("search", Outcome.BLOCKED),
    ]
    refusing = decisions[-1].refused_by[0]
    assert refusing.exit_behavior == "end"
    assert scene.metric("tool:*", "allowed") == 2
    scene.check()


async def test_limits_lose_patience_alone(signals: Signals) -> None:
    """Each limit counts its own refusals, and only what was hit is named."""
    scene = scene_of(
        signals,
        [["search"], ["calc"], ["search"], ["calc"], ["calc"], "never"],
        ToolCallLimit("search", run_limit=0, give_up_after=3),
        ToolCallLimit("calc", run_limit=0, give_up_after=3),
    )

    result = await scene.play()

    assert len(scene.model.calls) == 5
    assert last_text(result) == ("'calc' tool call limit reached: run limit exceeded (1/0 calls).")
    scene.check()


async def test_a_structured_answer_goes_first(signals: Signals) -> None:
    """Beside a delivered structured answer there is nothing to give up: no last word."""
    scene = scene_of(
        signals,
        [["search", ("Weather", {"degrees": 20})]],
        ToolCallLimit("search", run_limit=0, give_up_after=1),
        response_format=ToolStrategy(Weather),
    )

    result = await scene.play()

    assert result["structured_response"] == Weather(degrees=20)
    assert [each.type for each in result["messages"]] == ["human", "ai", "tool", "tool"]
    scene.check()
