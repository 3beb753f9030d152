"""What `GraphQuota.add_to` and `react_hooks` refuse."""

import operator
import re
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AnyMessage
from langgraph.constants import START
from langgraph.graph import MessagesState, StateGraph

from langchain_quota import GraphQuota, ToolCallLimit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import recording


class WithoutMessages(TypedDict):
    question: str


class Added(TypedDict):
    messages: Annotated[list[AnyMessage], operator.add]


class Replaced(TypedDict):
    messages: list[AnyMessage]


def with_model() -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {})
    graph.add_edge(START, "model")
    return graph


def already_compiled() -> Any:
    graph = with_model()
    graph.compile()
    return graph


QUOTA = GraphQuota([ToolCallLimit(run_limit=1)])
MODEL = ScriptedChatModel(script=[])
SEARCH = recording("search", [])
BOUND: Any = MODEL.bind_tools([SEARCH])


@pytest.mark.parametrize(
    ("graph", "error", "text"),
    [
        (lambda: StateGraph(WithoutMessages), ValueError, "state has no messages"),
        (lambda: StateGraph(Replaced), ValueError, "does not keep messages by their id"),
        (lambda: StateGraph(Added), ValueError, "does not keep messages by their id"),
        (with_model, ValueError, "has a node 'model' already"),
        (lambda: with_model().compile(), TypeError, "compiled one: call add_to before"),
        (already_compiled, TypeError, "compiled already"),
        (lambda: MessagesState, TypeError, "graph must be a StateGraph"),
    ],
)
def test_graphs(graph: Any, error: type[Exception], text: str) -> None:
    """A graph that no loop can be added to is named at once, with what to do."""
    with pytest.raises(error, match=re.escape(text)):
        QUOTA.add_to(graph(), model=MODEL, tools=[SEARCH])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model": BOUND}, "with tools bound"),
        ({"model": 3}, "model must be a chat model, or the model's node"),
        ({"model": lambda state: {}, "prompt": "Hi."}, "prompt is for a chat"),
        ({"tools": SEARCH}, "tools must be a list of tools or a ToolNode"),
        ({"name": ""}, "name must be a name or None, not ''"),
        ({"start": 3}, "start must be the name of a node, START or None, not 3"),
        ({"end": None}, "end must be the name of a node, or END, not None"),
    ],
)
def test_arguments(given: dict[str, Any], text: str) -> None:
    """An argument of `add_to` that does not fit is named at once."""
    with pytest.raises(TypeError, match=re.escape(text)):
        QUOTA.add_to(StateGraph(MessagesState), **{"model": MODEL, "tools": [SEARCH], **given})


def test_hooks() -> None:
    """A model with its tools bound is named at once; without a model there are three arguments."""
    with pytest.raises(TypeError, match="with tools bound"):
        QUOTA.react_hooks(BOUND)
    assert QUOTA.react_hooks().keys() == {"pre_model_hook", "post_model_hook", "state_schema"}
