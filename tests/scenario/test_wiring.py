"""Hooks that somebody wires by hand: what the limits refused either does not run, or raises."""

from typing import Any

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent
from langgraph.runtime import get_runtime
from langgraph.types import Send

from langchain_quota import ModelCallLimit, QuotaMiddleware, QuotaState, QuotaWarning, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import CONFIG, Kind, held_to, recording
from tests.telemetry import Signals, telling

pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")

REMEDY = r".*GraphQuota\(limits\)\.add_to"
THREAD: Any = {**CONFIG, "recursion_limit": 40}
HELLO: dict[str, Any] = {"messages": [("user", "hi")]}


def for_ever(messages: list[AnyMessage]) -> Any:
    return ["search", "search"]


def by_hand(
    hooks: Any,
    *,
    script: Any = for_ever,
    begins: bool = True,
    routed: bool = True,
    saves: Any = True,
) -> Any:
    """A loop of model and tools with hooks as nodes.

    It is `routed` where its edges go where the hooks say, and leave out answered calls.
    """
    model = ScriptedChatModel(script=script)
    tools = [recording("search", [])]

    async def before(given: Any) -> Any:
        return await hooks.abefore_model(given, get_runtime()) or {"jump_to": None}

    async def call(given: Any) -> Any:
        return {"messages": [await model.bind_tools(tools).ainvoke(given["messages"])]}

    async def after(given: Any) -> Any:
        return await hooks.aafter_model(given, get_runtime())

    def to_model(given: dict[str, Any]) -> str:
        return END if routed and given.get("jump_to") == "end" else "model"

    def to_tools(given: dict[str, Any]) -> Any:
        newest = next(each for each in reversed(given["messages"]) if isinstance(each, AIMessage))
        if not routed:
            return "tools" if newest.tool_calls else "before"
        answered = {getattr(each, "tool_call_id", None) for each in given["messages"]}
        calls = [each for each in newest.tool_calls if each["id"] not in answered]
        if given.get("jump_to") == "end" or not newest.tool_calls:
            return END
        return [Send("tools", [each]) for each in calls] or "before"

    graph: Any = StateGraph(QuotaState)
    nodes = {"before": before, "model": call, "after": after, "tools": ToolNode(tools)}
    for name, node in nodes.items():
        graph.add_node(name, node)
    if begins:
        graph.add_node("begin", hooks.abefore_agent)
        graph.add_edge("begin", "before")
    graph.add_edge(START, "begin" if begins else "before")
    graph.add_conditional_edges("before", to_model, ["model", END])
    graph.add_edge("model", "after")
    graph.add_conditional_edges("after", to_tools, ["tools", "before", END])
    graph.add_edge("tools", "before")
    return graph.compile(checkpointer=InMemorySaver() if saves else None)


TOOL_RAN, MODEL_RAN = "the tool 'search' ran", "the model ran"


@pytest.mark.parametrize(
    ("kind", "limit", "text"),
    [
        ("quota", ToolCallLimit("search", run_limit=1), TOOL_RAN),
        ("quota", ToolCallLimit("search", run_limit=1, exit_behavior="end"), MODEL_RAN),
        ("quota", ModelCallLimit(run_limit=1), MODEL_RAN),
        ("quota", ModelCallLimit(run_limit=1, exit_behavior="finalize"), MODEL_RAN),
        ("drop-in", ToolCallLimit(run_limit=1), TOOL_RAN),
        ("drop-in", ModelCallLimit(run_limit=1), MODEL_RAN),
    ],
)
async def test_jumps_that_are_not_followed(
    kind: Kind, limit: Limit, text: str, signals: Signals
) -> None:
    """The next hook says what ran though it was refused, and what to do."""
    (hooks,) = held_to([limit], kind, {"telemetry": signals.telemetry})
    with pytest.raises(RuntimeError, match=text + REMEDY):
        await by_hand(hooks, routed=False).ainvoke(HELLO, THREAD)


@pytest.mark.parametrize("script", [for_ever, lambda messages: "done"], ids=["tools", "turns"])
async def test_a_state_that_does_not_keep_the_counts(script: Any, signals: Signals) -> None:
    """`create_react_agent(pre_model_hook=…)` alone drops what the hook writes: an error."""
    hooks: Any = QuotaMiddleware([ModelCallLimit(run_limit=2)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=script)
    kept: Any = {"pre_model_hook": hooks.abefore_model, "checkpointer": InMemorySaver()}
    agent: Any = create_react_agent(model, [recording("search", [])], **kept)

    async def two_turns() -> None:
        await agent.ainvoke(HELLO, THREAD)
        await agent.ainvoke(HELLO, THREAD)

    with pytest.raises(RuntimeError, match="no limit holds" + REMEDY):
        await two_turns()
    assert len(model.calls) == 1


async def test_runs_that_never_begin(signals: Signals) -> None:
    """Without `before_agent` a run limit never gets a new budget: one warning, at turn 2.

    Without a limit on runs, or without anything that it counts, nothing is missed.
    """
    limit = ToolCallLimit("search", run_limit=9)
    searches: list[Any] = [["search"], "done"]
    hooks: Any = QuotaMiddleware([limit], telemetry=signals.telemetry)
    app = by_hand(hooks, script=searches * 3, begins=False)
    await app.ainvoke(HELLO, THREAD)
    with pytest.warns(QuotaWarning, match="never set back to 0" + REMEDY) as found:
        await app.ainvoke(HELLO, THREAD)
    assert len(found) == 1
    await app.ainvoke(HELLO, THREAD)

    # Every warning of a test is an error.
    for other, turn in ((ToolCallLimit("search", thread_limit=9), searches), (limit, ["done"])):
        hooks = QuotaMiddleware([other], telemetry=telling(spans="off").telemetry)
        app = by_hand(hooks, script=turn * 3, begins=False)
        for _ in range(3):
            await app.ainvoke(HELLO, THREAD)


@pytest.mark.parametrize("kept_by", ["no checkpointer", "a new thread", "a deleted thread"])
async def test_a_history_that_the_client_keeps(kept_by: str, signals: Signals) -> None:
    """Where each invocation begins without counts, there is no error and no warning."""
    hooks = QuotaMiddleware([ModelCallLimit(run_limit=1)], telemetry=signals.telemetry)
    saves = kept_by != "no checkpointer"
    app = by_hand(hooks, script=lambda messages: "hello", begins=False, saves=saves)
    history: list[AnyMessage] = []
    for turn in range(1, 4):
        thread = str(turn) if kept_by == "a new thread" else "1"
        given = {"messages": [*history, HumanMessage("hi")]}
        history = (await app.ainvoke(given, {"configurable": {"thread_id": thread}}))["messages"]
        assert [each.content for each in history] == ["hi", "hello"] * turn
        if kept_by == "a deleted thread":
            await app.checkpointer.adelete_thread(thread)
