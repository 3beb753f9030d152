"""Counts in Redis, shared by all processes and machines that use it."""

import logging
import re
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from fnmatch import fnmatchcase
from itertools import islice

from langchain_quota.admission import AcquireRequest, AcquireResult
from langchain_quota.errors import EventLoopBlockedError, QuotaStoreError
from langchain_quota.stores import (
    IDLE_TTL,
    QuotaUsage,
    check_keys,
    check_request,
    idle_seconds,
)
from langchain_quota.stores.deadline import Deadline
from langchain_quota.stores.grants import Grant, Granting
from langchain_quota.stores.redis_clients import (
    FAILURES,
    OUT_OF_REACH,
    TIMEOUTS,
    UNREADABLE,
    AsyncClient,
    NoScriptError,
    SyncClient,
    clients,
    scrub,
)
from langchain_quota.stores.redis_script import (
    SCRIPT,
    SHA,
    Names,
    ScriptCall,
    done,
    given,
    listed,
    result,
    revoked,
    uses,
)

PREFIX = "langchain_quota"
"""What all keys begin with, by default."""

_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_AT_ONCE = 500
"""How many keys a listing asks for at once."""
_SHOWN = 200
"""How many bytes of a name are logged: others may have written it."""

_REASON = 300
"""How much of a client's error text is shown: it may quote a whole reply."""

logger = logging.getLogger("langchain_quota")


class RedisStore(Granting):
    """A `QuotaStore` in Redis, for all processes and machines that use the same prefix.

    Each operation is one run of one script, in one round trip; a compensation that has something to
    undo takes a second one. All keys of a prefix have one hash tag: in Redis Cluster a prefix
    is in one hash slot, on one node. Every key expires. Counts are exact up to 2^53 - 1. They are
    as durable as Redis itself: its `maxmemory-policy` must be `noeviction`, and counts survive a
    restart of Redis only if it persists them.

    Args:
        source: A URL in redis-py's form: `redis://`, `rediss://` for TLS or `unix://`, with user
            and password percent-encoded; `None` for the URL in the environment variable
            `LANGCHAIN_QUOTA_REDIS_URL`. Or a client of your own, of one server or of a cluster,
            which keeps its timeouts and retries: a client of `redis` serves the sync form, a client
            of `redis.asyncio` the async form, on its own event loop.
        prefix: What all keys begin with, `[A-Za-z0-9_.-]{1,64}`. Stores with different prefixes
            share nothing.
        timeout: How long an operation may take, in seconds above 0. For an async operation it is
            the total, without time in which the event loop was blocked; for a sync operation it is
            each wait for the network. Nothing is tried twice.
        idle_ttl: How long a count without a window is kept when nobody charges it, from a second.

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
        prefix: str = PREFIX,
        timeout: float = 1.0,
        idle_ttl: timedelta = IDLE_TTL,
    ) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a string, not {prefix!r}")
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"prefix must match {_PREFIX.pattern}, not {prefix!r}")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise TypeError(f"timeout must be a number, not {timeout!r}")
        if not 0 < timeout < float("inf"):
            raise ValueError(f"timeout must be above 0, not {timeout!r}")
        self._prefix = prefix
        self._names = Names(prefix)
        self._timeout = timeout
        self._idle = idle_seconds(idle_ttl)
        self._clients = clients(source, timeout)

    def __repr__(self) -> str:
        return f"RedisStore({self._clients.name}, prefix={self._prefix!r})"

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        """Admit each call of a batch against all of its limits; see `QuotaStore.acquire`."""
        call = self._acquiring(request)
        client = self._clients.sync()
        with self._failing():
            reply = _call(client, call)
            while call.again(reply):
                reply = _call(client, call)
            return result(reply, request)

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        """`acquire`, without blocking the event loop."""
        call = self._acquiring(request)
        async with self._operation() as client:
            reply = await _acall(client, call)
            while call.again(reply):
                reply = await _acall(client, call)
            return result(reply, request)

    def peek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        """What is kept under keys, in their order; `None` if nothing is."""
        check_keys(keys)
        if not keys:
            return ()
        client = self._clients.sync()
        with self._failing():
            return _peeked(keys, _call(client, ScriptCall.peek(self._names, keys)))

    async def apeek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        """`peek`, without blocking the event loop."""
        check_keys(keys)
        if not keys:
            return ()
        async with self._operation() as client:
            return _peeked(keys, await _acall(client, ScriptCall.peek(self._names, keys)))

    def reset(self, keys: Sequence[str]) -> None:
        """Set counts to 0, and keep the keys; see `QuotaStore.reset`."""
        check_keys(keys)
        if keys:
            client = self._clients.sync()
            with self._failing():
                done(_call(client, ScriptCall.reset(self._names, keys, self._idle)))

    async def areset(self, keys: Sequence[str]) -> None:
        """`reset`, without blocking the event loop."""
        check_keys(keys)
        if keys:
            async with self._operation() as client:
                done(await _acall(client, ScriptCall.reset(self._names, keys, self._idle)))

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
        client = self._clients.sync()
        with self._failing():
            for keys, unreadable in self._scan(client, pattern):
                odd.update(unreadable)
                if keys:
                    counts, others = uses(keys, _call(client, ScriptCall.peek(self._names, keys)))
                    found |= counts
                    odd.update(map(self._names.count, others))
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
        client = self._clients.sync()
        with self._failing():
            for keys, _ in self._scan(client, pattern):
                if keys:
                    reply = _call(client, ScriptCall.grants(self._names, keys))
                    found |= {(each.key, each.id): each for each in listed(keys, reply)}
        return sorted(found.values(), key=lambda grant: (grant.key, grant.given_at))

    def _scan(self, client: SyncClient, pattern: str) -> Iterator[tuple[list[str], list[bytes]]]:
        """The keys that match a pattern, some at a time, and the names that are no text."""
        # Redis reads classes and escapes differently.
        simple, *rest = re.split(r"[\[\\]", pattern, maxsplit=1)
        match = self._names.count(simple + ("*" if rest else ""))
        names = client.scan_iter(match=match, count=_AT_ONCE)
        while some := [*islice(names, _AT_ONCE)]:
            keys, odd = [], []
            for name in some:
                try:
                    key = self._names.key(name)
                except UnicodeDecodeError:
                    if fnmatchcase(self._names.key(repr(name)[2:-1]), pattern):
                        odd.append(name)
                else:
                    if fnmatchcase(key, pattern):
                        keys.append(key)
            yield keys, odd

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
        client = self._clients.sync()
        with self._failing():
            call = ScriptCall.grant(self._names, asked, self._idle)
            return given(asked.key, _call(client, call))

    async def _agrant(self, asked: Grant) -> tuple[Grant | None, bool]:
        async with self._operation() as client:
            call = ScriptCall.grant(self._names, asked, self._idle)
            return given(asked.key, await _acall(client, call))

    def _revoke(self, key: str, name: str) -> Grant | None:
        client = self._clients.sync()
        with self._failing():
            return revoked(key, _call(client, ScriptCall.revoke(self._names, key, name)))

    async def _arevoke(self, key: str, name: str) -> Grant | None:
        async with self._operation() as client:
            return revoked(key, await _acall(client, ScriptCall.revoke(self._names, key, name)))

    def _acquiring(self, request: AcquireRequest) -> ScriptCall:
        check_request(request)
        return ScriptCall.acquire(self._names, request, self._idle)

    @asynccontextmanager
    async def _operation(self) -> AsyncGenerator[AsyncClient]:
        """The running event loop's client, for one operation within the timeout."""
        client, permit = await self._clients.running()
        deadline = Deadline(self._timeout)
        with self._failing(deadline):
            async with deadline, permit:
                yield client

    @contextmanager
    def _failing(self, deadline: Deadline | None = None) -> Iterator[None]:
        """Turn a failure into a `QuotaStoreError`.

        Raises:
            QuotaStoreError: The operation failed.
        """
        try:
            yield
        except (*FAILURES, *UNREADABLE) as error:
            scrub(error, self._clients.secrets)
            timed_out = isinstance(error, TIMEOUTS)
            failure = QuotaStoreError
            reason = f"{type(error).__name__}: {error}"[:_REASON]
            if isinstance(error, UNREADABLE):
                reason = f"an unreadable reply, {reason}"
            if timed_out:
                reason = f"no answer within {self._timeout} s"
            if timed_out and deadline is not None and deadline.blocked > self._timeout / 2:
                failure = EventLoopBlockedError
                reason = (
                    f"{reason}, and the event loop was blocked for {deadline.blocked:.1f} s "
                    "meanwhile: move what blocks it to a thread"
                )
            elif isinstance(error, OUT_OF_REACH):
                reason = (
                    f"{reason.rstrip('.')}: check that Redis runs there and that the URL is right"
                )
            raise failure(f"{self!r}: {reason}", timed_out=timed_out) from error


def _peeked(keys: Sequence[str], reply: object) -> tuple[QuotaUsage | None, ...]:
    """What is kept under keys, in their order.

    Raises:
        QuotaStoreError: One of the keys holds something else.
    """
    found, odd = uses(keys, reply)
    if odd:
        raise QuotaStoreError(f"no count is kept under {odd[0]!r}")
    return tuple(map(found.get, keys))


def _call(client: SyncClient, call: ScriptCall) -> object:
    try:
        return client.evalsha(SHA, *call.arguments())
    except NoScriptError:
        return client.eval(SCRIPT, *call.arguments())


async def _acall(client: AsyncClient, call: ScriptCall) -> object:
    try:
        return await client.evalsha(SHA, *call.arguments())
    except NoScriptError:
        return await client.eval(SCRIPT, *call.arguments())
