"""Counts in Redis, shared by all processes and machines that use it."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, cast

from langchain_quota.errors import QuotaStoreError
from langchain_quota.reservation import Grant, Reservation
from langchain_quota.stores import (
    IDLE_TTL,
    KeyUse,
    check_keys,
    check_reservation,
    idle_seconds,
)
from langchain_quota.stores.redis_clients import (
    FAILURES,
    OUT_OF_REACH,
    TIMEOUTS,
    AsyncClient,
    NoScriptError,
    SyncClient,
    clients,
    scrub,
)
from langchain_quota.stores.redis_script import SCRIPT, SHA, Names, Question, grant, uses

PREFIX = "langchain_quota"
"""What all keys begin with, unless told otherwise."""

_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_AT_ONCE = 500
"""How many keys a listing asks for at once."""
_SHOWN = 200
"""How many bytes of a name are logged: others may have written it."""

logger = logging.getLogger("langchain_quota")


class RedisStore:
    """A `QuotaStore` in Redis, for all processes and machines that use the same prefix.

    Each operation is one run of one script, in one round trip; a settlement that has something to
    undo takes a second one. All keys of a prefix have one hash tag: in Redis Cluster a prefix
    lives in one slot, on one node. Every key expires. Counts are exact up to 2^53 - 1, and as
    durable as Redis is: its `maxmemory-policy` must be `noeviction`, and counts survive its
    restart only if it persists them.

    Args:
        source: A URL as redis-py knows them: `redis://`, `rediss://` for TLS or `unix://`, with
            user and password percent-encoded; `None` for that in the environment variable
            `LANGCHAIN_QUOTA_REDIS_URL`. Or a client of your own, of one server or of a cluster,
            which keeps its timeouts and retries: one of `redis` serves the sync form, one of
            `redis.asyncio` the async form, on its own event loop.
        prefix: What all keys begin with, `[A-Za-z0-9_.-]{1,64}`. Stores with different prefixes
            share nothing.
        timeout: How long an operation may take, in seconds above 0: an async one in all, a sync
            one whenever it waits for the network. Nothing is tried twice.
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

    def reserve(self, reservation: Reservation) -> Grant:
        """Admit each call of a batch against all of its limits; see `QuotaStore.reserve`."""
        question = self._reservation(reservation)
        with self._failing():
            client = self._clients.sync()
            answer = _ask(client, question)
            while question.again(answer):
                answer = _ask(client, question)
        return grant(answer, reservation)

    async def areserve(self, reservation: Reservation) -> Grant:
        """`reserve`, without blocking the event loop."""
        question = self._reservation(reservation)
        async with self._turn() as client:
            answer = await _aask(client, question)
            while question.again(answer):
                answer = await _aask(client, question)
        return grant(answer, reservation)

    def peek(self, keys: Sequence[str]) -> tuple[KeyUse | None, ...]:
        """What is kept under keys, in their order; `None` where nothing is."""
        check_keys(keys)
        if not keys:
            return ()
        with self._failing():
            answer = _ask(self._clients.sync(), Question.peek(self._names, keys))
        return _peeked(keys, answer)

    async def apeek(self, keys: Sequence[str]) -> tuple[KeyUse | None, ...]:
        """`peek`, without blocking the event loop."""
        check_keys(keys)
        if not keys:
            return ()
        async with self._turn() as client:
            answer = await _aask(client, Question.peek(self._names, keys))
        return _peeked(keys, answer)

    def reset(self, keys: Sequence[str]) -> None:
        """Set counts to 0, and keep the keys; see `QuotaStore.reset`."""
        check_keys(keys)
        if keys:
            with self._failing():
                _ask(self._clients.sync(), Question.reset(self._names, keys, self._idle))

    async def areset(self, keys: Sequence[str]) -> None:
        """`reset`, without blocking the event loop."""
        check_keys(keys)
        if keys:
            async with self._turn() as client:
                await _aask(client, Question.reset(self._names, keys, self._idle))

    def usages(self, pattern: str = "*") -> list[KeyUse]:
        """What is kept under the keys that match a glob pattern, sorted by key.

        Redis is asked for some at a time, and works for others in between: a count that is made
        or removed meanwhile may be missing. What others have written there, and is no count, is
        left out and logged; `listing` has its names.

        Args:
            pattern: As of Python's `fnmatch.fnmatchcase`.

        Raises:
            QuotaStoreError: Redis failed, or did not answer in time.
            TypeError: The store was given a client of `redis.asyncio`.
        """
        found, odd = self.listing(pattern)
        if odd:
            first = odd[0][:_SHOWN]
            logger.warning("%r: keys that hold no count: %d, such as %r", self, len(odd), first)
        return found

    def listing(self, pattern: str = "*") -> tuple[list[KeyUse], list[bytes]]:
        """As `usages`, and the names in Redis of what matches and is no count, sorted.

        Args:
            pattern: As of Python's `fnmatch.fnmatchcase`.

        Raises:
            QuotaStoreError: Redis failed, or did not answer in time.
            TypeError: The store was given a client of `redis.asyncio`.
        """
        # Redis reads classes and escapes in a way of its own.
        simple, *rest = re.split(r"[\[\\]", pattern, maxsplit=1)
        found: dict[str, KeyUse] = {}
        odd: set[bytes] = set()
        with self._failing():
            client = self._clients.sync()
            match = self._names.count(simple + ("*" if rest else ""))
            names = client.scan_iter(match=match, count=_AT_ONCE)
            while some := [*islice(names, _AT_ONCE)]:
                keys = []
                for name in some:
                    try:
                        key = self._names.key(name)
                    except UnicodeDecodeError:
                        if fnmatchcase(self._names.key(repr(name)[2:-1]), pattern):
                            odd.add(name)
                    else:
                        if fnmatchcase(key, pattern):
                            keys.append(key)
                if keys:
                    counts, others = uses(keys, _ask(client, Question.peek(self._names, keys)))
                    found |= counts
                    odd.update(map(self._names.count, others))
        return [found[key] for key in sorted(found)], sorted(odd)

    def close(self) -> None:
        """Close the connections of the sync form; a client of your own stays open."""
        self._clients.close()

    async def aclose(self) -> None:
        """Close the connections of the running event loop, and those of the sync form.

        An event loop that ends as `asyncio.run` ends it closes its connections by itself.
        """
        self._clients.close()
        await self._clients.aclose()

    def _reservation(self, reservation: Reservation) -> Question:
        check_reservation(reservation)
        return Question.reserve(self._names, reservation, self._idle)

    @asynccontextmanager
    async def _turn(self) -> AsyncGenerator[AsyncClient]:
        """The running event loop's client, for one operation within the timeout."""
        with self._failing():
            async with asyncio.timeout(self._timeout):
                client, turn = await self._clients.running()
                async with turn:
                    yield client

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn what fails into a `QuotaStoreError`.

        Raises:
            QuotaStoreError: It failed.
        """
        try:
            yield
        except FAILURES as error:
            scrub(error, self._clients.secrets)
            timed_out = isinstance(error, TIMEOUTS)
            reason = f"{type(error).__name__}: {error}"
            if timed_out:
                reason = f"no answer within {self._timeout} s"
            if isinstance(error, OUT_OF_REACH):
                reason = (
                    f"{reason.rstrip('.')}: check that Redis runs there and that the URL is right"
                )
            raise QuotaStoreError(f"{self!r}: {reason}", timed_out=timed_out) from error


def _peeked(keys: Sequence[str], answer: Sequence[int]) -> tuple[KeyUse | None, ...]:
    """What is kept under keys, in their order.

    Raises:
        QuotaStoreError: Under one of them something else is kept.
    """
    found, odd = uses(keys, answer)
    if odd:
        raise QuotaStoreError(f"no count is kept under {odd[0]!r}")
    return tuple(map(found.get, keys))


def _ask(client: SyncClient, question: Question) -> list[Any]:
    try:
        answer = client.evalsha(SHA, *question.arguments())
    except NoScriptError:
        answer = client.eval(SCRIPT, *question.arguments())
    return cast("list[Any]", answer)


async def _aask(client: AsyncClient, question: Question) -> list[Any]:
    try:
        answer = await client.evalsha(SHA, *question.arguments())
    except NoScriptError:
        answer = await client.eval(SCRIPT, *question.arguments())
    return cast("list[Any]", answer)
