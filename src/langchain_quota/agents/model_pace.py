"""ModelPaceMiddleware: all workers keep the pace that a model's provider allows.

Each of the provider's limits is a bucket that refills all the time. A count in the store mirrors
it: the time until the bucket is full. A call adds what it takes, and waits while there is no room.
What its answer says moves the count forward, so one process's answer paces all of them. After a
pause that an error asks for, the calls come evenly.
"""

import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Generic
from uuid import uuid4

from langchain.agents.middleware.types import (
    AgentMiddleware,
    ModelRequest,
    ModelResponse,
    ResponseT,
)
from langchain_core.messages import BaseMessage

from langchain_quota.core.admission import AcquireRequest, CountRef, Demand, Threshold
from langchain_quota.core.provider_limits import MINUTE, Bucket, read_buckets, read_pause
from langchain_quota.middleware.base import ContextT
from langchain_quota.middleware.context import running_agent
from langchain_quota.middleware.feature import Handler, Request, Response
from langchain_quota.runtime import compat
from langchain_quota.runtime.arguments import UserLine, explain_arguments
from langchain_quota.runtime.semaphores import LOOKS_AGAIN, semaphore_of
from langchain_quota.runtime.sync_async import Mode, as_async, fork_safe_lock, run_sync, wait_for
from langchain_quota.runtime.units import Time, parse_milliseconds
from langchain_quota.stores import QuotaStore, check_store
from langchain_quota.stores.client import StoreClient
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.stores.rate_limiter import RateLimiting
from langchain_quota.telemetry import Telemetry, names, recorder_of
from langchain_quota.telemetry.labels import limit_label

_SCOPE = "provider"
_REQUESTS = "requests"
_PAUSE = "pause"
"""What a count of the time counts in which a provider wants no calls at all."""

_SLACK = 0.05
"""The share of a bucket that stays unused, because calls do not take equally long to arrive."""

_TOLERANCE = 0.01
"""The share of a bucket by which a count may lag behind what an answer says."""

_UNKNOWN_COST = 1.0
"""Seconds between calls after a pause, if the provider names no limits."""

_LEARNING = 0.1
"""The weight of a new call in the average of the tokens that calls use."""

_MIN_PAUSE = 0.001
"""The shortest pause before a waiting call asks the store again, in seconds."""

_TOO_MANY_REQUESTS = 429
_UNAVAILABLE = (503, 529)


@dataclass(slots=True)
class _Pace:
    """What this process knows of a model's limits.

    Attributes:
        label: The provider's and the model's name in telemetry.
        subject: The same in keys, where it is not bounded.
        buckets: The provider's limits, by what they count.
        drained_at: When the store's counts will be 0, on the monotonic clock.
        spread_until: Until when calls are spread, if the provider names no limits.
        tokens: The average use of a call, by the field of the usage metadata.
    """

    label: str
    subject: str
    buckets: dict[str, Bucket] = field(default_factory=dict)
    drained_at: dict[str, float] = field(default_factory=dict)
    spread_until: float = 0.0
    tokens: dict[str, float] = field(default_factory=dict)

    def key(self, unit: str) -> str:
        """Return the key of a count, which drains by a microsecond in each microsecond."""
        second = timedelta(seconds=1)
        return str(CountKey.at(unit, _SCOPE, self.subject, second, 0, limit=10**6))

    def level(self, unit: str) -> float:
        """Return in how many seconds a count will be 0, as far as this process knows."""
        return max(0.0, self.drained_at.get(unit, 0.0) - time.monotonic())

    def demand(self, unit: str) -> tuple[float, float]:
        """Return the seconds that a call adds to a count, and up to which count it fits."""
        if unit == _PAUSE:
            is_spread = not self.buckets and time.monotonic() < self.spread_until
            return _UNKNOWN_COST if is_spread else 0.0, 0.0
        bucket = self.buckets[unit]
        total = self.tokens.get("total_tokens", 0.0)
        amount = 1.0 if unit == _REQUESTS else self.tokens.get(unit.replace("-", "_"), total)
        cost = amount * bucket.window / bucket.limit
        return cost, max(0.0, bucket.window * (1 - _SLACK) - cost)

    def learn_tokens(self, messages: Iterable[BaseMessage]) -> None:
        """Learn how many tokens a call has used."""
        for usage in filter(None, (getattr(m, "usage_metadata", None) for m in messages)):
            # Anthropic does not count what comes from its cache.
            cached = (usage.get("input_token_details") or {}).get("cache_read") or 0
            used = {**usage, "input_tokens": usage["input_tokens"] - cached}
            for name in ("input_tokens", "output_tokens", "total_tokens"):
                mean = self.tokens.get(name, used[name])
                self.tokens[name] = mean + _LEARNING * (used[name] - mean)


@dataclass(slots=True)
class _Call:
    """A model call, and whether its HTTP client has shown us its answers."""

    learn: Callable[[int | None, Mapping[str, str], float], Coroutine[object, None, None]]
    mode: Mode
    is_seen: bool = False


_running: ContextVar[_Call | None] = ContextVar("langchain_quota_paced_call", default=None)


@explain_arguments("ModelPaceMiddleware(store=RedisStore(), wait=60)")
class ModelPaceMiddleware(AgentMiddleware[Any, ContextT, ResponseT], Generic[ContextT, ResponseT]):
    """Keeps model calls within the rate limits that their provider names.

    Answers and errors say what is left of the provider's limits on requests and tokens, in
    `x-ratelimit-…`, `anthropic-ratelimit-…` and `retry-after`. All agents that share the store
    keep to what one of them learns. Calls wait before they are made, in each process first come,
    first served, and come evenly after a pause: one a second if the headers of an error 429 name
    no limits. No call is refused: one that has waited for `wait` is made nevertheless. Each model
    has its own pace, so fallbacks do, too. List this middleware last, after those that retry or
    fall back.

    Args:
        store: Where workers share the pace: a `RedisStore` or `PostgresStore`. `None`: this
            middleware has its own.
        wait: How long a call waits at most, such as `"1m"`, or in seconds.
        telemetry: As in `QuotaMiddleware`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, or the store's prefix is a function.

    Examples:
        >>> from langchain_quota import MemoryStore, ModelPaceMiddleware
        >>> pace = ModelPaceMiddleware(store=MemoryStore(), wait=60)
    """

    trace_policy = compat.small_traces()

    def __init__(
        self,
        *,
        store: QuotaStore | None = None,
        wait: Time = 60,
        telemetry: Telemetry | None = None,
    ) -> None:
        super().__init__()
        check_store(store, ())
        if store is not None and not isinstance(store, RateLimiting):
            raise TypeError(f"store must have the method delay, as RedisStore has, not {store!r}")
        if callable(getattr(store, "prefix", None)):
            raise ValueError(  # noqa: TRY004 - it is no wrong type
                "the prefix of this store is a function: give a store whose prefix is a string, "
                "such as the name of the account at the provider"
            )
        self._wait = parse_milliseconds("wait", wait) / 1000
        self._recorder = recorder_of(telemetry)
        self._client = StoreClient(MemoryStore() if store is None else store, self._recorder)
        # While the store is unavailable, this process keeps a pace by itself.
        self._own_client = StoreClient(MemoryStore(), self._recorder)
        self._paces: dict[str, _Pace] = {}
        self._lock = fork_safe_lock()
        self._created_at = UserLine.of_caller()

    def wrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], ModelResponse[ResponseT]],
    ) -> ModelResponse[ResponseT]:
        """Make a model call when the provider has room for it."""
        return run_sync(self._call("", request, as_async(handler)))

    async def awrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], Awaitable[ModelResponse[ResponseT]]],
    ) -> ModelResponse[ResponseT]:
        """Call `wrap_model_call` without blocking the event loop."""
        return await self._call("a", request, handler)

    async def _call(self, mode: Mode, request: Request, handler: Handler) -> Response:
        pace = self._pace_of(request)
        await self._wait_for_room(mode, pace)
        hooks = compat.response_hooks(request.model, mode)
        hook: Callable[[Any], object] = _async_on_response if mode else _on_response
        with self._lock:
            if hook not in hooks:
                hooks.append(hook)
        learn, started_at = partial(self._learn, mode, pace), time.monotonic()
        call = _Call(learn, mode)
        token = _running.set(call)
        try:
            response = await handler(request)
        except Exception as error:
            answer = getattr(error, "response", None)
            if not call.is_seen:
                status = getattr(error, "status_code", getattr(answer, "status_code", None))
                await learn(status, getattr(answer, "headers", {}), time.monotonic())
            raise
        finally:
            _running.reset(token)
        pace.learn_tokens(response.result)
        for message in () if call.is_seen else response.result:
            # The headers may have come with the first token, so the bucket has refilled since.
            await learn(None, message.response_metadata.get("headers", {}), started_at)
        return response

    def _pace_of(self, request: Request) -> _Pace:
        """Return the pace of the model that a request reaches."""
        parameters = compat.model_parameters(request.model, request.model_settings)
        provider, model = (str(parameters.get(f"ls_{part}")) for part in ("provider", "model_name"))
        subject = f"{provider}/{model}"
        pace = self._paces.get(subject)
        if pace is None:
            label = limit_label(f"{provider}/{self._recorder.model_label(model)}")
            pace = self._paces.setdefault(subject, _Pace(label, subject))
            # The series tells alerts from the start which limits are providers'.
            self._recorder.count(names.PROVIDER_REFUSALS, running_agent(), label, amount=0)
            if getattr(request.model, "max_retries", 0) != 0:
                self._created_at.warn(
                    f"the client of {label} repeats calls by itself, and these do not wait: give "
                    "the model max_retries=0, and list ModelRetryMiddleware(initial_delay=0) "
                    "before ModelPaceMiddleware"
                )
        return pace

    async def _wait_for_room(self, mode: Mode, pace: _Pace) -> None:
        """Wait until the provider has room for a call, but no longer than a call may wait."""
        agent, started_at = running_agent(), time.monotonic()
        has_waited, outcome = False, "cancelled"
        semaphore = semaphore_of(self._client.store, pace.key(_PAUSE))
        try:
            with self._recorder.waiting(agent, pace.label):
                slot = await semaphore.acquire(mode, 1, self._wait)
                try:
                    has_waited = slot.waits
                    while slot.acquired and (seconds := await self._charge(mode, pace)) > 0:
                        has_waited = True
                        rest = started_at + self._wait - time.monotonic()
                        if rest <= 0:
                            break
                        await wait_for(mode, min(seconds, rest, LOOKS_AGAIN))
                finally:
                    slot.release()
            outcome = "allowed"
        finally:
            waited = time.monotonic() - started_at if has_waited else 0.0
            self._recorder.record_wait(agent, pace.label, outcome, waited, None)

    async def _charge(self, mode: Mode, pace: _Pace) -> float:
        """Charge a call if there is room for it; otherwise return in how many seconds there is."""
        demands = {unit: pace.demand(unit) for unit in (_PAUSE, *pace.buckets)}
        before = {**pace.drained_at}
        if await self._add(mode, pace, demands):
            # A count never goes back: if it has, the store lost it, and gets it again.
            for unit, end in before.items():
                await self._delay(mode, pace, unit, end)
            return 0.0
        return max(_MIN_PAUSE, *(pace.level(unit) - room for unit, (_, room) in demands.items()))

    async def _learn(
        self, mode: Mode, pace: _Pace, status: int | None, headers: Mapping[str, str], at: float
    ) -> None:
        """Move the counts forward to what headers say, which was true at a time."""
        # What an integration calls headers may be something else.
        items = headers.items() if isinstance(headers, Mapping) else ()
        headers = {str(name).lower(): str(value) for name, value in items}
        buckets = read_buckets(headers, pace.buckets)
        pace.buckets |= buckets
        ends = {unit: at + bucket.full_in for unit, bucket in buckets.items()}
        pause = read_pause(headers)
        if status == _TOO_MANY_REQUESTS:
            self._recorder.count(names.PROVIDER_REFUSALS, running_agent(), pace.label)
            pause = _UNKNOWN_COST if pause is None else pause
        if pause is not None and status in (_TOO_MANY_REQUESTS, *_UNAVAILABLE):
            ends[_PAUSE] = at + pause
            if _REQUESTS in pace.buckets:
                # Then the calls come evenly, even if the bucket could be full again.
                _, room = pace.demand(_REQUESTS)
                ends[_REQUESTS] = max(at + pause + room, ends.get(_REQUESTS, 0.0))
        for unit, end in ends.items():
            await self._delay(mode, pace, unit, end)

    async def _delay(self, mode: Mode, pace: _Pace, unit: str, end: float) -> None:
        """Move a count forward, so that it is 0 at a time or later."""
        window = pace.buckets[unit].window if unit in pace.buckets else 0.0
        seconds = end - time.monotonic()
        if seconds - pace.level(unit) > _TOLERANCE * window:
            if not await self._client.delay(mode, pace.key(unit), seconds):
                await self._own_client.delay(mode, pace.key(unit), seconds)
            pace.drained_at[unit] = end

    async def _add(
        self, mode: Mode, pace: _Pace, demands: Mapping[str, tuple[float, float]]
    ) -> bool:
        """Add seconds to counts, unless one is higher than its room, and learn what they are."""
        added = {unit: int(seconds * 10**6) for unit, (seconds, _) in demands.items()}
        thresholds = tuple(
            Threshold(pace.label, _SCOPE, unit, int(room * 10**6) + added[unit])
            for unit, (_, room) in demands.items()
        )
        counters = {unit: CountRef(pace.key(unit)) for unit in added}
        calls = (Demand(added, thresholds),)
        request = AcquireRequest(uuid4().hex, uuid4().hex, counters, calls)
        # The store's answer was true at this time at the earliest.
        asked_at = time.monotonic()
        result = await self._client.acquire(mode, request)
        if result is None:
            result = await self._own_client.acquire(mode, request)
        assert result is not None  # noqa: S101 - for the type checker: memory always answers
        charged = result.charged(calls)
        if result.drained_in.get(_PAUSE):
            pace.spread_until = asked_at + MINUTE
        for unit, level in result.drained_in.items():
            pace.drained_at[unit] = asked_at + (level + charged[unit]) / 10**6
        return result.admitted[0]


def _on_response(response: Any) -> None:
    call = _running.get()
    if call is not None and not call.mode:
        call.is_seen = True
        run_sync(call.learn(response.status_code, response.headers, time.monotonic()))


async def _async_on_response(response: Any) -> None:
    call = _running.get()
    if call is not None and call.mode:
        call.is_seen = True
        await call.learn(response.status_code, response.headers, time.monotonic())
