"""What a store does to keep a provider's rate limits, beside counting."""

import math
from datetime import timedelta
from typing import TYPE_CHECKING

from langchain_quota.runtime.sync_async import Mode, run_sync
from langchain_quota.stores.grants import SupportsGrants
from langchain_quota.stores.keys import drain_time, read_emission_interval

if TYPE_CHECKING:
    from langchain_quota.agents.rate_limiter import RateLimiter


class RateLimiting(SupportsGrants):
    """A store that delays counts, and makes rate limiters."""

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
        run_sync(self._delay("", key, seconds, burst))

    async def adelay(self, key: str, seconds: float, *, burst: int = 0) -> None:
        """`delay`, without blocking the event loop."""
        await self._delay("a", key, seconds, burst)

    async def _delay(self, mode: Mode, key: str, seconds: float, burst: int) -> None:
        if not read_emission_interval(key):
            raise ValueError(f"key must be that of a smooth count, not {key!r}")
        microseconds = math.ceil(max(0.0, seconds) * 10**6) + drain_time(key, burst)
        await self._run(mode, [key], lambda tables, _: tables.delay(key, microseconds))

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
