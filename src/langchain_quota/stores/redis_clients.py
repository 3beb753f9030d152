"""Clients of Redis: one for all threads, and one for each event loop."""

import asyncio
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast
from urllib.parse import parse_qs, quote, urlsplit

try:
    import redis
    import redis.asyncio
    from redis import exceptions
    from redis.asyncio.retry import Retry as AsyncRetry
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        'RedisStore needs the package redis: pip install "langchain-quota[redis]"',
        name=missing.name,
    ) from missing

from langchain_quota.runtime.event_loops import Batch
from langchain_quota.runtime.store_errors import UNREADABLE
from langchain_quota.runtime.sync_async import PerLoop, current_mode
from langchain_quota.stores.grants import logger
from langchain_quota.stores.redis_script import Script
from langchain_quota.stores.server import URL_VARIABLE, Server

PASSWORD_VARIABLE = "LANGCHAIN_QUOTA_REDIS_PASSWORD"  # noqa: S105 - its name
"""The environment variable with the password of a URL that has none."""

_PROTOCOL = 2
"""With 3, redis-py listens for notifications, and does not see that an idle connection is dead."""

_CONNECTIONS = 32
"""Most connections, for all threads and for each event loop; other operations wait."""

# Otherwise every connection reads the version of redis from a file, on the event loop.
_DRIVER = {"driver_info": redis.DriverInfo()} if hasattr(redis, "DriverInfo") else {}

_REMEDIES = {
    "WRONGTYPE": "others wrote a key under its prefix: `langchain-quota quotas show` names it",
    "'maxmemory'": "the server is full: raise its maxmemory, or lower idle_ttl=…",
    "max number of clients": "raise the server's maxclients, or run fewer processes",
    "read only replica": "name the primary, or give RedisStore a client of Sentinel's master_for",
}
"""What helps against an error, by what the server says in it."""

SyncClient = redis.Redis | redis.RedisCluster
AsyncClient = redis.asyncio.Redis | redis.asyncio.RedisCluster

_Pool = TypeVar("_Pool", bound=redis.ConnectionPool | redis.asyncio.ConnectionPool)


def clients(source: object, timeout: float) -> "Clients":
    """Return the clients of a source; a thread waits for a connection until the timeout."""
    if isinstance(source, SyncClient | AsyncClient):
        return _UserClients(source)
    url = os.environ.get(URL_VARIABLE) if source is None else source
    if not url:
        raise ValueError(
            f"no URL of Redis was given, and {URL_VARIABLE} is not set: give one, such as "
            "redis://127.0.0.1:6379/0, or set the variable"
        )
    if not isinstance(url, str):
        # The value is not shown: it may have a password.
        raise TypeError(
            "source must be a URL, a client of redis or redis.asyncio, or None, not a "
            f"{type(url).__name__}"
        )
    return _OwnedClients(url, timeout)


class Clients(Server, ABC):
    """The clients of a server, or of a cluster."""

    serving = ("a URL, or a client of redis", "a URL, or a client of redis.asyncio")
    unreadable = (exceptions.InvalidResponse, *Server.unreadable)
    timeouts = (exceptions.TimeoutError, TimeoutError)
    failed = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
    has_warned = False

    @abstractmethod
    async def opened(self) -> Any:
        """Return a client that runs scripts in the current mode; an async one awaits replies."""

    async def run(self, script: Script, arguments: Sequence[int | bytes | str]) -> object:
        """Run a script, load it first if the server does not know it, and return the reply."""
        client = await self.opened()
        try:
            reply = await _awaited(client.evalsha(script.sha, *arguments))
        except exceptions.NoScriptError:
            reply = await _awaited(client.eval(script.text, *arguments))
        except UNREADABLE as error:
            # The client could not read the reply. Elsewhere such an error is a fault of ours.
            raise exceptions.InvalidResponse(f"{type(error).__name__}: {error}") from error
        if not self.has_warned:
            await self.warn_of_eviction()
        return reply

    async def warn_of_eviction(self) -> None:
        """Warn of a server that may evict counts, if its user may ask it."""
        self.has_warned, client = True, await self.opened()
        with suppress(*self.failed):
            reply = await _awaited(client.eval("return redis.call('INFO', 'memory')", 0))
            policy = re.search("maxmemory_policy:([a-z-]+)", str(reply))
            if policy and policy[1] != "noeviction":
                logger.warning(
                    "%s has maxmemory-policy %s: Redis may evict counts, and quotas are reset: "
                    "set it to noeviction",
                    *(self.name, policy[1]),
                )

    def remedies(self, error: BaseException) -> Sequence[str]:
        """Return what helps against a failure, if that is known."""
        if isinstance(error, exceptions.MovedError):
            return (
                "the server is one node of a Redis Cluster, and another node has the key",
                "give RedisStore a client of the cluster, such as redis.asyncio.RedisCluster",
                "give `langchain-quota quotas` the URL of that node",
            )
        if isinstance(error, exceptions.ClusterError) and "TTL exhausted" in str(error):
            return (
                "the slot of the prefix may be moving to another node, and works when it has moved",
                "move slots atomically, as Redis 8.4 and Valkey 9 can",
            )
        if isinstance(error, exceptions.MaxConnectionsError):
            return (
                "all connections of the client are in use",
                "give it more, by max_connections=…",
            )
        if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
            return ("check user and password: redis://user:password@host:port/number",)
        if isinstance(error, exceptions.NoPermissionError) or "user executing" in str(error):
            rights = "eval +evalsha +time +get +set +del +exists +hget +hgetall +hset +hmget +hdel"
            rights += " +hlen +expireat"
            return (f"its user needs ~{{prefix}}:* +{rights}, and to list counts +scan",)
        remedy = next((remedy for said, remedy in _REMEDIES.items() if said in str(error)), "")
        lost = isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError)
        if lost and not remedy:
            remedy = "check that Redis runs there and that the URL is right"
        return (remedy,) if remedy else ()


class _UserClients(Clients):
    """The user's own client, which the user closes; it has one of the two forms."""

    def __init__(self, client: SyncClient | AsyncClient) -> None:
        self.name = f"{type(client).__module__.split('.client')[0]}.{type(client).__name__}"
        self.secrets = _secrets(client.get_connection_kwargs())
        self.forms = ("async",) if isinstance(client, AsyncClient) else ("sync",)
        self._client: Any = client
        self._cluster = client if isinstance(client, redis.asyncio.RedisCluster) else None
        if isinstance(client, redis.asyncio.Redis):
            self._client = _PipeliningClient(client, client.connection_pool.max_connections)
        self._asking: asyncio.Task[object] | None = None

    async def opened(self) -> Any:
        # Without the nodes, redis-py sends first requests of a cluster to any node, and closes
        # connections that others use when these nodes answer that they do not have the key. The
        # client forgets the nodes when it is closed. Callers do not wait for connections: while a
        # node does not answer, its callers would keep the callers of other nodes waiting.
        cluster = self._cluster
        if cluster is not None and cluster.get_default_node() is None:
            loop, asking = asyncio.get_running_loop(), self._asking
            if asking is None or asking.done() or asking.get_loop() is not loop:
                # A caller who is cancelled, or whose time is over, does not end this task.
                asking = self._asking = loop.create_task(cluster.initialize())
                asking.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(asking)
        return self._client


class _PipeliningClient:
    """A client that sends the requests of one turn in pipelines, but one alone without."""

    # Permits bound the connections: without, callers fail when all are in use. The pool does not:
    # if a task is cancelled while it waits to give a connection back, the pool loses it.

    def __init__(self, client: redis.asyncio.Redis, connections: int) -> None:
        self.client = client
        self._permits = asyncio.Semaphore(connections)
        self._callers = 0
        self._next: Batch[tuple[Any, ...], object] | None = None

    async def eval(self, *arguments: Any) -> object:
        async with self._permits:
            return await self.client.eval(*arguments)

    async def evalsha(self, *arguments: Any) -> object:
        """Run a script that the server knows."""
        self._callers += 1
        try:
            if self._callers == 1:
                async with self._permits:
                    return await self.client.evalsha(*arguments)
            if self._next is None or not self._next.is_open:
                self._next = Batch(self._pipeline)
            return await self._next.answer(arguments)
        finally:
            self._callers -= 1

    async def _pipeline(self, take: Callable[[], Sequence[tuple[Any, ...]]]) -> list[object]:
        async with self._permits:
            pipeline = self.client.pipeline(transaction=False)
            for arguments in take():
                pipeline.evalsha(*arguments)
            return cast("list[object]", await pipeline.execute(raise_on_error=False))


class _OwnedClients(Clients):
    """Clients that are made of a URL."""

    def __init__(self, url: str, timeout: float) -> None:
        if not _is_url(url):
            scheme = re.match("[a-zA-Z]+://", url)
            raise ValueError(
                "the URL of Redis must be redis://[user:password@]host:port/number, the same with "
                "rediss://, or unix://[user:password@]/path, with options that redis-py knows"
                f"{f', not {scheme[0]}…' if scheme else ''}; percent-encode what is special in "
                "user and password"
            )
        self._url = url
        self._timeout = timeout
        pool = self._pool(redis.BlockingConnectionPool, Retry, _CONNECTIONS, timeout)
        pool.timeout = timeout
        self._sync = redis.Redis.from_pool(pool)
        self._loops = PerLoop(self._of_loop, self._end)
        self.secrets = (url, *_secrets(pool.connection_kwargs))
        self.name = re.sub("^([^/]*//).*@", r"\1", url.partition("?")[0])

    async def opened(self) -> Any:
        return await self._loops.get() if current_mode() else self._sync

    def close(self) -> None:
        self._sync.close()
        self._sync.connection_pool.disconnect()

    async def aclose(self) -> None:
        await self._loops.close()

    def _of_loop(self) -> _PipeliningClient:
        # The store has its own timeout: the client's would ignore that the event loop was blocked.
        pool = self._pool(redis.asyncio.ConnectionPool, AsyncRetry, 2**31, None)
        return _PipeliningClient(redis.asyncio.Redis.from_pool(pool), _CONNECTIONS)

    async def _end(self, pipelining: _PipeliningClient) -> None:
        # A server that is gone does not answer when TLS is closed.
        async with asyncio.timeout(self._timeout):
            await pipelining.client.aclose()

    def _pool(
        self, kind: type[_Pool], retry: type[Retry | AsyncRetry], most: int, seconds: float | None
    ) -> _Pool:
        # The URL's own password replaces that of the options.
        password = os.environ.get(PASSWORD_VARIABLE) or None
        options = {"max_connections": most, "protocol": _PROTOCOL, "password": password}
        pool = cast("_Pool", kind.from_url(self._url, **options))
        pool.connection_kwargs |= _DRIVER | {
            "socket_timeout": seconds,
            "socket_connect_timeout": seconds,
            "retry": retry(NoBackoff(), 0),
        }
        return pool


async def _awaited(reply: object) -> object:
    return await reply if isinstance(reply, Awaitable) else reply


def _is_url(url: str) -> bool:
    """Return whether redis-py reads a URL, and takes no part of the password for something else."""
    # redis-py's own errors quote what they do not understand.
    try:
        pool = redis.ConnectionPool.from_url(url)
        pool.connection_class(**pool.connection_kwargs)
        parts = urlsplit(url)
        if parts.query:
            parse_qs(parts.query, strict_parsing=True)
    except Exception:  # noqa: BLE001 - no error may be shown: it may quote the URL
        return False
    if parts.scheme == "unix":
        is_place = bool(parts.path) and "@" not in parts.path
    else:
        is_place = bool(parts.hostname and re.fullmatch(r"/?[0-9]*", parts.path))
    return is_place and not parts.fragment


def _secrets(options: Mapping[str, object]) -> tuple[str, ...]:
    password = options.get("password")
    return (password, quote(password, safe="")) if isinstance(password, str) and password else ()
