"""Agents with limits for LangGraph Server, which brings checkpointer, threads and users."""

import asyncio
import time
from collections.abc import Sequence

from langchain.agents import create_agent
from langchain_core.messages import BaseMessage, HumanMessage
from quota_telemetry import quota_by_user, telemetry  # type: ignore[import-not-found]  # the server finds it

from langchain_quota import ModelCallLimit, QuotaMiddleware, RedisStore, ToolCallLimit
from langchain_quota.testing import ScriptedChatModel


async def search(query: str = "") -> str:
    """Search the web."""
    return "found"


async def block() -> str:
    """Block the event loop, for as short a time as there is."""
    time.sleep(0)  # noqa: ASYNC251 - what the server's detector is to find
    return "blocked"


async def wait() -> str:
    """Wait until the run is cancelled."""
    await asyncio.Event().wait()
    return "never"


def words(messages: Sequence[BaseMessage]) -> list[str] | str:
    """Call a tool for each word of the question, all at once, and then give up."""
    newest = messages[-1]
    return str(newest.content).split() if isinstance(newest, HumanMessage) else "That is all."


model = ScriptedChatModel(script=words)

by_thread = create_agent(
    model,
    [search, block, wait],
    middleware=[
        QuotaMiddleware(
            [ModelCallLimit(thread_limit=10), ToolCallLimit("search", thread_limit=3)],
            telemetry=telemetry,
        )
    ],
    name="by_thread",
)

by_user = create_agent(model, [search], middleware=[quota_by_user], name="by_user")

asking = create_agent(
    model,
    [search],
    middleware=[
        QuotaMiddleware(
            [ToolCallLimit("search", thread_limit=1, exit_behavior="ask", grant=2)],
            store=RedisStore(prefix="asking"),
            telemetry=telemetry,
        )
    ],
    name="asking",
)
