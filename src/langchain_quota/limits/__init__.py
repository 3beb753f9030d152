"""What may be spent: the limits that a user sets, frozen and validated."""

from collections import Counter
from collections.abc import Sequence

from langchain_quota.limits.budgets import CostLimit, TokenLimit
from langchain_quota.limits.calls import ModelCallLimit, ToolCallLimit
from langchain_quota.limits.concurrency import ConcurrencyLimit
from langchain_quota.limits.repeats import RepeatLimit
from langchain_quota.limits.time import TimeLimit
from langchain_quota.runtime.arguments import shown

Limit = (
    ToolCallLimit
    | ModelCallLimit
    | ConcurrencyLimit
    | TokenLimit
    | CostLimit
    | RepeatLimit
    | TimeLimit
)
"""What a middleware of many limits takes: for the type of a list of several kinds."""


def is_dynamic(limit: Limit) -> bool:
    """Whether the limit of a thread or run is a function."""
    return callable(limit.thread_limit) or callable(limit.run_limit)


def check_together(limits: Sequence[Limit]) -> None:
    """Check that limits can be judged together."""
    given: object = limits
    several = isinstance(given, Sequence) and not isinstance(given, str)
    wrong = [each for each in limits if not isinstance(each, Limit)] if several else [given]
    if wrong:
        raise TypeError(
            "limits must be a sequence of limits, such as [ToolCallLimit(…)], not "
            f"{shown(wrong[0])}"
        )
    if not limits:
        raise ValueError("limits must have at least one limit, such as ToolCallLimit(…)")
    for name, count in Counter(limit.name for limit in limits).items():
        if count > 1:
            raise ValueError(f"{count} limits are named {name!r}: give each a name of its own")
