"""The limits that a user sets, immutable and validated."""

from collections import Counter
from collections.abc import Mapping, Sequence

from langchain_quota.limits.budgets import CostLimit, TimeLimit, TokenLimit
from langchain_quota.limits.call import THREAD
from langchain_quota.limits.calls import (
    ConcurrencyLimit,
    ModelCallLimit,
    RepeatLimit,
    ToolCallLimit,
)
from langchain_quota.limits.options import LimitOptions
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
"""A limit of one of the kinds."""


def is_dynamic(limit: Limit) -> bool:
    """Return whether the limit of a thread or run is a function."""
    return callable(limit.thread_limit) or callable(limit.run_limit)


def choose_quota(limit: Limit, name: str | None, subject: Mapping[str, object]) -> Quota | None:
    """Return the quota of a limit that the names choose; `None` for the thread's limit."""
    choices: list[tuple[str, str, Quota | None]] = [(q.name, q.dimension, q) for q in limit.quotas]
    if limit.thread_limit is not None:
        choices.append((THREAD, THREAD, None))
    if not choices:
        raise ValueError(f"limit {limit.name!r} has no quota and no thread_limit to choose")
    chosen = [
        quota
        for scope, per, quota in choices
        if {per} - {"global"} == subject.keys() and name in (None, scope)
    ]
    if len(chosen) == 1:
        return chosen[0]
    several = len({per for _, per, _ in choices}) < len(choices)
    forms = [
        ", ".join([f"quota={scope!r}"] * several + [f"{per}=…"] * (per != "global"))
        for scope, per, _ in choices
    ]
    expected = " or ".join(form or "no subject" for form in forms)
    names = subject if name is None else {**subject, "quota": name}
    shown = ", ".join(f"{key}={value!r}" for key, value in names.items()) or "no subject"
    raise ValueError(f"limit {limit.name!r} needs {expected}; given: {shown}")


def check_together(limits: Sequence[LimitOptions]) -> tuple[Limit, ...]:
    """Check that limits can be used together, and return them by their kinds."""
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
    # Nothing is left out: type checkers now know the kinds.
    known = tuple(limit for limit in limits if isinstance(limit, Limit))
    if not known:
        raise ValueError("limits must have at least one limit, such as ToolCallLimit(…)")
    for name, count in Counter(limit.name for limit in known).items():
        if count > 1:
            raise ValueError(
                f"{count} limits are named {name!r}: of two numbers for the same calls only the "
                "lower one is reached, so write one limit, or give each a name of its own"
            )
    # What a window leaves depends on the limit, and raises all limits on the count.
    shared: dict[object, Quota] = {}
    for limit in known:
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
    return known
