"""Amounts: their units, money, times, and how much of a limit they are."""

import re
from datetime import timedelta
from decimal import Decimal, DecimalException
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import Literal

Unit = Literal["calls", "tokens", "nanodollars", "milliseconds"]
"""The unit of a limit's counts, which are whole numbers: money is in billionths of a US dollar."""

Time = timedelta | str | float
"""A time: a `timedelta`, text such as `"30s"`, or a number of seconds."""

Dollars = Decimal | str | float
"""An amount of US dollars, exactly as it is written. A float counts as Python prints it."""

NANODOLLARS = 10**9
"""The number of nanodollars in a dollar."""

MAX_DOLLARS = 9 * 10**6
"""The maximum of a limit or a price in dollars: Lua adds exactly up to 2**53 nanodollars."""

_MAX_SECONDS = 10**9


def parse_dollars(argument: str, value: object) -> Decimal:
    """Return an amount of dollars, from 0 to nine million, exactly as it is written."""
    if isinstance(value, bool) or not isinstance(value, Decimal | str | int | float):
        raise TypeError(f"{argument} must be dollars, such as 0.50, not {value!r}")
    try:
        # Few amounts are exact in a float, but its shortest text is what the user wrote.
        dollars = Decimal(float.__repr__(value) if isinstance(value, float) else value)
    except DecimalException:
        raise ValueError(
            f'{argument} must be dollars in digits, such as "0.50", not {value!r}'
        ) from None
    if not dollars.is_finite() or not 0 <= dollars <= MAX_DOLLARS:
        raise ValueError(f"{argument} must be from 0 to {MAX_DOLLARS:,} dollars, not {value!r}")
    return dollars


def parse_nanodollars(argument: str, value: object) -> int:
    """Return the nanodollars of an amount of dollars."""
    # The application's decimal context may round decimals, but fractions are never rounded.
    amount = Fraction(parse_dollars(argument, value)) * NANODOLLARS
    if amount.denominator != 1:
        raise ValueError(f"{argument} must have at most nine decimal places, not {value!r}")
    return int(amount)


def computed(value: object) -> object:
    """Return what a user's function computed: a float to nine decimal places, half to even.

    So 0.1 + 0.2 dollars are $0.30. What is written is not rounded.
    """
    return round(value, 9) if isinstance(value, float) else value


def nanodollars(dollars: Decimal) -> int:
    """Return the nanodollars of a price, rounded up to a whole number."""
    return ceil(Fraction(dollars) * NANODOLLARS)


def as_dollars(amount: int) -> str:
    """Format nanodollars for people: `"$0.50"`, with up to nine decimal places."""
    whole, rest = divmod(abs(amount), NANODOLLARS)
    places = f"{rest:09d}".rstrip("0").ljust(2, "0")
    return f"{'-' if amount < 0 else ''}${whole:,}.{places}"


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"([1-9][0-9]{0,4})([smhdw])")


def duration(text: str) -> timedelta | None:
    """Return the time of a text such as `"30s"`, `"1h"` or `"7d"`; `None` for any other text."""
    match = _DURATION.fullmatch(text)
    return match and timedelta(seconds=int(match[1]) * _SECONDS[match[2]])


def parse_milliseconds(argument: str, value: object) -> int:
    """Return the whole milliseconds of a time, which may be from 0 to a billion seconds."""
    time: object = duration(value) if isinstance(value, str) else value
    if time is None and value is not None:
        raise ValueError(f'{argument} must be a time such as "30s", "5m" or "1h", not {value!r}')
    if isinstance(time, bool) or not isinstance(time, int | float | timedelta):
        raise TypeError(f'{argument} must be a time, such as "5m", or seconds, not {value!r}')
    seconds = time.total_seconds() if isinstance(time, timedelta) else time
    # NaN compares false with every number, so it is refused here, too.
    if not 0 <= seconds <= _MAX_SECONDS:
        raise ValueError(f"{argument} must be from 0 to {_MAX_SECONDS} seconds, not {value!r}")
    return round(seconds * 1000)


def as_time(amount: int) -> str:
    """Format milliseconds for people: `"1h 30m"`, `"2.5s"`."""
    minutes, rest = divmod(amount, 60_000)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "m"), (rest / 1000, "s")]
    return " ".join(f"{number:g}{name}" for number, name in parts if number) or "0s"


UNIT_LABELS: dict[Unit, str] = {
    "calls": "calls",
    "tokens": "tokens",
    "nanodollars": "dollars",
    "milliseconds": "seconds",
}
"""The names of units as people and metrics see them."""

PER_BASE_UNIT: dict[Unit, int] = {"nanodollars": NANODOLLARS, "milliseconds": 1000}
"""How many of a unit are one dollar or one second; other units are shown as they are."""


def in_base_unit(amount: int, unit: Unit) -> float:
    """Return an amount for metrics, spans and logs: money in dollars, time in seconds."""
    return amount / PER_BASE_UNIT[unit] if unit in PER_BASE_UNIT else amount


def exact_amount(amount: int, unit: Unit) -> int | Decimal:
    """Return an amount, from 0, as users write it: money in dollars, time in seconds, exactly."""
    if unit not in PER_BASE_UNIT:
        return amount
    whole, rest = divmod(amount, PER_BASE_UNIT[unit])
    # A calculation could be rounded by the application's decimal context, a text cannot.
    places = len(str(PER_BASE_UNIT[unit])) - 1
    return Decimal(f"{whole}.{rest:0{places}d}".rstrip("0").removesuffix("."))


def from_exact(amount: int | Decimal, unit: Unit) -> int:
    """Return an amount of `exact_amount` as it is counted."""
    return int(Fraction(amount) * PER_BASE_UNIT.get(unit, 1))


def rate_of(spacing: float, unit: Unit, window: int) -> tuple[float, str]:
    """Return an even rate as users write it, or else in the shortest unit in which it is whole.

    Args:
        spacing: How many microseconds it has from one call, or token, to the next.
        unit: What is counted.
        window: The seconds for which users write it: 60 calls a minute are not 1 call a second.
    """
    rate, periods = 0.0, ((1, "second"), (60, "minute"), (3600, "hour"), (86_400, "day"))
    for seconds, name in sorted(periods, key=lambda period: period[0] != window):
        rate = seconds * 10**6 / spacing
        # The spacing of calls is rounded, and so is the rate that is computed from it.
        slack = rate * rate / (seconds * 10**6) if unit == "calls" else rate / 10**9
        if round(rate) and abs(rate - round(rate)) <= slack:
            return round(rate), f"{unit} per {name}"
    return rate, f"{unit} per {name}"


def format_amount(amount: int | None, unit: Unit) -> str:
    """Format an amount for people: `"3"`, `"1,200 tokens"`, `"$0.50"`, `"5m"`."""
    if amount is None or unit == "calls":
        return str(amount)
    if unit == "milliseconds":
        return as_time(amount)
    if unit == "nanodollars":
        return as_dollars(amount)
    return "1 token" if amount == 1 else f"{amount:,} tokens"


class Level(StrEnum):
    """The level of use of a limit.

    Examples:
        >>> from langchain_quota.runtime.units import Level
        >>> [str(level) for level in Level]
        ['ok', 'near', 'exhausted']
    """

    OK = "ok"
    """Less than the near share is used."""
    NEAR = "near"
    """At least the near share is used, rounded up to whole calls; see `near` of `Telemetry`."""
    EXHAUSTED = "exhausted"
    """All is used: the next call would exceed the limit."""


@lru_cache(maxsize=1024)
def near_threshold(limit: int, near: float) -> int:
    """Return the smallest count that is near the limit; `near` is a share from 0 to 1."""
    # Round the share, so that 0.55 of 100 is 55, and not 56 as in binary fractions.
    return ceil(limit * Fraction(near).limit_denominator(10**9))


def level(used: int, limit: int, near: float) -> Level:
    """Return the level of a count."""
    if used >= limit:
        return Level.EXHAUSTED
    if used >= near_threshold(limit, near):
        return Level.NEAR
    return Level.OK
