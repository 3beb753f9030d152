"""Graphs of one's own and deep agents with limits; checked by mypy and pyright, never run."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, assert_type

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
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


def search(query: str = "") -> str:
    """Search the web."""
    return query


model = ScriptedChatModel(script=["Hello."])
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


held = QuotaMiddleware([ToolCallLimit(run_limit=50)])
with_them = with_limits(create, held, leave_out=["remote"])
assert_type(with_them("scripted", name="boss"), list[str])
with_them("scripted", middleware=[held], subagents=[{"name": "finder"}])

# Not these.
quota.model(search)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
GraphQuota(costs, store="redis://")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
GraphQuota(["search"])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
with_them("scripted", sub_agents=[])  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
