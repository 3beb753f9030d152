"""ModelPaceMiddleware: all workers keep the pace that a model's provider allows.

Each of the provider's limits is a bucket that refills in a minute. A count in the store mirrors the
tightest one: the time until it is full. A call adds what it takes, and waits while there is no
room. What its answer says moves the count forward, so one process's answer paces all of them. After
a pause that an error asks for, the calls come evenly.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import lru_cache, partial
from hashlib import sha256
from typing import Any, Generic

from langchain.agents.middleware.types import ResponseT
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage

from langchain_quota.agents.rate_limiter import Call, Rate, WaitingRoom, check_fixed_prefix
from langchain_quota.core.provider_limits import TOO_MANY_REQUESTS, read_error, read_headers
from langchain_quota.middleware.base import ContextT, ModelCallMiddleware, check_store
from langchain_quota.middleware.context import call_context, running_agent
from langchain_quota.middleware.feature import Handler, Request, Response
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime import compat
from langchain_quota.runtime.arguments import explain_arguments
from langchain_quota.runtime.store_errors import QuotaStoreError
from langchain_quota.runtime.sync_async import Mode, fork_safe_lock, run_sync
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

    def __init__(self, client: StoreClient, recorder: Recorder, key: str, label: str) -> None:
        # The count drains by a microsecond in each microsecond.
        super().__init__(client, {"pace": Rate(key, int(_ROOM * 10**6))})
        self._recorder, self._key, self._drained_at = recorder, key, 0.0
        self.label = label
        """The provider's and the model's name in telemetry."""
        # The series tell alerts from the start which limits are providers', and that nobody waits.
        recorder.count(names.PROVIDER_REFUSALS, running_agent(), label, amount=0)
        recorder.begin_waits(running_agent(), label)
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

    async def _charge(self, call: Call) -> float:
        cost, level, now = self._cost, self._level, time.monotonic()
        # What this process knows still holds if the store does not answer, has lost its counts, or
        # has a clock that jumps.
        missing = level + cost - _ROOM
        if missing > 0:
            return missing
        call.amounts = {"pace": int(cost * 10**6)}
        with suppress(QuotaStoreError):
            missing = await super()._charge(call)
            in_store = missing + _ROOM - cost
            if level - in_store > _TOLERANCE:
                await self.client.delay(call.mode, self._key, level + cost)
            level = max(level, in_store)
        end = now + level + (cost if missing <= 0 else 0)
        self._drained_at = max(self._drained_at, end)
        return missing

    async def learn(self, mode: Mode, status: int | None, headers: object, at: float) -> None:
        """Move the count forward to what headers say, which was true at a time."""
        limits, pause = read_headers(status, headers)
        # A new dict, because another thread may be reading the old one.
        self._limits = {**self._limits, **{unit: limit for unit, (limit, _) in limits.items()}}
        end = at + max((1 - left / limit for limit, left in limits.values()), default=0) * _MINUTE
        if status == TOO_MANY_REQUESTS:
            self._recorder.count(names.PROVIDER_REFUSALS, running_agent(), self.label)
        if pause is not None:
            # Then the calls come evenly, even if the bucket could be full again.
            end = max(end, at + pause + _ROOM)
        seconds = end - time.monotonic()
        if seconds - self._level > (_TOLERANCE if pause is None else 0):
            self._drained_at = end
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


_running: ContextVar[tuple[_Pace, Mode] | None] = ContextVar("langchain_quota_paced", default=None)
"""The pace of the running model call, and its mode."""


@explain_arguments("ModelPaceMiddleware(store=RedisStore(), wait=60)")
class ModelPaceMiddleware(
    ModelCallMiddleware[Any, ContextT, ResponseT], Generic[ContextT, ResponseT]
):
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
        client = StoreClient(MemoryStore() if store is None else store, self._recorder)
        self._paces = lru_cache(_MAX_PACES)(partial(_Pace, client, self._recorder))
        self._lock = fork_safe_lock()

    async def _wrap_model_call(self, mode: Mode, request: Request, handler: Handler) -> Response:
        pace, call = self._pace_of(request), Call({}, mode)
        caller, outcome = call_context(request.runtime), "cancelled"
        # A request to the store is no wait for the provider, even if the store is slow.
        waiting = partial(self._recorder.waiting, caller.agent, pace.label, caller.thread_id)
        try:
            await pace.enter(call, self._wait, waiting)
            outcome = "allowed"
        finally:
            self._recorder.record_wait(caller.agent, pace.label, outcome, call.waited)
        hooks, own = compat.response_hooks(request.model, mode), _HOOKS[mode]
        with self._lock:
            if hooks is not None and own not in hooks:
                hooks.append(own)
        started_at, token = time.monotonic(), _running.set((pace, mode))
        try:
            response = await handler(request)
        except Exception as error:
            if hooks is None:
                await pace.learn(mode, *read_error(error), time.monotonic())
            raise
        finally:
            _running.reset(token)
        for message in response.result:
            pace.learn_tokens(message)
            if hooks is None:
                # The headers may have come with the first token, and the bucket refills since.
                headers = message.response_metadata.get("headers")
                await pace.learn(mode, None, headers, started_at)
        return response

    def _pace_of(self, request: Request) -> _Pace:
        """Return the pace of the model that a request reaches with its key, at its address."""
        parameters = compat.model_parameters(request.model, request.model_settings)
        provider, model = parameters.get("ls_provider"), str(parameters.get("ls_model_name"))
        of_provider = f"{provider}/" if provider else ""
        subject = f"{of_provider}{model}~{_account_digest(request.model)}"
        key = CountKey.at("pace", "provider", subject, timedelta(seconds=1), 0, limit=10**6)
        label = limit_label(f"{of_provider}{self._recorder.model_label(model)}")
        with self._lock:  # so that threads share a new one
            return self._paces(str(key), label)


def _account_digest(model: BaseChatModel) -> str:
    """Return a digest of a chat model's API key and address, if it shows them."""
    shown: list[tuple[str, str]] = []
    for name in sorted(type(model).model_fields):
        # Integrations: `openai_api_key`, `openai_api_base`, `anthropic_api_url`, `azure_endpoint`.
        if name.endswith(("api_key", "_base", "_url", "endpoint")):
            value: Any = getattr(model, name, None)
            text = value.get_secret_value() if hasattr(value, "get_secret_value") else value
            shown += [(name, text)] if isinstance(text, str) else []
    return sha256(repr(shown).encode()).hexdigest()[:12]


async def _on_response(mode: Mode, response: Any) -> None:
    """Learn from a response that the HTTP client of a paced call in this mode has received."""
    pace, of_call = _running.get() or (None, mode)
    if pace is not None and of_call == mode:
        await pace.learn(mode, response.status_code, response.headers, time.monotonic())


_HOOKS: Mapping[Mode, Callable[[Any], object]] = {
    "": lambda response: run_sync(_on_response("", response)),
    "a": partial(_on_response, "a"),
}
