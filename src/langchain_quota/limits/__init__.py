"""What may be spent: the limits that a user sets, frozen and validated."""

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from langchain_quota.arguments import shown
from langchain_quota.limits.budgets import CostLimit, TokenLimit
from langchain_quota.limits.calls import ModelCallLimit, ToolCallLimit
from langchain_quota.limits.concurrency import ConcurrencyLimit
from langchain_quota.limits.options import counts_calls, whole_amount
from langchain_quota.limits.repeats import RepeatLimit
from langchain_quota.limits.time import TimeLimit

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
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(
            f"limits must be a sequence of limits, such as [ToolCallLimit(…)], not {shown(given)}"
        )
    if not limits:
        raise ValueError("limits must have at least one limit, such as ToolCallLimit(…)")
    *kinds, last_kind = (each.__name__ for each in get_args(Limit))
    for limit in limits:
        if not isinstance(limit, Limit):
            raise TypeError(f"limits must be {', '.join(kinds)} or {last_kind}, not {shown(limit)}")
    for name, count in Counter(limit.name for limit in limits).items():
        if count > 1:
            raise ValueError(f"{count} limits are named {name!r}: give each a name of its own")
    for limit in limits:
        for other in limits:
            if limit is not other and _never_reached(limit, other):
                raise ValueError(
                    f"limit {limit.name!r} can never be reached: limit {other.name!r} counts the "
                    "same calls and refuses them earlier"
                )


def _never_reached(limit: Limit, other: Limit) -> bool:
    if (
        limit.counter != other.counter
        or limit.kind != other.kind
        or not (limit.enforce and other.enforce)
        or is_dynamic(limit)
        or is_dynamic(other)
        or limit.quotas
        # It keeps something for a last answer, so it ends the run before its number is reached.
        or getattr(limit, "keep", None) is not None
        # It limits something else.
        or not counts_calls(limit)
    ):
        return False
    thread, run, other_thread, other_run = (
        None if each is None else whole_amount(limit.unit, "limit", each)
        for each in (limit.thread_limit, limit.run_limit, other.thread_limit, other.run_limit)
    )
    # A run is part of a thread: an exhausted thread limit of the other ends this run, too.
    return _is_later(thread, other_thread) and (
        _is_later(run, other_run) or _is_later(run, other_thread)
    )


def _is_later(limit: int | None, other: int | None) -> bool:
    """Whether one number is reached after another one, or never."""
    return limit is None or (other is not None and other < limit)
