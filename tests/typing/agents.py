"""Drop-ins, subclasses, graphs and deep agents; checked by mypy and pyright, never run."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NotRequired, assert_type

from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    ModelRequest,
    ModelResponse,
    PIIMiddleware,
    hook_config,
)
from langchain.agents.middleware import model_call_limit as langchain_model_limit
from langchain.agents.middleware import tool_call_limit as langchain_tool_limit
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langgraph.prebuilt import ToolNode, create_react_agent
from langgraph.runtime import Runtime

from langchain_quota import (
    CostLimit,
    Decision,
    GraphQuota,
    ModelCallLimit,
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitMiddleware,
    with_limits,
)
from langchain_quota.middleware.state import QuotaState, ToolCallLimitState
from langchain_quota.testing import ScriptedChatModel


@dataclass
class Caller:
    user_id: str
    suspended: bool = False


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
held = QuotaMiddleware([ToolCallLimit(run_limit=50)])
create_agent(model, middleware=[tools, named, models, told, PIIMiddleware("email"), asked, held])
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


# Graphs of one's own, and deep agents.
def search(query: str = "") -> str:
    """Search the web."""
    return query


quota = GraphQuota([ModelCallLimit(run_limit=5), ToolCallLimit("search", run_limit=2)])
limited = quota.model(model, [search])
assert_type(limited, BaseChatModel)
assert_type(limited.invoke("Hi!"), AIMessage)
assert_type(quota.tools([search], handle_tool_errors=True), ToolNode)
create_react_agent(limited, quota.tools([search]))
costs = [CostLimit(run_limit="0.50")]
GraphQuota(costs, prices=lambda used: Decimal(used.total_tokens) / 10**6, unknown_price="allow")


def create(
    model: str,
    *,
    middleware: Sequence[Any] = (),
    subagents: Sequence[Any] | None = None,
    name: str | None = None,
) -> list[str]:
    return [model, name or "", *map(str, middleware), *map(str, subagents or ())]


with_them = with_limits(create, held, leave_out=["remote"])
assert_type(with_them("scripted", name="boss"), list[str])
with_them("scripted", middleware=[held], subagents=[{"name": "finder"}])

# Not these.
quota.model(search)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
GraphQuota(costs, store="redis://")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
GraphQuota(["search"])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
with_them("scripted", sub_agents=[])  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


# Subclasses of the middlewares, and their states.
class CartState(QuotaState[Any]):
    """The state of an agent that sells."""

    cart: NotRequired[list[str]]


class ShopQuota(QuotaMiddleware[Caller, Any]):
    """With a rule of its own, on a context of its own."""

    state_schema = CartState

    def __init__(self, run_limit: int) -> None:
        super().__init__([ModelCallLimit(run_limit=run_limit)], tell_model=True)

    @hook_config(can_jump_to=["end"])
    def before_model(
        self, state: QuotaState[Any], runtime: Runtime[Caller]
    ) -> dict[str, Any] | None:
        assert_type(runtime.context, Caller)
        if runtime.context.suspended:
            return {"jump_to": "end", "messages": [AIMessage("suspended")]}
        return super().before_model(state, runtime)

    async def awrap_model_call(
        self,
        request: ModelRequest[Caller],
        handler: Callable[[ModelRequest[Caller]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        return await super().awrap_model_call(request, handler)


class SearchLimit(ToolCallLimitMiddleware[Any, Caller]):
    """A drop-in with a name of its own, its hook written as for LangChain's."""

    def __init__(self) -> None:
        super().__init__(tool_name="search", run_limit=3)

    @hook_config(can_jump_to=["end"])
    def after_model(
        self, state: ToolCallLimitState[Any], runtime: Runtime[Caller]
    ) -> dict[str, Any] | None:
        assert_type(state.get("thread_tool_call_count"), dict[str, int] | None)
        return super().after_model(state, runtime)


class Cart(AgentMiddleware[CartState, Caller]):
    """Somebody's own middleware that reads the counts."""

    state_schema = CartState

    def before_model(self, state: CartState, runtime: Runtime[Caller]) -> dict[str, Any] | None:
        assert_type(state.get("thread_tool_call_count", {}), dict[str, int])
        return {"cart": []}


shop = ShopQuota(10)
create_agent(model, middleware=[shop, SearchLimit()], context_schema=Caller)
create_agent(model, middleware=[shop, Cart()], context_schema=Caller)
create_agent(model, middleware=[Cart(), shop])  # the context is inferred


# Not these.
class WrongHook(QuotaMiddleware[Caller]):
    @hook_config(can_jump_to=["end"])
    def before_model(self, state: QuotaState[Any]) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes no runtime."""


ShopQuota([ModelCallLimit(run_limit=3)])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
QuotaMiddleware[int]([ModelCallLimit(run_limit=3)])  # type: ignore[type-var]  # pyright: ignore[reportInvalidTypeArguments]
