"""What is PostgresStore's own: its table, connections, pools, locks and outages."""

import asyncio
import json
import re
import signal
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from hashlib import sha256
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from langchain_quota.core.admission import AcquireRequest, AcquireResult, Correction, Demand
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores.postgres import PostgresStore
from tests.forked import run_python
from tests.server.postgres import PostgresServer, running_pgbouncer, running_postgres, time_of
from tests.server.stores import batch, calls, correcting, settlement, used
from tests.stores import Clock

LONG, SHORT = 60.0, 0.3
"""The timeout of a store that is not to run into it, and of one that is, in seconds."""
SECRET = "s3cr3t/p@ss"  # noqa: S105 - a test's


@contextmanager
def opened(
    server: PostgresServer, source: Any, prefix: str = "", timeout: float = LONG
) -> Iterator[PostgresStore]:
    prefix = prefix or server.prefix()
    with closing(PostgresStore(source, prefix=prefix, timeout=timeout)) as store:
        yield store


@pytest.fixture
def store(postgres_server: PostgresServer, postgres_url: str) -> Iterator[PostgresStore]:
    """A store with a prefix of the test's own."""
    with opened(postgres_server, postgres_url) as store:
        yield store


@pytest.fixture
def beside(postgres_url: str) -> Iterator[Any]:
    """A connection beside the store."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


def rows(beside: Any, store: PostgresStore) -> int:
    (found,) = beside.execute(
        "SELECT count(*) FROM langchain_quota WHERE prefix = %s", [store.prefix]
    ).fetchone()
    return int(found)


class TestTable:
    """The table, and what stands in it."""

    def test_setup(self, postgres_server: PostgresServer) -> None:
        """Without it the error says what to do; several may make it at once, and again."""
        for encoding in ("UTF8", "LATIN1"):
            with opened(postgres_server, postgres_server.database(encoding)) as store:
                with pytest.raises(QuotaStoreError, match=r"once, with its method setup\(\)"):
                    store.acquire(calls("search", 1))
                with ThreadPoolExecutor(4) as threads:
                    list(threads.map(lambda _: store.setup(), range(4)))
                asyncio.run(store.asetup())
                store.acquire(calls("größe \0 \ud800", 1))
                assert used(store, "größe \0 \ud800") == [1]

    def test_least_rights(self, postgres_url: str, store: PostgresStore, beside: Any) -> None:
        """A user with four rights on the table can do all that a store does, but set it up."""
        beside.execute("CREATE ROLE quota LOGIN PASSWORD 'quota'")
        beside.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON langchain_quota TO quota")
        url = re.sub("//.*@", "//quota:quota@", postgres_url)
        beside.execute("ALTER ROLE quota CONNECTION LIMIT 0")
        with pytest.raises(QuotaStoreError, match=r"too many connections.*PgBouncer$"):
            PostgresStore(url).peek(["search"])
        beside.execute("ALTER ROLE quota CONNECTION LIMIT -1")
        with closing(PostgresStore(url, prefix=str(store.prefix), timeout=LONG)) as least:
            with pytest.raises(QuotaStoreError, match=r"//quota@.*CREATE on the schema"):
                least.setup()
            beside.execute("REVOKE UPDATE ON langchain_quota FROM quota")
            with pytest.raises(QuotaStoreError, match=r"//quota@.*denied.*needs SELECT, INSERT"):
                least.reset(["search:user_id:ada"])
            beside.execute("GRANT UPDATE ON langchain_quota TO quota")
            lost = calls("search:user_id:ada", 1)
            with time_of(Clock(5e9)):  # old rows are deleted
                least.acquire(lost)
            least.grant("search:user_id:ada", 1)
            least.acquire(correcting(Correction("lost", attempt_id=lost.attempt_id)))
            assert [use.used for use in least.usages()] == [0]

    def test_a_standby(self) -> None:
        """Its errors say how to reach the primary; it can be read."""
        with running_postgres() as server, opened(server, server.database()) as store:
            store.setup()
            server.query("COPY (SELECT) TO PROGRAM 'touch standby.signal'")
            server.stop(signal.SIGINT)
            server.start()
            for operation in (store.setup, lambda: store.acquire(calls("search", 1))):
                with pytest.raises(QuotaStoreError, match="target_session_attrs=read-write"):
                    operation()
            assert used(store, "search") == [None]

    def test_a_prefix_for_each_tenant(
        self, postgres_server: PostgresServer, postgres_url: str
    ) -> None:
        """A store whose prefix is a function shares what a store of that prefix has."""
        prefix, key = postgres_server.prefix(), "search:user_id:ada"
        spread = PostgresStore(postgres_url, prefix=lambda *_: prefix, timeout=LONG)
        with closing(spread), opened(postgres_server, postgres_url, prefix) as alone:
            spread.acquire(calls(f"{prefix}/{key}", 2))
            spread.grant(f"{prefix}/{key}", 3)
            assert [(use.key, use.used, use.granted) for use in alone.usages()] == [(key, 2, 3)]
            assert [each.key for each in alone.grants("search:*")] == [key]
            assert used(spread, f"{prefix}/{key}", f"other/{key}") == [2, None]

    def test_what_has_expired_is_deleted_by_use(self, store: PostgresStore, beside: Any) -> None:
        """Rows that are over go with requests of others; a charged count stays."""
        clock = Clock(4e9)
        with time_of(clock):
            for number in range(120):
                store.acquire(calls(f"search:run:{number}", 1))
            assert rows(beside, store) == 360
            for _ in range(3):
                clock.now += 30 * 3600
                store.acquire(calls("search", 1))
            assert rows(beside, store) <= 120
            for _ in range(3):
                store.acquire(calls("search", 1, limit=10**6))
            assert rows(beside, store) < 20
            assert used(store, "search") == [6]

    def test_what_is_no_count_admits_nothing(self, store: PostgresStore, beside: Any) -> None:
        """As in Redis: it is an error, and stays as it is; it is not listed; a reset ends it."""
        held = '{"used": 1, "limit": 5, "ends": null, "entries": {"a": [NaN, 9, 0]}, "next_end": 9}'
        older = held.replace('"entries": {"a": [NaN, 9, 0]}', '"holds": null')
        kept = ('"used": 1, "more": 2', '"used": NaN', '"used": -5', '"used": 1.5', '"used": true')
        odd = [f'[9e9, {{{each}, "entries": {{}}}}]' for each in kept]
        odd += ["", "null", "[1]", "x'; DROP TABLE a --", '[NaN, {"used": 1}]', f"[9e9, {held}]"]
        odd.append(f"[9e9, {older}]")
        found = (
            "SELECT value FROM langchain_quota WHERE prefix = %s AND kind = 'count' AND name = %s"
        )
        change = found.replace(
            "SELECT value FROM langchain_quota", "UPDATE langchain_quota SET value = %s"
        )
        email, search = "email:user_id:ann", "search:user_id:ann"
        of_search = [store.prefix, '"search:user_id:ann"']
        for value in odd:
            store.acquire(calls(email, 1))
            store.acquire(calls(search, 1))
            beside.execute(change, [value, *of_search])
            with pytest.raises(QuotaStoreError, match="no count is kept under 'search:"):
                store.acquire(calls(search, 1, limit=5))
            with pytest.raises(QuotaStoreError, match="no count is kept under 'search:"):
                store.peek([email, search])
            assert [use.key for use in store.usages()] == [email]
            assert beside.execute(found, of_search).fetchall() == [(value,)]
            store.reset([search])
            assert store.acquire(calls(search, 1, limit=5)).used == {search: 0}

    def test_freezes_of_an_older_edition(self, store: PostgresStore, beside: Any) -> None:
        """As in Redis: what an older edition froze or granted is not overlooked."""
        for key in ("::", "search:global:"):
            identity = sha256(f"{store.prefix}:grants:{key}".encode()).hexdigest()[:32]
            beside.execute(
                "INSERT INTO langchain_quota VALUES (%s, %s, 'grants', %s, '[9e9, [[]]]', %s)",
                [identity, store.prefix, json.dumps(key), 9 * 10**9],
            )
        with pytest.raises(QuotaStoreError, match=r"no grants .* '::', .* older edition"):
            store.acquire(calls("email", 1))
        with pytest.raises(QuotaStoreError, match="no grants are kept under 'search:global:', "):
            store.grant("search:global:", 5, window=None)
        beside.execute("DELETE FROM langchain_quota WHERE kind = 'grants'")
        assert store.acquire(calls("email", 1)).used == {"email": 0}

    def test_all_counts_are_listed(self, store: PostgresStore) -> None:
        """A listing goes on behind the first five hundred."""
        for some in range(3):
            store.acquire(batch({f"search:user_id:{some}-{each}": 1 for each in range(400)}))
        assert len({use.key for use in store.usages()}) == 1200


class TestConnections:
    """Where connections come from, and where they go."""

    def test_a_connection_that_the_server_closed_is_not_used(
        self, store: PostgresStore, beside: Any
    ) -> None:
        """No request fails when it comes after a restart, or after an administrator."""
        for expected in range(3):
            assert store.acquire(calls("search", 1)).used == {"search": expected}
            beside.execute(
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
                "WHERE application_name = 'langchain-quota'"
            )

    def test_a_forked_child_has_its_own(self, postgres_url: str, store: PostgresStore) -> None:
        """A child does not speak on its parent's connection, and closes it for nobody."""
        done = run_python(FORKS, postgres_url, str(store.prefix))
        assert done.returncode == 0, done.stderr
        assert used(store, "search") == [40]

    @pytest.mark.parametrize("autocommit", [True, False])
    async def test_pools_of_your_own(
        self, postgres_server: PostgresServer, postgres_url: str, *, autocommit: bool
    ) -> None:
        """A pool, such as a checkpointer's, serves its form, and stays open; the other is told."""
        given: Any = {"min_size": 1, "max_size": 3, "open": False}
        given["kwargs"] = {"autocommit": autocommit, "row_factory": dict_row}
        with ConnectionPool(postgres_url, **given) as pool, opened(postgres_server, pool) as store:
            lost = calls("search", 2)
            assert store.acquire(lost).used == {"search": 0}
            store.acquire(correcting(Correction("lost", attempt_id=lost.attempt_id)))
            with ThreadPoolExecutor(20) as threads:
                list(threads.map(lambda _: store.acquire(calls("search", 1)), range(40)))
            assert [use.used for use in store.usages()] == [40]
            store.close()
            with pytest.raises(TypeError, match="ConnectionPool serves no async calls: give"):
                await store.aacquire(lost)
            with pool.connection() as connection:
                assert connection.execute("SELECT 1 AS one").fetchall() == [{"one": 1}]
        async with AsyncConnectionPool(postgres_url, **given) as apool:
            with opened(postgres_server, apool) as store:
                asked = [store.aacquire(calls("search", 1)) for _ in range(40)]
                found = [each.used["search"] for each in await asyncio.gather(*asked)]
                assert sorted(found) == [*range(40)]
                with pytest.raises(TypeError, match="serves no sync calls: give"):
                    store.usages()

    async def test_pgbouncer(self, postgres_server: PostgresServer, postgres_url: str) -> None:
        """In transaction mode 3 connections serve two stores, 20 tasks and 20 threads."""
        with (
            running_pgbouncer(postgres_server, postgres_url) as url,
            opened(postgres_server, url) as one,
            opened(postgres_server, url, str(one.prefix)) as other,
        ):
            lost, asked = calls("email", 1), [calls("search", 1) for _ in range(150)]
            for each in (one, other):
                await each.aacquire(lost)
            turns = zip(asked, [one, other] * 75, strict=True)
            found = await asyncio.gather(*(store.aacquire(each) for each, store in turns))
            assert sum(each.admitted[0] for each in found) == 100
            with ThreadPoolExecutor(20) as threads:
                again = [*threads.map(one.acquire, asked[:50])]
            assert [each.admitted for each in again] == [each.admitted for each in found[:50]]
            undo = Correction("lost", attempt_id=lost.attempt_id)
            await one.aacquire(correcting(undo))
            assert used(one, "search", "email") == [100, 0]

    @pytest.mark.parametrize(
        "source",
        [
            f"postgresql://worker:{SECRET}@db.example/quotas",
            f"host=db.example password={SECRET} port=x",
            f"nonsense {SECRET}",
            f"user= password={SECRET} host=127.0.0.1 port=1",
            "postgresql://worker:s3cr3t@127.0.0.1:1/quotas",
        ],
    )
    def test_secrets(self, source: str) -> None:
        """No error and no text of a store has what stands in its password."""
        with pytest.raises((ValueError, QuotaStoreError)) as failed:
            PostgresStore(source).acquire(calls("search", 1))
        assert "s3cr3t" not in f"{failed.value!r} {failed.value.__cause__!r}"

    def test_what_a_server_quotes(self, postgres_url: str, beside: Any) -> None:
        """A server that says the password in an error does not bring it into ours."""
        body = f"BEGIN RAISE EXCEPTION 'not for {SECRET}'; END"
        beside.execute("CREATE ROLE quoted LOGIN PASSWORD 's3cr3t/p@ss'")
        beside.execute("CREATE SCHEMA quoted AUTHORIZATION quoted")
        beside.execute("ALTER ROLE quoted SET search_path = quoted")
        url = re.sub("//.*@", f"//quoted:{quote(SECRET, safe='')}@", postgres_url)
        with closing(PostgresStore(url, timeout=LONG)) as store:
            store.setup()
            made = "CREATE FUNCTION quoted.refuse() RETURNS trigger LANGUAGE plpgsql AS $$%s$$"
            beside.execute(made % body)
            on = "CREATE TRIGGER refuse BEFORE INSERT ON quoted.langchain_quota"
            beside.execute(f"{on} EXECUTE FUNCTION quoted.refuse()")
            with pytest.raises(QuotaStoreError, match=r"not for \*\*\*") as failed:
                store.acquire(calls("search", 1))
        assert SECRET not in "".join(traceback.format_exception(failed.value))

    def test_source_of_another_type(self) -> None:
        """It is an error that says what is taken."""
        with pytest.raises(TypeError, match="source must be a connection string, or a Conn"):
            PostgresStore(5432)  # type: ignore[arg-type]


FORKS = """
import os, sys
from langchain_quota import PostgresStore
from tests.server.stores import batch
store = PostgresStore(sys.argv[1], prefix=sys.argv[2], timeout=60)
def acquire(who):
    for number in range(10):
        store.acquire(batch({"search": 1}, key=f"{who} {number}", attempt=f"{who} {number}"))
acquire("first")
for child in range(2):
    if not os.fork():
        acquire(f"child {child}")
        sys.exit(0)
acquire("parent")
assert {os.wait()[1], os.wait()[1]} == {0}
"""


class TestLocks:
    """Requests that are under way at the same time."""

    async def test_no_two_wait_for_each_other(self, store: PostgresStore) -> None:
        """Requests that name the same counts in other orders, and undo each other, all end."""
        keys = [f"search:user_id:{number}" for number in range(6)]
        made = [
            batch(dict.fromkeys(keys[at:] + keys[:at], 1), leases={keys[at]: 60})
            for at in range(6)
            for _ in range(6)
        ]

        async def together(requests: Iterable[AcquireRequest]) -> None:
            # Those of one event loop would share a transaction.
            await asyncio.gather(*(asyncio.to_thread(store.acquire, each) for each in requests))

        await together(made)
        undo = [Correction(f"u{each.attempt_id}", attempt_id=each.attempt_id) for each in made]
        both = zip(undo[:18], undo[18:], strict=True)
        await together(
            [
                *(correcting(*pair) for pair in both),
                *(correcting(settlement(each, {keys[0]: 0})) for each in made),
            ]
        )
        assert used(store, *keys) == [0] * 6

    async def test_a_blocked_event_loop_keeps_no_lock(
        self, postgres_server: PostgresServer, postgres_url: str
    ) -> None:
        """Its transaction is ended for it, so that others go on; then it tries again."""
        with opened(postgres_server, postgres_url, timeout=2) as blocked:
            await blocked.apeek(["search"])
            with opened(postgres_server, postgres_url, str(blocked.prefix)) as other:
                for expected in range(0, 10, 2):
                    asked = asyncio.create_task(blocked.aacquire(calls("search", 1)))
                    for _ in range(expected):  # its transaction begins, or is about to
                        await asyncio.sleep(0)
                    assert used(other, "search") in ([expected or None], [expected + 1])
                    other.acquire(calls("search", 1))
                    assert (await asked).admitted == (True,)
            assert used(blocked, "search") == [10]


class TestBatches:
    """Async requests that begin in the same turn of the event loop share transactions."""

    async def test_ten_transactions_serve_all(self, store: PostgresStore, beside: Any) -> None:
        """32 requests share one; each is counted, and gets its own answer."""
        await store.aacquire(calls("search", 1, limit=10**6))
        asked = [store.aacquire(calls("search", 1, limit=10**6)) for _ in range(320)]
        results = await asyncio.gather(*asked)
        assert sorted(result.used["search"] for result in results) == [*range(1, 321)]
        query = (
            "SELECT count(DISTINCT xmin::text) FROM langchain_quota WHERE prefix = %s "
            "AND kind = 'result'"
        )
        assert beside.execute(query, [store.prefix]).fetchone() == (11,)

    async def test_an_error_is_its_callers(self, store: PostgresStore, beside: Any) -> None:
        """What is wrong with one request, or kept for it, fails this one only."""
        before, after, lost = calls("search", 1), calls("search", 1), calls("search", 1)
        broken, stray = calls("odd", 1), calls("email", 1)
        stray = stray._replace(demands=(Demand({"no counter": 1}),))
        await store.aacquire(broken)
        broken = broken._replace(corrections=(Correction("never", {"search": 5}),))
        change = "UPDATE langchain_quota SET value = '[]' WHERE prefix = %s AND kind = 'result'"
        beside.execute(change, [store.prefix])
        undo = correcting(Correction("undo", attempt_id=before.attempt_id))
        undone = correcting(Correction("lost", attempt_id=lost.attempt_id))
        sent = [before, broken, stray, undone, lost, undo, after, after]
        found = await asyncio.gather(*map(store.aacquire, sent), return_exceptions=True)
        assert "no result is kept under" in str(found[1])
        assert isinstance(found[2], KeyError)
        assert "corrected before it arrived" in str(found[4])
        good = [each for each in found if isinstance(each, AcquireResult)]
        assert [each.used.get("search") for each in good] == [0, None, None, 0, 0]
        assert [each.replayed for each in good] == [False, False, False, False, True]
        assert used(store, "search") == [1]

    async def test_a_batch_deletes_what_has_expired(
        self, store: PostgresStore, beside: Any
    ) -> None:
        """It deletes more rows than it writes, so that the table does not grow."""
        beside.execute("TRUNCATE langchain_quota")  # of other tests, which would go first
        with time_of(clock := Clock()):
            for day in range(3):
                clock.now = 4e9 + day * 48 * 3600 + 5e-6
                keys = [f"search:run:{day}-{number}" for number in range(16)]
                await asyncio.gather(*(store.aacquire(calls(key, 1)) for key in keys))
        assert rows(beside, store) == 48

    @pytest.mark.parametrize("callers", [1, 4])
    async def test_a_cancelled_caller_takes_nothing_from_others(
        self, store: PostgresStore, callers: int
    ) -> None:
        """It charges all or nothing, keeps no lock and no task, and the others are answered."""
        cancelled = 0
        for turns in range(20):
            before = asyncio.all_tasks()
            asked = [calls("search", 1, limit=10**6) for _ in range(callers)]
            tasks = [asyncio.create_task(store.aacquire(each)) for each in asked]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks[turns % 2 if callers > 1 else 0 :]:
                task.cancel()
            await asyncio.wait(tasks)
            cancelled += sum(task.cancelled() for task in tasks)
            assert tasks[0].cancelled() or tasks[0].result().admitted == (True,)
            assert asyncio.all_tasks() == before
            await store.aacquire(calls("search", 1, limit=10**6))
        (count,) = used(store, "search")
        assert count is not None
        assert 20 * (1 + callers) - cancelled <= count <= 20 * (1 + callers)


class TestOutages:
    """A server that stops, hangs, and comes back."""

    @pytest.mark.parametrize("own", [True, False], ids=["pool", "URL"])
    async def test_a_server_that_hangs(
        self, postgres_server: PostgresServer, postgres_url: str, *, own: bool
    ) -> None:
        """No form waits longer than its timeout, and a cancelled caller does not wait at all."""
        given: Any = {"open": False, "kwargs": {"autocommit": True}}
        with ConnectionPool(postgres_url, **given) as pool:
            async with AsyncConnectionPool(postgres_url, **given) as apool:
                sources = (pool, apool) if own else (postgres_url, postgres_url)
                stores = [PostgresStore(each, timeout=SHORT) for each in sources]
                stores[0].acquire(calls("search", 1))
                await stores[1].aacquire(calls("search", 1))
                postgres_server.pause()
                late = r"no answer within 0\.3 s"
                try:
                    async with asyncio.timeout(4):
                        with pytest.raises(QuotaStoreError, match=late) as sync:
                            await asyncio.to_thread(stores[0].acquire, calls("search", 1))
                        with pytest.raises(QuotaStoreError, match=late) as asyn:
                            await stores[1].aacquire(calls("search", 1))
                        assert sync.value.timed_out
                        assert asyn.value.timed_out
                finally:
                    postgres_server.resume()
                stores[0].close()

    def test_nobody_listens(self) -> None:
        """The error says what to check."""
        store = PostgresStore("postgresql://127.0.0.1:1/quotas")
        with pytest.raises(QuotaStoreError, match=r"refused.*: check that PostgreSQL") as failed:
            store.acquire(calls("search", 1))
        assert not failed.value.timed_out
