"""The drop-in limiters in agents: what runs, what is kept, and what is made visible."""

from collections import Counter
from typing import Any

import pytest
from langchain.agents.middleware.model_call_limit import (
    ModelCallLimitExceededError as LangChainsModelError,
)
from langchain_core.messages import ToolMessage
from opentelemetry.trace import StatusCode

from langchain_quota import Decision, ModelCallLimitExceededError
from tests.scene import CONFIG, Scene, model_limiter, tool_limiter
from tests.telemetry import Signals

SEARCH_REFUSED = "Tool call limit exceeded. Do not call 'search' again."
SEARCH_ENDED = "'search' tool call limit reached: run limit exceeded (2/1 calls)."
SKIPPED = (
    "This tool call was not run: the run was stopped because another tool call of the same "
    "message exceeded the limit."
)


def said(scene: Scene) -> Counter[tuple[str | None, str, str]]:
    """The answers of tool calls: tool, status, text."""
    messages = scene.state()["messages"]
    tools = [each for each in messages if isinstance(each, ToolMessage)]
    return Counter((each.name, each.status, each.text) for each in tools)


def thread_series(signals: Signals, limit: str) -> tuple[float | None, ...]:
    """Used, limit and refused, as exported for the thread."""
    names = [f"langchain_quota_thread_{each}" for each in ("used", "limit", "blocked_total")]
    labels = {"agent": "unnamed", "limit": limit, "thread_id": "thread-1"}
    return tuple(signals.value(name, **labels) for name in names)


def spanned(signals: Signals) -> Counter[tuple[Any, StatusCode]]:
    """The decisions and statuses of all spans."""
    return Counter(
        ((span.attributes or {})["langchain_quota.decision"], span.status.status_code)
        for span in signals.spans()
    )


@pytest.mark.parametrize("way", ["ainvoke", "invoke", "values", "updates", "abatch"])
async def test_continue(way: str, signals: Signals) -> None:
    """`continue`: what is over the limit is answered, the rest runs, and the agent goes on."""
    limiter = tool_limiter(signals, "search", thread_limit=10, run_limit=2)
    scene = Scene(signals, [["search", "search", "calc", "search"], "done"], [limiter])
    asked: Any = {"messages": [("user", "hi")]}
    if way in ("values", "updates"):
        assert [each async for each in scene.agent.astream(asked, CONFIG, stream_mode=way)]
    elif way == "abatch":
        await scene.agent.abatch([asked], [CONFIG])
    else:
        scene.form = "sync" if way == "invoke" else "async"
        await scene.play()
    assert said(scene) == {
        ("search", "success", "search ran"): 2,
        ("search", "error", SEARCH_REFUSED): 1,
        ("calc", "success", "calc ran"): 1,
    }
    assert scene.last_text() == "done"
    assert scene.state()["thread_tool_call_count"] == {"search": 2}
    assert [scene.calls(each, "search") for each in ("allowed", "blocked", "skipped")] == [2, 1, 0]
    assert scene.metric("tool:search", "blocked", "run") == 1
    assert scene.metric("tool:search", "blocked", "thread") == 0
    assert thread_series(signals, "tool:search") == (2, 10, 1)
    scene.check()


def described(decision: Decision) -> str:
    """A message of the user's own, from the decision."""
    status = decision.refused_by[0]
    count = status.count_of(status.scope)
    return f"{status.limit}: not more than {count and count.limit} in a {status.scope}"


@pytest.mark.parametrize(
    ("message", "refusal", "last"),
    [
        (None, SEARCH_REFUSED, SEARCH_ENDED),
        ("No more of it.", "No more of it.", "No more of it."),
        (described, *["tool:search: not more than 1 in a run"] * 2),
    ],
    ids=["known words", "text", "function"],
)
async def test_end(message: Any, refusal: str, last: str, signals: Signals) -> None:
    """`end`: nothing of the batch runs or is charged; the run ends with a message, or `message`."""
    options: dict[str, Any] = {"exit_behavior": "end", "message": message}
    limiter = tool_limiter(signals, "search", thread_limit=10, run_limit=1, **options)
    scene = await Scene(signals, [["search", "search", "calc"], "never"], [limiter]).played()
    assert said(scene) == {
        ("search", "error", refusal): 1,
        ("search", "error", SKIPPED): 1,
        ("calc", "error", SKIPPED): 1,
    }
    assert scene.last_text() == last
    assert scene.state()["thread_tool_call_count"] == {"search": 0}
    assert [scene.calls(each, "search") for each in ("allowed", "blocked", "skipped")] == [0, 1, 1]
    assert scene.calls("skipped", "calc") == 1
    assert scene.metric("tool:search", "blocked", "run") == 1
    assert thread_series(signals, "tool:search") == (0, 10, 1)
    scene.check()


async def test_error_of_a_model_limiter(signals: Signals) -> None:
    """`error`: our exception reaches the caller, who may catch LangChain's; its span says so."""
    limiter = model_limiter(signals, thread_limit=9, run_limit=1, exit_behavior="error")
    scene = Scene(signals, [["search"], "never"], [limiter])
    with pytest.raises(LangChainsModelError) as caught:
        await scene.play()
    error = caught.value
    assert type(error) is ModelCallLimitExceededError
    assert (error.thread_count, error.thread_limit) == (1, 9)
    assert (error.run_count, error.run_limit) == (1, 1)
    assert scene.state()["thread_model_call_count"] == len(scene.model.calls) == 1
    assert (scene.calls("allowed"), scene.calls("blocked")) == (1, 1)
    assert thread_series(signals, "model") == (1, 9, 1)
    assert spanned(signals) == {("allowed", StatusCode.UNSET): 1, ("blocked", StatusCode.ERROR): 1}


async def test_two_named_limits_on_one_tool(signals: Signals) -> None:
    """With `limit_name` two limits on one tool stand side by side, as thresholds of one count."""
    burst = tool_limiter(signals, "search", run_limit=2, limit_name="burst")
    budget = tool_limiter(signals, "search", thread_limit=3, limit_name="budget")
    assert burst.name == "ToolCallLimitMiddleware[search/burst]"
    assert budget.name == "ToolCallLimitMiddleware[search/budget]"
    script = [["search"] * 3, "one", ["search"] * 2, "two"]
    scene = Scene(signals, script, [burst, budget])
    for ran in (2, 3):
        await scene.play()
        assert scene.ran == ["search"] * ran
        scene.check()
    assert scene.metric("burst", "blocked", "run") == 1
    assert scene.metric("budget", "blocked", "thread") == 1
    assert thread_series(signals, "budget") == (3, 3, 1)


async def test_on_pending_raise(signals: Signals) -> None:
    """`on_pending="raise"` refuses to end a run with calls of other tools pending."""
    limiter = tool_limiter(signals, "search", run_limit=0, exit_behavior="end", on_pending="raise")
    scene = Scene(signals, [["search", "calc"]], [limiter])
    with pytest.raises(NotImplementedError, match="calc"):
        await scene.play()
    assert scene.state().get("thread_tool_call_count", {}).get("search", 0) == 0
    assert (scene.calls("blocked", "search"), scene.calls("skipped", "calc")) == (1, 1)
    assert spanned(signals) == {("blocked", StatusCode.ERROR): 1, ("skipped", StatusCode.UNSET): 1}
