"""What the page about customers says of the rights of a user of Redis."""

import asyncio
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from langchain_quota import RedisStore
from langchain_quota.cli import main
from langchain_quota.core.admission import Correction
from langchain_quota.errors import QuotaStoreError
from tests.server.redis import RedisServer
from tests.server.stores import batch, calls, correcting
from tests.server.test_cluster import nodes  # noqa: F401 - a fixture

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "customers.md").read_text().split())
SECRET = "a-secret-of-the-tests"  # noqa: S105 - of a server that lives for a test
OF_CONNECTIONS = {"hello", "auth", "info", "config|resetstat", "client|setinfo"}
"""What clients say that are connected, and what the test asks itself."""

[(KEYS, WORDS)] = re.findall(r"ACL SETUSER quota on >\S+ (\S+) ((?:\+\w+ )+)", PAGE)
COUNT = "search:user_id:ann"
COMMANDS = [each.removeprefix("+") for each in WORDS.split()]


def use_all_of_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a store and the command ask of Redis."""
    with closing(RedisStore(url, timeout=30)) as store:
        lost = calls(COUNT, 1)
        store.acquire(lost)
        store.acquire(correcting(Correction(lost.attempt_id, attempt_id=lost.attempt_id)))
        store.peek([COUNT])
        asyncio.run(store.aacquire(calls(COUNT, 1)))
        # What is only held is given back by the reset.
        store.acquire(batch({COUNT: 1}, leases={COUNT: 900}))
    monkeypatch.setenv("LANGCHAIN_QUOTA_REDIS_URL", url)
    assert main(["quotas", "show"]) == 0
    assert main(["quotas", "reset", "--yes"]) == 0


def test_the_rights_are_those_that_are_used(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user with the page's rights can do all, and each is needed; the password is a variable."""
    password = f'{SECRET}: @/?#%20&é"\\'
    monkeypatch.setenv("LANGCHAIN_QUOTA_REDIS_PASSWORD", password)
    assert re.findall(r"need `\+(\w+)`", PAGE) == ["scan"]
    with redis_server.client() as client:
        rights = (f">{password}", KEYS, *(f"+{each}" for each in [*COMMANDS, "scan"]))
        client.execute_command("ACL", "SETUSER", "quota", "on", *rights)
        client.config_resetstat()
        use_all_of_it(f"redis://quota@127.0.0.1:{redis_server.port}", monkeypatch)
        statistics: Any = client.info("commandstats")
    used = {each.removeprefix("cmdstat_") for each in statistics} - OF_CONNECTIONS
    assert used == {*COMMANDS, "scan"}


def test_another_database_needs_a_further_right(redis_server: RedisServer) -> None:
    """With `+select`, and not without it, a URL may name another database than 0."""
    assert "A database other than 0 needs `+select`" in PAGE
    url = f"redis://other:{SECRET}@127.0.0.1:{redis_server.port}/1"
    with redis_server.client() as client, closing(RedisStore(url, timeout=30)) as store:
        client.execute_command("ACL", "SETUSER", "other", "on", f">{SECRET}", KEYS, *WORDS.split())
        with pytest.raises(QuotaStoreError, match="select"):
            store.acquire(calls("search", 1))
        client.execute_command("ACL", "SETUSER", "other", "+select")
        assert store.acquire(calls("search", 1)).admitted == (True,)


def test_a_cluster_needs_further_rights(nodes: list[RedisServer]) -> None:  # noqa: F811 - the fixture
    """With the page's further rights, and not without them, a client can use a cluster."""
    [keys] = re.findall(r"the keys of all prefixes, such as `(\S+)`", PAGE)
    [further] = re.findall(r"A client of a cluster needs `([^`]+)`", PAGE)
    who: Any = {"username": "quota", "password": SECRET}

    def allow(*rules: str) -> None:
        for node in nodes:
            with node.client() as client:
                client.execute_command("ACL", "SETUSER", "quota", *rules)

    async def acquire() -> int:
        async with redis.asyncio.RedisCluster("127.0.0.1", nodes[0].port, **who) as client:
            store = RedisStore(client, prefix="tenant.acme", timeout=60)
            return (await store.aacquire(calls("search", 1))).used["search"]

    allow("on", f">{SECRET}", *WORDS.split(), keys)
    with pytest.raises(redis.RedisClusterException):
        redis.RedisCluster("127.0.0.1", nodes[0].port, **who)
    allow(*further.split())
    with closing(redis.RedisCluster("127.0.0.1", nodes[0].port, **who)) as client:
        RedisStore(client, prefix="tenant.acme", timeout=60).acquire(calls("search", 1))
    assert asyncio.run(acquire()) == 1
