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


async def arun(agent: Any, thread_id: object = None) -> None:
    """Run an agent once, on a thread if one is given."""
    config = {} if thread_id is None else {"configurable": {"thread_id": thread_id}}
    await agent.ainvoke({"messages": [("user", "go on")]}, config)


def run(agent: Any, thread_id: object = None) -> None:
    """The same, from a test that is not async."""
    asyncio.run(arun(agent, thread_id))
