"""Keys by the end of their window: what a passed window held is found without a search."""

import heapq
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Windows(Generic[Key]):
    """Keys by the times at which they end.

    Windows are aligned, so there are few times and many keys for each.
    """

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._keys: dict[float, dict[Key, None]] = {}

    def add(self, key: Key, ends: Iterable[float]) -> None:
        """Remember when windows of a key end, in seconds since the Unix epoch."""
        for end in ends:
            if end not in self._keys:
                self._keys[end] = {}
                heapq.heappush(self._ends, end)
            self._keys[end][key] = None

    def discard(self, key: Key, ends: Iterable[float]) -> None:
        """Forget that windows of a key end then."""
        for end in ends:
            # A time without keys stays until it has passed, so that it is in the heap once.
            self._keys.get(end, {}).pop(key, None)

    def pop_passed(self, now: float) -> Key | None:
        """Take out a key of which a window has passed, if there is one."""
        while self._ends and self._ends[0] <= now:
            keys = self._keys[self._ends[0]]
            if keys:
                return keys.popitem()[0]
            del self._keys[heapq.heappop(self._ends)]
        return None
