"""The graph nodes of a `QuotaMiddleware`: it has none before the model if no limit needs it."""

import copy
from inspect import signature
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelResponse
from langchain_core.messages import AIMessage

from langchain_quota import (
    Decision,
    QuotaMiddleware,
    ToolCallLimit,
)
from langchain_quota.state import LEDGER
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, Scene, both_forms
from tests.signals import Signals

SEARCH = ToolCallLimit("search", run_limit=9)


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


@both_forms
async def test_a_run_without_an_active_span_is_one_trace(form: Form, signals: Signals) -> None:
    """The first model call begins the run's trace, and the state keeps it for later steps."""
    quota = QuotaMiddleware([SEARCH], telemetry=signals.telemetry)
    scene = Scene(signals, [["search"], "done"], [quota], form=form)
    await scene.play()
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
    await scene.play()
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


async def test_a_copy_has_the_same_nodes(signals: Signals) -> None:
    """A copied middleware limits, and sees model calls, as the original does."""
    quota = copy.deepcopy(QuotaMiddleware([SEARCH], telemetry=signals.telemetry))
    assert nodes(quota) == ["after_model"]
    scene = Scene(signals, [["search"], "done"], [quota])
    await scene.play()
    assert models_seen(signals) == 2
    scene.check()


def test_the_signature_is_worked_out_once() -> None:
    """LangSmith asks for it at every call: a hook has it ready, also that of a copy."""
    quota = QuotaMiddleware([SEARCH])
    for each in (quota, copy.deepcopy(quota)):
        found = signature(each.awrap_model_call)
        assert [*found.parameters] == ["request", "handler"]
        assert signature(each.awrap_model_call) is found
