"""A dict whose values expire."""

import math
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

V = TypeVar("V")

_PURGED_AT_ONCE = 100
"""How many values one operation looks at to make room, so that no operation takes long."""


class ExpiringDict(Generic[V]):
    """Values by name, each until it expires; expired ones are removed step by step."""

    def __init__(self, maximum: float = math.inf) -> None:
        self._most = maximum
        self.all: dict[str, tuple[V, float]] = {}
        # Of each name a time when it cannot have expired yet, and maybe of names that are gone.
        self._due: list[tuple[float, str]] = []

    def get(self, name: str, now: float) -> V | None:
        """Return a value; `None` if there is none."""
        value, expires = self.all.get(name, (None, now))
        return None if expires <= now else value

    def put(self, name: str, value: V, expires: float, now: float = -math.inf) -> None:
        """Keep a value, and remove some that have expired; if there are too many, the next one."""
        if self._due and self._due[0][0] <= now:
            self.purge(now)
        if name not in self.all:
            heappush(self._due, (expires, name))
        self.all[name] = value, expires
        while len(self.all) > self._most:
            self.purge(math.inf, 1)

    def remove(self, name: str) -> None:
        """Remove a value."""
        del self.all[name]
        if len(self._due) > 2 * len(self.all) + _PURGED_AT_ONCE:
            self._due = [(expires, key) for key, (_, expires) in self.all.items()]
            heapify(self._due)

    def purge(self, now: float, maximum: int = _PURGED_AT_ONCE) -> bool:
        """Remove expired values, of `maximum` candidates; return whether there were candidates."""
        looked = 0
        while looked < maximum and self._due and self._due[0][0] <= now:
            looked += 1
            due, name = heappop(self._due)
            _, expires = self.all.get(name, (None, -math.inf))
            if expires > due:
                heappush(self._due, (expires, name))
            elif name in self.all:
                self.remove(name)
        return looked > 0
