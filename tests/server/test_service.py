"""The example service as a real process, with real databases."""

import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import psycopg
import pytest

from tests.forked import as_module, run_python, start_python
from tests.server.otlp import running_receiver
from tests.server.postgres import PASSWORD, PostgresServer
from tests.server.prometheus import DEADLINE, eventually
from tests.server.redis import RedisServer
from tests.server.service import (
    IMPORTED,
    TOKEN,
    Event,
    Service,
    environment,
    events,
    question,
    running_service,
)

PAGE = Path(__file__).parents[2] / "docker" / "README.md"
LIMITS = {
    "RUN_MODEL_LIMIT": 4,
    "THREAD_MODEL_LIMIT": 12,
    "THREAD_SEARCH_LIMIT": 2,
    "USER_MODEL_LIMIT": 6,
    "THREAD_TOKEN_LIMIT": 20_000,
    "USER_COST_LIMIT": 1,
}
LOOP = "1 2 3 4 5"
"""The scripted model calls a tool for every word, one in each model call."""
GRAFANA = "http://localhost:3000"
NEVER = 600
"""Seconds after which no test waits any more: a tool that takes so long does not end."""


def used_up(limit: str, scope: str, count: int) -> dict[str, Any]:
    """Why a limit of calls blocks one against which waiting does not help."""
    counts = {"used": count, "threshold": count, "unit": "calls", "resets_at": None}
    return {"decision": "blocked", "limit": limit, "scope": scope, "subject": None, **counts}


SEARCH_USED_UP = used_up("tool:search", "thread", 2)
RUN_USED_UP = used_up("model", "run", 4)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service with SQLite and its own memory."""
    settings = {**LIMITS, "DASHBOARDS_URL": GRAFANA}
    with running_service(tmp_path_factory.mktemp("service"), **settings) as running:
        yield running


@pytest.fixture
def thread() -> str:
    """A new thread."""
    return f"thread-{uuid4().hex}"


def until_refused(service: Service, user_id: str) -> httpx.Response:
    """Ask for a user, on new threads, until it is refused; a new hour may begin meanwhile."""

    def refused() -> httpx.Response | None:
        response = service.ask(f"thread-{uuid4().hex}", "!", user_id)
        return None if response.status_code == 200 else response

    return eventually(refused)


def test_what_is_used_up(service: Service, thread: str) -> None:
    """A run or a thread that ends at its limit is answered with 403: to wait would not help."""
    user = f"user-{uuid4().hex}"
    for _ in range(LIMITS["USER_MODEL_LIMIT"] - LIMITS["RUN_MODEL_LIMIT"]):
        assert service.ask(thread, "!", user).status_code == 200
    # The user could wait, but the run could not.
    response = service.ask(thread, LOOP, user)
    assert (response.status_code, response.json()) == (403, {"detail": RUN_USED_UP})
    assert "retry-after" not in response.headers
    for _ in range(LIMITS["THREAD_MODEL_LIMIT"] - 6):
        assert service.ask(thread, "!").status_code == 200
    for _ in range(2):
        response = service.ask(thread, "!")
        assert response.status_code == 403
        assert response.json()["detail"] == used_up("model", "thread", 12)


def test_a_user_who_can_wait(service: Service, tmp_path: Path) -> None:
    """A user over an hourly quota, of calls or of money, is answered with 429 and how long."""
    user = f"user-{uuid4().hex}"
    response = until_refused(service, user)
    assert response.status_code == 429
    assert response.json()["violated-policies"] == ["user/user_id"]
    assert int(response.headers["retry-after"]) in range(3601)
    assert '"user/user_id";r=0;t=' in response.headers["ratelimit"]
    shown = service.client.get("/quota/me", headers={"x-forwarded-user": user}).json()["limits"]
    assert {each["policy"]: each["limit"] for each in shown} == {
        "user/user_id": 6,
        "user cost/user_id": 1,
    }
    assert service.ask(f"thread-{uuid4().hex}", "!").status_code == 200
    with running_service(tmp_path, USER_COST_LIMIT="0.002") as poor:
        response = until_refused(poor, user)
    assert response.json()["violated-policies"] == ["user cost/user_id"]


def test_a_stream(service: Service, thread: str) -> None:
    """A stream tells what tools answer, the refusal where it happens, the tokens, and the end."""
    told = service.stream(thread, "oak ash elm")
    refusals = [event.data["refusal"] for event in told if event.name == "tool"]
    assert refusals == [None, None, SEARCH_USED_UP]
    text = "".join(event.data for event in told if event.name == "token")
    assert text == "I looked up 3 words."
    final = {"text": text, "refusals": [SEARCH_USED_UP], "stopped": None}
    assert told[-1] == Event("final", final)
    told = service.stream(f"{thread}-again", LOOP)
    assert (told[-1].name, told[-1].data["stopped"]) == ("final", RUN_USED_UP)


def test_usage(service: Service, thread: str) -> None:
    """A thread's usage has its counts, and those of its newest run."""
    assert service.client.get(f"/threads/{thread}/usage").status_code == 404
    service.ask(thread, "oak 7")
    service.ask(thread, "ash")
    usage = service.usage(thread)
    spent = [usage[name].pop("spent")["model.total_tokens"] for name in ("thread", "run")]
    assert spent == [2550, 1200]
    assert usage == {
        "thread": {"model": 5, "tools": {"search": 2}},
        "run": {"model": 2, "tools": {"search": 1}},
    }


def test_metrics_are_guarded(service: Service, thread: str) -> None:
    """Whoever shows the token gets what runs and users did, and where Grafana is; nobody else."""
    service.ask(thread, "oak ash elm", f"user-of-{thread}")
    blocked = {"agent": "librarian", "limit": "tool:search", "thread_id": thread, "scope": "thread"}
    assert service.series()["langchain_quota_thread_blocked_total", frozenset(blocked.items())] == 1
    wrong = ("", "Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer ä")
    for shown in (*wrong, f"Bearer {TOKEN} {TOKEN}"):
        response = service.client.get("/metrics", headers={b"authorization": shown.encode()})
        assert response.status_code == 401
        assert "langchain_quota" not in response.text
    for password, status in ((TOKEN, 200), (f"{TOKEN}x", 401)):
        response = service.client.get("/quota/quota.json", auth=("quota", password))
        is_told = [f'"id":"{of}{thread}"' in response.text for of in ("", "user-of-")]
        assert (response.status_code, is_told) == (status, [status == 200] * 2)
        assert (f'"dashboards_url":"{GRAFANA}"' in response.text) == (status == 200)
    assert response.headers["www-authenticate"] == "Basic"
    assert service.client.get("/quota/", auth=("quota", TOKEN)).text.startswith("<!doctype html>")


def test_replicas_share_threads_and_quotas(
    postgres_server: PostgresServer, redis_server: RedisServer, thread: str, tmp_path: Path
) -> None:
    """Two replicas with the same databases are one service; a lost database is 503."""
    settings = {
        **LIMITS,
        "DATABASE_URL": postgres_server.database("SQL_ASCII"),
        "LANGCHAIN_QUOTA_REDIS_URL": redis_server.url,
    }
    with (
        running_service(tmp_path, **settings) as one,
        running_service(tmp_path, **settings) as other,
    ):
        one.ask(thread, "oak")
        other.ask(thread, "ash")
        assert one.ask(thread, "elm").json()["refusals"] == [SEARCH_USED_UP]
        assert one.usage(thread) == other.usage(thread)
        user = f"user-{uuid4().hex}"
        until_refused(one, user)
        assert until_refused(other, user).status_code == 429
        assert other.client.get("/readyz").status_code == 200
        in_redis = (redis_server, '"scope":"store"', "QuotaStoreError")
        for server, said, lost in (in_redis, (postgres_server, "PoolTimeout", "TimeoutError")):
            server.stop()
            response = other.ask(thread, "!")
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
            assert said in response.text
            ready = other.client.get("/readyz")
            assert (ready.status_code, lost in ready.text) == (503, True)
            assert other.client.get("/healthz").status_code == 200
            assert PASSWORD not in one.log + other.log
            server.start()
            eventually(lambda: other.client.get("/readyz").status_code == 200)
            assert other.ask(thread, "!").status_code == 200


def test_the_load(redis_server: RedisServer, tmp_path: Path) -> None:
    """The load driver asks until it is stopped, and grants more to users who are refused."""
    settings = {**LIMITS, "LANGCHAIN_QUOTA_REDIS_URL": redis_server.url}
    granted = {"agent": "librarian", "limit": "user", "scope": "user_id", "unit": "calls"}
    series = "langchain_quota_granted_total", frozenset(granted.items())
    with (
        running_service(tmp_path, **settings) as service,
        (tmp_path / "load.log").open("wb") as log,
        start_python(
            as_module("service.load"),
            *("--rate=40", service.url),
            env=environment(settings),
            stdout=log.fileno(),
            stderr=log.fileno(),
            imported=IMPORTED,
        ) as load,
    ):
        assert eventually(lambda: service.series().get(series, 0)) >= 10
        load.terminate()
        assert load.wait(DEADLINE) == 0
        assert "Traceback" not in service.log


def test_spans(tmp_path: Path, thread: str) -> None:
    """Spans are sent where OTEL's variables say: the agent's, under the request's."""
    with (
        running_receiver() as receiver,
        running_service(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url) as service,
    ):
        service.client.get("/healthz")
        service.ask(thread, "oak")
        assert service.stop() == 0
    names = {span.span_id: span.name for span in receiver.spans}
    above = {span.name: names.get(span.parent_id) for span in receiver.spans}
    assert above["POST /threads/{thread_id}/messages"] is None
    assert "POST /threads/{thread_id}/messages" in above.values()
    assert not any("healthz" in name for name in above)


def test_old_threads_can_be_deleted(postgres_server: PostgresServer, tmp_path: Path) -> None:
    """The page's SQL deletes all of a thread that nobody asked for a week, and of no other."""
    (sql,) = re.findall(r"^```sql\n(.+?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    url = postgres_server.database()
    with (
        running_service(tmp_path, DATABASE_URL=url) as service,
        psycopg.connect(url, autocommit=True) as database,
    ):
        for thread in ("old", "new"):
            assert service.ask(thread, "oak 7").status_code == 200
        kept = service.usage("new")
        database.execute(
            "UPDATE checkpoints SET checkpoint = jsonb_set(checkpoint, '{ts}',"
            " to_jsonb(now() - interval '8 days')) WHERE thread_id = 'old'"
        )
        database.execute(sql)
        left = database.execute(
            "SELECT thread_id FROM checkpoints UNION SELECT thread_id FROM checkpoint_blobs"
            " UNION SELECT thread_id FROM checkpoint_writes"
        )
        assert left.fetchall() == [("new",)]
        assert service.client.get("/threads/old/usage").status_code == 404
        assert service.usage("new") == kept
        assert service.ask("old", "oak").status_code == 200


def test_requests_are_finished_before_the_end(tmp_path: Path, thread: str) -> None:
    """After SIGTERM a run is finished and told; one that takes too long is cancelled."""
    with running_service(tmp_path, TOOL_SECONDS=1) as service:
        with service.asking(thread, "oak ash") as response:
            told = events(response)
            assert next(told).name == "tool"
            service.terminate()
            assert [event.name for event in told][-1] == "final"
        assert service.ended() == 0
    with running_service(tmp_path, TOOL_SECONDS=NEVER, SHUTDOWN_SECONDS=1) as service:
        with service.asking(f"{thread}-2", "oak") as response:
            service.terminate()
            with pytest.raises(httpx.RemoteProtocolError):
                response.read()
        assert service.ended() == 0
    # Another process goes on with what the threads have used.
    with running_service(tmp_path, **LIMITS) as service:
        assert service.usage(thread)["thread"]["tools"] == {"search": 2}
        assert service.ask(thread, "elm").json()["refusals"] == [SEARCH_USED_UP]
        assert service.ask(f"{thread}-2", "!").status_code == 200


def test_what_is_wrong_with_the_settings(tmp_path: Path) -> None:
    """Bad settings are told in one line each, all at once, without secrets, before the start."""
    bad = {
        "METRICS_TOKEN": "",
        "MODEL": "nobody:nothing",
        "DATABASE_URL": "mysql://root:hidden@db",
        "LANGCHAIN_QUOTA_REDIS_URL": "http://root:hidden@redis",
        "DASHBOARDS_URL": "grafana",
        "PORT": "70000",
        "WORKERS": "two",
        "THREAD_SEARCH_LIMIT": "-1",
        "USER_COST_LIMIT": "nan",
        "TOOL_SECONDS": "inf",
    }
    program = as_module("service")
    done = run_python(program, cwd=tmp_path, env=environment(bad), imported=IMPORTED)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert [line.partition(" is wrong: ")[0] for line in lines] == list(bad)
    assert "hidden" not in done.stderr


USER = {"content-type": "application/json", "x-forwarded-user": "anna"}
BAD_REQUESTS: list[dict[str, Any]] = [
    *({"content": body} for body in (b"", b"{", b"[]", b'{"text": 1}')),
    *({"json": {"text": text}} for text in ("", "a" * 8_001)),
    *({"headers": {"x-forwarded-user": user}} for user in ("", "u" * 129)),
]


def test_a_bad_request(service: Service) -> None:
    """What is no question is answered with 422, a huge body with 413; metrics count neither."""
    for path in ("messages", "messages/stream"):
        for wrong in BAD_REQUESTS:
            request = {"json": {"text": "!"}, "headers": USER, **wrong}
            assert service.client.post(f"/threads/bad/{path}", **request).status_code == 422
        for thread in ("t" * 129, "a%0Ab", "a%00b", "a%FFb"):
            response = service.client.post(f"/threads/{thread}/{path}", **question("!"))
            assert response.status_code == 422
    assert service.ask("huge", "a" * 65_536).status_code == 413
    labels = {value for _, labels in service.series() for _, value in labels}
    assert not {"anna", "bad", "huge"} & labels
    assert "Traceback" not in service.log


HUNG_UP = 32
"""How many clients hang up: more than pools have connections for those that do so at once."""


@pytest.mark.parametrize("path", ["messages", "messages/stream"])
def test_a_client_that_hangs_up(
    path: str, postgres_server: PostgresServer, redis_server: RedisServer, tmp_path: Path
) -> None:
    """The runs of clients that hang up are cancelled: their searches end, and nothing leaks."""
    settings = {
        "TOOL_SECONDS": NEVER,
        "SEARCHES_AT_ONCE": 1,
        "USER_MODEL_LIMIT": 1_000,
        "DATABASE_URL": postgres_server.database(),
        # Other services search, too.
        "LANGCHAIN_QUOTA_REDIS_URL": f"{redis_server.url.rpartition('/')[0]}/{len(path)}",
    }
    with running_service(tmp_path, **settings) as service:

        def hang_up(thread: str, seen: Callable[[], bool]) -> None:
            with connected(service, f"/threads/{thread}/{path}"):
                eventually(seen)

        def searches() -> float:
            """How many searches have begun."""
            name = "langchain_quota_wait_seconds_count"
            return sum(count for (each, _), count in service.series().items() if each == name)

        def open_files() -> float:
            return service.series()["process_open_fds", frozenset()]

        # A search can only begin when the one before has ended.
        for number in range(1, 4):
            hang_up(f"first-{number}", lambda: searches() == number)  # noqa: B023 - called at once
        before = open_files()

        def charged(thread: str) -> bool:
            return '"search"' in service.client.get(f"/threads/{thread}/usage").text

        with ThreadPoolExecutor(4) as pool:
            names = [f"hung-up-{number}" for number in range(HUNG_UP)]
            list(pool.map(lambda name: hang_up(name, lambda: charged(name)), names))
        begun = searches()
        hang_up("last", lambda: searches() > begun)
        # Pools of connections may have grown, but not by a file for each client.
        assert eventually(lambda: open_files() <= before + HUNG_UP // 2)
        assert service.client.get("/readyz").status_code == 200
        assert service.ask("first-1", "!").status_code == 200
        assert "Traceback" not in service.log


def connected(service: Service, path: str) -> socket.socket:
    """A connection on which a question was sent that calls for a search."""
    address = urlsplit(service.url)
    connection = socket.create_connection((str(address.hostname), int(address.port or 0)), 30)
    lines = (
        f"POST {path} HTTP/1.1",
        "host: test",
        "content-length: 15",
        *map(": ".join, USER.items()),
    )
    connection.sendall(
        "".join(f"{line}\r\n" for line in (*lines, "")).encode() + b'{"text": "oak"}'
    )
    return connection
