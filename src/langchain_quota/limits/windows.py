"""Calendar windows in a time zone: hours, days, weeks and months."""

from bisect import bisect_left
from calendar import monthrange
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any, cast
from zoneinfo import ZoneInfo

from langchain_quota.runtime.arguments import validate_type
from langchain_quota.runtime.units import duration

_WEEK = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
CALENDAR = {"hour": (), "day": (), "week": _WEEK, "month": tuple(map(str, range(1, 32)))}
"""The calendar windows, and the days on which they may start."""
_REMEDIES = {
    "hour": "leave it out",
    "day": "leave it out, for a day starts at midnight",
    "week": 'write "monday"',
    "month": "write 15",
}


@dataclass(frozen=True, slots=True)
class CalendarWindow:
    """Hours, days, weeks or months by the clock of a zone; each ends where the next begins."""

    unit: str
    tz: str
    day: int = 0  # of the week or month, from 0

    def near(self, here: datetime) -> Iterator[datetime]:
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
    near = window.near(_local_time(now, zone))
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
