"""The graph nodes of a `QuotaMiddleware`: it has none before the model if no limit needs it."""

import copy
from collections.abc import Sequence
from inspect import signature
from threading import Lock
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelResponse
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt
from prometheus_client import CollectorRegistry

from langchain_quota import (
    Decision,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    QuotaState,
    RepeatLimit,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.state import LEDGER
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.testing import ScriptedChatModel
from tests.agent.conftest import Form, both_forms
from tests.agent.rules import CONFIG, Scene, recording
from tests.signals import Signals

SEARCH = ToolCallLimit("search", run_limit=9)
MODEL = ModelCallLimit(run_limit=9)
THREAD: RunnableConfig = {"configurable": CONFIG["configurable"]}


class OwnQuota(QuotaMiddleware[Any, Any]):
    """A user's subclass, which may override any hook."""


class Retry(AgentMiddleware[Any, Any]):
    """Tries a model call once more, as LangChain's newer middleware for it does."""

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        try:
            return await handler(request)
        except ConnectionError:
            return await handler(request)


def nodes(middleware: QuotaMiddleware[Any, Any]) -> list[str]:
    """The nodes that a middleware has in a step of the model."""
    agent: Any = create_agent(ScriptedChatModel(script=[]), middleware=[middleware])
    own = f"{middleware.name}."
    found = [node.removeprefix(own) for node in agent.nodes if node.startswith(own)]
    return [node for node in found if node != "before_agent"]


def models_seen(signals: Signals) -> float | None:
    """The model calls that are counted as allowed."""
    labels = {"agent": "unnamed", "kind": "model", "tool": "none", "decision": "allowed"}
    return signals.value("langchain_quota_calls_total", **labels)


@pytest.mark.parametrize(
    "limits",
    [
        [SEARCH],
        [SEARCH, RepeatLimit(3)],
        [ToolCallLimit("search", run_limit=9, at_once=2)],
        [ToolCallLimit("search", quotas=[Quota(9, per="global")])],
    ],
)
def test_tool_limits_have_one_node(limits: Sequence[Limit], signals: Signals) -> None:
    """Whatever the tool limits, an agent without a model limit has no node before the model."""
    quota = QuotaMiddleware(limits, store=MemoryStore(), telemetry=signals.telemetry)
    assert nodes(quota) == ["after_model"]
    assert isinstance(quota, QuotaMiddleware)
    assert quota.name == type(quota).__name__ == "QuotaMiddleware"


@pytest.mark.parametrize("limit", [MODEL, TokenLimit(run_limit=9)])
def test_limits_on_the_model_have_both_nodes(limit: Limit, signals: Signals) -> None:
    """A limit on model calls or tokens refuses before the model is called."""
    quota = QuotaMiddleware([SEARCH, limit], telemetry=signals.telemetry)
    assert nodes(quota) == ["before_model", "after_model"]


def test_a_subclass_keeps_its_hooks(signals: Signals) -> None:
    """A subclass has both nodes: what it overrides is called as before."""
    assert nodes(OwnQuota([SEARCH], telemetry=signals.telemetry)) == ["before_model", "after_model"]


@both_forms
async def test_model_calls_are_still_seen(form: Form, signals: Signals) -> None:
    """Each model call is decided once: for observers, in metrics and in a span, in order."""
    seen: list[Decision] = []
    quota = QuotaMiddleware([SEARCH], on_decision=seen.append, telemetry=signals.telemetry)
    scene = Scene(signals, [["search"], "done"], [quota], form=form)
    await scene.turn()
    assert [each.call.kind for each in seen] == ["model", "tool", "model"]
    assert models_seen(signals) == 2
    names = [span.name for span in signals.spans()]
    assert names == ["check_quota model", "check_quota tool search", "check_quota model"]
    scene.check()


async def test_a_tool_that_is_run_again_is_recorded_once(signals: Signals) -> None:
    """A call of a tool that waits for a person is decided once, whichever process resumes the run.

    LangGraph runs the tool again. The node after the model does not run again: so calls of tools
    are decided there even where no limit judges them, and not around the tool.
    """
    ran: list[str] = []
    asking = recording("ask", ran, lambda: interrupt("what?"))
    saver = InMemorySaver()
    seen: list[Decision] = []
    before = QuotaMiddleware([MODEL], on_decision=seen.append, telemetry=signals.telemetry)
    options: dict[str, Any] = {"tools": [asking], "checkpointer": saver}
    await Scene(signals, [["ask"]], [before], **options).turn()

    telemetry = Telemetry(registry=CollectorRegistry())
    after = QuotaMiddleware([MODEL], on_decision=seen.append, telemetry=telemetry)
    await Scene(signals, ["done"], [after], **options).resume("that")
    assert ran == ["ask"]
    assert [each.call.kind for each in seen] == ["model", "tool", "model"]


@both_forms
async def test_a_run_without_an_active_span_is_one_trace(form: Form, signals: Signals) -> None:
    """The first model call begins the run's trace, and the state keeps it for later steps."""
    quota = QuotaMiddleware([SEARCH], telemetry=signals.telemetry)
    scene = Scene(signals, [["search"], "done"], [quota], form=form)
    await scene.turn()
    first, *others = signals.spans()
    assert scene.state()[LEDGER]["trace"]["traceparent"].split("-")[1] == (
        f"{first.context.trace_id:032x}"
    )
    assert {span.context.trace_id for span in others} == {first.context.trace_id}


async def test_a_model_call_that_is_tried_again_is_seen_once(signals: Signals) -> None:
    """A middleware in front tries a model call again: it is one decision, as with a node."""
    answers = iter([ConnectionError("gone"), "done"])

    def script(_: object) -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    quota = QuotaMiddleware([SEARCH], telemetry=signals.telemetry)
    scene = Scene(signals, script, [Retry(), quota])
    await scene.turn()
    assert len(scene.model.calls) == 2
    assert models_seen(signals) == 1


class Forgiving(AgentMiddleware[Any, Any]):
    """Answers in place of a model that fails, as LangChain's ModelRetryMiddleware does."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        try:
            return handler(request)
        except RuntimeError as error:
            return ModelResponse([AIMessage(f"failed: {error}")])


def test_an_async_observer_is_refused_whoever_catches_errors(signals: Signals) -> None:
    """A sync run with an async observer fails, and not the model call that another one answers."""

    async def observe(decision: Decision) -> None:
        raise AssertionError(decision)

    quota = QuotaMiddleware([SEARCH], on_decision=observe, telemetry=signals.telemetry)
    model = ScriptedChatModel(script=["done"])
    agent: Any = create_agent(model, middleware=[Forgiving(), quota])
    with pytest.raises(RuntimeError, match="is async: call the agent with ainvoke"):
        agent.invoke({"messages": [("user", "hi")]})
    assert not model.calls


async def test_a_middleware_that_has_run_can_be_copied(signals: Signals) -> None:
    """A copy needs nothing of the tools that its original has seen: some cannot be copied."""

    class Client:
        def __init__(self) -> None:
            self.connection = Lock()

        async def search(self) -> str:
            return str(self.connection.locked())

    client = Client()
    search = StructuredTool.from_function(
        coroutine=client.search, name="search", description="Searches."
    )
    quota = QuotaMiddleware([ToolCallLimit("search", run_limit=1)], telemetry=signals.telemetry)
    for _ in range(2):
        model = ScriptedChatModel(script=[["search", "search"], "done"])
        agent: Any = create_agent(model, [search], middleware=[quota])
        result = await agent.ainvoke({"messages": [("user", "hi")]})
        answers = [message.content for message in result["messages"] if message.type == "tool"]
        assert sorted(answers) == ["False", "Tool call limit exceeded. Do not call 'search' again."]
        quota = copy.deepcopy(quota)


async def test_a_copy_has_the_same_nodes(signals: Signals) -> None:
    """A copied middleware limits, and sees model calls, as the original does."""
    quota = copy.deepcopy(QuotaMiddleware([SEARCH], telemetry=signals.telemetry))
    assert nodes(quota) == ["after_model"]
    scene = Scene(signals, [["search"], "done"], [quota])
    await scene.turn()
    assert models_seen(signals) == 2
    scene.check()


def test_the_signature_is_worked_out_once() -> None:
    """LangSmith asks for it at every call: a hook has it ready, also that of a copy."""
    quota = QuotaMiddleware([SEARCH])
    for each in (quota, copy.deepcopy(quota)):
        found = signature(each.awrap_model_call)
        assert [*found.parameters] == ["request", "handler"]
        assert signature(each.awrap_model_call) is found


async def test_a_graph_that_is_wired_by_hand_still_finds_the_hook(signals: Signals) -> None:
    """A node that a user makes of `before_model` records the model call."""
    quota = QuotaMiddleware([SEARCH], telemetry=signals.telemetry)
    graph: Any = StateGraph(QuotaState)
    graph.add_node("before", quota.abefore_model)
    graph.add_edge(START, "before")
    graph.add_edge("before", END)
    await graph.compile().ainvoke({"messages": [("user", "hi")]}, CONFIG)
    assert models_seen(signals) == 1


@both_forms
async def test_a_thread_without_the_node_is_reset(form: Form, signals: Signals) -> None:
    """`reset` writes as another node, and the thread goes on with its whole limit."""
    limit = ToolCallLimit("search", thread_limit=1)
    quota = QuotaMiddleware([limit], telemetry=signals.telemetry)
    scene = Scene(signals, [["search"], "done", ["search"], "done"], [quota], form=form)
    await scene.turn()
    if form == "sync":
        quota.reset(scene.agent, THREAD)
    else:
        await quota.areset(scene.agent, THREAD)
    await scene.turn()
    assert scene.ran == ["search"] * 2


@pytest.mark.parametrize(("kept", "answer"), [([MODEL], "done"), ([], "hi")])
async def test_a_run_that_waits_at_the_model_limit(
    kept: list[Limit], answer: str, signals: Signals
) -> None:
    """With a model limit the run goes on. Without one it ends, and the next turn works."""
    saver, node = InMemorySaver(), "QuotaMiddleware.before_model"
    before = QuotaMiddleware([SEARCH, MODEL], telemetry=signals.telemetry)
    options: dict[str, Any] = {"checkpointer": saver, "interrupt_before": [node]}
    waiting = Scene(signals, ["never asked"], [before], **options)
    await waiting.turn()
    assert waiting.agent.get_state(CONFIG).next == (node,)

    after = QuotaMiddleware([SEARCH, *kept], telemetry=signals.telemetry)
    scene = Scene(signals, lambda _: "done", [after], checkpointer=saver)
    assert (await scene.go_on())["messages"][-1].content == answer
    assert (await scene.turn())["messages"][-1].content == "done"
