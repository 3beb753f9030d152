"""create_react_agent and create_supervisor, held to limits by the hooks that they take."""

import asyncio
import re
import types
from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.messages import AnyMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from langgraph.types import Command, interrupt
from pydantic import BaseModel

from langchain_quota import GraphQuota, ModelCallLimit, ToolCallLimit, usage
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.agent.conftest import Form, both_forms
from tests.agent.graphs import GraphScene
from tests.agent.rules import CONFIG, Scene, check_history, recording
from tests.signals import Signals

pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")


class ReactScene(Scene):
    """A create_react_agent with our hooks, on one thread."""

    def __init__(
        self,
        signals: Signals,
        script: Any,
        limits: Sequence[Limit],
        *,
        tools: Sequence[BaseTool] | None = None,
        ran: list[str] | None = None,
        form: Form = "async",
        compiled: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(signals, script, [], ran=ran, form=form)
        self.limits = list(limits)
        self.quota = GraphQuota(limits, telemetry=signals.telemetry, **options)
        given = [self._tool("search")] if tools is None else tools
        self.agent = create_react_agent(
            **self.quota.react_hooks(self.model, given),
            **{"checkpointer": InMemorySaver(), **(compiled or {})},
        )


HELLO: Any = {"messages": [("user", "hi")]}


def for_ever(messages: list[AnyMessage]) -> Any:
    return ["search", "search"]


@both_forms
@pytest.mark.parametrize(
    ("limit", "ran", "requests"),
    [
        (ModelCallLimit(run_limit=2), 4, 2),
        (ModelCallLimit(run_limit=2, exit_behavior="finalize"), 2, 2),
        (ToolCallLimit("search", run_limit=3, exit_behavior="end"), 2, 2),
        (ToolCallLimit("search", run_limit=3, give_up_after=2), 3, 3),
    ],
    ids=["end of model calls", "finalize", "end", "give_up_after"],
)
async def test_a_limit_ends_the_run(
    form: Form, limit: Limit, ran: int, requests: int, signals: Signals
) -> None:
    """The agent ends with the limit's message and calls neither model nor tools; so in each run."""
    scene = ReactScene(signals, for_ever, [limit], form=form)
    for turn in (1, 2):
        result = await scene.turn()
        assert (len(scene.ran), len(scene.model.calls)) == (ran * turn, requests * turn)
        assert "limit" in result["messages"][-1].content
        scene.check()


async def test_refused_calls_do_not_run_and_admitted_ones_do(signals: Signals) -> None:
    """Parallel calls are one batch; the agent goes on, and the thread's count lasts."""
    limit = ToolCallLimit("search", run_limit=1, thread_limit=3)
    scene = ReactScene(signals, [["search"] * 3, "done"] * 4, [limit])
    for ran in (1, 2, 3, 3):
        result = await scene.turn()
        assert len(scene.ran) == ran
        assert result["messages"][-1].content == "done"
        scene.check()


@both_forms
async def test_a_resume_does_not_begin_a_run(form: Form, signals: Signals) -> None:
    """The budget of the run goes on behind an interrupt in a tool; the next turn has a new one."""
    ran: list[str] = []
    tools = [recording("search", ran), recording("ask", ran, lambda: interrupt("Sure?"))]
    scene = ReactScene(
        signals,
        [["search", "search", "ask"], ["search"] * 2, "done", ["search"] * 4, "done"],
        [ToolCallLimit("search", run_limit=3)],
        tools=tools,
        ran=ran,
        form=form,
    )
    await scene.turn()
    await scene.resume("yes")
    assert (ran.count("search"), ran.count("ask")) == (3, 1)
    scene.check()
    await scene.turn()
    assert ran.count("search") == 6


async def test_an_interrupt_before_the_first_model_call(signals: Signals) -> None:
    """A run that waits before its first step has its budget when it goes on."""
    for node in ("pre_model_hook", "agent"):
        limit = ModelCallLimit(run_limit=1)
        scene = ReactScene(
            signals, lambda messages: "done", [limit], compiled={"interrupt_before": [node]}
        )
        for _ in (1, 2):
            await scene.turn()
            result = await scene.go_on()
            assert result["messages"][-1].content == "done"
        assert len(scene.model.calls) == 2


async def test_the_model_is_told_and_offered_what_is_left(signals: Signals) -> None:
    """Note and tools reach a model that the hooks are given, and telemetry the agent's name."""
    quota = GraphQuota(
        [ToolCallLimit("search", run_limit=1)],
        tell_model=True,
        hide_exhausted=True,
        telemetry=signals.telemetry,
    )
    model = ScriptedChatModel(script=[["search"], "done"])
    tools = [recording("search", []), recording("calc", [])]
    agent = create_react_agent(**quota.react_hooks(model, tools, name="worker"), prompt="Be short.")
    with captured_decisions() as decisions:
        await agent.ainvoke(HELLO)
    assert [call.tools for call in model.calls] == [("search", "calc"), ("calc",)]
    assert model.calls[0].messages[0].content == "Be short."
    assert "search: 0 of 1 left" in str(model.calls[1].messages)
    assert {each.call.agent for each in decisions} == {"worker"}


def parent(agent: Any, **options: Any) -> Any:
    """A graph with an agent as its only node."""
    graph = StateGraph(agent.builder.state_schema)
    graph.add_node("agent", agent)
    graph.set_entry_point("agent")
    return graph.compile(checkpointer=InMemorySaver(), **options)


@both_forms
async def test_without_a_model_the_graph_around_it_ends(form: Form, signals: Signals) -> None:
    """The hook ends the graph around the agent, whose history is valid and has the message."""
    scene = GraphScene(signals, for_ever, [ModelCallLimit(run_limit=2)], form=form)
    model = ScriptedChatModel(script=for_ever)
    agent = create_react_agent(model, scene.tools, **scene.quota.react_hooks())
    scene.agent, scene.model = parent(agent), model
    for turn in (1, 2):
        result = await scene.turn()
        assert len(model.calls) == 2 * turn
        assert len(scene.ran) == 4 * turn
        assert "Model call limits exceeded" in result["messages"][-1].content
        scene.check()
    assert len(result["messages"]) == 2 * (1 + 2 * 3 + 1)


async def test_without_a_model_the_others_messages_stay(signals: Signals) -> None:
    """The end of the graph around the agent takes no message away, nor one of a parallel node."""
    quota = GraphQuota([ModelCallLimit(run_limit=1)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=for_ever)
    agent: Any = create_react_agent(model, [recording("search", [])], **quota.react_hooks())
    graph = StateGraph(agent.builder.state_schema)
    # LangGraph takes the updates of a step in the order of the nodes' names.
    graph.add_node("a sibling", lambda state: {"messages": [("ai", "sibling")]})
    graph.add_node("agent", agent)
    graph.add_edge(START, "a sibling")
    graph.add_edge(START, "agent")
    result = await graph.compile().ainvoke({"messages": [("user", "one"), ("user", "two")]})
    said = {message.text for message in result["messages"]}
    assert {"one", "two", "sibling", "Model call limits exceeded: run limit (1/1)"} <= said


async def test_without_a_model_in_a_circle(signals: Signals) -> None:
    """A graph that enters the agent again after a limit has ended it calls no model any more."""
    quota = GraphQuota([ModelCallLimit(run_limit=1)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=for_ever)
    agent: Any = create_react_agent(model, [recording("search", [])], **quota.react_hooks())
    graph = StateGraph(agent.builder.state_schema)
    graph.add_node("agent", agent)
    graph.add_edge(START, "agent")
    entered: list[str] = []

    def again(state: Any) -> str:
        entered.append("agent")
        return "agent" if len(entered) < 4 else END

    graph.add_conditional_edges("agent", again, ["agent", END])
    await graph.compile().ainvoke(HELLO)
    assert (len(entered), len(model.calls)) == (4, 1)


@pytest.mark.parametrize("place", ["a node's function", "a task", "another state"])
async def test_without_a_model_in_a_graph_that_cannot_end(place: str, signals: Signals) -> None:
    """Where the agent is no node of a graph with its state, its first step is an error."""
    quota = GraphQuota([ModelCallLimit(run_limit=1)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=for_ever)
    agent: Any = create_react_agent(model, [recording("search", [])], **quota.react_hooks())

    async def call(_: Any) -> Any:
        return {"messages": [(await agent.ainvoke(HELLO))["messages"][-1]]}

    @entrypoint()
    async def flow(given: Any) -> Any:
        return await task(call)(given)

    schema = MessagesState if place == "another state" else agent.builder.state_schema
    graph = StateGraph(schema)
    graph.add_node("agent", agent if place == "another state" else call)
    graph.add_edge(START, "agent")
    app: Any = flow if place == "a task" else graph.compile()
    with pytest.raises(RuntimeError, match=re.escape("quota.react_hooks(model, tools)")):
        await app.ainvoke(HELLO)
    assert model.calls == ()


@both_forms
async def test_without_a_model_nor_a_graph_around_it(form: Form, signals: Signals) -> None:
    """An agent that no hook can end is an error at its first step; so is one in a tool."""
    remedy = re.escape("create_react_agent(**quota.react_hooks(model, tools))")
    quota = GraphQuota([ModelCallLimit(run_limit=2)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=for_ever)
    agent = create_react_agent(model, [recording("search", [])], **quota.react_hooks())
    scene = GraphScene(signals, for_ever, [ModelCallLimit(run_limit=2)], form=form)
    scene.agent = agent
    with pytest.raises(RuntimeError, match=remedy):
        await scene.turn()

    @tool
    def delegate() -> str:
        """Delegate."""
        return str(agent.invoke({"messages": [("user", "hi")]}))

    scene = GraphScene(signals, [["delegate"]], [ToolCallLimit(run_limit=2)], tools=[delegate])
    with pytest.raises(RuntimeError, match=remedy):
        await scene.turn()
    assert model.calls == ()


async def test_without_a_model_tool_limits_hold_alone(signals: Signals) -> None:
    """Limits on tools, and exceptions, need neither a model nor a graph around the agent."""
    quota = GraphQuota(
        [
            ToolCallLimit("search", run_limit=3, exit_behavior="end"),
            ModelCallLimit(run_limit=9, exit_behavior="error"),
        ],
        telemetry=signals.telemetry,
    )
    ran: list[str] = []
    model = ScriptedChatModel(script=for_ever)
    agent = create_react_agent(model, [recording("search", ran)], **quota.react_hooks())
    result = await agent.ainvoke(HELLO)
    assert len(ran) == 2
    assert "limit" in result["messages"][-1].content


async def test_in_a_tool_with_a_model(signals: Signals) -> None:
    """In another agent's tool an agent with a model ends itself, and the other one goes on."""
    quota = GraphQuota([ModelCallLimit(run_limit=1)], telemetry=signals.telemetry)
    inner = ScriptedChatModel(script=for_ever)
    agent = create_react_agent(**quota.react_hooks(inner, [recording("search", [])]))

    @tool
    async def delegate() -> str:
        """Delegate."""
        result = await agent.ainvoke(HELLO)
        return str(result["messages"][-1].content)

    scene = ReactScene(
        signals, [["delegate"], "done"], [ToolCallLimit(run_limit=2)], tools=[delegate]
    )
    result = await scene.turn()
    assert "Model call limits exceeded" in result["messages"][-2].content
    assert result["messages"][-1].content == "done"
    assert len(inner.calls) == 1


class Found(BaseModel):
    """What was found."""

    text: str = ""


@both_forms
@pytest.mark.parametrize("has_tools", [True, False])
@pytest.mark.parametrize("subclassed", [True, False])
async def test_a_response_format_is_an_error_before_a_call(
    form: Form,
    signals: Signals,
    *,
    has_tools: bool,
    subclassed: bool,
) -> None:
    """LangGraph would ask for it past the limits: the agent's first step says so, and the way."""
    quota = GraphQuota([ModelCallLimit(run_limit=2)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=lambda messages: "done")
    hooks = quota.react_hooks(model, [recording("search", [])] if has_tools else [])
    if subclassed:
        hooks["state_schema"] = types.new_class("Own", (hooks["state_schema"],))
    agent: Any = create_react_agent(**hooks, response_format=Found)

    call = asyncio.to_thread(agent.invoke, HELLO) if form == "sync" else agent.ainvoke(HELLO)
    with pytest.raises(RuntimeError, match=r"create_agent\(model, tools, middleware=.*format=…\)"):
        await call

    assert model.calls == ()


class Structured(ScriptedChatModel):
    """Gives a structured answer."""

    def with_structured_output(self, schema: Any, **_: Any) -> Any:
        return self | RunnableLambda(lambda said: schema(text=said.text))


async def test_a_response_format_where_the_agent_has_the_model(signals: Signals) -> None:
    """Hooks without a model leave the response format to LangGraph, which asks the model itself."""
    limit = ModelCallLimit(run_limit=2, exit_behavior="error")
    quota = GraphQuota([limit], telemetry=signals.telemetry)
    model = Structured(script=lambda messages: "done")
    agent: Any = create_react_agent(model, [], **quota.react_hooks(), response_format=Found)

    result = await agent.ainvoke(HELLO)

    assert result["structured_response"] == Found(text="done")


def test_arguments() -> None:
    """A model with its tools bound is named at once; without a model there are three arguments."""
    quota = GraphQuota([ToolCallLimit(run_limit=1)])
    bound: Any = ScriptedChatModel(script=[]).bind_tools([recording("search", [])])
    with pytest.raises(TypeError, match="with tools bound"):
        quota.react_hooks(bound)
    assert quota.react_hooks().keys() == {"pre_model_hook", "post_model_hook", "state_schema"}


@both_forms
@pytest.mark.parametrize(
    ("limit", "workers"),
    [
        (ModelCallLimit(run_limit=2, thread_limit=5), [2, 2, 1]),
        (ToolCallLimit("transfer_to_worker", run_limit=2, exit_behavior="end"), [2, 2, 2]),
        (ToolCallLimit("transfer_to_worker", thread_limit=3), [3, 0, 0]),
    ],
    ids=["model calls", "hand-overs", "hand-overs of the thread"],
)
async def test_a_supervisor(form: Form, limit: Limit, workers: list[int], signals: Signals) -> None:
    """Its model calls and hand-overs are limited, over the whole run and from turn to turn."""
    langgraph_supervisor = pytest.importorskip("langgraph_supervisor")
    quota = GraphQuota([limit], telemetry=signals.telemetry)

    def script(messages: Sequence[AnyMessage]) -> Any:
        refused = "limit exceeded" in str(messages[-1].content)
        return "done" if refused else ["transfer_to_worker"]

    model = ScriptedChatModel(script=script)
    worked = ScriptedChatModel(script=lambda messages: "worked")
    worker = create_react_agent(worked, [recording("search", [])], name="worker")
    app = langgraph_supervisor.create_supervisor(
        [worker], model=model, **quota.react_hooks(name="boss")
    ).compile(checkpointer=InMemorySaver())
    for count in workers:
        before = len(worked.calls)
        given = {"messages": [("user", "hi")]}
        if form == "sync":
            result = await asyncio.to_thread(app.invoke, given, CONFIG)
        else:
            result = await app.ainvoke(given, CONFIG)
        assert len(worked.calls) - before == count
        check_history(result["messages"])
        assert result["messages"][-1].content != "worked"
    assert usage(app.get_state(CONFIG)).run_model <= 2


async def test_a_supervisor_is_resumed(signals: Signals) -> None:
    """An interrupt in a worker does not give the supervisor a new budget."""
    langgraph_supervisor = pytest.importorskip("langgraph_supervisor")
    quota = GraphQuota([ModelCallLimit(run_limit=2)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=lambda messages: ["transfer_to_worker"])
    worked = ScriptedChatModel(
        script=lambda messages: "worked" if messages[-1].type == "tool" else ["ask"]
    )
    ask = recording("ask", [], lambda: interrupt("Sure?"))
    worker = create_react_agent(worked, [ask], name="worker")
    app = langgraph_supervisor.create_supervisor(
        [worker], model=model, **quota.react_hooks()
    ).compile(checkpointer=InMemorySaver())
    given: Any = {"messages": [("user", "hi")]}
    for _ in range(9):
        result = await app.ainvoke(given, CONFIG)
        if "__interrupt__" not in result:
            break
        given = Command(resume="yes")
    assert len(model.calls) == 2
    assert "Model call limits exceeded" in result["messages"][-1].content


@pytest.mark.parametrize(
    "limit",
    [
        ModelCallLimit(run_limit=2),
        ToolCallLimit("transfer_to_worker", run_limit=1, exit_behavior="end"),
    ],
    ids=["model calls", "hand-overs"],
)
async def test_a_supervisor_of_a_supervisor(limit: Limit, signals: Signals) -> None:
    """A limit that ends a team's run does not accuse the supervisor that goes on after it."""
    langgraph_supervisor = pytest.importorskip("langgraph_supervisor")
    make = langgraph_supervisor.create_supervisor
    worked = ScriptedChatModel(script=lambda messages: "worked")
    worker = create_react_agent(worked, [recording("search", [])], name="worker")
    lead = ScriptedChatModel(script=lambda messages: ["transfer_to_worker"])
    hooks = GraphQuota([limit], telemetry=signals.telemetry).react_hooks(name="lead")
    team = make([worker], model=lead, supervisor_name="lead", **hooks).compile(name="team")
    # No call's id of this model is one of the other's.
    to_team = {"name": "transfer_to_team", "args": {}, "id": "top_1"}
    top = ScriptedChatModel(script=[[to_team], "final answer"])
    hooks = GraphQuota([ModelCallLimit(run_limit=9)], telemetry=signals.telemetry).react_hooks()
    result = await make([team], model=top, **hooks).compile().ainvoke(HELLO)
    check_history(result["messages"])
    assert any("limit" in message.text for message in result["messages"])
    assert result["messages"][-1].text == "final answer"
    assert len(worked.calls) == 1


async def test_an_end_is_over_at_the_next_turn(signals: Signals) -> None:
    """Two turns in one root run: an answer in the second one's input is no call of the model."""
    scene = ReactScene(signals, for_ever, [ModelCallLimit(run_limit=1)])
    example = {"messages": [("user", "hi"), ("ai", "an example"), ("user", "hi")]}

    async def session(_: Any) -> str:
        await scene.agent.ainvoke(HELLO, CONFIG)
        return str((await scene.agent.ainvoke(example, CONFIG))["messages"][-1].text)

    assert "Model call limits exceeded" in await RunnableLambda(session).ainvoke("")


@pytest.mark.parametrize("has_model", [True, False])
def test_schemas(*, has_model: bool) -> None:
    """LangGraph Server and Studio ask for the JSON Schema of what goes in and what comes out."""
    quota = GraphQuota([ModelCallLimit(run_limit=1)])
    model = ScriptedChatModel(script=[])
    given: dict[str, Any] = {"model": model, "tools": []}
    given |= quota.react_hooks(model if has_model else None)
    agent: Any = create_react_agent(**given)
    for schema in (agent.get_input_jsonschema(), agent.get_output_jsonschema()):
        assert "messages" in schema["properties"]
