"""The base of stores in a server: keys of operations, timeouts, and errors with remedies."""

import asyncio
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from textwrap import shorten
from typing import Any
from weakref import ref

from langchain_quota.core.admission import AcquireRequest, AcquireResult
from langchain_quota.runtime.arguments import validate_type
from langchain_quota.runtime.event_loops import Ticker
from langchain_quota.runtime.store_errors import UNREADABLE, EventLoopBlockedError, QuotaStoreError
from langchain_quota.runtime.sync_async import T, current_mode
from langchain_quota.stores.base import Operation
from langchain_quota.stores.counts import check_request, idle_seconds
from langchain_quota.stores.grants import SupportsGrants
from langchain_quota.stores.keys import Prefix, check_prefix, keys_of, prefix_of

PREFIX = "langchain_quota"
"""What all keys begin with, by default."""

URL_VARIABLE = "LANGCHAIN_QUOTA_REDIS_URL"
"""The environment variable with the URL of Redis."""

_REASON, _SHORT = 300, 4
"""How much of a client's error is shown, which may quote a reply; how long a secret is at least."""

_MAX_TIMEOUT = 86_400  # seconds, a day

ANOTHER_FORM = (
    ", but what others or an older edition of this package wrote: delete it, or give the store "
    "another prefix"
)
"""What the error of a row says that is not read."""


def unreadable(kind: str, name: str) -> QuotaStoreError:
    """Return the error for a row that others have written, or an older edition."""
    verb = "are" if kind.endswith("s") else "is"
    return QuotaStoreError(f"no {kind} {verb} kept under {name!r}{ANOTHER_FORM}")


class Server:
    """The way to a server: a user's own client of it, or clients that are made."""

    name: str
    forms: Sequence[str] = ("sync", "async")
    secrets: Sequence[str] = ()
    serving: tuple[str, str]
    """What a store is given to serve the sync form, and the async form."""
    unreadable: tuple[type[BaseException], ...] = UNREADABLE
    timeouts: tuple[type[BaseException], ...]
    failed: tuple[type[BaseException], ...]
    """All that clients raise when the server fails."""

    def remedies(self, _: BaseException) -> Sequence[str]:
        """Return what helps against a failure, if that is known."""
        return ()

    def close(self) -> None:
        """Close the connections of the sync form; those of a user's own client stay open."""

    async def aclose(self) -> None:
        """Close those of the running event loop."""


class ServerStore(SupportsGrants):
    """A store in a server; a subclass knows how an operation is made there."""

    _server: Server

    def __init__(self, prefix: Prefix, timeout: float, idle_ttl: timedelta) -> None:
        validate_type("prefix", prefix, str | Callable, "a string or a function")
        if isinstance(prefix, str):
            check_prefix("prefix", prefix)
        self.prefix = prefix
        self._idle = idle_seconds(idle_ttl)
        validate_type("timeout", timeout, int | float, "a number")
        # Sockets count their milliseconds in 32 bits: more than 24 days would be none, or fail.
        if not 0 < timeout <= _MAX_TIMEOUT:
            raise ValueError(f"timeout must be above 0 and at most {_MAX_TIMEOUT}, not {timeout!r}")
        self._timeout = timeout
        # Its event loop keeps it while it ticks, and ends with it.
        self._ticker: Callable[[], Ticker | None] = lambda: None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._server.name}, prefix={self.prefix!r})"

    @property
    def server(self) -> str:
        """The kind of the server and its address, such as `redis cache:6379`: no secret."""
        kind, _, place = self._server.name.partition("://")
        return f"{kind} {place.rpartition('@')[2].partition('/')[0]}".strip()

    @property
    def forms(self) -> Sequence[str]:
        """The forms that it serves: `"sync"`, `"async"`; a client of your own has one of them."""
        return self._server.forms

    def close(self) -> None:
        """Close the connections of the sync form; a client or pool of your own stays open."""
        self._server.close()

    async def aclose(self) -> None:
        """Close the connections of the running event loop, and those of the sync form.

        `asyncio.run` closes them by itself when it ends its event loop.
        """
        self._server.close()
        await self._server.aclose()

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        """`acquire`, without blocking the event loop."""
        check_request(request)
        prefix = self._prefix_of(request)
        return await self._in_time(lambda: self._admit(prefix, request))

    async def _run(
        self, keys: Sequence[str], operation: Operation[T], *, reads: bool = False
    ) -> list[T]:
        results = []
        for prefix, some in self._by_prefix(keys).items() if keys else ():
            work = partial(self._change, prefix, operation, some, reads=reads)
            results.append(await self._in_time(work))
        return results

    def _keys(self, kind: str, pattern: str) -> Iterator[str]:
        if not isinstance(self.prefix, str):
            raise ValueError(  # noqa: TRY004 - it is no wrong type
                "the prefix of this store is a function: list the keys of one prefix with "
                f"{type(self).__name__}(…, prefix='acme')"
            )
        return self._scan(self.prefix, kind, pattern)

    @abstractmethod
    async def _admit(self, prefix: str, request: AcquireRequest) -> AcquireResult:
        """Acquire; a failure of the server is raised as its client raises it."""

    @abstractmethod
    async def _change(
        self, prefix: str, operation: Operation[T], keys: Sequence[str] = (), *, reads: bool = False
    ) -> T:
        """Run another operation on the rows that it needs, and write what it changes."""

    @abstractmethod
    def _scan(self, prefix: str, kind: str, pattern: str) -> Iterator[str]:
        """Return the keys of a kind that match, and maybe others."""

    def _prefix_of(self, request: AcquireRequest) -> str:
        if isinstance(self.prefix, str):
            return self.prefix
        first, *rest = self._by_prefix(keys_of(request)).items() or [(PREFIX, [])]
        if rest:
            raise ValueError(f"a request must have one prefix: {first[1][0]!r}, {rest[0][1][0]!r}")
        return first[0]

    def _by_prefix(self, keys: Sequence[str]) -> Mapping[str, Sequence[str]]:
        if isinstance(self.prefix, str):
            return {self.prefix: keys}
        keys_by_prefix: dict[str, list[str]] = {}
        for key in keys:
            check_prefix(f"what stands before the slash of {key!r}", prefix_of(key))
            keys_by_prefix.setdefault(prefix_of(key), []).append(key)
        return keys_by_prefix

    async def _in_time(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do some work with the server, in time; if that fails, it is a QuotaStoreError."""
        server, mode = self._server, current_mode()
        wanted = "async" if mode else "sync"
        if wanted not in server.forms:
            raise TypeError(
                f"{server.name} serves no {wanted} calls: give {type(self).__name__} "
                f"{server.serving[bool(mode)]}"
            )
        blocked = 0.0
        try:
            if not mode:
                return await work()
            ticker = self._ticker()
            if ticker is None or ticker.loop is not asyncio.get_running_loop():
                ticker = Ticker(self._timeout)
                self._ticker = ref(ticker)
            before = ticker.blocked
            async with asyncio.timeout(None) as timeout:
                ticker.add(timeout)
                try:
                    return await work()
                finally:
                    ticker.remove(timeout)
                    blocked = ticker.blocked - before
        except server.failed as error:
            raise self._failure(error, blocked) from error

    def _read_by(self, read: Callable[..., T], *given: Any) -> T:
        """Return what is read of the server's reply; a `QuotaStoreError` if it is unreadable."""
        try:
            return read(*given)
        except self._server.unreadable as error:
            raise self._failure(error) from error

    def _failure(self, error: BaseException, blocked: float = 0) -> QuotaStoreError:
        """Return the error for a failure, when the event loop was blocked for some seconds."""
        server = self._server
        _redact(error, server.secrets)
        timed_out = isinstance(error, server.timeouts)
        first = str(error).partition("\n")[0][: 2 * _REASON]
        reason = shorten(f"{type(error).__name__}: {first}", _REASON, placeholder="…")
        if isinstance(error, server.unreadable):
            reason = f"an unreadable reply, {reason}"
        if timed_out:
            reason = f"no answer within {self._timeout} s"
        if timed_out and blocked > self._timeout / 2:
            return EventLoopBlockedError(
                f"{self!r}: {reason}, and the event loop was blocked for {blocked:.1f} s "
                "meanwhile: move what blocks it to a thread",
                timed_out=True,
            )
        reason = ": ".join([reason.rstrip(".: "), *server.remedies(error)])
        return QuotaStoreError(f"{self!r}: {reason}", timed_out=timed_out)


def _redact(error: BaseException, secrets: Sequence[str]) -> None:
    """Remove secrets from the texts of an exception and of its causes."""
    # A server that does not know a command may quote it, with the password in it.
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        cause.args = tuple(_scrubbed(arg, secrets) for arg in cause.args)
        cause = cause.__cause__ or cause.__context__


def _scrubbed(value: object, secrets: Sequence[str]) -> object:
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, str):
        for secret in secrets:
            # A short one may be a part of every other word.
            before, behind = (r"(?<!\w)", r"(?!\w)") if len(secret) < _SHORT else ("", "")
            value = re.sub(f"{before}{re.escape(secret)}{behind}", "***", value)
    return value
