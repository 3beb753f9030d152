"""Agents, their limits, decisions and usage; checked by mypy and pyright, never run."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, NotRequired, assert_type

from langchain.agents import AgentState, create_agent
from langchain.agents.middleware import (
    HumanInTheLoopMiddleware,
    ModelRequest,
    ModelResponse,
    PIIMiddleware,
    TodoListMiddleware,
    hook_config,
)
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolCall
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import ToolNode, create_react_agent
from langgraph.runtime import Runtime
from pydantic import BaseModel

from langchain_quota import (
    ConcurrencyLimit,
    CostLimit,
    Decision,
    GraphQuota,
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitMiddleware,
    Quota,
    QuotaMiddleware,
    RepeatLimit,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitMiddleware,
    usage,
    with_limits,
)
from langchain_quota.core.decision import Outcome
from langchain_quota.limits.call import ModelUsage
from langchain_quota.middleware.state import QuotaState
from langchain_quota.testing import ScriptedChatModel, captured_decisions


@dataclass
class Caller:
    user_id: str
    plan: str


class Reply(BaseModel):
    text: str


model = ScriptedChatModel(script=["Hello."])

limits = [  # of several kinds, without a type
    ModelCallLimit(run_limit=10, thread_limit=100, exit_behavior="finalize", near=0.9),
    ToolCallLimit("search", run_limit=5, exit_behavior="ask", grant=10, message="Search no more."),
    ConcurrencyLimit("browser", max_concurrency=2, wait=0.5),
]
quota = QuotaMiddleware(limits)
assert_type(quota, QuotaMiddleware[Any, Any])


one = ToolCallLimit("search", run_limit=3)


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


RepeatLimit(run_limit=3, key=path, tools="read_file", near=0.5, enforce=False, alert=False)


# Quotas.
def tenant(state: AgentState[Any], runtime: Runtime[Caller]) -> str:
    return runtime.context.user_id.partition("@")[2]


ToolCallLimit(
    "email",
    quotas=[
        Quota(searches, per="agent", name="agent"),
        Quota(models, per="global", window=timedelta(hours=1)),
        Quota(5, per=tenant, name="tenant"),
        Quota(500, per="user_id", window="month", tz="Europe/Berlin", starts=15),
    ],
)
ModelCallLimit(quotas=(Quota(5, per="user_id"),))


# Budgets.
def budget(state: Any, runtime: Any) -> Decimal:
    return Decimal(5) if runtime.context["paid"] else Decimal("0.50")


def bound(request: ModelRequest[Any]) -> int:
    return 1000 * len(request.messages)


def price(usage: ModelUsage) -> Decimal | None:
    return Decimal(usage.total_tokens) / 1000


budgets = [
    TokenLimit(run_limit=100_000, tokens="input", reserve=bound),
    CostLimit(run_limit=5, exit_behavior="ask", grant="2.50", name="asks"),
    CostLimit(run_limit=0.50, thread_limit=budget, quotas=[Quota("100", per="tenant")]),
    CostLimit(run_limit=1, exit_behavior="finalize", keep="0.10"),
]
QuotaMiddleware(budgets, prices=price, unknown_price="reported")


inline = InlineQuotaMiddleware(limits, store=MemoryStore(), on_store_error="block")

# In an agent: alone, beside others, with a context of any kind, with a structured response.
agent = create_agent(model, middleware=[quota])
create_agent(model, middleware=[TodoListMiddleware(), inline, quota, PIIMiddleware("email")])
in_context = create_agent(
    model, middleware=[quota, PIIMiddleware[Any, Caller]("email")], context_schema=Caller
)
in_context.invoke({"messages": []}, context=Caller("ada", "pro"))

# With its types given: the context, then the response.
typed = InlineQuotaMiddleware[Caller](limits)
assert_type(typed, InlineQuotaMiddleware[Caller, Any])
create_agent(model, middleware=[typed], context_schema=Caller)
both = QuotaMiddleware[Caller, Reply](limits)
create_agent(model, middleware=[both], context_schema=Caller, response_format=Reply)

# Not these.
QuotaMiddleware(one)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
inline.reset(agent)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
ToolCallLimit("search", 3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
ToolCallLimit("search", run_limit=lambda state: 3)  # type: ignore[arg-type,misc]  # pyright: ignore[reportArgumentType]
one.run_limit = 4  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
create_agent(model, middleware=[QuotaMiddleware[Caller](limits)], context_schema=Reply)  # type: ignore[misc]  # pyright: ignore[reportCallIssue,reportArgumentType]


# Every argument that LangChain's have.
tools = ToolCallLimitMiddleware(
    tool_name="search", thread_limit=20, run_limit=3, exit_behavior="continue"
)
model_calls = ModelCallLimitMiddleware(thread_limit=100, run_limit=10, exit_behavior="error")
assert_type(tools, ToolCallLimitMiddleware[Any, Any])
assert_type(model_calls, ModelCallLimitMiddleware[Any, Any])


# And ours.
def refusal(decision: Decision) -> str:
    return f"not {decision.call.tool}"


named = ToolCallLimitMiddleware(run_limit=3, message=refusal, alert=False, on_pending="raise")
told = ModelCallLimitMiddleware(run_limit=50, limit_name="hard", telemetry=Telemetry())

# Together, beside each other and beside other middlewares, in one list.
asked = HumanInTheLoopMiddleware({"search": True})
held = QuotaMiddleware([ToolCallLimit(run_limit=50)])
create_agent(model, middleware=[tools, named, model_calls, told, asked, held])
# With its types given, in LangChain's order: the response, then the context.
typed_tools = ToolCallLimitMiddleware[Any, Caller](run_limit=3)
create_agent(model, middleware=[typed_tools], context_schema=Caller)


# Graphs of one's own, and deep agents.
def search(query: str = "") -> str:
    """Search the web."""
    return query


graph_quota = GraphQuota([ModelCallLimit(run_limit=5), ToolCallLimit("search", run_limit=2)])
limited = graph_quota.model(model, [search])
assert_type(limited, BaseChatModel)
assert_type(graph_quota.tools([search], handle_tool_errors=True), ToolNode)
create_react_agent(limited, graph_quota.tools([search]))


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
        if runtime.context.plan == "suspended":
            return {"jump_to": "end", "messages": [AIMessage("suspended")]}
        return super().before_model(state, runtime)

    async def awrap_model_call(
        self,
        request: ModelRequest[Caller],
        handler: Callable[[ModelRequest[Caller]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        return await super().awrap_model_call(request, handler)


shop = ShopQuota(10)
create_agent(model, middleware=[shop], context_schema=Caller)


# Not these.
ShopQuota([ModelCallLimit(run_limit=3)])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
QuotaMiddleware[int]([ModelCallLimit(run_limit=3)])  # type: ignore[type-var]  # pyright: ignore[reportInvalidTypeArguments]


def outcome_of(decision: Decision) -> int:
    """An outcome is a text, and one of four."""
    assert_type(decision.outcome.upper(), str)
    match decision.outcome:
        case Outcome.ALLOWED | Outcome.WOULD_BLOCK:
            return 0
        case Outcome.BLOCKED | Outcome.SKIPPED:
            return 1


ten_calls = [ModelCallLimit(run_limit=10)]
seen: list[Decision] = []


def sync(decision: Decision) -> None:
    seen.append(decision)


async def awaited(decision: Decision) -> None:
    sync(decision)


def either(decision: Decision) -> Awaitable[None] | None:
    return None if decision.refused_by else awaited(decision)


# One observer, and several.
QuotaMiddleware(ten_calls, on_decision=either)
QuotaMiddleware(ten_calls, on_decision=[sync, awaited, seen.append])

# Not these.
QuotaMiddleware(ten_calls, on_decision=[sync, "log"])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
seen[0].outcome = Outcome.ALLOWED  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


# A script, and what a thread has used.
def answer(messages: Sequence[BaseMessage]) -> str | list[str]:
    return ["search"] if messages[-1].type == "human" else "Done."


batch = ["search", ("search", {"query": "x"})]
scripted = ScriptedChatModel(script=[batch, AIMessage("Hello."), TimeoutError("slow"), "Done."])
as_any_model: BaseChatModel = ScriptedChatModel(script=answer, keep_calls=10)
assert_type(scripted.calls[0].tools, tuple[str, ...])
assert_type(scripted.calls[0].messages, tuple[BaseMessage, ...])

budgeted = QuotaMiddleware([ModelCallLimit(thread_limit=10)])
reader = create_agent(as_any_model, middleware=[budgeted], checkpointer=InMemorySaver())
config: RunnableConfig = {"configurable": {"thread_id": "7"}}
used = usage(reader.get_state(config))
assert_type((used.model, used.run_model), tuple[int, int])
assert_type(used.tools, Mapping[str, int])
assert_type(used.run_tools.get("search", 0), int)


async def asynchronously() -> None:
    with captured_decisions() as decisions:
        await reader.ainvoke({"messages": []}, config)
    assert_type(decisions, list[Decision])
    assert_type(usage(await reader.aget_state(config)).model, int)
    await budgeted.areset(reader, config)
    assert_type((await budgeted.aleft("model", thread=7)).left, int | Decimal)
    assert_type((await budgeted.agrant("model", 5, thread=7, reason="more")).id, str)
    await budgeted.areset("model", user_id="ada", quota="daily", prefix="acme")


assert_type(budgeted.left("cost", tenant="acme", limit="2.50").left, int | Decimal)
assert_type(budgeted.grant("cost", 50, tenant="acme", until=datetime.now(UTC), by="bo").id, str)
if revoked := budgeted.revoke("cost", "4711", tenant="acme"):
    assert_type(revoked.amount, int)
budgeted.reset(reader, config)

# Not these.
budgeted.reset(reader, "7")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
budgeted.reset(budgeted, config)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
used.tools["search"] = 0  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
