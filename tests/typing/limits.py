"""The middleware, its limits, quotas and budgets; checked by mypy and pyright, never run."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any, assert_type

from langchain.agents import AgentState, create_agent
from langchain.agents.middleware import ModelRequest, PIIMiddleware, TodoListMiddleware
from langchain_core.messages import ToolCall
from langgraph.runtime import Runtime
from pydantic import BaseModel

from langchain_quota import (
    ConcurrencyLimit,
    CostLimit,
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    Price,
    Quota,
    QuotaMiddleware,
    RepeatLimit,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.limits.call import ModelUsage
from langchain_quota.limits.quotas import CalendarWindow
from langchain_quota.testing import ScriptedChatModel


@dataclass
class Caller:
    user_id: str
    plan: str


class Answer(BaseModel):
    text: str


model = ScriptedChatModel(script=["Hello."])

# A model, one tool, several, all but some.
limits: list[Limit] = [
    ModelCallLimit(run_limit=10, thread_limit=100, exit_behavior="finalize", near=0.9),
    ToolCallLimit(["create_order", "cancel_order"], thread_limit=5, exit_behavior="end"),
    ToolCallLimit("search", run_limit=5, exit_behavior="ask", grant=10, message="Search no more."),
    ToolCallLimit(run_limit=50, exclude=("write_todos",), enforce=False, give_up_after=3),
    ConcurrencyLimit("browser", max_concurrency=2, wait=0.5),
]
quota = QuotaMiddleware(limits)
assert_type(quota, QuotaMiddleware[Any, Any])


# Limits that a user's own function makes.
def model_limits() -> tuple[ModelCallLimit, ...]:
    return (ModelCallLimit(run_limit=3),)


QuotaMiddleware([ToolCallLimit("search", run_limit=3), *model_limits()])

one = ToolCallLimit("search", run_limit=3)
assert_type((one.name, one.tools, one.near), tuple[str, tuple[str, ...], float | None])


# Thresholds from the tenant's plan, sync and async, with precise types or without.
def searches(state: AgentState[Any], runtime: Runtime[Caller]) -> int:
    return 100 if runtime.context.plan == "pro" else len(state["messages"])


async def models(state: AgentState[Any], runtime: Runtime[Caller]) -> int | None:
    return None if runtime.context.plan == "pro" else 10


ToolCallLimit("search", thread_limit=searches, run_limit=lambda state, runtime: 3)
ModelCallLimit(thread_limit=models)


# What repeats.
def path(call: ToolCall) -> str | None:
    return call["args"].get("path")


repeats: list[Limit] = [
    RepeatLimit(run_limit=3, key=path, tools="read_file", near=0.5, enforce=False, alert=False),
    RepeatLimit(5, key=lambda call: [call["name"], 1], exclude=("wait", "think"), give_up_after=3),
    RepeatLimit(3, exit_behavior="end", message=lambda decision: str(decision.call.tool)),
]
QuotaMiddleware([*limits, *repeats])
assert_type(RepeatLimit(3).tools, Sequence[str])


# Quotas.
def tenant(state: AgentState[Any], runtime: Runtime[Caller]) -> str:
    return runtime.context.user_id.partition("@")[2]


quotas = [
    Quota(5, per="user_id", window=timedelta(days=1)),
    Quota(searches, per="agent", name="agent"),
    Quota(models, per="global", window=timedelta(hours=1)),
    Quota(5, per=tenant, name="tenant"),
    Quota(500, per="user_id", window="month", tz="Europe/Berlin", starts=15),
]
ToolCallLimit("email", quotas=quotas)
ModelCallLimit(quotas=tuple(quotas))
assert_type(quotas[0].period, timedelta | CalendarWindow | None)
assert_type(quotas[0].name, str)


# Budgets.
def budget(state: Any, runtime: Any) -> Decimal:
    return Decimal(5) if runtime.context["paid"] else Decimal("0.50")


def bound(request: ModelRequest[Any]) -> int:
    return 1000 * len(request.messages)


def price(usage: ModelUsage) -> Decimal | None:
    return Decimal(usage.total_tokens) / 1000


budgets: list[Limit] = [
    TokenLimit(run_limit=100_000, tokens="input", reserve=bound),
    CostLimit(run_limit=5, exit_behavior="ask", grant="2.50", name="asks"),
    CostLimit(run_limit=0.50, thread_limit=budget, quotas=[Quota("100", per="tenant")]),
    CostLimit(run_limit=1, exit_behavior="finalize", keep="0.10"),
]
prices = {"my-model": Price(input="2.50", output=10)}
QuotaMiddleware(budgets, prices=price, unknown_price="allow")
QuotaMiddleware(budgets, prices=price, unknown_price="reported")
TokenLimit(run_limit=100_000, tokens="uncached")
QuotaMiddleware(budgets, prices=prices, charge_all_models=True)


# All options.
QuotaMiddleware(limits, tell_model=True, hide_exhausted=True, telemetry=Telemetry())
inline = InlineQuotaMiddleware(limits, store=MemoryStore(), on_store_error="block")
assert_type(inline.name, str)

# In an agent: alone, beside others, with a context of any kind, with a structured response.
agent = create_agent(model, middleware=[quota])
create_agent(model, middleware=[TodoListMiddleware(), inline, quota, PIIMiddleware("email")])
create_agent(model, middleware=[quota], context_schema=Answer)
in_context = create_agent(
    model, middleware=[quota, PIIMiddleware[Any, Caller]("email")], context_schema=Caller
)
in_context.invoke({"messages": []}, context=Caller("ada", "pro"))

# With its types given: the context, then the response.
typed = InlineQuotaMiddleware[Caller](limits)
assert_type(typed, InlineQuotaMiddleware[Caller, Any])
create_agent(model, middleware=[typed], context_schema=Caller)
both = QuotaMiddleware[Caller, Answer](limits)
create_agent(model, middleware=[both], context_schema=Caller, response_format=Answer)

# Not these.
QuotaMiddleware(one)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
QuotaMiddleware(limits, on_store_error="ignore")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
inline.reset(agent)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
ModelCallLimit(run_limit=10, exit_behavior="continue")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
RepeatLimit(3, thread_limit=9)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
ToolCallLimit("search", 3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
ToolCallLimit("search", run_limit=3, exit_behavior="ask", grant="5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
ToolCallLimit("search", run_limit=3, exit_behavior="finalize")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
ToolCallLimit("search", run_limit=lambda state: 3)  # type: ignore[arg-type,misc]  # pyright: ignore[reportArgumentType]
Quota(None, per="thread")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Quota(5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
Quota(5, per="thread", window="day", tz=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
one.run_limit = 4  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
create_agent(model, middleware=[QuotaMiddleware[Caller](limits)], context_schema=Answer)  # type: ignore[misc]  # pyright: ignore[reportCallIssue,reportArgumentType]
