"""Real agents with a scripted model, for tests that look at what their metrics become."""

import asyncio
from collections.abc import Sequence
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.tools import tool
from langgraph.checkpoint.base import BaseCheckpointSaver

from langchain_quota.testing import Script, ScriptedChatModel


@tool
def search() -> str:
    """Search the web."""
    return "found"


@tool
def publish() -> str:
    """Publish a text."""
    return "published"


def build_agent(
    script: Script,
    limiters: Sequence[AgentMiddleware[Any, Any, Any]],
    *,
    name: str | None = None,
    saver: BaseCheckpointSaver[Any] | None = None,
) -> Any:
    """An agent with two tools that answers by a script."""
    return create_agent(
        ScriptedChatModel(script=script),
        tools=[search, publish],
        middleware=limiters,
        name=name,
        checkpointer=saver,
    )


def run(agent: Any, thread_id: object) -> None:
    """Run an agent once on a thread."""
    config = {"configurable": {"thread_id": thread_id}}
    asyncio.run(agent.ainvoke({"messages": [("user", "go on")]}, config))
