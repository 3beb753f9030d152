"""ModelPaceMiddleware: all workers keep the pace that a model's provider allows.

Each of the provider's limits is a bucket that refills in a minute. A count in the store mirrors the
tightest one: the time until it is full. A call adds what it takes, and waits while there is no
room. What its answer says moves the count forward, so one process's answer paces all of them. After
a pause that an error asks for, the calls come evenly.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from hashlib import sha256
from typing import Any, Generic

from langchain.agents.middleware.types import (
    AgentMiddleware,
    ModelRequest,
    ModelResponse,
    ResponseT,
)
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage

from langchain_quota.agents.rate_limiter import Call, Rate, WaitingRoom, check_fixed_prefix
from langchain_quota.core.provider_limits import (
    TOO_MANY_REQUESTS,
    lower_names,
    read_error,
    read_limits,
    read_pause,
)
from langchain_quota.middleware.base import ContextT, check_store
from langchain_quota.middleware.context import running_agent
from langchain_quota.middleware.feature import Handler, Request, Response
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime import compat
from langchain_quota.runtime.arguments import UserLine, explain_arguments
from langchain_quota.runtime.store_errors import QuotaStoreError
from langchain_quota.runtime.sync_async import Mode, as_async, fork_safe_lock, run_sync
from langchain_quota.runtime.units import Time, parse_milliseconds
from langchain_quota.stores import QuotaStore
from langchain_quota.stores.base import BaseStore
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.telemetry import Telemetry, names, recorder_of
from langchain_quota.telemetry.labels import limit_label
from langchain_quota.telemetry.recorder import Recorder

_MINUTE = 60.0
"""In how many seconds a provider's bucket refills."""

_ROOM = 0.95 * _MINUTE
"""Up to which count a call fits. The rest is slack, as calls do not take equally long to arrive."""

_TOLERANCE = 0.01 * _MINUTE
"""By how many seconds a count may lag behind what an answer says."""

_UNKNOWN_COST = 1.0
"""Seconds between calls after a pause, if the provider names no limits."""

_LEARNING = 0.1
"""The weight of a new call in the average of the tokens that calls use."""

_MAX_PACES = 1_000
"""How many paces a middleware keeps; those that were not used for the longest time are dropped."""


class _Pace(WaitingRoom):
    """The waiting room of a model, by what this process knows of the provider's limits."""

    def __init__(self, client: StoreClient | None, recorder: Recorder, key: str) -> None:
        client = client or StoreClient(MemoryStore(), recorder)
        # The count drains by a microsecond in each microsecond.
        super().__init__(client, {"pace": Rate(key, int(_ROOM * 10**6))})
        self._recorder, self._key = recorder, key
        self._drained_at, self._lock = 0.0, fork_safe_lock()
        self.label = ""
        """The provider's and the model's name in telemetry."""
        self._limits: dict[str, float] = {}
        """The provider's limits a minute, by what they count."""
        self._use = {"requests": 1.0}
        """What a call takes of them, on average."""

    @property
    def _level(self) -> float:
        """In how many seconds the count will be 0, as far as this process knows."""
        return max(0.0, self._drained_at - time.monotonic())

    @property
    def _cost(self) -> float:
        """The seconds in which the tightest bucket gets back what a call takes."""
        if not self._limits:
            return _UNKNOWN_COST if self._level else 0.0
        shares = (self._use.get(unit, 0.0) / limit for unit, limit in self._limits.items())
        return min(_ROOM, max(shares) * _MINUTE)

    async def enter_in_time(self, call: Call, seconds: float) -> None:
        """Wait until there is room for a call, but for so many seconds at most."""
        agent, started_at = running_agent(), time.monotonic()
        waited, outcome = None, "cancelled"
        try:
            with self._recorder.waiting(agent, self.label):
                waited = await self.enter(call, seconds)
                if not call.is_charged:
                    # It is made nevertheless. An empty bucket lacks no more than a minute.
                    await self._charge(call, int((_MINUTE - _ROOM + self._cost) * 10**6))
            outcome = "allowed"
        finally:
            waited = time.monotonic() - started_at if waited is None else waited
            self._recorder.record_wait(agent, self.label, outcome, waited)

    async def _charge(self, call: Call, more: int = 0) -> float:
        cost, now = self._cost, time.monotonic()
        room = _ROOM + more / 10**6 - cost
        # What this process knows still holds if the store does not answer, has lost its counts, or
        # has a clock that jumps.
        if self._level > room:
            return self._level - room
        end = now + self._level + cost
        call.amounts = {"pace": int(cost * 10**6)}
        with suppress(QuotaStoreError):
            missing = await super()._charge(call, more)
            in_store = now + room + missing
            if missing > 0:
                self._advance(in_store)
                return max(missing, self._level - room)
            if end - in_store - cost > _TOLERANCE:
                await self.client.delay(call.mode, self._key, end - time.monotonic())
            end = max(end, in_store + cost)
        self._advance(end)
        return 0.0

    async def learn(
        self, mode: Mode, status: int | None, headers: Mapping[str, str], at: float
    ) -> None:
        """Move the count forward to what headers say, which was true at a time."""
        limits, pause = read_limits(headers), read_pause(status, headers)
        self._limits |= {unit: limit for unit, (limit, _) in limits.items()}
        end = at + max((1 - left / limit for limit, left in limits.values()), default=0) * _MINUTE
        if status == TOO_MANY_REQUESTS:
            self._recorder.count(names.PROVIDER_REFUSALS, running_agent(), self.label)
        if pause is not None:
            # Then the calls come evenly, even if the bucket could be full again.
            end = max(end, at + pause + _ROOM)
        seconds = end - time.monotonic()
        if seconds - self._level > (_TOLERANCE if pause is None else 0):
            self._advance(end)
            await self.client.delay(mode, self._key, seconds)

    def learn_tokens(self, message: BaseMessage) -> None:
        """Learn how many tokens a call has used."""
        if usage := getattr(message, "usage_metadata", None):
            # Anthropic does not count what comes from its cache.
            cached = (usage.get("input_token_details") or {}).get("cache_read") or 0
            tokens = {**usage, "input_tokens": usage["input_tokens"] - cached}
            for unit in ("input_tokens", "output_tokens", "total_tokens"):
                mean = self._use.get(unit, tokens[unit])
                self._use[unit] = mean + _LEARNING * (tokens[unit] - mean)

    def _advance(self, end: float) -> None:
        # When the count will be 0, on the monotonic clock, only moves forward.
        with self._lock:
            self._drained_at = max(self._drained_at, end)


@dataclass(slots=True, eq=False, kw_only=True)
class _PacedCall(Call):
    """A call, its pace, and whether its HTTP client has shown us its answers."""

    pace: _Pace
    is_seen: bool = False


_running: ContextVar[_PacedCall | None] = ContextVar("langchain_quota_paced_call", default=None)


@explain_arguments("ModelPaceMiddleware(store=RedisStore(), wait=60)")
class ModelPaceMiddleware(AgentMiddleware[Any, ContextT, ResponseT], Generic[ContextT, ResponseT]):
    """Keeps model calls within the rate limits that their provider names.

    Answers and errors say what is left of the provider's limits on requests and tokens a minute, in
    `x-ratelimit-…`, `anthropic-ratelimit-…` and `retry-after`. All agents that share the store keep
    to what one of them learns. Calls wait before they are made, in each process first come,
    first served, and come evenly after a pause: one a second if the headers of an error 429 name
    no limits. No call is refused: one that has waited for `wait` is made nevertheless. Each model
    has a pace for each API key and address, so fallbacks have their own. List this middleware last,
    after those that retry or fall back.

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
        if store is not None and not isinstance(store, BaseStore):
            raise TypeError(f"store must have the method delay, as RedisStore has, not {store!r}")
        check_fixed_prefix(store)
        self._wait = parse_milliseconds("wait", wait) / 1000
        self._recorder = recorder_of(telemetry)
        client = None if store is None else StoreClient(store, self._recorder)
        self._paces = lru_cache(_MAX_PACES)(partial(_Pace, client, self._recorder))
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
        call = _PacedCall({}, mode, pace=pace)
        await pace.enter_in_time(call, self._wait)
        hooks = compat.response_hooks(request.model, mode)
        with self._lock:
            if _HOOKS[mode] not in hooks:
                hooks.append(_HOOKS[mode])
        started_at, token = time.monotonic(), _running.set(call)
        try:
            response = await handler(request)
        except Exception as error:
            if not call.is_seen:
                await pace.learn(mode, *read_error(error), time.monotonic())
            raise
        finally:
            _running.reset(token)
        for message in response.result:
            pace.learn_tokens(message)
            if not call.is_seen:
                # The headers may have come with the first token, and the bucket refills since.
                headers = lower_names(message.response_metadata.get("headers"))
                await pace.learn(mode, None, headers, started_at)
        return response

    def _pace_of(self, request: Request) -> _Pace:
        """Return the pace of the model that a request reaches with its key, at its address."""
        parameters = compat.model_parameters(request.model, request.model_settings)
        model = str(parameters.get("ls_model_name"))
        provider = parameters.get("ls_provider")
        of_provider = f"{provider}/" if provider else ""
        account = _account_digest(request.model)
        subject = f"{of_provider}{model}" + (f"~{account}" if account else "")
        key = CountKey.at("pace", "provider", subject, timedelta(seconds=1), 0, limit=10**6)
        with self._lock:  # so that threads share a new one
            pace = self._paces(str(key))
        if not pace.label:
            pace.label = limit_label(f"{of_provider}{self._recorder.model_label(model)}")
            # The series tells alerts from the start which limits are providers'.
            self._recorder.count(names.PROVIDER_REFUSALS, running_agent(), pace.label, amount=0)
            if getattr(request.model, "max_retries", 0) != 0:
                self._created_at.warn(
                    f"the client of {pace.label} repeats calls by itself, and these do not wait: "
                    "give the model max_retries=0, and list "
                    "ModelRetryMiddleware(initial_delay=0) before ModelPaceMiddleware"
                )
        return pace


def _account_digest(model: BaseChatModel) -> str:
    """Return a digest of a chat model's API key and address; empty if it shows neither."""
    shown: list[tuple[str, str]] = []
    for name in sorted(type(model).model_fields):
        # Integrations: `openai_api_key`, `openai_api_base`, `anthropic_api_url`, `azure_endpoint`.
        if name.endswith(("api_key", "_base", "_url", "endpoint")):
            value: Any = getattr(model, name, None)
            text = value.get_secret_value() if hasattr(value, "get_secret_value") else value
            shown += [(name, text)] if isinstance(text, str) else []
    return sha256(repr(shown).encode()).hexdigest()[:12] if shown else ""


async def _on_response(mode: Mode, response: Any) -> None:
    """Learn from a response that the HTTP client of a paced call in this mode has received."""
    call = _running.get()
    if call is not None and call.mode == mode:
        call.is_seen = True
        headers = lower_names(response.headers)
        await call.pace.learn(mode, response.status_code, headers, time.monotonic())


_HOOKS: Mapping[Mode, Callable[[Any], object]] = {
    "": lambda response: run_sync(_on_response("", response)),
    "a": partial(_on_response, "a"),
}
