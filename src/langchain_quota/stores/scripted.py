"""Stores in a server that runs a script for each operation: all but how it is reached."""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from langchain_quota.admission import AcquireRequest, AcquireResult
from langchain_quota.arguments import check_type
from langchain_quota.concurrency import Form, now
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores import QuotaUsage, wire
from langchain_quota.stores.common import check_keys, check_request, idle_seconds, keys_of
from langchain_quota.stores.grants import Grant, Granting
from langchain_quota.stores.keys import check_prefix, prefix_of
from langchain_quota.stores.rate_limiter import RateLimiting

PREFIX = "langchain_quota"
"""What all keys begin with, by default."""

_AT_ONCE = 500
"""How many keys a listing asks for at once."""

T = TypeVar("T")
Read = Callable[[object], T]
ReadOf = Callable[[Sequence[str], object], list[T]]


class ScriptedStore(Granting, RateLimiting):
    """A store in a server: an operation is one call of a script, of which a subclass knows how."""

    def __init__(self, prefix: str | Callable[[Any, Any], str], idle_ttl: timedelta) -> None:
        check_type("prefix", prefix, str | Callable, "a string or a function")
        if isinstance(prefix, str):
            check_prefix("prefix", prefix)
        self.prefix = prefix
        self._idle = idle_seconds(idle_ttl)

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

        The server is asked for some keys at a time, and serves others in between: a count that is
        made or removed meanwhile may be missing. Keys of others that hold no count are left out.

        Args:
            pattern: As in Python's `fnmatch.fnmatchcase`.

        Raises:
            QuotaStoreError: The store failed, or did not answer in time.
            TypeError: The store serves no sync calls.
        """
        found = dict(self._listed("count", pattern, "peek", wire.uses))
        return [use for _, use in sorted(found.items()) if use is not None]

    @abstractmethod
    async def _run(self, form: Form, script: str, prefix: str, ask: wire.Ask, read: Read[T]) -> T:
        """Run "acquire" or "operations", and read the answer: a failure is a QuotaStoreError."""

    @abstractmethod
    def _keys(self, kind: str, pattern: str) -> Iterator[str]:
        """The keys under which something of a kind is kept: all that match, and maybe others."""

    async def _acquire(self, form: Form, request: AcquireRequest) -> AcquireResult:
        check_request(request)
        keys = keys_of(request)
        first, *others = self._by_prefix(keys).items() or [(PREFIX, keys)]
        if others:
            raise ValueError(
                f"a request must have one prefix: {first[1][0]!r}, {others[0][1][0]!r}"
            )
        ask = partial(wire.acquire, request, self._idle)
        return await self._run(form, "acquire", first[0], ask, partial(wire.result, request))

    async def _peek(self, form: Form, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        check_keys(keys)
        found = dict(await self._operate(form, "peek", keys, wire.uses))
        for key, use in found.items():
            if use is None:
                raise QuotaStoreError(f"no count is kept under {key!r}")
        return tuple(map(found.get, keys))

    async def _reset(self, form: Form, keys: Sequence[str]) -> None:
        check_keys(keys)
        await self._operate(form, "reset", keys, wire.nothing)

    def _now(self) -> float:
        return time.time()

    async def _grant(self, form: Form, asked: Grant) -> tuple[Grant | None, bool]:
        told = wire.of_grant(asked)
        kept = await self._operate(form, "grant", [asked.key], wire.grants, **told)
        return kept[0] if kept else (None, False)

    async def _revoke(self, form: Form, key: str, name: str) -> Grant | None:
        named = wire.short(name)
        ended = await self._operate(form, "revoke", [key], wire.grants, name=named)
        return ended[0][0] if ended else None

    def _given(self, pattern: str) -> list[Grant]:
        found = self._listed("grants", pattern, "grants", wire.grants)
        return [*{(grant.key, grant.id): grant for grant, _ in found}.values()]

    async def _operate(
        self, form: Form, op: str, keys: Sequence[str], read: ReadOf[T], **more: Any
    ) -> list[T]:
        """What one step for each prefix of the keys answers."""
        found: list[T] = []
        for prefix, some in self._by_prefix(keys).items() if keys else ():
            ask = partial(wire.operation, op, some, more, self._idle)
            found += await self._run(form, "operations", prefix, ask, partial(read, some))
        return found

    def _listed(self, kind: str, pattern: str, op: str, read: ReadOf[T]) -> Iterator[T]:
        """What is read of the keys that match, some at a time."""
        if not isinstance(self.prefix, str):
            raise ValueError(  # noqa: TRY004 - it is no wrong type
                "the prefix of this store is a function: list the keys of one prefix with "
                f"{type(self).__name__}(…, prefix='acme')"
            )
        keys = (key for key in self._keys(kind, pattern) if fnmatchcase(key, pattern))
        while some := [*islice(keys, _AT_ONCE)]:
            yield from now(self._operate("", op, some, read))

    def _by_prefix(self, keys: Sequence[str]) -> dict[str, Sequence[str]]:
        if isinstance(self.prefix, str):
            return {self.prefix: keys}
        found: dict[str, list[str]] = {}
        for key in keys:
            check_prefix(f"what stands before the slash of {key!r}", prefix_of(key))
            found.setdefault(prefix_of(key), []).append(key)
        return {**found}
