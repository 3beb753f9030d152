"""Agents in agents and graphs written by hand whose limits ask a person."""

from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import GraphQuota
from langchain_quota.testing import ScriptedChatModel
from tests.scenario.test_ask import APPROVE, MODEL, SEARCH, answer
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


@react
@pytest.mark.parametrize("kind", ["approve", "reject"])
async def test_a_supervisor(signals: Signals, kind: str) -> None:
    """Its own hooks ask, and so do the agents below it."""
    supervisor = pytest.importorskip("langgraph_supervisor")
    child = child_of(signals, "one")
    hooks = GraphQuota([MODEL], telemetry=signals.telemetry).react_hooks()
    model = ScriptedChatModel(script=[["transfer_to_one"], "done"])
    parent = Scene(signals, [])
    parent.agent = supervisor.create_supervisor([child.agent], model=model, **hooks).compile(
        checkpointer=InMemorySaver()
    )
    await parent.play()
    assert offers(parent.agent) == [{"tool:search": 1}]
    await parent.resume(APPROVE)
    assert child.ran == ["search"] * 2
    assert offers(parent.agent) == [{"model": 1}]
    result = await parent.resume(answer(kind, message="No more."))
    assert result["messages"][-1].content == {"approve": "done", "reject": "No more."}[kind]
    check_history(result["messages"])


@react
@pytest.mark.parametrize("kind", ["graph", "react"])
@pytest.mark.parametrize("limit", [SEARCH, MODEL], ids=["tool", "model"])
async def test_graphs_rejected(signals: Signals, kind: Any, limit: Any) -> None:
    """A loop that is rejected is left, and one that could not wait does not begin."""
    scene = Scene(signals, [["search"] * 2], [limit], kind=kind)
    await scene.play()
    result = await scene.resume(answer("reject", message="No."))
    assert result["messages"][-1].content == "No."
    assert len(scene.model.calls) == 1
    assert scene.ran == ([] if limit is SEARCH else ["search"] * 2)
    scene = Scene(signals, ["done"], [limit], kind=kind, checkpointer=None)
    with pytest.raises(RuntimeError, match="needs a checkpointer"):
        await scene.play()
