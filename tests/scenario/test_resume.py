"""Runs and threads that go on, where they stopped or under another middleware.

Tool calls left without an answer: the next run answers them, and takes back what never began.
"""

from itertools import permutations, product
from typing import Any

import langchain.agents.middleware as langchain_middleware
import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import AIMessage, HumanMessage, ToolCall, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from langchain_quota import ModelCallLimit, TokenLimit, ToolCallLimit, ToolCallLimitExceededError
from langchain_quota.limits import Limit
from tests import scene as scenes
from tests.scene import (
    ABANDONED,
    CONFIG,
    Kind,
    Order,
    Scene,
    check_history,
    either,
    model_limiter,
    recording,
    tool_limiter,
)
from tests.telemetry import HAS_INLINE, Signals


def for_ever(messages: Any) -> list[str]:
    return ["search"]


@pytest.mark.parametrize("stop", ["interrupt_before", "interrupt_after"])
async def test_runs_that_stop(stop: str, signals: Signals) -> None:
    """A run's limits hold over all its breakpoints; the next run has new ones."""
    models = model_limiter(signals, run_limit=5)
    tools = tool_limiter(signals, run_limit=2, exit_behavior="end")
    stops: Any = {stop: ["tools", "model"]}
    scene = Scene(signals, for_ever, [tools, models], **stops)
    for run in (1, 2):
        await scene.play()
        while scene.agent.get_state(CONFIG).next:
            await scene.go_on()
        assert scene.ran == ["search"] * 2 * run
        assert len(scene.model.calls) == 3 * run
        scene.check()


async def test_a_run_that_begins_with_nothing(signals: Signals) -> None:
    """Without a message it is one run, too, for all middlewares of the agent."""
    limiters = [tool_limiter(signals, run_limit=9), model_limiter(signals, run_limit=9)]
    await Scene(signals, ["done"], limiters).invoke({"messages": []})
    assert signals.samples("langchain_quota_runs_total") == {("unnamed",): 1}


KINDS: list[Kind] = ["drop-in", "quota", *(["inline"] if HAS_INLINE else [])]  # type: ignore[list-item]


LANGCHAINS: list[Any] = [
    langchain_middleware.ModelCallLimitMiddleware[Any, Any](thread_limit=8),
    langchain_middleware.ToolCallLimitMiddleware[Any, Any](tool_name="search", thread_limit=3),
    langchain_middleware.ToolCallLimitMiddleware[Any, Any](thread_limit=5),
]
SWAPS = [*permutations(KINDS, 2), *product(["langchain"], KINDS)]


@pytest.mark.parametrize("kinds", SWAPS, ids="-".join)
async def test_swapping_on_a_running_thread(kinds: tuple[Any, Kind], signals: Signals) -> None:
    """A thread goes on with its counts, under LangChain's keys, when another kind takes over."""
    limits: list[Limit] = [
        ModelCallLimit(thread_limit=8),
        ToolCallLimit("search", thread_limit=3),
        ToolCallLimit(thread_limit=5),
    ]
    ran = list[str]()
    options: dict[str, Any] = {"ran": ran, "checkpointer": InMemorySaver()}
    begun: Any = {"items": limits, "kind": kinds[0]} if kinds[0] in KINDS else {"items": LANGCHAINS}
    await Scene(signals, [["search", "calc"], "done"], **begun, **options).play()
    script = [["search"] * 3, ["calc", "calc"], "done"]
    second = await Scene(signals, script, limits, kind=kinds[1], **options).played()
    # Of three more searches two fit under search's 3, and then one calc under the 5 of all.
    assert sorted(ran) == ["calc", "calc", "search", "search", "search"]
    state = second.state()
    assert state["thread_tool_call_count"] == {"__all__": 5, "search": 3}
    assert state["thread_model_call_count"] == 5
    check_history(state["messages"])


def call(name: str, id_: str) -> ToolCall:
    return ToolCall(name=name, args={}, id=id_, type="tool_call")


def kinds(scene: Scene) -> list[str]:
    return [message.type for message in scene.state()["messages"]]


@scenes.orders(3)
async def test_error_in_a_stack(order: Order, signals: Signals) -> None:
    """What other limiters charged before `error` raised is taken back by the next run, once."""
    limiters = [
        tool_limiter(signals, thread_limit=9),
        tool_limiter(signals, "search", run_limit=1, exit_behavior="error"),
        tool_limiter(signals, "calc", thread_limit=9),
    ]
    script = [["calc"], ["search", "search", "calc"], ["search", "calc"], "done", "done"]
    scene = Scene(signals, script, scenes.in_order(order, *limiters))
    for again in (scene.play, scene.go_on, scene.go_on):
        with pytest.raises(ToolCallLimitExceededError) as raised:
            await again()
        assert (raised.value.thread_count, raised.value.run_count) == (2, 2)
        assert kinds(scene)[-1] == "ai"
    for _ in range(2):
        await scene.play()
        scene.check()
    assert sorted(scene.ran) == ["calc", "calc", "search"]
    # The last of the list checks first: 3 calls by all tools.
    checked_before_error = order[order.index(1) + 1 :]
    assert scene.metric("tool:*", "refunded") == (3 if 0 in checked_before_error else 0)


@pytest.mark.filterwarnings("ignore:HumanInTheLoop")
@pytest.mark.parametrize(("place", "charged", "refunded"), [(0, 2, 0), (1, 0, 2), (2, 0, 0)])
async def test_abandoned_review(place: int, charged: int, refunded: int, signals: Signals) -> None:
    """What a limiter charged before a review that is abandoned is taken back by those before it.

    Where none is before it, nothing tells an abandoned review from a crashed tool.
    """
    limiters: list[Any] = [
        tool_limiter(signals, run_limit=2),
        tool_limiter(signals, "search", thread_limit=2),
    ]
    limiters.insert(place, HumanInTheLoopMiddleware({"search": True}))
    scene = await Scene(signals, [["search", "search"], "done"], limiters).played()
    await scene.play("never mind")
    assert kinds(scene) == ["human", "ai", "tool", "tool", "human", "ai"]
    assert scene.ran == []
    assert scene.state().get("thread_tool_call_count", {}).get("search", 0) == charged
    assert scene.metric("tool:search", "refunded") == refunded
    check_history(scene.state()["messages"])
    scene.check_requests()


EDITS_APART = pytest.mark.skipif(
    "hitl_edited_tool_calls" not in HumanInTheLoopMiddleware.state_schema.__annotations__,
    reason="this LangChain writes edits into the message",
)


@pytest.mark.filterwarnings("ignore:HumanInTheLoop")
@pytest.mark.parametrize(
    ("asked", "limited", "place"),
    [
        ("search", "calc", 1),
        pytest.param("calc", "search", 1, marks=EDITS_APART),
        ("calc", "calc", 2),
    ],
)
async def test_a_tool_that_raised(asked: str, limited: str, place: int, signals: Signals) -> None:
    """Its call stays charged beside a limiter of others, or of it before or after an edit."""

    async def run() -> None:
        await scene.play()
        edit = {"type": "edit", "edited_action": {"name": "search", "args": {}}}
        await scene.resume({"decisions": [edit]})

    items: list[Any] = [tool_limiter(signals, tool, thread_limit=9) for tool in (None, limited)]
    items.insert(place, HumanInTheLoopMiddleware({"calc": True}))
    tools: Any = [recording("search", [], lambda: 1 / 0), "calc"]
    scene = Scene(signals, [[asked], "done"], items, tools=tools)
    with pytest.raises(ZeroDivisionError):
        await run()
    await scene.play()
    assert scene.state()["thread_tool_call_count"]["__all__"] == 1
    assert scene.metric("tool:*", "refunded") == 0


@pytest.mark.parametrize("answered", [[], [ToolMessage("found", tool_call_id="a", name="search")]])
async def test_several_open_batches(answered: list[Any], signals: Signals) -> None:
    """Open calls of runs before ours was installed are answered in place, whatever has their id."""
    scene = Scene(signals, ["done"], [tool_limiter(signals, thread_limit=2)])
    history: list[Any] = [
        ("user", "one"),
        AIMessage("", tool_calls=[call("search", "a"), call("calc", "b")]),
        ToolMessage("found", tool_call_id="b", name="calc"),
        ("user", "two"),
        AIMessage("", tool_calls=[call("search", "a")]),
        *answered,
    ]
    scene.agent.update_state(CONFIG, {"messages": history}, as_node="model")
    await scene.play()
    assert kinds(scene) == ["human", "ai", "tool", "tool", "human", "ai", "tool", "human", "ai"]
    scene.check()


def repaired(signals: Signals, *history: Any) -> list[Any]:
    """The history of a graph, after an agent that is its node has repaired what it was given."""
    agent = Scene(signals, ["done"], [tool_limiter(signals, run_limit=9)], checkpointer=None).agent
    graph: Any = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_edge(START, "agent")
    messages = graph.compile().invoke({"messages": [*history]})["messages"]
    check_history(messages)
    return list(messages)


def reasoning(id_: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": id_, "summary": []}


def asking(id_: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id_, "name": "search", "arguments": "{}"}


THOUGHT = {"type": "thinking", "thinking": "?", "signature": "s"}
A_USE, B_USE = ({"type": "tool_use", "id": each, "name": "search", "input": {}} for each in "ab")


def test_a_history_that_a_graph_shares(signals: Signals) -> None:
    """At the end calls are answered; further up they are taken out, with all that stands for them.

    The graph around merges the agent's history into its own: so the order stays.
    """
    blocks: list[Any] = [{"type": "text", "text": "Wait."}, A_USE, B_USE]
    form: dict[str, Any] = {"tool_calls": [], "other": 1}
    old_form = {"function_call": {"name": "search", "arguments": "{}"}, "reasoning": reasoning("1")}
    a, b, c, d, e = (call("search", each) for each in "abcde")
    merged = repaired(
        signals,
        HumanMessage("hi", id="0"),
        AIMessage(blocks, tool_calls=[a, b], id="1", additional_kwargs=form),
        ToolMessage("found", tool_call_id="a", id="2"),
        HumanMessage("again", id="3"),
        AIMessage("", tool_calls=[c], id="4", additional_kwargs=old_form),
        HumanMessage("and again", id="5"),
        AIMessage("", tool_calls=[d, e], id="6"),
        ToolMessage("found", tool_call_id="d", id="7"),
    )
    assert [each.id for each in merged[:8]] == list("01234567")
    assert [each["id"] for each in merged[1].tool_calls] == ["a"]
    assert merged[1].content == blocks[:2]
    assert merged[1].additional_kwargs == {"other": 1}
    assert (merged[4].text, merged[4].tool_calls) == (ABANDONED, [])
    assert merged[4].additional_kwargs == {}
    assert (merged[8].tool_call_id, merged[8].text) == ("e", ABANDONED)
    assert merged[9].text == "done"


REASONED: list[tuple[list[Any], list[int]]] = [
    ([reasoning("1"), asking("a"), reasoning("2"), asking("b")], [0, 1]),
    ([reasoning("1"), asking("b"), reasoning("2"), asking("a")], [2, 3]),
    ([reasoning("1"), asking("a"), reasoning("2"), reasoning("3"), asking("b")], [0, 1]),
    # Reasoning stays before another call, and at the end where the model put it there.
    ([reasoning("1"), asking("b"), asking("a")], [0, 2]),
    ([reasoning("1"), asking("a"), asking("b")], [0, 1]),
    ([reasoning("1"), reasoning("2"), asking("b"), asking("a")], [0, 1, 3]),
    ([asking("b"), asking("a"), reasoning("1")], [1, 2]),
    ([THOUGHT, A_USE, {"type": "redacted_thinking", "data": "d"}, B_USE], [0, 1]),
]
"""Contents with two calls, and what is left of them without the call `b`."""


def test_reasoning_goes_with_its_call(signals: Signals) -> None:
    """Reasoning that led only to a call that is taken out goes, too: providers refuse it alone."""
    for content, left in REASONED:
        asked = AIMessage(content, tool_calls=[call("search", "a"), call("search", "b")])
        answer = ToolMessage("found", tool_call_id="a")
        history = repaired(signals, asked, answer, HumanMessage("again"))
        assert history[0].content == [content[index] for index in left]


@either
@pytest.mark.parametrize(
    ("key", "damage"),
    [
        ("thread_model_call_count", [1]),
        ("thread_tool_call_count.search", {"search": "3"}),
        ("langchain_quota.batch", {"batch": 5}),
        ("langchain_quota.own.budgets.thread_spent", {"own": {"budgets": {"thread_spent": 5}}}),
    ],
)
async def test_a_damaged_checkpoint(key: str, damage: Any, kind: Kind, signals: Signals) -> None:
    """A run that fails at it says which key is damaged."""
    most: dict[str, Any] = {"thread_limit": 999}
    limits: list[Any] = [ToolCallLimit("search", **most), ModelCallLimit(**most)]
    limits += [TokenLimit(**most)] if "budgets" in key else []
    scene = await Scene(signals, [["search"], "done"] * 2, limits, kind=kind).played()
    scene.agent.update_state(CONFIG, {key.partition(".")[0]: damage})
    with pytest.raises(ValueError, match=f"^{key} is damaged in the checkpoint"):
        await scene.play()
