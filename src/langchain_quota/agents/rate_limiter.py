"""The waiting room of a provider's rates, and LangChain's rate limiter, whose calls wait there.

A rate is a count in a store that drains. Calls wait until all rates have room for them, and are
charged nothing before; those of one process go in the order in which they came.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple
from uuid import UUID, uuid4

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.outputs import LLMResult
from langchain_core.rate_limiters import BaseRateLimiter

from langchain_quota.core.admission import AcquireRequest, Correction, CountRef, Demand, Threshold
from langchain_quota.core.provider_limits import read_error, read_headers
from langchain_quota.limits.options import MODEL, TOTAL_TOKENS
from langchain_quota.limits.quotas import Quota
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime.arguments import validate_count, validate_name
from langchain_quota.runtime.queues import LOOKS_AGAIN, WaitContext, Waiter, queues_of
from langchain_quota.runtime.store_errors import QuotaStoreError
from langchain_quota.runtime.sync_async import Mode, run_sync
from langchain_quota.stores import QuotaStore
from langchain_quota.stores.keys import CountKey, seconds_until_room
from langchain_quota.telemetry import recorder_of

_FOREVER = 1e9
"""Longer than any process lives, in seconds."""
_MAX_CALLS = 10_000
"""For how many running calls a limiter remembers what they have reserved."""


class Rate(NamedTuple):
    """A count that drains, the most that may come at once, and how long a call can be settled."""

    key: str
    burst: int
    lease: int | None = None


@dataclass(slots=True, eq=False)
class Call:
    """A model call: what it takes of the rates, and the name by which its charge is settled."""

    amounts: dict[str, int]
    mode: Mode = ""
    name: str = field(default_factory=lambda: uuid4().hex)
    is_charged: bool = False
    waited: float = 0.0


def check_fixed_prefix(store: object) -> None:
    """Raise a `ValueError` if the prefix of a store is a function of the run."""
    if callable(getattr(store, "prefix", None)):
        raise ValueError(  # noqa: TRY004 - it is no wrong type
            "the prefix of this store is a function: give a store whose prefix is a string, such "
            "as the name of the account at the provider"
        )


class WaitingRoom:
    """Where calls wait for fixed rates, which have the names of what they count."""

    def __init__(self, client: StoreClient, rates: Mapping[str, Rate]) -> None:
        self.client, self.rates = client, rates

    async def enter(self, call: Call, seconds: float, waiting: WaitContext = nullcontext) -> None:
        """Wait until a call is charged, `seconds` at most; `waiting` is the context of a wait."""
        *_, (key, *_) = self.rates.values()
        waiter, queues = Waiter(call.mode), queues_of(self.client.store)

        async def charge() -> float:
            # Only the first call asks the store.
            is_next = queues.is_next(waiter, [key])
            return min(await self._charge(call), LOOKS_AGAIN) if is_next else math.inf

        queues.move(waiter, key)
        try:
            call.is_charged = await waiter.retry(charge, waiter.came_at + seconds, waiting)
        finally:
            queues.leave(waiter)
            call.waited = waiter.waited

    async def _charge(self, call: Call) -> float:
        """Charge a call, if there is room; return the seconds until there is, at most 0 if so.

        Raises:
            QuotaStoreError: The store is unavailable.
        """
        rates = self.rates.items()
        thresholds = (Threshold(name, "rate", name, rate.burst) for name, rate in rates)
        counters = {name: CountRef(rate.key, lease=rate.lease) for name, rate in rates}
        amounts = {name: call.amounts[name] for name in self.rates}
        demands = (Demand(amounts, tuple(thresholds)),)
        request = AcquireRequest(call.name, uuid4().hex, counters, demands)
        result = await self.client.acquire(call.mode, request, waits=True)
        if result is None:
            raise QuotaStoreError("the store of the rates is unavailable: the log says why")
        if not result.admitted:
            return LOOKS_AGAIN
        missing = max(
            seconds_until_room(rate.key, result.drained_in[name], rate.burst - amounts[name])
            for name, rate in rates
        )
        # The store counts by its own clock.
        return min(0.0, missing) if result.admitted[0] else max(0.001, missing)


@dataclass(slots=True, eq=False, kw_only=True)
class _LimitedCall(Call):
    """A call that has started, and whether it has not asked its limiter for room yet."""

    limiter: "RateLimiter"
    is_new: bool = True
    charged_at: float = 0.0


_started: ContextVar[Sequence[_LimitedCall]] = ContextVar("langchain_quota_started", default=())
"""The model calls of the running code that have not asked for room yet, the newest last."""


class RateLimiter(BaseRateLimiter, BaseCallbackHandler):
    """A rate limiter of LangChain, which `store.rate_limiter` makes.

    As a callback handler of the same model it learns how many tokens a call needs and has used, and
    how long its provider wants no calls.
    """

    run_inline = raise_error = True
    ignore_chain = ignore_agent = ignore_retriever = ignore_retry = ignore_custom_event = True

    def __init__(  # noqa: PLR0913, PLR0917 - those of `store.rate_limiter`
        self,
        store: QuotaStore,
        name: str,
        window: timedelta | str,
        requests: int | None,
        tokens: int | None,
        burst: int,
        reserve: int | None,
    ) -> None:
        validate_name(name)
        if not name:
            raise ValueError("name must not be empty")
        if requests is None and tokens is None:
            raise ValueError("give the limiter requests=, tokens=, or both")
        check_fixed_prefix(store)
        rates: dict[str, Rate] = {}
        for counter, limit, most in ((MODEL, requests, burst), (TOTAL_TOKENS, tokens, tokens)):
            if limit is not None:
                argument = "requests" if counter == MODEL else "tokens"
                validate_count(argument, limit, least=1)
                quota = Quota(limit, per="global", window=window, smooth=True, burst=most)
                key = CountKey.at(counter, "rate_limiter", name, quota.period, 0, limit=limit)
                lease = key.window if counter == TOTAL_TOKENS else None
                rates[counter] = Rate(str(key), most or limit, lease)
        self._room = WaitingRoom(StoreClient(store, recorder_of(None)), rates)
        self._name, self._reserve, self._tokens = name, reserve, tokens
        if reserve is not None:
            validate_count("reserve", reserve, least=1)
            self._check_reserve(reserve)
        self._calls: OrderedDict[UUID, _LimitedCall] = OrderedDict()

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
        """Note that a call starts, and how many tokens it reserves."""
        call = self._calls[run_id] = _LimitedCall({MODEL: 1}, limiter=self)
        if self._tokens:
            sent = [message for prompt in messages for message in prompt]
            call.amounts[TOTAL_TOKENS] = self._reserve or max(1, count_tokens_approximately(sent))
        if len(self._calls) > _MAX_CALLS:
            # LangChain tells nobody of the end of a call that is cancelled.
            self._calls.popitem(last=False)
        _started.set([*(earlier for earlier in _started.get() if earlier.is_new), call])

    async def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: object) -> None:
        """Replace what a call has reserved by the tokens that its model reports."""
        call = self._calls.pop(run_id, _LimitedCall({}, limiter=self))
        # An answer of LangChain's cache has not asked for room.
        call.is_new = False
        # Each of several answers to one prompt reports the use of all.
        answer = next((answers[0] for answers in response.generations if answers), None)
        usage = getattr(getattr(answer, "message", None), "usage_metadata", None)
        if call.is_charged and self._tokens and usage:
            client, rate = self._room.client, self._room.rates[TOTAL_TOKENS]
            tokens, settles = usage["total_tokens"], call.name
            if client.clock() - call.charged_at >= (rate.lease or 0):
                # All that it has reserved has drained, and the store may have forgotten it.
                tokens, settles = max(0, tokens - call.amounts[TOTAL_TOKENS]), ""
            settled = (Correction(run_id.hex, {rate.key: tokens}, settles=settles),)
            await client.settle(call.mode, AcquireRequest("", "", corrections=settled))

    async def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: object) -> None:
        """Let no call begin before the time that a provider's error names."""
        call = self._calls.pop(run_id, _LimitedCall({}, limiter=self))
        call.is_new = False
        pause = read_headers(*read_error(error))[1]
        if call.is_charged and pause is not None:
            for rate in self._room.rates.values():
                await self._room.client.delay(call.mode, rate.key, pause, burst=rate.burst)

    def _check_reserve(self, reserve: int) -> None:
        """Raise a `ValueError` if there are never so many tokens together."""
        most = self._tokens or reserve
        if reserve > most:
            raise ValueError(
                f"reserve is {reserve:,} tokens, and limiter {self._name!r} never has more than "
                f"{most:,} together: reserve less, or raise tokens"
            )

    async def _acquire(self, mode: Mode, *, blocking: bool) -> bool:
        new = (call for call in reversed(_started.get()) if call.is_new and call.limiter is self)
        call = next(new, _LimitedCall({MODEL: 1}, limiter=self))
        call.is_new, call.mode = False, mode
        if self._tokens:
            if TOTAL_TOKENS not in call.amounts:
                raise RuntimeError(
                    "this limiter counts tokens, and LangChain tells only callbacks of them: give "
                    "the model rate_limiter=limiter and callbacks=[limiter]"
                )
            self._check_reserve(call.amounts[TOTAL_TOKENS])
        await self._room.enter(call, _FOREVER if blocking else 0)
        call.charged_at = self._room.client.clock()
        return call.is_charged
