"""The stores of a process that keep a bounded number of counts."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from langchain_quota.locks import fork_safe_lock
from langchain_quota.stores import Occupancy

NEARLY_FULL = 0.8
"""From this share on a store is logged as nearly full: the share that cannot be freed."""


class StoreTable:
    """The stores that say how full they are; a store that is no longer used leaves by itself."""

    def __init__(self) -> None:
        self._stores: WeakSet[Any] = WeakSet()
        self._lock = fork_safe_lock()

    def add(self, store: object) -> bool:
        """Add a store, if it says how full it is; whether it does."""
        if not hasattr(store, "occupancy"):
            return False
        with self._lock:
            self._stores.add(store)
        return True

    def fullest(self) -> Occupancy | None:
        """How full the store with the least room left is; `None` without a store."""
        with self._lock:
            stores = list(self._stores)
        return fullest(Occupancy(*store.occupancy) for store in stores)


def fullest(found: Iterable[Occupancy]) -> Occupancy | None:
    """The one with the least room left, by share; `None` without one."""
    return max(found, key=lambda each: each.share, default=None)
