"""Counts in Redis, shared by all processes and machines that use it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from itertools import chain, islice
from types import TracebackType
from typing import Any, Self, TypeVar

from langchain_quota.admission import AcquireRequest, AcquireResult
from langchain_quota.arguments import check_type
from langchain_quota.concurrency import Form, now
from langchain_quota.errors import EventLoopBlockedError, QuotaStoreError
from langchain_quota.stores import IDLE_TTL, QuotaUsage
from langchain_quota.stores import redis_script as script
from langchain_quota.stores.common import check_keys, check_request, idle_seconds
from langchain_quota.stores.grants import Grant, Granting
from langchain_quota.stores.keys import check_prefix, prefix_of
from langchain_quota.stores.redis_clients import (
    FAILED,
    TIMEOUTS,
    UNREADABLE,
    AsyncClient,
    Clients,
    NoScriptError,
    SyncClient,
    clients,
    remedies,
    scrub,
)
from langchain_quota.stores.redis_script import SCRIPTS, Names, ScriptCall

PREFIX = "langchain_quota"
"""What all keys begin with, by default."""

_AT_ONCE = 500
"""How many keys a listing asks for at once."""

_TICKS = 16
"""The number of ticks of a timeout. Connecting takes about as many turns of the event loop."""

_REASON = 300
"""How much of a client's error text is shown: it may quote a whole reply."""

T = TypeVar("T")
_Failure = Callable[[BaseException, float], QuotaStoreError]


class RedisStore(Granting):
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
        check_type("prefix", prefix, str | Callable, "a string or a function")
        if isinstance(prefix, str):
            check_prefix("prefix", prefix)
        check_type("timeout", timeout, int | float, "a number")
        if not 0 < timeout < float("inf"):
            raise ValueError(f"timeout must be above 0, not {timeout!r}")
        self.prefix = prefix
        self._names = Names(prefix) if isinstance(prefix, str) else None
        self._timeout = timeout
        self._idle = idle_seconds(idle_ttl)
        self._clients = clients(source, timeout)
        self.forms = self._clients.forms

    def __repr__(self) -> str:
        return f"RedisStore({self._clients.name}, prefix={self.prefix!r})"

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        """Admit each call of a batch against all of its limits; see `QuotaStore.acquire`."""
        return now(self._acquire("", request))

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        """`acquire`, without blocking the event loop."""
        return await self._acquire("a", request)

    def peek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        """What is kept under keys, in their order; `None` if nothing is."""
        return now(self._peek("", keys))

    async def apeek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        """`peek`, without blocking the event loop."""
        return await self._peek("a", keys)

    def reset(self, keys: Sequence[str]) -> None:
        """Set counts to 0, and keep the keys; see `QuotaStore.reset`."""
        now(self._reset("", keys))

    async def areset(self, keys: Sequence[str]) -> None:
        """`reset`, without blocking the event loop."""
        await self._reset("a", keys)

    def usages(self, pattern: str = "*") -> list[QuotaUsage]:
        """What is kept under the keys that match a glob pattern, sorted by key.

        Redis is asked for some keys at a time, and serves others in between: a count that is made
        or removed meanwhile may be missing. Keys of others that hold no count are left out.

        Args:
            pattern: As in Python's `fnmatch.fnmatchcase`.

        Raises:
            QuotaStoreError: Redis failed, or did not answer in time.
            TypeError: The store was given a client of `redis.asyncio`.
        """
        parts = now(self._scanned("peek", "count", pattern, script.uses))
        found = {key: use for part in parts for key, use in part.items() if use is not None}
        return [found[key] for key in sorted(found)]

    def close(self) -> None:
        """Close the connections of the sync form; a client of your own stays open."""
        self._clients.close()

    async def aclose(self) -> None:
        """Close the connections of the running event loop, and those of the sync form.

        `asyncio.run` closes them by itself when it ends its event loop.
        """
        self._clients.close()
        await self._clients.aclose()

    def _now(self) -> float:
        return time.time()

    # Before it runs a script, an operation checks what it is asked: only what happens later is a
    # failure of Redis.

    async def _acquire(self, form: Form, request: AcquireRequest) -> AcquireResult:
        check_request(request)
        counted = [each.key for each in request.counters.values() if each.key is not None]
        corrected = [[*each.amounts, *each.starts] for each in request.compensations]
        names = self._of([*counted, *chain.from_iterable(corrected)])
        call = ScriptCall.acquire(names, request, self._idle)
        async with self._running(form) as run:
            reply = await run(call)
            while call.again(reply):
                reply = await run(call)
            return script.result(reply, request)

    async def _peek(self, form: Form, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        check_keys(keys)
        found: dict[str, QuotaUsage | None] = {}
        for names, some in self._parts(keys) if keys else ():
            async with self._running(form) as run:
                found |= script.uses(some, await run(ScriptCall.of("peek", names, some)))
        for key, use in found.items():
            if use is None:
                raise QuotaStoreError(f"no count is kept under {key!r}")
        return tuple(map(found.get, keys))

    async def _reset(self, form: Form, keys: Sequence[str]) -> None:
        check_keys(keys)
        for names, some in self._parts(keys) if keys else ():
            async with self._running(form) as run:
                if await run(ScriptCall.of("reset", names, some, self._idle)) != []:
                    raise ValueError("it is not empty")

    async def _grant(self, form: Form, asked: Grant) -> tuple[Grant | None, bool]:
        names, told = self._of([asked.key]), script.details(asked)
        call = ScriptCall.of("grant", names, [asked.key], self._idle, **told)
        async with self._running(form) as run:
            return next(iter(script.grants([asked.key], await run(call))), (None, False))

    async def _revoke(self, form: Form, key: str, name: str) -> Grant | None:
        call = ScriptCall.of("revoke", self._of([key]), [key], name=script.short(name))
        async with self._running(form) as run:
            ended = script.grants([key], await run(call))
        return ended[0][0] if ended else None

    def _given(self, pattern: str) -> list[Grant]:
        parts = now(self._scanned("grants", "grants", pattern, script.grants))
        return list({(each.key, each.id): each for each, _ in chain.from_iterable(parts)}.values())

    async def _scanned(
        self, op: str, kind: str, pattern: str, read: Callable[[list[str], object], T]
    ) -> list[T]:
        """What is read of the keys that match, some at a time."""
        names = self._names
        if names is None:
            raise ValueError(
                "the prefix of this store is a function: list the keys of one prefix with "
                "RedisStore(…, prefix='acme')"
            )
        found = []
        async with self._running("") as run:
            scanned = run.client.scan_iter(match=names.pattern(kind, pattern), count=_AT_ONCE)
            while some := [*islice(scanned, _AT_ONCE)]:
                read_names = (names.key(kind, each) for each in some)
                keys = [key for key in read_names if key is not None and fnmatchcase(key, pattern)]
                call = ScriptCall.of(op, names, keys)
                found.append(read(keys, await run(call) if keys else []))
        return found

    def _running(self, form: Form) -> "_Run":
        return _Run(form, self._clients, self._timeout, self._failure)

    def _of(self, keys: Sequence[str]) -> Names:
        """The names of keys that are used in one step."""
        parts = self._parts(keys)
        if len(parts) > 1:
            raise ValueError(
                f"a request must have one prefix: {parts[0][1][0]!r}, {parts[1][1][0]!r}"
            )
        return parts[0][0] if parts else Names(PREFIX)

    def _parts(self, keys: Sequence[str]) -> list[tuple[Names, Sequence[str]]]:
        # Keys by prefix.
        if self._names is not None:
            return [(self._names, keys)]
        found: dict[str, list[str]] = {}
        for key in keys:
            check_prefix(f"what stands before the slash of {key!r}", prefix_of(key))
            found.setdefault(prefix_of(key), []).append(key)
        return [(Names(prefix, is_in_keys=True), some) for prefix, some in found.items()]

    def _failure(self, error: BaseException, blocked: float) -> QuotaStoreError:
        """What is raised when something fails, and the event loop was blocked for some seconds."""
        scrub(error, self._clients.secrets)
        timed_out = isinstance(error, TIMEOUTS)
        failure = QuotaStoreError
        reason = f"{type(error).__name__}: {error}"[:_REASON]
        if isinstance(error, UNREADABLE):
            reason = f"an unreadable reply, {reason}"
        if timed_out:
            reason = f"no answer within {self._timeout} s"
        if timed_out and blocked > self._timeout / 2:
            failure = EventLoopBlockedError
            reason = (
                f"{reason}, and the event loop was blocked for {blocked:.1f} s "
                "meanwhile: move what blocks it to a thread"
            )
        else:
            reason = ": ".join([reason.rstrip(".: "), *remedies(error)])
        return failure(f"{self!r}: {reason}", timed_out=timed_out)


class _Run:
    """Runs scripts within the timeout; what fails meanwhile is a failure of Redis."""

    # While the event loop is blocked, a reply waits unread, and `asyncio.timeout` would end before
    # it is read. So this one counts ticks of the event loop. A late tick counts as one.

    def __init__(self, form: Form, clients: Clients, seconds: float, failure: _Failure) -> None:
        self._form = form
        self._clients = clients
        self._failure = failure
        self._tick = seconds / _TICKS
        self._left = _TICKS
        self._blocked = 0.0

    async def __aenter__(self) -> Self:
        self.client = await self._clients.opened(self._form)
        if self._form:
            self._loop = asyncio.get_running_loop()
            self._timeout = asyncio.timeout(None)
            await self._timeout.__aenter__()
            self._next()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._form:
            self._timer.cancel()
            try:
                await self._timeout.__aexit__(kind, error, where)
            except TimeoutError as late:
                error = late
        if isinstance(error, FAILED):
            raise self._failure(error, self._blocked) from error

    async def __call__(self, call: ScriptCall) -> object:
        known, arguments = SCRIPTS[call.script], call.arguments()
        try:
            return await self._given(self.client.evalsha(known.sha, *arguments))
        except NoScriptError:
            return await self._given(self.client.eval(known.text, *arguments))

    async def _given(self, answer: Any) -> object:
        return await answer if self._form else answer

    def _next(self) -> None:
        self._due = self._loop.time() + self._tick
        self._timer = self._loop.call_at(self._due, self._passed)

    def _passed(self) -> None:
        self._blocked += self._loop.time() - self._due
        self._left -= 1
        if self._left:
            self._next()
        else:
            # It ends in the loop's next turn: a reply that is here already is read first.
            self._timeout.reschedule(self._loop.time())
