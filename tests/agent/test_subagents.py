"""Agents inside the tools of agents, and limits that nothing can remember."""

import warnings
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.tools import BaseTool, StructuredTool

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    QuotaMiddleware,
    QuotaWarning,
    ToolCallLimit,
)
from langchain_quota.testing import ScriptedChatModel
from tests.agent.conftest import Form, both_forms
from tests.agent.rules import Middleware, Scene, model_limiter, recording, tool_limiter
from tests.signals import Signals


def delegate(child: Any) -> BaseTool:
    """A tool that asks another agent."""
    asked = {"messages": [("user", "do it")]}

    def ask() -> str:
        return str(child.invoke(asked)["messages"][-1].content)

    async def aask() -> str:
        return str((await child.ainvoke(asked))["messages"][-1].content)

    return StructuredTool.from_function(ask, aask, name="delegate", description="delegate")


def child_of(ran: list[str], *middleware: Middleware, **options: Any) -> Any:
    """An agent that searches twice each time it is asked."""
    return create_agent(
        ScriptedChatModel(
            script=lambda messages: (
                ["search", "search"] if messages[-1].type == "human" else "found"
            )
        ),
        tools=[recording("search", ran)],
        middleware=middleware,
        **options,
    )


def threads(signals: Signals, limit: str) -> dict[str, float]:
    """What is exported as used by threads of a limit, by agent."""
    return {
        sample.labels["agent"]: sample.value
        for metric in signals.registry.collect()
        for sample in metric.samples
        if sample.name == "langchain_quota_thread_used" and sample.labels["limit"] == limit
    }


@pytest.mark.parametrize("name", [None, "researcher"])
async def test_a_childs_thread_limit(name: str | None, signals: Signals) -> None:
    """A child's thread limit lasts one invocation: it warns once, over many invocations."""
    ran: list[str] = []
    child = child_of(ran, tool_limiter(signals, "search", thread_limit=1), name=name)
    scene = Scene(
        signals,
        [["delegate"], ["delegate"], "done"],
        [tool_limiter(signals, thread_limit=9)],
        tools=[delegate(child)],
    )

    with pytest.warns(QuotaWarning, match="thread limit") as caught:
        await scene.turn()

    assert len(caught) == 1
    assert ran == ["search"] * 2  # one for each invocation
    assert scene.state()["thread_tool_call_count"] == {"__all__": 2}
    assert threads(signals, "tool:*") == {"unnamed": 2}


@pytest.mark.parametrize("remedy", ["store", "checkpointer"])
async def test_what_makes_a_childs_thread_limit_hold(remedy: str, signals: Signals) -> None:
    """As the warning says: with a store, or with `checkpointer=True` for the child alone."""
    ran: list[str] = []
    quota: Any = QuotaMiddleware(
        [ToolCallLimit("search", thread_limit=3)],
        store=MemoryStore() if remedy == "store" else None,
        telemetry=signals.telemetry,
    )
    child = child_of(ran, quota, checkpointer=True if remedy == "checkpointer" else None)
    scene = Scene(signals, [["delegate"], ["delegate"], "done"], [], tools=[delegate(child)])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await scene.turn()

    assert ran == ["search"] * 3


# Under `invoke` a tool runs in another thread, in a copy of the context.
@both_forms
@pytest.mark.parametrize("parent", [None, "boss"])
async def test_an_unnamed_child_writes_no_thread_series(
    form: Form, parent: str | None, signals: Signals
) -> None:
    """An unnamed child carries its parent's name and thread: it writes no thread series."""
    ran: list[str] = []
    child = child_of(
        ran,
        tool_limiter(signals, "search", run_limit=9),
        tool_limiter(signals, "search", thread_limit=9, limit_name="child"),
        model_limiter(signals, thread_limit=9, limit_name="child model"),
    )
    scene = Scene(
        signals,
        [["delegate"], "done"],
        [tool_limiter(signals, thread_limit=9)],
        tools=[delegate(child)],
        name=parent,
        form=form,
    )

    with pytest.warns(QuotaWarning):
        await scene.turn()

    assert ran == ["search"] * 2
    assert threads(signals, "tool:*") == {parent or "unnamed": 1}
    assert threads(signals, "child") == {}
    assert threads(signals, "child model") == {}


async def test_a_named_child_writes_thread_series(signals: Signals) -> None:
    """A named child writes thread series under its own name."""
    child = child_of(
        [], tool_limiter(signals, thread_limit=9, limit_name="child"), name="researcher"
    )
    scene = Scene(
        signals,
        [["delegate"], "done"],
        [tool_limiter(signals, thread_limit=9)],
        tools=[delegate(child)],
        name="boss",
    )

    with pytest.warns(QuotaWarning):
        await scene.turn()

    assert threads(signals, "tool:*") == {"boss": 1}
    assert threads(signals, "child") == {"researcher": 2}


async def test_a_childs_run_limit(signals: Signals) -> None:
    """A child's run limit holds in each of its invocations, and needs no warning."""
    ran: list[str] = []
    child = child_of(ran, tool_limiter(signals, run_limit=1))
    scene = Scene(
        signals,
        [["delegate", "delegate"], "done"],
        [tool_limiter(signals, "delegate", run_limit=2)],
        tools=[delegate(child)],
    )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await scene.turn()

    assert ran == ["search"] * 2
    assert scene.state()["thread_tool_call_count"] == {"delegate": 2}


@pytest.mark.parametrize("name", [None, "researcher"])
async def test_a_child_that_ends_at_once(name: str | None, signals: Signals) -> None:
    """What a limit says in a child's place does not have the name of its parent."""
    quota: Any = QuotaMiddleware([ModelCallLimit(run_limit=0)], telemetry=signals.telemetry)
    child = child_of([], quota, name=name)
    names: list[str | None] = []

    def ask() -> str:
        names.append(child.invoke({"messages": [("user", "do it")]})["messages"][-1].name)
        return "asked"

    scene = Scene(signals, [["ask"], "done"], [], tools=[recording("ask", [], ask)], name="boss")
    await scene.turn()

    assert names == [None]


@pytest.mark.parametrize("name", [None, "boss"])
async def test_one_middleware_for_parent_and_child(
    name: str | None, signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither is told that it lacks the other's tools, though an unnamed child looks like both."""
    limits = [ToolCallLimit(tool, run_limit=9) for tool in ("search", "delegate")]
    quota: Any = QuotaMiddleware(limits, telemetry=signals.telemetry)
    child = child_of([], quota)
    script = [["delegate"], ["delegate"], "done"] * 2
    scene = Scene(signals, script, [quota], tools=[delegate(child)], name=name)

    await scene.turn()
    await scene.turn()

    assert caplog.messages == []


@pytest.mark.parametrize("kind", ["tool", "model"])
async def test_a_thread_limit_without_a_checkpointer(kind: str, signals: Signals) -> None:
    """A thread limit on an agent without a checkpointer warns, once for all runs."""
    limiter: Middleware = (
        tool_limiter(signals, thread_limit=2)
        if kind == "tool"
        else model_limiter(signals, thread_limit=2)
    )
    scene = Scene(signals, ["done", "done"], [limiter], checkpointer=None)

    with pytest.warns(QuotaWarning, match="checkpointer"):
        await scene.turn()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await scene.turn()


async def test_no_warning_with_a_checkpointer(signals: Signals) -> None:
    """A thread limit on an agent with a checkpointer does not warn."""
    limiter = tool_limiter(signals, thread_limit=2)
    scene = Scene(signals, ["done"], [limiter])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await scene.turn()
