"""Every way that leads a graph to the model of its loop, under the limits of a GraphQuota."""

import asyncio
import operator
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, AnyMessage
from langchain_core.runnables import RunnableLambda
from langgraph.constants import END, START
from langgraph.graph import MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

from langchain_quota import (
    CostLimit,
    GraphQuota,
    ModelCallLimit,
    ModelCallLimitExceededError,
    ModelUsage,
    QuotaState,
    TokenLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import CONFIG, Form, Scene, both_forms, recording
from tests.signals import Signals

MOST = 2
"""How many model calls each of the limits lets run."""


def half_a_dollar(used: ModelUsage) -> Decimal:
    return Decimal("0.50")


class Reviewed(MessagesState):
    reviews: Annotated[int, operator.add]


def limits_of(exit_behavior: Any) -> dict[str, Limit]:
    """Limits that each let two model calls run."""
    tokens, money = (10, "0.10") if exit_behavior == "finalize" else (None, None)
    return {
        "calls": ModelCallLimit(run_limit=MOST, exit_behavior=exit_behavior),
        "tokens": TokenLimit(run_limit=100, exit_behavior=exit_behavior, keep=tokens),
        "money": CostLimit(run_limit=1, exit_behavior=exit_behavior, keep=money),
    }


def answer(messages: Sequence[AnyMessage]) -> AIMessage:
    used = {"input_tokens": 50, "output_tokens": 10, "total_tokens": 60}
    return AIMessage("A draft.", usage_metadata=used)


def searching(messages: Sequence[AnyMessage]) -> AIMessage:
    """It searches for ever."""
    search = {"name": "search", "args": {}, "id": f"call {len(messages)}"}
    return answer(messages).model_copy(update={"tool_calls": [search]})


class Reflection:
    """A loop whose model is reached in a way of the user's own, and what its model was asked.

    Args:
        signals: The telemetry that is written to.
        limit: The limit.
        way: How the graph leads to the model.
        node: The kind of the model's node.
        form: Which form of the nodes runs.
    """

    def __init__(
        self, signals: Signals, limit: Limit, *, way: str, node: str, form: Form = "async"
    ) -> None:
        self.form = form
        self.model: ScriptedChatModel = ScriptedChatModel(
            script=searching if way in SECOND_EDGES else answer
        )
        prices = half_a_dollar if isinstance(limit, CostLimit) else None
        self.quota = GraphQuota([limit], telemetry=signals.telemetry, prices=prices)
        graph: Any = StateGraph(Reviewed)
        tools = [recording("search", [])]
        options: dict[str, Any] = {}
        if way in GOOD_WAYS:
            options["end"] = "review"
        self.quota.add_to(graph, model=NODES[node](self), tools=tools, **options)
        WAYS[way](graph)
        self.app = graph.compile()

    async def play(self) -> Exception | None:
        """What the run ends with, if not with an answer."""
        given = {"messages": [("user", "Write!")]}
        steps: Any = {"recursion_limit": 60}
        try:
            if self.form == "sync":
                await asyncio.to_thread(self.app.invoke, given, steps)
            else:
                await self.app.ainvoke(given, steps)
        except (RuntimeError, ModelCallLimitExceededError) as error:
            return error
        return None


def own(call: Callable[[Reflection], Any]) -> Callable[[Reflection], Any]:
    """A model's node that calls the model by itself."""

    def made(scene: Reflection) -> Any:
        def node(state: MessagesState) -> Any:
            return call(scene)(scene.model.invoke(state["messages"]))

        async def anode(state: MessagesState) -> Any:
            return call(scene)(await scene.model.ainvoke(state["messages"]))

        return anode if scene.form == "async" else node

    return made


def asking(scene: Reflection) -> Any:
    """A model's node that calls the model with `call_model`."""

    def node(state: MessagesState) -> Any:
        return {"messages": [scene.quota.call_model(scene.model, state)]}

    async def anode(state: MessagesState) -> Any:
        return {"messages": [await scene.quota.acall_model(scene.model, state)]}

    return RunnableLambda(node, anode)


NODES: dict[str, Callable[[Reflection], Any]] = {
    "chat model": lambda scene: scene.model,
    "own": own(lambda scene: lambda said: {"messages": [said]}),
    "call_model": asking,
    "own, with a Command": own(lambda scene: lambda said: Command(update={"messages": [said]})),
    "own, with Commands": own(lambda scene: lambda said: [Command(update={"messages": [said]})]),
}


def review(state: Reviewed) -> dict[str, Any]:
    return {"messages": [("user", "Better!")], "reviews": 1}


def again(target: str) -> Callable[[Reviewed], str]:
    """Back nine times."""
    return lambda state: target if state["reviews"] < 9 else END


def by_edges(graph: Any) -> None:
    graph.add_node("review", review)
    graph.add_edge("review", "model")
    graph.add_conditional_edges("model", again("review"), ["review", END])


def by_a_condition(graph: Any) -> None:
    graph.add_node("review", review)
    graph.add_edge("model", "review")
    graph.add_conditional_edges("review", again("model"), ["model", END])


def by_a_command(graph: Any) -> None:
    def command(state: Reviewed) -> Command[Any]:
        return Command(update=review(state), goto=again("model")(state))

    graph.add_node("review", command, destinations=("model", END))
    graph.add_edge("model", "review")


def by_a_send(graph: Any) -> None:
    def send(state: QuotaState) -> Command[Any]:
        # It runs beside the model, and so has the state that the model has.
        return Command(goto=[Send("model", {**state})] * 9)

    graph.add_node("review", send, destinations=("model",))
    graph.add_edge("quota.before_model", "review")


def to_itself(graph: Any) -> None:
    def told(state: Reviewed) -> str:
        answers = sum(each.type == "ai" for each in state["messages"])
        return "model" if answers < 10 else END

    graph.add_conditional_edges("model", told, ["model", END])


def at_the_start(graph: Any) -> None:
    graph.add_edge(START, "model")


def beside_the_loop(graph: Any) -> None:
    graph.add_node("review", review)
    graph.add_edge("quota.before_model", "review")
    graph.add_edge("review", "model")


def behind_the_end(graph: Any) -> None:
    graph.add_node("review", review)
    graph.add_conditional_edges("review", again("quota.before_agent"), ["quota.before_agent", END])


BAD_WAYS: dict[str, Callable[[Any], None]] = {
    "edges": by_edges,
    "a condition": by_a_condition,
    "a command": by_a_command,
    "a send": by_a_send,
    "to itself": to_itself,
    "at the start": at_the_start,
    "beside the loop": beside_the_loop,
}
SECOND_EDGES = ("at the start", "beside the loop")
"""Ways that lead to the model once, beside the loop, which goes on."""

GOOD_WAYS: dict[str, Callable[[Any], None]] = {"behind the end": behind_the_end}
WAYS = {**BAD_WAYS, **GOOD_WAYS}

every_way = pytest.mark.parametrize("way", WAYS)
every_bad_way = pytest.mark.parametrize("way", BAD_WAYS)
every_exit = pytest.mark.parametrize("exit_behavior", ["end", "error", "finalize"])
every_limit = pytest.mark.parametrize("limit", ["calls", "tokens", "money"])
every_node = pytest.mark.parametrize("node", NODES)


@both_forms
@every_way
@every_node
async def test_never_more_than_the_limit_runs(
    form: Form, way: str, node: str, signals: Signals
) -> None:
    """Whatever way leads to a model's node of any kind, it is called as often as is allowed."""
    limit = ModelCallLimit(run_limit=MOST)
    scene = Reflection(signals, limit, way=way, node=node, form=form)

    await scene.play()

    assert len(scene.model.calls) <= MOST


@both_forms
@pytest.mark.parametrize("way", ["edges", "at the start", "behind the end"])
@every_exit
@every_limit
async def test_never_more_than_any_limit(
    form: Form, way: str, exit_behavior: str, limit: str, signals: Signals
) -> None:
    """A limit of calls, tokens or money holds in a reflection loop, however it ends a run."""
    given = limits_of(exit_behavior)[limit]
    scene = Reflection(signals, given, way=way, node="chat model", form=form)

    await scene.play()

    assert len(scene.model.calls) <= MOST


@both_forms
@every_bad_way
@pytest.mark.parametrize("node", ["chat model", "own"])
async def test_a_way_past_the_limits_is_an_error(
    form: Form, way: str, node: str, signals: Signals
) -> None:
    """A call that no limit has judged is not made: the error names its node, and what to do."""
    scene = Reflection(signals, ModelCallLimit(run_limit=MOST), way=way, node=node, form=form)

    error = await scene.play()

    assert isinstance(error, RuntimeError)
    for part in ("'model'", "past 'quota.before_model'", "'quota.before_agent'", "add_to(…, end="):
        assert part in str(error)


@both_forms
@every_node
@every_exit
async def test_the_way_that_the_error_names(
    form: Form, node: str, exit_behavior: Any, signals: Signals
) -> None:
    """A node that reviews behind the loop's end may ask again: the limit lets two calls run."""
    limit = ModelCallLimit(run_limit=MOST, exit_behavior=exit_behavior)
    scene = Reflection(signals, limit, way="behind the end", node=node, form=form)

    error = await scene.play()

    assert len(scene.model.calls) == MOST
    assert isinstance(error, ModelCallLimitExceededError) == (exit_behavior == "error")


async def test_limits_on_trial_change_no_way(signals: Signals) -> None:
    """Where no limit is enforced, the graph goes every way that it goes without limits."""
    limit = ModelCallLimit(run_limit=MOST, enforce=False)
    scene = Reflection(signals, limit, way="edges", node="chat model")

    assert await scene.play() is None

    assert len(scene.model.calls) == 10


async def test_a_loop_that_nothing_has_entered(signals: Signals) -> None:
    """A node of the user's own cannot enter a second loop at its model while the first one runs."""
    graph: Any = StateGraph(MessagesState)
    quota = GraphQuota([ModelCallLimit(run_limit=MOST)], telemetry=signals.telemetry)
    models = [ScriptedChatModel(script=answer), ScriptedChatModel(script=answer)]
    for name, model, start in zip(("planner", "writer"), models, (START, None), strict=True):
        quota.add_to(graph, model=model, tools=[], name=name, start=start)
    graph.add_edge("planner.quota.before_model", "writer.model")

    with pytest.raises(RuntimeError, match=r"past 'writer\.quota\.before_model'"):
        await graph.compile().ainvoke({"messages": [("user", "Write!")]})

    assert models[1].calls == ()


def waiting(scene: Scene) -> dict[str, Any]:
    """A model's node of the user's own, which asks the user first."""

    async def node(state: MessagesState) -> Any:
        interrupt("Sure?")
        return {"messages": [await scene.model.ainvoke(state["messages"])]}

    return {"model": node}


@pytest.mark.parametrize("limit", ["calls", "tokens", "money"])
async def test_a_model_node_that_waits(limit: str, signals: Signals) -> None:
    """An interrupt in the model's node runs it again: its call is still the one admitted."""
    given = limits_of("end")[limit]
    prices = half_a_dollar if limit == "money" else None
    scene = Scene(signals, answer, [given], loop=waiting, prices=prices, kind="graph")
    for turn in (1, 2):
        await scene.play()
        await scene.resume("yes")
        assert len(scene.model.calls) == turn


async def test_a_wait_before_the_model_and_a_replay(signals: Signals) -> None:
    """A run that waits before its model goes on, and so does a replay from that checkpoint."""
    limit = ModelCallLimit(run_limit=1)
    scene = Scene(signals, answer, [limit], interrupt_before=["model"], kind="graph")
    for turn in (1, 2):
        await scene.play()
        assert scene.agent.get_state(CONFIG).next == ("model",)
        there = scene.agent.get_state(CONFIG).config
        await scene.go_on()
        await scene.agent.ainvoke(None, there)
        assert len(scene.model.calls) == 2 * turn


async def test_a_model_that_fails_is_called_again(signals: Signals) -> None:
    """A call that failed was admitted: going on from there calls the model, once."""
    failures = [ConnectionError("no route to the provider")]

    def script(messages: Sequence[AnyMessage]) -> AIMessage:
        if failures:
            raise failures.pop()
        return answer(messages)

    scene = Scene(signals, script, [ModelCallLimit(run_limit=1)], kind="graph")
    with pytest.raises(ConnectionError):
        await scene.play()

    result = await scene.go_on()

    assert result["messages"][-1].text == "A draft."
