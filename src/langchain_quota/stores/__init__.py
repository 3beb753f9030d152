"""Counts that runs share: in one process (memory), or on all machines (redis, postgres).

`QuotaStore` says what each store does. `memory.py` does it in Python, and `rows.py` with the rows
of a database. In Redis, `acquire.lua` admits and settles calls, and `rows.py` does the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol, runtime_checkable

from langchain_quota.core.admission import AcquireRequest, AcquireResult

REMEMBERED = 3600
"""How long results and refused attempts are remembered, in seconds."""

CORRECTED = 7 * 24 * 3600
"""How long corrections are remembered, in seconds: a caller that fails sends them again."""

GRACE = 3600
"""How long a count is kept when its window is over, in seconds: the clocks of workers differ."""

IDLE_TTL = timedelta(days=365)
"""How long a count without a window is kept when nobody charges it."""

RUN_IDLE = 24 * 3600
"""How long a run's count is kept at most, in seconds: later the graph's state brings it back."""

ROOT_RUN_IDLE = 7 * 24 * 3600
"""How long a root run's count is kept at most, in seconds: an interrupt may last for days."""


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """What a store keeps under a key.

    Attributes:
        key: The key.
        used: The count, in the unit of its limits. In a budget it includes what is reserved
            for calls that are running.
        limit: The smallest enforced limit when it was last charged, for show; `None` for none.
        expires_at: When its window ends, in seconds since the Unix epoch; `None` if it has none.
        granted: What is added to its limits now, by grants and by what rolled over.
        rolled_over: What rolled over from the window before; `None` before it is fixed.

    Examples:
        >>> from langchain_quota import MemoryStore
        >>> store = MemoryStore()
        >>> store.reset(["search:user_id:ada"])
        >>> [(usage.key, usage.used) for usage in store.usages()]
        [('search:user_id:ada', 0)]
    """

    key: str
    used: int
    limit: int | None
    expires_at: float | None
    granted: int = 0
    rolled_over: int | None = None


class Occupancy(NamedTuple):
    """How full a store with a bounded number of counts is.

    A store of your own that has a property `occupancy` is watched like a `MemoryStore`.

    Attributes:
        keys: The counts that it keeps.
        droppable: How many of them can be dropped for others: their callers bring them back.
        max_keys: The most that it keeps.

    Examples:
        >>> from langchain_quota import MemoryStore
        >>> MemoryStore(max_keys=1000).occupancy
        Occupancy(keys=0, droppable=0, max_keys=1000)
    """

    keys: int
    droppable: int
    max_keys: int

    @property
    def share(self) -> float:
        """The share of the room that cannot be freed, from 0; at 1 new counts are refused."""
        return (self.keys - self.droppable) / self.max_keys


@runtime_checkable
class QuotaStore(Protocol):
    """Keeps counts that runs share.

    Every operation is one atomic step; a store may undo attempts, and fix what rolls over, in steps
    of their own before a batch. The async forms do the same as the sync ones.

    A count is kept with its entries: what requests reserve, until they are settled or their leases
    end, and what grants and rollover add to the limits. It lasts as long as its grants, and else
    expires an hour after its window; with a `rollover`, after the next one. One without a window
    expires when it has not been charged for a year (a store may have a shorter time), a root run's
    for a week, a run's for a day. Results, refused attempts and corrections that settle a
    request are remembered for an hour, other corrections for a week.

    A store may have three attributes more. `clock`, a function that gives the seconds since the
    Unix epoch, decides which window a call is in, in place of the worker's clock. `prefix`, if it
    is a function as for `RedisStore`, gives what all keys of a request begin with. `forms` says
    which form it serves, if it serves one: `("sync",)` or `("async",)`.

    Raises:
        QuotaStoreError: The store failed, or did not answer in time. The operation may have
            happened nevertheless.
        TypeError: The store, or the method, is used in a wrong way.

    Examples:
        >>> from langchain_quota import MemoryStore
        >>> from langchain_quota.stores import QuotaStore
        >>> from langchain_quota.core.admission import AcquireRequest, CountRef, Demand, Threshold
        >>> store: QuotaStore = MemoryStore()
        >>> searches = CountRef("search:user_id:ada")
        >>> call = Demand({"searches": 1}, (Threshold("one", "user_id", "searches", 1),))
        >>> request = AcquireRequest("batch", "first try", {"searches": searches}, (call, call))
        >>> store.acquire(request).refused
        ({}, {'one': 'user_id'})
    """

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        """Admit each call of a batch against all of its limits, or refuse it.

        In this order:

        1. The corrections are made, each id once, however often it is sent. One with an attempt
           undoes what the attempt charged, forgets its result, and has it refused if it arrives
           later. One that settles a request first releases what the request still reserves under
           the keys of its amounts. Then amounts are added to counts, unless another attempt of
           the request is answered. A negative amount makes no count lower than 0, and no key. A
           key that a positive amount makes begins at the correction's start.
        2. An attempt that was corrected before it arrived charges nothing: `QuotaStoreError`.
        3. A request whose idempotency key was answered before gets the same answer, with
           `replayed`, and is charged nothing. Its counters are matched by position.
        4. The calls are checked by `admit`, on the counts that are kept. A counter without a kept
           count uses its own `used`. Grants under the keys raise the limits, and so does what
           rolled over: the first request whose counter has a `rollover` fixes it by the count of
           the window before (`Rollover.of`), even if no call is admitted.
        5. What is admitted is charged, unless refusals stop the batch. A new key begins at the
           count of its first charged counter. The result is remembered if it charged a key;
           else the next try is checked again. What a counter with a lease charges is reserved: it
           is released once, when it is settled, when the attempt is undone, or when the lease is
           over (a second later at most).

        A count whose key has a window and a limit, `search:user_id:ada:60~60`, drains: it falls
        evenly, by the limit in each window, by the store's clock. Kept is when it is 0: what is
        charged moves this time by `drain_time(key, amount)` microseconds, at the earliest from
        now. It drains in the order of charges, and what has drained of a reservation is used: it
        is not released, and settles the same amount of use. At most 1,000 requests reserve a part
        of it: one more is a `QuotaStoreError`. A count of calls is rounded up, one of tokens down.
        `AcquireResult.drained_in` says exactly when it was 0 before the batch.

        Args:
            request: The batch. Counts without a key belong to the caller, and are not kept. With a
                lease it needs an idempotency key, which names what is reserved.
        """

    def peek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        """Return what is counted under keys, in their order; `None` where nothing is.

        A key with grants and without a count has 0 used.

        Args:
            keys: The keys, as `QuotaUsage` and `CountRef` have them.
        """

    def reset(self, keys: Sequence[str]) -> None:
        """Set counts to 0.

        The keys are kept, or made, so that a caller's own count does not fill them again. What is
        reserved is forgotten: a correction that settles it adds its amounts, and releases nothing.

        Args:
            keys: The keys of counts, as `QuotaUsage` has them. Another is a `ValueError`.
        """

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        """`acquire`, without blocking the event loop."""

    async def apeek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        """`peek`, without blocking the event loop."""

    async def areset(self, keys: Sequence[str]) -> None:
        """`reset`, without blocking the event loop."""
