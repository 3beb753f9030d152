"""LangChain's rate limiter, shared through a store."""

import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import NamedTuple, cast
from uuid import UUID, uuid4

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.outputs import LLMResult
from langchain_core.rate_limiters import BaseRateLimiter

from langchain_quota.core.admission import AcquireRequest, Correction, CountRef, Demand, Threshold
from langchain_quota.core.provider_limits import read_error, read_pause
from langchain_quota.limits.options import MODEL, TOTAL_TOKENS
from langchain_quota.limits.quotas import Quota
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime.arguments import validate_count, validate_name
from langchain_quota.runtime.semaphores import LOOKS_AGAIN, Waiter, queues_of, semaphore_of
from langchain_quota.runtime.sync_async import Mode, call_variant, run_sync, wait_for
from langchain_quota.stores import QuotaStore
from langchain_quota.stores.keys import CountKey, seconds_until_room
from langchain_quota.stores.rate_limiting import RateLimiting
from langchain_quota.telemetry import recorder_of

_SCOPE = "rate_limiter"
_FOREVER = 1e9
"""Longer than any process lives, in seconds."""
_MAX_CALLS = 10_000
"""For how many running calls a limiter remembers what they have reserved."""


def check_fixed_prefix(store: object) -> None:
    """Raise a `ValueError` if the prefix of a store is a function of the run."""
    if callable(getattr(store, "prefix", None)):
        raise ValueError(  # noqa: TRY004 - it is no wrong type
            "the prefix of this store is a function: give a store whose prefix is a string, such "
            "as the name of the account at the provider"
        )


async def wait_for_room(
    store: object, key: str, mode: Mode, charge: Callable[[], Awaitable[float]], seconds: float
) -> tuple[bool, float]:
    """Wait until a call is charged; return whether it was in time, and how long it waited.

    Args:
        store: The store that has the count for which the call waits.
        key: The key of this count.
        mode: The mode of the call.
        charge: Charges the call if there is room for it, and returns the seconds until there is.
        seconds: How long the call may wait.
    """
    started_at = time.monotonic()
    slot = await semaphore_of(store, key).acquire(mode, 1, seconds)
    has_waited, missing = slot.waits, math.inf
    waiter, queues = Waiter(mode), queues_of(store)
    queues.move(waiter, key)
    try:
        while slot.acquired and (missing := await charge()) > 0:
            rest = started_at + seconds - time.monotonic()
            if rest <= 0:
                break
            has_waited = True
            await wait_for(mode, min(missing, rest, LOOKS_AGAIN), waiter)
    finally:
        queues.move(waiter)
        slot.release()
    return missing <= 0, time.monotonic() - started_at if has_waited else 0.0


class _Rate(NamedTuple):
    """A count that drains, the most that may come at once, and how long a call can be settled."""

    key: str
    burst: int
    lease: int | None


@dataclass(slots=True, eq=False)
class _Call:
    """A model call that has started: what it reserves, and by which request in which mode."""

    limiter: "RateLimiter"
    reserve: int = 0
    is_new: bool = True
    request: str = ""
    mode: Mode = ""


_started: ContextVar[Sequence[_Call]] = ContextVar("langchain_quota_started_calls", default=())
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
        store: RateLimiting,
        name: str,
        window: timedelta | str,
        requests: int | None,
        tokens: int | None,
        burst: int,
        reserve: int | None,
    ) -> None:
        validate_name("name", name)
        if not name:
            raise ValueError("name must not be empty")
        if requests is None and tokens is None:
            raise ValueError("give the limiter requests=, tokens=, or both")
        if reserve is not None:
            validate_count("reserve", reserve, least=1)
        check_fixed_prefix(store)
        self._rates: dict[str, _Rate] = {}
        for counter, limit, most in ((MODEL, requests, burst), (TOTAL_TOKENS, tokens, tokens)):
            if limit is not None:
                argument = "requests" if counter == MODEL else "tokens"
                validate_count(argument, limit, least=1)
                quota = Quota(limit, per="global", window=window, smooth=True, burst=most)
                key = CountKey.at(counter, _SCOPE, name, quota.period, 0, limit=limit)
                lease = key.window if counter == TOTAL_TOKENS else None
                self._rates[counter] = _Rate(str(key), most or limit, lease)
        self._store, self._name, self._reserve = store, name, reserve
        if reserve is not None:
            self._check_reserve(reserve)
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
        """Note that a call starts, and how many tokens it reserves."""
        call = self._calls[run_id] = _Call(self)
        if TOTAL_TOKENS in self._rates:
            sent = [message for prompt in messages for message in prompt]
            call.reserve = self._reserve or max(1, count_tokens_approximately(sent))
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
        # Each of several answers to one prompt reports the use of all.
        answer = next((answers[0] for answers in response.generations if answers), None)
        usage = getattr(getattr(answer, "message", None), "usage_metadata", None)
        if call.reserve and call.request and usage:
            amounts = {self._rates[TOTAL_TOKENS].key: usage["total_tokens"]}
            settled = Correction(run_id.hex, amounts, settles=call.request)
            await self._client.settle(call.mode, AcquireRequest("", "", corrections=(settled,)))

    async def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: object) -> None:
        """Let no call begin before the time that a provider's error names."""
        call = self._calls.pop(run_id, _Call(self))
        call.is_new = False
        pause = read_pause(*read_error(error))
        if call.request and pause is not None:
            for rate in self._rates.values():
                await self._client.delay(call.mode, rate.key, pause, burst=rate.burst)

    @cached_property
    def _client(self) -> StoreClient:
        return StoreClient(cast("QuotaStore", self._store), recorder_of(None))

    def _check_reserve(self, reserve: int) -> None:
        """Raise a `ValueError` if there are never so many tokens together."""
        most = self._rates[TOTAL_TOKENS].burst if TOTAL_TOKENS in self._rates else reserve
        if reserve > most:
            raise ValueError(
                f"reserve is {reserve:,} tokens, and limiter {self._name!r} never has more than "
                f"{most:,} together: reserve less, or raise tokens"
            )

    async def _acquire(self, mode: Mode, *, blocking: bool) -> bool:
        new = (call for call in reversed(_started.get()) if call.is_new and call.limiter is self)
        call = next(new, _Call(self))
        call.is_new = False
        if TOTAL_TOKENS in self._rates:
            if not call.reserve:
                raise RuntimeError(
                    "this limiter counts tokens, and LangChain tells only callbacks of them: give "
                    "the model rate_limiter=limiter and callbacks=[limiter]"
                )
            self._check_reserve(call.reserve)
        *_, rate = self._rates.values()
        charge, seconds = partial(self._lacks, mode, call), _FOREVER if blocking else 0
        is_admitted, _ = await wait_for_room(self._store, rate.key, mode, charge, seconds)
        return is_admitted

    async def _lacks(self, mode: Mode, call: _Call) -> float:
        """Count a call if there is room; else in how many seconds there is."""
        amounts = {name: call.reserve if name == TOTAL_TOKENS else 1 for name in self._rates}
        thresholds = (
            Threshold(_SCOPE, _SCOPE, name, rate.burst) for name, rate in self._rates.items()
        )
        counters = {
            name: CountRef(rate.key, lease=rate.lease) for name, rate in self._rates.items()
        }
        demands = (Demand(amounts, tuple(thresholds)),)
        request = AcquireRequest(uuid4().hex, uuid4().hex, counters, demands)
        result = await call_variant(mode, self._store.acquire, self._store.aacquire, request)
        if result.admitted[0]:
            call.request, call.mode = request.idempotency_key, mode
            return 0.0
        return max(
            seconds_until_room(rate.key, result.drained_in[name], rate.burst - amounts[name])
            for name, rate in self._rates.items()
        )
