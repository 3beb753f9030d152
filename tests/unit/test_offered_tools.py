"""Which tools agents offer their models, as a middleware learns it."""

from typing import Any

from langchain.agents.middleware.types import ModelRequest
from langchain_core.tools import StructuredTool

from langchain_quota.middleware._offered_tools import OfferedTools
from langchain_quota.testing import ScriptedChatModel
from tests.signals import Signals


def named(name: str) -> StructuredTool:
    return StructuredTool.from_function(lambda: name, name=name, description="Works.")


def test_other_tools_are_learned(signals: Signals) -> None:
    """Tools are learned again if they are other objects, also in a list that was changed."""
    offered = OfferedTools([], signals.recorder)
    tools: list[Any] = [named("search"), {"type": "web_search"}]

    def learns() -> bool:
        return offered.learn(
            ModelRequest(model=ScriptedChatModel(script=[]), messages=[], tools=tools)
        )

    assert [learns(), learns()] == [True, False]
    tools[0] = named("search")
    assert [learns(), learns()] == [True, False]
    tools.append(named("fetch"))
    assert [learns(), learns()] == [True, False]
    tools.clear()
    assert [learns(), learns()] == [True, False]
