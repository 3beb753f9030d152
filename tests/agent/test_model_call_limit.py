"""ModelCallLimitMiddleware in real agents: what runs, what is kept, and what is made visible."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware.model_call_limit import (
    ModelCallLimitExceededError as LangChainsError,
)
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from opentelemetry.trace import StatusCode

from langchain_quota import Decision, ModelCallLimitExceededError
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.agent.rules import model_limiter

if TYPE_CHECKING:
    from tests.signals import Signals

THREAD: RunnableConfig = {"configurable": {"thread_id": "thread-1"}}

# What a caller is given back is put together in as many ways.
forms = pytest.mark.parametrize(
    "form", ["ainvoke", "astream values", "astream updates", "abatch", "invoke"]
)


@tool
def search(query: str = "") -> str:
    """Search."""
    return "found"


def agent_of(model: ScriptedChatModel, *limiters: Any, saver: Any = None) -> Any:
    saver = saver or InMemorySaver()
    return create_agent(model, [search], middleware=limiters, checkpointer=saver, name="researcher")


async def turn(agent: Any, form: str = "ainvoke") -> list[BaseMessage]:
    """Run one turn on the thread, and return the messages that it made."""
    inputs = {"messages": [HumanMessage("hi")]}
    if form == "astream updates":
        return [
            message
            async for chunk in agent.astream(inputs, THREAD, stream_mode="updates")
            for update in chunk.values()
            for message in (update or {}).get("messages", [])
        ]
    if form == "astream values":
        async for result in agent.astream(inputs, THREAD, stream_mode="values"):
            last = result
    elif form == "abatch":
        [last] = await agent.abatch([inputs], [THREAD])
    elif form == "invoke":
        last = agent.invoke(inputs, THREAD)
    else:
        last = await agent.ainvoke(inputs, THREAD)
    messages: list[BaseMessage] = last["messages"]
    newest = max(at for at, each in enumerate(messages) if isinstance(each, HumanMessage))
    return messages[newest + 1 :]


def final(messages: list[BaseMessage]) -> str:
    assert isinstance(messages[-1], AIMessage)
    return str(messages[-1].content)


async def thread_count(agent: Any) -> int | None:
    state = await agent.aget_state(THREAD)
    count: int | None = state.values.get("thread_model_call_count")
    return count


def calls(signals: "Signals", decision: str) -> float | None:
    return signals.value(
        "langchain_quota_calls_total",
        agent="researcher",
        kind="model",
        tool="none",
        decision=decision,
    )


def charged(
    signals: "Signals", decision: str, scope: str = "none", limit: str = "model"
) -> float | None:
    return signals.value(
        "langchain_quota_limit_decisions_total",
        agent="researcher",
        limit=limit,
        scope=scope,
        decision=decision,
    )


def thread_series(signals: "Signals", limit: str = "model") -> tuple[float | None, ...]:
    """Used, limit and refused, as exported for the thread."""
    return tuple(
        signals.value(name, agent="researcher", limit=limit, thread_id="thread-1")
        for name in (
            "langchain_quota_thread_used",
            "langchain_quota_thread_limit",
            "langchain_quota_thread_blocked_total",
        )
    )


async def test_end(signals: "Signals") -> None:
    """`end`: the call over the limit is not made, and the run ends with a message."""
    limiter = model_limiter(signals, thread_limit=9, run_limit=2)
    model = ScriptedChatModel(script=[["search"], ["search", "search"], "never"])
    agent = agent_of(model, limiter)
    messages = await turn(agent)
    assert len(model.calls) == 2
    assert sum(isinstance(each, ToolMessage) for each in messages) == 3
    assert final(messages) == "Model call limits exceeded: run limit (2/2)"
    assert await thread_count(agent) == 2
    assert calls(signals, "allowed") == 2
    assert calls(signals, "blocked") == 1
    assert charged(signals, "allowed") == 2
    assert charged(signals, "blocked", "run") == 1
    assert charged(signals, "blocked", "thread") == 0
    assert thread_series(signals) == (2, 9, 1)


async def test_error(signals: "Signals") -> None:
    """`error`: our exception reaches the caller, who may catch LangChain's; its span says so."""
    limiter = model_limiter(signals, thread_limit=9, run_limit=1, exit_behavior="error")
    model = ScriptedChatModel(script=[["search"], "never"])
    agent = agent_of(model, limiter)
    with pytest.raises(LangChainsError) as caught:
        await turn(agent)
    error = caught.value
    assert type(error) is ModelCallLimitExceededError
    assert (error.thread_count, error.thread_limit) == (1, 9)
    assert (error.run_count, error.run_limit) == (1, 1)
    assert len(model.calls) == 1
    assert await thread_count(agent) == 1
    assert calls(signals, "allowed") == 1
    assert calls(signals, "blocked") == 1
    assert thread_series(signals) == (1, 9, 1)
    statuses = [
        ((span.attributes or {})["langchain_quota.decision"], span.status.status_code)
        for span in signals.spans()
    ]
    assert statuses == [("allowed", StatusCode.UNSET), ("blocked", StatusCode.ERROR)]


async def test_under_the_limit(signals: "Signals") -> None:
    """Up to the limit, exactly, every call is made and counted, and the run ends by itself."""
    limiter = model_limiter(signals, thread_limit=2, run_limit=2)
    model = ScriptedChatModel(script=[["search"], "done"])
    agent = agent_of(model, limiter)
    assert final(await turn(agent)) == "done"
    assert await thread_count(agent) == 2
    assert calls(signals, "allowed") == 2
    assert calls(signals, "blocked") == 0
    assert thread_series(signals) == (2, 2, None)


async def test_thread_limit_holds_across_turns(signals: "Signals") -> None:
    """A thread's count goes on from turn to turn, and stays used up."""
    limiter = model_limiter(signals, thread_limit=3)
    model = ScriptedChatModel(script=[["search"], "one", ["search"], "never"])
    agent = agent_of(model, limiter)
    ends = [final(await turn(agent)) for _ in range(3)]
    limit_reached = "Model call limits exceeded: thread limit (3/3)"
    assert ends == ["one", limit_reached, limit_reached]
    assert len(model.calls) == 3
    assert await thread_count(agent) == 3
    assert charged(signals, "allowed") == 3
    assert charged(signals, "blocked", "thread") == 2
    assert thread_series(signals) == (3, 3, 2)


async def test_thread_count_survives_a_new_agent(
    sqlite_saver: AsyncSqliteSaver, signals: "Signals"
) -> None:
    """The count is in the checkpoint: an agent built anew, as after a deployment, goes on."""
    ends = []
    for _ in range(2):
        limiter = model_limiter(signals, thread_limit=1)
        agent = agent_of(ScriptedChatModel(script=["done"]), limiter, saver=sqlite_saver)
        ends.append(final(await turn(agent)))
    assert ends == ["done", "Model call limits exceeded: thread limit (1/1)"]
    assert await thread_count(agent) == 1


async def test_run_limit_begins_anew_at_each_turn(signals: "Signals") -> None:
    """Each turn has the whole run limit, however the last one ended."""
    limiter = model_limiter(signals, run_limit=2)
    model = ScriptedChatModel(script=[["search"]] * 6)
    agent = agent_of(model, limiter)
    for _ in range(3):
        messages = await turn(agent)
        assert final(messages) == "Model call limits exceeded: run limit (2/2)"
    assert len(model.calls) == 6
    assert await thread_count(agent) == 6
    assert charged(signals, "allowed") == 6
    assert charged(signals, "blocked", "run") == 3


async def test_threads_count_apart(signals: "Signals") -> None:
    """What one thread has used is not charged to another."""
    limiter = model_limiter(signals, thread_limit=1)
    agent = agent_of(ScriptedChatModel(script=["one", "two", "never"]), limiter)
    ends = []
    for thread_id in ("a", "b", "a"):
        config = {"configurable": {"thread_id": thread_id}}
        result = await agent.ainvoke({"messages": [HumanMessage("hi")]}, config)
        ends.append(final(result["messages"]))
    assert ends == ["one", "two", "Model call limits exceeded: thread limit (1/1)"]


@pytest.mark.parametrize("exit_behavior", ["end", "error"])
@pytest.mark.parametrize("scope", ["thread", "run"])
async def test_limit_of_zero_forbids(scope: str, exit_behavior: Any, signals: "Signals") -> None:
    """A limit of 0 lets no call be made, in any turn, whatever a refusal does."""
    limiter = model_limiter(
        signals,
        thread_limit=0 if scope == "thread" else None,
        run_limit=0 if scope == "run" else None,
        exit_behavior=exit_behavior,
    )
    model = ScriptedChatModel(script=["never"])
    agent = agent_of(model, limiter)
    for _ in range(2):
        try:
            messages = await turn(agent)
        except ModelCallLimitExceededError:
            assert exit_behavior == "error"
            continue
        assert final(messages) == f"Model call limits exceeded: {scope} limit (0/0)"
    assert model.calls == ()
    assert not await thread_count(agent)
    assert calls(signals, "allowed") == 0
    assert calls(signals, "blocked") == 2
    assert charged(signals, "blocked", scope) == 2


async def test_failed_call_is_not_counted(signals: "Signals") -> None:
    """A call that raises reaches the caller and is not counted: the next turn has the budget."""
    limiter = model_limiter(signals, thread_limit=1)
    model = ScriptedChatModel(script=[ConnectionError("no model"), "done"])
    agent = agent_of(model, limiter)
    with pytest.raises(ConnectionError, match="no model"):
        await turn(agent)
    assert not await thread_count(agent)
    assert final(await turn(agent)) == "done"
    assert await thread_count(agent) == 1


async def test_two_named_limits(signals: "Signals") -> None:
    """With `limit_name` two model limits stand side by side, and each call counts once."""
    per_run = model_limiter(signals, run_limit=2, limit_name="per run")
    per_thread = model_limiter(signals, thread_limit=3, limit_name="per thread")
    assert per_run.name == "ModelCallLimitMiddleware[per run]"
    assert per_thread.name == "ModelCallLimitMiddleware[per thread]"
    model = ScriptedChatModel(script=[["search"]] * 3)
    agent = agent_of(model, per_run, per_thread)
    assert final(await turn(agent)) == "Model call limits exceeded: run limit (2/2)"
    assert await thread_count(agent) == 2
    assert final(await turn(agent)) == "Model call limits exceeded: thread limit (3/3)"
    assert await thread_count(agent) == 3
    assert len(model.calls) == 3
    assert charged(signals, "blocked", "run", limit="per run") == 1
    assert charged(signals, "blocked", "thread", limit="per thread") == 1
    assert thread_series(signals, "per thread") == (3, 3, 1)


def told(decision: Decision) -> str:
    """A message of the user's own, from the decision."""
    status = decision.refused_by[0]
    return f"{decision.call.kind}: {status.run_used} of {status.run_limit} used"


async def test_a_limit_that_is_meant_to_be_hit(signals: "Signals") -> None:
    """With `alert=False` its refusals are shown as worth no alert."""
    limiter = model_limiter(signals, run_limit=0, alert=False)
    await turn(agent_of(ScriptedChatModel(script=[["search"], "done"]), limiter))
    labels = {"agent": "researcher", "limit": limiter._limits[0].name}
    assert signals.value("langchain_quota_limit_alert", **labels) == 0


@pytest.mark.parametrize(
    ("message", "text"),
    [("That is all for now.", "That is all for now."), (told, "model: 1 of 1 used")],
    ids=["text", "function"],
)
async def test_message(message: Any, text: str, signals: "Signals") -> None:
    """`message`, a text or a function of the Decision, is the final message."""
    limiter = model_limiter(signals, run_limit=1, message=message)
    model = ScriptedChatModel(script=[["search"], "never"])
    assert final(await turn(agent_of(model, limiter))) == text


@pytest.mark.parametrize("exit_behavior", ["end", "error"])
@forms
async def test_signals_equal_the_decisions(
    exit_behavior: Any, form: str, signals: "Signals"
) -> None:
    """Captured decisions, counters and spans tell the same of every judged call, in order."""
    limiter = model_limiter(signals, run_limit=3, exit_behavior=exit_behavior)
    model = ScriptedChatModel(script=[["search"]] * 3)
    agent = agent_of(model, limiter)
    with captured_decisions() as decisions:
        if exit_behavior == "error":
            with pytest.raises(ModelCallLimitExceededError):
                await turn(agent, form)
        else:
            await turn(agent, form)
    decided = [each.outcome.value for each in decisions]
    assert decided == ["allowed", "allowed", "allowed", "blocked"]
    assert [each.call.thread_id for each in decisions] == ["thread-1"] * 4
    assert [each.limits[0].run_used for each in decisions] == [1, 2, 3, 3]
    spans = [span.attributes or {} for span in signals.spans()]
    assert [span["langchain_quota.decision"] for span in spans] == decided
    assert [span["langchain_quota.run.used"] for span in spans] == [1, 2, 3, 3]
    counted = Counter(
        {
            sample.labels["decision"]: int(sample.value)
            for family in signals.registry.collect()
            for sample in family.samples
            if sample.name == "langchain_quota_calls_total" and sample.value
        }
    )
    assert counted == Counter(decided)
