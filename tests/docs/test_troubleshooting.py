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


def threes(text: str) -> set[tuple[str, ...]]:
    """All that stands in a text in three words."""
    words = [each.rstrip(":;,.") for each in text.split()]
    return {tuple(words[index : index + 3]) for index in range(len(words) - 2)}


def said() -> set[tuple[str, ...]]:
    """What stands in the texts of the code in three words."""
    found = set[tuple[str, ...]]()
    trees = (ast.parse(file.read_text()) for file in CODE.rglob("*.py"))
    for node in chain.from_iterable(map(ast.walk, trees)):
        if isinstance(node, ast.JoinedStr):
            parts = [getattr(each, "value", "") for each in node.values]
            found |= threes("".join(each if isinstance(each, str) else "…" for each in parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= threes(node.value)
    return found


def test_every_message_is_said() -> None:
    """No message is on the page twice, and the code says the greater part of each."""
    page, code = messages(), said()
    assert len(page) == len(set(page)) > 15
    for message in {*page} - {*OF_LIBRARIES}:
        words = message.split()
        known = sum(
            not threes(" ".join(words[max(0, at - 2) : at + 3])).isdisjoint(code)
            for at in range(len(words))
        )
        assert known >= len(words) * 0.5, message


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
