"""The example service as a real process, with real databases."""

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import psycopg
import pytest

from tests.forked import as_module, run_python
from tests.server.postgres import PASSWORD, PostgresServer
from tests.server.prometheus import eventually
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


def used_up(limit: str, scope: str, tool: str | None, count: int) -> dict[str, Any]:
    """How the service tells that a limit of calls is used up."""
    return {
        "type": "quota_exceeded",
        "limit": limit,
        "scope": scope,
        "kind": "tool" if tool else "model",
        "tool": tool,
        "unit": "calls",
        "used": count,
        "limit_value": count,
        "resets_at": None,
        "message": f"the {scope} limit of '{limit}' is used up ({count} of {count} calls)",
    }


SEARCH_USED_UP = used_up("tool:search", "thread", "search", 2)
RUN_USED_UP = used_up("model", "run", None, 4)


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
    assert response.status_code == 403
    assert "retry-after" not in response.headers
    assert response.json() == {"error": RUN_USED_UP, "thread_id": thread, "refusals": []}
    for _ in range(LIMITS["THREAD_MODEL_LIMIT"] - 6):
        assert service.ask(thread, "!").status_code == 200
    for _ in range(2):
        response = service.ask(thread, "!")
        assert response.status_code == 403
        assert response.json()["error"] == used_up("model", "thread", None, 12)


def test_a_user_who_can_wait(service: Service) -> None:
    """A user over the hourly quota is answered with 429 and the time until the next hour."""
    user = f"user-{uuid4().hex}"
    response = until_refused(service, user)
    assert response.status_code == 429
    error = response.json()["error"]
    assert (error["limit"], error["scope"], error["used"]) == ("user", "user_id", 6)
    resets_at = datetime.fromisoformat(error["resets_at"])
    assert (resets_at.minute, resets_at.second, resets_at.tzinfo) == (0, 0, UTC)
    # The header was made a moment ago.
    left = (resets_at - datetime.now(UTC)).total_seconds()
    assert left <= int(response.headers["retry-after"]) <= 3600
    assert service.ask(f"thread-{uuid4().hex}", "!").status_code == 200

    def streamed() -> bool:
        # A run that is refused at once is answered as without streaming.
        with service.asking("streamed", "!", user) as response:
            response.read()
        return response.status_code == 429 and "retry-after" in response.headers

    eventually(streamed)


def test_budgets(thread: str, tmp_path: Path) -> None:
    """A thread without tokens is answered with 403, a user without money with 429."""
    with running_service(tmp_path, THREAD_TOKEN_LIMIT=2000) as service:
        of_tokens = service.ask(thread, LOOP)
        used = service.usage(thread)["thread"]["tokens"]
    with running_service(tmp_path, USER_COST_LIMIT="0.002") as service:
        of_money = until_refused(service, f"user-{uuid4().hex}")
    assert (of_tokens.status_code, of_money.status_code) == (403, 429)
    assert of_tokens.json()["error"]["message"] == (
        f"the thread limit of 'tokens' is used up ({used} of 2000 tokens)"
    )
    assert of_money.json()["error"]["message"] == (
        "the user_id limit of 'user cost' is used up (0.0024 of 0.002 dollars)"
    )
    units = [each.json()["error"]["unit"] for each in (of_tokens, of_money)]
    assert units == ["tokens", "dollars"]


def test_a_stream(service: Service, thread: str) -> None:
    """A stream tells steps, the refusal where it happens, the tokens, and the answer."""
    told = service.stream(thread, "oak ash elm")
    assert [event.name for event in told if event.name != "token"] == [
        *("tool_calls", "tool_result"),
        *("tool_calls", "tool_result"),
        *("tool_calls", "refusal", "tool_result"),
        "final",
    ]
    text = "".join(event.data["text"] for event in told if event.name == "token")
    assert text == "I looked up 3 words."
    final = {"thread_id": thread, "text": text, "refusals": [SEARCH_USED_UP]}
    assert told[-1] == Event("final", final)
    assert Event("refusal", SEARCH_USED_UP) in told
    told = service.stream(f"{thread}-again", LOOP)
    assert (told[-1].name, told[-1].data["error"]) == ("error", RUN_USED_UP)


def test_usage(service: Service, thread: str) -> None:
    """A thread's usage has its counts, those of its newest run, and how its limits stand."""
    assert service.client.get(f"/threads/{thread}/usage").status_code == 404
    service.ask(thread, "oak 7")
    service.ask(thread, "ash")
    usage = service.usage(thread)
    spent = {"tokens": 2550, "dollars": 0.0075}
    assert usage["thread"] == {"model": 5, "tools": {"search": 2}, **spent}
    spent = {"tokens": 1200, "dollars": 0.00345}
    assert usage["run"] == {"model": 2, "tools": {"search": 1}, **spent}
    stand = {each["limit"]: (each["used"], each["limit_value"]) for each in usage["limits"]}
    assert stand == {"model": (5, 12), "tokens": (2550, 20_000), "tool:search": (2, 2)}


def test_metrics_are_guarded(service: Service, thread: str) -> None:
    """Whoever shows the token gets what runs and users did, and where Grafana is; nobody else."""
    service.ask(thread, "oak ash elm", f"user-of-{thread}")
    blocked = {"agent": "librarian", "limit": "tool:search", "thread_id": thread, "scope": "thread"}
    assert service.series()["langchain_quota_thread_blocked_total", frozenset(blocked.items())] == 1
    wrong = ("", "Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer ä")
    for shown in (*wrong, f"Bearer {TOKEN} {TOKEN}"):
        response = service.client.get("/metrics", headers={b"authorization": shown.encode()})
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == 'Bearer realm="metrics"'
        assert "langchain_quota" not in response.text
    for password, status in ((TOKEN, 200), (f"{TOKEN}x", 401)):
        response = service.client.get("/quota/quota.json", auth=("me", password))
        is_told = [f'"id":"{of}{thread}"' in response.text for of in ("", "user-of-")]
        assert (response.status_code, is_told) == (status, [status == 200] * 2)
        assert (f'"dashboards_url":"{GRAFANA}"' in response.text) == (status == 200)
    assert response.headers["www-authenticate"] == 'Basic realm="metrics"'
    assert service.client.get("/quota/", auth=("me", TOKEN)).text.startswith("<!doctype html>")


def test_replicas_share_threads_and_quotas(
    postgres_server: PostgresServer, redis_server: RedisServer, thread: str, tmp_path: Path
) -> None:
    """Two replicas with the same databases are one service; a lost store is 503."""
    settings = {
        **LIMITS,
        "DATABASE_URL": postgres_server.database(),
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
        ready = other.client.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, {"threads": "ok", "quotas": "ok"})

        redis_server.stop()
        response = other.ask(thread, "!")
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        error = response.json()["error"]
        assert (error["scope"], error["used"], error["resets_at"]) == ("store", None, None)
        ready = other.client.get("/readyz")
        assert (ready.status_code, ready.json()["quotas"]) == (503, "failed")
        assert other.client.get("/healthz").status_code == 200

        assert PASSWORD not in one.log + other.log
        redis_server.start()
        eventually(lambda: other.client.get("/readyz").status_code == 200)
        assert other.ask(thread, "!").status_code == 200


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
            assert next(told).name == "tool_calls"
            service.terminate()
            assert [event.name for event in told][-1] == "final"
        assert service.ended() == 0
    with running_service(tmp_path, TOOL_SECONDS=NEVER, SHUTDOWN_SECONDS=1) as service:
        with service.asking(f"{thread}-2", "oak") as response:
            told = events(response)
            assert next(told).name == "tool_calls"
            service.terminate()
            with pytest.raises(httpx.RemoteProtocolError):
                list(told)
        assert service.ended() == 0
    # Another process goes on with what the threads have used.
    with running_service(tmp_path, **LIMITS) as service:
        assert service.usage(thread)["thread"]["tools"] == {"search": 2}
        assert service.ask(thread, "elm").json()["refusals"] == [SEARCH_USED_UP]
        assert service.ask(f"{thread}-2", "!").status_code == 200


def refused_start(directory: Path, settings: dict[str, str]) -> list[str]:
    """What the service says of settings with which it does not start."""
    result = run_python(
        as_module("service"), cwd=directory, env=environment(settings), imported=IMPORTED
    )
    assert result.returncode == 2
    assert "hidden" not in result.stderr
    return result.stderr.splitlines()


def test_what_is_wrong_with_the_settings(tmp_path: Path) -> None:
    """Bad settings are told in one line each, all at once, without secrets, before the start."""
    bad = {
        "METRICS_TOKEN": "",
        "MODEL": "nonsense",
        "DATABASE_URL": "mysql://root:hidden@db",
        "LANGCHAIN_QUOTA_REDIS_URL": "http://root:hidden@redis",
        "PORT": "70000",
        "WORKERS": "two",
        "THREAD_SEARCH_LIMIT": "-1",
        "TOOL_SECONDS": "nan",
    }
    assert [line.split()[0] for line in refused_start(tmp_path, bad)] == list(bad)
    for name, value in (
        ("METRICS_TOKEN", "short"),
        ("MODEL", "nobody:nothing"),
        ("DATABASE_URL", "sqlite:///no/such/directory"),
        ("DATABASE_URL", "postgresql://root:hidden@db/agent?nonsense=1"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
    ):
        (line,) = refused_start(tmp_path, {name: value})
        assert line.startswith(f"{name} ")


JSON = {"content-type": "application/json"}
GOOD = question("!", "anna")
BAD_BODIES = [
    *(b"", b"{", b"[]", b"null", b"[" * 30_000, b'{"user_id": "anna"}', b'{"text": "!"}'),
    b'{"text": "\xff", "user_id": "anna"}',
    b'{"text": "!", "user_id": ' + b"9" * 5_000 + b"}",
    b'{"text": "\\ud800", "user_id": "anna"}',
    b'{"text": "!", "user_id": "anna", "\\ud800": 1}',
    *(
        json.dumps({**GOOD, **wrong}).encode()
        for wrong in (
            *({"text": ""}, {"text": 1}, {"text": "a" * 8_001}, {"admin": True}),
            *({"user_id": ""}, {"user_id": "u" * 129}, {"user_id": "anna\nbert"}),
        )
    ),
]
BAD_THREADS = ["t" * 129, "t" * 10_000, *(f"a%{each}b" for each in ("0A", "00", "E2%80%A8", "FF"))]


@pytest.fixture(scope="module")
def waiting(
    postgres_server: PostgresServer,
    redis_server: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Service]:
    """A service whose tools never answer, with PostgreSQL and Redis."""
    settings = {
        "TOOL_SECONDS": 600,
        "DATABASE_URL": postgres_server.database(),
        "LANGCHAIN_QUOTA_REDIS_URL": redis_server.url,
    }
    with running_service(tmp_path_factory.mktemp("service"), **settings) as running:
        yield running


def check_problem(waiting: Service, response: httpx.Response, status: int, kind: str) -> None:
    """A problem has its shape, does not repeat what was sent, and nothing fell over."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert len(response.text) < 500
    assert "Traceback" not in waiting.log


@pytest.mark.parametrize("path", ["messages", "messages/stream"])
def test_a_bad_request(waiting: Service, path: str) -> None:
    """A body that is no question, and an id that is no text of a line, are answered with 422.

    They leave no series, and long ids no long labels.
    """
    waiting.ask("t" * 128, "!", "u" * 128)
    before = set(waiting.series())
    for body in BAD_BODIES:
        response = waiting.client.post(f"/threads/bad-body/{path}", content=body, headers=JSON)
        check_problem(waiting, response, 422, "invalid_request")
    for thread in BAD_THREADS:
        response = waiting.client.post(f"/threads/{thread}/{path}", json=GOOD)
        check_problem(waiting, response, 422, "invalid_request")
        response = waiting.client.get(f"/threads/{thread}/usage")
        check_problem(waiting, response, 422, "invalid_request")
    after = set(waiting.series())
    assert after == before
    labels = [value for _, labels in after for _, value in labels]
    assert all(len(value) <= 64 and value.isprintable() for value in labels)
    assert not {"anna", "bad-body"}.intersection(labels)
    check_problem(waiting, waiting.client.get("/nothing"), 404, "not_found")
    check_problem(waiting, waiting.client.get("/threads/a/messages"), 405, "method_not_allowed")


def test_a_huge_body(waiting: Service) -> None:
    """A body over the bound is answered with 413; who never stops sending is cut off."""
    most, path = 64 * 1024, "/threads/huge/messages"
    for size in (most + 1, 4 * 1024 * 1024):
        body = b"a" * size
        contents: list[Any] = [body, (body[at : at + 10_000] for at in range(0, size, 10_000))]
        for content in contents:
            response = waiting.client.post(path, content=content, headers=JSON)
            check_problem(waiting, response, 413, "body_too_large")
    body = json.dumps(GOOD).encode().ljust(most)
    assert waiting.client.post(path, content=body, headers=JSON).status_code == 200
    with connected(waiting, path, "transfer-encoding: chunked") as connection:
        chunks = (b"10000\r\n" + b"a" * 0x10000 + b"\r\n" for _ in range(8_192))
        with pytest.raises(ConnectionError):
            any(map(connection.sendall, chunks))  # all: sendall gives None
    assert waiting.client.get("/healthz").status_code == 200


def test_one_run_at_a_time(waiting: Service) -> None:
    """A thread with a run going on answers 409, in both forms; another thread runs."""
    with waiting.asking("busy", "oak") as response:
        assert response.status_code == 200
        for path in ("messages", "messages/stream"):
            refused = waiting.client.post(f"/threads/busy/{path}", json=GOOD)
            check_problem(waiting, refused, 409, "thread_busy")
            assert int(refused.headers["retry-after"]) > 0
        assert waiting.ask("free", "!").status_code == 200
    eventually(lambda: waiting.ask("busy", "!").status_code == 200)
    with ThreadPoolExecutor(20) as pool:
        asked = pool.map(lambda _: waiting.ask("crowded", "!").status_code, range(60))
        statuses = list(asked)
    assert set(statuses) <= {200, 409}
    assert waiting.usage("crowded")["thread"]["model"] == statuses.count(200) > 0


HUNG_UP = 32
"""How many clients hang up: more than pools have connections for those that do so at once."""


@pytest.mark.parametrize("path", ["messages", "messages/stream"])
def test_a_client_that_hangs_up(waiting: Service, path: str) -> None:
    """The runs of clients that hang up are cancelled: nothing leaks, and their threads go on."""
    names = [f"hung-up-{uuid4().hex}" for _ in range(2 + HUNG_UP)]

    def hang_up(thread: str) -> None:
        body = json.dumps(question("oak", f"user of {thread}"))
        length = f"content-length: {len(body)}"
        with connected(waiting, f"/threads/{thread}/{path}", length) as connection:
            connection.sendall(body.encode())
            # The tool has been called when the model has been charged, and waits.
            usage = f"/threads/{thread}/usage"
            eventually(lambda: '"search"' in waiting.client.get(usage).text)

    def free(thread: str) -> None:
        eventually(lambda: waiting.ask(thread, "!").status_code == 200)

    def open_files() -> float:
        return waiting.series()["process_open_fds", frozenset()]

    # The client's connections and the database's are open.
    for thread in names[:2]:
        hang_up(thread)
        free(thread)
    before = open_files()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hang_up, names[2:]))
    for thread in names:
        free(thread)
        assert waiting.usage(thread)["thread"]["tools"] == {"search": 1}
    # Pools of connections may have grown, but not by a file for each client.
    assert eventually(lambda: open_files() <= before + HUNG_UP // 2)
    assert waiting.client.get("/readyz").status_code == 200
    assert "Traceback" not in waiting.log


def connected(waiting: Service, path: str, header: str) -> socket.socket:
    """A connection on which the head of a request was sent."""
    address = urlsplit(waiting.url)
    place = (str(address.hostname), int(address.port or 0))
    connection = socket.create_connection(place, timeout=30)
    lines = (f"POST {path} HTTP/1.1", "host: test", "content-type: application/json", header)
    connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
    return connection
