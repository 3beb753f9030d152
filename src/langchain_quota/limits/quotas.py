"""A quota: the amount that a subject, such as a user, may use in a window or in total."""

import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from langchain_quota.limits.call import CONCURRENCY, ROOT_RUN, RUN, STORE, THREAD, FromContext
from langchain_quota.limits.windows import CalendarWindow, parse_window
from langchain_quota.runtime.arguments import (
    NoHook,
    explain_arguments,
    validate_count,
    validate_function,
    validate_switch,
    validate_type,
)
from langchain_quota.runtime.units import Dollars, Time

_FIXED = (THREAD, "agent", "global", ROOT_RUN)
_RESERVED = (RUN, STORE, CONCURRENCY, "frozen", "none")
_CHOICES = (
    'one of "thread" (counts the calls of a conversation), "root_run" (of an outermost run, with '
    'its sub-agents), "agent" (of all agents with its name), "global" (of all), another name, such '
    'as "user_id" (of all with the same value in runtime.context), or a function of state and '
    "runtime (of all for which it gives the same value)"
)
_SCOPE_NAME = re.compile(r"[a-z_]{1,32}")


@explain_arguments('Quota(500, per="user_id", window="month")')
@dataclass(frozen=True, slots=True)
class Quota:
    """The number of calls that a subject, such as a user or a tenant, may make in all its runs.

    Quotas share one count if they limit the same calls, and have the same `per` (for functions,
    the same name), the same window and the same store. They may be in several limits and agents.

    Args:
        limit: Maximum of calls in a window, a whole number from 0 (0 refuses every call); in a
            `TokenLimit` of tokens, in a `CostLimit` of dollars, in a `TimeLimit` of time. Or a
            function of the agent's state and runtime, sync or async, that gives the maximum, or
            `None` for no limit now.
        per: Whose calls are counted together: those of a `"thread"`, of a `"root_run"` (the
            outermost run, with every sub-agent and sub-graph that it starts), of an `"agent"` (by
            its name), or all calls (`"global"`). Another name is looked up in
            `runtime.context`, for example `"user_id"`. Or a function of state and runtime, sync or
            async, gives the subject. Subjects are strings (not empty), whole numbers or UUIDs;
            equal texts are one subject. A missing subject, or one of another type, fails the run,
            and nothing is charged.
        window: How long a count lasts, such as `"30s"`, `"10m"`, `"1h"` or `"7d"`, or a
            `timedelta` of whole seconds, from 1. Windows are fixed and aligned to the Unix epoch in
            UTC. So around the start of a window, up to twice the limit can run in a short time,
            unless the quota is `smooth`. `None`: the count lasts until it is reset. A quota per
            `"root_run"` has no window. Or a calendar window: `"hour"`, `"day"`, `"week"` or
            `"month"`.
        tz: The time zone of a calendar window: an IANA name, such as `"Europe/Berlin"`. By
            default UTC.
        starts: The day on which a calendar week or month starts, at midnight: a name, by default
            `"monday"`, or a number from 1 (the default) to 31. In a month without this day it is
            the last one.
        smooth: Whether calls are spread over the window at an even rate (GCRA, a form of leaky
            bucket): `Quota(60, per="global", window="1m", smooth=True)` allows a call each second.
            A smooth quota counts calls or tokens, not dollars or time, and has no calendar window.
            Smooth quotas share a count only if their limits are equal, too.
        burst: With `smooth`: how many calls or tokens may come together after a pause, from 1 and
            at most `limit`. By default one call, or all tokens of a window, as providers count.
            Messages and metrics show the burst as the quota's limit.
        rollover: How much of what a window leaves is added to the next one at most, above 0, in the
            unit of `limit`. Needs a window, and no smooth quota.
        name: The quota's scope in metrics, spans and messages, `[a-z_]{1,32}`; by default `per`.
            A function needs a name. Two quotas of one limit need different names. Names of scopes,
            such as `"run"` and `"thread"`, are taken.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, or does not go with another one.

    Examples:
        >>> from langchain_quota import Quota, ToolCallLimit
        >>> daily = Quota(5, per="user_id", window="1d")
        >>> ToolCallLimit("email", quotas=[daily]).quotas[0].name
        'user_id'
    """

    limit: "Dollars | Time | FromContext"
    _: KW_ONLY
    if TYPE_CHECKING:
        per: str | FromContext
    else:
        per: "str | FromContext" = None  # the error says what to choose
    window: timedelta | str | None = field(default=None, compare=False)
    tz: str | None = field(default=None, compare=False)
    starts: str | int | None = field(default=None, compare=False)
    name: str = ""
    smooth: bool = False
    burst: int | None = None
    rollover: "Dollars | Time | None" = None
    period: timedelta | CalendarWindow | None = field(init=False, repr=False)
    """The window as a `timedelta` or a `CalendarWindow`."""
    # No type, so that the dataclass does not take it for a field.
    wrap_tool_call = NoHook("ToolCallLimit(quotas=[{}(…)])")

    def __post_init__(self) -> None:
        if self.limit is None:
            raise TypeError("limit must be an amount or a function, not None")
        validate_function("limit", self.limit, "state", "runtime")
        validate_type("per", self.per, str | Callable, _CHOICES)
        validate_function("per", self.per, "state", "runtime")
        object.__setattr__(self, "period", parse_window(self.window, self.tz, self.starts))
        if self.window is not None and self.per == ROOT_RUN:
            raise ValueError(
                f"window={self.window!r} cannot be used with per={ROOT_RUN!r}: a run's count ends "
                "with the run"
            )
        validate_switch("smooth", self.smooth)
        if self.smooth and self.window is None:
            raise ValueError('smooth=True needs a window, such as window="1m"')
        if self.smooth and isinstance(self.period, CalendarWindow):
            raise ValueError(
                f'window={self.window!r} cannot be smooth: give its length, such as window="1h"'
            )
        _check_rollover(self)
        if self.burst is not None and not self.smooth:
            raise ValueError(f"burst={self.burst!r} needs smooth=True")
        if self.burst is not None:
            validate_count("burst", self.burst, least=1)
            limit: object = self.limit
            if isinstance(limit, int) and self.burst > max(1, limit):
                raise ValueError(f"burst must be at most the limit, {limit}, not {self.burst}")
        validate_type("name", self.name, str, "a string")
        if not self.name and not isinstance(self.per, str):
            raise ValueError(f"per={self.per!r} is a function: give the quota a name")
        name = self.name or str(self.per)
        if not _SCOPE_NAME.fullmatch(name):
            argument = "name" if self.name else "per, without a name,"
            hint = "" if self.name else ": give the quota a name, the scope in metrics"
            raise ValueError(f"{argument} must match [a-z_]{{1,32}}, not {name!r}{hint}")
        _check_free(name, self.per)
        object.__setattr__(self, "name", name)

    @property
    def dimension(self) -> str:
        """Name under which its subjects are kept: quotas with one dimension share a count."""
        return self.per if isinstance(self.per, str) else self.name


def _check_rollover(quota: Quota) -> None:
    """Check that a quota that rolls over has windows that end."""
    if quota.rollover is not None and (quota.smooth or quota.window is None):
        remedy = "leave smooth out" if quota.smooth else 'write window="month"'
        raise ValueError(f"rollover={quota.rollover!r} needs windows that end: {remedy}")


def _check_free(name: str, per: object) -> None:
    """Check that a quota's name and `per` have no other meaning, in metrics or in a store."""
    if name in _RESERVED or (name in _FIXED and name != per):
        raise ValueError(f"name must not be {name!r}: it has a meaning of its own")
    if per == RUN:
        raise ValueError(
            f"per must not be {per!r}, under which a store counts runs: give a function that reads "
            "the value from the context, and a name"
        )
