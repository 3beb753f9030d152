"""Graphs of one's own and deep agents with limits; checked by mypy and pyright, never run."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, TypedDict, assert_type

from langchain_core.messages import AIMessage, ToolCall
from langchain_core.runnables import RunnableConfig
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent

from langchain_quota import (
    CostLimit,
    GraphQuota,
    ModelCallLimit,
    QuotaMiddleware,
    ToolCallLimit,
    with_limits,
)
from langchain_quota.testing import ScriptedChatModel


class Own(MessagesState):
    topic: str


class NoMessages(TypedDict):
    topic: str


def search(query: str = "") -> str:
    """Search the web."""
    return query


def answer(state: Own) -> dict[str, Any]:
    """Call the model."""
    reply = quota.call_model(model, state, [search], prompt="Be short.")
    assert_type(reply, AIMessage)
    return {"messages": [reply]}


model = ScriptedChatModel(script=["Hello."])
config: RunnableConfig = {"configurable": {"thread_id": "7"}}
quota = GraphQuota([ModelCallLimit(run_limit=5), ToolCallLimit("search", run_limit=2)])
graph = quota.add_to(StateGraph(Own), model=model, tools=[search]).compile()
quota.add_to(StateGraph(Own), model=answer, tools=ToolNode([search]), name="researcher")
quota.add_to(StateGraph(Own), model=answer, tools=quota.tool_node([search], tags=[]), name="writer")
quota.add_to(StateGraph(Own), model="openai:gpt-5", tools=[search], start=None, end="report")
quota.reset(graph, config)
create_react_agent(**quota.react_hooks(model, [search], name="researcher"))

state = quota.before_model(quota.begin({"messages": []}))
assert_type(state, dict[str, Any])
assert_type(quota.open_calls(quota.after_model(state)), list[ToolCall])
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


held = QuotaMiddleware([ToolCallLimit(run_limit=50)])
limited = with_limits(create, held, leave_out=["remote"])
assert_type(limited("scripted", name="boss"), list[str])
limited("scripted", middleware=[held], subagents=[{"name": "finder"}])

# Not these.
quota.add_to(NoMessages, model=model, tools=[])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
GraphQuota(costs, unknown_price="ignore")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
GraphQuota(["search"])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
limited("scripted", sub_agents=[])  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
limited(7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
with_limits(create, ToolCallLimit(run_limit=3))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
