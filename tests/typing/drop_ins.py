"""The drop-ins where LangChain's limiters stood; checked by mypy and pyright, never run."""

from dataclasses import dataclass
from typing import Any, assert_type

from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware, PIIMiddleware
from langchain.agents.middleware import model_call_limit as langchain_model_limit
from langchain.agents.middleware import tool_call_limit as langchain_tool_limit

from langchain_quota import (
    Decision,
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitMiddleware,
)
from langchain_quota.testing import ScriptedChatModel


@dataclass
class Caller:
    user_id: str


model = ScriptedChatModel(script=["Hello."])

# Every argument that LangChain's have.
tools = ToolCallLimitMiddleware(
    tool_name="search", thread_limit=20, run_limit=3, exit_behavior="continue"
)
models = ModelCallLimitMiddleware(thread_limit=100, run_limit=10, exit_behavior="error")
assert_type(tools, ToolCallLimitMiddleware[Any, Any])
assert_type(models, ModelCallLimitMiddleware[Any, Any])

# What they keep.
assert_type((tools.name, tools.tool_name), tuple[str, str | None])
assert_type((tools.thread_limit, models.run_limit), tuple[int | None, int | None])


# And ours.
def refusal(decision: Decision) -> str:
    return f"not {decision.call.tool}"


named = ToolCallLimitMiddleware(
    run_limit=3, limit_name="daily", message=refusal, alert=False, on_pending="raise"
)
told = ModelCallLimitMiddleware(
    run_limit=50, exit_behavior="end", message="Enough.", limit_name="hard", telemetry=Telemetry()
)

# Together, beside each other and beside other middlewares, in one list.
asked = HumanInTheLoopMiddleware({"search": True})
quota = QuotaMiddleware([ToolCallLimit(run_limit=50)])
create_agent(model, middleware=[tools, named, models, told, PIIMiddleware("email"), asked, quota])
# With its types given, in LangChain's order: the response, then the context.
typed = ToolCallLimitMiddleware[Any, Caller](run_limit=3)
create_agent(model, middleware=[typed], context_schema=Caller)

# An exception that was caught before is caught now.
try:
    create_agent(model, middleware=[tools]).invoke({"messages": []})
except langchain_tool_limit.ToolCallLimitExceededError as tool_error:
    assert_type(tool_error.thread_count, int)
except langchain_model_limit.ModelCallLimitExceededError as model_error:
    assert_type(model_error.run_limit, int | None)

# Not these.
ToolCallLimitMiddleware(run_limit="3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
ToolCallLimitMiddleware(run_limit=3, exit_behavior="stop")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
ToolCallLimitMiddleware(run_limit=3, message=lambda: "no")  # type: ignore[arg-type,misc]  # pyright: ignore[reportArgumentType]
ModelCallLimitMiddleware(run_limit=3, exit_behavior="continue")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
ModelCallLimitMiddleware(tool_name="search", run_limit=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
