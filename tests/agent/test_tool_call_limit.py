"""ToolCallLimitMiddleware in real agents: what runs, what is kept, and what is made visible."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware.tool_call_limit import (
    ToolCallLimitExceededError as LangChainsError,
)
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from opentelemetry.trace import StatusCode

from langchain_quota import Decision, ToolCallLimitExceededError, ToolCallLimitMiddleware
from langchain_quota.messages import SKIPPED
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.agent.rules import model_limiter, tool_limiter
from tests.agent.test_model_call_limit import THREAD, final, forms, turn

if TYPE_CHECKING:
    from tests.signals import Signals

SEARCH_REFUSED = "Tool call limit exceeded. Do not call 'search' again."


@tool
def search(query: str = "") -> str:
    """Search."""
    return "found"


@tool
def calc(term: str = "") -> str:
    """Calculate."""
    return "4"


def agent_of(script: list[Any], *limiters: Any, saver: Any = None) -> Any:
    return create_agent(
        ScriptedChatModel(script=script),
        [search, calc],
        middleware=limiters,
        checkpointer=saver or InMemorySaver(),
        name="researcher",
    )


def answers(messages: list[BaseMessage]) -> Counter[tuple[str | None, str, str]]:
    return Counter(
        (each.name, each.status, str(each.content))
        for each in messages
        if isinstance(each, ToolMessage)
    )


async def thread_counts(agent: Any) -> dict[str, int]:
    state = await agent.aget_state(THREAD)
    counts: dict[str, int] = state.values.get("thread_tool_call_count", {})
    return counts


def calls(signals: "Signals", tool_name: str, decision: str) -> float | None:
    return signals.value(
        "langchain_quota_calls_total",
        agent="researcher",
        kind="tool",
        tool=tool_name,
        decision=decision,
    )


def charged(signals: "Signals", limit: str, decision: str, scope: str = "none") -> float | None:
    return signals.value(
        "langchain_quota_limit_decisions_total",
        agent="researcher",
        limit=limit,
        scope=scope,
        decision=decision,
    )


def thread_series(signals: "Signals", limit: str) -> tuple[float | None, ...]:
    """Used, limit and refused, as exported for the thread."""
    return tuple(
        signals.value(name, agent="researcher", limit=limit, thread_id="thread-1")
        for name in (
            "langchain_quota_thread_used",
            "langchain_quota_thread_limit",
            "langchain_quota_thread_blocked_total",
        )
    )


async def test_continue(signals: "Signals") -> None:
    """`continue`: what is over the limit is answered, the rest runs, and the agent goes on."""
    limiter = tool_limiter(signals, "search", thread_limit=10, run_limit=2)
    agent = agent_of([["search", "search", "calc", "search"], "done"], limiter)
    messages = await turn(agent)
    assert answers(messages) == {
        ("search", "success", "found"): 2,
        ("search", "error", SEARCH_REFUSED): 1,
        ("calc", "success", "4"): 1,
    }
    assert final(messages) == "done"
    assert await thread_counts(agent) == {"search": 2}
    assert calls(signals, "search", "allowed") == 2
    assert calls(signals, "search", "blocked") == 1
    assert calls(signals, "search", "skipped") == 0
    assert charged(signals, "tool:search", "allowed") == 2
    assert charged(signals, "tool:search", "blocked", "run") == 1
    assert charged(signals, "tool:search", "blocked", "thread") == 0
    assert thread_series(signals, "tool:search") == (2, 10, 1)


async def test_end(signals: "Signals") -> None:
    """`end`: nothing of the batch runs or is charged, and the run ends with a message."""
    limiter = tool_limiter(signals, "search", thread_limit=10, run_limit=1, exit_behavior="end")
    agent = agent_of([["search", "search", "calc"], "never"], limiter)
    messages = await turn(agent)
    assert answers(messages) == {
        ("search", "error", SEARCH_REFUSED): 1,
        ("search", "error", SKIPPED): 1,
        ("calc", "error", SKIPPED): 1,
    }
    assert final(messages) == ("'search' tool call limit reached: run limit exceeded (2/1 calls).")
    assert await thread_counts(agent) == {"search": 0}
    assert calls(signals, "search", "allowed") == 0
    assert calls(signals, "search", "blocked") == 1
    assert calls(signals, "search", "skipped") == 1
    assert calls(signals, "calc", "skipped") == 1
    assert charged(signals, "tool:search", "allowed") == 0
    assert charged(signals, "tool:search", "blocked", "run") == 1
    assert thread_series(signals, "tool:search") == (0, 10, 1)


async def test_error(signals: "Signals") -> None:
    """`error`: our exception reaches the caller, who may catch LangChain's; nothing is charged."""
    limiter = tool_limiter(signals, "search", thread_limit=10, run_limit=1, exit_behavior="error")
    agent = agent_of([["search", "search"]], limiter)
    with pytest.raises(LangChainsError) as caught:
        await turn(agent)
    error = caught.value
    assert type(error) is ToolCallLimitExceededError
    assert (error.tool_name, error.thread_count, error.thread_limit) == ("search", 2, 10)
    assert (error.run_count, error.run_limit) == (2, 1)
    assert (await thread_counts(agent)).get("search", 0) == 0
    assert calls(signals, "search", "allowed") == 0
    assert calls(signals, "search", "blocked") == 1
    assert calls(signals, "search", "skipped") == 1
    assert thread_series(signals, "tool:search") == (0, 10, 1)
    statuses = Counter(
        ((span.attributes or {})["langchain_quota.decision"], span.status.status_code)
        for span in signals.spans()
    )
    assert statuses == {("blocked", StatusCode.ERROR): 1, ("skipped", StatusCode.UNSET): 1}


async def test_under_the_limit(signals: "Signals") -> None:
    """Up to the limit, exactly, every call runs and is counted."""
    limiter = tool_limiter(signals, thread_limit=3, run_limit=3)
    agent = agent_of([["search", "calc"], ["search"], "done"], limiter)
    messages = await turn(agent)
    assert answers(messages) == {("search", "success", "found"): 2, ("calc", "success", "4"): 1}
    assert final(messages) == "done"
    assert await thread_counts(agent) == {"__all__": 3}
    assert calls(signals, "search", "allowed") == 2
    assert calls(signals, "calc", "allowed") == 1
    assert charged(signals, "tool:*", "allowed") == 3
    assert thread_series(signals, "tool:*") == (3, 3, None)


async def test_thread_limit_holds_across_turns(signals: "Signals") -> None:
    """A thread's count goes on from turn to turn, and stays used up."""
    limiter = tool_limiter(signals, "search", thread_limit=3)
    script = [["search", "search"], "one", ["search", "search"], "two", ["search"], "three"]
    agent = agent_of(script, limiter)
    ran = []
    for _ in range(3):
        found = answers(await turn(agent))
        ran.append((found["search", "success", "found"], found["search", "error", SEARCH_REFUSED]))
    assert ran == [(2, 0), (1, 1), (0, 1)]
    assert await thread_counts(agent) == {"search": 3}
    assert charged(signals, "tool:search", "allowed") == 3
    assert charged(signals, "tool:search", "blocked", "thread") == 2
    assert thread_series(signals, "tool:search") == (3, 3, 2)


async def test_thread_count_survives_a_new_agent(
    sqlite_saver: AsyncSqliteSaver, signals: "Signals"
) -> None:
    """The count is in the checkpoint: an agent built anew, as after a deployment, goes on."""
    for refused in (0, 1):
        limiter = tool_limiter(signals, thread_limit=1)
        agent = agent_of([["search"], "done"], limiter, saver=sqlite_saver)
        messages = await turn(agent)
        assert sum(status == "error" for _, status, _ in answers(messages)) == refused
    assert await thread_counts(agent) == {"__all__": 1}


async def test_run_limit_begins_anew_at_each_turn(signals: "Signals") -> None:
    """Each turn has the whole run limit, over all its model steps, however the last one ended."""
    limiter = tool_limiter(signals, "search", run_limit=2)
    script = [["search"], ["search", "search"], "done"]
    agent = agent_of(script * 3, limiter)
    for _ in range(3):
        assert answers(await turn(agent)) == {
            ("search", "success", "found"): 2,
            ("search", "error", SEARCH_REFUSED): 1,
        }
    assert await thread_counts(agent) == {"search": 6}
    assert charged(signals, "tool:search", "allowed") == 6
    assert charged(signals, "tool:search", "blocked", "run") == 3


async def test_threads_count_apart(signals: "Signals") -> None:
    """What one thread has used is not charged to another."""
    limiter = tool_limiter(signals, thread_limit=1)
    agent = agent_of([["search"], "done"] * 3, limiter)
    statuses = []
    for thread_id in ("a", "b", "a"):
        config = {"configurable": {"thread_id": thread_id}}
        result = await agent.ainvoke({"messages": [HumanMessage("hi")]}, config)
        statuses.append(result["messages"][-2].status)
    assert statuses == ["success", "success", "error"]


@pytest.mark.parametrize("exit_behavior", ["continue", "end", "error"])
@pytest.mark.parametrize("scope", ["thread", "run"])
async def test_limit_of_zero_forbids(scope: str, exit_behavior: Any, signals: "Signals") -> None:
    """A limit of 0 lets no call run, in any turn, whatever a refusal does."""
    limiter = tool_limiter(
        signals,
        "search",
        thread_limit=0 if scope == "thread" else None,
        run_limit=0 if scope == "run" else None,
        exit_behavior=exit_behavior,
    )
    script = [["search"], "done"] if exit_behavior == "continue" else [["search"]]
    agent = agent_of(script * 2, limiter)
    for _ in range(2):
        try:
            messages = await turn(agent)
        except ToolCallLimitExceededError:
            assert exit_behavior == "error"
            continue
        assert answers(messages) == {("search", "error", SEARCH_REFUSED): 1}
    assert (await thread_counts(agent)).get("search", 0) == 0
    assert calls(signals, "search", "allowed") == 0
    assert calls(signals, "search", "blocked") == 2
    assert charged(signals, "tool:search", "blocked", scope) == 2


async def test_parallel_calls_are_charged_in_order(signals: "Signals") -> None:
    """Of a batch, the first calls run and the later ones are refused."""
    limiter = tool_limiter(signals, run_limit=3)
    batch = ["search", "calc", "search", "calc", "search"]
    messages = await turn(agent_of([batch, "done"], limiter))
    statuses = {
        each.tool_call_id: each.status for each in messages if isinstance(each, ToolMessage)
    }
    assert [statuses[f"call_{number}"] for number in range(1, 6)] == [
        "success",
        "success",
        "success",
        "error",
        "error",
    ]
    assert calls(signals, "search", "allowed") == 2
    assert calls(signals, "search", "blocked") == 1
    assert calls(signals, "calc", "blocked") == 1


async def test_two_named_limits_on_one_tool(signals: "Signals") -> None:
    """With `limit_name` two limits on one tool stand side by side, as thresholds of one count."""
    burst = tool_limiter(signals, "search", run_limit=2, limit_name="burst")
    budget = tool_limiter(signals, "search", thread_limit=3, limit_name="budget")
    assert burst.name == "ToolCallLimitMiddleware[search/burst]"
    assert budget.name == "ToolCallLimitMiddleware[search/budget]"
    script = [["search"] * 3, "one", ["search"] * 2, "two"]
    agent = agent_of(script, burst, budget)
    first = answers(await turn(agent))
    assert first == {("search", "success", "found"): 2, ("search", "error", SEARCH_REFUSED): 1}
    assert await thread_counts(agent) == {"search": 2}
    second = answers(await turn(agent))
    assert second == {("search", "success", "found"): 1, ("search", "error", SEARCH_REFUSED): 1}
    assert await thread_counts(agent) == {"search": 3}
    assert charged(signals, "burst", "blocked", "run") == 1
    assert charged(signals, "budget", "blocked", "thread") == 1
    for limit in ("burst", "budget"):
        admitted, refunded = (charged(signals, limit, each) for each in ("allowed", "refunded"))
        assert (admitted or 0) - (refunded or 0) == 3
    used, limit_of_thread, blocked = thread_series(signals, "budget")
    assert (used, limit_of_thread, blocked) == (3, 3, 1)


async def test_limits_on_different_tools(signals: "Signals") -> None:
    """Limiters on two tools need no names, and do not touch each other's calls."""
    limiters = [tool_limiter(signals, name, run_limit=1) for name in ("search", "calc")]
    agent = agent_of([["search", "calc", "calc"], "done"], *limiters)
    assert answers(await turn(agent)) == {
        ("search", "success", "found"): 1,
        ("calc", "success", "4"): 1,
        ("calc", "error", "Tool call limit exceeded. Do not call 'calc' again."): 1,
    }
    assert charged(signals, "tool:search", "blocked", "run") == 0
    assert charged(signals, "tool:calc", "blocked", "run") == 1


def told(decision: Decision) -> str:
    """A message of the user's own, from the decision."""
    status = decision.refused_by[0]
    return f"{status.limit}: not more than {status.run_limit} in a {status.scope}"


async def test_a_limit_that_is_meant_to_be_hit(signals: "Signals") -> None:
    """With `alert=False` its refusals are shown as worth no alert."""
    limiter = tool_limiter(signals, run_limit=0, alert=False)
    await turn(agent_of([["search"], "done"], limiter))
    labels = {"agent": "researcher", "limit": limiter._limits[0].name}
    assert signals.value("langchain_quota_limit_alert", **labels) == 0


@pytest.mark.parametrize(
    ("message", "text"),
    [("No more of it.", "No more of it."), (told, "tool:search: not more than 1 in a run")],
    ids=["text", "function"],
)
async def test_message_of_blocked_call(message: Any, text: str, signals: "Signals") -> None:
    """`message`, a text or a function of the Decision, is what the model reads."""
    limiter = tool_limiter(signals, "search", run_limit=1, message=message)
    messages = await turn(agent_of([["search", "search"], "done"], limiter))
    assert answers(messages) == {("search", "success", "found"): 1, ("search", "error", text): 1}


@pytest.mark.parametrize(
    ("message", "text"),
    [("No more of it.", "No more of it."), (told, "tool:search: not more than 1 in a run")],
    ids=["text", "function"],
)
async def test_message_at_the_end(message: Any, text: str, signals: "Signals") -> None:
    """With `end`, `message` is the answer of the refused call and the final message."""
    limiter = tool_limiter(signals, "search", run_limit=1, exit_behavior="end", message=message)
    messages = await turn(agent_of([["search", "search", "calc"]], limiter))
    assert answers(messages) == {
        ("search", "error", text): 1,
        ("search", "error", SKIPPED): 1,
        ("calc", "error", SKIPPED): 1,
    }
    assert final(messages) == text


@pytest.mark.parametrize("exit_behavior", ["continue", "end"])
async def test_message_reads_the_emitted_decision(exit_behavior: Any, signals: "Signals") -> None:
    """A function `message` is given the very decision that telemetry is given, each time."""
    read: list[Decision] = []

    def message(decision: Decision) -> str:
        read.append(decision)
        return "no"

    limiter = tool_limiter(signals, run_limit=1, exit_behavior=exit_behavior, message=message)
    with captured_decisions() as decisions:
        await turn(agent_of([["search", "search"], "done"], limiter))
    blocked = [each for each in decisions if each.outcome == "blocked"]
    assert len(blocked) == 1
    assert read == blocked * (2 if exit_behavior == "end" else 1)


@pytest.mark.parametrize("on_pending", ["skip", "raise"])
async def test_end_alone_needs_no_on_pending(on_pending: Any, signals: "Signals") -> None:
    """When only calls of the limited tool are pending, `end` ends the run either way."""
    limiter = tool_limiter(
        signals, "search", run_limit=1, exit_behavior="end", on_pending=on_pending
    )
    messages = await turn(agent_of([["search", "search"]], limiter))
    assert final(messages).startswith("'search' tool call limit reached")


async def test_on_pending_raise(signals: "Signals") -> None:
    """`on_pending="raise"` refuses to end a run with calls of other tools pending."""
    limiter = tool_limiter(signals, "search", run_limit=0, exit_behavior="end", on_pending="raise")
    agent = agent_of([["search", "calc"]], limiter)
    with pytest.raises(NotImplementedError, match="calc"):
        await turn(agent)
    assert (await thread_counts(agent)).get("search", 0) == 0
    assert calls(signals, "search", "blocked") == 1
    assert calls(signals, "calc", "skipped") == 1
    statuses = {
        (span.attributes or {})["gen_ai.tool.name"]: span.status.status_code
        for span in signals.spans()
    }
    assert statuses == {"search": StatusCode.ERROR, "calc": StatusCode.UNSET}


@pytest.mark.parametrize("value", ["Skip", "", None, 1])
def test_on_pending_is_checked(value: Any) -> None:
    """Another value of `on_pending` is an error that shows it."""
    with pytest.raises(ValueError, match="on_pending") as caught:
        ToolCallLimitMiddleware(run_limit=1, on_pending=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("exit_behavior", ["continue", "end", "error"])
@forms
async def test_signals_equal_the_decisions(
    exit_behavior: Any, form: str, signals: "Signals"
) -> None:
    """Captured decisions, counters and spans tell the same of every judged call."""
    agent = agent_of(
        [["search", "calc", "search"], ["calc", "search", "search"], "done"],
        model_limiter(signals, run_limit=9),
        tool_limiter(signals, "search", thread_limit=9, run_limit=3, exit_behavior=exit_behavior),
    )
    with captured_decisions() as decisions:
        if exit_behavior == "error":
            with pytest.raises(ToolCallLimitExceededError):
                await turn(agent, form)
        else:
            await turn(agent, form)
    decided = Counter(
        (each.call.kind, each.call.tool or "none", each.outcome.value) for each in decisions
    )
    assert decided["tool", "search", "blocked"] == 1
    assert decided["tool", "search", "allowed"] == (3 if exit_behavior == "continue" else 2)
    counted = Counter(
        {
            (sample.labels["kind"], sample.labels["tool"], sample.labels["decision"]): int(
                sample.value
            )
            for family in signals.registry.collect()
            for sample in family.samples
            if sample.name == "langchain_quota_calls_total" and sample.value
        }
    )
    spanned = Counter(
        (
            (span.attributes or {})["langchain_quota.kind"],
            (span.attributes or {}).get("gen_ai.tool.name", "none"),
            (span.attributes or {})["langchain_quota.decision"],
        )
        for span in signals.spans()
    )
    assert decided == counted
    assert decided == spanned
