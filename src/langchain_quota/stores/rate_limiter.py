"""LangChain's rate limiter, shared through a store."""

import math
from collections.abc import Awaitable, Callable
from datetime import timedelta
from uuid import uuid4

from langchain_core.rate_limiters import BaseRateLimiter

from langchain_quota.core.admission import (
    AcquireRequest,
    AcquireResult,
    CountRef,
    Demand,
    Threshold,
)
from langchain_quota.limits.quotas import Quota
from langchain_quota.runtime.arguments import validate_count, validate_name
from langchain_quota.runtime.semaphores import LOOKS_AGAIN, semaphore_of
from langchain_quota.runtime.sync_async import Mode, call_variant, run_sync, wait_for
from langchain_quota.stores.keys import (
    CountKey,
    drain_time,
    read_emission_interval,
    seconds_until_room,
)

_SCOPE = "rate_limiter"
_FOREVER = 1e9
"""Longer than any process lives, in seconds."""


class RateLimiting:
    """A store that makes rate limiters."""

    prefix: object
    acquire: Callable[[AcquireRequest], AcquireResult]
    aacquire: Callable[[AcquireRequest], Awaitable[AcquireResult]]

    def delay(self, key: str, seconds: float, *, burst: int = 0) -> None:
        """Have a smooth count admit nothing for some seconds; after them it drains evenly.

        A count that admits nothing for longer is not changed, so that repeating it does no harm.

        Args:
            key: The key of a smooth count, as `QuotaUsage` has it.
            seconds: How long, from 0, from now by the store's clock.
            burst: The highest burst of the limits on the count.

        Raises:
            QuotaStoreError: The store failed, or did not answer in time.
            ValueError: The key is not that of a smooth count.
        """
        run_sync(self._delay("", key, _delay_time(key, seconds, burst)))

    async def adelay(self, key: str, seconds: float, *, burst: int = 0) -> None:
        """`delay`, without blocking the event loop."""
        await self._delay("a", key, _delay_time(key, seconds, burst))

    async def _delay(self, mode: Mode, key: str, microseconds: int) -> None:
        """Have a count drain no sooner than in so many microseconds."""
        raise NotImplementedError

    def rate_limiter(
        self, name: str, limit: int, window: timedelta | str, *, burst: int = 1
    ) -> BaseRateLimiter:
        """Return a rate limiter for chat models, shared by all that use the store.

        Calls are spread evenly over the window. Those of one process are admitted in the order in
        which they come. Only limiters with the same name, limit and window share a count. A call
        that cannot ask the store raises `QuotaStoreError`, and does not reach the model. A call
        that is cancelled while the store answers may be counted.

        Args:
            name: What is limited, 1 to 64 printable characters.
            limit: How many calls a window has, from 1.
            window: The length of the window, as in `Quota`.
            burst: How many calls may come at once after a pause, from 1 and at most `limit`.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of bounds, or the store's prefix is a function.

        Examples:
            >>> from langchain_quota import MemoryStore
            >>> limiter = MemoryStore().rate_limiter("openai", 60, "1m")
            >>> limiter.acquire(blocking=False), limiter.acquire(blocking=False)
            (True, False)
        """
        validate_name("name", name)
        if not name:
            raise ValueError("name must not be empty")
        validate_count("limit", limit, least=1, what="a whole number")
        quota = Quota(limit, per="global", window=window, smooth=True, burst=burst)
        if callable(getattr(self, "prefix", None)):
            raise ValueError(  # noqa: TRY004 - it is no wrong type
                "the prefix of this store is a function: make a store whose prefix is a string"
            )
        key = CountKey.at(name, _SCOPE, "", quota.period, 0, limit=limit)
        return _StoreRateLimiter(self, str(key), quota.burst or 1)


def _delay_time(key: str, seconds: float, burst: int) -> int:
    """Return in how many microseconds a count drains that admits nothing for some seconds."""
    if not read_emission_interval(key):
        raise ValueError(f"key must be that of a smooth count, not {key!r}")
    return math.ceil(max(0.0, seconds) * 10**6) + drain_time(key, burst)


class _StoreRateLimiter(BaseRateLimiter):
    """A count of a store that drains."""

    def __init__(self, store: RateLimiting, key: str, burst: int) -> None:
        self._store, self._key, self._burst = store, key, burst

    def acquire(self, *, blocking: bool = True) -> bool:
        """Wait until the call may be made; without `blocking`, only say whether it may."""
        return run_sync(self._acquire("", blocking=blocking))

    async def aacquire(self, *, blocking: bool = True) -> bool:
        """`acquire`, without blocking the event loop."""
        return await self._acquire("a", blocking=blocking)

    async def _acquire(self, mode: Mode, *, blocking: bool) -> bool:
        seconds = _FOREVER if blocking else 0
        slot = await semaphore_of(self._store, self._key).acquire(mode, 1, seconds)
        try:
            while slot.acquired:
                lacks = await self._lacks(mode)
                if lacks <= 0 or not blocking:
                    return lacks <= 0
                await wait_for(mode, min(lacks, LOOKS_AGAIN))
            return False
        finally:
            slot.release()

    async def _lacks(self, mode: Mode) -> float:
        """Count a call if there is room; else in how many seconds there is."""
        threshold = Threshold(_SCOPE, _SCOPE, _SCOPE, self._burst)
        counters, demands = {_SCOPE: CountRef(self._key)}, (Demand({_SCOPE: 1}, (threshold,)),)
        request = AcquireRequest(uuid4().hex, uuid4().hex, counters, demands)
        result = await call_variant(mode, self._store.acquire, self._store.aacquire, request)
        if result.admitted[0]:
            return 0
        return seconds_until_room(self._key, result.drained_in[_SCOPE], self._burst - 1)
