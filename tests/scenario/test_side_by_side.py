"""Several limiters in one agent: drop-ins, quotas, and LangChain's own."""

from itertools import permutations
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import ModelCallLimit, ToolCallLimit
from langchain_quota.limits import Limit
from tests.scene import Kind, Order, Scene, check_history, in_order, orders, tool_limiter
from tests.telemetry import HAS_INLINE, Signals

KINDS: list[Kind] = ["drop-in", "quota", *(["inline"] if HAS_INLINE else [])]  # type: ignore[list-item]


@orders(2)
async def test_refused_by_one_is_charged_to_none(order: Order, signals: Signals) -> None:
    """Two limiters: a call refused by one is answered once and taken back from the other."""
    limiters = tool_limiter(signals, run_limit=2), tool_limiter(signals, "search", run_limit=1)
    script = [["search", "search", "calc", "calc"], "done"]
    scene = Scene(signals, script, in_order(order, *limiters))
    await scene.play()
    # The last of the list checks first. What it refused, a later refund does not revive.
    all_tools_first = order == (1, 0)
    assert sorted(scene.ran) == (["search"] if all_tools_first else ["calc", "search"])
    assert scene.metric("tool:*", "refunded") == (1 if all_tools_first else 0)
    assert scene.metric("tool:search", "blocked", "run") == 1
    scene.check()


@pytest.mark.parametrize("kinds", list(permutations(KINDS, 2)), ids="-".join)
async def test_swapping_on_a_running_thread(kinds: tuple[Kind, Kind], signals: Signals) -> None:
    """A thread goes on with its counts, under LangChain's keys, when another kind takes over."""
    limits: list[Limit] = [
        ModelCallLimit(thread_limit=8),
        ToolCallLimit("search", thread_limit=3),
        ToolCallLimit(thread_limit=5),
    ]
    ran = list[str]()
    options: dict[str, Any] = {"ran": ran, "checkpointer": InMemorySaver()}
    first = Scene(signals, [["search", "calc"], "done"], limits, kind=kinds[0], **options)
    await first.play()
    script = [["search"] * 3, ["calc", "calc"], "done"]
    second = Scene(signals, script, limits, kind=kinds[1], **options)
    await second.play()
    # Of three more searches two fit under search's 3, and then one calc under the 5 of all.
    assert sorted(ran) == ["calc", "calc", "search", "search", "search"]
    state = second.state()
    assert state["thread_tool_call_count"] == {"__all__": 5, "search": 3}
    assert state["thread_model_call_count"] == 5
    check_history(state["messages"])
