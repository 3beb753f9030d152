"""A quota: the amount that a subject, such as a user, may use in a window or in total."""

import re
from bisect import bisect_left
from calendar import monthrange
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, cast
from zoneinfo import ZoneInfo

from langchain_quota.limits.call import RESERVED, ROOT_RUN, RUN, THREAD, FromContext
from langchain_quota.runtime.arguments import (
    NoHook,
    explain_arguments,
    validate_count,
    validate_function,
    validate_switch,
    validate_type,
)
from langchain_quota.runtime.units import Dollars, Time, duration

_FIXED = (THREAD, "agent", "global", ROOT_RUN)
_CHOICES = (
    'one of "thread" (counts the calls of a conversation), "root_run" (of an outermost run, with '
    'its sub-agents), "agent" (of all agents with its name), "global" (of all), another name, such '
    'as "user_id" (of all with the same value in runtime.context), or a function of state and '
    "runtime (of all for which it gives the same value)"
)
_SCOPE_NAME = re.compile(r"[a-z_]{1,32}")
_WEEK = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
CALENDAR = {"hour": (), "day": (), "week": _WEEK, "month": tuple(map(str, range(1, 32)))}
"""The calendar windows, and the days on which they may start."""
_REMEDIES = {
    "hour": "leave it out",
    "day": "leave it out, for a day starts at midnight",
    "week": 'write the name of a day, such as "monday"',
    "month": "write a day from 1 to 31, such as 15",
}


@dataclass(frozen=True, slots=True)
class CalendarWindow:
    """Hours, days, weeks or months by the clock of a zone; each ends where the next begins."""

    unit: str
    tz: str
    day: int = 0  # of the week or month, from 0

    def starts_around(self, here: datetime) -> Iterator[datetime]:
        """Yield the starts of some windows before and after a time, by the zone's clock."""
        hour = here.replace(minute=0, second=0, microsecond=0)
        midnight = hour.replace(hour=0)
        # A clock is set back by three hours at most.
        for n in range(-4, 4):
            if self.unit == "hour":
                yield hour + timedelta(hours=n)
            elif self.unit == "month":
                year, month = divmod(here.year * 12 + here.month - 1 + n, 12)
                last = monthrange(year, month + 1)[1]
                yield midnight.replace(year, month + 1, min(self.day + 1, last))
            else:
                days = 7 if self.unit == "week" else 1
                since = (here.weekday() - self.day) % days
                yield midnight + timedelta(days=n * days - since)


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
            `None` for no limit now: then calls are only counted, but not by a `smooth` quota.
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
    if name in RESERVED or (name in _FIXED and name != per):
        raise ValueError(f"name must not be {name!r}: it has a meaning of its own")
    if per == RUN:
        raise ValueError(
            f"per must not be {per!r}, under which a store counts runs: give a function that reads "
            "the value from the context, and a name"
        )


def parse_window(
    window: object, tz: object = None, starts: object = None
) -> timedelta | CalendarWindow | None:
    """Return the window that the arguments describe; `None` for none."""
    if isinstance(window, CalendarWindow):
        return window
    if not isinstance(window, str) or window not in CALENDAR:
        if tz is not None or starts is not None:
            option = f"starts={starts!r}" if tz is None else f"tz={tz!r}"
            raise ValueError(f"{option} needs a window of {', '.join(CALENDAR)}, not {window!r}")
        return _parse_length(window)
    validate_type("tz", tz, str | None, 'a string, such as "Europe/Berlin", or None')
    name = "UTC" if tz is None else str(tz)
    try:
        _zone(name)
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(
            f'tz must be the name of a time zone, such as "Europe/Berlin", not {name!r}. If this '
            "system has no time zones, install the package tzdata"
        ) from error
    return CalendarWindow(window, name, _parse_start(window, starts))


def _parse_length(window: object) -> timedelta | None:
    """Return the length of a window of a text or a `timedelta`; `None` for none."""
    length: Any = duration(window) if isinstance(window, str) else window
    if length is None and window is not None:
        units = 'window must be "hour", "day", "week", "month" or a time such as '
        meant = get_close_matches(str(window).lower(), CALENDAR, 1)
        remedy = f': write "{meant[0]}"' if meant else ""
        raise ValueError(f'{units}"30s", "10m", "1h" or "7d", not {window!r}{remedy}')
    what = 'a time such as "1h", a timedelta or None'
    if isinstance(window, int) and not isinstance(window, bool):
        raise TypeError(f'window must be {what}, not {window!r}: write "{window}s"')
    validate_type("window", length, timedelta | None, what)
    if length is not None and (length < timedelta(seconds=1) or length.microseconds):
        raise ValueError(f"window must be whole seconds, from 1, not {window!r}")
    return cast("timedelta | None", length)


def _parse_start(unit: str, starts: object) -> int:
    """Return the day on which windows start, from 0."""
    if starts is None:
        return 0
    days = CALENDAR[unit]
    if str(starts) not in days:
        raise ValueError(f"starts={starts!r} does not fit window={unit!r}: {_REMEDIES[unit]}")
    return days.index(str(starts))


@cache  # reading it again would block the event loop
def _zone(name: str) -> tzinfo:
    return UTC if name == "UTC" else ZoneInfo(name)


@lru_cache(maxsize=256)
def around(window: CalendarWindow, now: int) -> tuple[int, int, int]:
    """Return the start and end of the window at a moment, and the zone's offset at its end."""
    zone = _zone(window.tz)
    times = 2 if window.unit == "hour" else 1  # an hour that comes twice is two windows
    near = window.starts_around(_local_time(now, zone))
    starts = [moment for local in near for moment in _moments(local, zone)[:times]]
    end = min(start for start in starts if start > now)
    offset = datetime.fromtimestamp(end, zone).utcoffset() or timedelta(0)
    return max(start for start in starts if start <= now), end, round(offset.total_seconds())


def _local_time(now: int, zone: tzinfo) -> datetime:
    return datetime.fromtimestamp(now, zone).replace(tzinfo=None, fold=0)


def _moments(local: datetime, zone: tzinfo) -> tuple[int, int]:
    """Return when a zone's clock first shows or skips a time, and when it shows it again."""
    first, again = (int(local.replace(tzinfo=zone, fold=fold).timestamp()) for fold in (0, 1))
    if first > again:  # the clock skips it: when?
        first = again + bisect_left(
            range(again, first), True, key=lambda now: _local_time(now, zone) >= local
        )
    return first, max(first, again)
