"""The page of messages: each is one that the code says, and mistakes lead to them."""

import ast
import logging
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from langgraph.warnings import LangGraphDeprecatedSinceV10

import langchain_quota
from langchain_quota import ModelCallLimit, QuotaMiddleware, ToolCallLimit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import recording
from tests.telemetry import Signals

CODE = Path(langchain_quota.__file__).parent
ASKED: Any = {"messages": [("user", "hi")]}
SEARCH = ToolCallLimit("search", run_limit=9)
MODEL = ModelCallLimit(run_limit=9)


def messages() -> list[str]:
    """What the page says that a user sees: how messages begin, with `…` for what varies."""
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    return re.findall(r"(?m)^\| `([^`]+)` \| [^|]+ \| [^|]+ \|$", page)


def begins(seen: str, message: str) -> bool:
    """Whether a text that was seen begins as a message of the page does."""
    return re.match(".+".join(map(re.escape, message.split("…"))), seen) is not None


def raised(error: type[BaseException], make: Callable[[], Any]) -> str:
    """What a user reads of the exception that something raises."""
    with pytest.raises(error) as caught:
        make()
    return str(caught.value)


def quota(signals: Signals, *limits: Any, **options: Any) -> QuotaMiddleware[Any, Any]:
    return QuotaMiddleware(limits, telemetry=signals.telemetry, **options)


def agent(*middleware: Any, **options: Any) -> Any:
    """An agent that searches once, and then is done."""
    model = ScriptedChatModel(script=[["search"], "done"])
    tools = options.pop("tools", [recording("search", [])])
    return create_agent(model, tools, middleware=middleware, **options)


def older_agent(signals: Signals) -> None:
    make: Any = create_react_agent
    with pytest.warns(LangGraphDeprecatedSinceV10):
        make(ScriptedChatModel(script=[]), [], middleware=[quota(signals, SEARCH)])


node: Any = StateGraph(MessagesState).add_node
alone: Any = create_agent
OF_LIBRARIES: dict[str, Callable[[Signals], object]] = {
    "'QuotaMiddleware' object is not iterable": lambda signals: alone(
        ScriptedChatModel(script=[]), middleware=quota(signals, SEARCH)
    ),
    "create_react_agent() got unexpected keyword arguments: {'middleware': …": older_agent,
    "Expected a Runnable, callable or dict": lambda signals: node("quota", quota(signals, SEARCH)),
    "Checkpointer requires one or more of the following 'configurable' keys: …": (
        lambda signals: agent(quota(signals, MODEL), checkpointer=InMemorySaver()).invoke(ASKED)
    ),
}
"""Mistakes that LangChain, LangGraph or Python answer."""


@pytest.mark.parametrize("message", OF_LIBRARIES)
def test_a_mistake_that_a_library_answers(message: str, signals: Signals) -> None:
    """The mistake, made for real, shows a message that the page explains."""
    assert message in messages()
    assert begins(raised(Exception, lambda: OF_LIBRARIES[message](signals)), message)


LOGGED = {
    "store of langchain-quota failed with QuotaStoreError": " of langchain-quota failed with "
}
"""What the code says of messages that do not begin with its own words."""


def test_every_message_is_said() -> None:
    """No message is on the page twice, and the code says the greater part of each."""
    page = messages()
    assert len(page) == len(set(page)) > 15
    nodes = chain.from_iterable(
        ast.walk(ast.parse(each.read_text())) for each in CODE.rglob("*.py")
    )
    code = "\n".join(str(each.value) for each in nodes if isinstance(each, ast.Constant))
    for message in {*page} - {*OF_LIBRARIES}:
        parts = re.split("…|: |, ", LOGGED.get(message, message))
        assert sum(len(each) for each in parts if each.strip() in code) >= len(message) * 0.5, (
            message
        )


PROVIDERS = [
    {"type": "web_search_20250305", "name": "web_search"},
    {"type": "function", "function": {"name": "lookup", "parameters": {}}},
    {"type": "code_interpreter"},
]


@pytest.mark.parametrize(
    ("names", "options", "told"),
    [
        ({"tool_name": "serach"}, {}, ["WARNING 'serach' (did you mean 'search'?)"]),
        ({"exclude": ["serach", "write_todos"]}, {}, ["WARNING 'serach' (did you mean 'search'?)"]),
        (
            {"tool_name": ["fetch", "research_papers"]},
            {},
            ["INFO 'fetch', 'research_papers'; its tools are 'search'"],
        ),
        ({"tool_name": ["fetch", "search"]}, {}, []),
        ({"tool_name": ["web_search", "lookup", "code_interpreter"]}, {"tools": PROVIDERS}, []),
    ],
)
def test_a_misspelt_tool(
    names: Any, options: Any, told: list[str], signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit without a tool, and a name spelt like one, are logged once there are tools."""
    caplog.set_level(logging.INFO, "langchain_quota")
    held = quota(signals, ToolCallLimit(run_limit=9, **names))
    create_agent(ScriptedChatModel(script=["done"]), [], middleware=[held]).invoke(ASKED)
    for _ in range(2):
        agent(held, **options).invoke(ASKED)
    said = "limits name tools that agent … does not have: …", "a limit holds no tool of agent …: …"
    found = [each for each in caplog.records if any(begins(each.getMessage(), of) for of in said)]
    assert [f"{e.levelname} {e.getMessage().partition(': ')[2]}" for e in found] == told
