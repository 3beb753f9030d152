"""Windows of the calendar, at random times in random zones, against a walk through UTC."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

from hypothesis import example, given
from hypothesis import strategies as st

from langchain_quota import Quota
from langchain_quota.stores.keys import CountKey
from tests.examples import examples

ZONES = sorted(each for each in available_timezones() if not each.startswith(("posix", "right")))
ODD = ["Australia/Lord_Howe", "Africa/Cairo", "America/Havana", "America/St_Johns", "Asia/Gaza"]
"""Zones whose clocks are set at midnight, or by half an hour."""
DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
HOUR = 3600
Cycle = tuple[str, int, int, int]
"""A window, the day on which it starts, and the hour and the minute."""


def cycle_of(local: datetime, cycle: Cycle) -> int:
    """The number of the cycle in which a clock's time is."""
    window, start, hour, minute = cycle
    day = (local - timedelta(hours=hour, minutes=minute)).date()
    if window == "day":
        return day.toordinal()
    if window == "week":
        return (day.toordinal() - 1 - start) // 7
    # The last day of a month is followed by a first.
    is_over = day.day >= start + 1 or (day + timedelta(days=1)).day == 1
    return day.year * 12 + day.month + is_over


def starts_of(zone: ZoneInfo, cycle: Cycle, since: int, until: int) -> Iterator[int]:
    """The moments at which windows start: the clock shows a later cycle than ever before."""

    def shown(now: int) -> datetime:
        return datetime.fromtimestamp(now, zone).replace(tzinfo=None)

    latest = cycle_of(shown(since), cycle)
    for now in range(since, until, HOUR):
        local, last = shown(now), shown(now + HOUR)
        # In an hour in which the clock is not set, nothing comes and goes.
        calm = last - local == timedelta(hours=1)
        if cycle[0] != "hour" and calm and cycle_of(last, cycle) <= latest:
            continue
        for minute in range(now + 60, now + HOUR + 1, 60):
            before, local = local, shown(minute)
            if cycle[0] == "hour":
                if local.minute == 0 or (local.hour != before.hour and local > before):
                    yield minute
            elif cycle_of(local, cycle) > latest:
                latest = cycle_of(local, cycle)
                yield minute


clocks = st.integers(0, 23), st.integers(0, 59)
cycles = st.one_of(
    st.just(("hour", 0, 0, 0)),
    st.tuples(st.just("day"), st.just(0), *clocks),
    st.tuples(st.just("week"), st.integers(0, 6), *clocks),
    st.tuples(st.just("month"), st.integers(0, 30), *clocks),
)


@examples(200)
@given(
    name=st.sampled_from(ZONES) | st.sampled_from(ODD),
    cycle=cycles,
    # To the second, since the last zone has had an odd number of seconds.
    now=st.integers(100_000_000, 2_500_000_000),
)
@example(name="Pacific/Apia", cycle=("day", 0, 9, 0), now=1_325_200_000)  # a day that never was
@example(name="Europe/Berlin", cycle=("month", 30, 2, 30), now=1_774_700_000)  # a skipped start
@example(name="Australia/Lord_Howe", cycle=("hour", 0, 0, 0), now=1_775_312_000)
@example(name="America/Toronto", cycle=("day", 0, 0, 0), now=562_125_000)  # set back at 0:01
def test_windows_follow_one_another(name: str, cycle: Cycle, now: int) -> None:
    """Three windows begin and end as a clock shows, each where the one before has ended."""
    window, day, hour, minute = cycle
    of = {"hour": "", "day": "", "week": f"{DAYS[day % 7]} ", "month": f"{day + 1} "}[window]
    starts = None if window == "hour" else f"{of}{hour:02}:{minute:02}"
    quota = Quota(1, window=window, tz=name, starts=starts)
    keys = [CountKey.at("search", "tenant", "acme", quota.lasts, now)]
    for _ in range(2):
        keys.append(CountKey.at("search", "tenant", "acme", quota.lasts, keys[-1].ends or 0))
    ends = [each.ends or 0 for each in keys]
    began = [end - (each.window or 0) for each, end in zip(keys, ends, strict=True)]
    assert began[0] <= now < ends[0]
    assert began[1:] == ends[:-1]
    # Every moment of a window has the same key.
    assert keys == [CountKey.at("search", "tenant", "acme", quota.lasts, end - 1) for end in ends]
    # The walk begins on a full hour in UTC, before anything of which it must know.
    since = began[0] // HOUR * HOUR - 30 * HOUR
    walked = starts_of(ZoneInfo(name), cycle, since, ends[-1])
    assert [each for each in walked if began[0] <= each <= ends[-1]] == [*began, ends[-1]]
    for key in keys:
        moment = datetime.fromtimestamp(key.ends or 0, UTC)
        assert str(key.resets_at) == str(moment.astimezone(ZoneInfo(name)))
        assert CountKey.parse(str(key)) == key
