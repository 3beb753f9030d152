"""What is RedisStore's own: connections, keys, their ends, odd replies, and what stays secret."""

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
import redis.asyncio
from langchain_core.tools import tool

from langchain_quota import ConcurrencyLimit, Quota, ToolCallLimit
from langchain_quota.core.admission import AcquireRequest, AcquireResult, Correction
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores.redis import RedisStore
from tests.certificates import Certificate
from tests.scene import Scene, asking
from tests.server.proxy import proxy, replaced
from tests.server.redis import RedisServer, free_port, running_redis, time_from
from tests.server.stores import batch, calls, correcting, settlement, used
from tests.telemetry import Signals

LONG = 30.0
"""The timeout of a store that is not to run into it, in seconds."""
SECRET = "s3cr3t/p@ss:w%rd"  # noqa: S105 - a test's
DAY = 86_400

in_thread = RedisStore.acquire


def in_loop(store: RedisStore, request: AcquireRequest) -> AcquireResult:
    return asyncio.run(store.aacquire(request))


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of the test's own."""
    with running_redis(tmp_path / "redis") as server:
        yield server


@contextmanager
def opened(server: RedisServer, url: str = "", **options: Any) -> Iterator[RedisStore]:
    given = {"prefix": server.prefix(), "timeout": LONG, **options}
    with closing(RedisStore(url or server.url, **given)) as store:
        yield store


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[RedisStore]:
    """A store with a prefix of the test's own."""
    with opened(redis_server) as store:
        yield store


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    """A client beside the store."""
    with redis_server.client() as client:
        yield client


SEARCH = "search:global:"


def name_of(store: RedisStore, key: str = "search") -> str:
    """Where Redis keeps a count."""
    return f"{{{store.prefix}}}:count:{key}"


class TestWhatIsNoCount:
    """What others have written where a count should be."""

    def test_admits_nothing(self, store: RedisStore, client: Any) -> None:
        """It is no count from which calls could be admitted: QuotaStoreError, nothing written."""
        name = name_of(store, SEARCH)
        # The last one is a count of an older edition.
        for value in ("nan", "inf", "-1", "1e3", "abc", "", "9" * 400, "3"):
            client.hset(name, "used", value)
            with pytest.raises(QuotaStoreError, match=r"no count is .*:count:search:global:"):
                store.acquire(calls(SEARCH, 1, limit=5))
            with pytest.raises(QuotaStoreError, match="no count is kept under 'search:global:'"):
                store.peek(["other", SEARCH])
            assert client.hgetall(name) == {b"used": value.encode()}
            store.reset([SEARCH])
            assert store.acquire(calls(SEARCH, 1, limit=5)).used == {SEARCH: 0}
            client.delete(name)

    def test_freezes_of_an_older_edition(self, store: RedisStore, client: Any) -> None:
        """What an older edition froze or granted is not overlooked: QuotaStoreError."""
        names = [f"{{{store.prefix}}}:grants:{key}" for key in ("::", SEARCH)]
        client.mset(dict.fromkeys(names, b"\x91\x95\xff"))
        with pytest.raises(QuotaStoreError, match=r"no freezes are .*grants:::, .* older edition"):
            store.acquire(calls("email", 1))
        with pytest.raises(QuotaStoreError, match=f"no grants are kept under '{SEARCH}', .* older"):
            store.grant(SEARCH, 5, window=None)
        client.delete(*names)
        assert store.acquire(calls("email", 1)).used == {"email": 0}

    def test_usages_leave_it_out(self, store: RedisStore, client: Any) -> None:
        """Only counts are shown."""
        names = [name_of(store, "").encode() + end for end in (b"\x1b[2J\n", b"\xff")]
        store.acquire(calls("search", 1))
        client.mset(dict.fromkeys(names, 1))
        assert [use.key for use in store.usages()] == ["search"]

    def test_what_may_not_be_read_is_an_error(self, own_redis: RedisServer) -> None:
        """A command that the user has no right to does not make counts odd."""
        with own_redis.client() as client, opened(own_redis) as store:
            store.acquire(calls("search", 1))
            client.execute_command("ACL", "SETUSER", "default", "-hmget")
            with pytest.raises(QuotaStoreError, match="can't run this command"):
                store.usages()


class TestEviction:
    """A server that may forget counts."""

    async def test_is_warned_about_once(
        self, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Each store says once that the server evicts keys; a user who may not know it does not."""
        with own_redis.client() as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
            for rights, lines in (("+info", 1), ("-info", 1)):
                client.execute_command("ACL", "SETUSER", "default", rights)
                with opened(own_redis) as store:
                    for acquire in (in_thread, in_thread, RedisStore.acquire):
                        acquire(store, calls("search", 1))
                    await asyncio.gather(*(store.aacquire(calls("search", 1)) for _ in range(20)))
                    await store.aclose()
                said = [each.getMessage() for each in caplog.records]
                assert sum("maxmemory-policy allkeys-lru" in each for each in said) == lines


class TestConnections:
    """Where connections come from, and where they go."""

    def test_forgotten_script(self, store: RedisStore, client: Any) -> None:
        """A server that does not know the script, after a restart say, is told it."""
        for before, acquire in enumerate((in_thread, in_loop, in_thread)):
            client.script_flush()
            assert acquire(store, calls("search", 1)).used == {"search": before}

    def test_sources(self, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        """A URL may name a socket, and stand in the environment; its timeouts do not count."""
        url = f"{redis_server.url}?socket_timeout=0.000001&socket_connect_timeout=0.000001"
        monkeypatch.setenv("LANGCHAIN_QUOTA_REDIS_URL", url)
        prefix = redis_server.prefix()
        stores = [
            RedisStore(f"unix://{redis_server.socket}?db=0", prefix=prefix, timeout=LONG),
            RedisStore(prefix=prefix, timeout=LONG),
        ]
        assert f"unix://{redis_server.socket}" in repr(stores[0])
        for number, store in enumerate(stores):
            with closing(store):
                assert in_thread(store, calls("search", 1)).used == {"search": 2 * number}
                assert in_loop(store, calls("search", 1)).used == {"search": 2 * number + 1}

    def test_tls(self, tmp_path: Path, certificates: dict[str, Certificate]) -> None:
        """`rediss://` is TLS, with redis-py's options; another's certificate is not trusted."""
        own, other = certificates["server"], certificates["other"]
        options = ["--tls-port", "{port}", "--port", "0", "--tls-auth-clients", "no"]
        options += ["--tls-cert-file", own.certfile, "--tls-key-file", own.keyfile]
        with running_redis(tmp_path / "redis", *options) as server:
            url = f"rediss://127.0.0.1:{server.port}/0?ssl_ca_certs="
            with closing(RedisStore(f"{url}{own.certfile}", timeout=LONG)) as store:
                assert in_thread(store, calls("search", 1)).used == {"search": 0}
                assert in_loop(store, calls("search", 1)).used == {"search": 1}
            with closing(RedisStore(f"{url}{other.certfile}", timeout=LONG)) as store:
                for acquire in (in_thread, in_loop):
                    with pytest.raises(QuotaStoreError, match="certificate verify failed"):
                        acquire(store, calls("search", 1))


class TestClientsOfYourOwn:
    """A client in place of a URL; one of a cluster is in tests/server."""

    @pytest.mark.parametrize("protocol", [2, 3])
    @pytest.mark.parametrize("decode", [False, True])
    async def test_each_form(
        self, redis_server: RedisServer, *, decode: bool, protocol: int
    ) -> None:
        """A client serves its form, whatever it decodes or speaks, and stays open."""
        given: Any = {"decode_responses": decode, "protocol": protocol}
        lost = calls("search", 1)
        undo = correcting(Correction("lost", attempt_id=lost.attempt_id))
        with redis_server.client(**given) as client:
            store = RedisStore(client, prefix=redis_server.prefix())
            assert store.acquire(lost).used == {"search": 0}
            store.acquire(undo)
            assert [(use.key, use.used) for use in store.usages()] == [("search", 0)]
            identity = client.client_id()
            store.close()
            assert client.client_id() == identity
        async with redis.asyncio.Redis.from_url(redis_server.url, **given) as aclient:
            store = RedisStore(aclient, prefix=redis_server.prefix(), timeout=LONG)
            assert (await store.aacquire(lost)).used == {"search": 0}
            await store.aacquire(undo)
            assert [use and use.used for use in await store.apeek(["search"])] == [0]
            await store.aclose()

    async def test_more_callers_than_connections(self, redis_server: RedisServer) -> None:
        """They wait for each other: a client fails when it would need one connection more."""
        async with redis.asyncio.Redis.from_url(redis_server.url, max_connections=2) as client:
            store = RedisStore(client, prefix=redis_server.prefix(), timeout=LONG)
            results = await asyncio.gather(*(store.aacquire(calls("a", 1)) for _ in range(20)))
            assert sorted(each.used["a"] for each in results) == [*range(20)]

    async def test_wrong_form(self, redis_server: RedisServer) -> None:
        """Asked for the other form, the TypeError says what to pass."""
        said = r"or a client of redis\.asyncio"
        with redis_server.client() as client, pytest.raises(TypeError, match=said):
            await RedisStore(client).aacquire(calls("search", 1))
        async with redis.asyncio.Redis.from_url(redis_server.url) as aclient:
            store = RedisStore(aclient)
            for ask in (lambda: store.acquire(calls("search", 1)), store.usages):
                with pytest.raises(TypeError, match=r"URL, or a client of redis$"):
                    ask()

    async def test_an_event_loop_in_a_sync_tool(
        self, redis_server: RedisServer, signals: Signals
    ) -> None:
        """What a sync tool awaits in an event loop of its own is asked in the async form."""

        @tool
        def search() -> str:
            """Search."""

            async def ask() -> str:
                async with redis.asyncio.Redis.from_url(redis_server.url) as client:
                    store = RedisStore(client, prefix=redis_server.prefix(), timeout=LONG)
                    return str((await store.aacquire(calls("search", 1))).used)

            return asyncio.run(ask())

        limit = ConcurrencyLimit("search", max_concurrency=1)
        scene = Scene(signals, asking("search"), [limit], form="sync", tools=[search])
        assert (await scene.play())["messages"][-2].text == "{'search': 0}"


class TestKeys:
    """What Redis keeps, and for how long."""

    def test_all_keys_are_the_prefixs_and_expire(self, store: RedisStore, client: Any) -> None:
        """Every key has the prefix as its hash tag, and an end."""
        lost = calls("search", 1)
        store.acquire(lost)
        undo = Correction("s", {"late": 1}, lost.attempt_id)
        held = batch({"email": 1}, leases={"email": 900}, corrections=[undo])
        store.acquire(held)
        store.acquire(correcting(settlement(held, {"email": 1})))
        store.reset(["other:global:"])
        store.grant("search:user_id:ada", 3, window=timedelta(hours=1))
        names = [*client.scan_iter(match=f"*{store.prefix}*")]
        assert len(names) == 11
        assert all(name.startswith(f"{{{store.prefix}}}:".encode()) for name in names)
        times = {b"count": 365 * DAY, b"corrected": 7 * DAY}
        times |= dict.fromkeys((b"attempt", b"result", b"settled"), 3600)
        for name in names:
            kind, left = name.split(b":")[1], client.ttl(name)
            if b"user_id" in name:
                # A late repetition of a grant must not give anything anew.
                least = 7 * DAY if kind == b"notes" else 3600
                assert least <= left <= least + 2 * 3600
            else:
                assert times[kind] - 60 <= left <= times[kind]

    def test_script_is_told_all_keys(self, store: RedisStore, client: Any) -> None:
        """The script touches no key that it was not given, as clusters and proxies demand."""
        with client.monitor() as monitor:
            lost = batch({"search": 1, "email": 1})
            store.acquire(lost)
            undo = Correction("s", {"late": 1}, lost.attempt_id)
            store.acquire(calls("other", 1, corrections=[undo]))
            store.reset(["search:global:"])
            store.peek(["search", "email"])
            client.echo("end")
            given: list[str] = []
            touched = 0
            for heard in monitor.listen():
                words = heard["command"].split(" ")
                if heard["client_type"] == "lua" and words[0] not in ("TIME", "INFO"):
                    touched += 1
                    assert words[1] in given
                elif words[0] == "EVALSHA":
                    given = words[3 : 3 + int(words[2])]
                elif words[0] == "ECHO":
                    break
        assert touched > 20

    def test_too_large_numbers(self, store: RedisStore) -> None:
        """What is larger than counts may be, 2^53 - 1, is refused, not rounded."""
        most = 2**53 - 1
        for larger in (
            batch({"email": 1}, used={"email": most + 1}),
            batch({"email": most + 1}),
            correcting(Correction("s", {"email": -most - 1})),
            correcting(Correction("s", {"email": 1}, starts={"email": most + 1})),
        ):
            with pytest.raises(QuotaStoreError, match="9007199254740991"):
                store.acquire(larger)
        assert used(store, "email") == [None]

    def test_many_holds(self, store: RedisStore, client: Any) -> None:
        """Thousands that are over at the same moment are given back in one step.

        So they are shown by a server that is full, and takes no more writes.
        """
        running = batch({"search": 7}, leases={"search": 3600})
        now = int(time.time())
        with time_from("now"):
            client.set("now", now)
            for _ in range(2000):
                store.acquire(batch({"search": 1}, leases={"search": 60}))
            store.acquire(running)
            client.set("now", now + 60)
            assert used(store, "search") == [2007]
            client.set("now", now + 61)
            client.config_set("maxmemory", 1)
            try:
                assert used(store, "search") == [7]
                with pytest.raises(QuotaStoreError, match="raise its maxmemory"):
                    store.acquire(calls("email", 1))
            finally:
                client.config_set("maxmemory", 0)
            assert store.acquire(calls("search", 1)).used == {"search": 7}
            fields = client.hkeys(name_of(store))
        assert sum(each.startswith(b"hold:") for each in fields) == 1
        store.acquire(correcting(settlement(running, {"search": 2})))
        assert used(store, "search") == [3]


class TestSecrets:
    """Credentials appear nowhere."""

    def test_a_short_one(self, redis_server: RedisServer) -> None:
        """A password of one letter is not taken out of all words, but where it stands alone."""
        with proxy(redis_server.port) as way:
            way.fail(replaced(b"-ERR unknown command, with args 'n' no\r\n"))
            store = RedisStore(f"redis://:n@127.0.0.1:{way.port}/0", timeout=LONG)
            with closing(store), pytest.raises(QuotaStoreError, match=r"args '\*\*\*' no"):
                store.acquire(calls("search", 1))

    def test_what_helps(self, own_redis: RedisServer) -> None:
        """Without a password, rights, clients or the primary, the error says what is missing."""

        def fails(url: str, match: str) -> None:
            with opened(own_redis, url) as store, pytest.raises(QuotaStoreError, match=match):
                store.acquire(calls("search", 1))

        with own_redis.client() as client:
            client.execute_command("ACL", "SETUSER", "worker", "on", f">{SECRET}", "~*", "+@all")
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
            fails(own_redis.url, "replica.*: name the primary")
            client.execute_command("REPLICAOF", "NO", "ONE")
            client.config_set("maxclients", 1)
            fails(own_redis.url, "reached: raise the server's maxclients")
            client.config_set("maxclients", 99)
            for lacking in ("-evalsha", "-hset"):
                client.execute_command("ACL", "SETUSER", "worker", "+evalsha", lacking)
                fails(self._url(own_redis), r"needs .*\+evalsha .*\+hset")
            client.execute_command("ACL", "SETUSER", "default", "resetpass", f">{SECRET}")
            fails(own_redis.url, r"required: check user and password: redis://user:")

    def test_in_no_error(
        self, own_redis: RedisServer, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        """No repr, error, traceback or log has the password, whatever goes wrong."""
        with own_redis.client() as client:
            rights = ("on", f">{SECRET}", "~{langchain_quota}:*", "+@all")
            client.execute_command("ACL", "SETUSER", "worker", *rights)
        caplog.set_level(logging.DEBUG)
        told = []
        quoted = quote(SECRET, safe="")
        # As Redis does it with a command that it does not know.
        quoting = replaced(f"-ERR unknown command, with args {SECRET} {quoted}\r\n".encode())
        with proxy(own_redis.port) as way:
            way.fail(quoting)
            sources: list[Any] = [
                self._url(own_redis),
                self._url(own_redis, password=SECRET + "x"),
                self._url(own_redis, port=free_port()),
                self._url(own_redis, port=way.port),
                f"unix://worker:{quoted}@{tmp_path}/absent.sock",
                f"redis://127.0.0.1:{way.port}/0?username=worker&password={quoted}",
            ]
            for source in sources:
                for prefix in ("langchain_quota", "not_allowed"):
                    with closing(RedisStore(source, prefix=prefix, timeout=LONG)) as store:
                        told.append(repr(store))
                        for acquire in (in_thread, in_loop):
                            try:
                                acquire(store, calls("search", 1))
                            except QuotaStoreError as error:
                                told += [repr(error), *traceback.format_exception(error)]
            with redis.Redis(port=way.port, username="worker", password=SECRET) as client:
                with pytest.raises(QuotaStoreError) as failed:
                    RedisStore(client).acquire(calls("search", 1))
                told += traceback.format_exception(failed.value)
        told += [record.getMessage() for record in caplog.records]
        text = "\n".join(told)
        for expected in ("no permissions", "username-password", "refused", "No such file", "***"):
            assert expected in text
        assert SECRET not in text
        assert quoted not in text

    def _url(self, server: RedisServer, *, password: str = SECRET, port: int | None = None) -> str:
        address = f"127.0.0.1:{port or server.port}"
        return f"redis://worker:{quote(password, safe='')}@{address}/0"


ODD_REPLIES = {
    "nil": b"$-1\r\n",
    "no integer": b":x\r\n",
    "status": b"+OK\r\n",
    "no list of ours": b"*2\r\n$8\r\nacquired\r\n*1\r\n:0\r\n",
    "keys for nothing": b"*2\r\n$5\r\nagain\r\n$1\r\nk\r\n",
    "nested": b"*1\r\n" * 3000,
    "a line": b"x" * 100_000 + b"\r\n",
    "web page": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "moved": b"-MOVED 1 127.0.0.1:1\r\n",
    "asking": b"-ASK 1 127.0.0.1:1\r\n",
    "loading": b"-LOADING Redis is loading the dataset in memory\r\n",
    "read-only": b"-READONLY You can't write against a read only replica.\r\n",
}
RESULT = b'[0,[["most","run"]],[],0,[1,2],[0,0],[[1],[0,0],[1]],0,[],[]]'
ODD_RESULTS = [
    *(b"", b"\xff\xfe", b"{}", b"7", b'"rolls"', b"[]", b"[7]", b'["0"]', b"[[0]]", RESULT[:-1]),
    *(
        RESULT.replace(said, odd, 1)
        for said, odds in {
            b"[0,": (b"[2,", b"[0.0,", b"[false,", b"[-1,", b"["),
            b'[["most","run"]]': (b"null", b'[["most"]]', b"[]", b"0"),
            b"[],0": (b"[],2", b"[[2,0]],0", b"[[0]],0"),
            b"[1,2]": (b"[]", b"[1]", b"[1,2,3]", b"[1,-2]", b"[1,2.5]", b"[1,NaN]", b'[1,"2"]'),
            b"[0,0],[[": (b"[0],[[", b"0,[["),
            b"[[1],[0,0],[1]]": (b"[]", b"[[1]]", b"[[1],[3,0],[1]]", b"[[1],[],[1]]", b"[1,0,1]"),
            b"0,[],[]]": (b"-1,[],[]]", b"0,[2],[]]", b"0,[],[[2,1]]]", b"0,[],[[1]]]", b"0,[]]"),
        }.items()
        for odd in odds
    ),
]


class TestOddReplies:
    """A server, or a proxy before it, with an answer that the script never gives."""

    @pytest.mark.parametrize("what", ODD_REPLIES)
    async def test_is_an_error_of_the_store(self, redis_server: RedisServer, what: str) -> None:
        """Each operation fails with a QuotaStoreError of bounded length, and the next one works."""
        with proxy(redis_server.port) as way, opened(redis_server, way.url) as store:
            operations: list[Callable[[], Awaitable[object]]] = [
                lambda: asyncio.to_thread(store.acquire, calls(SEARCH, 1)),
                lambda: asyncio.to_thread(store.peek, [SEARCH]),
                lambda: asyncio.to_thread(store.reset, [SEARCH]),
                lambda: store.aacquire(calls(SEARCH, 1)),
                lambda: store.apeek([SEARCH]),
                lambda: store.areset([SEARCH]),
                lambda: asyncio.to_thread(store.usages),
            ]
            for operation in operations:
                await operation()
                way.fail(replaced(ODD_REPLIES[what]))
                with pytest.raises(QuotaStoreError, match="RedisStore") as failed:
                    await operation()
                assert not failed.value.timed_out
                assert len(str(failed.value)) < 1000
                way.heal()
            assert used(store, SEARCH) == [0]
            await store.aclose()

    async def test_is_logged_with_its_traceback(
        self, redis_server: RedisServer, signals: Signals, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The line of an outage with an unreadable reply shows where the reply was read."""
        limit = ToolCallLimit("search", quotas=[Quota(1, per="global")])
        with proxy(redis_server.port) as way, opened(redis_server, way.url) as store:
            scene = await Scene(signals, asking("search"), [limit], store=store).played()
            way.fail(replaced(b"$7\r\nnothing\r\n"))
            await scene.play()
            await store.aclose()
        (record,) = (each for each in caplog.records if "unreadable" in each.getMessage())
        assert record.exc_info is not None
        assert "in read_result" in "".join(traceback.format_exception(record.exc_info[1]))

    def test_what_the_script_cannot_have_said(self, redis_server: RedisServer) -> None:
        """A text that is nearly a result is none, nor are numbers that are nearly counts."""
        asked = batch({"a": 1}, {"a": 1}, {"a": 1, "b": 1})
        with proxy(redis_server.port) as way, opened(redis_server, way.url) as store:
            store.peek(["a"])
            for text in ODD_RESULTS:
                way.fail(replaced(b"$%d\r\n%b\r\n" % (len(text), text)))
                with pytest.raises(QuotaStoreError, match=r"an unreadable reply|another form"):
                    print(store.acquire(asked))  # noqa: T201 - shown if it is taken for a result
            for numbers in (b"*0\r\n", b"*2\r\n:5\r\n:9\r\n", b"*3\r\n:5\r\n$1\r\nx\r\n:0\r\n"):
                way.fail(replaced(numbers))
                with pytest.raises(QuotaStoreError, match="an unreadable reply"):
                    print(store.peek(["a"]))  # noqa: T201 - the same
            way.fail(replaced(b"*1\r\n:1\r\n"))
            with pytest.raises(QuotaStoreError, match="an unreadable reply"):
                store.reset(["a:global:"])
