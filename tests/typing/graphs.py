"""GraphQuota with graphs of one's own, by mypy and pyright; never run."""

from decimal import Decimal
from typing import Any, TypedDict, assert_type

from langchain_core.messages import AIMessage, ToolCall
from langchain_core.runnables import RunnableConfig
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent

from langchain_quota import CostLimit, GraphQuota, ModelCallLimit, ToolCallLimit
from langchain_quota.testing import ScriptedChatModel


class Own(MessagesState):
    """A state of one's own."""

    topic: str


class NoMessages(TypedDict):
    """A state of another kind."""

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

quota.add_to(NoMessages, model=model, tools=[])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
GraphQuota(
    [CostLimit(run_limit="0.50")],
    prices=lambda used: Decimal(used.total_tokens) / 10**6,
    unknown_price="allow",
)
GraphQuota([CostLimit(run_limit=1)], unknown_price="ignore")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
GraphQuota(["search"])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
