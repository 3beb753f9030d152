"""Reading and resetting what a thread has used."""

from types import SimpleNamespace
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import interrupt

from langchain_quota import (
    ModelCallLimit,
    QuotaMiddleware,
    ToolCallLimit,
    usage,
)
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, both_forms
from tests.signals import Signals

CONFIG: RunnableConfig = {"configurable": {"thread_id": "7"}}
ASK: Any = {"messages": [("user", "go on")]}


@tool
def search() -> str:
    """Search."""
    return "found"


@tool(return_direct=True)
def report() -> str:
    """Report at once."""
    return "reported"


@tool
def ask() -> str:
    """Ask a human."""
    return str(interrupt("what?"))


def agent_and_quota(signals: Signals, script: Any, **search_limit: Any) -> tuple[Any, Any]:
    quota = QuotaMiddleware(
        [
            ModelCallLimit(thread_limit=9),
            ToolCallLimit("search", **(search_limit or {"thread_limit": 2})),
            ToolCallLimit(thread_limit=9),
        ],
        telemetry=signals.telemetry,
    )
    agent = create_agent(
        ScriptedChatModel(script=script),
        [search, report, ask],
        middleware=[quota],
        checkpointer=InMemorySaver(),
    )
    return agent, quota


async def run(agent: Any) -> None:
    await agent.ainvoke(ASK, CONFIG)


async def reset(agent: Any, quota: Any, *, form: Form) -> None:
    await quota.areset(agent, CONFIG) if form == "async" else quota.reset(agent, CONFIG)


async def test_usage_is_what_ran(signals: Signals) -> None:
    """`usage` tells the calls of a thread and of its newest run; nothing of a fresh thread."""
    agent, _ = agent_and_quota(signals, [["search"], "done", ["search", "search"], "done"])
    assert usage(agent.get_state(CONFIG)).model == 0

    await run(agent)
    await run(agent)

    used = usage(agent.get_state(CONFIG))
    assert (used.model, dict(used.tools)) == (4, {"search": 2, "__all__": 2})
    assert (used.run_model, dict(used.run_tools)) == (2, {"search": 1, "__all__": 1})


@both_forms
async def test_reset_gives_the_quota_back(form: Form, signals: Signals) -> None:
    """After a reset the thread can use its whole limit again, and no run is pending."""
    agent, quota = agent_and_quota(signals, [["search", "search"], "done", ["search"], "done"])
    await run(agent)
    messages = len(agent.get_state(CONFIG).values["messages"])

    await reset(agent, quota, form=form)

    snapshot = agent.get_state(CONFIG)
    assert (usage(snapshot).model, dict(usage(snapshot).tools)) == (0, {})
    assert (snapshot.next, len(snapshot.values["messages"])) == ((), messages)
    await run(agent)
    assert dict(usage(agent.get_state(CONFIG)).tools) == {"search": 1, "__all__": 1}


@both_forms
async def test_reset_after_a_direct_return(form: Form, signals: Signals) -> None:
    """A reset does not wake a thread whose run ended with a tool's answer."""
    agent, quota = agent_and_quota(signals, [["report"], "done"])
    await run(agent)

    await reset(agent, quota, form=form)

    assert agent.get_state(CONFIG).next == ()
    assert usage(agent.get_state(CONFIG)).model == 0


@both_forms
async def test_reset_of_a_fresh_thread(form: Form, signals: Signals) -> None:
    """A thread without a state is refused."""
    agent, quota = agent_and_quota(signals, [])
    with pytest.raises(RuntimeError, match="thread '7' has no state"):
        await reset(agent, quota, form=form)


@both_forms
async def test_reset_of_a_failed_run(form: Form, signals: Signals) -> None:
    """A thread whose run failed elsewhere than at a limit is refused."""
    agent, quota = agent_and_quota(signals, [["search"], ConnectionError("down")])
    with pytest.raises(ConnectionError):
        await run(agent)
    with pytest.raises(RuntimeError, match="waits in mid-run before model"):
        await reset(agent, quota, form=form)


@both_forms
async def test_reset_of_a_run_whose_limit_failed(form: Form, signals: Signals) -> None:
    """A run that failed in our own node, and at no limit, is no run that a limit ended."""

    def broken(_state: Any, _runtime: Any) -> int:
        raise ConnectionError("no plan")

    agent, quota = agent_and_quota(signals, ["done"], thread_limit=broken)
    with pytest.raises(ConnectionError):
        await run(agent)
    with pytest.raises(RuntimeError, match="waits in mid-run before"):
        await reset(agent, quota, form=form)


@both_forms
async def test_reset_sets_the_series_to_0(form: Form, signals: Signals) -> None:
    """After a reset the thread counts as used up no more."""
    agent, quota = agent_and_quota(signals, [["search", "search"], "done"])
    await run(agent)
    labels = {"agent": "unnamed", "limit": "tool:search"}
    assert signals.value("langchain_quota_thread_used", **labels, thread_id="7") == 2

    await reset(agent, quota, form=form)

    assert signals.value("langchain_quota_thread_used", **labels, thread_id="7") == 0
    assert signals.value("langchain_quota_thread_limit", **labels, thread_id="7") == 2
    exhausted = {**labels, "scope": "thread", "state": "exhausted"}
    assert signals.value("langchain_quota_subjects", **exhausted) == 0


@both_forms
async def test_reset_of_an_agent_elsewhere(form: Form, signals: Signals) -> None:
    """What is no agent of this process, such as one on a server, is refused by name."""
    _, quota = agent_and_quota(signals, ["done"])
    with pytest.raises(TypeError, match="not a SimpleNamespace: do this where the agent runs"):
        await reset(SimpleNamespace(nodes={}), quota, form=form)


@both_forms
async def test_reset_by_another_agent(form: Form, signals: Signals) -> None:
    """An agent that does not have the middleware is refused."""
    agent, _ = agent_and_quota(signals, ["done"])
    other = type("Other", (QuotaMiddleware,), {})([ToolCallLimit(run_limit=1)])
    with pytest.raises(ValueError, match="does not have the middleware Other"):
        await reset(agent, other, form=form)
