"""Windows of the calendar, at random times in random zones, against dateutil's recurrences."""

from datetime import datetime, timedelta
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, available_timezones

from dateutil.rrule import DAILY, HOURLY, MONTHLY, WEEKLY, rrule
from dateutil.tz import datetime_ambiguous, datetime_exists
from hypothesis import example, given
from hypothesis import strategies as st

from langchain_quota import MemoryStore, Quota
from tests.examples import examples

ZONES = sorted(each for each in available_timezones() if not each.startswith(("posix", "right")))
ODD = ["Australia/Lord_Howe", "Africa/Cairo", "America/Havana", "America/St_Johns", "Asia/Gaza"]
"""Zones whose clocks are set at midnight, or by half an hour."""
DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
Cycle = tuple[str, int]
"""A window, and the day on which it starts, if that matters."""


class Window(NamedTuple):
    """A window of a count: its key there, and when it begins and ends."""

    key: str
    begin: int
    end: int


def window_at(quota: Quota, now: float, count: str = "search:tenant:acme") -> Window:
    """The window of a moment, as the grant to a count shows it."""
    granted = MemoryStore(clock=lambda: now).grant(count, 1, window=quota.period)
    assert granted.ends is not None
    return Window(granted.key, granted.ends - int(granted.key.split(":")[3]), granted.ends)


def starts_of(zone: ZoneInfo, cycle: Cycle, since: int, until: int) -> set[int]:
    """The moments at which windows start: when a clock first shows what dateutil gives."""
    window, day = cycle
    every: dict[str, tuple[Any, dict[str, Any]]] = {
        "hour": (HOURLY, {}),
        "day": (DAILY, {}),
        "week": (WEEKLY, {"byweekday": day % 7}),
        # The day of the month, or the last one of a month that has no such day.
        "month": (MONTHLY, {"bymonthday": (day + 1, -1), "bysetpos": 1}),
    }
    frequency, days = every[window]
    hour = None if window == "hour" else 0
    known: dict[str, Any] = {"byhour": hour, "byminute": 0, "bysecond": 0, **days}
    begin, end = (
        datetime.fromtimestamp(each, zone).replace(tzinfo=None) for each in (since, until)
    )
    # More than a zone's clock is ever set by.
    given = begin.replace(microsecond=0) - timedelta(days=33), end + timedelta(days=2)
    found = set[int]()
    for local in rrule(frequency, dtstart=given[0], until=given[1], **known):
        first, again = (local.replace(tzinfo=zone, fold=fold).timestamp() for fold in (0, 1))
        if not datetime_exists(local, zone):
            # The clock skips it, some minutes before it would show it.
            while datetime.fromtimestamp(first - 60, zone).replace(tzinfo=None) >= local:
                first -= 60
        elif window == "hour" and datetime_ambiguous(local, zone):
            found.add(int(again))
        found.add(int(first))
    return found


@examples(200)
@given(
    name=st.sampled_from(ZONES) | st.sampled_from(ODD),
    cycle=st.tuples(st.sampled_from(["hour", "day", "week", "month"]), st.integers(0, 30)),
    # To the second, since the last zone has had an odd number of seconds.
    now=st.integers(100_000_000, 2_500_000_000),
)
@example(name="Pacific/Apia", cycle=("day", 0), now=1_325_200_000)  # a day that never was
@example(name="Pacific/Chatham", cycle=("hour", 0), now=1_790_429_400)  # 3:00 is skipped at 2:45
@example(name="Europe/Berlin", cycle=("month", 30), now=1_774_700_000)  # the last day of February
@example(name="Europe/Berlin", cycle=("hour", 0), now=1_792_883_400)  # 2:00 comes twice
@example(name="Australia/Lord_Howe", cycle=("hour", 0), now=1_775_312_000)
@example(name="America/Toronto", cycle=("day", 0), now=562_125_000)  # set back at 0:01
def test_windows_follow_one_another(name: str, cycle: Cycle, now: int) -> None:
    """Three windows begin and end as a clock shows, each where the one before has ended."""
    window, day = cycle
    starts = {"week": DAYS[day % 7], "month": str(day + 1)}.get(window)
    quota = Quota(1, per="tenant", window=window, tz=name, starts=starts)
    windows = [window_at(quota, now)]
    windows += [following := window_at(quota, windows[0].end), window_at(quota, following.end)]
    moments = [*(each.begin for each in windows), windows[-1].end]
    assert moments[0] <= now < moments[1]
    assert moments[1:] == [each.end for each in windows]
    # Every moment of a window has the same key.
    assert windows == [window_at(quota, each.end - 1) for each in windows]
    starts_there = starts_of(ZoneInfo(name), cycle, moments[0], moments[-1])
    assert sorted(each for each in starts_there if moments[0] <= each <= moments[-1]) == moments
