"""Counts: what a request does to them, how they drain and expire, and how many are kept."""

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from typing import NamedTuple

from langchain_quota.core.admission import MAX_COUNT, AcquireRequest, AcquireResult, Demand
from langchain_quota.runtime.arguments import validate_type
from langchain_quota.runtime.expiring_dict import ExpiringDict
from langchain_quota.runtime.store_errors import QuotaStoreError, ReservationsFullError
from langchain_quota.stores import GRACE
from langchain_quota.stores.keys import drain_time, idle_time, read_emission_interval

MAX_HELD = 1000
"""How many entries a count that drains has at most: who lowers it moves them."""


def smallest_limits(request: AcquireRequest) -> dict[str | None, int]:
    """Return the smallest enforced limit over the count of each key, for show."""
    limits: dict[str | None, int] = {}
    for _, thresholds in request.demands:
        for _, _, name, maximum, enforced in thresholds:
            if enforced and 0 <= maximum < MAX_COUNT:
                key = request.counters[name].key
                limits[key] = min(maximum, limits.get(key, maximum))
    return limits


def demands_in_drain_time(request: AcquireRequest) -> tuple[Demand, ...]:
    """Return the demands of a request, in microseconds where counts drain."""
    keys = {name: counter.key for name, counter in request.counters.items()}
    return tuple(
        Demand(
            {name: drain_time(keys[name], amount) for name, amount in amounts.items()},
            tuple(
                threshold._replace(maximum=drain_time(keys[threshold.counter], threshold.maximum))
                for threshold in thresholds
            ),
        )
        for amounts, thresholds in request.demands
    )


def replay(remembered: AcquireResult, request: AcquireRequest) -> AcquireResult:
    """Return a remembered result again; the request may have other names for its counters."""
    check_fits(len(remembered.used), len(remembered.admitted), request)
    names = dict(zip(remembered.used, request.counters, strict=True))
    return remembered._replace(
        used={names[name]: used for name, used in remembered.used.items()},
        replayed=True,
        granted={names[name]: amount for name, amount in remembered.granted.items()},
        newly_granted={},
        drained_in={names[name]: time for name, time in remembered.drained_in.items()},
        frozen=tuple(names[name] for name in remembered.frozen),
    )


def check_fits(counters: int, calls: int, request: AcquireRequest) -> None:
    """Check that a remembered result has as many counters and calls as the request."""
    if (counters, calls) != (len(request.counters), len(request.demands)):
        raise QuotaStoreError("the idempotency key was given to a batch of another form before")


def check_request(request: object) -> None:
    """Check a request to a store, before anything is done."""
    if not isinstance(request, AcquireRequest):
        raise TypeError(f"request must be an AcquireRequest, not {request!r}")
    for counter in request.counters.values():
        if counter.lease is not None and not request.idempotency_key:
            raise ValueError(
                f"idempotency_key must not be empty: the counter of {counter.key!r} has a "
                "lease, and the key names what is held; give the request one of its own"
            )


def check_held(key: str, entries: int) -> None:
    """Raise an error if a count that drains has no room for one more entry."""
    if entries >= MAX_HELD:
        raise ReservationsFullError(
            f"{MAX_HELD} requests hold a part of {key!r}, which are the most"
        )


def idle_seconds(idle_ttl: timedelta) -> int:
    """Return how long an idle count is kept, in seconds."""
    validate_type("idle_ttl", idle_ttl, timedelta, "a timedelta")
    if idle_ttl < timedelta(seconds=1):
        raise ValueError(f"idle_ttl must be a second or more, not {idle_ttl!r}")
    return math.ceil(idle_ttl.total_seconds())


class Entry(NamedTuple):
    """An amount beside a count, until it is dropped: held if above 0, added to limits if below."""

    amount: int
    until: int
    """When it ends, in seconds since the Unix epoch."""
    place: int = 0
    """Of what is held in a count that drains: when all up to it has drained, in microseconds; of a
    grant: the number `checked` of its count when it was given."""


@dataclass(slots=True)
class Count:
    """What is kept under a key; `used` includes what is held. If it drains, it is when it is 0."""

    used: int | None = None
    """`None` before the first charge: then only its entries are kept."""
    limit: int | None = None
    ends: int | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    """What requests hold, and what grants and rollover add to the limits, by name."""
    next_end: float = math.inf
    """No entry ends before this time."""
    changed_at: int | None = None
    """If it drains, when it was last changed: a clock that goes back takes the count with it."""
    raised: int = 0
    """What entries add to the limits."""
    fresh: int = 0
    """What of it no call has been checked by."""
    checked: int = 0
    """How often calls have been checked by what was fresh."""

    def hold(self, name: str, amount: int, until: int) -> None:
        """Hold an amount that was charged just now, until it is dropped or its lease ends."""
        used = self.used or 0
        start = used - amount
        held, last, place = self.entries.get(name, (0, until, start))
        if start in (place, self.changed_at):
            # Nothing of others drains before it; else the place of the first part holds for all.
            place = used
        self._enter(name, Entry(held + amount, max(until, last), place))

    def grant(self, name: str, amount: int, until: int, fresh: int = 0) -> None:
        """Add an amount to the limits until it is dropped or ends; so much of it is fresh."""
        self._enter(name, Entry(-amount, until, self.checked if fresh else -1))
        self.raised += amount
        self.fresh += fresh

    def _enter(self, name: str, entry: Entry) -> None:
        self.entries[name] = entry
        self.next_end = min(entry.until, self.next_end)

    def drop(self, name: str, now: float, amount: float = math.inf) -> int:
        """Drop an entry, or so much of what it holds, and return the part that has drained.

        What has drained was used: it is not subtracted.
        """
        held, until, place = self.entries.pop(name, Entry(0, 0))
        if held <= 0:
            self.raised += held
            self.fresh += held if place == self.checked else 0
            return 0
        left = part = int(min(held, amount))
        if self.changed_at is not None:
            left = max(0, min(part, place - _micros(now)))
        if held > part:
            self.entries[name] = Entry(held - part, until, place - left)
        self.lower(left, place)
        return part - left

    def lower(self, amount: int, place: int = 0) -> None:
        """Subtract an amount. In a count that drains, all that is behind its place moves up."""
        self.used = max(0, (self.used or 0) - amount)
        if self.changed_at is not None and amount:
            for name, (held, until, at) in self.entries.items():
                if at > place:
                    self.entries[name] = Entry(held, until, at - amount)

    def update(self, now: float) -> None:
        """Follow a clock that has gone back, and drop the entries that have ended."""
        micros = _micros(now)
        if self.changed_at is not None and 0 < micros < self.changed_at:
            self.lower(self.changed_at - micros)
            self.changed_at = micros
        if self.next_end <= now:
            over = [(e.until, e.place, name) for name, e in self.entries.items() if e.until <= now]
            for end, _, name in sorted(over):
                self.drop(name, end)
            self.next_end = min((entry.until for entry in self.entries.values()), default=math.inf)


def level_of(count: Count | None, now: float, key: str = "", start: int = 0) -> int:
    """Return how much is used now, in microseconds if it drains; a new count has its start."""
    if count is None or count.used is None:
        return drain_time(key, start) if start else 0
    return count.used if count.changed_at is None else max(0, count.used - _micros(now))


def _micros(now: float) -> int:
    return int(now * 10**6)


class Counts(ExpiringDict[Count]):
    """The counts of a store, at most so many; without charges, one is kept for an idle time."""

    def __init__(self, max_keys: int, idle: int) -> None:
        super().__init__()
        self.max_keys = max_keys
        self._idle = idle
        # The keys of those that callers mirror, the oldest charge first.
        self.droppable: OrderedDict[str, None] = OrderedDict()

    def get(self, name: str, now: float) -> Count | None:
        """Return a count as it is now; `None` if there is none."""
        count, expires = self.all.get(name, (None, now))
        if count is None or expires <= now:
            return None
        if count.changed_at is not None or count.next_end <= now:
            count.update(now)
        return count

    def write(  # noqa: PLR0913, PLR0917 - what a count is
        self,
        key: str,
        count: Count | None,
        used: int | None,
        ends: int | None,
        now: float,
        until: float = -math.inf,
    ) -> Count:
        """Set how much is used under a key, and return the count, which may be new.

        Args:
            key: The key.
            count: What is kept under the key.
            used: How much is used; in microseconds if the count drains; `None` for no charge yet.
            ends: When its window ends, in seconds since the Unix epoch; `None` for none.
            now: The time.
            until: How long it is kept at least.
        """
        if count is None:
            drains = "~" in key and read_emission_interval(key)
            count = Count(changed_at=0 if drains else None)
        if count.changed_at is None or used is None:
            count.used = used
            expires = now + idle_time(key, self._idle) if ends is None else max(ends, now) + GRACE
        else:
            count.changed_at = _micros(now)
            count.used, expires = used + count.changed_at, now + used / 10**6 + GRACE
        count.ends = ends
        # Never earlier than before, unless it drains.
        least = self.all[key][1] if key in self.all and count.changed_at is None else -math.inf
        self.put(key, count, max(expires, least, until), now)
        return count

    def note_charge(self, key: str, *, mirrored: bool) -> None:
        """Put a count that is charged now last among the droppable ones, if it is mirrored."""
        self.droppable.pop(key, None)
        # Callers do not bring back what grants and rollover add.
        if mirrored and not self.all[key][0].raised:
            self.droppable[key] = None

    def make_room(self, keys: Iterable[str], now: float) -> None:
        """Remove what is needed to keep counts under keys, or raise a `QuotaStoreError`."""
        wanted = set(keys)
        while (excess := len(self.all) + len(wanted.difference(self.all)) - self.max_keys) > 0:
            if self.purge(now, 1):
                continue
            droppable = (key for key in self.droppable if key not in wanted)
            dropped = [*islice(droppable, excess)]
            if len(dropped) < excess:
                raise QuotaStoreError(f"the store is full: it keeps {self.max_keys} counts at most")
            for key in dropped:
                self.remove(key)

    def remove(self, name: str) -> None:
        """Remove a count."""
        self.droppable.pop(name, None)
        super().remove(name)
