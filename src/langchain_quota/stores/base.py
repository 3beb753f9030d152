"""What every store has: its operations are checked here, and are run on tables of what is kept.

The async methods say what is done; the sync ones run them, in sync mode.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeAlias

from langchain_quota.core.admission import AcquireRequest, AcquireResult
from langchain_quota.runtime.sync_async import T, run_sync
from langchain_quota.stores import QuotaUsage
from langchain_quota.stores.keys import COUNT, check_keys, drain_time, read_emission_interval

if TYPE_CHECKING:
    from langchain_quota.agents.rate_limiter import RateLimiter
    from langchain_quota.stores.memory import Tables

PAGE = 500
"""How many keys a listing reads at a time."""

Operation: TypeAlias = Callable[["Tables", Sequence[str]], T]
"""What is done to tables, with some keys."""


class BaseStore(ABC):
    """A store; a subclass says where its tables are."""

    _idle: int
    clock: Callable[[], float] = time.time
    """The time, in seconds since the Unix epoch."""

    @abstractmethod
    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        """`acquire`, without blocking the event loop."""

    @abstractmethod
    async def _run(
        self, keys: Sequence[str], operation: Operation[T], *, reads: bool = False
    ) -> list[T]:
        """Run an operation on keys in one atomic step for each prefix, and return its results.

        With `reads` it changes nothing.
        """

    @abstractmethod
    def _keys(self, kind: str, pattern: str) -> Iterable[str]:
        """Return the keys of a kind that match, and maybe others."""

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        """Admit each call of a batch against all of its limits; see `QuotaStore.acquire`."""
        return run_sync(self.aacquire(request))

    def peek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        """Return what is counted under keys, in their order; `None` where nothing is."""
        return run_sync(self.apeek(keys))

    async def apeek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        """`peek`, without blocking the event loop."""
        check_keys(keys)
        results = await self._run(keys, lambda tables, some: tables.peek(some), reads=True)
        return tuple(map(ChainMap(*results).get, keys))

    def reset(self, keys: Sequence[str]) -> None:
        """Set counts to 0, and keep the keys; see `QuotaStore.reset`."""
        run_sync(self.areset(keys))

    async def areset(self, keys: Sequence[str]) -> None:
        """`reset`, without blocking the event loop."""
        check_keys(keys, of_counts=True)
        await self._run(keys, lambda tables, some: tables.reset(some))

    def entries(self, pattern: str) -> dict[str, QuotaUsage | None]:
        """Return what is kept for counts under the keys that match; `None` for what is no count."""
        pages = self._listed(COUNT, pattern, lambda tables, some: tables.entries(some))
        return dict(chain.from_iterable(page.items() for page in pages))

    def usages(self, pattern: str = "*") -> list[QuotaUsage]:
        """Return what is counted under the keys that match a glob pattern, sorted by key.

        A server is asked for some keys at a time, and serves others in between: a count that is
        made or removed meanwhile may be missing. Keys of others that hold no count are left out.

        Args:
            pattern: As in Python's `fnmatch.fnmatchcase`.

        Raises:
            QuotaStoreError: The store failed, or did not answer in time.
            TypeError: The store serves no sync calls.
        """
        return sorted(filter(None, self.entries(pattern).values()), key=lambda usage: usage.key)

    def _listed(self, kind: str, pattern: str, operation: Operation[T]) -> list[T]:
        """Return what is read of the keys that match, some at a time."""
        keys = (key for key in self._keys(kind, pattern) if fnmatchcase(key, pattern))
        pages: list[T] = []
        while some := [*islice(keys, PAGE)]:
            pages += run_sync(self._run(some, operation, reads=True))
        return pages

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
        run_sync(self.adelay(key, seconds, burst=burst))

    async def adelay(self, key: str, seconds: float, *, burst: int = 0) -> None:
        """`delay`, without blocking the event loop."""
        if not read_emission_interval(key):
            raise ValueError(f"key must be that of a smooth count, not {key!r}")
        microseconds = math.ceil(max(0.0, seconds) * 10**6) + drain_time(key, burst)
        await self._run([key], lambda tables, _: tables.delay(key, microseconds))

    def rate_limiter(  # noqa: PLR0913 - keyword-only, with defaults
        self,
        name: str,
        *,
        window: timedelta | str,
        requests: int | None = None,
        tokens: int | None = None,
        burst: int = 1,
        reserve: int | None = None,
    ) -> "RateLimiter":
        """Return a rate limiter for chat models, shared by all that use the store.

        Give it to a model as `rate_limiter=limiter` and as `callbacks=[limiter]`: then it counts
        tokens, and waits as long as a provider's error 429 asks for. Calls are spread evenly over
        the window. Those of one process are admitted in the order in which they come. A call waits
        until there is room for all, and is charged nothing before. Only limiters with the same
        name, numbers and window share a count. A call that cannot ask the store raises
        `QuotaStoreError`, and does not reach the model.

        Args:
            name: What is limited, 1 to 64 printable characters.
            window: The length of the window, as in `Quota`.
            requests: How many calls a window has, from 1; `None` for no limit.
            tokens: How many tokens, of prompts and answers, a window has, from 1; `None` for no
                limit. All of them may be used at once after a pause.
            burst: How many calls may come at once after a pause, from 1 and at most `requests`.
            reserve: How many tokens a call reserves until it ends; by default LangChain's estimate
                of its prompt. Then the tokens that the model reports replace them; those above
                delay later calls. A call that fails, or whose model reports nothing, is charged its
                reserve.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of bounds, there is no limit, or the store's prefix is a
                function.

        Examples:
            >>> from langchain_quota import MemoryStore
            >>> limiter = MemoryStore().rate_limiter("openai", requests=60, window="1m")
            >>> limiter.acquire(blocking=False), limiter.acquire(blocking=False)
            (True, False)
        """
        from langchain_quota.agents.rate_limiter import RateLimiter  # noqa: PLC0415 - LangChain's

        return RateLimiter(self, name, window, requests, tokens, burst, reserve)
