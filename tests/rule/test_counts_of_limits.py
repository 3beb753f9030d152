"""Which calls a limit counts, and which limits share a count."""

from itertools import permutations
from typing import Any

import pytest

from langchain_quota import MemoryStore, ModelCallLimit, Quota, ToolCallLimit
from langchain_quota.core.decision import Decision
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call
from tests.scene import ANN, Scene
from tests.stores import counts
from tests.telemetry import Signals

TOOLS = ("search", "calc", "fetch", "model")


@pytest.mark.parametrize(
    ("limit", "matching", "name"),
    [
        (ToolCallLimit("search", run_limit=1), ["search"], "tool:search"),
        (ToolCallLimit(["search", "calc"], run_limit=1), ["search", "calc"], "tool:calc,search"),
        (ToolCallLimit("model", run_limit=1), ["model"], "tool:model"),
        (ToolCallLimit(run_limit=1), [*TOOLS], "tool:*"),
        (ToolCallLimit(exclude=["fetch", "x"], run_limit=1), ["search", "calc", "model"], None),
        (ToolCallLimit(exclude=("fetch", "calc"), run_limit=1), None, "tool:*-calc,fetch"),
        (ModelCallLimit(run_limit=1), [None], "model"),
    ],
)
def test_a_limit_matches_what_it_names(limit: Limit, matching: Any, name: str | None) -> None:
    """A tool's limit matches that tool, one without a name all but the excluded; so it is named."""
    calls = [*(Call("tool", tool) for tool in TOOLS), Call("model")]
    assert matching in (None, [call.tool for call in calls if limit.matches(call)])
    assert name in (None, limit.name)


def test_limits_share_a_count_exactly_if_they_match_the_same_calls() -> None:
    """Whatever tools are called, and however often they are named."""
    names = ("search", "calc", "calc-search", "model", "-")
    some = [each for length in (1, 2) for each in permutations(names, length)]
    limits: list[Limit] = [
        *(ToolCallLimit(tools, run_limit=1) for tools in some),
        *(ToolCallLimit((*tools, tools[0]), run_limit=1) for tools in some),
        *(ToolCallLimit(exclude=tools, run_limit=1) for tools in [(), *some]),
        ModelCallLimit(run_limit=1),
    ]
    calls = [Call("model"), *(Call("tool", tool) for tool in (*names, "other"))]
    matched = {limit: tuple(map(limit.matches, calls)) for limit in limits}
    groups = len(set(matched.values()))
    assert len({(found, limit.kind, limit.counter) for limit, found in matched.items()}) == groups
    assert len({(limit.kind, limit.counter) for limit in limits}) == groups


async def test_what_a_store_counts(signals: Signals) -> None:
    """It counts quotas, and a thread's quota as the thread; two limits over one count add once."""
    seen: list[Decision] = []
    store = MemoryStore()
    limits: list[Limit] = [
        ToolCallLimit("search", thread_limit=9, quotas=[Quota(8, per="user_id")]),
        ToolCallLimit(
            "search", quotas=[Quota(7, per="user_id"), Quota(6, per="thread")], name="again"
        ),
        ToolCallLimit("calc", quotas=[Quota(9, per="global")]),
    ]
    options: Any = {"store": store, "context": ANN, "on_decision": seen.append}
    await Scene(signals, [["search", "search"], "done"], limits, **options).play()
    assert counts(store) == {"search:thread:thread-1": 2, "search:user_id:ann": 2}
    one, again = [each for each in seen if each.call.tool == "search"][-1].limits
    counts_of = [one.count_of("thread"), one.count_of("user_id"), again.count_of("thread")]
    assert [count and count.used for count in counts_of] == [2, 2, 2]
    assert {each.scope: each.limit for each in again.quotas} == {"user_id": 7, "thread": 6}
    assert (one.shared, again.shared) == (True, True)
