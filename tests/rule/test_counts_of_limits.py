"""Which calls a limit counts, which limits share a count, and which can stand together."""

from itertools import combinations, permutations, product
from typing import Any

import pytest

from langchain_quota import (
    ConcurrencyLimit,
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    ToolCallLimit,
)
from langchain_quota.decision import Call, Decision
from langchain_quota.limits import Limit
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
        ToolCallLimit("search", quotas=[Quota(7, per="user_id"), Quota(6)], name="again"),
        ToolCallLimit("calc", quotas=[Quota(9, per="global")]),
    ]
    options: Any = {"store": store, "context": ANN, "on_decision": seen.append}
    await Scene(signals, [["search", "search"], "done"], limits, **options).play()
    assert counts(store) == {"search:thread:thread-1": 2, "search:user_id:ann": 2}
    one, again = [each for each in seen if each.call.tool == "search"][-1].limits
    assert (one.thread_used, one.used("user_id"), again.used("thread")) == (2, 2, 2)
    assert {each.scope: each.limit for each in again.quotas} == {"user_id": 7, "thread": 6}
    assert (one.shared, again.shared) == (True, True)


NUMBERS = (None, 1, 2, 3)


def refuses(limit: Limit, thread: int, run: int) -> bool:
    """Whether a limit refuses one more call."""
    return any(
        isinstance(most, int) and used + 1 > most
        for most, used in ((limit.thread_limit, thread), (limit.run_limit, run))
    )


def is_reached(limit: Limit, other: Limit) -> bool:
    """Whether, behind the other limit, counts exist at which a limit refuses a call."""
    found = {(0, 0)}
    for thread, run in sorted(product(range(5), repeat=2)):
        # A call, or the start of a run.
        if (thread, run) in found and not refuses(other, thread, run):
            found |= {(thread + 1, run + 1), (thread + 1, 0)}
    return any(refuses(limit, *each) for each in found)


def test_limits_go_together_exactly_if_each_can_be_reached(signals: Signals) -> None:
    """Of limits that forbid nothing, none is given that another one always refuses before."""
    limits = [
        ModelCallLimit(thread_limit=thread, run_limit=run, name=f"{thread}, {run}")
        for thread, run in product(NUMBERS, repeat=2)
        if (thread, run) != (None, None)
    ]
    for pair in combinations(limits, 2):
        dead = [limit for limit, other in (pair, pair[::-1]) if not is_reached(limit, other)]
        if dead:
            with pytest.raises(ValueError, match=f"'{dead[0].name}' can never be reached"):
                QuotaMiddleware(pair, telemetry=signals.telemetry)
        else:
            QuotaMiddleware(pair, telemetry=signals.telemetry)


def search(**options: Any) -> ToolCallLimit:
    return ToolCallLimit("search", **{"name": "+".join(options), **options})


PAIRS: list[tuple[Limit, Limit]] = [
    (search(run_limit=5), search(run_limit=3, enforce=False)),
    (search(run_limit=5, enforce=False), search(run_limit=3)),
    (search(run_limit=5), search(run_limit=lambda *_: 3, name="computed")),
    (search(run_limit=5), search(quotas=[Quota(3)])),
    (search(run_limit=5), ConcurrencyLimit("search", at_once=3)),
    (search(run_limit=5), ToolCallLimit("calc", run_limit=3)),
    (search(run_limit=5), ToolCallLimit(["search", "calc"], run_limit=6)),
    (ToolCallLimit(run_limit=5), ToolCallLimit(exclude=["calc"], run_limit=3)),
    (ToolCallLimit("model", run_limit=5), ModelCallLimit(run_limit=3)),
]


def test_limits_that_can_be_reached_in_another_way(signals: Signals) -> None:
    """Those on trial, computed ones, and those of other calls contradict no other limit."""
    for pair in PAIRS:
        for limits in (pair, pair[::-1]):
            QuotaMiddleware(limits, telemetry=signals.telemetry, store=MemoryStore())
