"""Agents in agents and graphs written by hand whose limits ask a person."""

from collections.abc import Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from langchain_quota import (
    GraphQuota,
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    TokenLimit,
    ToolCallLimit,
    usage,
    with_limits,
)
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.agent.conftest import Form, both_forms
from tests.agent.graphs import GraphScene
from tests.agent.rules import CONFIG, check_history, recording
from tests.agent.test_ask import APPROVE, MODEL, SEARCH, answer, used
from tests.agent.test_graph_functional import Functional, said
from tests.agent.test_graph_react import ReactScene
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


def quota(signals: Signals, *limits: Any, **options: Any) -> QuotaMiddleware[Any, Any]:
    return QuotaMiddleware([*limits], telemetry=signals.telemetry, **options)


def delegate(name: str, child: Any) -> BaseTool:
    """A tool that asks a sub-agent."""

    def ask() -> str:
        return str(child.invoke({"messages": [("user", "Find it!")]})["messages"][-1].content)

    async def aask() -> str:
        result = await child.ainvoke({"messages": [("user", "Find it!")]})
        return str(result["messages"][-1].content)

    return StructuredTool.from_function(ask, aask, name=name, description=name)


class Child:
    """A sub-agent that searches twice, and what it did."""

    def __init__(self, signals: Signals, limit: Any, **options: Any) -> None:
        self.ran: list[str] = []
        self.model = ScriptedChatModel(script=[["search"] * 2, "found"])
        self.agent: Any = create_agent(
            self.model,
            [recording("search", self.ran)],
            middleware=[quota(signals, limit)],
            **options,
        )


class TestAgentAsTool:
    """An agent that is a tool of another one."""

    async def test_with_the_parents_checkpointer(self, signals: Signals) -> None:
        """The question is the parent's to answer; the sub-agent goes on where it was."""
        child = Child(signals, SEARCH, name="child")
        parent: Any = create_agent(
            ScriptedChatModel(script=[["one"], "done"]),
            [delegate("one", child.agent)],
            middleware=[quota(signals, MODEL.__class__(run_limit=5))],
            checkpointer=InMemorySaver(),
        )
        await run(parent)
        assert offers(parent) == [{"tool:search": 1}]
        result = await run(parent, Command(resume=APPROVE))
        assert [each.content for each in result["messages"][-2:]] == ["found", "done"]
        assert child.ran == ["search"] * 2
        assert len(child.model.calls) == 2

    async def test_two_in_parallel(self, signals: Signals) -> None:
        """Each asks its own question, and each gets its own answer."""
        children = [Child(signals, SEARCH, name=name) for name in ("first", "second")]
        parent: Any = create_agent(
            ScriptedChatModel(script=[["one", "two"], "done"]),
            [delegate("one", children[0].agent), delegate("two", children[1].agent)],
            checkpointer=InMemorySaver(),
        )
        await run(parent)
        first, second = waiting(parent)
        given = {first.id: APPROVE, second.id: answer("reject", message="Not you.")}
        result = await run(parent, Command(resume=given))
        assert sorted(len(each.ran) for each in children) == [0, 2]
        texts = [each.content for each in result["messages"] if each.type == "tool"]
        assert sorted(texts) == ["Not you.", "found"]
        check_history(result["messages"])

    async def test_without_a_checkpointer(self, signals: Signals) -> None:
        """With the answer, a sub-agent without a state begins anew, as in LangGraph itself."""
        child = Child(signals, SEARCH, name="child", checkpointer=False)
        child.model.script = [["search"] * 2, ["search"] * 2, "found"]
        parent: Any = create_agent(
            ScriptedChatModel(script=[["one"], "done"]),
            [delegate("one", child.agent)],
            checkpointer=InMemorySaver(),
        )
        await run(parent)
        await run(parent, Command(resume=APPROVE))
        assert child.ran == ["search"] * 2
        assert len(child.model.calls) == 3

    async def test_parent_and_child_ask(self, signals: Signals) -> None:
        """A user's quota that both count is asked about in each, and each grant counts."""
        store = MemoryStore()
        limit = ToolCallLimit("search", quotas=[Quota(1, per="global")], exit_behavior="ask")
        ran: list[str] = []

        def agent(script: Any, *tools: BaseTool, **options: Any) -> Any:
            return create_agent(
                ScriptedChatModel(script=script),
                [recording("search", ran), *tools],
                middleware=[quota(signals, limit, store=store)],
                **options,
            )

        child = agent([["search"] * 2, "found"], name="child")
        script = [["one"], ["search"], "done"]
        parent = agent(script, delegate("one", child), checkpointer=InMemorySaver())
        await run(parent)
        assert offers(parent) == [{"tool:search": 1}]
        await run(parent, Command(resume=APPROVE))
        assert ran == ["search"] * 2
        await run(parent, Command(resume=APPROVE))
        assert ran == ["search"] * 3
        assert [each.amount for each in store.grants()] == [1, 1]
        assert [each.used for each in store.usages("search:global*")] == [3]


class TestKits:
    """Kits that make agents of agents."""

    async def test_deepagents(self, signals: Signals) -> None:
        """Sub-agents that `task` starts ask by themselves, with one store for all."""
        deepagents = pytest.importorskip("deepagents")
        ran: list[str] = []

        def script(messages: Sequence[BaseMessage]) -> Turn:
            if messages[-1].type != "human":
                return "done"
            inner = "Look!" in messages[-1].text
            started = {"description": "Look!", "subagent_type": "general-purpose"}
            return ["search"] * 2 if inner else [("task", started)] * 2

        held = quota(signals, SEARCH, store=MemoryStore())
        agent = with_limits(deepagents.create_deep_agent, held)(
            ScriptedChatModel(script=script),
            [recording("search", ran)],
            checkpointer=InMemorySaver(),
        )
        await run(agent)
        assert offers(agent) == [{"tool:search": 1}] * 2
        given = {each.id: APPROVE for each in waiting(agent)}
        result = await run(agent, Command(resume=given))
        assert ran == ["search"] * 4
        assert result["messages"][-1].content == "done"

    async def test_a_swarm(self, signals: Signals) -> None:
        """The agent that asks goes on in its own turn."""
        swarm = pytest.importorskip("langgraph_swarm")
        ran: list[str] = []
        agents = [
            create_agent(
                ScriptedChatModel(script=script),
                [swarm.create_handoff_tool(agent_name=other), recording("search", ran)],
                middleware=[quota(signals, SEARCH)],
                name=name,
            )
            for name, other, script in (
                ("alice", "bob", [["transfer_to_bob"]]),
                ("bob", "alice", [["search"] * 2, "done"]),
            )
        ]
        graph = swarm.create_swarm(agents, default_active_agent="alice").compile(
            checkpointer=InMemorySaver()
        )
        await run(graph)
        assert offers(graph) == [{"tool:search": 1}]
        result = await run(graph, Command(resume=APPROVE))
        assert ran == ["search"] * 2
        assert result["messages"][-1].content == "done"
        check_history(result["messages"])

    @react
    @pytest.mark.parametrize("kind", ["approve", "reject"])
    async def test_a_supervisor(self, signals: Signals, kind: str) -> None:
        """Its own hooks ask, and so do the agents below it."""
        supervisor = pytest.importorskip("langgraph_supervisor")
        child = Child(signals, SEARCH, name="one")
        hooks = GraphQuota([MODEL], telemetry=signals.telemetry).react_hooks()
        graph: Any = supervisor.create_supervisor(
            [child.agent],
            model=ScriptedChatModel(script=[["transfer_to_one"], "done"]),
            **hooks,
        ).compile(checkpointer=InMemorySaver())
        await run(graph)
        assert offers(graph) == [{"tool:search": 1}]
        await run(graph, Command(resume=APPROVE))
        assert child.ran == ["search"] * 2
        assert offers(graph) == [{"model": 1}]
        result = await run(graph, Command(resume=answer(kind, message="No more.")))
        text = {"approve": "done", "reject": "No more."}[kind]
        assert result["messages"][-1].content == text
        check_history(result["messages"])


class Loop(GraphScene):
    """A graph whose limits ask."""

    def offers(self) -> list[dict[str, Any]]:
        return offers(self.agent)


class TestGraphs:
    """GraphQuota."""

    @both_forms
    @pytest.mark.parametrize("has_store", [False, True], ids=["state", "store"])
    async def test_add_to(self, signals: Signals, form: Form, has_store: bool) -> None:  # noqa: FBT001
        """A loop in a StateGraph asks for tools, model calls and tokens, and charges once."""
        limits: list[Any] = [
            SEARCH,
            ModelCallLimit(run_limit=1, exit_behavior="ask"),
            TokenLimit(run_limit=100, exit_behavior="ask", name="tokens"),
        ]
        store = MemoryStore() if has_store else None
        script = [used(150, "search", "search"), used(10, number=1)]
        scene = Loop(signals, script, limits, form=form, store=store)
        await scene.turn()
        assert scene.offers() == [{"tool:search": 1}]
        await scene.resume(APPROVE)
        assert scene.ran == ["search"] * 2
        assert scene.offers() == [{"model": 1, "tokens": 100}]
        result = await scene.resume(APPROVE)
        assert result["messages"][-1].content == "done"
        known = usage(scene.agent.get_state(CONFIG))
        assert (known.run_model, known.spent["model.total_tokens"]) == (2, 160)

    @both_forms
    async def test_add_to_rejected(self, signals: Signals, form: Form) -> None:
        """A loop that is rejected is left."""
        scene = Loop(signals, [["search"] * 2], [SEARCH], form=form)
        await scene.turn()
        result = await scene.resume(answer("reject", message="No."))
        assert result["messages"][-1].content == "No."
        assert scene.ran == []

    @react
    @both_forms
    async def test_react_hooks(self, signals: Signals, form: Form) -> None:
        """create_react_agent asks in its hooks."""
        scene = ReactScene(signals, [["search"] * 2, "done"], [SEARCH, MODEL], form=form)
        await scene.turn()
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
        scene = ReactScene(signals, [["search"]], [MODEL])
        await scene.turn()
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
        scene = Loop(signals, ["done"], [SEARCH], compiled={"checkpointer": None})
        with pytest.raises(RuntimeError, match="needs a checkpointer"):
            await scene.turn()
