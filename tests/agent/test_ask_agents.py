"""Agents in agents and graphs written by hand whose limits ask a person."""

from typing import Any

import pytest
from langgraph.types import Command

from langchain_quota import (
    usage,
)
from tests.agent.test_ask import APPROVE, MODEL, SEARCH, answer
from tests.agent.test_graph_functional import Functional, said
from tests.scene import CONFIG, Form, Scene, both_forms
from tests.signals import Signals

react = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")


async def run(agent: Any, given: Any = None) -> dict[str, Any]:
    """A new run, or one that is resumed."""
    return dict(await agent.ainvoke(given or {"messages": [("user", "Go!")]}, CONFIG))


def waiting(agent: Any) -> list[Any]:
    """The questions that wait for an answer."""
    return list(agent.get_state(CONFIG).interrupts)


def offers(agent: Any) -> list[dict[str, Any]]:
    return [each.value["action_requests"][0]["args"] for each in waiting(agent)]


class Loop(Scene):
    """A graph whose limits ask."""

    def offers(self) -> list[dict[str, Any]]:
        return offers(self.agent)


class TestGraphs:
    """GraphQuota."""

    @both_forms
    async def test_add_to_rejected(self, signals: Signals, form: Form) -> None:
        """A loop that is rejected is left."""
        scene = Loop(signals, [["search"] * 2], [SEARCH], form=form)
        await scene.play()
        result = await scene.resume(answer("reject", message="No."))
        assert result["messages"][-1].content == "No."
        assert scene.ran == []

    @react
    @both_forms
    async def test_react_hooks(self, signals: Signals, form: Form) -> None:
        """create_react_agent asks in its hooks."""
        scene = Scene(signals, [["search"] * 2, "done"], [SEARCH, MODEL], form=form, kind="react")
        await scene.play()
        assert offers(scene.agent) == [{"tool:search": 1}]
        await scene.resume(APPROVE)
        assert offers(scene.agent) == [{"model": 1}]
        result = await scene.resume(APPROVE)
        assert scene.ran == ["search"] * 2
        assert result["messages"][-1].content == "done"
        assert usage(scene.agent.get_state(CONFIG)).run_model == 2

    @react
    async def test_react_hooks_rejected(self, signals: Signals) -> None:
        """A model that is not to be called is not called."""
        scene = Scene(signals, [["search"]], [MODEL], kind="react")
        await scene.play()
        result = await scene.resume(answer("reject", message="No."))
        assert result["messages"][-1].content == "No."
        assert len(scene.model.calls) == 1

    @both_forms
    async def test_the_functional_api(self, signals: Signals, form: Form) -> None:
        """Several questions in one entrypoint are answered one by one, and nothing runs twice."""
        script = [["search"] * 2, ["search"], "done"]
        agent = Functional(signals, script, [SEARCH, MODEL])
        *asked, last = await agent.run(form, said("go"), *[Command(resume=APPROVE)] * 4)
        assert [
            each.value["action_requests"][0]["args"]
            for result in asked
            for each in result["__interrupt__"]
        ] == [{"tool:search": 1}, {"model": 1}, {"tool:search": 1}, {"model": 1}]
        assert last[-1].content == "done"
        assert agent.ran == ["search"] * 3
        assert len(agent.model.calls) == 3

    async def test_no_checkpointer(self, signals: Signals) -> None:
        """A graph that could not wait does not begin."""
        scene = Loop(signals, ["done"], [SEARCH], checkpointer=None)
        with pytest.raises(RuntimeError, match="needs a checkpointer"):
            await scene.play()
