"""Counts in Redis, shared by all processes and machines that use it."""

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from langchain_quota.stores.grants import Grant, Granting
from langchain_quota.stores.redis_clients import (
    FAILED,
    TIMEOUTS,
    UNREADABLE,
    AsyncClient,
    Cluster,
    NoScriptError,
    Operation,
    SyncClient,
    clients,
    remedies,
    scrub,
)
from langchain_quota.stores.redis_names import Names
from langchain_quota.stores.redis_script import (
    SCRIPT,
    SHA,
    ScriptCall,
    done,
    given,
    listed,
    result,
    revoked,
    uses,
)
from langchain_quota.stores.redis_together import Together
from langchain_quota.stores.shards import check_shards, keys_by_shard, requests_by_shard

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
    undo takes a second one. Async operations that begin in the same turn of the event loop may
    share a round trip, except in a cluster. All keys of a prefix have one hash tag: in Redis
    Cluster they are in one hash slot, on one node, unless `shard_by` spreads them. Every key
    expires. Counts are exact up to 2^53 - 1. They are as durable as Redis itself: its
    `maxmemory-policy` must be `noeviction`, and counts survive a restart of Redis only if it
    persists them.

    With `shard_by="tenant"`, all counts of a tenant are a shard: those of its threads and runs, and
    its quotas. Each shard has its own hash tag, so a cluster spreads the shards over its nodes. A
    request counts in the shard of its tenant, in one step, as exactly as without shards. Every run
    needs the tenant in its context: without it the run fails, and nothing is charged. Keys begin
    with the shard: `acme/search:user_id:ada`. Reading or resetting keys of several shards takes one
    step for each shard. Limits on calls at once count the calls of all tenants, on one node. Counts
    that were made without `shard_by` keep their old keys until they expire.

    Args:
        source: The URL of one server in redis-py's form: `redis://`, `rediss://` for TLS or
            `unix://`, with user and password percent-encoded. `None`: the URL in the environment
            variable `LANGCHAIN_QUOTA_REDIS_URL`. Or your own client, of one server or of a cluster,
            which keeps its timeouts and retries: a client of `redis` serves the sync form, a client
            of `redis.asyncio` the async form, on its own event loop.
        prefix: What all keys begin with, `[A-Za-z0-9_.-]{1,64}`. Stores with different prefixes
            share nothing.
        timeout: How long an operation may take, in seconds above 0. For an async operation it is
            the total, without time in which the event loop was blocked; for a sync operation it is
            each wait for the network. Nothing is tried twice.
        idle_ttl: How long a count without a window is kept when nobody charges it, from a second.
        shard_by: The name of a value in `runtime.context`, such as `"tenant"` or `"user_id"`, or
            `"thread"`: the value is the shard of a request. `None`: there are no shards. Agents
            that share counts need the same `shard_by`.
        within_shard: What else a quota may be `per`, because it belongs to one shard, such as
            `"user_id"` where every user belongs to one tenant. All other quotas, such as those per
            `"global"`, are an error when the middleware is made: put them into another store.

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

    def __init__(  # noqa: PLR0913 - keyword-only, with defaults
        self,
        source: str | SyncClient | AsyncClient | None = None,
        *,
        prefix: str = PREFIX,
        timeout: float = 1.0,
        idle_ttl: timedelta = IDLE_TTL,
        shard_by: str | None = None,
        within_shard: Sequence[str] = (),
    ) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a string, not {prefix!r}")
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"prefix must match {_PREFIX.pattern}, not {prefix!r}")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise TypeError(f"timeout must be a number, not {timeout!r}")
        if not 0 < timeout < float("inf"):
            raise ValueError(f"timeout must be above 0, not {timeout!r}")
        check_shards(shard_by, within_shard)
        self.shard_by, self.within_shard = shard_by, tuple(within_shard)
        self._prefix = prefix
        self._names = Names(prefix)
        self._timeout = timeout
        self._idle = idle_seconds(idle_ttl)
        self._clients = clients(source, timeout)

    def __repr__(self) -> str:
        shards = "" if self.shard_by is None else f", shard_by={self.shard_by!r}"
        return f"RedisStore({self._clients.name}, prefix={self._prefix!r}{shards})"

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        """Admit each call of a batch against all of its limits; see `QuotaStore.acquire`."""
        calls = self._acquiring(request)
        client = self._clients.sync()
        with self._failing():
            for part, call in calls:
                reply = _call(client, call)
                while call.again(reply):
                    reply = _call(client, call)
                answer = result(reply, part)
            return answer

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        """`acquire`, without blocking the event loop."""
        calls = self._acquiring(request)
        async with self._operation() as client:
            for part, call in calls:
                reply = await _acall(client, call)
                while call.again(reply):
                    reply = await _acall(client, call)
                answer = result(reply, part)
            return answer

    def peek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        """What is kept under keys, in their order; `None` if nothing is."""
        check_keys(keys)
        if not keys:
            return ()
        client = self._clients.sync()
        found: dict[str, QuotaUsage] = {}
        with self._failing():
            for some in keys_by_shard(keys):
                found |= _peeked(some, _call(client, ScriptCall.peek(self._names, some)))
        return tuple(map(found.get, keys))

    async def apeek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        """`peek`, without blocking the event loop."""
        check_keys(keys)
        if not keys:
            return ()
        found: dict[str, QuotaUsage] = {}
        async with self._operation() as client:
            for some in keys_by_shard(keys):
                found |= _peeked(some, await _acall(client, ScriptCall.peek(self._names, some)))
        return tuple(map(found.get, keys))

    def reset(self, keys: Sequence[str]) -> None:
        """Set counts to 0, and keep the keys; see `QuotaStore.reset`."""
        check_keys(keys)
        if keys:
            client = self._clients.sync()
            with self._failing():
                for some in keys_by_shard(keys):
                    done(_call(client, ScriptCall.reset(self._names, some, self._idle)))

    async def areset(self, keys: Sequence[str]) -> None:
        """`reset`, without blocking the event loop."""
        check_keys(keys)
        if keys:
            async with self._operation() as client:
                for some in keys_by_shard(keys):
                    done(await _acall(client, ScriptCall.reset(self._names, some, self._idle)))

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
                for some in keys_by_shard(keys) if keys else ():
                    counts, others = uses(some, _call(client, ScriptCall.peek(self._names, some)))
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
                for some in keys_by_shard(keys) if keys else ():
                    reply = _call(client, ScriptCall.grants(self._names, some))
                    found |= {(each.key, each.id): each for each in listed(some, reply)}
        return sorted(found.values(), key=lambda grant: (grant.key, grant.given_at))

    def _scan(self, client: SyncClient, pattern: str) -> Iterator[tuple[list[str], list[bytes]]]:
        """The keys that match a pattern, some at a time, and the names that are no text."""
        names = client.scan_iter(match=self._names.pattern(pattern), count=_AT_ONCE)
        while some := [*islice(names, _AT_ONCE)]:
            keys, odd = [], []
            for name in some:
                try:
                    key = self._names.key(name)
                except ValueError:
                    text = name if isinstance(name, str) else repr(name)[2:-1]
                    if fnmatchcase(text.partition("}:count:")[2], pattern):
                        odd.append(name if isinstance(name, bytes) else name.encode())
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

    def _acquiring(self, request: AcquireRequest) -> list[tuple[AcquireRequest, ScriptCall]]:
        """The requests to the shards, the request itself last."""
        check_request(request)
        return [
            (part, ScriptCall.acquire(self._names.of(shard), part, self._idle))
            for shard, part in requests_by_shard(request)
        ]

    def _operation(self) -> Operation:
        """The running event loop's client, for one operation within the timeout."""
        return Operation(self._clients, self._timeout, self._failure)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn a failure into a `QuotaStoreError`.

        Raises:
            QuotaStoreError: The operation failed.
        """
        try:
            yield
        except FAILED as error:
            raise self._failure(error) from error

    def _failure(self, error: BaseException, blocked: float = 0.0) -> QuotaStoreError:
        """What is raised when something fails.

        Args:
            error: The failure.
            blocked: For how long the event loop was blocked meanwhile, in seconds.
        """
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


def _peeked(keys: Sequence[str], reply: object) -> dict[str, QuotaUsage]:
    """What is kept under keys.

    Raises:
        QuotaStoreError: One of the keys holds something else.
    """
    found, odd = uses(keys, reply)
    if odd:
        raise QuotaStoreError(f"no count is kept under {odd[0]!r}")
    return found


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
