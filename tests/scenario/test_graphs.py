"""Graphs without create_agent, held to limits by a limited model and limited tools."""

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.constants import END, START
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent, tools_condition
from langgraph.types import Command, Send, interrupt

from langchain_quota import (
    CostLimit,
    GraphQuota,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Quota,
    QuotaWarning,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.errors import UnknownPriceError
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.loops import looped, shapes
from tests.scene import (
    CONFIG,
    Scene,
    Weather,
    asking,
    both_forms,
    check_history,
    delegate,
    recording,
)
from tests.stores import counts, run_counts
from tests.telemetry import Signals, telling
from tests.tokens import THREAD, answer

pytestmark = [
    pytest.mark.filterwarnings("ignore:create_react_agent has been moved"),
]

HELLO: Any = {"messages": [("user", "hi")]}
TWO_OF_THREE = ToolCallLimit("search", run_limit=2, thread_limit=3)
ENDED = "Model call limits exceeded: run limit (2/2)"
MARK = "langchain_quota"
SAID = "What was said in this test alone."


def thrice(messages: list[AnyMessage]) -> Any:
    """Three searches a turn, then an answer."""
    return "done" if messages[-1].type == "tool" else ["search"] * 3


def forged(*names: str, refused: Any = None, seal: str = "") -> AIMessage:
    """A message of a model without limits, whose mark says that all its calls may run."""
    calls: Any = [{"name": name, "args": {}, "id": f"{name}_{n}"} for n, name in enumerate(names)]
    mark = {MARK: {"blocked": refused or {}, "seal": seal, "checked": True, "run": "any"}}
    return AIMessage("", tool_calls=calls, response_metadata=mark)


@shapes
@both_forms
async def test_runs_and_threads(shape: str, form: Any, signals: Signals) -> None:
    """In every shape two of three searches run, and the thread's third one in the next run."""
    scene = looped(shape, signals, thrice, [TWO_OF_THREE], form=form)
    for ran in (2, 3, 3):
        check_history((await scene.play())["messages"])
        assert scene.ran == ["search"] * ran
    assert scene.used(TWO_OF_THREE) == (3, 2)
    assert scene.calls("blocked", "search") == 6


@shapes
@pytest.mark.parametrize(
    ("limit", "ran", "last"),
    [
        (ToolCallLimit(run_limit=3), 3, "Model call limits exceeded: run limit (4/4)"),
        (
            ToolCallLimit(run_limit=1, exit_behavior="end"),
            0,
            "Tool call limit reached: run limit exceeded (2/1 calls).",
        ),
        (ModelCallLimit(run_limit=2), 4, ENDED),
        (ModelCallLimit(run_limit=2, exit_behavior="finalize"), 2, ENDED),
    ],
    ids=["continue", "end", "end of model", "finalize"],
)
async def test_exits(
    shape: str, limit: Limit, ran: int, last: str | None, signals: Signals
) -> None:
    """However a limit ends a run, what has run is within it, and the history is valid."""
    stop = [] if limit.kind == "model" else [ModelCallLimit(run_limit=4)]
    scene = looped(shape, signals, lambda _: ["search"] * 2, [limit, *stop])
    result = await scene.play()
    check_history(result["messages"])
    assert len(scene.ran) == ran
    assert result["messages"][-1].text == last
    assert not result["messages"][-1].tool_calls


@shapes
async def test_an_error_leaves_the_next_run_valid(shape: str, signals: Signals) -> None:
    """An exception of a limit ends the run, and the next run is sent a valid history."""
    limit = ToolCallLimit(run_limit=1, exit_behavior="error")
    scene = looped(shape, signals, [["search"], ["search"], "hello"], [limit])
    with pytest.raises(ToolCallLimitExceededError, match="run limit"):
        await scene.play()
    assert scene.ran == ["search"]
    assert (await scene.play())["messages"][-1].text == "hello"
    scene.check_requests()


@pytest.mark.parametrize("kind", ["graph", "react"])
async def test_notes_and_hidden_tools(kind: Any, signals: Signals) -> None:
    """The model reads what is left, and is not offered what it may not call."""
    limits = [ToolCallLimit("search", run_limit=1)]
    given: Any = {"kind": kind, "tell_model": True, "hide_exhausted": True}
    scene = Scene(signals, [["search"], "done"], limits, **given)
    await scene.play()
    assert [each.tools for each in scene.model.calls] == [("search", "calc"), ("calc",)]
    assert "search" in scene.model.calls[1].messages[-1].text


class Reviewed(MessagesState):
    reviews: int


def by_a_review(graph: Any) -> None:
    """A loop back to the model, nine times, whatever it has answered."""

    def review(state: Reviewed) -> dict[str, Any]:
        return {"messages": [("user", "Better!")], "reviews": state.get("reviews", 0) + 1}

    graph.add_node("review", review)
    graph.add_edge("review", "model")
    graph.add_conditional_edges(
        "model",
        lambda state: (
            "tools"
            if state["messages"][-1].tool_calls
            else END
            if state.get("reviews", 0) == 9
            else "review"
        ),
    )


def by_a_second_edge(graph: Any) -> None:
    """Nodes beside the model lead to it, too, one after the other."""
    for number in range(9):
        graph.add_node(f"beside{number}", lambda state: {"messages": [("user", "And this?")]})
        graph.add_edge(f"beside{number - 1}" if number else START, f"beside{number}")
        graph.add_edge(f"beside{number}", "model")
    graph.add_conditional_edges("model", tools_condition)


def by_sends(graph: Any) -> None:
    """Nine model calls at the same time."""
    graph.add_node("many", lambda _: {})
    graph.add_edge(START, "many")
    graph.add_conditional_edges("many", lambda state: [Send("model", state)] * 9, ["model"])


@both_forms
@pytest.mark.parametrize("way", [by_a_review, by_a_second_edge, by_sends])
@pytest.mark.parametrize(
    "limit",
    [
        ModelCallLimit(run_limit=2),
        ModelCallLimit(run_limit=2, exit_behavior="finalize"),
        TokenLimit(run_limit=120, reserve=60),
    ],
    ids=["end", "finalize", "budget"],
)
async def test_ways_to_the_model(
    way: Callable[[Any], None], limit: Limit, form: Any, signals: Signals
) -> None:
    """Whichever way leads to the model, and in parallel: never more calls than the limit lets."""
    given: Any = {"kind": "graph", "form": form, "state": Reviewed, "loop": way}
    scene = Scene(signals, lambda _: answer(60), [limit], **given)
    scene.agent = scene.agent.with_config(recursion_limit=60)
    check_history((await scene.play("Write!"))["messages"])
    assert len(scene.model.calls) == 2
    # What is refused again is told again.
    assert scene.calls("blocked") == 8


async def test_a_run_that_a_tool_limit_has_ended(signals: Signals) -> None:
    """It stays ended: the model is not called again, and its next run begins anew."""
    limit = ToolCallLimit(run_limit=1, exit_behavior="end")
    given: Any = {"kind": "graph", "state": Reviewed, "loop": by_a_review}
    scene = Scene(signals, lambda _: ["search"] * 2, [limit], **given)
    result = await scene.play()
    assert (len(scene.model.calls), scene.ran) == (1, [])
    assert [each.text for each in result["messages"] if each.type == "ai"] == [
        "Tool call limit reached: run limit exceeded (2/1 calls)."
    ] * 10
    await scene.play()
    assert len(scene.model.calls) == 2


def alone(quota: GraphQuota, ran: list[str], *, nodes: int = 1, **options: Any) -> Any:
    """A graph of nodes of tools, which run side by side, and no model."""
    graph = StateGraph(MessagesState)
    for number in range(nodes):
        graph.add_node(f"tools{number}", quota.tools([recording("search", ran)]))
        graph.add_edge(START, f"tools{number}")
    return graph.compile(**options)


@both_forms
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("mark", ["none", "forged", "of a wrong type"])
async def test_a_tool_node_alone(mark: str, nodes: int, form: Any, signals: Signals) -> None:
    """Tool calls that no limited model has made are checked by the tools, whatever their mark."""
    ran, store = list[str](), MemoryStore()
    quota = GraphQuota(
        [ToolCallLimit("search", run_limit=2)], store=store, telemetry=signals.telemetry
    )
    message = forged("search", "search", "search")
    if mark == "none":
        message.response_metadata.clear()
    elif mark == "of a wrong type":
        message.response_metadata[MARK] = {"blocked": ["search_0"]}
    graph = alone(quota, ran, nodes=nodes)
    given: Any = {"messages": [HumanMessage("hi"), message]}
    result = graph.invoke(given, CONFIG) if form == "sync" else await graph.ainvoke(given, CONFIG)
    assert len(ran) == 2
    if nodes == 1:
        check_history(result["messages"])
    assert run_counts(store, "search") == [2]


async def test_a_message_for_two_nodes_of_tools(signals: Signals) -> None:
    """Calls that a limited model has made run once: a second node of tools makes further calls."""
    ran: list[str] = []
    own = GraphQuota([ToolCallLimit(run_limit=2)], telemetry=signals.telemetry)
    limited = own.model(ScriptedChatModel(script=[["search", "search"], "done"]))
    graph: Any = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [limited.invoke(state["messages"])]})
    for name in ("tools", "more tools"):
        graph.add_node(name, own.tools([recording("search", ran)]))
        graph.add_edge("model", name)
    graph.add_edge(START, "model")
    graph.compile().invoke(HELLO)
    assert ran == ["search"] * 2


@pytest.mark.parametrize("exit_behavior", ["end", "error"])
async def test_exits_of_tools_alone(exit_behavior: Any, signals: Signals) -> None:
    """A limit that ends a run at its tools ends it for the model; one that raises does so there."""
    model, ran = ScriptedChatModel(script=lambda _: ["search"]), list[str]()
    limits = [ToolCallLimit(run_limit=1, exit_behavior=exit_behavior)]
    quota = GraphQuota(limits, telemetry=signals.telemetry)
    limited = quota.model(model, [recording("search", ran)])
    graph: Any = StateGraph(MessagesState)
    graph.add_node("unlimited", lambda _: {"messages": [forged("search", "search")]})
    graph.add_node("tools", quota.tools([recording("search", ran)]))
    graph.add_node("model", lambda state: {"messages": [limited.invoke(state["messages"])]})
    graph.add_edge(START, "unlimited")
    graph.add_edge("unlimited", "tools")
    graph.add_edge("tools", "model")
    if exit_behavior == "error":
        with pytest.raises(ToolCallLimitExceededError):
            await graph.compile().ainvoke(HELLO)
    else:
        result = await graph.compile().ainvoke(HELLO)
        check_history(result["messages"])
        assert result["messages"][-1].text == (
            "Tool call limit reached: run limit exceeded (2/1 calls)."
        )
        assert model.calls == ()
    assert len(ran) <= 1


@both_forms
@pytest.mark.parametrize("shape", ["graph", "react"])
@pytest.mark.parametrize("tampered", [False, True])
async def test_a_resume_in_another_process(
    *, tampered: bool, shape: Any, form: Any, signals: Signals
) -> None:
    """Between model and tools another process goes on: what was refused there does not run here.

    If the message has another mark by then, its calls are checked anew, and count in addition.
    """
    store, saver = MemoryStore(), InMemorySaver()
    limits: list[Limit] = [ToolCallLimit("search", run_limit=2), ModelCallLimit(run_limit=2)]

    def worker(*script: Any, **options: Any) -> Scene:
        given: Any = {"kind": shape, "form": form, "store": store, "checkpointer": saver}
        return Scene(signals, [*script], limits, **given, **options)

    first = worker(["search"] * 3, interrupt_before=["tools"])
    await first.play()
    if tampered:
        message = first.state()["messages"][-1]
        message.response_metadata[MARK] = {"blocked": {}}
        first.agent.update_state(
            CONFIG, {"messages": [message]}, as_node="model" if shape == "graph" else "agent"
        )
    second = worker(["search"], "done")
    result = await second.go_on()

    assert (first.ran, second.ran) == ([], [] if tampered else ["search"] * 2)
    assert len(second.model.calls) == 1
    assert result["messages"][-1].text == ENDED
    check_history(result["messages"])
    assert run_counts(store, "search") == [2]
    # A new run has a budget of its own.
    third = worker(["search"] * 3, "done")
    await third.play()
    assert third.ran == ["search"] * 2


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_remark_before_the_tools(elsewhere: Any, signals: Signals) -> None:
    """A node between model and tools may add a message: the calls are checked once all the same."""
    store, saver, ran = MemoryStore(), InMemorySaver(), list[str]()
    limit, tools = ToolCallLimit("search", thread_limit=1), [recording("search", ran)]

    def remark(_: MessagesState) -> Any:
        interrupt("Go on?")
        return {"messages": [HumanMessage("a remark")]}

    def worker() -> Any:
        limits = GraphQuota([limit], store=store, telemetry=signals.telemetry)
        model = limits.model(ScriptedChatModel(script=[["search"]]), tools)
        graph: Any = StateGraph(MessagesState)
        graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
        graph.add_edge(START, "model").add_node(remark).add_node("tools", limits.tools(tools))
        graph.add_edge("model", "remark").add_edge("remark", "tools")
        return graph.compile(checkpointer=saver)

    first = worker()
    await first.ainvoke({"messages": [("user", "Go!")]}, CONFIG)
    await (worker() if elsewhere else first).ainvoke(Command(resume="yes"), CONFIG)
    assert (ran, counts(store)["search:thread:thread-1"]) == (["search"], 1)


async def test_an_interrupt_in_a_tool(signals: Signals) -> None:
    """A run that waits goes on with what is left, and its calls are charged once."""
    ran: list[str] = []
    tools = [recording("search", ran), recording("ask", [], lambda: interrupt("Sure?"))]
    limit = ToolCallLimit(run_limit=2)
    scene = Scene(
        signals, [["search", "ask"], ["search"], "done"], [limit], kind="react", tools=tools
    )
    await scene.play()
    result = await scene.resume("yes")
    assert result["messages"][-1].text == "done"
    assert scene.used(limit)[1] == 2
    check_history(result["messages"])


async def test_a_node_that_calls_its_model_twice(signals: Signals) -> None:
    """Each is a call of its own, also where the node runs again after an interrupt."""
    model = ScriptedChatModel(script=lambda _: "hm")
    limited = GraphQuota([ModelCallLimit(run_limit=3)], telemetry=signals.telemetry).model(model)
    graph: Any = StateGraph(MessagesState)

    def node(state: Any) -> Any:
        said = [limited.invoke(state["messages"]) for _ in range(2)]
        interrupt("Sure?")
        return {"messages": said[-1:]}

    graph.add_node("model", node)
    graph.add_edge(START, "model")
    app = graph.compile(checkpointer=InMemorySaver())
    app.invoke(HELLO, CONFIG)
    for _ in range(3):
        app.invoke(None, CONFIG)
    assert len(model.calls) == 3


async def test_structured_output(signals: Signals) -> None:
    """Its call counts; the tool that gives the answer its form does not, and a refusal is None."""
    script = [["search"], "mild", [("Weather", {"degrees": 20})]]
    for most, found in ((3, Weather(degrees=20)), (2, None)):
        limits: list[Limit] = [ModelCallLimit(run_limit=most), ToolCallLimit(run_limit=1)]
        given: Any = {"kind": "react", "response_format": Weather}
        scene = Scene(signals, script, limits, **given)
        result = await scene.play()
        assert result["structured_response"] == found
        assert len(scene.model.calls) == most
        assert scene.calls("blocked", "Weather") == 0


async def test_streaming(signals: Signals) -> None:
    """A graph streams the model's words one by one; the limited model itself answers at once."""
    scene = Scene(signals, ["All is done.", "All is done."], [TWO_OF_THREE], kind="graph")
    stream = scene.agent.astream(HELLO, CONFIG, stream_mode="messages")
    words = [chunk.content async for chunk, _ in stream if chunk.content]
    assert words == ["All", " is", " done."]

    limited = scene.quota.model(scene.model)
    graph: Any = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [*limited.stream(state["messages"])]})
    graph.add_edge(START, "model")
    assert graph.compile().invoke(HELLO, CONFIG)["messages"][-1].text == "All is done."


class AsyncModel(ScriptedChatModel):
    """A model with an async form of its own."""

    async def _agenerate(self, *given: Any, **more: Any) -> Any:
        return self._generate(*given, **more)


async def test_an_async_graph_needs_no_threads(signals: Signals) -> None:
    """All that checks runs on the event loop."""
    limits: list[Limit] = [TWO_OF_THREE, ModelCallLimit(run_limit=2)]
    scene = Scene(signals, AsyncModel(script=thrice), limits, kind="graph")
    executor = ThreadPoolExecutor()
    executor.shutdown()
    asyncio.get_running_loop().set_default_executor(executor)
    limited = scene.quota.model(scene.model)
    graph: Any = StateGraph(MessagesState)

    async def node(state: Any) -> Any:
        return {"messages": [await limited.ainvoke(state["messages"])]}

    graph.add_node("model", node)
    graph.add_node("tools", scene.quota.tools(scene.tools))
    graph.add_edge(START, "model")
    graph.add_edge("model", "tools")
    await graph.compile().ainvoke(HELLO, CONFIG)
    assert scene.ran == ["search"] * 2


async def test_names(signals: Signals) -> None:
    """A name is the agent's name in telemetry; a graph in a tool has runs of its own."""
    once, twice = [ToolCallLimit(run_limit=1)], [ToolCallLimit(run_limit=2)]
    given: Any = {"kind": "graph", "checkpointer": None}
    inner = Scene(signals, [["search"] * 2, "done"] * 2, once, name="inner", **given)
    given |= {"tools": [delegate(inner.agent)], "name": "outer"}
    with captured_decisions() as decisions:
        await Scene(signals, [["delegate"], ["delegate"], "done"], twice, **given).play()
    found = [(each.call.agent, str(each.outcome)) for each in decisions if each.call.tool]
    assert found == [("outer", "allowed"), ("inner", "allowed"), ("inner", "blocked")] * 2


@shapes
async def test_a_reserve_is_never_exceeded(signals: Signals, shape: str) -> None:
    """A call that could exceed the budget is not made; what is held for one is given back."""
    store, seen = MemoryStore(), list[int]()

    def reserve(request: Any) -> int:
        seen.append(len(request.tools))
        return 50

    limit = TokenLimit(thread_limit=100, reserve=reserve)
    script = [answer(30, "search"), answer(21, "search"), answer(50)]
    scene = looped(shape, signals, script, [limit], store=store)
    with captured_decisions() as decisions:
        await scene.play()
    assert (len(scene.model.calls), seen, counts(store)[THREAD]) == (2, [2] * 3, 51)
    assert scene.last_text().endswith("thread limit (51/100 tokens, the call may need 50)")
    assert [each.outcome for each in decisions if each.call.kind == "model"][-1] == "blocked"


@shapes
async def test_money(signals: Signals, shape: str) -> None:
    """Costs are charged by the prices given; a call without one is an error, before it."""
    prices = {60: Decimal("0.0000000001"), 40: Decimal("0.5")}
    script = [answer(60, "search"), answer(40, "search")]
    given: Any = {"prices": lambda used: prices.get(used.total_tokens, Decimal(0))}
    scene = looped(shape, signals, script, [CostLimit(run_limit="0.50")], **given)
    await scene.play()
    assert scene.last_text() == "Cost limits exceeded: run limit ($0.500000001/$0.50)"

    given = {"prices": lambda _: None}
    scene = looped(shape, signals, [answer(9)], [CostLimit(run_limit=1)], **given)
    with pytest.raises(UnknownPriceError):
        await scene.play()
    assert scene.model.calls == ()


async def test_tools_that_nothing_limits(signals: Signals) -> None:
    """A blocked call that nothing would answer is an error, which says what to do."""
    quota = GraphQuota([ToolCallLimit(run_limit=0)], telemetry=signals.telemetry)
    limited = quota.model(ScriptedChatModel(script=[["search"]]))
    graph: Any = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [limited.invoke(state["messages"])]})
    graph.add_edge(START, "model")
    with pytest.raises(RuntimeError, match=r"limits\.tools"):
        graph.compile().invoke(HELLO)


def test_outside_of_a_run(signals: Signals) -> None:
    """A limited model that no graph calls is an error, which says where to call it."""
    limited = GraphQuota([ModelCallLimit(run_limit=1)], telemetry=signals.telemetry)
    with pytest.raises(RuntimeError, match="call it in a node, a task or an entrypoint"):
        limited.model(ScriptedChatModel(script=["hi"])).invoke("hi")


def test_arguments(signals: Signals) -> None:
    """A bound model is refused; a thread limit without a store warns."""
    quota = GraphQuota([ModelCallLimit(run_limit=1)], telemetry=signals.telemetry)
    bound: Any = ScriptedChatModel(script=[]).bind_tools([])
    wrong: list[Any] = [bound, 3]
    for each in wrong:
        with pytest.raises(TypeError, match="without tools bound"):
            quota.model(each)
    with pytest.warns(QuotaWarning, match="ends with this process"):
        GraphQuota([TWO_OF_THREE], telemetry=signals.telemetry)
    GraphQuota([TWO_OF_THREE], store=MemoryStore(), telemetry=signals.telemetry)


async def test_a_model_without_limits_is_unchecked() -> None:
    """Its calls are counted as unchecked, though the tools check the calls that it makes."""
    signals = telling(count_unchecked_calls=True)
    quota = GraphQuota([ToolCallLimit(run_limit=5)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=[["search", "search"], "done"])
    graph: Any = create_react_agent(model, quota.tools([recording("search", [])]))
    await graph.ainvoke(HELLO)
    assert signals.samples("langchain_quota_unchecked_calls_total") == {("unnamed", "model"): 2}

    limited = create_react_agent(
        quota.model(ScriptedChatModel(script=[["search"], "done"])),
        quota.tools([recording("search", [])]),
    )
    await limited.ainvoke(HELLO)
    assert signals.samples("langchain_quota_unchecked_calls_total") == {("unnamed", "model"): 2}


def teams(signals: Signals, limit: Limit, script: Any, **options: Any) -> tuple[Any, Any, Any]:
    """langgraph-supervisor's supervisor of a worker, its model and the worker's model."""
    supervisors = pytest.importorskip("langgraph_supervisor")
    worked, model = ScriptedChatModel(script=lambda _: "worked"), ScriptedChatModel(script=script)
    quota = GraphQuota([limit], name="boss", store=MemoryStore(), telemetry=signals.telemetry)
    hand_off = supervisors.create_handoff_tool(agent_name="worker")
    graph = supervisors.create_supervisor(
        [create_react_agent(worked, [], name="worker")],
        model=quota.model(model),
        tools=quota.tools([hand_off]),
        **options,
    )
    return graph.compile(checkpointer=InMemorySaver()), model, worked


@pytest.mark.parametrize("output_mode", ["last_message", "full_history"])
@pytest.mark.parametrize(
    ("limit", "workers"),
    [
        (ModelCallLimit(run_limit=2, thread_limit=5), [2, 2, 1]),
        (ToolCallLimit("transfer_to_worker", thread_limit=3), [3, 0, 0]),
    ],
    ids=["model calls", "hand-overs"],
)
async def test_a_supervisor(
    limit: Limit, workers: list[int], output_mode: str, signals: Signals
) -> None:
    """Its model calls and hand-overs are limited, over the whole run and from turn to turn."""

    def script(messages: Any) -> Any:
        refused = "limit exceeded" in str(messages[-1].content)
        return "done" if refused else ["transfer_to_worker"]

    graph, model, worked = teams(signals, limit, script, output_mode=output_mode)
    for count in workers:
        before = len(worked.calls)
        result = await graph.ainvoke(HELLO, CONFIG)
        assert len(worked.calls) - before == count
        check_history(result["messages"])
        assert result["messages"][-1].content != "worked"
    for each in (*model.calls, *worked.calls):
        check_history(each.messages)


async def test_a_swarm(signals: Signals) -> None:
    """Agents that hand over to each other share the counts of the thread, and stop."""
    swarms = pytest.importorskip("langgraph_swarm")
    limits = [ModelCallLimit(run_limit=3, thread_limit=5)]
    quota = GraphQuota(limits, store=MemoryStore(), telemetry=signals.telemetry)

    def member(name: str, other: str) -> tuple[Any, Any]:
        model = ScriptedChatModel(script=lambda _: [f"transfer_to_{other}"])
        tools = quota.tools([swarms.create_handoff_tool(agent_name=other)])
        return model, create_react_agent(quota.model(model), tools, name=name)

    (one, alice), (two, bob) = member("alice", "bob"), member("bob", "alice")
    swarm = swarms.create_swarm([alice, bob], default_active_agent="alice")
    graph = swarm.compile(checkpointer=InMemorySaver())
    result = await graph.ainvoke(HELLO, {**CONFIG, "recursion_limit": 60})
    assert len(one.calls) + len(two.calls) == 5
    check_history(result["messages"])


async def test_an_error_of_the_model_limit(signals: Signals) -> None:
    """`error` raises at every way to the model, and no call is made."""
    limit = ModelCallLimit(run_limit=2, exit_behavior="error")
    given: Any = {"kind": "graph", "state": Reviewed, "loop": by_a_review}
    scene = Scene(signals, lambda _: "draft", [limit], **given)
    with pytest.raises(ModelCallLimitExceededError):
        await scene.play()
    assert len(scene.model.calls) == 2


def said(kind: str, **more: Any) -> dict[str, Any]:
    """What a person answers."""
    return {"decisions": [{"type": kind, **more}]}


APPROVE = said("approve")
ASKS = ToolCallLimit("search", run_limit=1, exit_behavior="ask")


async def answered(scene: Scene, given: Any) -> dict[str, Any]:
    """The run goes on with an answer to each question that waits."""
    waiting = scene.agent.get_state(CONFIG).interrupts
    assert waiting
    return await scene.resume({each.id: given for each in waiting})


@both_forms
@shapes
@pytest.mark.parametrize(
    ("given", "made", "last"),
    [
        (APPROVE, 2, "done"),
        (said("approve", amount=0), 1, "Model call limits exceeded: run limit (1/1)"),
        (said("reject", message="No."), 1, "No."),
    ],
    ids=["approve", "amount", "reject"],
)
async def test_a_question_before_the_model(
    *, given: Any, made: int, last: str, shape: str, form: Any, signals: Signals
) -> None:
    """A person is asked before a model call that is refused, and what they say is done."""
    limit = ModelCallLimit(run_limit=1, exit_behavior="ask")
    scene = looped(shape, signals, [["search"], "done"], [limit], form=form)
    await scene.play()
    assert len(scene.model.calls) == 1
    result = await answered(scene, given)
    assert (len(scene.model.calls), scene.ran) == (made, ["search"])
    assert result["messages"][-1].text == last
    check_history(result["messages"])


@both_forms
@shapes
@pytest.mark.parametrize(
    ("given", "ran", "last"),
    [(APPROVE, 2, "done"), (said("approve", amount=0), 1, "done"), (said("reject"), 0, "exceeded")],
    ids=["approve", "amount", "reject"],
)
async def test_a_question_before_the_tools(
    *, given: Any, ran: int, last: str, shape: str, form: Any, signals: Signals
) -> None:
    """A person is asked behind the model, which is not called again, before any of its calls runs.

    But `create_react_agent` runs each call by itself: there, those that are refused ask.
    """
    scene = looped(shape, signals, [["search"] * 2, "done"], [ASKS], form=form)
    await scene.play()
    alone = shape == "react"
    assert (len(scene.model.calls), len(scene.ran)) == (1, 1 if alone else 0)
    result = await answered(scene, given)
    assert len(scene.ran) == max(ran, 1 if alone else 0)
    assert last in result["messages"][-1].text
    check_history(result["messages"])


@pytest.mark.parametrize("shape", ["graph", "react"])
async def test_an_answer_in_another_process(shape: Any, signals: Signals) -> None:
    """Whichever process goes on with the answer: what was approved is made, once."""
    store, saver = MemoryStore(), InMemorySaver()
    limits: list[Limit] = [ASKS, ModelCallLimit(run_limit=1, exit_behavior="ask")]

    def worker(*script: Any) -> Scene:
        return Scene(signals, [*script], limits, kind=shape, store=store, checkpointer=saver)

    first, second, third = worker(["search"] * 2), worker("never"), worker("done")
    await first.play()
    await answered(second, APPROVE)
    result = await answered(third, APPROVE)
    assert (len(first.ran + second.ran), third.ran) == (2, [])
    assert [len(each.model.calls) for each in (first, second, third)] == [1, 0, 1]
    assert result["messages"][-1].text == "done"
    assert run_counts(store, "search") == run_counts(store, "model") == [2]


@both_forms
@pytest.mark.parametrize("fits", [False, True], ids=["needed", "not needed any more"])
async def test_a_question_beside_that_of_a_tool(fits: Any, form: Any, signals: Signals) -> None:
    """The answer to a limit's question is never one to a tool's own, in whichever process."""
    heard, store, saver = list[Any](), MemoryStore(), InMemorySaver()
    limit = ToolCallLimit("pay", quotas=[Quota(1, per="global")], exit_behavior="ask")
    pay = recording("pay", [], lambda: heard.append(interrupt("Sure?")))
    given: Any = {"kind": "graph", "form": form, "store": store, "checkpointer": saver}

    def worker() -> Scene:
        return Scene(signals, asking("pay", "pay"), [limit], tools=[pay], **given)

    await worker().play()
    if fits:
        store.grant("pay:global:", 1, window=None)
    await answered(worker(), APPROVE)
    for _ in range(2):
        assert APPROVE not in heard
        result = await answered(worker(), "yes")
    assert result["messages"][-1].text == "done"
    assert set(heard) == {"yes"}
    assert counts(store)["pay:global:"] == 2


async def test_an_approval_is_used_once(signals: Signals) -> None:
    """A node that runs again does not use the answer to its question a second time."""
    model = ScriptedChatModel(script=lambda _: "hm")
    limit = ModelCallLimit(run_limit=1, exit_behavior="ask")
    limited = GraphQuota([limit], telemetry=signals.telemetry).model(model)
    graph: Any = StateGraph(MessagesState)

    def node(state: Any) -> Any:
        answers = [limited.invoke([*state["messages"], ("user", text)]) for text in ("One", "Two")]
        interrupt("Sure?")
        return {"messages": answers[-1:]}

    graph.add_node("model", node)
    graph.add_edge(START, "model")
    app = graph.compile(checkpointer=InMemorySaver())
    app.invoke(HELLO, CONFIG)
    for given, made in ((APPROVE, 2), (APPROVE, 3), ("yes", 3)):
        app.invoke(Command(resume=given), CONFIG)
        assert len(model.calls) == made


def test_a_question_needs_a_checkpointer_and_limited_tools(signals: Signals) -> None:
    """A graph that could not wait, or whose tools nothing checks, raises before a call is made."""
    ran: list[str] = []
    model = ScriptedChatModel(script=lambda _: ["search"])
    quota, asked = GraphQuota([ASKS], telemetry=signals.telemetry), dict(HELLO)
    asked["messages"] = [forged("search")]
    with pytest.raises(RuntimeError, match="needs a checkpointer"):
        alone(quota, ran).invoke(asked)
    unchecked = GraphQuota([ASKS], telemetry=signals.telemetry).model(model)
    tools, saver = [recording("search", ran)], InMemorySaver()
    agent: Any = create_react_agent(unchecked, tools, checkpointer=saver)
    with pytest.raises(RuntimeError, match=r"limits\.tools"):
        agent.invoke(HELLO, CONFIG)
    assert ran == []


async def test_what_has_been_said_is_not_kept(signals: Signals) -> None:
    """A graph's limits keep nothing of the history of a run that has ended, repaired or not."""
    limits = GraphQuota([ModelCallLimit(run_limit=5)], telemetry=signals.telemetry)
    model = limits.model(ScriptedChatModel(script=lambda _: "done", keep_calls=0))

    async def node(state: Any) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", node)
    graph.add_edge(START, "model")
    app = graph.compile()
    call = {"name": "search", "args": {}, "id": "1"}
    for _ in range(20):
        given = [HumanMessage(SAID), AIMessage("", tool_calls=[call]), HumanMessage("go on")]
        asked: Any = {"messages": given}
        await app.ainvoke(asked)
    gc.collect()
    # The event loop may keep the newest context.
    assert sum(type(e) is HumanMessage and e.content == SAID for e in gc.get_objects()) < 10


@pytest.mark.parametrize("checked_at", ["model", "tools"])
async def test_a_task_of_tools_that_runs_again(checked_at: str, signals: Signals) -> None:
    """A node of tools that waits for a person runs again as a whole, and is charged once."""
    ran: list[str] = []
    tools = [recording("search", ran), recording("pause", ran, lambda: interrupt("Sure?"))]
    limits = [ToolCallLimit("search", run_limit=9), ToolCallLimit("pause", run_limit=9)]
    limits += [ToolCallLimit("calc", run_limit=9, exit_behavior="ask")] * (checked_at == "tools")
    scene = Scene(signals, asking("search", "pause"), limits, kind="graph", tools=tools, ran=ran)
    await scene.play()
    await scene.resume("yes")
    assert sorted(ran) == ["pause", "search", "search"]
    store = scene.quota.store
    assert (run_counts(store, "search"), run_counts(store, "pause")) == ([1], [1])
    assert scene.calls("allowed", "search") == 1


async def test_the_oldest_run_is_forgotten(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more runs than are remembered, those that began first are forgotten, with no harm."""
    monkeypatch.setattr("langchain_quota.agents.graph_limits._MAX_RUNS", 1)
    limit = ToolCallLimit("search", run_limit=1, thread_limit=2)
    given: Any = {"kind": "graph", "store": MemoryStore()}
    scene = Scene(signals, asking("search", "search"), [limit], **given)
    for thread in ("one", "two", "one", "two"):
        result = await scene.play(thread_id=thread)
        assert result["messages"][-1].text == "done"
    assert scene.ran == ["search"] * 4
    assert run_counts(scene.quota.store, "search") == [1] * 4
