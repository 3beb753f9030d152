"""Agents in agents and graphs written by hand whose limits ask a person."""

from typing import Any

import pytest

from tests.scenario.test_ask import APPROVE, SEARCH, answer
from tests.scene import CONFIG, Scene, asking, check_history, delegate
from tests.telemetry import Signals

react = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")


def offers(agent: Any) -> list[dict[str, Any]]:
    """What the questions that wait offer."""
    waiting = agent.get_state(CONFIG).interrupts
    return [each.value["action_requests"][0]["args"] for each in waiting]


def child_of(signals: Signals, name: str, *limits: Any, **options: Any) -> Scene:
    """A sub-agent that searches twice."""
    script = [["search"] * 2, "found", "found"]
    return Scene(signals, script, limits or [SEARCH], name=name, checkpointer=None, **options)


async def test_two_sub_agents_in_parallel(signals: Signals) -> None:
    """Each asks its own question, which is the parent's to answer, and gets its own answer."""
    children = [child_of(signals, name) for name in ("one", "two")]
    tools = [
        delegate(each.agent, name) for each, name in zip(children, ("one", "two"), strict=True)
    ]
    parent = Scene(signals, asking("one", "two"), tools=tools)
    await parent.play()
    assert offers(parent.agent) == [{"tool:search": 1}] * 2
    first, second = parent.agent.get_state(CONFIG).interrupts
    await parent.resume({first.id: APPROVE, second.id: answer("reject", message="Not you.")})
    assert sorted(len(each.ran) for each in children) == [0, 2]
    texts = [each.content for each in parent.state()["messages"] if each.type == "tool"]
    assert sorted(texts) == ["Not you.", "found"]
    check_history(parent.state()["messages"])
