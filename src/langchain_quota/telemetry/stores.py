"""The stores of a process that keep so many counts and no more."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from langchain_quota.locks import fork_safe_lock
from langchain_quota.stores import Occupancy

NEARLY_FULL = 0.8
"""The share of a store's room that is taken for good when that is logged."""


class StoreTable:
    """The stores that say how full they are; whoever drops one need not take it out."""

    def __init__(self) -> None:
        self._stores: WeakSet[Any] = WeakSet()
        self._lock = fork_safe_lock()

    def add(self, store: object) -> bool:
        """Take in a store, if it says how full it is; whether it does."""
        if not hasattr(store, "occupancy"):
            return False
        with self._lock:
            self._stores.add(store)
        return True

    def fullest(self) -> Occupancy | None:
        """How full the store is that has the least room left; `None` without one."""
        with self._lock:
            stores = list(self._stores)
        return fullest(Occupancy(*store.occupancy) for store in stores)


def fullest(found: Iterable[Occupancy]) -> Occupancy | None:
    """The one with the least room left, by share; `None` without one."""
    return max(found, key=lambda each: each.share, default=None)
