"""Subclasses of the middlewares, and their states; checked by mypy and pyright, never run."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NotRequired, assert_type

from langchain.agents import AgentState, create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse, hook_config
from langchain_core.messages import AIMessage
from langgraph.runtime import Runtime

from langchain_quota import (
    ModelCallLimit,
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    ToolCallLimitMiddleware,
)
from langchain_quota.middleware.state import ModelCallLimitState, QuotaState, ToolCallLimitState
from langchain_quota.testing import ScriptedChatModel


@dataclass
class Caller:
    user_id: str
    suspended: bool = False


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


class TurnLimit(ModelCallLimitMiddleware[Any, Caller]):
    @hook_config(can_jump_to=["end"])
    async def abefore_model(
        self, state: ModelCallLimitState[Any], runtime: Runtime[Caller]
    ) -> dict[str, Any] | None:
        assert_type(state.get("thread_model_call_count", 0), int)
        return await super().abefore_model(state, runtime)


class Cart(AgentMiddleware[CartState, Caller]):
    """Somebody's own middleware that reads the counts."""

    state_schema = CartState

    def before_model(self, state: CartState, runtime: Runtime[Caller]) -> dict[str, Any] | None:
        assert_type(state.get("thread_tool_call_count", {}), dict[str, int])
        return {"cart": []}


class ShopState(AgentState[Any]):
    cart: NotRequired[list[str]]


model = ScriptedChatModel(script=["Hello."])
shop = ShopQuota(10)
create_agent(model, middleware=[shop, SearchLimit(), TurnLimit(run_limit=3)], context_schema=Caller)
create_agent(model, middleware=[shop, Cart()], context_schema=Caller)
create_agent(model, middleware=[Cart(), shop])  # the context is inferred
create_agent(model, middleware=[shop], state_schema=ShopState, context_schema=Caller)
assert_type(shop.name, str)


# Not these.
class WrongHook(QuotaMiddleware[Caller]):
    @hook_config(can_jump_to=["end"])
    def before_model(self, state: QuotaState[Any]) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes no runtime."""


ShopQuota([ModelCallLimit(run_limit=3)])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
QuotaMiddleware[int]([ModelCallLimit(run_limit=3)])  # type: ignore[type-var]  # pyright: ignore[reportInvalidTypeArguments]
