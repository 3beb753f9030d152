"""Every kind of store, whose time passes as a test says."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
from redis import Redis

from langchain_quota import MemoryStore, PostgresStore, RedisStore
from tests.server.postgres import PostgresServer, time_of
from tests.server.redis import RedisServer, let_pass, time_from
from tests.stores import Clock

Store = MemoryStore | RedisStore | PostgresStore


class Stores:
    """Makes stores of one kind with one clock, which stands still from the first `wait` on."""

    def __init__(self, place: "Place", opened: ExitStack, start: float) -> None:
        self._server, self._url, self._opened = place.server, place.url, opened
        self.clock = Clock(start)
        self._client: Redis | None = None
        self._stands_still = False

    def __call__(self, *, idle_ttl: timedelta = timedelta(days=365)) -> Store:
        if self._server is None:
            return MemoryStore(idle_ttl=idle_ttl, clock=self.clock)
        kind = RedisStore if isinstance(self._server, RedisServer) else PostgresStore
        # The machine may be busy: only what is about timeouts has short ones.
        store = kind(self._url, prefix=self._server.prefix(), timeout=60, idle_ttl=idle_ttl)
        self._opened.callback(store.close)
        return store

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        if not self._stands_still:
            self._stands_still = True
            if isinstance(self._server, PostgresServer):
                self._opened.enter_context(time_of(self.clock))
            elif self._server is not None:
                self._opened.enter_context(time_from("now"))
                self._client = self._opened.enter_context(self._server.client())
        if self._client is None:
            self.clock.now += seconds
        else:
            let_pass(self._client, "now", self.clock, seconds)


class Place:
    """Where stores of one kind are.

    Args:
        server: The server that they are in; `None` for memory.
        url: How it is reached.
    """

    def __init__(self, server: RedisServer | PostgresServer | None = None, url: str = "") -> None:
        self.server, self.url = server, url

    @contextmanager
    def stores(self, start: float | None = None) -> Iterator[Stores]:
        """What makes stores, whose time begins now, or when a test says."""
        if isinstance(self.server, RedisServer):
            with self.server.client() as client:
                client.flushall()
        with ExitStack() as opened:
            yield Stores(self, opened, time.time() if start is None else start)


@pytest.fixture(scope="module", params=["memory", "redis", "postgres"])
def place(request: pytest.FixtureRequest) -> Place:
    """Where stores of each kind are."""
    get, kind = request.getfixturevalue, request.param
    if kind == "memory":
        return Place()
    server = get(f"{kind}_server")
    return Place(server, server.url if kind == "redis" else get("postgres_url"))


@pytest.fixture
def make(place: Place) -> Iterator[Stores]:
    """Makes stores of each kind."""
    with place.stores() as stores:
        yield stores


@pytest.fixture
def store(make: Stores) -> Store:
    """A store of each kind, with nothing in it."""
    return make()
