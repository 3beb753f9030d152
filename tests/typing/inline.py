"""InlineQuotaMiddleware; checked by mypy and pyright, never run."""

from dataclasses import dataclass
from typing import assert_type

from langchain.agents import create_agent
from langchain.agents.middleware import PIIMiddleware
from langchain_core.runnables import RunnableConfig

from langchain_quota import InlineQuotaMiddleware, MemoryStore, ModelCallLimit, ToolCallLimit
from langchain_quota.testing import ScriptedChatModel


@dataclass
class Caller:
    user_id: str


model = ScriptedChatModel(script=["Hello."])
quota = InlineQuotaMiddleware(
    [ModelCallLimit(run_limit=10), ToolCallLimit(run_limit=50)],
    tell_model=True,
    store=MemoryStore(),
    on_store_error="deny",
)
assert_type(quota.name, str)
agent = create_agent(model, middleware=[quota, PIIMiddleware("email")])

typed = InlineQuotaMiddleware[Caller]([ModelCallLimit(run_limit=10)])
create_agent(model, middleware=[typed], context_schema=Caller)

config: RunnableConfig = {"configurable": {"thread_id": "7"}}
quota.reset(agent, config)

# Not these.
InlineQuotaMiddleware(ModelCallLimit(run_limit=10))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
quota.reset(agent)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
