"""What a thread has used, and setting it back; checked by mypy and pyright, never run."""

from collections.abc import Mapping
from typing import assert_type

from langchain.agents import create_agent
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import ModelCallLimit, QuotaMiddleware, ThreadUsage, usage
from langchain_quota.testing import ScriptedChatModel

quota = QuotaMiddleware([ModelCallLimit(thread_limit=10)])
agent = create_agent(
    ScriptedChatModel(script=["Hello."]), middleware=[quota], checkpointer=InMemorySaver()
)
config: RunnableConfig = {"configurable": {"thread_id": "7"}}

used = usage(agent.get_state(config))
assert_type(used, ThreadUsage)
assert_type(used.model, int)
assert_type(used.run_model, int)
assert_type(used.tools, Mapping[str, int])
assert_type(used.run_tools.get("search", 0), int)


async def asynchronously() -> None:
    assert_type(usage(await agent.aget_state(config)), ThreadUsage)
    await quota.areset(agent, config)


quota.reset(agent, config)
quota.reset(agent, {"configurable": {"thread_id": "7"}})

# Not these.
usage(config)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
usage(agent.aget_state(config))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
quota.reset(config)  # type: ignore[call-arg,arg-type]  # pyright: ignore[reportCallIssue]
quota.reset(agent, "7")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
quota.reset(quota, config)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
used.tools["search"] = 0  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
