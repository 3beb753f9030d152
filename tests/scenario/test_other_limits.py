"""Money, calls at once, repeats and quotas: what is counted at the edges, in agents."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolCall, ToolMessage
from langchain_core.tools import StructuredTool, ToolException, tool

from langchain_quota import (
    ConcurrencyLimit,
    CostLimit,
    MemoryStore,
    Price,
    Quota,
    RepeatLimit,
    ToolCallLimit,
)
from langchain_quota.core.decision import Decision
from langchain_quota.limits.call import Call
from langchain_quota.testing import ScriptedChatModel, assert_valid_history
from tests.scene import Scene, asking
from tests.stores import DAY, FickleStore
from tests.telemetry import Signals

WAITS = "langchain_quota_wait_seconds_count"
PRICES = {"gpt": Price(input="0.0005", output="0.0005", cache_read="0.0001")}


@pytest.mark.parametrize(
    ("tokens", "details", "spent"),
    [(1, {}, 1), (3, {}, 2), (4, {}, 2), (100, {"cache_read": 100}, 10)],
    ids=["half a nanodollar", "one and a half", "two", "from the cache"],
)
async def test_money_is_rounded_up(tokens: int, details: Any, spent: int, signals: Signals) -> None:
    """A part of a nanodollar is charged as a whole one; cached tokens have their own price."""
    used: Any = {"input_tokens": tokens, "output_tokens": 0, "total_tokens": tokens}
    used["input_token_details"] = details
    model = ScriptedChatModel(script=[AIMessage("done", usage_metadata=used)], model="gpt")
    scene = Scene(signals, model, [CostLimit(run_limit="2.5")], prices=PRICES)
    await scene.play()
    assert scene.usage().spent["model.nanodollars"] == spent
    shown = {"agent": "unnamed", "limit": "cost", "scope": "run", "unit": "dollars"}
    assert signals.value("langchain_quota_limit", **shown) == 2.5


class BeginningLimit(ToolCallLimit):
    """A limit of a user's own kind, on tools by how their names begin."""

    def matches(self, call: Call) -> bool:
        return (call.tool or "").startswith("mcp_")


async def test_a_kind_of_limit_that_matches_by_something_else(signals: Signals) -> None:
    """Which calls a limit's own `matches` takes is asked for each tool, whichever came first."""
    script = [["calc"], ["mcp_read"], ["calc", "mcp_write"], "done"]
    names = ("calc", "mcp_read", "mcp_write")
    scene = Scene(signals, script, [BeginningLimit(run_limit=1)], tools=names)
    await scene.play()
    assert scene.ran == ["calc", "mcp_read", "calc"]


async def test_failures_that_the_model_has_not_read_count_once(signals: Signals) -> None:
    """Of one message, calls that fail alike are one failure: the model has not read the first."""

    @tool("search")
    def failing(text: str) -> str:
        """Search for a text."""
        ran_with.append(text)
        raise ToolException("the index is broken")

    ran_with: list[str] = []
    failing.handle_tool_error = True
    made = [["a"], ["b", "c"], ["d"], ["e"]]
    script = [*([("search", {"text": each}) for each in batch] for batch in made), "done"]
    await Scene(signals, script, [RepeatLimit(3)], tools=[failing]).play()
    assert sorted(ran_with) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("caps", [(1, 3), (3, 1)])
async def test_the_lowest_of_two_caps_holds(caps: tuple[int, int], signals: Signals) -> None:
    """Of one tool no more calls run at once than the lower cap allows, and they run in order."""
    running, most, order = 0, 0, ""

    @tool("search")
    async def slow(text: str) -> str:
        """Search for a text for a while."""
        nonlocal running, most, order
        running, order = running + 1, order + text
        most = max(most, running)
        for _ in range(20):
            await asyncio.sleep(0)
        running -= 1
        return "found"

    limits = [ConcurrencyLimit("search", max_concurrency=each, name=f"cap-{each}") for each in caps]
    script = asking(*(("search", {"text": each}) for each in "abcd"))
    scene = Scene(signals, script, limits, tools=[slow])
    await scene.play()
    assert scene.answers() == [("search", "success")] * 4
    assert (most, order) == (1, "abcd")


@pytest.mark.parametrize("waits", [(0, 3600), (3600, 0)])
async def test_the_shorter_of_two_waits_holds(waits: tuple[int, int], signals: Signals) -> None:
    """A call that one of its caps keeps no longer is refused, while the other would wait on."""
    refused = asyncio.Event()

    async def run() -> str:
        await refused.wait()
        return "found"

    slow = StructuredTool.from_function(coroutine=run, name="search", description="Search.")
    limits = [ConcurrencyLimit("search", max_concurrency=1, wait=n, name=f"for-{n}") for n in waits]

    def learn(decision: Decision) -> None:
        if decision.outcome == "blocked":
            refused.set()

    script: Any = asking("search", "search")
    await Scene(signals, script, limits, tools=[slow], on_decision=learn).play()
    assert signals.value(WAITS, decision="blocked", agent="unnamed", limit="for-0") == 1


async def test_a_store_that_forgot_all_hears_of_an_outage_in_order(signals: Signals) -> None:
    """What ran in an outage is counted once, on top of what the oldest of its runs began with."""
    store = FickleStore(MemoryStore())
    limit = ToolCallLimit("search", thread_limit=9)
    scene = Scene(signals, asking("search"), [limit], store=store, on_store_error="allow")
    store.down = True
    await scene.play()
    await scene.play()
    store.down = False
    await scene.play()
    assert [each.used for each in store.usages("search:thread:*")] == [3]


@pytest.mark.parametrize(
    ("ann", "bob"),
    [("a" * 100 + "1", "a" * 100 + "2"), ("a:b", "a%3Ab"), ("é" * 50, "é" * 51), ("a b", "a+b")],
    ids=["long", "colon", "accents", "space"],
)
async def test_users_that_look_alike_share_no_quota(ann: str, bob: str, signals: Signals) -> None:
    """However alike two users' ids are, each has a quota of their own."""
    limit = ToolCallLimit("search", quotas=[Quota(1, per="user_id", window=DAY)])
    scene = Scene(signals, asking("search"), [limit], store=MemoryStore())
    ran = []
    for thread, user in enumerate((ann, bob, ann)):
        await scene.play(thread_id=str(thread), context={"user_id": user})
        ran.append(len(scene.ran))
    assert ran == [1, 2, 2]


@pytest.mark.parametrize("hour", [0, 11, 13, 23.999])
def test_a_window_is_the_same_all_day(hour: float) -> None:
    """A grant to a day's count ends with that day, at whatever hour it is given."""
    store = MemoryStore(clock=lambda: datetime(2026, 1, 1, tzinfo=UTC).timestamp() + hour * 3600)
    granted = store.grant("search:user_id:ann", 1, window=DAY)
    assert granted.until == datetime(2026, 1, 2, tzinfo=UTC)


CALL = AIMessage("", tool_calls=[ToolCall(name="search", args={}, id="a")])
ANSWER = ToolMessage("1", tool_call_id="a")


@pytest.mark.parametrize(
    ("behind", "error"),
    [
        ([ANSWER], None),
        ([ToolMessage("1", tool_call_id="b")], "'b'"),
        ([ANSWER, ANSWER], "again"),
        ([HumanMessage("and?")], "gets no answer"),
    ],
    ids=["valid", "another call", "two answers", "no answer"],
)
def test_histories_that_a_provider_refuses(behind: list[Any], error: str | None) -> None:
    """Each call has exactly one answer, directly behind it."""
    messages = [HumanMessage("hi"), CALL, *behind]
    if error is None:
        assert_valid_history(messages)
        return
    with pytest.raises(AssertionError, match=error):
        assert_valid_history(messages)
