"""What providers say about their rate limits in the headers of answers and errors.

Anthropic: https://platform.claude.com/docs/en/api/rate-limits, *Response headers*. OpenAI and what
is compatible: https://platform.openai.com/docs/guides/rate-limits, *Rate limits in headers*. Both
count requests and tokens in buckets that refill all the time. `retry-after`: RFC 9110, 10.2.3.
Names of headers are in lower case here.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple

MINUTE = 60.0
"""In how many seconds a bucket refills as long as its provider does not show another time."""

_MAX_WINDOW = 600.0
_MAX_PAUSE = 300.0
"""The longest pause that a header can ask for, in seconds; after it, a call asks again."""

_TELLING_SHARE = 0.1
"""The share of a bucket that must be used before its reset time shows how fast it refills."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|d|h|m|s)")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}


class Bucket(NamedTuple):
    """The state of one of a provider's limits.

    Attributes:
        limit: How many requests or tokens it allows in a window, from 1.
        window: In how many seconds an empty bucket is full, from 1.
        full_in: In how many seconds it is full, from 0 to `window`.
    """

    limit: int
    window: float
    full_in: float


def read_buckets(headers: Mapping[str, str], known: Mapping[str, Bucket]) -> dict[str, Bucket]:
    """Return the limits that headers name, by what they count: `requests`, `input-tokens`, ….

    What cannot be read is left out, and what is not known and hardly used. So are limits that
    refill in more than ten minutes, such as those of a day, because no call can wait for them.

    Args:
        headers: The headers of an answer or an error.
        known: What earlier headers have said, by what it counts.
    """
    texts: dict[str, dict[str, str]] = {}
    for name, value in headers.items():
        provider, _, rest = name.partition("ratelimit-")
        unit, _, part = rest.rpartition("-")
        if provider == "x-":
            part, _, unit = rest.partition("-")
        if provider in ("x-", "anthropic-") and re.fullmatch(r"requests|([a-z]+-)?tokens", unit):
            texts.setdefault(unit, {})[part] = value
    if "input-tokens" in texts:
        # Anthropic repeats the tighter one of two limits under this name.
        texts.pop("tokens", None)
    buckets = {}
    for unit, parts in texts.items():
        limit, remaining = (_number(parts.get(part, "")) for part in ("limit", "remaining"))
        if not limit or remaining is None or not 1 <= limit < 2**53 or remaining > limit:
            continue
        used, seconds = 1 - remaining / limit, _seconds(parts.get("reset", ""), headers)
        if unit not in known and used < _TELLING_SHARE:
            # As long as so much is left, the limit need not be kept.
            continue
        window = known[unit].window if unit in known else MINUTE
        if seconds is not None and used >= _TELLING_SHARE:
            # Times may be whole seconds: it is a minute if one second makes the difference.
            is_minute = abs(seconds - used * MINUTE) <= 1
            window = MINUTE if is_minute else max(1.0, seconds / used)
        if window <= _MAX_WINDOW:
            buckets[unit] = Bucket(int(limit), window, used * window)
    return buckets


def read_pause(headers: Mapping[str, str]) -> float | None:
    """Return for how many seconds nothing should be sent, at most 300; `None` if nothing says it.

    Args:
        headers: The headers of an error.
    """
    seconds = _seconds(headers.get("retry-after", ""), headers)
    milliseconds = _number(headers.get("retry-after-ms", ""))
    if milliseconds is not None:
        seconds = milliseconds / 1000
    return None if seconds is None else min(seconds, _MAX_PAUSE)


def _seconds(text: str, headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a number, a duration such as `6m0s`, or the time until a date."""
    parts = _DURATION.findall(text)
    if parts and not _DURATION.sub("", text):
        return sum(float(amount) * _SECONDS[unit] for amount, unit in parts)
    # The clocks may disagree, so the date is compared with the provider's own.
    end, now = _date(text), _date(headers.get("date", ""))
    return max(0.0, (end - now).total_seconds()) if end and now else _number(text)


def _number(text: str) -> float | None:
    with suppress(ValueError):
        number = float(text)
        return number if number >= 0 else None  # `None` for NaN, too
    return None


def _date(text: str) -> datetime | None:
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        with suppress(ValueError):
            date = parse(text)
            return date if date.tzinfo else date.replace(tzinfo=UTC)
    return None
