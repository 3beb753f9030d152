"""Limits at one moment: their numbers, which of them match a call, and what it asks of counts."""

from collections.abc import Sequence
from typing import Any

from langchain_quota import Call, Quota, ToolCallLimit
from langchain_quota.admission import Hits, Threshold
from langchain_quota.batches import hits_of
from langchain_quota.resolved import (
    Asked,
    ResolvedLimit,
    ResolvedLimits,
    ResolvedQuota,
)

USER = ResolvedQuota("user_id", 5, "ann", "search:user:ann")
QUOTA = Quota(9, per="user_id")


def search(*quotas: ResolvedQuota, name: str = "", **arguments: Any) -> ResolvedLimit:
    """A limit on searches; arguments of `ResolvedLimit.of` by their names, others are its own."""
    keys = {key: arguments.pop(key, None) for key in ("thread_key", "run_key")}
    remembers = arguments.pop("remembers", False)
    limit = ToolCallLimit("search", quotas=[QUOTA] if quotas else (), name=name, **arguments)
    return ResolvedLimit.of(limit, quotas=quotas, remembers=remembers, **keys)


def ask(limits: ResolvedLimits | Sequence[ResolvedLimit], batch: Sequence[Call]) -> list[Asked]:
    resolved = limits if isinstance(limits, ResolvedLimits) else ResolvedLimits(limits)
    return [resolved.asked(call) for call in batch]


def names(asked: Asked) -> list[str]:
    return [each.limit.name for each, _ in asked.limits]


def test_calls_ask_for_the_counts_of_their_own_limits() -> None:
    """Each call adds its amount to the counts of the limits that match it, and to no others."""
    limits = [search(USER), ResolvedLimit.of(ToolCallLimit("calc", run_limit=9))]
    batch = [Call("tool", tool, tool, 2) for tool in ("search", "calc", "fetch")]
    hits, index_of = hits_of(batch, ask(limits, batch))
    assert index_of == [0, 1, 2]
    assert [each.amounts for each in hits] == [
        {"search/thread": 2, "search/run": 2, USER.key: 2},
        {"calc/thread": 2, "calc/run": 2},
        {},
    ]


def test_calls_that_share_an_id_ask_together() -> None:
    """They are one call to the agent: their amounts add up, and all their limits are asked."""
    limits = [search(run_limit=1), ResolvedLimit.of(ToolCallLimit("calc", run_limit=2))]
    batch = [
        Call("tool", "search", "twin"),
        Call("tool", "calc", "single"),
        Call("tool", "calc", "twin"),
        Call("tool", "search", "twin", 2),
    ]
    hits, index_of = hits_of(batch, ask(limits, batch))
    assert index_of == [0, 1, 0, 0]
    assert hits[0] == Hits(
        {"search/thread": 3, "search/run": 3, "calc/thread": 1, "calc/run": 1},
        (
            Threshold("tool:search", "run", "search/run", 1),
            Threshold("tool:calc", "run", "calc/run", 2),
        ),
    )
    assert hits[1].amounts == {"calc/thread": 1, "calc/run": 1}
