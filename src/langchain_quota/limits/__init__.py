"""The limits that a user sets, frozen and validated."""

from collections import Counter
from collections.abc import Sequence

from langchain_quota.limits.budgets import CostLimit, TimeLimit, TokenLimit
from langchain_quota.limits.calls import (
    ConcurrencyLimit,
    ModelCallLimit,
    RepeatLimit,
    ToolCallLimit,
)
from langchain_quota.limits.quotas import Quota
from langchain_quota.runtime.arguments import short_repr

Limit = (
    ToolCallLimit
    | ModelCallLimit
    | ConcurrencyLimit
    | TokenLimit
    | CostLimit
    | RepeatLimit
    | TimeLimit
)
"""A limit of one of the kinds: for the type of a list of several kinds."""


def is_dynamic(limit: Limit) -> bool:
    """Return whether the limit of a thread or run is a function."""
    return callable(limit.thread_limit) or callable(limit.run_limit)


def check_together(limits: Sequence[Limit]) -> None:
    """Check that limits can be used together."""
    argument: object = limits
    is_list = isinstance(argument, Sequence) and not isinstance(argument, str)
    wrong = [limit for limit in limits if not isinstance(limit, Limit)] if is_list else [argument]
    if wrong:
        remedy = ""
        if isinstance(wrong[0], Quota):
            remedy = ': write ToolCallLimit("search", quotas=[Quota(…)])'
        elif hasattr(type(wrong[0]), "wrap_tool_call"):
            remedy = ": it is a middleware, so list it in middleware= of create_agent"
        raise TypeError(
            "limits must be a sequence of limits, such as [ToolCallLimit(…)], not "
            f"{short_repr(wrong[0])}{remedy}"
        )
    if not limits:
        raise ValueError("limits must have at least one limit, such as ToolCallLimit(…)")
    for name, count in Counter(limit.name for limit in limits).items():
        if count > 1:
            raise ValueError(
                f"{count} limits are named {name!r}: of two numbers for the same calls only the "
                "lower one is reached, so write one limit, or give each a name of its own"
            )
    # What a window leaves depends on the limit, and raises all limits on the count.
    shared: dict[object, Quota] = {}
    for limit in limits:
        for quota in limit.quotas:
            count_of = limit.counter, quota.dimension, quota.period, quota.smooth
            other = shared.setdefault(count_of, quota)
            differs = (quota.limit, quota.rollover) != (other.limit, other.rollover)
            if differs and (quota.rollover or other.rollover):
                raise ValueError(
                    f"quota {quota.name!r} of limit {limit.name!r} rolls over {quota.rollover!r}, "
                    f"and another one on its count {other.rollover!r}: give both the same limit "
                    "and rollover, or another window"
                )
