"""Fixtures for all tests: telemetry of each test's own, so that tests cannot see each other."""

import os

# No proxy and no setting of telemetry reaches a test. Some are read when a package is imported.
for name in [*os.environ]:
    if name.startswith(
        ("OTEL_", "PROMETHEUS_", "LANGSMITH_", "LANGCHAIN_", "LANGFUSE_")
    ) or name.lower() in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        del os.environ[name]

import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from socketserver import BaseServer
from typing import TYPE_CHECKING

import pytest

from langchain_quota import PostgresStore
from tests import examples  # noqa: F401 - it sets how property tests draw
from tests.certificates import Certificate, make_certificate
from tests.server.redis import RedisServer, running_redis
from tests.stores import Passing
from tests.telemetry import Signals, telling

if TYPE_CHECKING:  # it needs psycopg
    from tests.server.postgres import PostgresServer

# A server that a test closes ends at once: by default it looks every half a second whether to end.
BaseServer.serve_forever.__defaults__ = (0.01,)

REST = [Path(__file__).parent / name for name in ("server", "artefact")]
QUICK = {"test_charges.py", "test_providers.py"}
"""Tests there that need none."""
WAITING = {"test_alerts.py"}
"""Tests that wait for most of a minute, and leave the processor to others meanwhile."""


def is_rest(path: Path) -> bool:
    """Whether all tests of a file are left to `make test-all`."""
    return path.name not in QUICK and any(each in path.parents for each in REST)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import nothing of what `make test` leaves out: that took a third of its start."""
    return (config.option.markexpr == "not rest" and is_rest(collection_path)) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave what needs a server to `make test-all`, and begin with what waits longest."""
    items.sort(key=lambda item: item.path.name not in WAITING)
    for item in items:
        if is_rest(item.path):
            item.add_marker("rest")


def pytest_collection_finish() -> None:
    """Collect garbage seldom, and never what is imported: that took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


@pytest.fixture
def signals() -> Signals:
    """Telemetry on a fresh registry and tracer provider."""
    return telling()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Passing:
    """The time of stores, which passes while calls wait."""
    return Passing(monkeypatch)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server; the tests of a module share it, each with a prefix of its own."""
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of the test's own, which knows what it knew when it is started again."""
    options = ("--appendonly", "yes", "--appendfsync", "always")
    with running_redis(tmp_path / "redis", *options) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> "Iterator[PostgresServer]":
    """A PostgreSQL server; all tests share it, each with a database of its own."""
    from tests.server.postgres import running_postgres  # noqa: PLC0415 - it needs psycopg

    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_url(postgres_server: "PostgresServer") -> str:
    """The URL of a database with the store's table; tests have prefixes of their own."""
    url = postgres_server.database()
    with closing(PostgresStore(url, timeout=60)) as store:
        store.setup()
    return url


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certificate]:
    """Self-signed certificates for a server on 127.0.0.1, for a client, and for a stranger."""
    directory = tmp_path_factory.mktemp("certificates")
    return {name: make_certificate(directory, name) for name in ("server", "client", "other")}
