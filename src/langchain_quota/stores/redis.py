"""Counts in Redis, shared by all processes and machines that use it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from langchain_quota.admission import AcquireRequest, AcquireResult
from langchain_quota.concurrency import Form, now
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores import IDLE_TTL, wire
from langchain_quota.stores.redis_clients import (
    FAILED,
    TIMEOUTS,
    UNREADABLE,
    AsyncClient,
    NoScriptError,
    SyncClient,
    clients,
    remedies,
)
from langchain_quota.stores.redis_script import ScriptCall, key_of, pattern_of
from langchain_quota.stores.server import PREFIX, Patience, ServerStore

_SCANNED = 500
"""How many keys Redis looks at in a step of a listing."""

_READ: dict[str, Callable[[Sequence[str], object], list[Any]]] = {
    "peek": wire.uses,
    "reset": wire.nothing,
    "grant": wire.grants,
    "revoke": wire.grants,
    "grants": wire.grants,
}
"""How the answer of an operation is read."""

T = TypeVar("T")


class RedisStore(ServerStore):
    """A `QuotaStore` in Redis, for all processes and machines that use the same prefix.

    Each operation is one run of one script, in one round trip; a compensation that has something to
    undo takes a second one. Async operations that begin in the same turn of the event loop may
    share a round trip, except in a cluster. All keys of a prefix have one hash tag: in Redis
    Cluster they are in one hash slot, on one node. Every key expires. Counts are exact up to
    2^53 - 1. They are as durable as Redis itself: its `maxmemory-policy` must be `noeviction`, and
    counts survive a restart of Redis only if it persists them.

    A prefix may be a function: then each tenant, for example, has its own prefix, and a cluster
    spreads the tenants over its nodes. A run for which the function gives no prefix fails, and
    nothing is charged. Keys begin with the prefix: `acme/search:user_id:ada`. To list counts and
    grants, make a store with the prefix as a string: there, the same key is `search:user_id:ada`.

    Args:
        source: The URL of one server in redis-py's form: `redis://`, `rediss://` for TLS or
            `unix://`, with user and password percent-encoded. `None`: the URL in the environment
            variable `LANGCHAIN_QUOTA_REDIS_URL`. Or your own client, of one server or of a cluster,
            which keeps its timeouts and retries: a client of `redis` serves the sync form, a client
            of `redis.asyncio` the async form, on its own event loop.
        prefix: What all keys begin with, `[A-Za-z0-9_.-]{1,64}`. Stores with different prefixes
            share nothing. Or a function of state and runtime, as of `Quota(per=…)`, but not async:
            `lambda state, runtime: runtime.context["tenant"]`.
        timeout: How long an operation may take, in seconds above 0. For an async operation it is
            the total, without time in which the event loop was blocked; for a sync operation it is
            each wait for the network. Nothing is tried twice.
        idle_ttl: How long a count without a window is kept when nobody charges it, from a second.

    Attributes:
        forms: The forms that it serves: `"sync"`, `"async"`; a client of your own has one of them.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, or there is no URL. No message has credentials.
        ModuleNotFoundError: The package redis is not installed; the message says what to install.

    Examples:
        Nothing is connected before the first operation:

        >>> from langchain_quota import RedisStore
        >>> RedisStore("rediss://worker:secret@redis.example/0", prefix="prod")
        RedisStore(rediss://redis.example:6379/0, prefix='prod')
    """

    def __init__(
        self,
        source: str | SyncClient | AsyncClient | None = None,
        *,
        prefix: str | Callable[[Any, Any], str] = PREFIX,
        timeout: float = 1.0,
        idle_ttl: timedelta = IDLE_TTL,
    ) -> None:
        super().__init__(prefix, timeout, idle_ttl)
        self._clients = clients(source, timeout)
        self.forms = self._clients.forms

    def __repr__(self) -> str:
        return f"RedisStore({self._clients.name}, prefix={self.prefix!r})"

    def close(self) -> None:
        """Close the connections of the sync form; a client of your own stays open."""
        self._clients.close()

    async def aclose(self) -> None:
        """Close the connections of the running event loop, and those of the sync form.

        `asyncio.run` closes them by itself when it ends its event loop.
        """
        self._clients.close()
        await self._clients.aclose()

    async def _admit(self, form: Form, prefix: str, request: AcquireRequest) -> AcquireResult:
        ask, read = partial(wire.acquire, request, self._idle), partial(wire.result, request)
        return await self._run(form, "acquire", prefix, ask, read)

    async def _operate(
        self, form: Form, prefix: str, op: str, keys: Sequence[str], *more: Any
    ) -> list[Any]:
        told: wire.Asked = {}
        if op == "grant":
            told = wire.of_grant(*more)
        elif op == "revoke":
            told = {"name": wire.short(*more)}
        ask = partial(wire.operation, op, keys, told, self._idle)
        return await self._run(form, "operations", prefix, ask, partial(_READ[op], keys))

    async def _run(
        self, form: Form, script: str, prefix: str, ask: wire.Ask, read: Callable[[object], T]
    ) -> T:
        # What is wrong with a question is no failure of Redis.
        call = ScriptCall(script, prefix, ask)
        client = await self._clients.opened(form)
        patience = Patience(self._timeout)
        try:
            async with patience if form else nullcontext():
                reply = await _reply(form, client, call)
                while call.again(reply):
                    reply = await _reply(form, client, call)
                return read(reply)
        except FAILED as error:
            raise self._failed(error, patience.blocked) from error

    def _keys(self, kind: str, pattern: str) -> Iterator[str]:
        prefix, client = str(self.prefix), now(self._clients.opened(""))
        try:
            for name in client.scan_iter(pattern_of(prefix, kind, pattern), count=_SCANNED):
                key = key_of(prefix, kind, name)
                if key is not None:
                    yield key
        except FAILED as error:
            raise self._failed(error, 0) from error

    def _failed(self, error: BaseException, blocked: float) -> QuotaStoreError:
        return self._failure(
            error,
            blocked,
            timed_out=isinstance(error, TIMEOUTS),
            unreadable=isinstance(error, UNREADABLE),
            remedies=remedies(error),
            secrets=self._clients.secrets,
        )


async def _reply(form: Form, client: Any, call: ScriptCall) -> object:
    arguments = call.arguments()
    try:
        reply = client.evalsha(call.script.sha, *arguments)
        return await reply if form else reply
    except NoScriptError:
        reply = client.eval(call.script.text, *arguments)
        return await reply if form else reply
