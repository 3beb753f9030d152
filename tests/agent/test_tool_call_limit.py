"""ToolCallLimitMiddleware in real agents: what runs, what is kept, and what is made visible."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry.trace import StatusCode

from langchain_quota import Decision
from langchain_quota.messages import SKIPPED
from langchain_quota.testing import ScriptedChatModel
from tests.agent.test_model_call_limit import THREAD, final, turn
from tests.scene import tool_limiter

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


def told(decision: Decision) -> str:
    """A message of the user's own, from the decision."""
    status = decision.refused_by[0]
    return f"{status.limit}: not more than {status.run_limit} in a {status.scope}"


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
