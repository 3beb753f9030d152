"""The grants that a `MemoryStore` keeps, by key."""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from langchain_quota.stores import COMPENSATED
from langchain_quota.stores.grants import Grant, in_utc


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
