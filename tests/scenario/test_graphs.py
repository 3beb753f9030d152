"""A loop of model and tools that is written by hand, held to limits by GraphQuota.

`property/test_loops.py` plays random loops of every shape. Here is what it does not draw.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.constants import END, START
from langgraph.func import entrypoint, task
from langgraph.graph import MessagesState, StateGraph, add_messages
from langgraph.managed import RemainingSteps
from langgraph.prebuilt import InjectedState, ToolNode
from langgraph.runtime import Runtime
from langgraph.types import interrupt
from pydantic import BaseModel

from langchain_quota import (
    CostLimit,
    GraphQuota,
    MemoryStore,
    ModelCallLimit,
    QuotaState,
    TokenLimit,
    ToolCallLimit,
    usage_bound,
)
from langchain_quota.errors import UnknownPriceError
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.loops import SEEN, SHAPES, UNSEEN, looped, shapes
from tests.scene import CONFIG, Form, Scene, both_forms, check_history, delegate, recording
from tests.stores import counts
from tests.telemetry import Signals
from tests.tokens import MONEY, THREAD, answer, spent

pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")

HELLO: Any = {"messages": [("user", "hi")]}
TWO_OF_THREE = ToolCallLimit("search", run_limit=2, thread_limit=3)


class Noted(TypedDict):
    """A state of the user's own."""

    messages: Annotated[list[AnyMessage], add_messages]
    topic: str


class Notes(BaseModel):
    """A state of the user's own, in a class."""

    messages: Annotated[list[AnyMessage], add_messages]
    topic: str = ""


def thrice(messages: list[AnyMessage]) -> Any:
    """Three searches a turn, then an answer."""
    return "done" if messages[-1].type == "tool" else ["search"] * 3


@pytest.mark.parametrize("state", [Noted, Notes])
async def test_a_state_of_the_users_own(state: Any, signals: Signals) -> None:
    """Limits read the graph's state, tools get it in its class, and its output has no count."""
    seen: list[Any] = []

    def look(given: Annotated[Any, InjectedState]) -> str:
        """Look."""
        seen.append(given)
        return "looked"

    def most(given: Any, runtime: Any) -> int:
        return 1 if given["topic"] == "small" else 9

    limits = [ToolCallLimit("look", run_limit=most)]
    tools = [StructuredTool.from_function(look)]
    script: Any = [["look", "look"], "done"]
    scene = Scene(signals, script, limits, tools=tools, state=state, kind="graph")
    result = await scene.invoke({**HELLO, "topic": "small"})

    (given,) = seen
    assert isinstance(given, dict if state is Noted else state)
    assert dict(given if state is Noted else vars(given))["topic"] == "small"
    assert {"messages", "topic"} == {*result}


async def test_a_tool_node_of_the_users_own(signals: Signals) -> None:
    """A `ToolNode` with settings of its own runs the admitted calls; its tools are offered."""

    def fail() -> None:
        raise ValueError("broken")

    node = ToolNode([recording("search", [], fail)], handle_tool_errors="It broke.")
    scene = Scene(signals, thrice, [TWO_OF_THREE], loop={"tools": node}, kind="graph")
    result = await scene.play()
    contents = [each.content for each in result["messages"] if each.type == "tool"]
    assert contents.count("It broke.") == 2
    assert [call.tools for call in scene.model.calls] == [("search",)] * 2


@pytest.mark.parametrize(
    ("calls", "ran", "requests", "state"),
    [
        (["fetch", "search"], ["fetch", "search"], 2, MessagesState),
        (["fetch"] * 3, ["fetch"] * 2, 1, MessagesState),
        (["fetch"] * 3, ["fetch"] * 2, 1, Notes),
    ],
)
async def test_a_tool_that_returns_directly(
    calls: list[str], ran: list[str], requests: int, state: Any, signals: Signals
) -> None:
    """Its answer ends the loop if all calls of the batch are of such tools, as in create_agent."""
    names: list[str] = []
    tools = [recording("fetch", names), recording("search", names)]
    tools[0].return_direct = True
    limits = [ToolCallLimit("fetch", run_limit=2)]
    given: dict[str, Any] = {"tools": tools, "ran": names, "state": state, "kind": "graph"}
    scene = Scene(signals, [calls, "done"], limits, **given)
    result = await scene.play()
    assert (sorted(scene.ran), len(scene.model.calls)) == (ran, requests)
    check_history(result["messages"])


async def test_streaming(signals: Signals) -> None:
    """Updates come from the nodes by their names, and the model's words one by one."""
    script: Any = [["search"], "All is done.", "All is done."]
    scene = Scene(signals, script, [TWO_OF_THREE], kind="graph")
    names = [name for update in await scene.updates(HELLO) for name in update]
    loop = ["quota.before_model", "model", "quota.after_model"]
    assert names == ["quota.before_agent", *loop, "tools", *loop]
    stream = scene.agent.astream(HELLO, CONFIG, stream_mode="messages")
    words = [chunk.content async for chunk, _ in stream if chunk.content]
    assert words == ["All", " is", " done."]


def critic(scene: Scene) -> dict[str, Any]:
    """The loop is between nodes of the graph, which enter it three times in each run."""

    def again(state: MessagesState) -> str:
        return "ask again" if sum(each.type == "human" for each in state["messages"]) % 3 else END

    scene.graph.add_node("ask again", lambda state: {"messages": [HumanMessage("again")]})
    scene.graph.add_node("judge", lambda state: {})
    scene.graph.add_conditional_edges("judge", again, ["ask again", END])
    scene.graph.add_edge("ask again", "quota.before_agent")
    return {"end": "judge"}


async def test_a_loop_that_is_entered_again(signals: Signals) -> None:
    """A run is one invocation of the graph with its resumes, however often it enters the loop."""
    script: Any = [["search", "ask"], "done", *[["search"] * 3, "done"] * 5]
    ran: list[str] = []
    tools = [recording("search", ran), recording("ask", [], lambda: interrupt("Sure?"))]
    limits = [ToolCallLimit("search", run_limit=4)]
    scene = Scene(signals, script, limits, loop=critic, kind="graph", tools=tools)

    await scene.play()
    await scene.resume("yes")
    assert len(ran) == 4
    await scene.play()
    assert len(ran) == 8


async def test_a_run_that_waits_before_the_loop(signals: Signals) -> None:
    """A run whose resume is what enters the loop has a budget of its own."""

    def loop(scene: Scene) -> dict[str, Any]:
        scene.graph.add_node("confirm", lambda state: interrupt("Sure?") and None)
        scene.graph.add_edge(START, "confirm")
        return {"start": "confirm"}

    scene = Scene(signals, lambda _: "done", [ModelCallLimit(run_limit=1)], loop=loop, kind="graph")
    for turn in (1, 2, 3):
        await scene.play()
        result = await scene.resume("yes")
        assert (len(scene.model.calls), result["messages"][-1].content) == (turn, "done")


async def test_an_async_graph_needs_no_threads(signals: Signals) -> None:
    """All that judges runs on the event loop."""

    async def node(state: MessagesState) -> dict[str, Any]:
        is_new = state["messages"][-1].type == "human"
        return {"messages": [answer(5, *["search"][: int(is_new)])]}

    limits: list[Limit] = [TWO_OF_THREE, ModelCallLimit(run_limit=2)]
    scene = Scene(signals, [], limits, loop={"model": node}, kind="graph")
    # It takes no work.
    executor = ThreadPoolExecutor()
    executor.shutdown()
    asyncio.get_running_loop().set_default_executor(executor)
    await scene.play()
    assert scene.ran == ["search"]


async def test_two_loops_in_a_graph(signals: Signals) -> None:
    """Each has its name in telemetry and its prompt; both draw on the budget of the run."""
    ran, models = list[str](), list[ScriptedChatModel]()
    graph = StateGraph(MessagesState)
    quota = GraphQuota([ToolCallLimit("search", run_limit=4)], telemetry=signals.telemetry)
    graph.add_node("hand over", lambda state: {"messages": [HumanMessage("go on")]})
    for name, edge in (("planner", {"end": "hand over"}), ("writer", {"start": "hand over"})):
        model = ScriptedChatModel(script=thrice)
        tools = [recording("search", ran)]
        quota.add_to(graph, model=model, tools=tools, prompt="Be short.", name=name, **edge)
        models.append(model)
    with captured_decisions() as decisions:
        result = await graph.compile().ainvoke(HELLO)
    admitted = [each.call.agent for each in decisions if each.outcome == "allowed"]
    assert (admitted.count("planner"), admitted.count("writer")) == (3 + 2, 1 + 2)
    assert len(ran) == 4
    assert {each.name for each in result["messages"] if each.type == "ai"} == {"planner", "writer"}
    assert {call.messages[0].content for each in models for call in each.calls} == {"Be short."}
    check_history(result["messages"])


@pytest.mark.parametrize(("form", "name"), [("sync", None), ("async", "planner")])
async def test_reset(form: Form, name: str | None, signals: Signals) -> None:
    """A thread's use is set back to nothing, also of a loop with a name."""
    limit = ToolCallLimit("search", thread_limit=3)
    scene = Scene(signals, thrice, [limit], form=form, loop={"name": name}, kind="graph")
    await scene.play()
    await scene.play()
    assert len(scene.ran) == 3
    await scene.reset()
    assert scene.agent.get_state(CONFIG).next == ()
    await scene.play()
    assert len(scene.ran) == 6


async def test_a_loop_inside_a_tool(signals: Signals) -> None:
    """A name tells its calls from those of the loop around it."""
    limits = [ToolCallLimit(run_limit=1)]
    given: dict[str, Any] = {"kind": "graph", "checkpointer": None, "loop": {"name": "inner"}}
    inner = Scene(signals, [["search", "search"], "done"], limits, **given)

    given |= {"tools": [delegate(inner.agent)], "loop": {"name": "outer"}}
    with captured_decisions() as decisions:
        await Scene(signals, [["delegate"], "done"], limits, **given).play()

    found = [(each.call.agent, str(each.outcome)) for each in decisions if each.call.tool]
    assert found == [("outer", "allowed"), ("inner", "allowed"), ("inner", "blocked")]


async def test_a_loop_that_runs_what_was_refused(signals: Signals) -> None:
    """A loop that does not ask for the open calls, but runs all, is an error at its next step."""
    quota = GraphQuota([ToolCallLimit(run_limit=1)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=[["search", "search"], "done"])
    before, after = task(quota.abefore_model), task(quota.aafter_model)

    @entrypoint()
    async def agent(new: Any) -> Any:
        state = await before(await quota.abegin({"messages": new}))
        answer = await model.ainvoke(state["messages"])
        state = await after({**state, "messages": [*state["messages"], answer]})
        ran = [
            ToolMessage("ran", tool_call_id=each["id"], name=each["name"])
            for each in answer.tool_calls
        ]
        return await before({**state, "messages": [*state["messages"], *ran]})

    with pytest.raises(RuntimeError, match="the tool 'search' ran"):
        await agent.ainvoke([HumanMessage("hi")])


def test_outside_of_a_graph(signals: Signals) -> None:
    """The methods work in a plain loop, too: the state is all that they need."""
    quota = GraphQuota([ToolCallLimit(run_limit=1)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=[["search", "search"], "done"])
    given = {"messages": [HumanMessage("hi")], "own": 3}
    state = quota.before_model(quota.begin(given))
    answer = quota.call_model(model, state, [recording("search", [])])
    state = quota.after_model({**state, "messages": [*state["messages"], answer]})
    assert (state["jump_to"], state["own"]) == ("tools", 3)
    assert len(quota.open_calls(state)) == 1
    assert given.keys() == {"messages", "own"}


async def test_a_functional_loop_asks(signals: Signals) -> None:
    """Several questions in one entrypoint are answered one by one, and nothing runs twice."""
    limits: list[Limit] = [
        ToolCallLimit("search", run_limit=1, exit_behavior="ask"),
        ModelCallLimit(run_limit=1, exit_behavior="ask"),
    ]
    scene = looped("functional", signals, [["search"] * 2, ["search"], "done"], limits)
    asked, result = [], await scene.play()
    while waiting := result.get("__interrupt__"):
        asked.append(waiting[0].value["action_requests"][0]["args"])
        result = await scene.resume({"decisions": [{"type": "approve"}]})
    assert asked == [{"tool:search": 1}, {"model": 1}] * 2
    assert (scene.ran, len(scene.model.calls)) == (["search"] * 3, 3)


FORMS = [(shape, "async") for shape in SHAPES] + [("own calls", "sync"), (UNSEEN[0], "sync")]


@pytest.mark.parametrize(("shape", "form"), FORMS)
async def test_a_loop_is_charged(shape: str, form: Form, signals: Signals) -> None:
    """However it is built, each call is charged once, though each step is another process's."""
    store, saver = MemoryStore(), InMemorySaver()

    def worker(*script: Any) -> Scene:
        limits = [TokenLimit(run_limit=100, thread_limit=202)]
        tools = [recording("ask", [], lambda: interrupt("Sure?"))]
        given: dict[str, Any] = {"form": form, "store": store, "checkpointer": saver}
        return looped(shape, signals, script, limits, tools=tools, **given)

    await worker(answer(60, "ask")).play()
    await worker(answer(45, "ask")).resume("yes")
    await (scene := worker()).resume("yes")
    assert spent(scene) == (105, 105)
    assert scene.last_text() == "Token limits exceeded: run limit (105/100 tokens)"

    await worker(answer(97)).play()
    assert spent(scene) == (202, 97)
    await (scene := worker()).play()
    assert spent(scene) == (202, 0)
    assert scene.last_text() == "Token limits exceeded: thread limit (202/202 tokens)"
    assert counts(store)[THREAD] == 202


@shapes
async def test_a_reserve_is_never_exceeded(signals: Signals, shape: str) -> None:
    """A call that could exceed the budget is not made; what is held for one is given back.

    A function says what a call can use, where the library sees its request and tools.
    """
    store, seen = MemoryStore(), list[int]()

    def reserve(request: Any) -> int:
        seen.append(len(request.tools))
        return 50

    limit = TokenLimit(thread_limit=100, reserve=reserve if shape in SEEN else 50)
    script = [answer(30, "search"), answer(21, "search"), answer(50)]
    scene = looped(shape, signals, script, [limit], store=store)

    with captured_decisions() as decisions:
        await scene.play()

    assert len(scene.model.calls) == 2
    assert seen == ([2] * 3 if shape in SEEN else [])
    assert counts(store)[THREAD] == 51
    assert scene.last_text().endswith("thread limit (51/100 tokens, the call may need 50)")
    assert [each.outcome for each in decisions if each.call.kind == "model"][-1] == "blocked"


async def test_what_nobody_sees_is_an_error(signals: Signals) -> None:
    """A function `reserve` needs the request: hooks alone are refused, a node's own call raises."""
    limit = TokenLimit(run_limit=100, reserve=usage_bound, name="mine")
    with pytest.raises(ValueError, match=r"limit 'mine' has a reserve .* react_hooks\(model"):
        looped("hooks alone", signals, [], [limit])

    scene = looped("own calls", signals, [answer(60, "search"), answer(1)], [limit])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"quota\.call_model"):
            await scene.play()
    assert spent(scene) == (60, 0)


@pytest.mark.parametrize("shape", ["own calls", *UNSEEN])
async def test_a_budget_on_trial_counts_each_call_once(signals: Signals, shape: str) -> None:
    """A call beyond a budget on trial is `would_block`, once."""
    script = [answer(60, "search"), answer(45, "search"), answer(7, "search"), answer(9)]
    scene = looped(shape, signals, script, [TokenLimit(run_limit=100, enforce=False)])

    await scene.play()

    assert spent(scene) == (121, 121)
    assert scene.metric("tokens", "allowed") == 2
    assert scene.metric("tokens", "would_block", scope="run") == 2


@pytest.mark.parametrize("shape", ["chat model", "own calls", "hooks alone"])
async def test_money(signals: Signals, shape: str) -> None:
    """Costs are charged by the prices given; a call without one is an error, before it if seen."""
    prices = {60: Decimal("0.0000001"), 40: Decimal("0.5")}
    script = [answer(60, "search"), answer(40, "search")]
    given: dict[str, Any] = {"prices": lambda used: prices.get(used.total_tokens, Decimal(0))}
    scene = looped(shape, signals, script, [CostLimit(run_limit="0.50")], **given)
    await scene.play()
    assert spent(scene, MONEY) == (500_001, 500_001)
    assert scene.last_text() == "Cost limits exceeded: run limit ($0.500001/$0.50)"

    given = {"prices": lambda _: None}
    scene = looped(shape, signals, [answer(9)], [CostLimit(run_limit=1)], **given)
    with pytest.raises(UnknownPriceError):
        await scene.play()
    assert len(scene.model.calls) == (1 if shape in UNSEEN else 0)


class Stepping(MessagesState):
    remaining_steps: RemainingSteps


@pytest.mark.parametrize(
    ("asks", "state"), [("class", Notes), ("class", MessagesState), ("managed", Stepping)]
)
async def test_a_node_of_the_users_own(signals: Signals, asks: str, state: Any) -> None:
    """The user's node gets the state that it asks for, and its calls are charged once."""

    def loop(scene: Scene) -> dict[str, Any]:
        def of_a_class(state: Notes) -> Any:
            return {"messages": [scene.model.invoke(state.messages)]}

        def managed(state: Stepping, config: RunnableConfig, runtime: Runtime[Any]) -> Any:
            assert runtime.execution_info is not None
            assert state["remaining_steps"] > 0
            return {"messages": scene.model.invoke(state["messages"], config)}

        return {"model": of_a_class if asks == "class" else managed}

    script = [answer(60, "search"), answer(45, "search")]
    # The functions of a limit see the graph's state, whatever the node asks for.
    limit = TokenLimit(run_limit=lambda state, _runtime: 100 if state["messages"] else 0)
    scene = Scene(signals, script, [limit], loop=loop, kind="graph", state=state)

    await scene.play()

    assert spent(scene) == (105, 105)
    assert len(scene.model.calls) == 2


@both_forms
async def test_a_node_that_calls_several_models(signals: Signals, form: Form) -> None:
    """What it calls by `call_model` and what it calls by itself is charged, each once.

    So is what it has used before it fails, when the graph goes on.
    """
    summary = ScriptedChatModel(script=[*map(answer, (3, 4, 5, 6))])
    chain: Any = RunnableLambda(summary.invoke)
    failures = [ConnectionError("no route to the provider")]

    def loop(scene: Scene) -> dict[str, Any]:
        def call(state: QuotaState[Any]) -> Any:
            summary.invoke("Sum it up!")
            chain.invoke("Sum it up!")
            scene.quota.call_model(scene.model, state)
            if failures:
                raise failures.pop()
            return {"messages": [scene.quota.call_model(scene.model, state)]}

        return {"model": call}

    store, limit = MemoryStore(), TokenLimit(thread_limit=1000, reserve=lambda _: 100)
    options: dict[str, Any] = {"kind": "graph", "form": form, "loop": loop, "store": store}
    scene = Scene(signals, [answer(60), answer(40), answer(20)], [limit], **options)

    with pytest.raises(ConnectionError):
        await scene.play()
    await scene.go_on()

    assert spent(scene) == (138, 138)
    assert counts(store)[THREAD] == 138


async def test_a_loop_in_a_node(signals: Signals) -> None:
    """A graph within the node has runs of its own; the thread is charged once for both."""

    def loop(scene: Scene) -> dict[str, Any]:
        model = ScriptedChatModel(script=[answer(60, "search"), answer(45, "search")])
        graph = scene.quota.add_to(StateGraph(MessagesState), model=model, tools=scene.tools)

        def call(state: QuotaState[Any]) -> Any:
            said = graph.compile().invoke(HELLO)["messages"][-1].text
            assert said == "Token limits exceeded: run limit (105/100 tokens)"
            return {"messages": [scene.model.invoke(state["messages"])]}

        return {"model": call}

    store, limit = MemoryStore(), TokenLimit(run_limit=100, thread_limit=1000, reserve=20)
    scene = Scene(signals, [answer(7)], [limit], loop=loop, kind="graph", store=store)

    await scene.play()

    assert spent(scene) == (112, 112)
    assert counts(store)[THREAD] == 112
