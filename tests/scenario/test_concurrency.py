"""Runs at once on one agent: our hooks never block the event loop, nor mix up their callers.

Blocking calls are found by blockbuster, which raises where one is made on a running loop.
"""

import asyncio
import time
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import pytest
from blockbuster import BlockingError, blockbuster_ctx

from langchain_quota import ModelCallLimit, ToolCallLimit
from langchain_quota.errors import ModelCallLimitExceededError, ToolCallLimitExceededError
from langchain_quota.limits import Limit
from tests.scene import Form, Scene, asking, both_forms, model_limiter, tool_limiter
from tests.telemetry import Signals, attributes

BOTH: Any = {"thread_limit": 9, "run_limit": 2}
LIMITS: list[Limit] = [
    ToolCallLimit("search", give_up_after=2, **BOTH),
    ToolCallLimit("search", exit_behavior="end", **BOTH),
    ToolCallLimit("search", exit_behavior="error", **BOTH),
    ModelCallLimit(**BOTH),
    ModelCallLimit(exit_behavior="error", **BOTH),
    ModelCallLimit(exit_behavior="finalize", **BOTH),
]


@pytest.mark.parametrize("limit", LIMITS, ids=lambda each: f"{each.kind} {each.exit_behavior}")
async def test_nothing_blocks(limit: Limit, signals: Signals) -> None:
    """Checking, refusing, counting, tracing and repairing block the event loop nowhere."""
    scene = Scene(signals, lambda messages: ["search", "calc"], [limit])
    # `time.sleep` gives nothing: that would be the limit's own words.
    limiter = tool_limiter(signals, run_limit=0, message=lambda _: time.sleep(0))
    detected = Scene(signals, [["search"], "done"], [limiter], thread_id="another")
    with blockbuster_ctx():
        for _ in range(3):
            with suppress(ToolCallLimitExceededError, ModelCallLimitExceededError):
                await scene.play()
                scene.check()
        # What blocks in our hooks would be seen.
        with pytest.raises(BlockingError, match=r"time\.sleep"):
            await detected.play()
    decisions = {attributes(span)["decision"] for span in signals.spans()}
    assert "blocked" in decisions or limit.exit_behavior == "finalize"
    # A BlockingError inside of telemetry would end up here.
    assert not signals.samples("langchain_quota_errors_total")


@both_forms
@pytest.mark.parametrize("limiter", [tool_limiter, model_limiter])
async def test_the_callers_context_reaches_the_message(
    limiter: Any, form: Form, signals: Signals
) -> None:
    """A `message` function sees the context variables of its caller, not those of others."""
    tenant: ContextVar[str] = ContextVar("tenant")
    middleware = limiter(signals, run_limit=0, message=lambda _: f"refused for {tenant.get()}")
    options: dict[str, Any] = {"checkpointer": None, "form": form, "thread_id": None}
    scene = Scene(signals, asking("search"), [middleware], **options)

    async def call(name: str) -> str:
        tenant.set(name)
        await asyncio.sleep(0)
        return str((await scene.invoke({"messages": [("user", "hi")]}))["messages"])

    names = [f"tenant-{number}!" for number in range(10)]
    histories = await asyncio.gather(*map(call, names))
    for name, history in zip(names, histories, strict=True):
        assert f"refused for {name}" in history
