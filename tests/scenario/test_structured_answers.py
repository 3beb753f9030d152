"""Structured output: the artificial call that delivers it is no tool call."""

from collections import Counter
from typing import Any

import pytest
from langchain.agents.structured_output import ToolStrategy

from langchain_quota import ModelCallLimit, ToolCallLimit, ToolCallLimitExceededError
from langchain_quota.limits import Limit
from tests.scene import INVALID, VALID, Kind, Scene, Weather, either
from tests.telemetry import Signals, needs_inline

EXITS = ["continue", "end", "error"]
each_exit = pytest.mark.parametrize("exit_behavior", EXITS)
each_kind = pytest.mark.parametrize(
    "kind", ["drop-in", "quota", pytest.param("inline", marks=needs_inline)]
)


def scene_of(signals: Signals, script: Any, *limits: Limit, **options: Any) -> Scene:
    return Scene(signals, script, limits, response_format=ToolStrategy(Weather), **options)


@each_kind
@each_exit
async def test_a_refusal_beside_it(exit_behavior: Any, kind: Kind, signals: Signals) -> None:
    """Beside a delivered answer a refusal only refuses: no error, no last word; the rest runs."""
    scene = scene_of(
        signals,
        [["search", VALID, "search", "calc"]],
        ToolCallLimit("search", run_limit=1, exit_behavior=exit_behavior),
        ToolCallLimit(run_limit=4),
        kind=kind,
    )
    result = await scene.play()
    assert result["structured_response"] == Weather(degrees=20)
    assert result["messages"][-1].type == "tool"
    assert Counter(scene.ran) == {"search": 1, "calc": 1}
    scene.check()


@pytest.mark.parametrize(
    "limit",
    [
        ToolCallLimit("search", run_limit=0, give_up_after=1),
        ToolCallLimit(run_limit=0, exit_behavior="end"),
        ModelCallLimit(run_limit=1, exit_behavior="finalize"),
    ],
    ids=["give up", "end", "finalize"],
)
@either
async def test_no_limit_ends_the_run_behind_it(kind: Kind, limit: Limit, signals: Signals) -> None:
    """After a delivered answer no limit ends the run: nothing else runs, no message follows it."""
    scene = await scene_of(signals, [["search", VALID]], limit, kind=kind).played()
    assert scene.result["structured_response"] == Weather(degrees=20)
    assert [each.type for each in scene.result["messages"]] == ["human", "ai", "tool", "tool"]
    assert scene.ran == []
    scene.check()


@pytest.mark.parametrize("exit_behavior", ["end", "error"])
async def test_a_retry_in_the_next_turn(exit_behavior: Any, signals: Signals) -> None:
    """Neither a retried answer nor that of an earlier turn softens a refusal of this one."""
    limit = ToolCallLimit(run_limit=0, exit_behavior=exit_behavior)
    scene = await scene_of(signals, [[VALID], [INVALID, "search"]], limit, kind="drop-in").played()
    if exit_behavior == "error":
        with pytest.raises(ToolCallLimitExceededError):
            await scene.play()
    else:
        await scene.play()
        assert "limit reached" in scene.last_text()
    scene.check(answered=exit_behavior == "end")
    assert scene.ran == []
