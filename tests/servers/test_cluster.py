"""A Redis Cluster of three nodes: tenants have prefixes of their own, and each stays exact."""

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, closing, contextmanager
from datetime import timedelta
from itertools import count
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
import redis.asyncio
from langchain.agents import create_agent
from langchain_core.tools import StructuredTool
from prometheus_client import CollectorRegistry
from redis.crc import key_slot

from langchain_quota import (
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    QuotaStoreError,
    RedisStore,
    Telemetry,
    ToolCallLimit,
)
from langchain_quota.middleware._leases import SLOT_LEASE
from langchain_quota.testing import ScriptedChatModel
from tests.servers.prometheus import eventually
from tests.servers.redis import RedisServer, running_redis, time_from
from tests.servers.stores import batch, calls, used

DOCS = Path(__file__).parents[2] / "docs"
NODES = 3
PROCESSES = 4
TENANTS = [f"tenant-{number}" for number in range(12)]
LIMIT = 10
"""How many calls a tenant may make."""
RUNS = 3
"""How often each process runs an agent for each tenant; each run asks for two calls."""
AT_ONCE = 2
FEW = 100
"""More requests than a node gets beside those that are counted."""
PATIENCE = 120
WEEK = timedelta(days=7)
ASKED: Any = {"messages": [("user", "hi")]}


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
            options = [
                "--cluster-enabled",
                "yes",
                "--cluster-config-file",
                str(directory / "nodes"),
            ]
            server = running.enter_context(running_redis(directory, *options))
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
def context() -> ForkServerContext:
    """What starts processes."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


@pytest.fixture
def store(nodes: list[RedisServer], request: pytest.FixtureRequest) -> Iterator[RedisStore]:
    """A store of the test's own. Its prefix puts tenants on the same nodes each time."""
    with closing(redis.RedisCluster("127.0.0.1", nodes[0].port)) as client:
        yield store_of(client, request.function.__name__)


def store_of(client: Any, name: str) -> RedisStore:
    """A store whose prefix has the name of a test and that of the run's tenant."""
    return RedisStore(
        client, prefix=lambda _, runtime: f"{name}.{runtime.context['tenant']}", timeout=60
    )


def of_tenant(store: RedisStore, name: str, tenant: str) -> RedisStore:
    """The store of one tenant, where no run's context says which."""
    return RedisStore(store._clients.sync(), prefix=f"{name}.{tenant}", timeout=60)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The beginning of the prefixes of the fixture store."""
    return str(request.function.__name__)


def agent_of(store: RedisStore, tool: Any, *limits: Any, **options: Any) -> Any:
    """An agent that asks for two mails in each run."""
    telemetry = Telemetry(registry=CollectorRegistry())
    quota: Any = QuotaMiddleware(limits, store=store, telemetry=telemetry, **options)
    model = ScriptedChatModel(
        script=lambda messages: ["email"] * 2 if messages[-1].type == "human" else "done"
    )
    return create_agent(model, [tool], middleware=[quota])


LIMITS = [
    ToolCallLimit("email", run_limit=5, quotas=[Quota(LIMIT, per="tenant", window=WEEK)]),
    ModelCallLimit(thread_limit=1_000),
]


def worker(port: int, prefix: str, diary: str, forever: bool) -> None:  # noqa: FBT001 - of a process
    """A process whose agents write down whose mails they send."""
    written = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def send_for(tenant: str, store: RedisStore) -> None:
        async def email() -> str:
            os.write(written, f"{tenant}\n".encode())
            return "sent"

        tool = StructuredTool.from_function(coroutine=email, name="email", description="Send.")
        config: Any = {"configurable": {"thread_id": f"of-{tenant}"}}
        agent = agent_of(store, tool, *LIMITS)
        await agent.ainvoke(ASKED, config, context={"tenant": tenant})

    async def work() -> None:
        async with redis.asyncio.RedisCluster("127.0.0.1", port) as client:
            store = store_of(client, prefix)
            for _ in count() if forever else range(RUNS):
                await asyncio.gather(*(send_for(tenant, store) for tenant in TENANTS))

    asyncio.run(work())


def started(
    context: ForkServerContext, stack: ExitStack, nodes: list[RedisServer], *arguments: Any
) -> Any:
    """A process that works, by way of any node."""
    process = context.Process(target=worker, args=(nodes[-1].port, *arguments), daemon=True)
    process.start()
    stack.callback(process.join, PATIENCE)
    stack.callback(process.kill)
    return process


def test_processes_share_the_counts_of_tenants(
    nodes: list[RedisServer],
    store: RedisStore,
    name: str,
    context: ForkServerContext,
    tmp_path: Path,
) -> None:
    """4 processes ask for 24 mails of each of 12 tenants: 10 are sent, and all nodes have keys."""
    diary = tmp_path / "diary"
    with ExitStack() as stack:
        working = [
            started(context, stack, nodes, name, str(diary), False) for _ in range(PROCESSES)
        ]
        for each in working:
            each.join(PATIENCE)
            assert each.exitcode == 0
    assert Counter(diary.read_text().split()) == dict.fromkeys(TENANTS, LIMIT)
    for tenant in TENANTS:
        own = of_tenant(store, name, tenant)
        counts = {use.key.rpartition(":604800:")[0] or use.key: use.used for use in own.usages()}
        calls_of = {key: used for key, used in counts.items() if ":run:" not in key}
        assert calls_of == {
            f"email:tenant:{tenant}": LIMIT,
            f"model:thread:of-{tenant}": 2 * PROCESSES * RUNS,
        }
    kept = []
    for node in nodes:
        with node.client() as client:
            found = [*client.scan_iter(match=f"{{{name}.*", count=1_000)]
        # All that belongs to a tenant is on one node, in one slot.
        kept.append({each.partition(b"}")[0] for each in found})
        slots = {(each.partition(b"}")[0], key_slot(each)) for each in found}
        assert len(slots) == len(kept[-1])
    assert all(kept)
    assert sum(map(len, kept)) == len(TENANTS)


FIRST_RUNS = 150
"""How many runs a process begins at once, before its client has asked the cluster anything."""


def first_runs(port: int, prefix: str, form: str, ready: Any) -> None:
    """A process whose client's first requests are all made at once."""
    ran: list[str] = []
    limits = [
        ToolCallLimit("email", quotas=[Quota(10**6, per="global")]),
        ModelCallLimit(quotas=[Quota(10**6, per="global")]),
    ]
    tool = StructuredTool.from_function(lambda: ran.append("mail"), name="email", description=".")
    options: Any = {"max_connections": 1_000}

    def check(results: list[Any]) -> None:
        assert len(ran) == 2 * FIRST_RUNS
        assert all(each["messages"][-1].content == "done" for each in results)

    async def in_an_event_loop() -> None:
        async with aclosing(redis.asyncio.RedisCluster("127.0.0.1", port, **options)) as client:
            agent = agent_of(RedisStore(client, prefix=prefix, timeout=60), tool, *limits)
            ready.wait(PATIENCE)
            check(await asyncio.gather(*(agent.ainvoke(ASKED) for _ in range(FIRST_RUNS))))

    if form == "async":
        asyncio.run(in_an_event_loop())
        return
    with (
        closing(redis.RedisCluster("127.0.0.1", port, **options)) as client,
        ThreadPoolExecutor(FIRST_RUNS) as pool,
    ):
        agent = agent_of(RedisStore(client, prefix=prefix, timeout=60), tool, *limits)
        ready.wait(PATIENCE)
        check([*pool.map(lambda _: agent.invoke(ASKED), range(FIRST_RUNS))])


@pytest.mark.parametrize("form", ["async", "sync"])
def test_first_requests_at_once(
    nodes: list[RedisServer], context: ForkServerContext, form: str
) -> None:
    """4 processes begin with 150 runs at once: every call runs, and each is counted once."""
    prefix = nodes[0].prefix()
    with ExitStack() as stack:
        ready = context.Barrier(PROCESSES)
        working = [
            context.Process(target=first_runs, args=(nodes[-1].port, prefix, form, ready))
            for _ in range(PROCESSES)
        ]
        for each in working:
            each.start()
            stack.callback(each.kill)
        for each in working:
            each.join(PATIENCE)
            assert each.exitcode == 0
    with closing(redis.RedisCluster("127.0.0.1", nodes[0].port)) as client:
        counted = used(
            RedisStore(client, prefix=prefix, timeout=60), "email:global:", "model:global:"
        )
    assert counted == [2 * PROCESSES * FIRST_RUNS] * 2


async def test_a_first_caller_who_is_cancelled(nodes: list[RedisServer]) -> None:
    """Who waits for the client's first connection is not cancelled with who began it."""
    client = redis.asyncio.RedisCluster("127.0.0.1", nodes[0].port)
    async with aclosing(client):
        store = RedisStore(client, prefix=nodes[0].prefix(), timeout=60)
        first, *others = [asyncio.create_task(store.aacquire(calls("a", 1))) for _ in range(9)]
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert sorted(each.used["a"] for each in await asyncio.gather(*others)) == [*range(8)]


def test_a_process_is_killed(
    nodes: list[RedisServer],
    store: RedisStore,
    name: str,
    context: ForkServerContext,
    tmp_path: Path,
) -> None:
    """Processes die in the middle of it: no tenant sends more than it may, and all is charged."""
    diary = tmp_path / "diary"
    diary.touch()
    with ExitStack() as stack:
        arguments = (name, str(diary), True)
        first = started(context, stack, nodes, *arguments)
        eventually(lambda: diary.read_text().strip())
        first.kill()
        second = started(context, stack, nodes, *arguments)
        eventually(lambda: all(each == LIMIT for each in charged(store, name)))
        second.kill()
    sent = Counter(diary.read_text().split())
    assert sent
    assert max(sent.values()) <= LIMIT
    assert charged(store, name) == [LIMIT] * len(TENANTS)


def charged(store: RedisStore, name: str) -> list[int]:
    """What is charged to tenants."""
    found = [of_tenant(store, name, each).usages("*:tenant:*") for each in TENANTS]
    return [sum(use.used for use in of_one) for of_one in found]


def test_the_sync_form(store: RedisStore, name: str) -> None:
    """A sync client serves agents, keys of several tenants, grants and resets."""
    sent: list[str] = []
    tool = StructuredTool.from_function(lambda: sent.append("mail"), name="email", description=".")
    agent = agent_of(store, tool, *LIMITS)
    for tenant in TENANTS * 6:
        agent.invoke(ASKED, {"configurable": {"thread_id": "7"}}, context={"tenant": tenant})
    assert len(sent) == LIMIT * len(TENANTS)
    keys = [
        f"{name}.{tenant}/{use.key}"
        for tenant in TENANTS
        for use in of_tenant(store, name, tenant).usages("*:tenant:*")
    ]
    assert used(store, *keys) == [LIMIT] * len(TENANTS)
    granted = store.grant(keys[0], 3, reason="more")
    listed = of_tenant(store, name, TENANTS[0]).grants()
    assert [(each.id, each.amount) for each in listed] == [(granted.id, 3)]
    for tenant in TENANTS * 2:
        agent.invoke(ASKED, {"configurable": {"thread_id": "8"}}, context={"tenant": tenant})
    assert len(sent) == LIMIT * len(TENANTS) + 3
    assert store.revoke(keys[0], granted.id) is not None
    store.reset(keys)
    assert used(store, *keys) == [0] * len(TENANTS)


async def test_caps_on_calls_at_once_count_all_tenants(nodes: list[RedisServer]) -> None:
    """Two stores with one prefix, as two processes have them, hold calls to one cap."""
    running = most = 0
    full = asyncio.Event()

    async def email() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == AT_ONCE:
            full.set()
        await full.wait()
        await asyncio.sleep(0.01)
        running -= 1
        return "sent"

    tool = StructuredTool.from_function(coroutine=email, name="email", description="Send.")
    prefix = nodes[0].prefix()
    async with (
        redis.asyncio.RedisCluster("127.0.0.1", nodes[0].port) as one,
        redis.asyncio.RedisCluster("127.0.0.1", nodes[1].port) as other,
        asyncio.timeout(PATIENCE),
    ):
        stores = [RedisStore(client, prefix=prefix, timeout=60) for client in (one, other)]
        limit = ToolCallLimit("email", at_once=AT_ONCE, wait=PATIENCE, thread_limit=100)
        agents = [agent_of(store, tool, limit) for store in stores]
        config: Any = {"configurable": {"thread_id": "7"}}
        results = await asyncio.gather(
            *(
                agent.ainvoke(ASKED, config, context={"tenant": tenant})
                for tenant in TENANTS[:4]
                for agent in agents
            )
        )
        (left,) = await stores[0].apeek(["email:at_once:"])
    texts = [each.content for result in results for each in result["messages"]]
    assert texts.count("sent") == 16
    assert most == AT_ONCE
    assert left is not None
    assert left.used == 0


async def test_more_callers_than_connections(nodes: list[RedisServer]) -> None:
    """The error says what the client needs. Callers of one node never wait for those of another."""
    options: Any = {"max_connections": 2}
    async with redis.asyncio.RedisCluster("127.0.0.1", nodes[0].port, **options) as client:
        store = store_of(client, nodes[0].prefix())
        asked = [store.apeek(["acme/email:thread:7"]) for _ in range(9)]
        found = await asyncio.gather(*asked, return_exceptions=True)
    failed = {str(each) for each in found if isinstance(each, QuotaStoreError)}
    assert len(failed) == 1
    assert "give it more, by max_connections=" in failed.pop()


def test_a_user_with_the_rights_of_the_pages(nodes: list[RedisServer]) -> None:
    """With the pages' further rights for a cluster, and not without them, a client can use it."""
    text = (DOCS / "shared-quotas.md").read_text()
    [rights] = re.findall(r"ACL SETUSER quota on >\S+ (.*)", text)
    [keys] = re.findall(r"the keys of all prefixes, such as `(\S+)`", text)
    [further] = re.findall(r"A client of a cluster needs\s+`([^`]+)`", text)

    def allow(*rules: str) -> None:
        for node in nodes:
            with node.client() as client:
                client.execute_command("ACL", "SETUSER", "quota", *rules)

    who: Any = {"username": "quota", "password": "secret"}
    allow("on", ">secret", *rights.split(), keys)
    with pytest.raises(redis.RedisClusterException):
        redis.RedisCluster("127.0.0.1", nodes[0].port, **who)
    allow(*further.split())
    with closing(redis.RedisCluster("127.0.0.1", nodes[0].port, **who)) as client:
        store_of(client, "").acquire(calls("tenant.acme/search:thread:7", 1))

    async def acquire() -> int:
        async with redis.asyncio.RedisCluster("127.0.0.1", nodes[0].port, **who) as client:
            made = await store_of(client, "").aacquire(calls("tenant.acme/search:thread:7", 1))
            return made.used["tenant.acme/search:thread:7"]

    assert asyncio.run(acquire()) == 1


def test_the_url_of_one_node(nodes: list[RedisServer]) -> None:
    """Where another node has the key, the error says to give a client of the cluster."""

    def failure(alone: RedisStore, key: str) -> str:
        try:
            alone.peek([key])
        except QuotaStoreError as error:
            return str(error)
        return ""

    with closing(RedisStore(nodes[0].url, prefix=lambda *_: "a", timeout=60)) as alone:
        said = [failure(alone, f"{tenant}/email:thread:7") for tenant in TENANTS]
    assert "" in said
    moved = [each for each in said if each]
    assert moved
    assert all("give RedisStore a client of the cluster" in each for each in moved)


def test_a_node_that_is_down(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Calls of its tenants are judged as in an outage; its corrections stop no other tenant.

    When the node is back, it is corrected.
    """
    tool = StructuredTool.from_function(lambda: "sent", name="email", description="Send.")
    with cluster(tmp_path_factory) as nodes:
        here, away = (
            next(each for each in TENANTS if key_slot(b"down." + each.encode()) * 3 // 16384 == n)
            for n in (0, 1)
        )
        with closing(redis.RedisCluster("127.0.0.1", nodes[0].port)) as client:
            store = store_of(client, "down")
            limit = ToolCallLimit("email", quotas=[Quota(LIMIT, per="tenant")])
            agent = agent_of(store, tool, limit, on_store_error="allow")

            def run(tenant: str) -> list[str]:
                result = agent.invoke(ASKED, context={"tenant": tenant})
                return [each.content for each in result["messages"] if each.type == "tool"]

            def counted(tenant: str) -> list[int | None]:
                return used(store, f"down.{tenant}/email:tenant:{tenant}")

            nodes[1].stop()
            with pytest.raises(QuotaStoreError):
                counted(away)
            for number in (1, 2):
                assert run(away) == run(here) == ["sent"] * 2
                assert counted(here) == [2 * number]
            nodes[1].start()
            eventually(lambda: _knows_all(nodes[1]) and _knows_all(nodes[0]))
            assert run(here) == ["sent"] * 2
            assert run(away) == ["sent"] * 2
            eventually(lambda: (counted(here), counted(away)) == ([6], [6]))


def test_what_a_dead_process_holds_is_given_back(store: RedisStore) -> None:
    """A lease ends by the clock of the tenant's node."""
    key = "acme/model.total_tokens:tenant:acme"
    with time_from("{acme}:now"):
        client = store._clients.sync()
        now = int(time.time())
        client.set("{acme}:now", now)
        store.acquire(batch({key: 100}, leases={key: SLOT_LEASE}))
        assert used(store, key) == [100]
        client.set("{acme}:now", now + SLOT_LEASE + 1)
        assert used(store, key) == [0]


def asking(port: int, prefix: str, tenants: list[str], questions: int, ready: Any) -> None:
    """A process that sends one request after the other, as soon as all are connected."""
    with closing(redis.RedisCluster("127.0.0.1", port)) as client:
        store = store_of(client, prefix)
        store.peek([f"{prefix}.{each}/email:thread:7" for each in tenants])
        ready.wait(PATIENCE)
        for number in range(questions):
            tenant, name = tenants[number % len(tenants)], uuid4().hex
            key = f"{prefix}.{tenant}/email:thread:7"
            store.acquire(calls(key, 1, 10**9, key=name, attempt=name))


def test_load_is_spread(
    nodes: list[RedisServer],
    store: RedisStore,
    name: str,
    context: ForkServerContext,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One node answers the requests of a tenant, all nodes those of many; each is counted.

    The requests per second are printed. They say little if the callers have the same processors
    as the nodes.
    """
    questions = 500
    for tenants in (TENANTS[:1], TENANTS):
        before = [asked(node) for node in nodes]
        with ExitStack() as stack:
            ready = context.Barrier(PROCESSES + 1)
            for _ in range(PROCESSES):
                arguments = (nodes[0].port, name, tenants, questions, ready)
                process = context.Process(target=asking, args=arguments)
                process.start()
                stack.callback(process.kill)
                stack.callback(process.join, PATIENCE)
            ready.wait(PATIENCE)
            began = time.perf_counter()
        seconds = time.perf_counter() - began
        shares = [asked(node) - old for node, old in zip(nodes, before, strict=True)]
        assert sum(each > FEW for each in shares) == (1 if len(tenants) == 1 else NODES)
        with capsys.disabled():
            rate = PROCESSES * questions / seconds
            print(  # noqa: T201 - for who wants to know
                f"\n{len(tenants)} tenants: {rate:.0f} requests a second, by node {shares}"
            )
    counted = used(store, *(f"{name}.{each}/email:thread:7" for each in TENANTS))
    assert sum(each or 0 for each in counted) == 2 * PROCESSES * questions


def asked(node: RedisServer) -> int:
    """How many requests a node has answered."""
    with node.client() as client:
        known: Any = client.info("commandstats")
    return sum(known.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))
