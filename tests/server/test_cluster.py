"""A Redis Cluster of three nodes, whose tenants have prefixes; and the rights of users of Redis."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.crc import key_slot

from langchain_quota import ModelCallLimit, Quota, RedisStore, ToolCallLimit
from langchain_quota.cli import main
from langchain_quota.core.admission import Correction
from langchain_quota.errors import QuotaStoreError
from tests.scene import Scene, asking, recording, texts
from tests.server.prometheus import eventually
from tests.server.redis import RedisServer, running_redis
from tests.server.stores import batch, calls, correcting, used
from tests.telemetry import telling

NODES = 3
WORKERS = 4
TENANTS = [f"tenant-{number}" for number in range(12)]
LIMIT = 10
"""How many calls a tenant may make."""
RUNS = 3
"""How often each worker runs an agent for each tenant; each run asks for two calls."""
LIMITS: list[Any] = [
    ToolCallLimit(
        "email",
        run_limit=5,
        # Nothing was used in the window before.
        quotas=[Quota(LIMIT - 2, per="tenant", window=timedelta(days=7), rollover=2)],
    ),
    ModelCallLimit(thread_limit=1_000),
]
PAGE = " ".join((Path(__file__).parents[2] / "docs" / "stores.md").read_text().split())
[(KEYS, WORDS)] = re.findall(r"ACL SETUSER quota on >\S+ (\S+) ((?:\+\w+ )+)", PAGE)
SECRET = "a-secret-of-the-tests"  # noqa: S105 - of a server that lives for a test
OF_CONNECTIONS = {"hello", "auth", "info", "config|resetstat", "client|setinfo"}
"""What clients say that are connected, and what the test asks itself."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    """The nodes of a cluster, each with a third of the slots; most tests share it."""
    with cluster(tmp_path_factory) as found:
        yield found


@contextmanager
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    """Run a cluster. It works on when a node is down."""
    with ExitStack() as running:
        found: list[RedisServer] = []
        for number in range(NODES):
            directory = tmp_path_factory.mktemp("node")
            options = ("--cluster-enabled", "yes", "--cluster-config-file")
            made = running_redis(directory, *options, str(directory / "nodes"))
            server = running.enter_context(made)
            with server.client() as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
                first, last = (16384 * each // NODES for each in (number, number + 1))
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", str(first), str(last - 1))
                if found:
                    port = str(found[0].port)
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", port)
            found.append(server)
        eventually(lambda: all(map(_knows_all, found)))
        yield found


def _knows_all(server: RedisServer) -> bool:
    with server.client() as client:
        known: Any = client.execute_command("CLUSTER INFO")
        return known["cluster_state"] == "ok" and len(client.cluster("SLOTS")) == NODES


@pytest.fixture
def client(nodes: list[RedisServer]) -> Iterator[Any]:
    """A sync client of the cluster."""
    with closing(redis.RedisCluster("127.0.0.1", nodes[0].port)) as client:
        yield client


def store_of(client: Any, name: str) -> RedisStore:
    """A store whose prefix has the name of a test and that of the run's tenant."""
    return RedisStore(
        client, prefix=lambda _, runtime: f"{name}.{runtime.context['tenant']}", timeout=60
    )


def of_tenant(client: Any, name: str, tenant: str) -> RedisStore:
    """The store of one tenant, where no run's context says which."""
    return RedisStore(client, prefix=f"{name}.{tenant}", timeout=60)


def scene_of(store: RedisStore, *limits: Any, **options: Any) -> Scene:
    """An agent that asks for two emails in each run."""
    given = {"tools": ["email"], "checkpointer": None, **options}
    return Scene(telling(), asking("email", "email"), limits or LIMITS, store=store, **given)


async def test_workers_share_the_counts_of_tenants(nodes: list[RedisServer], client: Any) -> None:
    """4 workers ask for 24 emails of each of 12 tenants: 10 are sent, and all nodes have keys."""
    # These names put tenants on all nodes.
    name, sent = "test_workers_share_the_counts_of_tenants", list[str]()

    async def work(port: int) -> None:
        async with redis.asyncio.RedisCluster("127.0.0.1", port) as own:
            store = store_of(own, name)
            for _ in range(RUNS):
                await asyncio.gather(*(send_for(tenant, store) for tenant in TENANTS))

    async def send_for(tenant: str, store: RedisStore) -> None:
        email = recording("email", [], lambda: sent.append(tenant))
        who: Any = {"context": {"tenant": tenant}, "thread_id": f"of-{tenant}"}
        await scene_of(store, tools=[email], **who).play()

    await asyncio.gather(*(work(nodes[number % NODES].port) for number in range(WORKERS)))
    assert Counter(sent) == dict.fromkeys(TENANTS, LIMIT)
    for tenant in TENANTS:
        uses = of_tenant(client, name, tenant).usages()
        counts = {use.key.rpartition(":604800:")[0] or use.key: use.used for use in uses}
        assert {key: used for key, used in counts.items() if ":run:" not in key} == {
            f"email:tenant:{tenant}": LIMIT,
            f"model:thread:of-{tenant}": 2 * WORKERS * RUNS,
        }
    slots = [slots_of(node, name) for node in nodes]
    assert all(slots)
    assert sum(map(len, slots)) == len(TENANTS)


def slots_of(node: RedisServer, name: str) -> set[int]:
    """The slots that a node keeps for the tenants of a test: each tenant has one of its own."""
    with node.client() as client:
        keys = [*client.scan_iter(match=f"{{{name}.*", count=1_000)]
    slots = {*map(key_slot, keys)}
    assert len({key.partition(b"}")[0] for key in keys}) == len(slots)
    return slots


async def test_a_tenant_is_frozen(client: Any) -> None:
    """A freeze is in the slot of its prefix, which is named; other tenants' calls run on."""
    name = "test_a_tenant_is_frozen"
    scene = scene_of(store_of(client, name), form="sync")
    with pytest.raises(TypeError, match="prefix must be a string"):
        scene.quota.freeze(tenant=TENANTS[0])
    frozen, sent = {"tenant": TENANTS[0], "prefix": f"{name}.{TENANTS[0]}"}, list[int]()
    scene.quota.freeze(**frozen, by="ada")
    for tenant in TENANTS:
        await scene.play(context={"tenant": tenant}, thread_id=tenant)
        sent.append(len(scene.ran))
        assert [each.by for each in of_tenant(client, name, tenant).grants()] == (
            ["ada"] if tenant == TENANTS[0] else []
        )
    assert sent == [2 * number for number in range(len(TENANTS))]
    assert scene.quota.thaw(**frozen)
    await scene.play(context={"tenant": TENANTS[0]}, thread_id="8")
    assert len(scene.ran) == 2 * len(TENANTS)


async def test_a_first_caller_who_is_cancelled(nodes: list[RedisServer]) -> None:
    """Who waits for the client's first connection is not cancelled with who began it."""
    async with aclosing(redis.asyncio.RedisCluster("127.0.0.1", nodes[0].port)) as client:
        store = RedisStore(client, prefix=nodes[0].prefix(), timeout=60)
        first, *others = [asyncio.create_task(store.aacquire(calls("a", 1))) for _ in range(9)]
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert sorted(each.used["a"] for each in await asyncio.gather(*others)) == [*range(8)]


def test_the_sync_form(client: Any) -> None:
    """A sync client serves keys of several tenants, grants, undone attempts and resets."""
    name = "test_the_sync_form"
    store = store_of(client, name)
    keys = [f"{name}.{tenant}/email:tenant:{tenant}" for tenant in TENANTS]
    for key in keys:
        store.acquire(batch({key: LIMIT}))
    assert used(store, *keys) == [LIMIT] * len(TENANTS)
    granted = store.grant(keys[0], 3, reason="more")
    listed = of_tenant(client, name, TENANTS[0]).grants()
    assert [(each.id, each.amount) for each in listed] == [(granted.id, 3)]
    assert store.revoke(keys[0], granted.id) is not None
    store.reset(keys)
    assert used(store, *keys) == [0] * len(TENANTS)
    lost = batch(dict.fromkeys((f"a/key-{number}" for number in range(20)), 1))
    store.acquire(lost)
    undo = Correction("lost", {"a/late": 1}, attempt_id=lost.attempt_id)
    store.acquire(correcting(undo))
    assert used(store, "a/late", "a/key-0", "a/key-19") == [1, 0, 0]


def test_the_url_of_one_node(nodes: list[RedisServer]) -> None:
    """Where another node has the key, the error says to give a client of the cluster."""

    def failure(alone: RedisStore, key: str) -> str:
        try:
            alone.peek([key])
        except QuotaStoreError as error:
            return str(error)
        return ""

    with closing(RedisStore(nodes[0].url, prefix=lambda *_: "a", timeout=60)) as alone:
        said = {failure(alone, f"{tenant}/email:thread:7") for tenant in TENANTS}
    assert "" in said
    assert len(said) > 1
    assert all("give RedisStore a client of the cluster" in each for each in said - {""})


def test_a_slot_that_moves(nodes: list[RedisServer], client: Any) -> None:
    """While its keys are on two nodes the error says what helps, and then all is counted."""
    name, keys = "test_a_slot_that_moves", {"a": 1, "b": 1}
    store = of_tenant(client, name, "a")
    store.acquire(batch(keys))
    old, new = sorted(nodes, key=lambda node: not slots_of(node, name))[:2]
    (slot,) = slots_of(old, name)
    with old.client() as source, new.client() as target:
        ids: Any = [each.execute_command("CLUSTER MYID") for each in (source, target)]
        target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
        source.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])

        def move(most: int) -> None:
            some: Any = source.execute_command("CLUSTER GETKEYSINSLOT", slot, most)
            source.execute_command("MIGRATE", "127.0.0.1", new.port, "", 0, 5000, "KEYS", *some)

        move(1)
        with pytest.raises(QuotaStoreError, match=r"exhausted: the slot .* may be moving.*atomic"):
            store.acquire(batch(keys))
        move(100)
        for each in (target, source):
            each.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
    store.acquire(batch(keys))
    assert used(store, "a", "b") == [2, 2]


async def test_a_node_that_is_down(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Calls of its tenants are checked as in an outage, then corrected; no other tenant waits."""
    with (
        cluster(tmp_path_factory) as nodes,
        closing(redis.RedisCluster("127.0.0.1", nodes[0].port)) as client,
    ):
        here, away = (
            next(each for each in TENANTS if key_slot(b"down." + each.encode()) * 3 // 16384 == n)
            for n in (0, 1)
        )
        store = store_of(client, "down")
        limit = ToolCallLimit("email", quotas=[Quota(LIMIT, per="tenant")])
        scene = scene_of(store, limit, on_store_error="allow", form="sync", thread_id=None)

        async def run(tenant: str) -> list[str]:
            return texts(await scene.play(context={"tenant": tenant}))

        def counted(tenant: str) -> list[int | None]:
            return used(store, f"down.{tenant}/email:tenant:{tenant}")

        sent = ["email ran"] * 2
        nodes[1].stop()
        with pytest.raises(QuotaStoreError):
            counted(away)
        for number in (1, 2):
            assert await run(away) == await run(here) == sent
            assert counted(here) == [2 * number]
        nodes[1].start()
        eventually(lambda: _knows_all(nodes[1]) and _knows_all(nodes[0]))
        assert await run(here) == await run(away) == sent
        eventually(lambda: (counted(here), counted(away)) == ([6], [6]))


def test_the_rights_are_those_that_are_used(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A user with the page's rights can do all, and each is needed; the password is a variable.

    Without the right to list counts, a customer can be frozen, and is not looked for.
    """
    password, key = f'{SECRET}: @/?#%20&é"\\', "search:user_id:ann"
    url = f"redis://quota@127.0.0.1:{redis_server.port}"
    monkeypatch.setenv("LANGCHAIN_QUOTA_REDIS_PASSWORD", password)
    monkeypatch.setenv("LANGCHAIN_QUOTA_REDIS_URL", url)
    assert re.findall(r"need `\+(\w+)`", PAGE) == ["scan"]
    rights = [*WORDS.split(), "+scan"]
    with redis_server.client() as client, closing(RedisStore(url, timeout=30)) as store:
        client.execute_command("ACL", "SETUSER", "quota", "on", f">{password}", KEYS, *rights)
        client.config_resetstat()
        lost = calls(key, 1)
        store.acquire(lost)
        store.acquire(correcting(Correction(lost.attempt_id, attempt_id=lost.attempt_id)))
        store.peek([key])
        asyncio.run(store.aacquire(calls(key, 1)))
        # What is only held is given back by the reset.
        for held in (key, f"{key}:60~9"):
            store.acquire(batch({held: 1}, leases={held: 900}))
        assert main(["quotas", "show"]) == 0
        assert main(["quotas", "reset", "--yes"]) == 0
        statistics: Any = client.info("commandstats")
        client.execute_command("ACL", "SETUSER", "quota", "-scan")
        for action in ("freeze", "thaw"):
            assert main(["quotas", action, "--per", "tenant", "--subject", "acme"]) == 0
        assert "warning: this may stop nobody, because" in capsys.readouterr().err
    asked = {each.removeprefix("cmdstat_") for each in statistics} - OF_CONNECTIONS
    assert asked == {each.removeprefix("+") for each in rights}


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


def test_a_cluster_needs_further_rights(nodes: list[RedisServer]) -> None:
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
