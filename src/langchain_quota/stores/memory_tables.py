"""What a `MemoryStore` keeps: counts and grants by key until they end, and values for a while."""

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

from langchain_quota.decision import ROOT_RUN, RUN
from langchain_quota.stores import COMPENSATED, GRACE, REMEMBERED, Metadata, Occupancy, idle_time
from langchain_quota.stores.grants import Grant, in_utc
from langchain_quota.stores.keys import dimension_of

_PURGED_AT_ONCE = 100
"""How many counts one operation looks at to make room, so that no operation takes long."""

V = TypeVar("V")


@dataclass(slots=True)
class Count:
    """What is kept under a key; `used` includes what is held."""

    used: int
    limit: int | None
    ends: int | None
    expires: float
    among: OrderedDict[str, None] | None
    """The keys that expire after the same idle time; `None` for a count of a window."""
    holds: dict[str, tuple[int, int]] | None = None
    """What is held, and until when, by the request that holds it."""
    next_end: float = math.inf
    """No lease of the holds ends before this time."""


class Counts:
    """The counts by key; expired ones are removed step by step."""

    def __init__(self, max_keys: int, idle: int) -> None:
        self.max_keys = max_keys
        self._idle = idle
        self._counts: dict[str, Count] = {}
        # Each key is in one of these. Of windows: an entry at a time when it cannot have expired
        # yet. Of the others: by their last charge, since the idle time is the same for all in it.
        self._windows: list[tuple[float, str]] = []
        self._lasting: OrderedDict[str, None] = OrderedDict()
        self._mirrored: OrderedDict[str, None] = OrderedDict()
        self._runs: OrderedDict[str, None] = OrderedDict()
        self._root_runs: OrderedDict[str, None] = OrderedDict()
        # Those whose counts callers mirror; the first ones are dropped first.
        self._droppable = (self._runs, self._root_runs, self._mirrored)

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def occupancy(self) -> Occupancy:
        """How full it is."""
        return Occupancy(len(self._counts), sum(map(len, self._droppable)), self.max_keys)

    def get(self, key: str, now: float) -> Count | None:
        """A count, without holds whose lease is over; `None` if there is none."""
        count = self._counts.get(key)
        if count is None or count.expires <= now:
            return None
        if count.holds and count.next_end <= now:
            for name in [name for name, (_, ends) in count.holds.items() if ends <= now]:
                count.used = max(0, count.used - count.holds.pop(name)[0])
            count.next_end = min((ends for _, ends in count.holds.values()), default=math.inf)
        return count

    def hold(self, key: str, name: str, amount: int, ends: int) -> None:
        """Note that a request only holds, until its lease ends, so much of what it has charged."""
        count = self._counts[key]
        count.holds = count.holds or {}
        held, last = count.holds.get(name, (0, ends))
        count.holds[name] = (held + amount, max(ends, last))
        count.next_end = min(ends, count.next_end)

    def give_back(self, key: str, name: str, now: float, most: int | None = None) -> None:
        """Give back what a request still holds, or `most` of it."""
        count = self.get(key, now)
        if count is not None and count.holds and name in count.holds:
            held, ends = count.holds.pop(name)
            amount = held if most is None else min(held, most)
            count.used = max(0, count.used - amount)
            if held > amount:
                count.holds[name] = (held - amount, ends)

    def forget_holds(self, key: str) -> None:
        """Forget what is held of a count that becomes 0: nothing is left to give back."""
        count = self._counts.get(key)
        if count is not None:
            count.holds, count.next_end = None, math.inf

    def matching(self, pattern: str) -> list[str]:
        """The keys that match a glob pattern, sorted."""
        return sorted(key for key in self._counts if fnmatchcase(key, pattern))

    def put(
        self, key: str, used: int, ends: int | None, now: float, beside: Metadata | None = None
    ) -> None:
        """Write a count; only a charge changes its limit, and whether it is mirrored."""
        kept, live = self._counts.get(key), self.get(key, now)
        limit = None if live is None else live.limit
        mirrored = kept is not None and kept.among is self._mirrored
        if beside is not None:
            limit, mirrored = beside.limit, beside.mirrored
        expires = now + idle_time(key, self._idle) if ends is None else max(ends, now) + GRACE
        among = None
        if kept is not None:
            # Never earlier, so the existing entry stays correct.
            expires = max(expires, kept.expires)
        if kept is None and ends is not None:
            heapq.heappush(self._windows, (expires, key))
        elif kept is None or kept.among is not None:
            others = self._mirrored if mirrored else self._lasting
            among = {RUN: self._runs, ROOT_RUN: self._root_runs}.get(dimension_of(key), others)
            if kept is not None and kept.among is not None:
                del kept.among[key]
            among[key] = None
        count = self._counts[key] = Count(used, limit, ends, expires, among)
        if live is not None and live.holds:
            count.holds, count.next_end = live.holds, live.next_end

    def make_room(self, keys: Collection[str], now: float) -> bool:
        """Whether keys fit, without what has expired and, if they must go, mirrored counts."""
        for _ in range(_PURGED_AT_ONCE):
            if not self._purge(now):
                break
        if len(self._counts) + len(keys) <= self.max_keys:
            return True
        while (excess := self._excess(keys)) > 0 and self._purge(now):
            pass
        if excess <= 0:
            return True
        droppable = self._droppable
        wanted = {key for key in keys for others in droppable if key in others}
        if excess > sum(map(len, droppable)) - len(wanted):
            return False
        for others in droppable:
            for key in [*wanted & others.keys()]:
                others.move_to_end(key)
            while excess > 0 and others and (oldest := next(iter(others))) not in wanted:
                del others[oldest], self._counts[oldest]
                excess -= 1
        return True

    def _excess(self, keys: Collection[str]) -> int:
        """By how many counts the store would be too full."""
        new = {key for key in keys if key not in self._counts}
        return len(self._counts) + len(new) - self.max_keys

    def _purge(self, now: float) -> bool:
        """Look at one count that may have expired; whether there was such a count."""
        if self._windows and self._windows[0][0] <= now:
            key = self._windows[0][1]
            expires = self._counts[key].expires
            if expires <= now:
                heapq.heappop(self._windows)
                del self._counts[key]
            else:  # charged since
                heapq.heapreplace(self._windows, (expires, key))
            return True
        for others in (*self._droppable, self._lasting):
            if others and self._counts[oldest := next(iter(others))].expires <= now:
                del others[oldest], self._counts[oldest]
                return True
        return False


class Recent(Generic[V]):
    """Remembers the latest values for some seconds."""

    def __init__(self, most: int, seconds: int = REMEMBERED) -> None:
        self._most = most
        self._seconds = seconds
        self._values: OrderedDict[str, tuple[V, float]] = OrderedDict()

    def get(self, name: str, now: float) -> V | None:
        """What is remembered under a name."""
        value, expires = self._values.get(name, (None, now))
        return None if expires <= now else value

    def put(self, name: str, value: V, now: float) -> None:
        """Remember a value."""
        self._values[name] = (value, now + self._seconds)
        self._values.move_to_end(name)
        while len(self._values) > self._most or next(iter(self._values.values()))[1] <= now:
            self._values.popitem(last=False)

    def forget(self, name: str) -> None:
        """Forget what is remembered under a name."""
        self._values.pop(name, None)


@dataclass(slots=True)
class _Kept:
    """A grant, and whether a call has been judged by it."""

    grant: Grant
    ends: int
    is_new: bool = True


class Grants:
    """Grants by key and id. An ended one is remembered for a week, so it is not given again."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, _Kept]] = {}
        # The end, key and id of each, sorted.
        self._ends: list[tuple[int, str, str]] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def give(self, asked: Grant, now: float) -> tuple[Grant | None, bool]:
        """The grant that is kept, and whether it is new; `None` if it would have ended."""
        self._forget(now)
        known = self._kept.get(asked.key, {}).get(asked.id)
        if known is not None:
            return known.grant, False
        kept = _Kept(asked, asked.ends or 0)
        if kept.ends <= now:
            return None, False
        self._kept.setdefault(asked.key, {})[asked.id] = kept
        insort(self._ends, (kept.ends, asked.key, asked.id))
        return asked, True

    def revoke(self, key: str, name: str, now: float) -> Grant | None:
        """End a grant; `None` if there is none."""
        kept = self._kept.get(key, {}).get(name)
        if kept is None or kept.ends <= now:
            return None
        del self._ends[bisect_left(self._ends, (kept.ends, key, name))]
        kept.ends = int(now)
        insort(self._ends, (kept.ends, key, name))
        kept.grant = replace(kept.grant, until=in_utc(kept.ends))
        return kept.grant

    def amount(self, key: str, now: float) -> int:
        """What is granted under a key."""
        return sum(each.grant.amount for each in self._of(key, now))

    def take_new(self, key: str, now: float) -> int:
        """What is granted under a key by grants by which no call has been judged before."""
        amount = 0
        for each in self._of(key, now):
            amount += each.grant.amount if each.is_new else 0
            each.is_new = False
        return amount

    def matching(self, pattern: str, now: float) -> list[Grant]:
        """The grants of the keys that match a glob pattern, sorted by key and time."""
        found = [
            each.grant
            for key in sorted(self._kept)
            if fnmatchcase(key, pattern)
            for each in self._of(key, now)
        ]
        return sorted(found, key=lambda grant: (grant.key, grant.given_at))

    def _of(self, key: str, now: float) -> list[_Kept]:
        return [each for each in self._kept.get(key, {}).values() if each.ends > now]

    def _forget(self, now: float) -> None:
        """Forget the grants that ended long ago, without a look at the others."""
        count = bisect_right(self._ends, now, key=lambda each: each[0] + COMPENSATED)
        for _, key, name in self._ends[:count]:
            kept = self._kept[key]
            del kept[name]
            if not kept:
                del self._kept[key]
        del self._ends[:count]
