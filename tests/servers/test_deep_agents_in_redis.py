"""Deep agents that are counted in a real Redis."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from langchain_core.messages import BaseMessage

from langchain_quota import QuotaMiddleware, RedisStore, ToolCallLimit, with_limits
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.scene import CONFIG, Form, both_forms, check_history, recording
from tests.servers.redis import RedisServer
from tests.signals import Signals

# Among the oldest versions there is none.
deepagents = pytest.importorskip("deepagents")

TASKS = 5
LIMIT = 7


def script(messages: Sequence[BaseMessage]) -> Turn:
    """The main agent delegates in parallel; each sub-agent searches three times."""
    if messages[-1].type != "human":
        return "done"
    if "Look!" in messages[-1].text:
        return ["search"] * 3
    return [("task", {"description": "Look!", "subagent_type": "general-purpose"})] * TASKS


@both_forms
async def test_parallel_sub_agents(form: Form, redis_server: RedisServer, signals: Signals) -> None:
    """Parallel sub-agents of two runs at once on one thread are counted exactly."""
    ran: list[str] = []
    model = ScriptedChatModel(script=script)
    async with aclosing(
        RedisStore(redis_server.url, prefix=redis_server.prefix(), timeout=30)
    ) as store:
        quota = QuotaMiddleware[Any, Any](
            [ToolCallLimit("search", thread_limit=LIMIT)], store=store, telemetry=signals.telemetry
        )
        agent: Any = with_limits(deepagents.create_deep_agent, quota)(
            model, [recording("search", ran)]
        )
        given = {"messages": [("user", "Go!")]}
        if form == "sync":
            runs = [asyncio.to_thread(agent.invoke, given, CONFIG) for _ in range(2)]
        else:
            runs = [agent.ainvoke(given, CONFIG) for _ in range(2)]
        await asyncio.gather(*runs)
        (use,) = store.usages()

    assert len(ran) == use.used == LIMIT
    assert len(model.calls) == 2 * (2 + 2 * TASKS)
    for each in model.calls:
        check_history(each.messages)
