"""The example service as a real process, with real databases."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from langchain_quota import RedisStore
from tests.forked import as_module, run_python
from tests.servers.otlp import Protocol, ReceivedSpan, running_receiver
from tests.servers.postgres import PASSWORD, PostgresServer
from tests.servers.prometheus import eventually
from tests.servers.redis import RedisServer
from tests.servers.service import (
    IMPORTED,
    TOKEN,
    Event,
    Service,
    environment,
    events,
    question,
    running_service,
)

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
NEVER = 600
"""Seconds after which no test waits any more: a tool that takes so long does not end."""
SEARCH_USED_UP = {
    "type": "quota_exceeded",
    "limit": "tool:search",
    "scope": "thread",
    "kind": "tool",
    "tool": "search",
    "unit": "calls",
    "used": 2,
    "limit_value": 2,
    "resets_at": None,
    "message": "the thread limit of 'tool:search' is used up (2 of 2 calls)",
}
RUN_USED_UP = {
    "type": "quota_exceeded",
    "limit": "model",
    "scope": "run",
    "kind": "model",
    "tool": None,
    "unit": "calls",
    "used": 4,
    "limit_value": 4,
    "resets_at": None,
    "message": "the run limit of 'model' is used up (4 of 4 calls)",
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service with SQLite and its own memory."""
    with running_service(tmp_path_factory.mktemp("service"), **LIMITS) as running:
        yield running


@pytest.fixture
def thread() -> str:
    """A new thread."""
    return f"thread-{uuid4().hex}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    """The URL of a new database of each kind."""
    if request.param == "sqlite":
        return "sqlite:///threads.sqlite"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.database()


def until_refused(service: Service, user_id: str) -> httpx.Response:
    """Ask for a user, on new threads, until it is refused; a new hour may begin meanwhile."""

    def refused() -> httpx.Response | None:
        response = service.ask(f"thread-{uuid4().hex}", "!", user_id)
        return None if response.status_code == 200 else response

    return eventually(refused)


def data(told: list[Event], name: str) -> list[object]:
    """What events of a name say."""
    return [event.data for event in told if event.name == name]


def test_an_answer(service: Service, thread: str) -> None:
    """A question is answered after tool calls, and nothing is refused."""
    response = service.ask(thread, "oak 7")
    assert response.status_code == 200
    assert response.json() == {
        "thread_id": thread,
        "text": "I looked up 2 words.",
        "refusals": [],
    }


def test_a_refusal_that_the_agent_survives(service: Service, thread: str) -> None:
    """A tool call over its limit is listed in the answer."""
    response = service.ask(thread, "oak ash elm")
    assert response.status_code == 200
    assert response.json() == {
        "thread_id": thread,
        "text": "I looked up 3 words.",
        "refusals": [SEARCH_USED_UP],
    }


def test_a_run_that_is_used_up(service: Service, thread: str) -> None:
    """A run that ends at its limit is answered with 403: to wait would not help."""
    response = service.ask(thread, LOOP)
    assert response.status_code == 403
    assert "retry-after" not in response.headers
    assert response.json() == {"error": RUN_USED_UP, "thread_id": thread, "refusals": []}
    assert service.ask(thread, "!").status_code == 200


def test_a_thread_that_is_used_up(service: Service, thread: str) -> None:
    """A thread at the end of its budget is answered with 403, again and again."""
    for _ in range(LIMITS["THREAD_MODEL_LIMIT"]):
        assert service.ask(thread, "!").status_code == 200
    for _ in range(2):
        response = service.ask(thread, "!")
        assert response.status_code == 403
        error = response.json()["error"]
        assert (error["limit"], error["scope"]) == ("model", "thread")
        assert (error["used"], error["limit_value"]) == (12, 12)


def test_a_user_who_can_wait(service: Service) -> None:
    """A user over the hourly quota is answered with 429 and the time until the next hour."""
    user = f"user-{uuid4().hex}"
    response = until_refused(service, user)
    assert response.status_code == 429
    error = response.json()["error"]
    assert (error["limit"], error["scope"]) == ("user", "user_id")
    assert (error["used"], error["limit_value"]) == (6, 6)
    resets_at = datetime.fromisoformat(error["resets_at"])
    assert (resets_at.minute, resets_at.second, resets_at.utcoffset()) == (
        0,
        0,
        UTC.utcoffset(None),
    )
    # The header was made a moment ago.
    left = (resets_at - datetime.now(UTC)).total_seconds()
    assert left <= int(response.headers["retry-after"]) <= 3600
    assert service.ask(f"thread-{uuid4().hex}", "!").status_code == 200


def test_a_thread_without_tokens(thread: str, tmp_path: Path) -> None:
    """A thread that has used its tokens is answered with 403, in tokens."""
    with running_service(tmp_path, THREAD_TOKEN_LIMIT=2000) as service:
        response = service.ask(thread, LOOP)
        used = service.usage(thread)["thread"]["tokens"]
    assert response.status_code == 403
    error = response.json()["error"]
    assert error["unit"] == "tokens"
    assert (error["limit"], error["scope"], error["kind"]) == ("tokens", "thread", "model")
    assert (error["used"], error["limit_value"]) == (used, 2000)
    assert error["message"] == f"the thread limit of 'tokens' is used up ({used} of 2000 tokens)"


def test_a_user_without_money(tmp_path: Path) -> None:
    """A user whose calls cost too much in an hour is answered with 429, in dollars."""
    user = f"user-{uuid4().hex}"
    with running_service(tmp_path, USER_COST_LIMIT="0.002") as service:
        response = until_refused(service, user)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) > 0
    error = response.json()["error"]
    assert (error["limit"], error["scope"]) == ("user cost", "user_id")
    assert (error["unit"], error["used"], error["limit_value"]) == ("dollars", 0.0024, 0.002)
    assert error["message"] == (
        "the user_id limit of 'user cost' is used up (0.0024 of 0.002 dollars)"
    )


def test_of_two_limits_the_harder_one_is_told(service: Service, thread: str) -> None:
    """Where waiting helps against one limit and not against another, it does not help."""
    user = f"user-{uuid4().hex}"
    for _ in range(LIMITS["USER_MODEL_LIMIT"] - LIMITS["RUN_MODEL_LIMIT"]):
        assert service.ask(thread, "!", user).status_code == 200
    response = service.ask(thread, LOOP, user)
    assert response.status_code == 403
    assert response.json()["error"] == RUN_USED_UP


def test_a_stream(service: Service, thread: str) -> None:
    """A stream tells steps, the refusal where it happens, the tokens, and the answer."""
    told = service.stream(thread, "oak ash elm")
    names = [event.name for event in told]
    assert [name for name in names if name != "token"] == [
        *("tool_calls", "tool_result"),
        *("tool_calls", "tool_result"),
        *("tool_calls", "refusal", "tool_result"),
        "final",
    ]
    assert data(told, "tool_calls") == [{"tools": ["search"]}] * 3
    assert data(told, "refusal") == [SEARCH_USED_UP]
    text = "".join(event.data["text"] for event in told if event.name == "token")
    assert data(told, "final") == [
        {"thread_id": thread, "text": text, "refusals": [SEARCH_USED_UP]}
    ]
    assert text == "I looked up 3 words."


def test_a_stream_that_is_ended(service: Service, thread: str) -> None:
    """A run that ends at a limit while it is streamed ends with the shape of the refusal."""
    told = service.stream(thread, LOOP)
    assert data(told, "final") == []
    assert told[-1] == Event("error", {"error": RUN_USED_UP, "thread_id": thread, "refusals": []})


def test_a_stream_that_does_not_begin(service: Service, thread: str) -> None:
    """A run that is refused at once is answered as without streaming."""
    user = f"user-{uuid4().hex}"
    until_refused(service, user)

    def refused() -> bool:
        with service.asking(thread, "!", user) as response:
            response.read()
        return response.status_code == 429 and "retry-after" in response.headers

    eventually(refused)


def test_usage(service: Service, thread: str) -> None:
    """A thread's usage has its counts, those of its newest run, and how its limits stand."""
    service.ask(thread, "oak 7")
    service.ask(thread, "ash")
    assert service.usage(thread) == {
        "thread_id": thread,
        "thread": {"model": 5, "tools": {"search": 2}, "tokens": 2550, "dollars": 0.0075},
        "run": {"model": 2, "tools": {"search": 1}, "tokens": 1200, "dollars": 0.00345},
        "limits": [
            {"limit": "model", "scope": "thread", "unit": "calls", "used": 5, "limit_value": 12},
            {
                "limit": "tokens",
                "scope": "thread",
                "unit": "tokens",
                "used": 2550,
                "limit_value": 20_000,
            },
            {
                "limit": "tool:search",
                "scope": "thread",
                "unit": "calls",
                "used": 2,
                "limit_value": 2,
            },
        ],
    }


def test_usage_of_no_thread(service: Service, thread: str) -> None:
    """A thread that nobody began is not found."""
    response = service.client.get(f"/threads/{thread}/usage")
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found"


def test_health(service: Service) -> None:
    """A service whose databases answer is alive and ready."""
    assert service.client.get("/healthz").status_code == 200
    response = service.client.get("/readyz")
    assert (response.status_code, response.json()) == (200, {"threads": "ok", "quotas": "ok"})


@pytest.mark.parametrize(
    "shown",
    [
        "",
        "Bearer",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN} {TOKEN}",
        "Bearer ä",
    ],
)
def test_metrics_are_guarded(service: Service, shown: str) -> None:
    """Without the right token there are no metrics, and the answer says what to show."""
    response = service.client.get("/metrics", headers={b"authorization": shown.encode()})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == 'Bearer realm="metrics"'
    assert "langchain_quota" not in response.text


def test_metrics(service: Service, thread: str) -> None:
    """Whoever shows the token gets what the runs did, without a redirect."""
    service.ask(thread, "oak ash elm")
    blocked = ("agent", "librarian"), ("limit", "tool:search"), ("thread_id", thread)
    assert service.series()["langchain_quota_thread_blocked_total", frozenset(blocked)] == 1
    response = service.client.get("/metrics", headers={"authorization": f"bearer {TOKEN}"})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")


def test_a_restart_keeps_what_threads_have_used(database: str, thread: str, tmp_path: Path) -> None:
    """A thread goes on with its counts, and is held to its limits, after a restart."""
    settings = {**LIMITS, "DATABASE_URL": database}
    with running_service(tmp_path, **settings) as before:
        assert before.ask(thread, "oak ash").json()["refusals"] == []
        used = before.usage(thread)
        assert before.stop() == 0
    with running_service(tmp_path, **settings) as after:
        assert after.usage(thread) == used
        assert after.ask(thread, "elm").json()["refusals"] == [SEARCH_USED_UP]
        assert PASSWORD not in after.log


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

        redis_server.stop()
        response = other.ask(thread, "!")
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        error = response.json()["error"]
        assert error["scope"] == "store"
        assert (error["used"], error["limit_value"], error["resets_at"]) == (None, None, None)
        response = other.client.get("/readyz")
        assert (response.status_code, response.json()["quotas"]) == (503, "failed")
        assert other.client.get("/healthz").status_code == 200

        redis_server.start()
        eventually(lambda: other.client.get("/readyz").status_code == 200)
        assert other.ask(thread, "!").status_code == 200


def test_a_database_without_an_encoding_keeps_threads(
    postgres_server: PostgresServer, thread: str, tmp_path: Path
) -> None:
    """In an SQL_ASCII database a thread goes on; a password from PGPASSWORD opens it."""
    url = postgres_server.database("SQL_ASCII")
    assert f":{PASSWORD}@" in url
    settings = {"DATABASE_URL": url.replace(f":{PASSWORD}@", "@"), "PGPASSWORD": PASSWORD}
    with running_service(tmp_path, **settings) as service:
        service.ask(thread, "oak")
        first = service.usage(thread)["thread"]
        service.ask(thread, "ash")
        assert service.usage(thread)["thread"]["model"] == 2 * first["model"] > 0


def test_tables_are_made_once(postgres_server: PostgresServer, tmp_path: Path) -> None:
    """Replicas that meet at an empty database do not make its tables at the same time."""
    program = (
        "import asyncio, sys; from service.storage import open_threads\n"
        "async def start(url):\n"
        "    async with open_threads(url) as threads:\n"
        "        await threads.check()\n"
        "async def main(url):\n"
        "    await asyncio.gather(*(start(url) for _ in range(5)))\n"
        "asyncio.run(main(sys.argv[1]))\n"
    )
    url = postgres_server.database()
    result = run_python(program, url, env=environment({}), imported=IMPORTED)
    assert result.returncode == 0, result.stderr


def test_requests_are_finished_before_the_end(tmp_path: Path, thread: str) -> None:
    """After SIGTERM a run that is going on is finished and told, and then the process ends."""
    with running_service(tmp_path, TOOL_SECONDS=1) as service:
        with service.asking(thread, "oak ash") as response:
            told = events(response)
            assert next(told).name == "tool_calls"
            service.terminate()
            assert [event.name for event in told][-1] == "final"
        assert service.ended() == 0


def test_the_end_does_not_wait_forever(tmp_path: Path, thread: str) -> None:
    """A run that takes too long after SIGTERM is cancelled, and its thread can go on later."""
    with running_service(tmp_path, TOOL_SECONDS=NEVER, SHUTDOWN_SECONDS=1) as service:
        with service.asking(thread, "oak") as response:
            told = events(response)
            assert next(told).name == "tool_calls"
            service.terminate()
            with pytest.raises(httpx.RemoteProtocolError):
                list(told)
        assert service.ended() == 0
    with running_service(tmp_path) as service:
        assert service.ask(thread, "!").status_code == 200


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_spans_arrive(protocol: Protocol, thread: str, tmp_path: Path) -> None:
    """Over both protocols, at the latest when the service ends, a request's spans are one trace."""
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with running_receiver(protocol) as receiver:
        settings = {
            **LIMITS,
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_SERVICE_NAME": "agent-under-test",
            "OTEL_BSP_SCHEDULE_DELAY": NEVER * 1000,
        }
        with running_service(tmp_path, **settings) as service:
            response = service.client.post(
                f"/threads/{thread}/messages",
                json=question("oak ash elm"),
                headers={"traceparent": parent},
            )
            assert response.status_code == 200
            service.client.get("/healthz")
            assert receiver.spans == []
            assert service.stop() == 0
    request, *others = sorted(
        receiver.spans, key=lambda span: span.parent_id != parent.split("-")[2]
    )
    assert {span.service for span in receiver.spans} == {"agent-under-test"}
    assert {span.trace_id for span in receiver.spans} == {parent.split("-")[1]}
    assert request.parent_id == parent.split("-")[2]
    assert request.name == "POST /threads/{thread_id}/messages"
    assert request.attributes["http.response.status_code"] == 200
    assert not request.error
    assert {span.parent_id for span in others} == {request.span_id}
    assert _told(others) == [
        *[("check_quota model", "allowed"), ("check_quota tool search", "allowed")] * 2,
        *[("check_quota model", "allowed"), ("check_quota tool search", "blocked")],
        ("check_quota model", "allowed"),
    ]
    blocked = others[5].attributes
    assert blocked["gen_ai.agent.name"] == "librarian"
    assert blocked["gen_ai.conversation.id"] == thread
    assert blocked["langchain_quota.limit"] == "tool:search"
    assert blocked["langchain_quota.scope"] == "thread"
    assert (blocked["langchain_quota.thread.used"], blocked["langchain_quota.thread.limit"]) == (
        2,
        2,
    )


def _told(spans: list[ReceivedSpan]) -> list[tuple[str, object]]:
    return [(span.name, span.attributes["langchain_quota.decision"]) for span in spans]


def test_the_load_driver_breaches_limits(tmp_path: Path) -> None:
    """With the service's own limits, the load driver runs into them within a minute, and stops."""
    with running_service(tmp_path) as service:
        result = _load(service.url, "--rate", "20", "--seconds", "3")
        assert result.returncode == 0, result.stderr
        statuses, refusals = result.stdout.splitlines()[1:]
        answers = {status: int(count) for status, count in re.findall(r"(\w+) (\d+)", statuses)}
        assert set(answers) <= {"200", "403", "429"}
        assert answers["200"] > 0
        assert sum(answers.values()) <= 20 * 3 + 1
        assert re.search(r"(model|repeats) \(run\)", refusals)
        blocked = [
            value
            for (name, labels), value in service.series().items()
            if name == "langchain_quota_calls_total" and ("decision", "blocked") in labels
        ]
        assert sum(blocked) == sum(map(int, re.findall(r"\) (\d+)", refusals)))


def test_the_load_driver_grants_more(redis_server: RedisServer, tmp_path: Path) -> None:
    """With the service's store, users who have used up their calls are granted ten more, once."""
    settings = {"USER_MODEL_LIMIT": 4, "LANGCHAIN_QUOTA_REDIS_URL": redis_server.url}
    with running_service(tmp_path, **settings) as service:
        options = ("--threads", "1", "--rate", "20", "--seconds", "3")
        result = _load(service.url, *options, **settings)
        assert result.returncode == 0, result.stderr
        granted = service.series()[
            "langchain_quota_granted_total",
            frozenset({("agent", "librarian"), ("limit", "user"), ("scope", "user_id")}),
        ]
    with closing(RedisStore(redis_server.url)) as store:
        grants = store.grants("model:user_id:user-*")
    assert {each.amount for each in grants} == {10}
    assert len({each.key for each in grants}) == len(grants)
    # Nobody may have asked any more with the last one.
    assert granted in {10 * len(grants), 10 * len(grants) - 10}
    assert granted > 0


def test_the_load_driver_says_when_nobody_answers() -> None:
    """Where nobody listens, the load driver goes on until its end, and fails."""
    result = _load("http://127.0.0.1:9", "--seconds", "1")
    assert result.returncode == 1
    assert "ConnectError" in result.stdout
    assert result.stderr == ""


def _load(*arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    return run_python(as_module("service.load"), *arguments, env=environment(settings))


def test_what_is_wrong_with_the_settings(tmp_path: Path) -> None:
    """Bad settings are told in one line each, all at once, without secrets, and the code is 2."""
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
    result = _refused_start(tmp_path, bad)
    assert result.returncode == 2
    assert [line.split()[0] for line in result.stderr.splitlines()] == list(bad)
    assert "hidden" not in result.stderr


@pytest.mark.parametrize(
    "bad",
    [
        {"METRICS_TOKEN": "short"},
        {"MODEL": "nobody:nothing"},
        {"DATABASE_URL": "sqlite:///no/such/directory"},
        {"DATABASE_URL": "postgresql://root:hidden@db/agent?nonsense=1"},
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
        },
    ],
    ids=" ".join,
)
def test_a_setting_that_cannot_be_used(bad: dict[str, str], tmp_path: Path) -> None:
    """Settings that cannot work are reported before the start."""
    result = _refused_start(tmp_path, bad)
    assert result.returncode == 2
    assert re.fullmatch(f"{next(iter(bad))} .+\n", result.stderr)
    assert "hidden" not in result.stderr


def _refused_start(directory: Path, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run_python(
        as_module("service"), cwd=directory, env=environment(settings), imported=IMPORTED
    )
