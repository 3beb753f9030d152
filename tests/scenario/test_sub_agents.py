"""Agents inside the tools of agents, and limits that nothing can remember."""

from typing import Any

import pytest

from langchain_quota import MemoryStore, ModelCallLimit, QuotaWarning, ToolCallLimit
from langchain_quota.limits import Limit
from tests.scene import Form, Scene, asking, both_forms, delegate, tool_limiter
from tests.telemetry import Signals

SEARCHES = asking("search", "search")


@pytest.mark.parametrize("remedy", ["none", "store", "checkpointer"])
async def test_a_childs_thread_limit(remedy: str, signals: Signals) -> None:
    """It lasts one invocation, and warns once; a store, or `checkpointer=True`, make it hold."""
    child = Scene(
        signals,
        SEARCHES,
        [ToolCallLimit("search", thread_limit=1 if remedy == "none" else 3)],
        store=MemoryStore() if remedy == "store" else None,
        checkpointer=True if remedy == "checkpointer" else None,
    )
    limiter = tool_limiter(signals, thread_limit=9)
    script = [["delegate"], ["delegate"], "done"]
    scene = Scene(signals, script, [limiter], tools=[delegate(child.agent)])
    if remedy == "none":
        with pytest.warns(QuotaWarning, match="thread limit") as caught:
            await scene.play()
        assert len(caught) == 1
        assert child.ran == ["search"] * 2
    else:
        # Every warning of a test is an error.
        await scene.play()
        assert child.ran == ["search"] * 3
    assert scene.state()["thread_tool_call_count"] == {"__all__": 2}


# Under `invoke` a tool runs in another thread, in a copy of the context.
@both_forms
@pytest.mark.parametrize("name", [None, "researcher"])
async def test_a_childs_series(name: str | None, form: Form, signals: Signals) -> None:
    """A named child writes thread series; an unnamed one has its parent's name, and does not."""
    limits: list[Limit] = [
        ToolCallLimit("search", run_limit=9),
        ToolCallLimit("search", thread_limit=9, name="child"),
        ModelCallLimit(thread_limit=9, name="child model"),
    ]
    child = Scene(signals, SEARCHES, limits, name=name, checkpointer=None)
    limiter = tool_limiter(signals, thread_limit=9)
    options: dict[str, Any] = {"tools": [delegate(child.agent)], "name": "boss", "form": form}
    with pytest.warns(QuotaWarning):
        await Scene(signals, [["delegate"], "done"], [limiter], **options).play()
    series, thread = "langchain_quota_thread_used", "thread-1"
    assert signals.samples(series, limit="tool:*") == {("boss", thread): 1}
    for limit in ("child", "child model"):
        assert signals.samples(series, limit=limit) == ({(name, thread): 2} if name else {})
