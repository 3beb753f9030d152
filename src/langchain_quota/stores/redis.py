"""Counts in Redis, shared by all processes and machines that use it."""

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from itertools import chain, islice
from types import TracebackType
from typing import Any, TypeVar, cast

from langchain_quota.admission import AcquireRequest, AcquireResult
from langchain_quota.arguments import check_type
from langchain_quota.errors import EventLoopBlockedError, QuotaStoreError
from langchain_quota.stores import IDLE_TTL, QuotaUsage, check_keys, check_request, idle_seconds
from langchain_quota.stores import redis_script as script
from langchain_quota.stores.grants import Grant, Granting
from langchain_quota.stores.keys import check_prefix, prefix_of
from langchain_quota.stores.redis_clients import (
    FAILED,
    TIMEOUTS,
    UNREADABLE,
    AsyncClient,
    Cluster,
    NoScriptError,
    SyncClient,
    Together,
    clients,
    remedies,
    scrub,
)
from langchain_quota.stores.redis_script import SCRIPT, SHA, Names, ScriptCall

PREFIX = "langchain_quota"
"""What all keys begin with, by default."""

_AT_ONCE = 500
"""How many keys a listing asks for at once."""
_SHOWN = 200
"""How many bytes of a name are logged: others may have written it."""

_TICKS = 16
"""The number of ticks of a timeout. Connecting takes about as many turns of the event loop."""

_REASON = 300
"""How much of a client's error text is shown: it may quote a whole reply."""

logger = logging.getLogger("langchain_quota")

T = TypeVar("T")
_Operation = Generator[ScriptCall, object, T]


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
        return self._in_thread(self._acquiring(request))

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        """`acquire`, without blocking the event loop."""
        return await self._in_loop(self._acquiring(request))

    def peek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        """What is kept under keys, in their order; `None` if nothing is."""
        return self._in_thread(self._peeking(keys))

    async def apeek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        """`peek`, without blocking the event loop."""
        return await self._in_loop(self._peeking(keys))

    def reset(self, keys: Sequence[str]) -> None:
        """Set counts to 0, and keep the keys; see `QuotaStore.reset`."""
        self._in_thread(self._resetting(keys))

    async def areset(self, keys: Sequence[str]) -> None:
        """`reset`, without blocking the event loop."""
        await self._in_loop(self._resetting(keys))

    def usages(self, pattern: str = "*") -> list[QuotaUsage]:
        """What is kept under the keys that match a glob pattern, sorted by key.

        Redis is asked for some keys at a time, and serves others in between: a count that is made
        or removed meanwhile may be missing. Keys of others that hold no count are left out and
        logged; `listing` returns their names.

        Args:
            pattern: As in Python's `fnmatch.fnmatchcase`.

        Raises:
            QuotaStoreError: Redis failed, or did not answer in time.
            TypeError: The store was given a client of `redis.asyncio`.
        """
        found, odd = self.listing(pattern)
        if odd:
            first = odd[0][:_SHOWN]
            logger.warning("%r: keys that hold no count: %d, such as %r", self, len(odd), first)
        return found

    def listing(self, pattern: str = "*") -> tuple[list[QuotaUsage], list[bytes]]:
        """As `usages`, and the names in Redis of matching keys that hold no count, sorted.

        Args:
            pattern: As in Python's `fnmatch.fnmatchcase`.

        Raises:
            QuotaStoreError: Redis failed, or did not answer in time.
            TypeError: The store was given a client of `redis.asyncio`.
        """
        found: dict[str, QuotaUsage] = {}
        odd: set[bytes] = set()
        for (counts, others), unreadable in self._scanned("peek", pattern, script.uses):
            found |= counts
            odd.update(unreadable, map(Names(str(self.prefix)).count, others))
        return [found[key] for key in sorted(found)], sorted(odd)

    def grants(self, pattern: str = "*") -> list[Grant]:
        """The grants that have not ended, sorted by key and time; read like `usages`.

        Args:
            pattern: A glob pattern of keys, as in Python's `fnmatch.fnmatchcase`.

        Raises:
            QuotaStoreError: Redis failed, or did not answer in time.
            TypeError: The store was given a client of `redis.asyncio`.
        """
        found: dict[tuple[str, str], Grant] = {}
        for some, _ in self._scanned("grants", pattern, script.listed):
            found |= {(each.key, each.id): each for each in some}
        return sorted(found.values(), key=lambda grant: (grant.key, grant.given_at))

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

    def _grant(self, asked: Grant) -> tuple[Grant | None, bool]:
        return self._in_thread(self._granting(asked))

    async def _agrant(self, asked: Grant) -> tuple[Grant | None, bool]:
        return await self._in_loop(self._granting(asked))

    def _revoke(self, key: str, name: str) -> Grant | None:
        return self._in_thread(self._revoking(key, name))

    async def _arevoke(self, key: str, name: str) -> Grant | None:
        return await self._in_loop(self._revoking(key, name))

    # Each operation is a generator: it gives the calls of the script, takes the replies, and
    # returns what they say. The two forms only differ in how a call is sent. Up to its first call
    # it checks what it is asked: only what happens later is a failure of Redis.

    def _acquiring(self, request: AcquireRequest) -> _Operation[AcquireResult]:
        check_request(request)
        counted = [each.key for each in request.counters.values() if each.key is not None]
        corrected = [[*each.amounts, *each.starts] for each in request.compensations]
        names = self._of([*counted, *chain.from_iterable(corrected)])
        call = ScriptCall.acquire(names, request, self._idle)
        reply = yield call
        while call.again(reply):
            reply = yield call
        return script.result(reply, request)

    def _peeking(self, keys: Sequence[str]) -> _Operation[tuple[QuotaUsage | None, ...]]:
        check_keys(keys)
        found: dict[str, QuotaUsage] = {}
        for names, some in self._parts(keys) if keys else ():
            uses_of, odd = script.uses(some, (yield ScriptCall.reading("peek", names, some)))
            if odd:
                raise QuotaStoreError(f"no count is kept under {odd[0]!r}")
            found |= uses_of
        return tuple(map(found.get, keys))

    def _resetting(self, keys: Sequence[str]) -> _Operation[None]:
        check_keys(keys)
        for names, some in self._parts(keys) if keys else ():
            script.done((yield ScriptCall.reset(names, some, self._idle)))

    def _granting(self, asked: Grant) -> _Operation[tuple[Grant | None, bool]]:
        reply = yield ScriptCall.grant(self._of([asked.key]), asked, self._idle)
        return script.given(asked.key, reply)

    def _revoking(self, key: str, name: str) -> _Operation[Grant | None]:
        reply = yield ScriptCall.revoke(self._of([key]), key, name)
        return script.revoked(key, reply)

    def _in_thread(self, operation: _Operation[T]) -> T:
        try:
            call = next(operation)
            client = self._clients.sync()
            while True:
                try:
                    call = operation.send(_call(client, call))
                except FAILED as error:
                    raise self._failure(error) from error
        except StopIteration as over:
            return cast("T", over.value)

    async def _in_loop(self, operation: _Operation[T]) -> T:
        try:
            call = next(operation)
            client = await self._clients.running()
            timeout = _Timeout(self._timeout)
            try:
                async with timeout:
                    while True:
                        call = operation.send(await _acall(client, call))
            except FAILED as error:
                raise self._failure(error, timeout.blocked) from error
        except StopIteration as over:
            return cast("T", over.value)

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

    def _scanned(
        self, op: str, pattern: str, read: Callable[[list[str], object], T]
    ) -> Iterator[tuple[T, list[bytes]]]:
        """What is read of the keys that match, some at a time, and names that are of no key."""
        if self._names is None:
            raise ValueError(
                "the prefix of this store is a function: list the keys of one prefix with "
                "RedisStore(…, prefix='acme')"
            )
        client = self._clients.sync()
        try:
            for keys, odd in _scan(self._names, client, pattern):
                call = ScriptCall.reading(op, self._names, keys)
                yield read(keys, _call(client, call) if keys else []), odd
        except FAILED as error:
            raise self._failure(error) from error

    def _failure(self, error: BaseException, blocked: float = 0.0) -> QuotaStoreError:
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


class _Timeout:
    """Like `asyncio.timeout`, but without the time in which the event loop was blocked."""

    # While the event loop is blocked, a reply waits unread, and `asyncio.timeout` would end before
    # it is read. So this timeout counts ticks of the event loop. A late tick counts as one.

    def __init__(self, seconds: float) -> None:
        self.blocked = 0.0
        self._tick = seconds / _TICKS
        self._left = _TICKS
        self._timeout = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._next()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(kind, error, where)

    def _next(self) -> None:
        self._due = self._loop.time() + self._tick
        self._timer = self._loop.call_at(self._due, self._passed)

    def _passed(self) -> None:
        self.blocked += self._loop.time() - self._due
        self._left -= 1
        if self._left:
            self._next()
        else:
            # It ends in the loop's next turn: a reply that is here already is read first.
            self._timeout.reschedule(self._loop.time())


def _call(client: SyncClient, call: ScriptCall) -> object:
    try:
        return client.evalsha(SHA, *call.arguments())
    except NoScriptError:
        return client.eval(SCRIPT, *call.arguments())


async def _acall(client: Together | Cluster, call: ScriptCall) -> object:
    try:
        return await client.evalsha(SHA, *call.arguments())
    except NoScriptError:
        return await client.eval(SCRIPT, *call.arguments())


def _scan(
    names: Names, client: SyncClient, pattern: str
) -> Iterator[tuple[list[str], list[bytes]]]:
    """The keys that match a pattern, some at a time, and the names that are no text."""
    found = client.scan_iter(match=names.pattern(pattern), count=_AT_ONCE)
    while some := [*islice(found, _AT_ONCE)]:
        keys, odd = [], []
        for name in some:
            try:
                key = names.key(name)
            except ValueError:
                text = name if isinstance(name, str) else repr(name)[2:-1]
                if fnmatchcase(text.partition("}:count:")[2], pattern):
                    odd.append(name if isinstance(name, bytes) else name.encode())
            else:
                if fnmatchcase(key, pattern):
                    keys.append(key)
        yield keys, odd
