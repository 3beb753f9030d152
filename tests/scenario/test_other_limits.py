"""Two caps on calls at once, and limits of a user's own kind."""

import asyncio
from typing import Any

import pytest
from langchain_core.tools import tool

from langchain_quota import ConcurrencyLimit, Decision, ToolCallLimit
from langchain_quota.limits.call import Call
from tests.scene import Scene, asking, recording
from tests.telemetry import Signals

WAITS = "langchain_quota_wait_seconds_count"


class BeginningLimit(ToolCallLimit):
    """A limit of a user's own kind, on tools by how their names begin."""

    def matches(self, call: Call) -> bool:
        return (call.tool or "").startswith("mcp_")


async def test_a_kind_of_limit_that_matches_by_something_else(signals: Signals) -> None:
    """Which calls a limit's own `matches` takes is asked for each tool, whichever came first."""
    script = [["calc"], ["mcp_read"], ["calc", "mcp_write"], "done"]
    names = ("calc", "mcp_read", "mcp_write")
    scene = await Scene(signals, script, [BeginningLimit(run_limit=1)], tools=names).played()
    assert scene.ran == ["calc", "mcp_read", "calc"]


@pytest.mark.parametrize("caps", [(1, 3), (3, 1)])
async def test_the_lowest_of_two_caps_holds(caps: tuple[int, int], signals: Signals) -> None:
    """Of one tool no more calls run at once than the lower cap allows, and they run in order."""
    running, most, order = 0, 0, ""

    @tool("search")
    async def slow(text: str) -> str:
        """Search for a text for a while."""
        nonlocal running, most, order
        running, order = running + 1, order + text
        most = max(most, running)
        for _ in range(20):
            await asyncio.sleep(0)
        running -= 1
        return "found"

    limits = [ConcurrencyLimit("search", max_concurrency=each, name=f"cap-{each}") for each in caps]
    script = asking(*(("search", {"text": each}) for each in "abcd"))
    scene = await Scene(signals, script, limits, tools=[slow]).played()
    assert scene.answers() == [("search", "success")] * 4
    assert (most, order) == (1, "abcd")


@pytest.mark.parametrize("waits", [(0, 3600), (3600, 0)])
async def test_the_shorter_of_two_waits_holds(waits: tuple[int, int], signals: Signals) -> None:
    """A call that one of its caps keeps no longer is refused, while the other would wait on."""
    refused = asyncio.Event()
    slow = recording("search", [], refused.wait)
    limits = [ConcurrencyLimit("search", max_concurrency=1, wait=n, name=f"for-{n}") for n in waits]

    def learn(decision: Decision) -> None:
        if decision.outcome == "blocked":
            refused.set()

    script: Any = asking("search", "search")
    await Scene(signals, script, limits, tools=[slow], on_decision=learn).play()
    assert signals.value(WAITS, decision="blocked", agent="unnamed", limit="for-0") == 1
