"""Limits that are only tried out: checked and counted in full, and what they refuse runs."""

from typing import Any

import pytest

from langchain_quota import ModelCallLimit, ToolCallLimit
from langchain_quota.limits import Limit
from tests.scene import Scene
from tests.telemetry import Signals

EXITS: Any = ("continue", "end", "error")
OUTCOMES = ("allowed", "would_block", "blocked")


def metrics(scene: Scene, name: str) -> list[float]:
    """How often a limit allowed calls, would have blocked them, and blocked them."""
    scopes = ("none", "run", "run")
    return [scene.metric(name, *each) for each in zip(OUTCOMES, scopes, strict=True)]


TRIED: Any = {"run_limit": 1, "enforce": False}


@pytest.mark.parametrize(
    "limit",
    [
        *(ToolCallLimit("search", exit_behavior=each, **TRIED) for each in EXITS),
        *(ModelCallLimit(exit_behavior=each, **TRIED) for each in EXITS[1:]),
    ],
    ids=lambda limit: f"{limit.kind} {limit.exit_behavior}",
)
async def test_what_it_refuses(limit: Limit, signals: Signals) -> None:
    """It runs and is counted, whatever the exit behaviour, and the run goes on to its own end."""
    options: Any = {"tell_model": True, "hide_exhausted": True}
    script = [["search", "search"], ["search"], "done"]
    scene = await Scene(signals, script, [limit], **options).played()
    assert (scene.ran, scene.last_text()) == (["search"] * 3, "done")
    assert scene.answers() == [("search", "success")] * 3
    outcomes = [str(each.outcome) for each in scene.decisions if each.call.kind == limit.kind]
    assert outcomes == ["allowed", "would_block", "would_block"]
    assert scene.used(limit) == (3, 3)
    tool = "search" if limit.kind == "tool" else None
    assert [scene.calls(each, tool) for each in OUTCOMES] == [1, 2, 0]
    assert metrics(scene, limit.name) == [1, 2, 0]
    assert {each.tools for each in scene.model.calls} == {("search", "calc")}
    assert [each.messages[0].text for each in scene.model.calls] == ["hi"] * 3
    assert "Budget" not in str(scene.model.calls)
    # It is never near or exhausted, and alarms nobody.
    assert set(signals.samples("langchain_quota_crossings_total").values()) == {0}
    assert signals.samples("langchain_quota_limit_near_ratio") == {}


async def test_what_the_one_that_bites_says(signals: Signals) -> None:
    """The last word names the limits that bite, never one in a dry run."""
    limits: list[Limit] = [
        ToolCallLimit(thread_limit=0, exit_behavior="error", enforce=False, message="A dry run."),
        ToolCallLimit("search", run_limit=0, exit_behavior="end"),
    ]
    scene = await Scene(signals, [["search"], "done"], limits).played()
    assert scene.last_text() == "'search' tool call limit reached: run limit exceeded (1/0 calls)."
    assert scene.ran == []
