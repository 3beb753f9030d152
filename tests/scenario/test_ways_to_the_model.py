"""Every way that leads a graph to the model of its loop, under the limits of a GraphQuota."""

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
    QuotaState,
    TokenLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.loops import node_of
from tests.scene import Form, Scene
from tests.telemetry import Signals
from tests.tokens import answer

MOST = 2
"""How many model calls each of the limits lets run."""


class Reviewed(MessagesState):
    reviews: Annotated[int, operator.add]


def draft(_messages: Sequence[AnyMessage]) -> AIMessage:
    return answer(60)


def own(scene: Scene) -> Any:
    return RunnableLambda(*node_of(scene, by_call_model=False))


NODES: dict[str, Callable[[Scene], Any]] = {
    "chat model": lambda scene: scene.model,
    "own": own,
    "call_model": lambda scene: RunnableLambda(*node_of(scene, by_call_model=True)),
    "own, with a Command": lambda scene: own(scene) | (lambda update: Command(update=update)),
    "own, with Commands": lambda scene: own(scene) | (lambda update: [Command(update=update)]),
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


def behind_the_end(graph: Any) -> None:
    graph.add_node("review", review)
    graph.add_conditional_edges("review", again("quota.before_agent"), ["quota.before_agent", END])


async def reflect(
    signals: Signals,
    limit: Limit,
    way: Callable[[Any], None],
    node: str = "chat model",
    form: Form = "async",
) -> tuple[Exception | None, int]:
    """What a run ends with, if not with an answer, and how often it has called its model."""

    def loop(scene: Scene) -> dict[str, Any]:
        way(scene.graph)
        return {"model": NODES[node](scene), "end": "review" if way is behind_the_end else END}

    # A second edge leads to the model once, beside the loop, which goes on.
    script = (lambda said: answer(len(said), "search")) if way is at_the_start else draft
    given: dict[str, Any] = {"kind": "graph", "form": form, "state": Reviewed, "loop": loop}
    if isinstance(limit, CostLimit):
        given["prices"] = lambda _: Decimal("0.50")
    scene = Scene(signals, script, [limit], **given)
    scene.agent = scene.agent.with_config(recursion_limit=60)
    try:
        await scene.play("Write!")
    except (RuntimeError, ModelCallLimitExceededError) as error:
        return error, len(scene.model.calls)
    return None, len(scene.model.calls)


@pytest.mark.parametrize(
    ("way", "node", "form"),
    [
        *((way, "chat model", "async") for way in (by_edges, by_a_send, at_the_start)),
        *((to_itself, node, "async") for node in NODES),
        (by_edges, "own", "sync"),
    ],
)
async def test_a_way_past_the_limits_is_an_error(
    way: Any, node: str, form: Form, signals: Signals
) -> None:
    """A call that no limit has judged is not made: the error names its node, and what to do."""
    error, calls = await reflect(signals, ModelCallLimit(run_limit=MOST), way, node, form)

    assert calls <= MOST
    assert isinstance(error, RuntimeError)
    for part in ("'model'", "past 'quota.before_model'", "'quota.before_agent'", "add_to(…, end="):
        assert part in str(error)


@pytest.mark.parametrize(
    ("node", "limit"),
    [
        *((node, ModelCallLimit(run_limit=MOST)) for node in NODES),
        ("chat model", ModelCallLimit(run_limit=MOST, exit_behavior="error")),
        ("chat model", TokenLimit(run_limit=100, exit_behavior="finalize", keep=10)),
        ("own", CostLimit(run_limit=1)),
    ],
)
async def test_the_way_that_the_error_names(node: str, limit: Limit, signals: Signals) -> None:
    """A node that reviews behind the loop's end may ask again: the limit lets two calls run."""
    error, calls = await reflect(signals, limit, behind_the_end, node)

    assert calls == MOST
    assert isinstance(error, ModelCallLimitExceededError) == (limit.exit_behavior == "error")


async def test_limits_on_trial_change_no_way(signals: Signals) -> None:
    """Where no limit is enforced, the graph goes every way that it goes without limits."""
    limit = ModelCallLimit(run_limit=MOST, enforce=False)

    assert await reflect(signals, limit, by_edges) == (None, 10)


async def test_a_loop_that_nothing_has_entered(signals: Signals) -> None:
    """A node of the user's own cannot enter a second loop at its model while the first one runs."""
    graph: Any = StateGraph(MessagesState)
    quota = GraphQuota([ModelCallLimit(run_limit=MOST)], telemetry=signals.telemetry)
    models = [ScriptedChatModel(script=draft), ScriptedChatModel(script=draft)]
    for name, model, start in zip(("planner", "writer"), models, (START, None), strict=True):
        quota.add_to(graph, model=model, tools=[], name=name, start=start)
    graph.add_edge("planner.quota.before_model", "writer.model")

    with pytest.raises(RuntimeError, match=r"past 'writer\.quota\.before_model'"):
        await graph.compile().ainvoke({"messages": [("user", "Write!")]})

    assert models[1].calls == ()


async def test_a_model_node_that_waits(signals: Signals) -> None:
    """An interrupt in the model's node runs it again: its call is still the one admitted."""

    def waiting(scene: Scene) -> dict[str, Any]:
        async def node(state: MessagesState) -> Any:
            interrupt("Sure?")
            return {"messages": [await scene.model.ainvoke(state["messages"])]}

        return {"model": node}

    scene = Scene(signals, draft, [TokenLimit(run_limit=100)], loop=waiting, kind="graph")
    for turn in (1, 2):
        await scene.play()
        await scene.resume("yes")
        assert len(scene.model.calls) == turn
