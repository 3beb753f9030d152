"""A run that a limit has ended, and that something leads back to its model: it ends again."""

import gc
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware, hook_config, wrap_model_call
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage
from langgraph.func import entrypoint
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Command, interrupt

from langchain_quota import (
    GraphQuota,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Quota,
    TokenLimit,
    ToolCallLimit,
    stop_reason,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, Kind, Scene, delegate
from tests.telemetry import HAS_INLINE, Signals
from tests.tokens import answer

INLINE: list[Kind] = ["inline"] if HAS_INLINE else []
LED_BACK = "a limit has ended this run"
MOST = 10
"""How often a run ends again before it raises."""


class Judge(AgentMiddleware[Any, Any]):
    """Leads a run back to its model, in one of several ways, so many times."""

    def __init__(self, way: str = "jumps", rounds: int = 99) -> None:
        super().__init__()
        self.way, self.rounds, self.judged = way, rounds, 0
        self.store = MemoryStore()

    @hook_config(can_jump_to=["model"])
    def after_agent(self, state: Any, runtime: Any) -> Any:
        # A window that ends, for example.
        self.store.reset([usage.key for usage in self.store.usages("model:global:*")])
        if self.judged == self.rounds:
            return None
        if self.way == "asks":
            interrupt("Go on?")
        self.judged += 1
        messages: list[Any] = [HumanMessage("Not good enough. Go on.")]
        if self.way == "drops":
            messages = [
                RemoveMessage(str(each.id)) for each in state["messages"] if stop_reason(each)
            ]
        elif self.way == "sums up":
            messages = [RemoveMessage(REMOVE_ALL_MESSAGES), HumanMessage("Nothing was found.")]
        elif self.way == "commands":
            return Command(goto="model", update={"messages": messages})
        return {"jump_to": "model", "messages": messages}


MODEL, TOOLS = ModelCallLimit(run_limit=2), ToolCallLimit(run_limit=1, exit_behavior="end")
RESERVE = TokenLimit(run_limit=140, reserve=60)
LAST = ModelCallLimit(run_limit=2, exit_behavior="finalize")
WINDOW = ModelCallLimit(quotas=[Quota(2, per="global")])
EVERY: list[Kind] = ["quota", "drop-in", *INLINE]
FORMS = [
    *((kind, limit, "jumps") for kind in EVERY for limit in (MODEL, TOOLS)),
    *(("quota", limit, "jumps") for limit in (LAST, RESERVE, WINDOW)),
    *(("quota", MODEL, way) for way in ("sums up", "asks")),
    *((kind, TOOLS, way) for kind in EVERY for way in ("drops", "commands")),
]


@pytest.mark.parametrize(("kind", "limit", "way"), FORMS)
async def test_led_back(kind: Kind, limit: Limit, way: str, signals: Signals) -> None:
    """The model is not called, nothing is said or refused again, and the eleventh time raises."""
    judge = Judge(way, 0)
    items = [judge, limit] if way == "sums up" else [limit, judge]
    # Sync hooks have a body of their own in drop-ins.
    form: Form = "sync" if way == "commands" else "async"
    options: dict[str, Any] = {} if kind == "drop-in" else {"store": judge.store}
    options |= {"kind": kind, "form": form}
    scene = Scene(signals, lambda _: answer(60, "search", text=""), items, **options)

    async def play(rounds: int) -> tuple[float, ...]:
        judge.rounds, judge.judged = rounds, 0
        models, tools = len(scene.model.calls), len(scene.ran)
        decided = sum(signals.samples("langchain_quota_calls_total").values())
        try:
            result = await scene.play()
            while "__interrupt__" in result:
                result = await scene.resume("Yes.")
        finally:
            assert judge.judged == rounds
        decided = sum(signals.samples("langchain_quota_calls_total").values()) - decided
        return len(scene.model.calls) - models, len(scene.ran) - tools, decided

    once = await play(0)
    assert once[0] == 2
    assert await play(MOST) == once
    said = [each for each in scene.state()["messages"] if each.type == "ai" and stop_reason(each)]
    assert len(said) <= 2
    with pytest.raises(ModelCallLimitExceededError, match=LED_BACK):
        await play(MOST + 1)


async def test_a_refusal_that_is_swallowed(signals: Signals) -> None:
    """Another middleware makes a smaller call instead: no error of the refused one is kept."""

    @wrap_model_call
    async def smaller(request: Any, handler: Any) -> Any:
        await handler(request.override(messages=request.messages * 2))
        return await handler(request)

    options: Any = {"reserve": lambda request: 50 * len(request.messages)}
    limit = TokenLimit(run_limit=90, exit_behavior="error", **options)
    scene = Scene(signals, lambda _: answer(1), [smaller, limit])

    def errors() -> list[object]:
        return [each for each in gc.get_objects() if isinstance(each, ModelCallLimitExceededError)]

    of_others = errors()
    await scene.play()
    kept = [error for error in errors() if all(error is not other for other in of_others)]
    assert (len(scene.model.calls), kept) == (1, [])


@pytest.mark.parametrize("kind", ["quota", *INLINE])
async def test_a_sub_agent_in_a_tool(kind: Kind, signals: Signals) -> None:
    """Its judge never gives up: the call is answered with an error, and the parent goes on."""
    helper = Scene(signals, lambda _: "Hm.", [MODEL, Judge()], kind=kind, checkpointer=None)
    boss = Scene(signals, [["delegate"], "done"], [MODEL], tools=[delegate(helper.agent)])
    result = await boss.play()
    assert [each.text for each in result["messages"][2:]] == [LED_BACK, "done"]
    assert len(helper.model.calls) == 2


@pytest.mark.parametrize("limit", [MODEL, TOOLS])
async def test_a_sub_agent_in_a_node(limit: Limit, signals: Signals) -> None:
    """Its node has the final message as its result, and the graph goes on."""
    helper = Scene(signals, lambda _: ["search"], [limit, Judge()], checkpointer=None)
    graph: Any = StateGraph(MessagesState)
    graph.add_node("helper", helper.agent)
    graph.add_node("after", lambda _: {"messages": [AIMessage("after")]})
    graph.add_edge(START, "helper")
    graph.add_edge("helper", "after")
    result = await graph.compile().ainvoke({"messages": [("user", "hi")]})
    final, after = result["messages"][-2:]
    reason = stop_reason(final)
    assert reason
    assert reason["limit"] == limit.name
    assert (after.text, len(helper.model.calls)) == ("after", 2)


@pytest.mark.parametrize("limit", [MODEL, TOOLS])
async def test_a_graph_that_leads_back(limit: Limit, signals: Signals) -> None:
    """Its own edge leads back ten times, and the eleventh raises."""
    for rounds in (MOST, MOST + 1):
        left = iter(range(rounds))

        def route(state: Any, left: Any = left) -> str:
            if state["messages"][-1].tool_calls:
                return "tools"
            return END if next(left, None) is None else "model"

        def loop(graph: Any, route: Any = route) -> None:
            graph.add_conditional_edges("model", route)

        scene = Scene(signals, lambda _: ["search"], [limit], kind="graph", loop=loop)
        if rounds == MOST:
            assert stop_reason(await scene.play())
            continue
        with pytest.raises(ModelCallLimitExceededError, match=LED_BACK):
            await scene.play()
        assert len(scene.model.calls) == 2


async def test_a_loop_of_tasks(signals: Signals) -> None:
    """A loop of the functional API has one superstep: it leads back what has read the end."""
    quota = GraphQuota([MODEL], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=lambda _: "Hm.")
    limited = quota.model(model)

    @entrypoint()
    async def flow(rounds: int) -> list[AnyMessage]:
        messages: list[AnyMessage] = [HumanMessage("hi")]
        for _ in range(rounds):
            messages.append(await limited.ainvoke(messages))
        return messages

    result: Any = await flow.ainvoke(3 + MOST)
    assert len({each.id for each in result}) == 4
    with pytest.raises(ModelCallLimitExceededError, match=LED_BACK):
        await flow.ainvoke(4 + MOST)
    assert len(model.calls) == 4
