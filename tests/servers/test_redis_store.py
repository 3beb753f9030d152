"""What is RedisStore's own: outages, timeouts, connections, expiry, and what must stay secret."""

import asyncio
import gc
import logging
import socket
import subprocess
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
import redis.asyncio
from blockbuster import blockbuster_ctx

from langchain_quota.admission import AcquireRequest, AcquireResult, Compensation
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores.grants import Grant
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.redis import RedisStore
from tests.forked import run_python
from tests.servers.programs import required_program
from tests.servers.prometheus import eventually
from tests.servers.proxy import proxy, replaced
from tests.servers.proxy import reset as connection_reset
from tests.servers.redis import (
    Detour,
    RedisServer,
    detour,
    free_port,
    running_redis,
    time_from,
)
from tests.servers.stores import batch, calls, compensating, settlement, used

PATIENCE = 60
"""Seconds after which something hangs; no timeout in these tests is near it."""
SHORT = 0.3
"""The timeout of a store that is to run into it, in seconds."""
LONG = 30.0
"""The timeout of a store that is not."""
SECRET = "s3cr3t/p@ss:w%rd"  # noqa: S105 - a test's

Acquire = Callable[[RedisStore, AcquireRequest], AcquireResult]


def acquire_in_thread(store: RedisStore, request: AcquireRequest) -> AcquireResult:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(store.acquire, request).result(PATIENCE)


def acquire_in_loop(store: RedisStore, request: AcquireRequest) -> AcquireResult:
    async def acquire() -> AcquireResult:
        async with asyncio.timeout(PATIENCE):
            return await store.aacquire(request)

    return asyncio.run(acquire())


FORMS = pytest.mark.parametrize(
    "acquire", [acquire_in_thread, acquire_in_loop], ids=["sync", "async"]
)


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of the test's own, which may be stopped."""
    with running_redis(tmp_path / "redis") as server:
        yield server


@contextmanager
def opened(server: RedisServer, timeout: float = LONG) -> Iterator[RedisStore]:
    with closing(RedisStore(server.url, prefix=server.prefix(), timeout=timeout)) as store:
        yield store


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[RedisStore]:
    """A store with a prefix of the test's own."""
    with opened(redis_server) as store:
        yield store


def command(client: redis.Redis, *words: str) -> str:
    """The answer to a command, as a text."""
    answer = client.execute_command(*words)  # type: ignore[no-untyped-call]  # so there
    return answer.decode() if isinstance(answer, bytes) else str(answer)


class TestWhatIsNoCount:
    """What others have written where a count should be."""

    def test_admits_nothing(self, store: RedisStore, redis_server: RedisServer) -> None:
        """It is no count from which calls could be admitted: QuotaStoreError, nothing written."""
        name = f"{{{store.prefix}}}:count:search"
        with redis_server.client() as client:
            for value in ("nan", "inf", "-1", "1e3", "abc", "", "9" * 400):
                client.hset(name, "used", value)
                with pytest.raises(QuotaStoreError, match=r"no count is .*:count:search"):
                    store.acquire(calls("search", 1, limit=5))
                with pytest.raises(QuotaStoreError, match="no count is kept under 'search'"):
                    store.peek(["other", "search"])
                assert client.hgetall(name) == {b"used": value.encode()}
                store.reset(["search"])
                assert store.acquire(calls("search", 1, limit=5)).used == {"search": 0}
                client.delete(name)

    def test_another_type(self, store: RedisStore, redis_server: RedisServer) -> None:
        """So it is where a list is kept, and nothing of the batch is charged."""
        with redis_server.client() as client:
            client.lpush(f"{{{store.prefix}}}:count:search", 1)
        with pytest.raises(QuotaStoreError, match="WRONGTYPE") as failed:
            store.acquire(batch({"email": 1, "search": 1}))
        assert not failed.value.timed_out
        with pytest.raises(QuotaStoreError, match="no count is kept under 'search'"):
            store.peek(["search"])
        assert used(store, "email") == [None]

    def test_usages_leave_it_out(
        self, store: RedisStore, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The counts are shown, and one line names keys that hold no count."""
        names = [f"{{{store.prefix}}}:count:".encode() + end for end in (b"\x1b[2J\n", b"\xff")]
        store.acquire(calls("search", 1))
        with redis_server.client() as client:
            for name in names:
                client.set(name, 1)
        assert [use.key for use in store.usages()] == ["search"]
        assert [each.key for each in store.listing()[0]] == ["search"]
        assert store.listing()[1] == names
        [record] = caplog.records
        assert record.levelname == "WARNING"
        assert record.getMessage() == (
            f"{store!r}: keys that hold no count: 2, such as {names[0]!r}"
        )

    def test_what_may_not_be_read_is_an_error(self, own_redis: RedisServer) -> None:
        """A command that the user has no right to does not make counts odd."""
        with own_redis.client() as client, opened(own_redis) as store:
            store.acquire(calls("search", 1))
            client.execute_command("ACL", "SETUSER", "default", "-hmget")
            with pytest.raises(QuotaStoreError, match="can't run this command"):
                store.listing()


class TestOutages:
    """What happens to calls while Redis is away, and afterwards."""

    @FORMS
    def test_refused(self, own_redis: RedisServer, acquire: Acquire) -> None:
        """Nobody listens: QuotaStoreError; once Redis is there again the next call is admitted."""
        with opened(own_redis) as store:
            assert acquire(store, calls("search", 1)).admitted == (True,)
            own_redis.stop()
            for _ in range(2):
                with pytest.raises(QuotaStoreError, match="ConnectionError") as failed:
                    acquire(store, calls("search", 1))
                assert not failed.value.timed_out
            own_redis.start()
            assert acquire(store, calls("search", 1)).admitted == (True,)
            assert used(store, "search") == [1]

    @FORMS
    def test_paused(self, own_redis: RedisServer, acquire: Acquire) -> None:
        """Nobody answers: QuotaStoreError in time; afterwards counts go on."""
        with opened(own_redis, SHORT) as store:
            own_redis.pause()
            for _ in range(2):
                with pytest.raises(QuotaStoreError, match=r"no answer within 0\.3 s") as failed:
                    acquire(store, calls("search", 1))
                assert failed.value.timed_out
                assert isinstance(
                    failed.value.__cause__, TimeoutError | redis.exceptions.TimeoutError
                )
            own_redis.resume()
            # The machine may be busy for longer than the timeout.
            eventually(lambda: admitted(store, acquire))
            assert used(store, "later") == [1]

    @FORMS
    def test_paused_with_connections(self, own_redis: RedisServer, acquire: Acquire) -> None:
        """A pause in mid-run is noticed on connections that were in use, too."""
        with opened(own_redis, SHORT) as store:
            eventually(lambda: admitted(store, acquire))
            own_redis.pause()
            with pytest.raises(QuotaStoreError) as failed:
                acquire(store, calls("search", 1))
            assert failed.value.timed_out
            own_redis.resume()

    async def test_restarted(self, own_redis: RedisServer) -> None:
        """Connections that died with the old server fail no call."""
        with opened(own_redis) as store:
            for _ in range(2):
                await asyncio.gather(*(store.aacquire(calls("search", 1)) for _ in range(20)))
                with ThreadPoolExecutor(20) as threads:
                    assert len([*threads.map(store.acquire, [calls("search", 1)] * 20)]) == 20
                await asyncio.to_thread(own_redis.stop)
                await asyncio.to_thread(own_redis.start)
            assert (await store.aacquire(calls("search", 1))).used == {"search": 0}
            await store.aclose()

    async def test_many_wait_in_vain(self, own_redis: RedisServer) -> None:
        """More calls than connections run into the timeout, and none of them blocks later ones."""
        patient = RedisStore(own_redis.url, timeout=2)  # enough for what comes afterwards
        own_redis.pause()
        failed = await asyncio.gather(
            *(patient.aacquire(calls("search", 1)) for _ in range(100)), return_exceptions=True
        )
        assert {type(each) for each in failed} == {QuotaStoreError}
        own_redis.resume()
        await eventually_answers(patient)
        results = await asyncio.gather(*(patient.aacquire(calls("x", 1)) for _ in range(100)))
        assert sorted(result.used["x"] for result in results) == [*range(100)]
        await patient.aclose()

    async def test_cancelled(self, own_redis: RedisServer) -> None:
        """A cancelled call ends as cancelled, and leaves usable connections behind."""
        with opened(own_redis) as store:
            await store.aacquire(calls("search", 1))
            own_redis.pause()
            tasks = [asyncio.create_task(store.aacquire(calls("search", 1))) for _ in range(50)]
            await asyncio.sleep(0)
            await asyncio.sleep(SHORT)
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(each) for each in ended} == {asyncio.CancelledError}
            own_redis.resume()
            results = await asyncio.gather(*(store.aacquire(calls("x", 1)) for _ in range(100)))
            assert sorted(result.used["x"] for result in results) == [*range(100)]
            await store.aclose()


def admitted(store: RedisStore, acquire: Acquire) -> bool:
    """Whether a request, always the same, is answered."""
    with suppress(QuotaStoreError):
        return acquire(store, calls("later", 1, key="later")).admitted == (True,)
    return False


async def eventually_answers(store: RedisStore) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(QuotaStoreError):
                await store.apeek(["search"])
                return


class TestLateExecution:
    """A request that timed out, and that reaches Redis nevertheless."""

    def test_before_its_compensation(self, redis_server: RedisServer) -> None:
        """It was made: the compensation that the next request brings undoes it."""
        with opened(redis_server) as store, detour(redis_server, hold=b":count:search") as way:
            late = self._lost(store, way)
            way.open()
            eventually(lambda: used(store, "search") == [3])
            self._compensate(store, late)
            assert used(store, "search") == [2]

    def test_after_its_compensation(self, redis_server: RedisServer) -> None:
        """It is not made yet: the compensation sees to it that it never is."""
        with opened(redis_server) as store, detour(redis_server, hold=b":count:search") as way:
            late = self._lost(store, way)
            self._compensate(store, late)
            way.open()
            eventually(lambda: b"refused" in way.answers)
            assert used(store, "search") == [2]

    def _lost(self, store: RedisStore, way: Detour) -> AcquireRequest:
        """A request of two calls that timed out, and is on its way; one was made before."""
        store.acquire(calls("search", 1, limit=3))
        late = calls("search", 2, limit=3)
        with closing(RedisStore(way.url, prefix=store.prefix, timeout=SHORT)) as remote:
            while not way.held.is_set():  # on a busy machine connecting alone may take too long
                with pytest.raises(QuotaStoreError) as lost:
                    remote.acquire(late)
                assert lost.value.timed_out
        assert used(store, "search") == [1]
        return late

    def _compensate(self, store: RedisStore, late: AcquireRequest) -> None:
        """Make another call, which brings the compensation."""
        undo = Compensation("late", attempt_id=late.attempt_id)
        result = store.acquire(calls("search", 1, limit=3, compensations=[undo]))
        assert (result.used, result.admitted) == ({"search": 1}, (True,))


class TestConnections:
    """Where connections come from, and where they go."""

    def test_one_round_trip(self, store: RedisStore, redis_server: RedisServer) -> None:
        """Whatever a request holds, it is one command; the script is sent once."""
        with redis_server.client() as client:
            store.acquire(calls("search", 1))
            client.config_resetstat()
            store.acquire(batch(*[{f"key-{number}": 1 for number in range(20)}] * 9))
            store.acquire(
                compensating(Compensation("s", {"key-1": 1}), Compensation("t", {"key-2": 1}))
            )
            held = batch({"key-3": 9}, leases={"key-3": 60})
            store.acquire(held)
            store.acquire(compensating(settlement(held, {"key-3": 4})))
            statistics = client.info("commandstats")
        assert statistics["cmdstat_evalsha"]["calls"] == 4
        assert "cmdstat_eval" not in statistics
        # Only a lease that is over has what is held looked through.
        assert "cmdstat_hgetall" not in statistics

    @FORMS
    def test_forgotten_script(
        self, store: RedisStore, redis_server: RedisServer, acquire: Acquire
    ) -> None:
        """A server that does not know the script, after a restart say, is told it."""
        with redis_server.client() as client:
            for before in range(3):
                client.script_flush()
                assert acquire(store, calls("search", 1)).used == {"search": before}

    def test_event_loops_come_and_go(self, store: RedisStore, redis_server: RedisServer) -> None:
        """A loop that ended leaves no connection, no client and no warning behind."""
        loops = []

        async def acquire() -> None:
            loops.append(weakref.ref(asyncio.get_running_loop()))
            await asyncio.gather(*(store.aacquire(calls("search", 1)) for _ in range(5)))

        with redis_server.client() as client:
            before = len(client.client_list())
            for _ in range(3):
                asyncio.run(acquire())
            gc.collect()
            assert [loop() for loop in loops] == [None] * 3
            eventually(lambda: len(client.client_list()) == before)
        assert used(store, "search") == [15]

    def test_loop_that_was_just_closed(self, store: RedisStore) -> None:
        """A loop that is closed without its last rites does not disturb the next one."""
        loop = asyncio.new_event_loop()
        assert loop.run_until_complete(store.aacquire(calls("search", 1))).used == {"search": 0}
        loop.run_until_complete(store.aclose())
        loop.close()
        assert acquire_in_loop(store, calls("search", 1)).used == {"search": 1}

    async def test_closed_store_can_be_used(self, store: RedisStore) -> None:
        """Closing ends connections, and the next call makes new ones."""
        for before in range(3):
            assert (await store.aacquire(calls("search", 1))).used == {"search": 2 * before}
            await store.aclose()
            await store.aclose()
            assert store.acquire(calls("search", 1)).used == {"search": 2 * before + 1}
            store.close()

    async def test_does_not_block_the_loop(self, store: RedisStore) -> None:
        """The async form makes no blocking call, the first time included."""
        with blockbuster_ctx():
            assert (await store.aacquire(calls("search", 1))).admitted == (True,)
            assert await store.apeek(["search"])
            await store.areset(["search"])
            await store.aclose()

    def test_unix_socket(self, redis_server: RedisServer) -> None:
        """A URL may name a socket."""
        url = f"unix://{redis_server.socket}?db=0"
        with closing(RedisStore(url, prefix=redis_server.prefix(), timeout=LONG)) as store:
            assert acquire_in_thread(store, calls("search", 1)).used == {"search": 0}
            assert acquire_in_loop(store, calls("search", 1)).used == {"search": 1}
            assert f"unix://{redis_server.socket}" in repr(store)

    def test_url_of_the_environment(
        self, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without a source the environment names the server; its timeouts do not count."""
        url = f"{redis_server.url}?socket_timeout=0.000001&socket_connect_timeout=0.000001"
        monkeypatch.setenv("LANGCHAIN_QUOTA_REDIS_URL", url)
        with closing(RedisStore(prefix=redis_server.prefix(), timeout=LONG)) as store:
            assert acquire_in_thread(store, calls("search", 1)).used == {"search": 0}
            assert acquire_in_loop(store, calls("search", 1)).used == {"search": 1}

    def test_tls(self, tmp_path: Path) -> None:
        """`rediss://` is TLS, with redis-py's options; another's certificate is not trusted."""
        openssl = required_program("openssl", "openssl")
        for name in ("server", "other"):
            make = [openssl, "req", "-x509", "-nodes", "-days", "1", "-subj", f"/CN={name}"]
            make += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
            make += ["-addext", "subjectAltName=IP:127.0.0.1"]
            make += ["-keyout", str(tmp_path / f"{name}.key")]
            make += ["-out", str(tmp_path / f"{name}.pem")]
            subprocess.run(make, check=True, capture_output=True)
        options = ["--tls-port", "{port}", "--port", "0", "--tls-auth-clients", "no"]
        options += ["--tls-cert-file", str(tmp_path / "server.pem")]
        options += ["--tls-key-file", str(tmp_path / "server.key")]
        with running_redis(tmp_path / "redis", *options) as server:
            url = f"rediss://127.0.0.1:{server.port}/0?ssl_ca_certs={tmp_path}/"
            with closing(RedisStore(f"{url}server.pem", timeout=LONG)) as store:
                assert acquire_in_thread(store, calls("search", 1)).used == {"search": 0}
                assert acquire_in_loop(store, calls("search", 1)).used == {"search": 1}
            with closing(RedisStore(f"{url}other.pem", timeout=LONG)) as store:
                for acquire in (acquire_in_thread, acquire_in_loop):
                    with pytest.raises(QuotaStoreError, match="certificate verify failed"):
                        acquire(store, calls("search", 1))


class TestClientsOfYourOwn:
    """A client in place of a URL."""

    @pytest.mark.parametrize("protocol", [2, 3])
    @pytest.mark.parametrize("decode", [False, True])
    def test_sync(self, redis_server: RedisServer, decode: bool, protocol: int) -> None:  # noqa: FBT001 - a parameter
        """A client of redis serves the sync form, whatever it decodes or speaks, and stays open."""
        with redis_server.client(decode_responses=decode, protocol=protocol) as client:
            store = RedisStore(client, prefix=redis_server.prefix())
            lost = calls("search", 1)
            assert store.acquire(lost).used == {"search": 0}
            store.acquire(compensating(Compensation("lost", attempt_id=lost.attempt_id)))
            assert [use.key for use in store.usages()] == ["search"]
            assert used(store, "search") == [0]
            identity = client.client_id()
            store.close()
            assert client.client_id() == identity

    @pytest.mark.parametrize("protocol", [2, 3])
    @pytest.mark.parametrize("decode", [False, True])
    async def test_async(self, redis_server: RedisServer, decode: bool, protocol: int) -> None:  # noqa: FBT001 - a parameter
        """A client of redis.asyncio serves the async form."""
        async with redis.asyncio.Redis.from_url(
            redis_server.url, decode_responses=decode, protocol=protocol
        ) as client:
            store = RedisStore(client, prefix=redis_server.prefix(), timeout=LONG)
            lost = calls("search", 1)
            assert (await store.aacquire(lost)).used == {"search": 0}
            await store.aacquire(compensating(Compensation("lost", attempt_id=lost.attempt_id)))
            (use,) = await store.apeek(["search"])
            assert use is not None
            assert use.used == 0
            await store.aclose()

    async def test_more_callers_than_connections(self, redis_server: RedisServer) -> None:
        """They wait for each other: a client fails when it would need one connection more."""
        async with redis.asyncio.Redis.from_url(redis_server.url, max_connections=2) as client:
            store = RedisStore(client, prefix=redis_server.prefix(), timeout=LONG)
            asked = [store.aacquire(calls("search", 1)) for _ in range(20)]
            results = await asyncio.gather(*asked)
            assert sorted(each.used["search"] for each in results) == [*range(20)]

    async def test_wrong_form(self, redis_server: RedisServer) -> None:
        """Asked for the other form, the TypeError says what to pass."""
        with redis_server.client() as client:
            store = RedisStore(client)
            with pytest.raises(TypeError, match=r"or a client of redis\.asyncio"):
                await store.aacquire(calls("search", 1))
        async with redis.asyncio.Redis.from_url(redis_server.url) as client:
            store = RedisStore(client)
            with pytest.raises(TypeError, match=r"URL, or a client of redis$"):
                store.acquire(calls("search", 1))
            with pytest.raises(TypeError, match=r"URL, or a client of redis$"):
                store.usages()

    def test_timeout_of_an_async_client(self, own_redis: RedisServer) -> None:
        """The store's timeout holds over retries of the client's own."""

        async def acquire() -> None:
            client = redis.asyncio.Redis.from_url(own_redis.url, socket_timeout=PATIENCE)
            async with client, asyncio.timeout(PATIENCE):
                await RedisStore(client, timeout=SHORT).aacquire(calls("search", 1))

        own_redis.pause()
        with pytest.raises(QuotaStoreError) as failed:
            asyncio.run(acquire())
        assert failed.value.timed_out

    def test_cluster(self, tmp_path: Path) -> None:
        """All keys of a prefix are in one hash slot, so that a cluster takes the script."""
        options = ["--cluster-enabled", "yes", "--cluster-config-file", str(tmp_path / "nodes")]
        with running_redis(tmp_path / "redis", *options) as server:
            with server.client() as client:
                command(client, "CLUSTER", "ADDSLOTSRANGE", "0", "16383")
                eventually(lambda: "cluster_state:ok" in command(client, "CLUSTER", "INFO"))
            keys = [f"key-{number}" for number in range(20)]
            lost = batch(dict.fromkeys(keys, 1))
            undo = compensating(Compensation("lost", {"late": 1}, attempt_id=lost.attempt_id))
            with closing(redis.RedisCluster("127.0.0.1", server.port)) as nodes:
                store = RedisStore(nodes, prefix="sync")
                assert store.acquire(lost).admitted == (True,)
                assert len(store.usages("key-*")) == 20
                store.acquire(undo)
                assert used(store, "late", *keys) == [1] + [0] * 20

            async def acquire() -> None:
                async with redis.asyncio.RedisCluster("127.0.0.1", server.port) as nodes:
                    store = RedisStore(nodes, prefix="async", timeout=LONG)
                    assert (await store.aacquire(lost)).admitted == (True,)
                    await store.aacquire(undo)
                    uses = await store.apeek(["late", *keys])
                    assert [use.used for use in uses if use] == [1] + [0] * 20

            asyncio.run(acquire())


class TestKeys:
    """What Redis keeps, and for how long."""

    def test_all_keys_are_the_prefixs_and_expire(
        self, store: RedisStore, redis_server: RedisServer
    ) -> None:
        """Every key has the prefix as its hash tag, and an end."""
        lost = calls("search", 1)
        store.acquire(lost)
        store.acquire(
            calls("email", 1, compensations=[Compensation("s", {"late": 1}, lost.attempt_id)])
        )
        store.reset(["other"])
        with redis_server.client() as client:
            names = [*client.scan_iter(match=f"*{store.prefix}*")]
            assert len(names) == 8
            assert all(name.startswith(f"{{{store.prefix}}}:".encode()) for name in names)
            kept = {name: client.ttl(name) for name in names}
        times = {b"count": 365 * 86_400, b"compensated": 7 * 86_400}
        times |= {b"attempt": 3600, b"result": 3600}
        kinds = {name: name.split(b":")[1] for name in names}
        assert {*kinds.values()} == {*times}
        for name in names:
            assert times[kinds[name]] - PATIENCE <= kept[name] <= times[kinds[name]]

    def test_script_is_told_all_keys(self, store: RedisStore, redis_server: RedisServer) -> None:
        """The script touches no key that it was not given, as clusters and proxies demand."""
        with redis_server.client() as client, client.monitor() as monitor:
            lost = batch({"search": 1, "email": 1})
            store.acquire(lost)
            store.acquire(
                calls("other", 1, compensations=[Compensation("s", {"late": 1}, lost.attempt_id)])
            )
            store.reset(["search"])
            store.peek(["search", "email"])
            client.echo("end")
            given: list[str] = []
            touched = 0
            for heard in monitor.listen():
                words = heard["command"].split(" ")
                if heard["client_type"] == "lua" and words[0] != "TIME":
                    touched += 1
                    assert words[1] in given
                elif words[0] == "EVALSHA":
                    given = words[3 : 3 + int(words[2])]
                elif words[0] == "ECHO":
                    break
        assert touched > 20

    def test_window_and_an_hour(self, store: RedisStore, redis_server: RedisServer) -> None:
        """A count of a window is kept until an hour after its end, however it was made."""
        keys = [
            CountKey.at("search", "user_id", who, timedelta(days=1), time.time() + 864_000)
            for who in ("charged", "late", "reset")
        ]
        charged, late, reset = map(str, keys)
        assert keys[0].ends is not None
        made = Compensation("late", {late: 1})
        store.acquire(batch({charged: 1}, ends={charged: keys[0].ends}, compensations=[made]))
        store.reset([reset])
        with redis_server.client() as client:
            for key in (charged, late, reset):
                name = f"{{{store.prefix}}}:count:{key}"
                assert client.expiretime(name) == keys[0].ends + 3600

    def test_window_that_is_over(self, store: RedisStore, redis_server: RedisServer) -> None:
        """A worker whose clock is slow counts all the same: its counts last an hour."""
        past = CountKey.at("search", "user_id", "ada", timedelta(hours=1), 1e9)
        assert past.ends is not None
        key = str(past)
        for admitted in (True, False):
            late = batch({key: 1}, limits={key: 1}, ends={key: past.ends})
            assert store.acquire(late).admitted == (admitted,)
        with redis_server.client() as client:
            left = client.ttl(f"{{{store.prefix}}}:count:{past}")
        assert 3600 - PATIENCE <= left <= 3600

    def test_idle_time_begins_anew(self, store: RedisStore, redis_server: RedisServer) -> None:
        """Each charge puts the end of a count off; a refund does not."""
        name = f"{{{store.prefix}}}:count:search"
        with redis_server.client() as client:
            store.acquire(calls("search", 2))
            client.expire(name, 1000)
            store.acquire(compensating(Compensation("refund", {"search": -1})))
            assert client.ttl(name) <= 1000
            store.acquire(calls("search", 1))
            assert client.ttl(name) > 1000
            client.expire(name, 1000)
            store.acquire(compensating(Compensation("late", {"search": 1})))
            assert client.ttl(name) > 1000

    def test_largest_numbers(self, store: RedisStore) -> None:
        """Counts are exact up to 2^53 - 1; what is larger is refused, not rounded."""
        most = 2**53 - 1
        asked = batch(
            {"search": 2},
            {"search": 2},
            {"search": 1},
            limits={"search": most},
            used={"search": most - 3},
        )
        result = store.acquire(asked)
        assert (result.used, result.admitted) == ({"search": most - 3}, (True, False, True))
        assert store.acquire(asked).used == {"search": most - 3}
        assert used(store, "search") == [most]
        for larger in (
            batch({"email": 1}, used={"email": most + 1}),
            batch({"email": most + 1}),
            compensating(Compensation("s", {"email": -most - 1})),
            compensating(Compensation("s", {"email": 1}, starts={"email": most + 1})),
        ):
            with pytest.raises(QuotaStoreError, match="9007199254740991"):
                store.acquire(larger)
        assert used(store, "email") == [None]


class TestLeases:
    """What is held, as Redis keeps it."""

    def test_what_is_no_hold(self, store: RedisStore, redis_server: RedisServer) -> None:
        """What others have written where a hold should be gives nothing back."""
        held = batch({"search": 5}, leases={"search": 60})
        store.acquire(held)
        with redis_server.client() as client:
            name = f"{{{store.prefix}}}:count:search"
            (field,) = (each for each in client.hkeys(name) if each.startswith(b"held:"))
            assert len(field) <= 64
            for odd in ("", "5", "5 x", "-5 9", "5 " + "9" * 400, "1e3 9"):
                client.hset(name, field.decode(), odd)
                client.hset(name, "next_end", 1)
                store.acquire(compensating(settlement(held, {"search": 0})))
                assert used(store, "search") == [5]

    def test_lease_of_a_full_server(self, own_redis: RedisServer) -> None:
        """A server that takes no more writes still shows what is used without what is over."""
        with opened(own_redis) as store, own_redis.client() as client, time_from("now"):
            now = int(time.time())
            client.set("now", now)
            store.acquire(batch({"search": 5}, leases={"search": 60}))
            client.set("now", now + 61)
            client.config_set("maxmemory", 1)
            assert used(store, "search") == [0]
            with pytest.raises(QuotaStoreError, match="used memory > 'maxmemory'"):
                store.acquire(calls("email", 1))

    def test_many_holds(self, store: RedisStore, redis_server: RedisServer) -> None:
        """Thousands that are over at the same moment are given back in one step."""
        running = batch({"search": 7}, leases={"search": 3600})
        now = int(time.time())
        with redis_server.client() as client, time_from("now"):
            client.set("now", now)
            for _ in range(2000):
                store.acquire(batch({"search": 1}, leases={"search": 60}))
            store.acquire(running)
            client.set("now", now + 60)
            assert store.acquire(calls("search", 1, limit=5000)).used == {"search": 2007}
            client.set("now", now + 61)
            assert store.acquire(calls("search", 1)).used == {"search": 8}
            fields = client.hkeys(f"{{{store.prefix}}}:count:search")
        assert sum(each.startswith(b"held:") for each in fields) == 1
        store.acquire(compensating(settlement(running, {"search": 2})))
        assert used(store, "search") == [4]


class TestSecrets:
    """Credentials appear nowhere."""

    @pytest.fixture
    def locked(self, own_redis: RedisServer) -> RedisServer:
        """A server that lets in a user with the least rights, and nobody else."""
        with own_redis.client() as client:
            commands = (
                "evalsha eval hget hgetall hmget hset hdel get set del exists expireat time scan"
            )
            allowed = [f"+{each}" for each in commands.split()]
            keys = "~{langchain_quota}:*"
            command(client, "ACL", "SETUSER", "worker", "on", f">{SECRET}", keys, *allowed)
            command(client, "ACL", "SETUSER", "default", "-@all", "+ping")
        return own_redis

    def test_user_with_least_rights(self, locked: RedisServer) -> None:
        """A user that may use the prefix's keys and the script's commands is enough."""
        with closing(RedisStore(self._url(locked), timeout=LONG)) as store:
            lost = calls("search", 1)
            for acquire in (acquire_in_thread, acquire_in_loop):
                assert not acquire(store, lost).replayed
                acquire(
                    store, compensating(Compensation(lost.attempt_id, attempt_id=lost.attempt_id))
                )
                lost = calls("search", 1)
            over, running = (batch({"search": 2}, leases={"search": lease}) for lease in (1, 60))
            store.acquire(over)
            store.acquire(running)
            eventually(lambda: used(store, "search") == [2])
            store.acquire(compensating(settlement(running, {"search": 1})))
            assert used(store, "search") == [1]
            store.reset(["search"])
            assert [use.used for use in store.usages()] == [0]

    def test_in_no_error(
        self, locked: RedisServer, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        """No repr, error, traceback or log has the password, whatever goes wrong."""
        caplog.set_level(logging.DEBUG)
        told = []
        with quoting_server() as port:
            sources = [
                self._url(locked),
                self._url(locked, password=SECRET + "x"),
                self._url(locked, port=free_port()),
                self._url(locked, port=port),
                f"unix://worker:{quote(SECRET, safe='')}@{tmp_path}/absent.sock",
                f"redis://127.0.0.1:{port}/0?username=worker&password={quote(SECRET, safe='')}",
            ]
            for source in sources:
                for prefix in ("langchain_quota", "not_allowed"):
                    with closing(RedisStore(source, prefix=prefix, timeout=LONG)) as store:
                        told.append(repr(store))
                        for acquire in (acquire_in_thread, acquire_in_loop):
                            try:
                                acquire(store, calls("search", 1))
                            except QuotaStoreError as error:
                                told += [repr(error), str(error)]
                                told += traceback.format_exception(error)
            client = redis.Redis(port=port, username="worker", password=SECRET)
            with client, pytest.raises(QuotaStoreError) as quoted:
                RedisStore(client).acquire(calls("search", 1))
            told += traceback.format_exception(quoted.value)
        told += [record.getMessage() for record in caplog.records]
        text = "\n".join(told)
        for expected in ("no permissions", "username-password", "refused", "No such file", "***"):
            assert expected in text
        assert SECRET not in text
        assert quote(SECRET, safe="") not in text

    def test_in_no_error_about_a_url(self) -> None:
        """A URL that is wrong, or was not percent-encoded, is refused without quoting it."""
        for url in (
            "redis://:s3cr3t/p@ss@127.0.0.1:6379/0",
            "redis://worker:s3cr3t#p@127.0.0.1:6379/0",
            "redis://worker:s3cr3t?p@127.0.0.1:6379/0",
            "redis://s3cr3t/p@127.0.0.1:6379/0",
            "redis://worker:12345/s3cr3t@127.0.0.1",
            "redis://worker:12345?s3cr3t@127.0.0.1",
            "redis://:12345",
            "redis://worker:s3cr3t@127.0.0.1:s3cr3t/0",
            "redis://worker:s3cr3t@[127.0.0.1/0",
            "redis://worker:s3cr3t@127.0.0.1:99999/0",
            "redis://worker:s3cr3t@127.0.0.1/zero",
            "redis://worker:s3cr3t@127.0.0.1/0?socket_timeout=s3cr3t",
            "redis://worker:s3cr3t@127.0.0.1/0?s3cr3t=1",
            "unix://worker:s3cr3t/p@/run/redis.sock",
            "http://worker:s3cr3t@127.0.0.1:6379/0",
            "worker:s3cr3t@127.0.0.1",
            "s3cr3t",
        ):
            with pytest.raises(ValueError, match="the URL of Redis must be") as refused:
                RedisStore(url)
            told = "".join(traceback.format_exception(refused.value))
            assert "s3cr3t" not in told.split("Error: ", 1)[1], url
            assert refused.value.__context__ is None, url

    def _url(self, server: RedisServer, *, password: str = SECRET, port: int | None = None) -> str:
        address = f"127.0.0.1:{port or server.port}"
        return f"redis://worker:{quote(password, safe='')}@{address}/0"


@contextmanager
def quoting_server() -> Iterator[int]:
    """A server that knows no command, and quotes each in its error, as Redis does."""

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while request := connection.recv(65_536):
                words = request.decode().replace("\r\n", " ")
                connection.sendall(f"-ERR unknown command, with args {words}\r\n".encode())

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


ODD_REPLIES = {
    "nil": b"$-1\r\n",
    "integer": b":1\r\n",
    "no integer": b":x\r\n",
    "status": b"+OK\r\n",
    "no list of ours": b"*2\r\n$8\r\nacquired\r\n*1\r\n:0\r\n",
    "no text": b"*1\r\n$2\r\n\xff\xfe\r\n",
    "keys for nothing": b"*2\r\n$5\r\nagain\r\n$1\r\nk\r\n",
    "nested": b"*1\r\n" * 3000,
    "a line": b"x" * 100_000 + b"\r\n",
    "web page": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "moved": b"-MOVED 1 127.0.0.1:1\r\n",
    "asking": b"-ASK 1 127.0.0.1:1\r\n",
    "loading": b"-LOADING Redis is loading the dataset in memory\r\n",
    "read-only": b"-READONLY You can't write against a read only replica.\r\n",
}


class TestOddReplies:
    """A server, or a proxy before it, with an answer that the script never gives.

    What is odd in lists is tested in test_redis_script.py; here, what the client library reads.
    """

    @pytest.mark.parametrize("what", ODD_REPLIES)
    async def test_is_an_error_of_the_store(self, redis_server: RedisServer, what: str) -> None:
        """Each operation fails with a QuotaStoreError of bounded length, and the next one works."""
        with (
            proxy(redis_server.port) as way,
            closing(RedisStore(way.url, prefix=redis_server.prefix(), timeout=LONG)) as store,
        ):
            in_thread = asyncio.to_thread
            operations: list[Callable[[], Awaitable[object]]] = [
                lambda: in_thread(store.acquire, calls("search", 1)),
                lambda: in_thread(store.peek, ["search"]),
                lambda: in_thread(store.reset, ["search"]),
                lambda: store.aacquire(calls("search", 1)),
                lambda: store.apeek(["search"]),
                lambda: store.areset(["search"]),
            ]
            for operation in operations:
                await operation()
                way.fail(replaced(ODD_REPLIES[what]))
                with pytest.raises(QuotaStoreError, match="RedisStore") as failed:
                    await operation()
                assert not failed.value.timed_out
                assert len(str(failed.value)) < 1000
                way.heal()
            way.fail(replaced(ODD_REPLIES[what]))
            with pytest.raises(QuotaStoreError, match="RedisStore"):
                await in_thread(store.usages)
            way.heal()
            assert [each.used for each in await in_thread(store.usages)] == [0]
            await store.aclose()


def test_a_grant_of_a_window_is_known_for_a_week(redis_server: RedisServer) -> None:
    """Redis keeps it for a week after its window, so that a late repetition gives nothing anew."""
    prefix = redis_server.prefix()
    with (
        closing(RedisStore(redis_server.url, prefix=prefix)) as store,
        redis_server.client() as client,
    ):
        store.grant("search:user_id:ada", 3, window=timedelta(hours=1))
        [key] = client.scan_iter(f"*{prefix}*")
        assert client.ttl(key) >= timedelta(days=7).total_seconds()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_a_lost_answer_to_a_grant_is_logged(
    redis_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    is_async: bool,  # noqa: FBT001
) -> None:
    """The audit log has what may be given or ended, with its id; asked again, it is given once."""
    key = "search:user_id:ada"
    with (
        proxy(redis_server.port) as way,
        closing(RedisStore(way.url, prefix=redis_server.prefix(), timeout=LONG)) as store,
        caplog.at_level("INFO", "langchain_quota"),
    ):

        async def grant(name: str | None = None) -> Grant:
            asked: Any = {"reason": "ticket 4711", "id": name}
            return await store.agrant(key, 3, **asked) if is_async else store.grant(key, 3, **asked)

        async def revoke(name: str) -> Grant | None:
            return await store.arevoke(key, name) if is_async else store.revoke(key, name)

        # A new connection would fail before anything is asked.
        assert await revoke("none") is None
        way.fail(connection_reset)
        with pytest.raises(QuotaStoreError):
            await grant()
        [lost] = [vars(each) for each in caplog.records]
        assert (lost["quota_event"], lost["quota_amount"]) == ("grant_unconfirmed", 3)
        assert (lost["quota_key"], lost["quota_reason"]) == (key, "ticket 4711")
        way.heal()
        assert (await grant(lost["quota_grant"])).amount == 3
        way.fail(connection_reset)
        with pytest.raises(QuotaStoreError):
            await revoke(lost["quota_grant"])
        way.heal()
        assert store.grants() == []
        [_, ended] = [vars(each) for each in caplog.records]
        assert (ended["quota_event"], ended["quota_grant"]) == (
            "revoke_unconfirmed",
            lost["quota_grant"],
        )
        await store.aclose()


class TestArguments:
    """What is refused when a store is made."""

    def test_no_url(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without a source and without the variable the error names the variable."""
        monkeypatch.delenv("LANGCHAIN_QUOTA_REDIS_URL", raising=False)
        with pytest.raises(ValueError, match="LANGCHAIN_QUOTA_REDIS_URL is not set"):
            RedisStore()

    @pytest.mark.parametrize(
        ("options", "error", "text"),
        [
            ({"source": 5}, TypeError, "source must be a URL"),
            ({"source": b"redis://"}, TypeError, "not a bytes"),
            ({"prefix": ""}, ValueError, "prefix must match"),
            ({"prefix": "a" * 65}, ValueError, "prefix must match"),
            ({"prefix": "a:b"}, ValueError, "not 'a:b'"),
            ({"prefix": "{a}"}, ValueError, "prefix must match"),
            ({"prefix": "a\n"}, ValueError, "prefix must match"),
            ({"prefix": None}, TypeError, "prefix must be a string"),
            ({"timeout": 0}, ValueError, "timeout must be above 0"),
            ({"timeout": -1}, ValueError, "not -1"),
            ({"timeout": float("nan")}, ValueError, "not nan"),
            ({"timeout": float("inf")}, ValueError, "not inf"),
            ({"timeout": None}, TypeError, "timeout must be a number"),
            ({"timeout": True}, TypeError, "not True"),
            ({"idle_ttl": 5}, TypeError, "idle_ttl must be a timedelta"),
            ({"idle_ttl": timedelta(0)}, ValueError, "idle_ttl must be a second or more"),
        ],
    )
    def test_wrong_argument(
        self, options: dict[str, object], error: type[Exception], text: str
    ) -> None:
        """A wrong argument is refused; the message names it and the value."""
        arguments: dict[str, Any] = {"source": "redis://127.0.0.1", **options}
        with pytest.raises(error, match=text):
            RedisStore(**arguments)

    def test_repr(self) -> None:
        """The repr says which server, and which prefix."""
        url = "redis://worker:pw@example.org:1234/5"
        expected = "RedisStore(redis://example.org:1234/5, prefix='langchain_quota')"
        assert repr(RedisStore(url)) == expected

    def test_extra_is_missing(self) -> None:
        """Without redis the import of the store says what to install."""
        code = (
            "import sys; sys.modules['redis'] = None; import langchain_quota.stores.memory\n"
            "import langchain_quota.stores.redis"
        )
        ended = run_python(code)
        assert ended.stderr.endswith('pip install "langchain-quota[redis]"\n')
