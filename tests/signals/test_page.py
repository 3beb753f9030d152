"""The page's data: what `/quota.json` says of threads, subjects and costs, and who may read it."""

import asyncio
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal
from itertools import product
from typing import Any

import httpx
import pytest
from blockbuster import blockbuster_ctx
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import BaseMessage
from langchain_core.tools import StructuredTool
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from benchmarks.scrape import scraped, tracked
from langchain_quota import (
    ConcurrencyLimit,
    CostLimit,
    MemoryStore,
    ModelCallLimit,
    ModelPaceMiddleware,
    Quota,
    TokenLimit,
    ToolCallLimit,
    hmac_label,
    metrics_app,
    quota_app,
    start_metrics_server,
)
from tests.scene import Scene, waiting_tool
from tests.server.prometheus import eventually
from tests.stores import Clock, FickleStore
from tests.telemetry import Signals, paid, telling

# No proxy; and `httpx.get` reads the system's certificates each time.
get = httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)).get
HOUR = timedelta(hours=1)
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@contextmanager
def serving(signals: Signals, **options: Any) -> Iterator[str]:
    """The address of the page."""
    with start_metrics_server(0, registry=signals.registry, **options) as server:
        assert server.page_url is not None
        yield server.page_url


def read(signals: Signals, query: str = "") -> dict[str, Any]:
    """The data of a page that nobody has read before."""
    with serving(signals) as url:
        answer = get(f"{url}quota.json?{query}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ids(part: dict[str, Any]) -> list[str]:
    return [row["id"] for row in part["rows"]]


def script(messages: Sequence[BaseMessage]) -> Any:
    return (
        paid(0, *["search"] * int(messages[-1].text)) if messages[-1].type == "human" else paid(0)
    )


async def searched(signals: Signals, *limits: Any, store: Any = None, **uses: int) -> None:
    """Let threads search so often; the part of a thread's name before `_` is its tenant."""
    store = store or MemoryStore(clock=time.time)
    scene = Scene(signals, script, limits, store=store, name="boss")
    for thread, count in uses.items():
        await scene.play(str(count), thread_id=thread, context={"tenant": thread.partition("_")[0]})


async def test_what_it_says(clock: Clock) -> None:
    """Rows have their numbers by name, the tightest first; a blocked call names whose quota."""
    signals = telling(subject_label={"tenant": str})
    quotas = [
        Quota(3, per="tenant", window=HOUR),
        Quota(5, per="thread", window=HOUR, name="hourly"),
        Quota(100, per="global"),
    ]
    limit = ToolCallLimit("search", thread_limit=20, quotas=quotas)
    await searched(signals, limit, acme_1=4, umbrella_1=1)
    found = read(signals)
    assert found["schema"] == 1
    assert (found["at"], found["started_at"], found["processes"]) == (clock.now, clock.now, 1)
    assert (ids(found["threads"]), ids(found["subjects"])) == (
        ["acme_1", "umbrella_1"],
        ["acme", "umbrella", ""],
    )
    one = {"threads": 1, "subjects": 1}
    assert {each: found["totals"][each] for each in ("blocked", "exhausted")} == {
        "blocked": one,
        "exhausted": {"threads": 0, "subjects": 1},
    }
    end, now = clock.now + 3600, clock.now
    both = {"blocked": 1, "blocked_at": now, "waiting": 0}
    by: dict[str, Any] = {"scope": "tenant", "subject": "acme", "unit": "calls"}
    by |= {"used": 3, "allowed": 3, "needs": 0, "resets_at": end}
    span = signals.decision_spans()[3].context
    assert span is not None
    about = {"limit": "tool:search", "tool": "search", "trace_id": f"{span.trace_id:032x}"}
    numbers = [
        {"scope": "hourly", "used": 3, "allowed": 5, "resets_at": end},
        {"scope": "thread", "used": 3, "allowed": 20, "resets_at": None},
    ]
    of: dict[str, Any] = {"limit": "tool:search", "agent": "boss", "unit": "calls", "state": "ok"}
    of["blocked_by"] = {**by, "holds": True}
    whose = {"id": "acme_1", "scope": "thread", "agents": ["boss"], "state": "blocked"}
    assert found["threads"]["rows"][0] == {
        **whose,
        **both,
        "cost": None,
        "last_call_at": now,
        "blocked_by": {"limit": "tool:search", "holds": True, **by},
        "refusals": [{**by, **about, "at": now}],
        "limits": [{**of, **both, "numbers": numbers, "checked_at": now}],
    }
    assert found["subjects"]["rows"][0]["refusals"] == [{**by, **about, "at": now}]
    [number] = found["subjects"]["rows"][0]["limits"][0]["numbers"]
    assert number == {"scope": "tenant", "used": 3, "allowed": 3, "resets_at": end}
    clock.now += 300
    thread = read(signals)["threads"]["rows"][0]
    assert (thread["state"], thread["blocked_by"]["holds"]) == ("ok", False)


async def test_until_when_a_refusal_holds(clock: Clock) -> None:
    """Until its window or run has ended, or the limit allows a call; a rate's for five minutes."""
    signals, start = telling(subject_label={"tenant": str}), clock.now
    limits: list[Any] = [
        *(ToolCallLimit(tool, run_limit=1) for tool in ("search", "note")),
        ToolCallLimit("calc", quotas=[Quota(1, per="tenant", window="2m")]),
        ToolCallLimit("page", quotas=[Quota(120, per="global", window="2m", smooth=True)]),
        ModelCallLimit(run_limit=1),
    ]
    tools = ("search", "note", "calc", "page")
    store, context = MemoryStore(clock=time.time), {"tenant": "acme"}

    def words(messages: Sequence[BaseMessage]) -> Any:
        return messages[-1].text.split() if messages[-1].type == "human" else "done"

    scene = Scene(signals, words, limits, store=store, context=context, tools=tools)
    every = {"tool:search", "tool:note", "tool:calc", "tool:page"}
    for seconds, asked, expected in (
        # The second call of the model ends the run.
        (0, "search search note note calc calc page page", every),
        (1, "search page", every - {"tool:search"}),
        (59, "", every - {"tool:search"}),
        (60, "", {"tool:calc", "tool:page"}),
        (120, "", {"tool:page"}),
        (300, "", set()),
    ):
        clock.now = start + seconds
        if asked:
            await scene.play(asked)
        [row] = read(signals)["threads"]["rows"]
        blocked = {each["limit"]: each["blocked_by"] for each in row["limits"]}
        assert blocked.keys() == every | {"model"}
        assert {limit for limit, by in blocked.items() if by["holds"]} == expected, seconds
        assert row["blocked_by"]["holds"] == bool(expected)
    scene.quota.freeze(tenant="acme")
    await scene.play("calc")
    by = read(signals)["threads"]["rows"][0]["blocked_by"]
    assert by == {"limit": "tool:calc", "scope": "frozen", "subject": "acme"} | {
        "unit": "calls",
        "holds": True,
    }
    scene.quota.thaw(tenant="acme")
    clock.now += 1
    await scene.play("calc")
    assert not read(signals)["threads"]["rows"][0]["blocked_by"]["holds"]


async def test_what_is_charged_later_ends_no_refusal(signals: Signals) -> None:
    """A model call that was running when its budget was used up is charged: it still refuses."""
    busy, gone = asyncio.Event(), asyncio.Event()

    async def wait(request: Any, handler: Any) -> Any:
        if request.runtime.context["slow"]:
            busy.set()
            await gone.wait()
        return await handler(request)

    limit, slow = TokenLimit(quotas=[Quota(10, per="global")]), {"slow": True}
    waiting: Any = wrap_model_call(wait)
    scene = Scene(signals, lambda _: paid(10), [limit, waiting], store=MemoryStore())
    running = asyncio.create_task(scene.play(thread_id="slow", context=slow))
    await busy.wait()
    for _ in range(2):
        await scene.play(thread_id="fast", context={"slow": False})
    gone.set()
    await running
    found = read(signals)
    assert found["subjects"]["rows"][0]["limits"][0]["numbers"][0]["used"] == 20
    for kind in ("threads", "subjects"):
        by = found[kind]["rows"][0]["blocked_by"]
        assert (by["used"], by["allowed"], by["holds"]) == (10, 10, True)


async def test_calls_of_an_hour(clock: Clock) -> None:
    """Each call is in its minute once, as in the metrics: those that wait for slots, too."""
    signals = telling()
    slots = ConcurrencyLimit("search", max_concurrency=1, wait=0)
    await searched(signals, ToolCallLimit("search", thread_limit=4), slots, one=3)
    clock.now += 59 * 60
    await searched(signals, ToolCallLimit("search", run_limit=1, exit_behavior="end"), two=2)
    calls = read(signals)["totals"]["calls"]
    made = signals.samples("langchain_quota_calls_total", agent="boss", kind="tool", tool="search")
    outcomes = {each: made[each,] for each in ("allowed", "blocked", "skipped")}
    assert outcomes == {"allowed": 1, "blocked": 3, "skipped": 1}
    assert (calls["allowed"], calls["blocked"]) == ([1] + [0] * 59, [2] + [0] * 58 + [1])
    clock.now += 60
    store = FickleStore(MemoryStore(clock=clock))
    store.down = True
    await searched(signals, ToolCallLimit("search", thread_limit=4), store=store, three=2)
    calls = read(signals)["totals"]["calls"]
    assert (calls["allowed"], calls["without_store"]) == ([0] * 60, [0] * 59 + [2])


async def test_last_refusals(clock: Clock) -> None:
    """A row has its last ten, the newest first; a process keeps the last 500 of all rows."""
    signals = telling(spans="off")
    limits: list[Any] = [ToolCallLimit("search", thread_limit=1), ModelCallLimit(run_limit=1)]
    for uses in ({"idle": 3}, {"busy": 2}, {"loop": 495}, {"busy": 12}):
        await searched(signals, *limits, **uses)
        clock.now += 1
    rows = {row["id"]: row for row in read(signals)["threads"]["rows"]}
    assert [rows[each]["blocked"] for each in ("idle", "busy", "loop")] == [3, 14, 495]
    assert rows["idle"]["refusals"] == []
    assert len(rows["loop"]["refusals"]) == 10
    first = rows["busy"]["refusals"][0]
    assert [each["at"] for each in rows["busy"]["refusals"]] == [clock.now - 1] * 10
    assert (first["tool"], first["limit"], first["scope"]) == (None, "model", "run")
    assert (first["used"], first["allowed"], first["trace_id"]) == (1, 1, None)


async def test_customers_with_one_label(clock: Clock) -> None:
    """They are one row, with the numbers of the most urgent one, and the refusals of all."""
    signals = telling(subject_label={"tenant": lambda tenant: tenant[:2]})
    limit = ToolCallLimit("search", quotas=[Quota(5, per="tenant")])
    await searched(signals, limit, acorn=4)
    clock.now += 1
    await searched(signals, limit, acme=6)
    [row] = read(signals)["subjects"]["rows"]
    assert (row["state"], row["blocked"], row["blocked_at"]) == ("blocked", 1, clock.now)
    assert row["limits"][0]["numbers"][0]["used"] == 5
    clock.now += 301
    await searched(signals, limit, acid=5)
    [row] = read(signals)["subjects"]["rows"]
    assert (row["blocked"], row["blocked_at"]) == (1, clock.now - 301)


@pytest.mark.parametrize("shown", [0, 2, 9])
async def test_it_shows_what_metrics_export(shown: int) -> None:
    """The same threads and subjects with the same labels are in both; a filter finds the rest."""
    label = hmac_label("0123456789abcdef")
    signals = telling(
        thread_label=label, max_exported_threads=shown, subject_label={"tenant": label}
    )
    limit = ToolCallLimit("search", thread_limit=5, quotas=[Quota(9, per="tenant")])
    uses = {f"t{each}_": each + 1 for each in range(5)}
    await searched(signals, limit, **uses)
    with serving(signals) as url:
        text = get(f"{url}metrics").text
        found = get(f"{url}quota.json").json()
        every = {each: get(f"{url}quota.json?find={label(each)}").json() for each in uses}
    for kind, series in (("threads", "thread_used"), ("subjects", "subject_used")):
        exported = {key[-1] for key in signals.samples(f"langchain_quota_{series}", agent="boss")}
        assert {*ids(found[kind])} == exported
        named = {label(each) for each in uses} if shown and kind == "threads" else set()
        assert {each for answer in every.values() for each in ids(answer[kind])} == named
    assert found["threads"]["hidden"] == 5 - min(5, shown)
    assert not any(each in text + str(found) for each in uses)


async def test_queries(signals: Signals) -> None:
    """Rows are found by a part of a name, by state, in any order; a wrong parameter is named."""
    await searched(signals, ToolCallLimit("search", thread_limit=10), y=11, X=1, w=8, xy=10)
    with serving(signals) as url:
        for query, expected in (
            ("", ["y", "xy", "w", "X"]),
            ("find=X", ["xy", "X"]),
            ("find=BOSS", ["y", "xy", "w", "X"]),
            ("state=exhausted", ["y", "xy"]),
            ("state=near", ["w"]),
            ("state=waiting", []),
            ("sort=name", ["w", "X", "xy", "y"]),
            ("sort=-used&rows=2", ["X", "w"]),
        ):
            part = get(f"{url}quota.json?{query}").json()["threads"]
            assert ids(part) == expected, query
        assert (part["found"], part["exported"]) == (4, 4)
        for query in ("sort=colour", "state=tired", "rows=0", "rows=501", "page=2"):
            answer = get(f"{url}quota.json?{query}")
            assert answer.status_code == 400
            assert answer.text.startswith(f"{query.split('=')[0]} is wrong. Possible are: find=")


async def test_what_a_day_costs(clock: Clock) -> None:
    """A call counts once under two limits, with paid tools and without refunds, for 24 hours."""
    signals = telling()
    limits: list[Any] = [
        CostLimit(thread_limit=100, tool_prices={"search": "0.50"}),
        CostLimit(run_limit=100, tool_prices={"search": "0.50"}, name="second"),
        TokenLimit(run_limit=10**9),
        ConcurrencyLimit("search", max_concurrency=1, wait=0),
    ]

    async def search() -> None:
        """Search."""
        await asyncio.sleep(0)

    tool = StructuredTool.from_function(coroutine=search)
    turns = [paid(2, "search", "search"), paid(1)]
    options: Any = {"prices": lambda used: Decimal(used.total_tokens), "store": MemoryStore()}
    await Scene(signals, turns, limits, tools=[tool], **options).play()
    found = read(signals)
    # Of two searches at once one is blocked, and its price is refunded.
    assert (found["totals"]["cost"]["dollars"], found["threads"]["rows"][0]["cost"]) == (3.5, 3.5)
    assert found["totals"]["cost"]["hours"] == [0.0] * 23 + [3.5]
    clock.now += 23 * 3600
    assert read(signals)["totals"]["cost"]["hours"] == [3.5] + [0.0] * 23
    clock.now += 3600
    assert read(signals)["totals"]["cost"] is None


@pytest.mark.parametrize("waits_for", ["a slot", "room", "its start", "its provider"])
async def test_who_waits(waits_for: str, signals: Signals) -> None:
    """A call that waits is seen on its thread, even its first one, and no longer when it ends."""
    hourly = Quota(1, per="global", window="1h", smooth=waits_for == "its start")
    items: dict[str, Any] = {
        "a slot": ConcurrencyLimit(max_concurrency=1),
        "room": ModelCallLimit(quotas=[hourly], wait=HOUR),
        "its start": ToolCallLimit("search", quotas=[hourly], wait=2 * HOUR),
        "its provider": ModelPaceMiddleware(telemetry=signals.telemetry),
    }
    nothing_left = {"x-ratelimit-limit-requests": "1", "x-ratelimit-remaining-requests": "0"}
    said: Any = {"response_metadata": {"headers": nothing_left}}
    tool, _, gone = waiting_tool()
    options: Any = {"store": MemoryStore(), "tools": [tool], "name": "boss"}
    turns: Any = lambda messages: script(messages).model_copy(update=said)  # noqa: E731
    scene = Scene(signals, turns, [items[waits_for]], **options)
    await scene.play("0", thread_id="first")
    waiting = asyncio.create_task(scene.play("2", thread_id="second"))
    found = await asyncio.to_thread(
        eventually, lambda: (one := read(signals, "state=waiting"))["threads"]["rows"] and one
    )
    assert (ids(found["threads"]), found["totals"]["waiting"]) == (["second"], 1)
    (gone.set if waits_for == "a slot" else waiting.cancel)()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (await asyncio.to_thread(read, signals))["totals"]["waiting"] == 0


def test_who_gets_the_page(signals: Signals) -> None:
    """A browser gets the page at `/`, guarded by its headers, and a scraper the metrics."""
    with serving(signals) as url:
        page = get(url, headers=BROWSER)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert (len(page.content) < 30_000, page.headers["cache-control"]) == (True, "no-store")
        policy = page.headers["content-security-policy"]
        for directive in ("default-src 'none'", "require-trusted-types-for 'script'"):
            assert directive in policy
        assert "unsafe" not in policy
        assert "access-control-allow-origin" not in page.headers
        assert not re.search("https?://(?!www.w3.org/2000/svg)", page.text)
        for path in ("", "metrics", "quota"):
            assert get(url + path).text.startswith("# HELP")
    with start_metrics_server(0, registry=signals.registry, page=False) as server:
        assert server.page_url is None
        for path in ("/", "/quota.json"):
            answer = get(f"http://127.0.0.1:{server.port}{path}", headers=BROWSER)
            assert answer.text.startswith("# HELP")


DOCKER, EVERYWHERE = "host.docker.internal:9464", "0.0.0.0"  # noqa: S104 - what is tested
OURS = ["localhost:1", "127.0.0.1", "[::1]:9464", "10.0.0.7"]
GZIP = ("gzip", "GZIP;q=0.1,br")
FOREIGN = ["evil.example", "localhost.evil.example:9464", f"evil.{DOCKER}", "", "[", "agents"]


@pytest.mark.parametrize(
    ("options", "variable", "allowed"),
    [
        ({}, "", OURS),
        ({"page": False}, "", OURS),
        ({"allowed_hosts": ["host.docker.internal"]}, "agents", [*OURS, DOCKER, DOCKER.upper()]),
        ({}, "agents, host.docker.internal", [*OURS, DOCKER, "agents"]),
        ({"addr": EVERYWHERE}, "", [*OURS, *FOREIGN, DOCKER]),
        ({"addr": EVERYWHERE, "allowed_hosts": []}, "", OURS),
    ],
)
def test_foreign_hosts(
    options: Any, variable: str, allowed: list[str], signals: Signals, monkeypatch: Any
) -> None:
    """A name that a foreign DNS server may let point here gets neither metrics nor page."""
    monkeypatch.setenv("LANGCHAIN_QUOTA_METRICS_HOSTS", variable)
    with start_metrics_server(0, registry=signals.registry, **options) as server:
        for path, host in product(("", "metrics", "quota.json"), {*allowed, *FOREIGN, DOCKER}):
            url = f"http://127.0.0.1:{server.port}/{path}"
            answer = get(url, headers={**BROWSER, "host": host})
            assert answer.status_code == (200 if host in allowed else 421), (path, host)
            assert ("LANGCHAIN_QUOTA_METRICS_HOSTS" in answer.text) == (host not in allowed)


def test_gzip_and_websockets(signals: Signals) -> None:
    """Who gives gzip the weight 0 gets none, and a websocket is closed."""
    app = Starlette()
    app.mount("/quota", quota_app(signals.registry))
    app.mount("/own", metrics_app(signals.registry))
    client = TestClient(app)
    with serving(signals) as url:
        reads: list[tuple[Any, str]] = [(get, f"{url}quota.json"), (get, f"{url}metrics")]
        reads += [(client.get, path) for path in ("/quota/quota.json", "/own/")]
        for (read_path, path), accepted in product(reads, (*GZIP, "br, gzip ; q=0", "br")):
            answer = read_path(path, headers={"accept-encoding": accepted})
            is_zipped = answer.headers.get("content-encoding") == "gzip"
            assert is_zipped == (accepted in GZIP), (path, accepted)
    for path in ("/quota/", "/own/"):
        with pytest.raises(WebSocketDisconnect), client.websocket_connect(path):
            pass


async def test_it_is_computed_once_and_off_the_loop(signals: Signals) -> None:
    """Many readers get one computation, and nothing blocks the event loop meanwhile."""
    await searched(signals, ToolCallLimit("search", thread_limit=9), one=1)
    app = Starlette()
    app.mount("/quota", quota_app(signals.registry, dashboards_url="https://grafana.example"))
    app.add_route("/metrics", metrics_app(signals.registry))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://any.example") as client:
        with blockbuster_ctx():
            assert (await client.get("/quota/", headers=BROWSER)).text.startswith("<!doctype html>")
            url = "/quota/quota.json"
            answers = await asyncio.gather(*(client.get(url) for _ in range(5)))
        assert len({answer.json()["at"] for answer in answers}) == 1
        assert answers[0].json()["dashboards_url"] == "https://grafana.example"
        for method, path, status in (("GET", "/quota/other", 404), ("POST", url, 404)):
            assert (await client.request(method, path)).status_code == status
        head = await client.head(url)
        assert (head.status_code, head.content) == (200, b"")


async def test_no_step_waits_while_it_is_computed() -> None:
    """While many rows are read, the event loop runs, though no thread is interrupted."""
    registry = tracked(2_000)
    app, ticks, interval = quota_app(registry), 0, sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        reading = asyncio.create_task(scraped(app, "/quota.json"))
        while not reading.done():
            ticks += 1
            await asyncio.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    assert await reading > 2_000
    assert ticks > 10


def test_before_any_call() -> None:
    """Without an agent there is an answer, and no row."""
    with start_metrics_server(0, registry=CollectorRegistry()) as server:
        found = get(f"{server.page_url}quota.json").json()
    assert (found["started_at"], found["processes"]) == (None, 0)
    assert found["threads"] == {"exported": 0, "hidden": 0, "found": 0, "rows": []}
