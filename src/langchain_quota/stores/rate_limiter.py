"""LangChain's rate limiter, shared through a store."""

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast
from uuid import UUID, uuid4

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.outputs import LLMResult
from langchain_core.rate_limiters import BaseRateLimiter

from langchain_quota.core.admission import (
    AcquireRequest,
    AcquireResult,
    Correction,
    CountRef,
    Demand,
    Threshold,
)
from langchain_quota.limits.options import MODEL, TOTAL_TOKENS
from langchain_quota.limits.quotas import Quota
from langchain_quota.runtime.arguments import (
    validate_count,
    validate_name,
    validate_sync_function,
)
from langchain_quota.runtime.semaphores import LOOKS_AGAIN, semaphore_of
from langchain_quota.runtime.sync_async import Mode, call_variant, run_sync, wait_for
from langchain_quota.stores.keys import (
    CountKey,
    drain_time,
    read_emission_interval,
    seconds_until_room,
)

if TYPE_CHECKING:
    from langchain_quota.stores import QuotaStore
    from langchain_quota.stores.client import StoreClient

_SCOPE = "rate_limiter"
_FOREVER = 1e9
"""Longer than any process lives, in seconds."""
_MAX_CALLS = 10_000
"""For how many running calls a limiter remembers what they have reserved."""

Reserve: TypeAlias = Callable[[Sequence[BaseMessage]], int]
"""A function that gives the tokens of a call's messages."""


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

    def rate_limiter(  # noqa: PLR0913 - keyword-only, with defaults
        self,
        name: str,
        *,
        window: timedelta | str,
        requests: int | None = None,
        tokens: int | None = None,
        burst: int = 1,
        reserve: int | Reserve = count_tokens_approximately,
    ) -> "RateLimiter":
        """Return a rate limiter for chat models, shared by all that use the store.

        Give it to a model as `rate_limiter=limiter`, and with `tokens` as `callbacks=[limiter]`,
        too. Calls are spread evenly over the window. Those of one process are admitted in the order
        in which they come. A call waits until there is room for all, and is charged nothing before.
        Only limiters with the same name, numbers and window share a count. A call that cannot ask
        the store raises `QuotaStoreError`, and does not reach the model. A call that is cancelled
        while the store answers may be counted.

        Args:
            name: What is limited, 1 to 64 printable characters.
            window: The length of the window, as in `Quota`.
            requests: How many calls a window has, from 1; `None` for no limit.
            tokens: How many tokens, of prompts and answers, a window has, from 1; `None` for no
                limit. All of them may be used at once after a pause.
            burst: How many calls may come at once after a pause, from 1 and at most `requests`.
            reserve: How many tokens a call reserves until it ends, or a function of its messages.
                Then the tokens that the model reports replace them; those above delay later calls.
                A call that fails, or whose model reports nothing, is charged its reserve.

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
        validate_name("name", name)
        if not name:
            raise ValueError("name must not be empty")
        if requests is None and tokens is None:
            raise ValueError("give the limiter requests=, tokens=, or both")
        if tokens is not None and not callable(reserve):
            validate_count("reserve", reserve, least=1, what="a whole number or a function")
        validate_sync_function("reserve", reserve, "messages")
        if callable(getattr(self, "prefix", None)):
            raise ValueError(  # noqa: TRY004 - it is no wrong type
                "the prefix of this store is a function: make a store whose prefix is a string"
            )
        rates: dict[str, _Rate] = {}
        for counter, limit, most in ((MODEL, requests, burst), (TOTAL_TOKENS, tokens, tokens)):
            if limit is not None:
                argument = "requests" if counter == MODEL else "tokens"
                validate_count(argument, limit, least=1)
                quota = Quota(limit, per="global", window=window, smooth=True, burst=most)
                key = CountKey.at(counter, _SCOPE, name, quota.period, 0, limit=limit)
                rates[counter] = _Rate(str(key), most or limit, key.window or 1)
        limiter = RateLimiter(self, name, rates, reserve)
        if tokens is not None and not callable(reserve):
            limiter.check_reserve(reserve)
        return limiter


def _delay_time(key: str, seconds: float, burst: int) -> int:
    """Return in how many microseconds a count drains that admits nothing for some seconds."""
    if not read_emission_interval(key):
        raise ValueError(f"key must be that of a smooth count, not {key!r}")
    return math.ceil(max(0.0, seconds) * 10**6) + drain_time(key, burst)


class _Rate(NamedTuple):
    """A count that drains, the most that may come at once, and its window in seconds."""

    key: str
    burst: int
    window: int


@dataclass(slots=True, eq=False)
class _Call:
    """A model call that has started: what it reserves, and by which request in which mode."""

    limiter: "RateLimiter"
    reserve: int
    is_new: bool = True
    request: str = ""
    mode: Mode = ""


_started: ContextVar[Sequence[_Call]] = ContextVar("langchain_quota_started_calls", default=())
"""The model calls of the running code that have not asked for room yet, the newest last."""


class RateLimiter(BaseRateLimiter, BaseCallbackHandler):
    """A rate limiter of LangChain, which `store.rate_limiter` makes.

    As a callback handler of the same model it learns how many tokens a call needs and has used.
    """

    run_inline = raise_error = True
    ignore_chain = ignore_agent = ignore_retriever = ignore_retry = ignore_custom_event = True

    def __init__(
        self, store: RateLimiting, name: str, rates: Mapping[str, _Rate], reserve: int | Reserve
    ) -> None:
        self._store, self._name, self._rates, self._reserve = store, name, rates, reserve
        self._calls: OrderedDict[UUID, _Call] = OrderedDict()

    def acquire(self, *, blocking: bool = True) -> bool:
        """Wait until the call may be made; without `blocking`, only say whether it may.

        Raises:
            QuotaStoreError: The store failed, or did not answer in time.
            RuntimeError: The tokens of the call are not known.
            ValueError: The call reserves more tokens than there ever are.
        """
        return run_sync(self._acquire("", blocking=blocking))

    async def aacquire(self, *, blocking: bool = True) -> bool:
        """`acquire`, without blocking the event loop."""
        return await self._acquire("a", blocking=blocking)

    def on_chat_model_start(
        self,
        serialized: object,  # noqa: ARG002 - LangChain gives it
        messages: Sequence[Sequence[BaseMessage]],
        *,
        run_id: UUID,
        **_: object,
    ) -> None:
        """Note how many tokens a call reserves."""
        if TOTAL_TOKENS in self._rates:
            sent = [message for prompt in messages for message in prompt]
            reserve = self._reserve(sent) if callable(self._reserve) else self._reserve
            call = self._calls[run_id] = _Call(self, max(1, reserve))
            if len(self._calls) > _MAX_CALLS:
                # LangChain tells nobody of the end of a call that is cancelled.
                self._calls.popitem(last=False)
            _started.set([*(earlier for earlier in _started.get() if earlier.is_new), call])

    async def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: object) -> None:
        """Replace what a call has reserved by the tokens that its model reports."""
        call = self._calls.pop(run_id, None)
        if call is None:
            return
        # An answer of LangChain's cache has not asked for room.
        call.is_new = False
        messages = [getattr(each[0], "message", None) for each in response.generations if each]
        usages = [usage for each in messages if (usage := getattr(each, "usage_metadata", None))]
        if call.request and usages:
            used = sum(usage["total_tokens"] for usage in usages)
            amounts = {self._rates[TOTAL_TOKENS].key: used}
            settled = Correction(run_id.hex, amounts, settles=call.request)
            await self._client.settle(call.mode, AcquireRequest("", "", corrections=(settled,)))

    @cached_property
    def _client(self) -> "StoreClient":
        from langchain_quota.stores.client import StoreClient  # noqa: PLC0415 - it imports stores
        from langchain_quota.telemetry import recorder_of  # noqa: PLC0415 - it, too

        return StoreClient(cast("QuotaStore", self._store), recorder_of(None))

    def check_reserve(self, reserve: int) -> None:
        """Raise a `ValueError` if there are never so many tokens together."""
        most = self._rates[TOTAL_TOKENS].burst
        if reserve > most:
            raise ValueError(
                f"reserve is {reserve:,} tokens, and limiter {self._name!r} never has more than "
                f"{most:,} together: reserve less, or raise tokens"
            )

    async def _acquire(self, mode: Mode, *, blocking: bool) -> bool:
        seconds = _FOREVER if blocking else 0
        call = _Call(self, 0)
        if TOTAL_TOKENS in self._rates:
            new = (
                each for each in reversed(_started.get()) if each.is_new and each.limiter is self
            )
            noted = next(new, None)
            if noted is None:
                raise RuntimeError(
                    "this limiter counts tokens, and LangChain tells only callbacks of them: give "
                    "the model rate_limiter=limiter and callbacks=[limiter]"
                )
            call, noted.is_new = noted, False
            self.check_reserve(call.reserve)
        queue = next(iter(self._rates.values())).key
        slot = await semaphore_of(self._store, queue).acquire(mode, 1, seconds)
        try:
            while slot.acquired:
                lacks = await self._lacks(mode, call)
                if lacks <= 0 or not blocking:
                    return lacks <= 0
                await wait_for(mode, min(lacks, LOOKS_AGAIN))
            return False
        finally:
            slot.release()

    async def _lacks(self, mode: Mode, call: _Call) -> float:
        """Count a call if there is room; else in how many seconds there is."""
        amounts = {name: call.reserve if name == TOTAL_TOKENS else 1 for name in self._rates}
        thresholds = (
            Threshold(_SCOPE, _SCOPE, name, rate.burst) for name, rate in self._rates.items()
        )
        counters = {
            name: CountRef(rate.key, lease=rate.window if name == TOTAL_TOKENS else None)
            for name, rate in self._rates.items()
        }
        demands = (Demand(amounts, tuple(thresholds)),)
        request = AcquireRequest(uuid4().hex, uuid4().hex, counters, demands)
        result = await call_variant(mode, self._store.acquire, self._store.aacquire, request)
        if result.admitted[0]:
            call.request, call.mode = request.idempotency_key, mode
            return 0
        return max(
            seconds_until_room(rate.key, result.drained_in[name], rate.burst - amounts[name])
            for name, rate in self._rates.items()
        )
