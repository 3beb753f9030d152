"""What the example service does with clients that behave badly."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import pytest

from tests.servers.postgres import PostgresServer
from tests.servers.prometheus import eventually
from tests.servers.redis import RedisServer
from tests.servers.service import Service, question, running_service

NEVER = 600
"""How long the tools of a service take that nobody waits for, in seconds."""
JSON = {"content-type": "application/json"}
GOOD = question("!", "anna")
MAX_LABEL = 64

BAD_BODIES: dict[str, bytes] = {
    "none": b"",
    "not JSON": b"{",
    "not UTF-8": b'{"text": "\xff", "user_id": "anna"}',
    "no object": b"[]",
    "null": b"null",
    "deep": b"[" * 30_000,
    "a long number": b'{"text": "!", "user_id": ' + b"9" * 5_000 + b"}",
    "no text": b'{"user_id": "anna"}',
    "no user": b'{"text": "!"}',
    "an empty text": json.dumps({**GOOD, "text": ""}).encode(),
    "a long text": json.dumps({**GOOD, "text": "a" * 8_001}).encode(),
    "half a character": b'{"text": "\\ud800", "user_id": "anna"}',
    "a number as text": b'{"text": 1, "user_id": "anna"}',
    "an empty user": json.dumps({**GOOD, "user_id": ""}).encode(),
    "a long user": json.dumps({**GOOD, "user_id": "u" * 129}).encode(),
    "a user of two lines": json.dumps({**GOOD, "user_id": "anna\nbert"}).encode(),
    "half a user": b'{"text": "!", "user_id": "\\ud800"}',
    "half a name": b'{"text": "!", "user_id": "anna", "\\ud800": 1}',
    "more than asked for": json.dumps({**GOOD, "admin": True}).encode(),
}
BAD_THREADS = {
    "long": "t" * 129,
    "10 kB": "t" * 10_000,
    "a newline": "a%0Ab",
    "a newline at the end": "a%0A",
    "NUL": "a%00b",
    "a line separator": "a%E2%80%A8b",
    "not UTF-8": "a%FFb",
    "half a character": "a%ED%A0%80b",
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service with SQLite and its own memory."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def endless_with_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose tools never answer, with SQLite and its own memory."""
    with running_service(tmp_path_factory.mktemp("service"), TOOL_SECONDS=NEVER) as running:
        yield running


@pytest.fixture(scope="module")
def endless_with_servers(
    postgres_server: PostgresServer,
    redis_server: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Service]:
    """A service whose tools never answer, with PostgreSQL and Redis."""
    settings = {
        "TOOL_SECONDS": NEVER,
        "DATABASE_URL": postgres_server.database(),
        "LANGCHAIN_QUOTA_REDIS_URL": redis_server.url,
    }
    with running_service(tmp_path_factory.mktemp("service"), **settings) as running:
        yield running


@pytest.fixture(params=["endless_with_sqlite", "endless_with_servers"])
def endless(request: pytest.FixtureRequest) -> Service:
    """A service whose tools never answer, with either set of databases."""
    service: Service = request.getfixturevalue(request.param)
    return service


def check_problem(service: Service, response: httpx.Response, status: int, kind: str) -> None:
    """A problem has its shape, and nothing fell over."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert "Traceback" not in service.log


@pytest.mark.parametrize("path", ["messages", "messages/stream"])
@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_bad_body(service: Service, body: bytes, path: str) -> None:
    """A body that is no question is answered with 422, in the problem's shape."""
    response = service.client.post(f"/threads/bad-body/{path}", content=body, headers=JSON)
    check_problem(service, response, 422, "invalid_request")


@pytest.mark.parametrize("thread", BAD_THREADS.values(), ids=BAD_THREADS)
def test_a_bad_thread(service: Service, thread: str) -> None:
    """An id that is too long, of several lines or no text is answered with 422 everywhere."""
    for path in ("messages", "messages/stream"):
        response = service.client.post(f"/threads/{thread}/{path}", json=GOOD)
        check_problem(service, response, 422, "invalid_request")
    response = service.client.get(f"/threads/{thread}/usage")
    check_problem(service, response, 422, "invalid_request")


def test_what_was_sent_is_not_sent_back(service: Service) -> None:
    """The answer to a bad question does not repeat it, however long it is."""
    body = {"text": ["<script>"], **{f"<script>{number}": 1 for number in range(2_000)}}
    response = service.client.post("/threads/echo/messages", json=body)
    check_problem(service, response, 422, "invalid_request")
    assert response.json()["error"]["message"].split("; ") == [
        "body.text: Input should be a valid string",
        "body.user_id: Field required",
        "body: Extra inputs are not permitted",
    ]


@pytest.mark.parametrize("thread", ["t" * 128, "%F0%9F%A6%89 a b", "..%2e", "%25s%25n"])
def test_the_oddest_good_thread(service: Service, thread: str) -> None:
    """Any printable id of up to 128 characters is a thread of its own."""
    assert service.client.post(f"/threads/{thread}/messages", json=GOOD).status_code == 200
    used = service.client.get(f"/threads/{thread}/usage").json()
    assert used["thread"]["model"] == 1


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/threads//messages", 404, "not_found"),
        ("POST", "/threads/a%2Fb/messages", 404, "not_found"),
        ("GET", "/threads/a/messages", 405, "method_not_allowed"),
        ("DELETE", "/threads/a/usage", 405, "method_not_allowed"),
    ],
)
def test_no_such_thing(service: Service, method: str, path: str, status: int, kind: str) -> None:
    """What does not exist is said in the problem's shape, too."""
    check_problem(service, service.client.request(method, path), status, kind)


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
@pytest.mark.parametrize("size", [64 * 1024 + 1, 4 * 1024 * 1024])
def test_a_huge_body(service: Service, size: int, declared: bool) -> None:  # noqa: FBT001 - a parameter
    """A body over the bound is answered with 413, whether it says how long it is or not."""
    body: Any = b"a" * size
    content = body if declared else (body[at : at + 10_000] for at in range(0, size, 10_000))
    response = service.client.post("/threads/huge/messages", content=content, headers=JSON)
    check_problem(service, response, 413, "body_too_large")


def test_a_body_without_end(service: Service) -> None:
    """A client that never stops sending gets an error, and then the connection is closed."""
    with _connected(service) as connection:
        _send_head(connection, "/threads/endless/messages", "transfer-encoding: chunked")
        chunks = (b"10000\r\n" + b"a" * 0x10000 + b"\r\n" for _ in range(8_192))
        with pytest.raises(ConnectionError):
            any(map(connection.sendall, chunks))  # all: sendall gives None
    assert service.client.get("/healthz").status_code == 200


def test_a_body_at_its_bound(service: Service) -> None:
    """A body of exactly the bound is read."""
    body = json.dumps(GOOD).encode().ljust(64 * 1024)
    response = service.client.post("/threads/bound/messages", content=body, headers=JSON)
    assert response.status_code == 200


def test_text_that_a_database_may_not_like(
    postgres_server: PostgresServer, redis_server: RedisServer, tmp_path: Path
) -> None:
    """NUL characters and the like in a text are no problem for PostgreSQL, nor users for Redis."""
    settings = {
        "DATABASE_URL": postgres_server.database(),
        "LANGCHAIN_QUOTA_REDIS_URL": redis_server.url,
    }
    with running_service(tmp_path, **settings) as service:
        for text in ("\0", "a\0b", "\U0001f989", "\u2028", "%s"):
            body = {"text": text, "user_id": "{anna}:*:%s 🦉"}
            response = service.client.post("/threads/odd 🦉/messages", json=body)
            assert response.status_code == 200, service.log


def test_labels_stay_bounded(service: Service) -> None:
    """Bad requests leave no series, and long ids no long labels."""
    service.ask("t" * 128, "oak", "u" * 128)
    before = set(service.series())
    for body in BAD_BODIES.values():
        service.client.post("/threads/labels/messages", content=body, headers=JSON)
    for thread in BAD_THREADS.values():
        service.client.post(f"/threads/{thread}/messages", json=GOOD)
    after = set(service.series())
    assert after == before
    labels = [label for _, labels in after for label in labels]
    assert all(len(value) <= MAX_LABEL and value.isprintable() for _, value in labels)
    assert not any("u" * 10 in value or value in {"anna", "labels"} for _, value in labels)


def test_one_run_at_a_time(endless: Service) -> None:
    """A thread with a run going on answers 409, in both forms; another thread runs."""
    with endless.asking("busy", "oak") as response:
        assert response.status_code == 200
        for path in ("messages", "messages/stream"):
            refused = endless.client.post(f"/threads/busy/{path}", json=GOOD)
            check_problem(endless, refused, 409, "thread_busy")
            assert int(refused.headers["retry-after"]) > 0
        assert endless.ask("free", "!").status_code == 200
    _wait_until_free(endless, "busy")


def test_concurrent_posts_to_one_thread(service: Service) -> None:
    """Of many posts at once, each is served or gets "busy"; counts are exact."""
    with ThreadPoolExecutor(20) as pool:
        asked = pool.map(lambda _: service.ask("crowded", "!").status_code, range(60))
        statuses = list(asked)
    assert set(statuses) <= {200, 409}
    assert service.usage("crowded")["thread"]["model"] == statuses.count(200) > 0


HUNG_UP = 32
"""How many clients hang up: more than pools have connections for those that do so at once."""


@pytest.mark.parametrize("path", ["messages", "messages/stream"])
def test_a_client_that_hangs_up(endless: Service, path: str) -> None:
    """The runs of clients that hang up are cancelled: nothing leaks, and their threads go on."""
    endless.ask("first", "!")
    names = [f"hung-up-{uuid4().hex}" for _ in range(2 + HUNG_UP)]

    def hang_up(thread: str) -> None:
        with _connected(endless) as connection:
            body = json.dumps(question("oak", f"user of {thread}"))
            _send_head(connection, f"/threads/{thread}/{path}", f"content-length: {len(body)}")
            connection.sendall(body.encode())
            # The tool has been called when the model has been charged, and waits.
            eventually(lambda: _counted(endless, thread))

    # The client's connections and the database's are open.
    for thread in names[:2]:
        hang_up(thread)
        _wait_until_free(endless, thread)
    before = _open_files(endless)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hang_up, names[2:]))
    for thread in names:
        _wait_until_free(endless, thread)
        assert endless.usage(thread)["thread"]["tools"] == {"search": 1}
    # Pools of connections may have grown, but not by a file for each client.
    assert eventually(lambda: _open_files(endless) <= before + HUNG_UP // 2)
    assert endless.client.get("/readyz").status_code == 200
    assert "Traceback" not in endless.log


@pytest.mark.parametrize("path", ["messages", "messages/stream"])
def test_a_client_that_hangs_up_early(
    redis_server: RedisServer, endless_with_servers: Service, path: str
) -> None:
    """A client that hangs up before there is anything to tell it cancels its run, too."""
    service = endless_with_servers
    thread = f"early-{uuid4().hex}"
    redis_server.pause()
    try:
        with _connected(service) as connection:
            body = json.dumps(question("oak"))
            _send_head(connection, f"/threads/{thread}/{path}", f"content-length: {len(body)}")
            connection.sendall(body.encode())
            # The thread has begun, and its first model call waits for Redis.
            eventually(lambda: service.client.get(f"/threads/{thread}/usage").is_success)
    finally:
        redis_server.resume()
    _wait_until_free(service, thread)


def test_a_client_that_hangs_up_in_its_body(service: Service) -> None:
    """A client that goes before its body is complete leaves nothing behind."""
    before = _open_files(service)
    for _ in range(20):
        with _connected(service) as connection:
            _send_head(connection, "/threads/half/messages", "content-length: 100")
            connection.sendall(b'{"text"')
    assert eventually(lambda: _open_files(service) <= before + 1)
    assert service.client.get("/threads/half/usage").status_code == 404
    assert "Traceback" not in service.log


def _connected(service: Service) -> socket.socket:
    address = urlsplit(service.url)
    return socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=30)


def _send_head(connection: socket.socket, path: str, header: str) -> None:
    lines = (f"POST {path} HTTP/1.1", "host: test", "content-type: application/json", header)
    connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())


def _counted(service: Service, thread: str) -> bool:
    """Whether the search of a thread has been let through."""
    response = service.client.get(f"/threads/{thread}/usage")
    return response.status_code == 200 and "search" in response.json()["thread"]["tools"]


def _wait_until_free(service: Service, thread: str) -> None:
    eventually(lambda: service.ask(thread, "!").status_code == 200)


def _open_files(service: Service) -> float:
    return service.series()["process_open_fds", frozenset()]
