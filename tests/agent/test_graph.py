"""A loop of model and tools in a StateGraph, held to limits by GraphQuota."""

import asyncio
import operator
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, StructuredTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.constants import END, START
from langgraph.graph import MessagesState, StateGraph, add_messages
from langgraph.managed import RemainingSteps
from langgraph.prebuilt import InjectedState, ToolNode
from langgraph.types import Command, Send, interrupt
from pydantic import BaseModel

from langchain_quota import (
    GraphQuota,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    QuotaState,
    ToolCallLimit,
    ToolCallLimitExceededError,
    usage,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.agent.conftest import Form, both_forms
from tests.agent.graphs import GraphScene
from tests.agent.rules import CONFIG, check_history, recording
from tests.signals import Signals

HELLO: Any = {"messages": [("user", "hi")]}
NOTHING: Any = {"messages": []}
THREAD: Any = CONFIG


def thrice(messages: list[AnyMessage]) -> Any:
    """Three searches a turn, then an answer."""
    return "done" if messages[-1].type == "tool" else ["search"] * 3


def for_ever(messages: list[AnyMessage]) -> Any:
    return ["search"]


def offered(model: ScriptedChatModel) -> list[int]:
    """How many tools each request offered."""
    return [len(call.tools) for call in model.calls]


@both_forms
async def test_a_batch_is_judged_as_one(form: Form, signals: Signals) -> None:
    """Of parallel calls as many run as both limits admit, in two runs; the loop goes on."""
    limits: list[Limit] = [
        ToolCallLimit("search", run_limit=2, thread_limit=3),
        ModelCallLimit(run_limit=2),
    ]
    scene = GraphScene(signals, thrice, limits, form=form)

    first = await scene.turn()
    assert scene.ran == ["search"] * 2
    scene.check()
    assert first.keys() == {"messages"}
    second = await scene.turn()

    assert scene.ran == ["search"] * 3
    assert second["messages"][-1].content == "done"
    scene.check()
    used = usage(scene.agent.get_state(CONFIG))
    assert (used.tools, used.run_tools, used.model) == ({"search": 3}, {"search": 1}, 4)


@both_forms
@pytest.mark.parametrize(
    ("limit", "ran", "requests"),
    [
        (ToolCallLimit("search", run_limit=2, exit_behavior="end"), 0, 1),
        (ToolCallLimit("search", run_limit=2, give_up_after=1), 0, 1),
        (ModelCallLimit(run_limit=1), 3, 1),
        (ModelCallLimit(run_limit=1, exit_behavior="finalize"), 0, 1),
    ],
    ids=["end", "give_up_after", "end of model calls", "finalize"],
)
async def test_a_limit_ends_the_run(
    form: Form, limit: Limit, ran: int, requests: int, signals: Signals
) -> None:
    """The loop ends with the limit's message, and every call has its answer; so in a new run."""
    scene = GraphScene(signals, thrice, [limit], form=form)
    for turn in (1, 2):
        result = await scene.turn()
        assert (len(scene.ran), len(scene.model.calls)) == (ran * turn, requests * turn)
        assert "limit" in result["messages"][-1].content
        scene.check()


@both_forms
async def test_a_limit_raises(form: Form, signals: Signals) -> None:
    """Nothing is counted for the batch, and the next run answers its calls."""
    limit = ToolCallLimit("search", run_limit=2, exit_behavior="error")
    scene = GraphScene(signals, [["search"] * 3, "done"], [limit], form=form)
    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    await scene.turn()
    assert scene.ran == []
    scene.check()


async def test_a_model_limit_raises(signals: Signals) -> None:
    """The exception of a model limit comes out of the graph, before the call."""
    scene = GraphScene(signals, for_ever, [ModelCallLimit(run_limit=2, exit_behavior="error")])
    with pytest.raises(ModelCallLimitExceededError):
        await scene.turn()
    assert len(scene.model.calls) == 2


async def test_abandoned_calls_are_refunded(signals: Signals) -> None:
    """Where two limits judge and the second raises, the first one's charge is taken back."""
    limits = [
        ToolCallLimit("search", thread_limit=5),
        ToolCallLimit("calc", run_limit=0, exit_behavior="error"),
    ]
    scene = GraphScene(signals, [["search", "calc"], "done"], limits)
    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    await scene.turn()
    scene.check()


class Notes(TypedDict):
    """A state of the user's own."""

    messages: Annotated[list[AnyMessage], add_messages]
    topic: str


class Model(BaseModel):
    messages: Annotated[list[AnyMessage], add_messages]
    topic: str = ""


@dataclass
class Data:
    messages: Annotated[list[AnyMessage], add_messages] = field(default_factory=list)
    topic: str = ""


@pytest.mark.parametrize("state", [Notes, Model, Data])
async def test_a_state_of_the_users_own(state: Any, signals: Signals) -> None:
    """Limits read the graph's state, tools get it in its class, and its output has no count."""
    seen: list[Any] = []

    def look(given: Annotated[Any, InjectedState]) -> str:
        """Look."""
        seen.append(given)
        return "looked"

    def most(given: QuotaState[Any], runtime: Any) -> int:
        topic: Any = given
        return 1 if topic["topic"] == "small" else 9

    scene = GraphScene(
        signals,
        [["look", "look"], "done"],
        [ToolCallLimit("look", run_limit=most)],
        tools=[StructuredTool.from_function(look)],
        state=state,
    )
    result = await scene.invoke({"messages": [("user", "hi")], "topic": "small"})

    given: Any
    (given,) = seen
    assert isinstance(given, dict if state is Notes else state)
    assert dict(given if state is Notes else vars(given))["topic"] == "small"
    assert {"messages", "topic"} == {*result}
    check_history(result["messages"])


async def test_the_state_may_have_the_counts(signals: Signals) -> None:
    """In a graph whose state is a QuotaState the counts are in its output."""
    limit = ToolCallLimit("search", run_limit=2)
    scene = GraphScene(signals, thrice, [limit], state=QuotaState)
    result = await scene.turn()
    assert result["thread_tool_call_count"] == {"search": 2}
    scene.check()


def own_node(kind: str) -> Callable[[GraphScene], dict[str, Any]]:
    """A model's node of the user's own."""

    def loop(scene: GraphScene) -> dict[str, Any]:
        bound = scene.model.bind_tools(scene.tools)

        def node(state: MessagesState) -> dict[str, Any]:
            return {"messages": [bound.invoke(state["messages"])]}

        async def anode(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await bound.ainvoke(state["messages"])]}

        nodes: dict[str, Any] = {
            "function": node,
            "async function": anode,
            "Runnable": RunnableLambda(node, anode),
        }
        return {"model": nodes[kind]}

    return loop


@pytest.mark.parametrize("kind", ["function", "async function", "Runnable"])
async def test_a_model_node_of_the_users_own(kind: str, signals: Signals) -> None:
    """Its calls are judged and counted; finalize refuses the tools that it still offers."""
    limits: list[Limit] = [
        ModelCallLimit(run_limit=2, exit_behavior="finalize"),
        ToolCallLimit("search", run_limit=9),
    ]
    scene = GraphScene(signals, for_ever, limits, loop=own_node(kind))
    for turn in (1, 2):
        result = await scene.turn()
        assert len(scene.model.calls) == 2 * turn
        assert len(scene.ran) == turn
        assert "Model call limits exceeded" in result["messages"][-1].content
        scene.check()


class Stepping(MessagesState):
    remaining_steps: RemainingSteps


class Private(MessagesState):
    """What an earlier node writes, and the graph's state does not have."""

    secret: str


class Asked(BaseModel):
    messages: list[AnyMessage]


async def test_a_model_node_gets_the_state_that_it_asks_for(signals: Signals) -> None:
    """As with `add_node`: what LangGraph itself keeps, another node's private keys, a class."""
    seen: list[Any] = []

    def stepping(state: Stepping) -> dict[str, Any]:
        seen.append(state["remaining_steps"])
        return {"messages": [AIMessage("done")]}

    def private(state: Private) -> dict[str, Any]:
        seen.append(state["secret"])
        return {"messages": [AIMessage("done")]}

    def asked(state: Asked) -> dict[str, Any]:
        seen.append(type(state))
        return {"messages": [AIMessage("done")]}

    for node, state in ((stepping, Stepping), (private, MessagesState), (asked, MessagesState)):

        def loop(scene: GraphScene, node: Any = node) -> dict[str, Any]:
            scene.graph.add_node("prepare", lambda given: {"secret": "word"})
            scene.graph.add_edge(START, "prepare")
            return {"model": node, "start": "prepare"}

        scene = GraphScene(signals, [], [ModelCallLimit(run_limit=1)], state=state, loop=loop)
        await scene.turn()
    assert isinstance(seen.pop(0), int)
    assert seen == ["word", Asked]


async def test_a_tool_reads_what_langgraph_itself_keeps(signals: Signals) -> None:
    """A tool that asks for the state has the steps that remain, as with a `ToolNode` alone."""
    seen: list[Any] = []

    def look(given: Annotated[Any, InjectedState]) -> str:
        """Look."""
        seen.append(given["remaining_steps"])
        return "looked"

    tools = [StructuredTool.from_function(look)]
    limit = ToolCallLimit("look", run_limit=1)
    scene = GraphScene(signals, [["look"], "done"], [limit], tools=tools, state=Stepping)
    await scene.turn()
    assert [type(each) for each in seen] == [int]


@pytest.mark.parametrize("own", [False, True], ids=["chat model", "node with call_model"])
@both_forms
async def test_the_model_is_told_and_offered_what_is_left(
    form: Form,
    own: bool,  # noqa: FBT001 - a case
    signals: Signals,
) -> None:
    """The prompt, the note and the tools reach the model; a node of one's own has `call_model`."""

    def loop(scene: GraphScene) -> dict[str, Any]:
        def node(state: MessagesState) -> dict[str, Any]:
            said = scene.quota.call_model(scene.model, state, scene.tools, prompt="Be short.")
            return {"messages": [said]}

        async def anode(state: MessagesState) -> dict[str, Any]:
            said = await scene.quota.acall_model(
                scene.model, state, scene.tools, prompt="Be short."
            )
            return {"messages": [said]}

        return {"model": RunnableLambda(node, anode)} if own else {"prompt": "Be short."}

    scene = GraphScene(
        signals,
        [["search"], "done"],
        [ToolCallLimit("search", run_limit=1)],
        form=form,
        loop=loop,
        tell_model=True,
        hide_exhausted=True,
    )
    await scene.turn()

    assert [call.tools for call in scene.model.calls] == [("search", "calc"), ("calc",)]
    assert {call.messages[0].content for call in scene.model.calls} == {"Be short."}
    assert "search: 0 of 1 left" in str(scene.model.calls[1].messages)
    assert "left" not in str(scene.state()["messages"])
    scene.check()


async def test_call_model_where_the_state_is_a_class(signals: Signals) -> None:
    """A node of a graph with a pydantic model asks for a `QuotaState`, and so has the counts."""

    def loop(scene: GraphScene) -> dict[str, Any]:
        async def node(state: QuotaState) -> dict[str, Any]:
            return {"messages": [await scene.quota.acall_model(scene.model, state, scene.tools)]}

        return {"model": node}

    limit = ToolCallLimit("search", run_limit=1)
    script = [["search"], "done"]
    scene = GraphScene(signals, script, [limit], state=Model, loop=loop, hide_exhausted=True)
    await scene.turn()
    assert [call.tools for call in scene.model.calls] == [("search", "calc"), ("calc",)]


async def test_the_last_request_of_finalize(signals: Signals) -> None:
    """The last model call of the budget is told so, and calls no tool."""
    limit = ModelCallLimit(run_limit=2, exit_behavior="finalize")
    scene = GraphScene(signals, [["search"], "All that I know."], [limit])
    result = await scene.turn()
    assert "last model call" in str(scene.model.calls[1].messages)
    assert result["messages"][-1].content == "All that I know."


async def test_a_tool_node_of_the_users_own(signals: Signals) -> None:
    """A `ToolNode` with settings of its own runs the admitted calls; its tools are offered."""
    ran: list[str] = []

    def fail() -> None:
        raise ValueError("broken")

    node = ToolNode([recording("search", ran, fail)], handle_tool_errors="It broke.")
    limit = ToolCallLimit("search", run_limit=2)
    scene = GraphScene(signals, thrice, [limit], ran=ran, loop={"tools": node})
    result = await scene.turn()
    contents = sorted(each.content for each in result["messages"] if each.type == "tool")
    assert contents == ["It broke.", "It broke.", contents[-1]]
    assert offered(scene.model) == [1, 1]


@pytest.mark.parametrize("state", [MessagesState, Model])
@pytest.mark.parametrize(
    ("calls", "ran", "requests"),
    [
        (["fetch"], ["fetch"], 1),
        (["fetch", "fetch"], ["fetch", "fetch"], 1),
        (["fetch", "search"], ["fetch", "search"], 2),
        (["fetch"] * 3, ["fetch"] * 2, 1),
    ],
    ids=["one", "two", "beside another tool", "beside one that is refused"],
)
async def test_a_tool_that_returns_directly(
    calls: list[str], ran: list[str], requests: int, state: Any, signals: Signals
) -> None:
    """Its answer ends the loop if all calls of the batch are of such tools, as in create_agent."""
    names: list[str] = []
    fetch = recording("fetch", names)
    fetch.return_direct = True
    scene = GraphScene(
        signals,
        [calls, "done"],
        [ToolCallLimit("fetch", run_limit=2)],
        tools=[fetch, recording("search", names)],
        ran=names,
        state=state,
    )
    result = await scene.turn()
    assert sorted(scene.ran) == ran
    assert len(scene.model.calls) == requests
    check_history(result["messages"])


@both_forms
async def test_an_interrupt_in_a_tool(form: Form, signals: Signals) -> None:
    """The run waits, its other calls do not run again, and the resume goes on with the budget."""
    ran: list[str] = []
    scene = GraphScene(
        signals,
        [["search", "ask", "search"], ["search", "search"], "done"],
        [ToolCallLimit("search", run_limit=3), ToolCallLimit("ask", thread_limit=1)],
        tools=[recording("search", ran), recording("ask", ran, lambda: interrupt("Sure?"))],
        ran=ran,
        form=form,
    )
    with captured_decisions() as decisions:
        waiting = await scene.turn()
        assert waiting["__interrupt__"][0].value == "Sure?"
        assert sorted(scene.ran) == ["search", "search"]
        before = len(decisions)
        await scene.resume("yes")

    assert sorted(scene.ran) == ["ask", "search", "search", "search"]
    assert [each.outcome for each in decisions[before:]] == [
        "allowed", "allowed", "blocked", "allowed"
    ]  # fmt: skip
    scene.check()


async def test_interrupt_before_the_tools(signals: Signals) -> None:
    """`interrupt_before=["tools"]` waits once for a batch; what was judged is not judged again."""
    scene = GraphScene(
        signals,
        thrice,
        [ToolCallLimit("search", run_limit=2)],
        compiled={"interrupt_before": ["tools"]},
    )
    with captured_decisions() as decisions:
        await scene.turn()
        assert scene.ran == []
        await scene.go_on()
    assert scene.ran == ["search"] * 2
    assert [each.call.kind for each in decisions] == ["model", "tool", "tool", "tool", "model"]
    scene.check()


async def test_streaming(signals: Signals) -> None:
    """Updates come from the nodes by their names, and the model's words one by one."""
    limit = ToolCallLimit("search", run_limit=1)
    scene = GraphScene(signals, [["search"], "All is done."], [limit])
    names = [next(iter(each)) for each in await scene.updates({"messages": [("user", "hi")]})]
    assert names == [
        "quota.before_agent",
        "quota.before_model",
        "model",
        "quota.after_model",
        "tools",
        "quota.before_model",
        "model",
        "quota.after_model",
    ]
    scene = GraphScene(signals, ["All is done."], [limit])
    given = {"messages": [("user", "hi")]}
    words = [
        chunk.content
        async for chunk, _ in scene.agent.astream(given, CONFIG, stream_mode="messages")
        if chunk.content
    ]
    assert words == ["All", " is", " done."]


async def test_between_nodes_of_the_graph(signals: Signals) -> None:
    """The loop is entered from a node and leaves to one, also when a limit ends it."""
    graph = StateGraph(MessagesState)
    model = ScriptedChatModel(script=for_ever)
    ran: list[str] = []
    graph.add_node("retrieve", lambda state: {"messages": [HumanMessage("context")]})
    graph.add_node("report", lambda state: {"messages": [AIMessage("report")]})
    graph.add_edge(START, "retrieve")
    quota = GraphQuota([ModelCallLimit(run_limit=2)], telemetry=signals.telemetry)
    quota.add_to(
        graph, model=model, tools=[recording("search", ran)], start="retrieve", end="report"
    )
    result = await graph.compile().ainvoke(HELLO)
    assert [each.type for each in result["messages"][:3]] == ["human", "human", "ai"]
    assert "limit" in result["messages"][-2].content
    assert result["messages"][-1].content == "report"
    assert len(model.calls) == 2


def critic(
    quota: GraphQuota,
    model: ScriptedChatModel,
    ran: list[str],
    tools: Sequence[BaseTool] = (),
    **options: Any,
) -> Any:
    """A graph that enters its loop three times."""
    graph = StateGraph(MessagesState)

    def again(state: MessagesState) -> str:
        said = sum(each.type == "human" for each in state["messages"])
        return "ask again" if said < 3 else END

    graph.add_node("ask again", lambda state: {"messages": [HumanMessage("again")]})
    graph.add_node("judge", lambda state: {})
    graph.add_conditional_edges("judge", again, ["ask again", END])
    quota.add_to(graph, model=model, tools=[recording("search", ran), *tools], end="judge")
    graph.add_edge("ask again", "quota.before_agent")
    return graph.compile(**options)


async def test_a_loop_that_is_entered_again(signals: Signals) -> None:
    """A run is one invocation of the graph, however often the loop is entered in it."""
    ran: list[str] = []
    limits = [ToolCallLimit("search", run_limit=4)]
    quota = GraphQuota(limits, telemetry=signals.telemetry)
    app = critic(quota, ScriptedChatModel(script=thrice), ran)
    for turn in (1, 2):
        await app.ainvoke({"messages": [("user", "hi")]})
        assert len(ran) == 4 * turn


@pytest.mark.parametrize("in_a_function", [False, True])
async def test_a_loop_that_is_entered_again_after_a_resume(
    in_a_function: bool,  # noqa: FBT001 - a case
    signals: Signals,
) -> None:
    """A resume in the loop is the same run: entered again, the loop has what is left."""
    ran: list[str] = []
    quota = GraphQuota([ToolCallLimit("search", run_limit=4)], telemetry=signals.telemetry)
    script = [["search", "ask"], "done", *[["search"] * 3, "done"] * 2]
    model = ScriptedChatModel(script=script)
    ask = recording("ask", ran, lambda: interrupt("Sure?"))
    app = critic(quota, model, ran, tools=[ask], checkpointer=InMemorySaver())

    async def both(given: Any) -> None:
        await app.ainvoke(given, THREAD)
        await app.ainvoke(Command(resume="yes"), THREAD)

    await (RunnableLambda(both).ainvoke(HELLO) if in_a_function else both(HELLO))
    assert ran.count("search") == 4


async def test_a_run_that_waits_before_the_loop(signals: Signals) -> None:
    """A run whose resume is what enters the loop has a budget of its own."""
    limit = ToolCallLimit("search", run_limit=2)

    def approve(state: MessagesState) -> None:
        interrupt("Sure?")

    def loop(scene: GraphScene) -> dict[str, Any]:
        scene.graph.add_node("approve", approve)
        scene.graph.add_edge(START, "approve")
        return {"start": "approve"}

    scene = GraphScene(signals, thrice, [limit], loop=loop)
    for ran in (2, 4):
        await scene.turn()
        await scene.resume("yes")
        assert len(scene.ran) == ran


async def test_a_node_that_speaks_before_the_loop(signals: Signals) -> None:
    """A run that a resume begins is a new one, also if the user's message is not the newest."""

    def confirm(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(f"Confirmed: {interrupt('Sure?')}")]}

    def loop(scene: GraphScene) -> dict[str, Any]:
        scene.graph.add_node("confirm", confirm)
        scene.graph.add_edge(START, "confirm")
        return {"start": "confirm"}

    scene = GraphScene(signals, ["done"] * 3, [ModelCallLimit(run_limit=1)], loop=loop)
    for turn in (1, 2, 3):
        await scene.turn()
        result = await scene.resume("yes")
        assert (len(scene.model.calls), result["messages"][-1].content) == (turn, "done")


async def test_several_turns_in_one_function(signals: Signals) -> None:
    """Each invocation of the graph is a run, also if they are steps of one Runnable."""
    scene = GraphScene(signals, ["done"] * 3, [ModelCallLimit(run_limit=1)])

    async def session(questions: list[str]) -> list[str]:
        results = [
            await scene.agent.ainvoke({"messages": [("user", question)]}, CONFIG)
            for question in questions
        ]
        return [each["messages"][-1].content for each in results]

    assert await RunnableLambda(session).ainvoke(["a", "b", "c"]) == ["done"] * 3


@both_forms
async def test_a_retry_of_the_graph(form: Form, signals: Signals) -> None:
    """It answers the calls of the attempt that failed."""
    failures = [ValueError("broken")]

    def fail_once() -> None:
        if failures:
            raise failures.pop()

    ran: list[str] = []
    node = ToolNode([recording("search", ran, fail_once)], handle_tool_errors=False)
    limit = ToolCallLimit("search", run_limit=9)
    scene = GraphScene(
        signals, [["search"], "done"], [limit], ran=ran, form=form, loop={"tools": node}
    )
    scene.agent = scene.agent.with_retry(stop_after_attempt=2)
    result = await scene.invoke(HELLO)
    check_history(result["messages"])
    assert result["messages"][-1].content == "done"


class Executor(ThreadPoolExecutor):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.given.append(fn)
        return super().submit(fn, *args, **kwargs)


async def test_an_async_graph_needs_no_threads(signals: Signals) -> None:
    """All that judges runs on the event loop."""
    search = {"name": "search", "args": {}, "id": "call_1"}

    async def node(state: MessagesState) -> dict[str, Any]:
        is_new = state["messages"][-1].type == "human"
        return {"messages": [AIMessage("", tool_calls=[search]) if is_new else AIMessage("done")]}

    limits: list[Limit] = [ToolCallLimit("search", run_limit=2), ModelCallLimit(run_limit=2)]
    scene = GraphScene(signals, [], limits, loop={"model": node})
    executor = Executor()
    asyncio.get_running_loop().set_default_executor(executor)
    await scene.turn()
    assert (scene.ran, executor.given) == (["search"], [])


async def test_two_loops_in_a_graph(signals: Signals) -> None:
    """Each has a name of its own in telemetry, and both draw on the budget of the run."""
    ran: list[str] = []
    graph = StateGraph(MessagesState)
    quota = GraphQuota([ToolCallLimit("search", run_limit=4)], telemetry=signals.telemetry)
    tools = [recording("search", ran)]
    first, second = (
        ScriptedChatModel(script=[["search"] * 3, "done"]),
        ScriptedChatModel(script=[["search"] * 3, "done"]),
    )
    graph.add_node("hand over", lambda state: {"messages": [HumanMessage("go on")]})
    quota.add_to(graph, model=first, tools=tools, name="planner", end="hand over")
    quota.add_to(graph, model=second, tools=tools, name="writer", start="hand over")
    with captured_decisions() as decisions:
        result = await graph.compile().ainvoke(HELLO)
    admitted = [each.call.agent for each in decisions if each.outcome == "allowed"]
    assert admitted.count("planner") == 3 + 2
    assert admitted.count("writer") == 1 + 2
    assert len(ran) == 4
    assert {each.name for each in result["messages"] if each.type == "ai"} == {"planner", "writer"}
    check_history(result["messages"])


async def test_a_graph_in_a_graph(signals: Signals) -> None:
    """As the node of another graph with a checkpointer of its own it keeps its thread's count."""
    limit = ToolCallLimit("search", run_limit=2, thread_limit=3)
    scene = GraphScene(signals, thrice, [limit], compiled={"checkpointer": True})
    outer = StateGraph(MessagesState)
    outer.add_node("inner", scene.agent)
    outer.add_edge(START, "inner")
    scene.agent = outer.compile(checkpointer=InMemorySaver())
    for ran in (2, 3, 3):
        result = await scene.invoke({"messages": [("user", "hi")]})
        assert len(scene.ran) == ran
        check_history(result["messages"])


async def test_many_at_once_by_send(signals: Signals) -> None:
    """Invocations that `Send` starts in parallel have a budget each, and one of their thread."""
    limit = ToolCallLimit("search", run_limit=2, thread_limit=7)
    scene = GraphScene(
        signals, thrice, [limit], compiled={"checkpointer": None}, store=MemoryStore()
    )
    outer = StateGraph(MessagesState)
    outer.add_node("inner", scene.agent)
    outer.add_conditional_edges(
        START, lambda state: [Send("inner", {"messages": [("user", "hi")]})] * 5, ["inner"]
    )
    await outer.compile().ainvoke(NOTHING, THREAD)
    assert len(scene.ran) == 7


async def test_a_store_counts(signals: Signals) -> None:
    """With a store threads are counted without a checkpointer, and a batch is still one."""
    limit = ToolCallLimit("search", run_limit=2, thread_limit=3)
    scene = GraphScene(
        signals, thrice, [limit], compiled={"checkpointer": None}, store=MemoryStore()
    )
    for ran in (2, 3, 3):
        await scene.turn()
        assert len(scene.ran) == ran


@both_forms
@pytest.mark.parametrize("name", [None, "planner"])
async def test_reset(form: Form, name: str | None, signals: Signals) -> None:
    """A thread's use is set back to nothing; one that waits in mid-run is left alone."""
    limit = ToolCallLimit("search", thread_limit=3)
    scene = GraphScene(signals, thrice, [limit], form=form, loop={"name": name})
    await scene.turn()
    await scene.turn()
    assert len(scene.ran) == 3
    if form == "sync":
        scene.quota.reset(scene.agent, THREAD)
    else:
        await scene.quota.areset(scene.agent, THREAD)
    assert scene.agent.get_state(CONFIG).next == ()
    await scene.turn()
    assert len(scene.ran) == 6


async def test_an_observer(signals: Signals) -> None:
    """`on_decision` hears of every call."""
    seen: list[str] = []
    scene = GraphScene(
        signals,
        thrice,
        [ToolCallLimit("search", run_limit=2)],
        on_decision=lambda decision: seen.append(f"{decision.call.kind} {decision.outcome}"),
    )
    await scene.turn()
    assert seen == ["model allowed", *["tool allowed"] * 2, "tool blocked", "model allowed"]


@pytest.mark.parametrize("name", ["inner", None])
async def test_a_loop_inside_a_tool(name: str | None, signals: Signals) -> None:
    """A name tells its calls from those around it; without one they are in no thread's series."""
    inner = GraphQuota([ToolCallLimit(run_limit=1)], telemetry=signals.telemetry)
    graph = inner.add_to(
        StateGraph(MessagesState),
        model=ScriptedChatModel(script=[["search", "search"], "done"]),
        tools=[recording("search", [])],
        name=name,
    ).compile()

    @tool
    async def delegate() -> str:
        """Delegate."""
        result = await graph.ainvoke({"messages": [("user", "hi")]})
        return str(result["messages"][-1].content)

    scene = GraphScene(
        signals,
        [["delegate"], "done"],
        [ToolCallLimit(run_limit=1)],
        tools=[delegate],
        loop={"name": "outer"},
    )
    with captured_decisions() as decisions:
        await scene.turn()
    found = [
        (str(each.call.agent), each.call.thread_id, str(each.outcome))
        for each in decisions
        if each.call.tool
    ]
    label, thread = ("outer", None) if name is None else (name, "thread-1")
    assert found == [
        ("outer", "thread-1", "allowed"),
        (label, thread, "allowed"),
        (label, thread, "blocked"),
    ]


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


PLAIN = ScriptedChatModel(script=[])
SEARCH: list[BaseTool] = [recording("search", [])]


@pytest.mark.parametrize(
    ("graph", "given", "error", "text"),
    [
        (lambda: StateGraph(WithoutMessages), {}, ValueError, "state has no messages"),
        (lambda: StateGraph(Replaced), {}, ValueError, "does not keep messages by their id"),
        (lambda: StateGraph(Added), {}, ValueError, "does not keep messages by their id"),
        (with_model, {}, ValueError, "has a node 'model' already"),
        (lambda: with_model().compile(), {}, TypeError, "compiled one: call add_to before"),
        (already_compiled, {}, TypeError, "compiled already"),
        (lambda: MessagesState, {}, TypeError, "graph must be a StateGraph"),
        (None, {"model": PLAIN.bind_tools(SEARCH)}, TypeError, "with tools bound"),
        (None, {"model": 3}, TypeError, "model must be a chat model, or the model's node"),
        (None, {"model": lambda state: {}, "prompt": "Hi."}, TypeError, "prompt is for a chat"),
        (None, {"tools": "search"}, TypeError, "tools must be a list of tools or a ToolNode"),
        (None, {"tools": SEARCH[0]}, TypeError, "tools must be a list of tools or a ToolNode"),
        (None, {"name": ""}, TypeError, "name must be a name or None, not ''"),
        (None, {"start": 3}, TypeError, "start must be the name of a node, START or None, not 3"),
        (None, {"end": None}, TypeError, "end must be the name of a node, or END, not None"),
    ],
)
def test_what_does_not_fit_is_an_error(
    graph: Any, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    """A graph or an argument that does not fit is named at once, with what to do."""
    to = StateGraph(MessagesState) if graph is None else graph()
    with pytest.raises(error, match=re.escape(text)):
        GraphQuota([ToolCallLimit(run_limit=1)]).add_to(
            to, **{"model": PLAIN, "tools": SEARCH, **given}
        )
