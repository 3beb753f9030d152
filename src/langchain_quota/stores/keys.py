"""The keys of counts in a store: counter, subject and window."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from functools import lru_cache
from hashlib import sha256
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

from langchain_quota.core.admission import AcquireRequest
from langchain_quota.limits.call import ROOT_RUN, RUN
from langchain_quota.limits.options import MILLISECONDS, NANODOLLARS, TOTAL_TOKENS, UNITS
from langchain_quota.limits.quotas import CalendarWindow, around
from langchain_quota.runtime.arguments import validate_type
from langchain_quota.runtime.units import Unit
from langchain_quota.stores import ROOT_RUN_IDLE, RUN_IDLE

Prefix: TypeAlias = str | Callable[[Any, Any], str]
"""What all keys of a store begin with, or a function of state and runtime that returns it."""

MAX_LENGTH = 64
"""The longest value that a key has unchanged, in characters after encoding."""

DEFAULT_NAMES = {TOTAL_TOKENS: "tokens", NANODOLLARS: "cost", MILLISECONDS: "time"}
"""The names of limits of the model that are not the end of their counters."""

COUNT, NOTES = "count", "notes"
"""What is kept under the key of a count: itself, and who gave its grants."""

_IDLE_AT_MOST = {RUN: RUN_IDLE, ROOT_RUN: ROOT_RUN_IDLE}
_SHORTENED = 40
_SAFE = ",@"  # beside letters, digits and _.-~: tools that share a count, and addresses
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PLAIN = re.compile(r"[A-Za-z0-9_.~,@-]{0,64}(:[A-Za-z0-9_.~,@-]{0,64}){2}")
"""Three encoded values in a key."""
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_VALUE = r"((?:[A-Za-z0-9_.~,@-]|%[0-9A-F]{2})*)"
_FIRST = _VALUE.replace("*)", "+)")
_CUT = re.compile(rf".{{0,{_SHORTENED}}}~[0-9a-f]{{64}}")
_TEXT = re.compile(
    rf"(?:{_FIRST}/)?{_VALUE}:{_VALUE}:{_VALUE}"
    r"(?::([1-9][0-9]*)(?::(0|-?[1-9][0-9]*)(\+0|[+-][1-9][0-9]{0,4})?|~([1-9][0-9]*)))?"
)


class Shortened(str):
    """A value that a key has shortened: another key that is made of it has it unchanged."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class CountKey:
    """Names one count.

    `str(key)` is its text: the values, percent-encoded and joined by colons. If there is a prefix,
    it comes first, with a slash. An encoded value of more than 64 characters is shortened, and its
    hash is appended, so that two values never share a key.
    """

    counter: str
    """What is counted: a tool, several, all, or the model."""
    dimension: str
    """For whom: the quota's `per`."""
    subject: str
    """Who that is; empty for all."""
    window: int | None = None
    """The length of the windows, in seconds; `None` for a count without windows."""
    index: int | None = None
    """The number of the window, from the Unix epoch; its end, if it has an offset."""
    prefix: str = ""
    """The prefix, in a store whose prefix is a function."""
    offset: int | None = None
    """Of a window of the calendar: how many seconds its zone is ahead of UTC at its end."""
    limit: int | None = None
    """In place of an index, for a count that drains: how many calls or tokens do in a window."""

    @classmethod
    def at(  # noqa: PLR0913 - the parts of a key
        cls,
        counter: str,
        dimension: str,
        subject: str,
        window: timedelta | CalendarWindow | None,
        now: float,
        *,
        prefix: str = "",
        limit: int | None = None,
    ) -> "CountKey":
        """Return the key of a count at a moment; with a limit, of one that drains."""
        if window is None:
            return cls(counter, dimension, subject, prefix=prefix)
        if isinstance(window, CalendarWindow):
            start, end, offset = around(window, int(now // 1))
            return cls(counter, dimension, subject, end - start, end, prefix, offset)
        seconds, rest = divmod(window, timedelta(seconds=1))
        if rest or seconds < 1:
            raise ValueError(f"window must be whole seconds, from 1, not {window!r}")
        index = int(now // seconds) if limit is None else None
        return cls(counter, dimension, subject, seconds, index, prefix, limit=limit)

    @classmethod
    def parse(cls, text: str) -> "CountKey":
        """Return the key of a text; a value that was shortened stays so."""
        match = _TEXT.fullmatch(text)
        no_key = (
            "key must be the key of a count, such as 'email:user_id:ada', as store.usages() has "
            f"it, not {text!r}"
        )
        if match is None:
            raise ValueError(no_key)
        groups = match.groups()
        try:
            prefix, counter, dimension, subject = map(_decoded, groups[:4])
        except UnicodeDecodeError as error:
            raise ValueError(no_key) from error
        numbers = (None if group is None else int(group) for group in groups[4:])
        window, index, offset, limit = numbers
        timezone(timedelta(seconds=offset or 0))  # else it is too large
        return cls(counter, dimension, subject, window, index, prefix, offset, limit)

    @property
    def unit(self) -> Unit:
        """What is counted."""
        return UNITS.get(self.counter, "calls")

    @property
    def ends(self) -> int | None:
        """When the window ends, in seconds since the Unix epoch."""
        if self.window is None or self.index is None:
            return None
        if self.offset is not None:
            return self.index
        return (self.index + 1) * self.window

    @property
    def resets_at(self) -> datetime | None:
        """When the window ends, in its zone; `None` for a count that lasts until it is reset."""
        if self.ends is None:
            return None
        try:
            at = _EPOCH + timedelta(seconds=self.ends)
            return at.astimezone(timezone(timedelta(seconds=self.offset))) if self.offset else at
        except OverflowError:
            return datetime.max.replace(tzinfo=UTC)

    def __str__(self) -> str:
        values = [self.counter, self.dimension, self.subject]
        if not _PLAIN.fullmatch(":".join(values)):
            values = [*map(_encoded, values)]
        text = ":".join(values)
        if self.window is not None:
            offset = "" if self.offset is None else f"{self.offset:+d}"
            suffix = f":{self.index}{offset}" if self.limit is None else f"~{self.limit}"
            text += f":{self.window}{suffix}"
        return f"{_encoded(self.prefix)}/{text}" if self.prefix else text


@lru_cache(maxsize=4096)
def parsed(text: str) -> CountKey | None:
    """Return the key of a text; `None` if the text is not the key of a count."""
    try:
        return CountKey.parse(text)
    except ValueError:
        return None


def window_end(text: str) -> int | None:
    """Return when a key's window ends, by its text; `None` if it has none."""
    key = parsed(text)
    return key.ends if key else None


def _draining(text: str | None) -> CountKey | None:
    """Return the key of a count that drains, by its text; `None` for any other."""
    key = parsed(text) if text and "~" in text else None
    return key if key and key.limit else None


def read_emission_interval(text: str | None) -> int:
    """Return the microseconds in which a count drains by one; 0 for a count that does not."""
    key = _draining(text)
    # Rounded up: the rate is never higher than the limit says.
    return -(-(key.window or 0) * 10**6 // (key.limit or 1)) if key else 0


def drain_time(text: str | None, amount: int) -> int:
    """Return the microseconds in which an amount drains; the amount if its count does not drain."""
    key = _draining(text)
    if key is None:
        return amount
    if key.unit == "calls":
        return amount * read_emission_interval(text)
    # Each call is rounded up once. If each token were, large limits would not be reached.
    microseconds = -(-abs(amount) * (key.window or 0) * 10**6 // (key.limit or 1))
    return microseconds if amount > 0 else -microseconds


def drained_amount(text: str | None, microseconds: int) -> int:
    """Return the amount that drains in a time; the number itself if its count does not drain."""
    key = _draining(text)
    if key is None:
        return microseconds
    if key.unit == "calls":
        return -(-microseconds // read_emission_interval(text))
    # Rounded down, because the time was rounded up.
    return microseconds * (key.limit or 0) // ((key.window or 1) * 10**6)


def seconds_until_room(key: str | None, drained_in: float, room: int) -> float:
    """Return the seconds until a draining count is at most `room`; below 0 if it is."""
    return (drained_in - drain_time(key, room)) / 10**6


def unit_of(text: str) -> Unit:
    """Return the unit of a count, by the text of its key."""
    key = parsed(text)
    return key.unit if key else "calls"


def dimension_of(key: str) -> str:
    """Return for whom a key counts, from its text; empty if it is no key of a count."""
    return f"{key}::".split(":", 2)[1]


def idle_time(key: str, idle: int) -> int:
    """Return how long the count of a key is kept without a charge, in seconds."""
    return min(idle, _IDLE_AT_MOST.get(dimension_of(key), idle))


def keys_of(request: AcquireRequest) -> list[str]:
    """Return the keys that a request and its corrections name."""
    counters = request.counters.values()
    return [
        *(counter.rollover.previous for counter in counters if counter.rollover is not None),
        *(counter.key for counter in counters if counter.key is not None),
        *(
            key
            for correction in request.corrections
            for key in (*correction.amounts, *correction.starts)
        ),
    ]


def check_keys(keys: object, *, of_counts: bool = False) -> None:
    """Check that a store is given several keys, and that counts can have them."""
    if (
        isinstance(keys, str)
        or not isinstance(keys, Sequence)
        or not all(isinstance(key, str) for key in keys)
    ):
        raise TypeError(f"keys must be a sequence of strings, not {keys!r}")
    for key in keys if of_counts else ():
        CountKey.parse(key)


NEAR = "near:"
"""How the names of entries begin that mark which share of a limit was told."""

FREEZES = "::"
"""The key of a prefix's freezes, and the name of the freeze of all subjects."""


def is_freezes(key: str) -> bool:
    """Return whether a key is that of a prefix's freezes."""
    return key.rpartition("/")[2] == FREEZES


def freezes_key(prefix: str) -> str:
    """Return the key of a prefix's freezes."""
    return f"{prefix}/{FREEZES}" if prefix else FREEZES


@lru_cache(maxsize=256)
def digest(name: str) -> str:
    """Return a short name for one that may have any length and characters: half of its hash."""
    return sha256(name.encode(errors="surrogatepass")).hexdigest()[:32]


def hold_entry(request: str) -> str:
    """Return the name of the entry of what a request holds, by its idempotency key."""
    return f"hold:{digest(request)}"


def grant_entry(name: str) -> str:
    """Return the name of a grant's or a freeze's entry beside its count."""
    return f"grant:{digest(name)}"


@lru_cache(maxsize=4096)
def freeze_entry(key: str) -> str:
    """Return the name of the freeze that stops a count, beside that of all; empty if none can."""
    counter, dimension, subject = (*key.split(":", 3), "", "")[:3]
    # Leases are renewed while calls run, and a rate limiter or a pace could only let calls wait.
    exempt = dimension in {"", "concurrency", "rate_limiter"}
    exempt |= (counter, dimension) == ("pace", "provider")
    return "" if exempt else grant_entry(f":{dimension}:{subject}")


def check_prefix(what: str, prefix: object) -> str:
    """Check a prefix of a store, and return it."""
    validate_type(what, prefix, str, "a string")
    if not _PREFIX.fullmatch(text := str(prefix)):
        raise ValueError(f"{what} must match {_PREFIX.pattern}, not {prefix!r}")
    return text


def prefix_of(key: str) -> str:
    """Return the prefix of a key in a store whose prefix is a function; empty in others."""
    return key.rpartition("/")[0]


def as_shown(value: str) -> str:
    """Return a value as it is read from a key: a long one shortened, unless it is given so."""
    return _decoded(_encoded(_decoded(_quoted(value))))


def _decoded(value: str | None) -> str:
    text = unquote(value or "", errors="surrogatepass")
    return Shortened(text) if value and _CUT.fullmatch(value) else text


def _encoded(value: str) -> str:
    if isinstance(value, Shortened):
        return _quoted(value)
    if len(value) <= MAX_LENGTH:
        encoded = _quoted(value)
        if len(encoded) <= MAX_LENGTH:
            return encoded
    return _cut(value)


@lru_cache(maxsize=8)
def _cut(value: str) -> str:
    # A long value's beginning and its hash. All limits that match a call ask for it. Values may be
    # megabytes, so few results are cached.
    shortened = ""
    for character in value:
        piece = _quoted(character)
        if len(shortened + piece) > _SHORTENED:
            break
        shortened += piece
    # Longer than any value that is not shortened, so the two cannot be confused.
    return f"{shortened}~{sha256(value.encode(errors='surrogatepass')).hexdigest()}"


def _quoted(value: str) -> str:
    return quote(value, safe=_SAFE, errors="surrogatepass")
