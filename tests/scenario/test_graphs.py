"""Graphs without create_agent, held to limits by a limited model and limited tools."""

import asyncio
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.constants import END, START
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from langgraph.types import Command, Send, interrupt

from langchain_quota import (
    ConcurrencyLimit,
    GraphQuota,
    MemoryStore,
    ModelCallLimit,
    Quota,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.errors import QuotaStoreError, QuotaWarning, ToolCallLimitExceededError
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.loops import looped, shapes
from tests.scene import (
    CONFIG,
    Scene,
    Weather,
    asking,
    both_forms,
    check_history,
    delegate,
    model_node,
    recording,
)
from tests.stores import FickleStore, UnsureStore, counts, run_counts
from tests.telemetry import Signals, telling
from tests.tokens import answer

HELLO: Any = {"messages": [("user", "hi")]}
TWO_OF_THREE = ToolCallLimit("search", run_limit=2, thread_limit=3)
ENDED = "Model call limits exceeded: run limit (2/2)"
SEARCH_ENDED = "'search' tool call limit reached: run limit exceeded (2/1 calls)."
MARK = "langchain_quota"
SAID = "What was said in this test alone."


def forged(*names: str) -> AIMessage:
    """A message of a model without limits, whose mark says that all its calls may run."""
    calls: Any = [{"name": name, "args": {}, "id": f"{name}_{n}"} for n, name in enumerate(names)]
    mark = {MARK: {"blocked": {}, "written": 1, "checked": True, "run": "any"}}
    return AIMessage("", tool_calls=calls, response_metadata=mark)


def graph_of(*steps: Any, **options: Any) -> Any:
    """A graph of nodes that run one after the other; those of a tuple run side by side."""
    graph: Any = StateGraph(MessagesState)
    before = [START]
    for step in steps:
        nodes = step if isinstance(step, tuple) else (step,)
        names = [f"node{len(graph.nodes) + index}" for index in range(len(nodes))]
        for name, node in zip(names, nodes, strict=True):
            graph.add_node(name, node)
            for earlier in before:
                graph.add_edge(earlier, name)
        before = names
    return graph.compile(**options)


class Reviewed(MessagesState):
    reviews: int


def by_a_review(graph: Any) -> None:
    """A loop back to the model, nine times."""

    def review(state: Reviewed) -> dict[str, Any]:
        return {"messages": [("user", "Better!")], "reviews": state.get("reviews", 0) + 1}

    graph.add_node("review", review).add_edge("review", "model")
    graph.add_conditional_edges(
        "model", lambda state: END if state.get("reviews") == 9 else "review"
    )


def by_sends(graph: Any) -> None:
    """29 model calls at the same time: side by side, they do not lead an ended run back."""
    graph.add_node("many", lambda _: {}).add_edge(START, "many")
    graph.add_conditional_edges("many", lambda state: [Send("model", state)] * 29, ["model"])


@both_forms
@pytest.mark.parametrize("way", [by_a_review, by_sends])
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
    # A run that has ended ends again silently; parallel calls are all refused.
    assert scene.calls("blocked") == (28 if way is by_sends else 1)


@both_forms
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("mark", ["none", "forged", "of a wrong type", "of a limited model"])
async def test_nodes_of_tools(mark: str, nodes: int, form: Any, signals: Signals) -> None:
    """They check calls that no limited model made, whatever their mark; other calls run once."""
    ran, store, limits = list[str](), MemoryStore(), [ToolCallLimit("search", run_limit=2)]
    quota = GraphQuota(limits, store=store, telemetry=signals.telemetry)
    message = forged("search", "search", "search")
    if mark == "none":
        message.response_metadata.clear()
    elif mark == "of a wrong type":
        message.response_metadata[MARK] = {"blocked": ["search_0"]}
    model = model_node(quota.model(ScriptedChatModel(script=lambda _: message)))
    steps = [model if mark == "of a limited model" else lambda _: {"messages": message}]
    graph = graph_of(*steps, tuple(quota.tools([recording("search", ran)]) for _ in range(nodes)))
    result = graph.invoke(HELLO, CONFIG) if form == "sync" else await graph.ainvoke(HELLO, CONFIG)
    assert len(ran) == 2
    if nodes == 1:
        check_history(result["messages"])
    assert run_counts(store, "search") == [2]


@pytest.mark.parametrize("exit_behavior", ["end", "error"])
async def test_exits_of_tools_alone(exit_behavior: Any, signals: Signals) -> None:
    """A limit that ends a run at its tools ends it for the model; one that raises does so there."""
    model, tools = ScriptedChatModel(script=lambda _: ["search"]), [recording("search", [])]
    limits = [ToolCallLimit(run_limit=1, exit_behavior=exit_behavior)]
    quota = GraphQuota(limits, telemetry=signals.telemetry)
    unlimited = {"messages": [forged("search", "search")]}
    graph = graph_of(lambda _: unlimited, quota.tools(tools), model_node(quota.model(model, tools)))
    if exit_behavior == "error":
        with pytest.raises(ToolCallLimitExceededError):
            await graph.ainvoke(HELLO)
    else:
        result = await graph.ainvoke(HELLO)
        check_history(result["messages"])
        ending = "Tool call limit reached: run limit exceeded (2/1 calls)."
        assert result["messages"][-1].text == ending
    assert model.calls == ()


@both_forms
@pytest.mark.parametrize("shape", ["graph", "react"])
@pytest.mark.parametrize("outage", [False, True])
@pytest.mark.parametrize(("asked", "tampered"), [(3, False), (3, True), (2, False), (2, True)])
async def test_a_resume_in_another_process(
    *, asked: int, tampered: bool, outage: bool, shape: Any, form: Any, signals: Signals
) -> None:
    """Between model and tools another process goes on: what was refused there does not run here.

    The store may hear of it late. If the mark hides what was refused, calls are checked again.
    """
    store, saver = FickleStore(MemoryStore()), InMemorySaver()

    def watch(decision: Any) -> None:
        store.down = outage and decision.call.kind == "tool"

    given: Any = {"kind": shape, "form": form, "store": store, "checkpointer": saver}
    limits: list[Limit] = [ToolCallLimit("search", run_limit=2), ModelCallLimit(run_limit=2)]
    limits += [ConcurrencyLimit("search", max_concurrency=2)] * (tampered and asked == 2)
    here: Any = {"interrupt_before": ["tools"], "on_decision": watch, **given}
    first = Scene(signals, [["search"] * asked] * 2, limits, **here)
    await first.play()
    message, store.down = first.state()["messages"][-1], False
    await first.play(thread_id="another")
    store.down = False
    assert (MARK in message.response_metadata) == (asked == 3 or tampered)
    if tampered:
        message.response_metadata[MARK] = {"blocked": {}}
        node = "model" if shape == "graph" else "agent"
        first.agent.update_state(CONFIG, {"messages": [message]}, as_node=node)
    second = Scene(signals, [["search"], "done"], limits, **given)
    result = await second.go_on()
    assert (first.ran, second.ran) == ([], ["search"] * 2 * (not tampered or asked == 2))
    assert (len(second.model.calls), result["messages"][-1].text) == (1, ENDED)
    check_history(result["messages"])
    assert run_counts(store, "search") == [2, 2]


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_remark_before_the_tools(elsewhere: Any, signals: Signals) -> None:
    """Behind a message of another node, too, calls are checked once, also if ids come again."""
    store, saver, ran = MemoryStore(), InMemorySaver(), list[str]()
    limit, tools = ToolCallLimit("search", thread_limit=2), [recording("search", ran)]

    def remark(_: MessagesState) -> Any:
        return {"messages": [HumanMessage(interrupt("Go on?"))]}

    def worker() -> Any:
        limits = GraphQuota([limit], store=store, telemetry=signals.telemetry)
        scripted = ScriptedChatModel(script=lambda _: forged("search"))
        model, node = model_node(limits.model(scripted, tools)), limits.tools(tools)
        return graph_of(model, node, remark, model, remark, node, checkpointer=saver)

    first = worker()
    await first.ainvoke(HELLO, CONFIG)
    for one in (worker() if elsewhere else first, first):
        await one.ainvoke(Command(resume="yes"), CONFIG)
    assert (ran, counts(store)["search:thread:thread-1"]) == (["search"] * 2, 2)


@pytest.mark.parametrize(("most", "found"), [(3, Weather(degrees=20)), (2, None)])
async def test_structured_output(most: int, found: Any, signals: Signals) -> None:
    """Its call counts; the tool that gives the answer its form does not, and a refusal is None."""
    script = [["search"], "mild", [("Weather", {"degrees": 20})]]
    limits: list[Limit] = [ModelCallLimit(run_limit=most), ToolCallLimit(run_limit=1)]
    given: Any = {"kind": "react", "response_format": Weather}
    scene = await Scene(signals, script, limits, **given).played()
    assert scene.result["structured_response"] == found
    assert len(scene.model.calls) == most
    assert scene.calls("blocked", "Weather") == 0


class AsyncModel(ScriptedChatModel):
    """A model with an async form of its own."""

    async def _agenerate(self, *given: Any, **more: Any) -> Any:
        return self._generate(*given, **more)


async def test_an_async_graph_needs_no_threads(signals: Signals) -> None:
    """All that checks runs on the event loop."""
    limits: list[Limit] = [TWO_OF_THREE, ModelCallLimit(run_limit=2)]
    ran, quota = list[str](), GraphQuota(limits, store=MemoryStore(), telemetry=signals.telemetry)
    model = model_node(quota.model(AsyncModel(script=[["search"] * 3])))
    executor = ThreadPoolExecutor()
    executor.shutdown()
    asyncio.get_running_loop().set_default_executor(executor)
    await graph_of(model, quota.tools([recording("search", ran)])).ainvoke(HELLO, CONFIG)
    assert ran == ["search"] * 2


async def test_names(signals: Signals) -> None:
    """A name is the agent's name in telemetry; a graph in a tool has runs of its own."""
    given: Any = {"kind": "graph", "checkpointer": None}
    script, once = [["search"] * 2, "done"] * 2, [ToolCallLimit(run_limit=1)]
    inner = Scene(signals, script, once, name="inner", **given)
    given |= {"tools": [delegate(inner.agent)], "name": "outer"}
    script = [["delegate"], ["delegate"], "done"]
    scene = await Scene(signals, script, [ToolCallLimit(run_limit=2)], **given).played()
    found = [(each.call.agent, str(each.outcome)) for each in scene.decisions if each.call.tool]
    assert found == [("outer", "allowed"), ("inner", "allowed"), ("inner", "blocked")] * 2


def test_mistakes(signals: Signals) -> None:
    """Each says what to do: tools without limits, a call outside of a run, a bound model, no store.

    A blocked call would get no answer of such tools, and a thread limit would end with the process.
    """
    quota = GraphQuota([ToolCallLimit(run_limit=0)], telemetry=signals.telemetry)
    app = graph_of(model_node(quota.model(ScriptedChatModel(script=[["search"]]))))
    with pytest.raises(RuntimeError, match=r"limits\.tools"):
        app.invoke(HELLO)
    model = ScriptedChatModel(script=["hi"])
    with pytest.raises(RuntimeError, match="call it in a node, a task or an entrypoint"):
        quota.model(model).invoke("hi")
    wrong: list[Any] = [model.bind_tools([]), model.with_fallbacks([model]), 3]
    for each in wrong:
        with pytest.raises(TypeError, match=r"without tools bound.*with_fallbacks"):
            quota.model(each)
    with pytest.warns(QuotaWarning, match="ends with this process"):
        GraphQuota([TWO_OF_THREE], telemetry=signals.telemetry)
    GraphQuota([TWO_OF_THREE], store=MemoryStore(), telemetry=signals.telemetry)


async def test_a_model_without_limits_is_unchecked() -> None:
    """Its calls are counted as unchecked, though the tools check the calls that it makes."""
    signals = telling(count_unchecked_calls=True)
    quota = GraphQuota([ToolCallLimit(run_limit=5)], telemetry=signals.telemetry)
    models = [ScriptedChatModel(script=[["search"], "done"]) for _ in "12"]
    for model in (models[0], quota.model(models[1])):
        graph: Any = create_react_agent(model, quota.tools([recording("search", [])]))
        await graph.ainvoke(HELLO)
        assert signals.samples("langchain_quota_unchecked_calls_total") == {("unnamed", "model"): 2}


async def test_a_node_that_is_entered_again(signals: Signals) -> None:
    """A run is that of the outer graph, as under a supervisor, however often it enters the node."""
    left, limit = iter(range(3)), ModelCallLimit(run_limit=2)
    inner = Scene(signals, lambda _: "done", [limit], kind="graph", checkpointer=None)
    graph: Any = StateGraph(MessagesState)
    graph.add_node("worker", inner.agent).add_edge(START, "worker")
    graph.add_conditional_edges("worker", lambda _: END if next(left, None) is None else "worker")
    await graph.compile().ainvoke(HELLO, CONFIG)
    assert len(inner.model.calls) == 2


def said(kind: str, **more: Any) -> dict[str, Any]:
    """What a person answers."""
    return {"decisions": [{"type": kind, **more}]}


APPROVE, NO_MORE = said("approve"), said("approve", amount=0)
ASKS = ToolCallLimit("search", run_limit=1, exit_behavior="ask")
MODEL_ASKS = ModelCallLimit(run_limit=1, exit_behavior="ask")
RESERVES = TokenLimit(run_limit=10**6, reserve=9)
ANSWERS: list[Any] = [Command(resume=each) for each in (APPROVE, APPROVE, "yes")]


@both_forms
@shapes
@pytest.mark.parametrize(
    ("limit", "given", "expected"),
    [
        (MODEL_ASKS, APPROVE, (2, 1, "done")),
        (MODEL_ASKS, NO_MORE, (1, 1, ENDED.replace("2", "1"))),
        (MODEL_ASKS, said("reject", message="No."), (1, 1, "No.")),
        (ASKS, APPROVE, (2, 2, "done")),
        (ASKS, NO_MORE, (2, 1, "done")),
        (ASKS, said("reject"), (1, 0, SEARCH_ENDED)),
    ],
)
async def test_a_question(
    *, limit: Limit, given: Any, expected: Any, shape: str, form: Any, signals: Signals
) -> None:
    """A person is asked before a model call that is refused, or behind the model for its tools.

    What they say is done. `create_react_agent` runs each call by itself: there, those that are
    refused ask.
    """
    calls, (made, ran, last) = 1 if limit is MODEL_ASKS else 2, expected
    at_once = int(limit is MODEL_ASKS or shape == "react")
    scene = await looped(shape, signals, [["search"] * calls, "done"], [limit], form=form).played()
    assert (len(scene.model.calls), len(scene.ran)) == (1, at_once)
    result = await scene.resume(given)
    assert (len(scene.model.calls), len(scene.ran)) == (made, max(ran, at_once))
    assert result["messages"][-1].text == last
    check_history(result["messages"])


MOST_TWO: list[Limit] = [ToolCallLimit("search", run_limit=2), ModelCallLimit(run_limit=2)]


@pytest.mark.parametrize(
    ("kind", "limits", "elsewhere", "requests"),
    [
        ("graph", MOST_TWO, False, 1),
        ("graph", MOST_TWO, True, 2),
        ("graph", [ASKS, MOST_TWO[1]], True, 7),
        ("react", [ASKS, MOST_TWO[1]], True, 7),
        ("graph", [MODEL_ASKS, MOST_TWO[0]], False, 5),
        ("graph", [MODEL_ASKS, MOST_TWO[0]], True, 4),
        ("quota", [ASKS, MOST_TWO[1]], True, 3),
        ("quota", [MODEL_ASKS, MOST_TWO[0]], True, 3),
    ],
)
async def test_a_lost_reply_at_a_resume(
    *, kind: Any, limits: Any, elsewhere: bool, requests: int, signals: Signals
) -> None:
    """Whatever replies are lost, a run that is resumed, again if it fails, makes its calls once."""
    store, asks, ran = UnsureStore(), limits is not MOST_TWO, list[str]()
    given: Any = {"kind": kind, "store": store, "checkpointer": InMemorySaver(), "ran": ran}
    given["interrupt_before"] = [] if asks else ["tools"]
    # In a graph, the first request is for the name of the run.
    for runs, lost in enumerate(range(kind == "quota", requests + 1), 1):
        given["thread_id"] = f"thread-{lost}"
        begun, other = (Scene(signals, asking(*["search"] * 2), limits, **given) for _ in "12")
        store.lost = int(lost == 0)
        await begun.play()
        store.lost, scene = lost, other if elsewhere else begun
        errors = [QuotaStoreError] if asks or lost == 0 else []  # the name is asked for twice
        for store.down in (lost == 0, False):
            with suppress(*errors):
                await (scene.resume(APPROVE) if asks else scene.go_on())
        assert (store.lost <= 0, scene.last_text(), len(ran)) == (True, "done", 2 * runs)
        for key, tool in (("search", "search"), ("model", None)):
            assert sum(run_counts(store, key)) == scene.calls("allowed", tool) == 2 * runs


@both_forms
@pytest.mark.parametrize("fits", [False, True], ids=["needed", "not needed any more"])
async def test_a_question_beside_that_of_a_tool(fits: Any, form: Any, signals: Signals) -> None:
    """The answer to a limit's question is never one to a tool's own, in whichever process."""
    heard, store = list[Any](), MemoryStore()
    limit = ToolCallLimit("pay", quotas=[Quota(1, per="global")], exit_behavior="ask")
    pay = recording("pay", [], lambda: heard.append(interrupt("Sure?")))
    given: Any = {"kind": "graph", "form": form, "store": store, "checkpointer": InMemorySaver()}

    def worker() -> Scene:
        return Scene(signals, asking("pay", "pay"), [limit], tools=[pay], **given)

    await worker().play()
    if fits:
        store.grant("pay:global:", 1, window=None)
    await worker().resume(APPROVE)
    for _ in range(2):
        assert APPROVE not in heard
        result = await worker().resume("yes")
    assert result["messages"][-1].text == "done"
    assert set(heard) == {"yes"}
    assert counts(store)["pay:global:"] == 2


@pytest.mark.parametrize(
    ("limits", "answers", "made"),
    [
        ([ModelCallLimit(run_limit=3)], [None] * 3, [3, 3, 3]),
        ([MODEL_ASKS], ANSWERS, [2, 3, 3]),
        ([replace(MODEL_ASKS, grant=9), RESERVES], ANSWERS[1:], [3, 5]),
    ],
)
def test_a_node_that_makes_several_calls(
    limits: Sequence[Limit], answers: Any, made: list[int], signals: Signals
) -> None:
    """Each is a call of its own, where the node runs again, too; an approval is used for one.

    An answer to the node's own question is not taken for one to the limit's. The limited model
    itself streams in one piece. Of its tools, too, each call is checked, even if no id tells it
    from the one before; what runs again is charged once.
    """
    model, tool = ScriptedChatModel(script=lambda _: answer(2)), recording("search", [])
    quota = GraphQuota([*limits, TWO_OF_THREE], store=MemoryStore(), telemetry=signals.telemetry)
    limited, tools = quota.model(model), quota.tools([tool])
    call = {"name": "search", "args": {}, "id": "1", "type": "tool_call"}

    def node(state: MessagesState) -> Any:
        answers = [tools.invoke([call])["messages"][0] for _ in "123"]
        assert [answer.status for answer in answers] == ["success", "success", "error"]
        limited.invoke([*state["messages"], ("user", "One")])
        [said] = limited.stream([*state["messages"], ("user", "Two")])
        interrupt("Sure?")
        return {"messages": said}

    app = graph_of(node, checkpointer=InMemorySaver())
    result = app.invoke(HELLO, CONFIG)
    for given, calls in zip(answers, made, strict=True):
        result = app.invoke(given, CONFIG)
        assert len(model.calls) == calls
    assert ("__interrupt__" in result) == (answers[-1] is None)
    assert run_counts(quota.store, "search") == [2]


async def test_a_node_that_calls_the_tools_of_several_messages(signals: Signals) -> None:
    """Of each message, even with the same ids, a call that gets no slot is refunded."""
    ran, limit = list[str](), ToolCallLimit("search", quotas=[Quota(9, per="global")])
    quota = GraphQuota([limit, ConcurrencyLimit(max_concurrency=1, wait=0)], store=MemoryStore())
    tools = quota.tools([recording("search", ran, lambda: asyncio.sleep(0.01))])
    said = [forged("search", "search").model_copy(update={"id": each}) for each in "abc"]
    model = quota.model(ScriptedChatModel(script=[*said]))

    async def node(_: MessagesState) -> Any:
        messages = [await model.ainvoke("hi") for _ in said]
        return {"messages": [(await tools.ainvoke([each]))[1] for each in messages]}

    _, *refused = (await graph_of(node).ainvoke(HELLO))["messages"]
    assert [each.status for each in refused] == ["error"] * 3
    assert (ran, counts(quota.store)["search:global:"]) == (["search"] * 3, 3)


def test_a_question_needs_a_checkpointer_and_limited_tools(signals: Signals) -> None:
    """A graph that could not wait, or whose tools nothing checks, raises before a call is made."""
    ran: list[str] = []
    quota, tools = GraphQuota([ASKS], telemetry=signals.telemetry), [recording("search", ran)]
    with pytest.raises(RuntimeError, match="needs a checkpointer"):
        graph_of(quota.tools(tools)).invoke({"messages": [forged("search")]})
    quota = GraphQuota([ASKS], telemetry=signals.telemetry)
    model = quota.model(ScriptedChatModel(script=lambda _: ["search"]))
    agent: Any = create_react_agent(model, tools, checkpointer=InMemorySaver())
    with pytest.raises(RuntimeError, match=r"limits\.tools"):
        agent.invoke(HELLO, CONFIG)
    assert ran == []


async def test_what_has_been_said_is_not_kept(signals: Signals) -> None:
    """A graph's limits keep nothing of the history of a run that has ended, repaired or not."""
    limits = GraphQuota([ModelCallLimit(run_limit=5)], telemetry=signals.telemetry)
    model = limits.model(ScriptedChatModel(script=lambda _: "done", keep_calls=0))
    app = graph_of(model_node(model))
    for _ in range(20):
        open_call = AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}])
        await app.ainvoke({"messages": [HumanMessage(SAID), open_call, HumanMessage("go on")]})
    gc.collect()
    # The event loop may keep the newest context.
    assert sum(type(e) is HumanMessage and e.content == SAID for e in gc.get_objects()) < 10


@pytest.mark.parametrize(
    ("kind", "asks"), [("graph", False), ("graph", True), ("react", False)], ids=str
)
async def test_a_task_of_tools_that_runs_again(*, kind: Any, asks: bool, signals: Signals) -> None:
    """A node of tools that waits for a person runs again as a whole, and is charged once.

    Its calls are checked behind the model, or at the tools if a limit asks. `create_react_agent`
    runs each call by itself: there, only the one that waits runs again.
    """
    ran: list[str] = []
    tools = [recording("search", ran), recording("pause", ran, lambda: interrupt("Sure?"))]
    limits = [ToolCallLimit("search", run_limit=9), ToolCallLimit("pause", run_limit=9)]
    limits += [ToolCallLimit("calc", run_limit=9, exit_behavior="ask")] * asks
    scene = Scene(signals, asking("search", "pause"), limits, kind=kind, tools=tools, ran=ran)
    await scene.play()
    await scene.resume("yes")
    assert sorted(ran) == ["pause", *["search"] * (2 if kind == "graph" else 1)]
    store = scene.quota.store
    assert (run_counts(store, "search"), run_counts(store, "pause")) == ([1], [1])
    assert scene.calls("allowed", "search") == 1


async def test_the_oldest_run_is_forgotten(signals: Signals, monkeypatch: Any) -> None:
    """Of more runs than are remembered, those that began first are forgotten, with no harm."""
    monkeypatch.setattr("langchain_quota.agents.graph_limits._MAX_RUNS", 1)
    limit = ToolCallLimit("search", run_limit=1, thread_limit=2)
    scene = Scene(signals, asking("search", "search"), [limit], kind="graph")
    for thread in ("one", "two", "one", "two"):
        result = await scene.play(thread_id=thread)
        assert result["messages"][-1].text == "done"
    assert scene.ran == ["search"] * 4
    assert run_counts(scene.quota.store, "search") == [1] * 4
