"""What the users of an app see of their limits over HTTP: headers, 429, and their own JSON."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import partial
from math import ceil
from typing import Any

import httpx
import pytest
from http_sf import parse
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount

from langchain_quota import (
    CostLimit,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Price,
    Quota,
    QuotaHeadersMiddleware,
    TimeLimit,
    TokenLimit,
    ToolCallLimit,
)
from tests.scene import Scene, asking, delegate
from tests.stores import Clock, FickleStore
from tests.telemetry import Signals, paid

DAILY = Quota(2, per="user_id", window="1d")
NONE = Quota(0, per="user_id")
WIDE = ToolCallLimit("calc", quotas=[Quota(9, per="user_id")])
TRIAL = ModelCallLimit(name="trial", quotas=[NONE], enforce=False)
TOO_MANY = "https://iana.org/assignments/http-problem-types#quota-exceeded"
REJECTED: Any = Command(resume={"decisions": [{"type": "reject", "message": "Enough."}]})
NOON = 43_200.0

both_kinds = pytest.mark.parametrize("kind", ["quota", "graph"])


def user_of(scope: Mapping[str, Any]) -> dict[str, Any] | None:
    return {"user_id": scope["user"]} if scope.get("user") else None


class Api:
    """An app that runs an agent for who asks at `/run`, and answers with its last message."""

    def __init__(
        self, signals: Signals, *items: Any, script: Any = None, how: str = "", **options: Any
    ) -> None:
        names = ("subject", "path", "replace_answers")
        given = {"subject": user_of} | {n: options.pop(n) for n in names if n in options}
        options = {"store": MemoryStore(), "thread_id": None, "checkpointer": None, **options}
        scene = self.scene = Scene(signals, script or (lambda _: "done"), items, **options)
        self.quota = scene.quota

        def invocation(request: Request) -> tuple[Any, Any, dict[str, Any]]:
            asked: Any = {"messages": [("user", "hi")]}
            asked = REJECTED if "resume" in request.query_params else asked
            return asked, scene.config, {"user_id": request.scope["user"]}

        def answer(result: Any, request: Request) -> Response:
            status = int(request.query_params.get("status", 200))
            return JSONResponse({"text": result["messages"][-1].text}, status)

        def run_in_pool(request: Request) -> Response:
            asked, config, context = invocation(request)
            return answer(scene.agent.invoke(asked, config, context=context), request)

        async def run(request: Request) -> Response:
            if how == "thread":
                return await asyncio.to_thread(run_in_pool, request)
            asked, config, context = invocation(request)
            if how == "twice":
                await scene.agent.ainvoke(asked, config, context=context)
            running = scene.agent.ainvoke(asked, config, context=context)
            result = await (asyncio.create_task(running) if how == "task" else running)
            return answer(result, request)

        async def late(request: Request) -> StreamingResponse:
            async def body() -> AsyncIterator[bytes]:
                yield bytes((await run(request)).body)

            return StreamingResponse(body())

        self.app = Starlette()
        self.app.add_route("/run", run_in_pool if how == "sync handler" else run)
        self.app.add_route("/late", late)
        self.app.add_route("/moved", lambda _: RedirectResponse("/run"))
        self.app.add_middleware(QuotaHeadersMiddleware, quota=self.quota, **given)

    async def get(
        self,
        path: str = "/run",
        user: str = "ada",
        *,
        method: str = "GET",
        app: Any = None,
        **of: Any,
    ) -> httpx.Response:
        """Request a path as somebody, whom an authentication around the app has found."""

        async def authenticated(scope: Any, receive: Any, send: Any) -> None:
            await (app or self.app)({**scope, "user": user}, receive, send)

        options: Any = {"transport": httpx.ASGITransport(authenticated), "base_url": "http://api"}
        async with httpx.AsyncClient(**options) as client:
            return await client.request(method, path, **of)

    async def shown(self, user: str) -> list[dict[str, Any]]:
        limits: list[dict[str, Any]] = (await self.get("/quota/me", user)).json()["limits"]
        return limits


def field(response: httpx.Response, name: str = "ratelimit") -> dict[str, Any]:
    """The parameters of each policy, as a parser of structured fields reads them."""
    items: Any = parse(response.headers[name].encode(), tltype="list")
    return dict(items)


def violated(response: httpx.Response) -> list[str]:
    """The policies that a problem names."""
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["cache-control"] == "no-store"
    assert int(response.headers["content-length"]) == len(response.content)
    body: dict[str, Any] = response.json()
    policies: list[str] = body.pop("violated-policies")
    assert body == {"type": TOO_MANY, "title": "Quota Exceeded", "status": 429}
    assert response.status_code == 429
    return policies


@both_kinds
async def test_headers_and_json_are_what_is_left(signals: Signals, kind: Any) -> None:
    """Every unit, window, name and grant: parsed headers and the JSON equal `left`, exactly."""
    clock, per, odd = Clock(NOON - 0.5), "user_id", 'søk "5" \\ 100%'
    limits = [
        ToolCallLimit("search", quotas=[Quota(9, per=per, window="1d"), Quota(7, per="global")]),
        ToolCallLimit("search", name=odd, quotas=[Quota(8, per=per, name="in_all")]),
        ModelCallLimit(quotas=[Quota(60, per=per, window="1m", smooth=True, burst=5)]),
        TokenLimit(quotas=[Quota(10_000, per=per, window="month")]),
        CostLimit(quotas=[Quota("2.50", per=per, window="1h"), Quota(9e6, per=per, name="far")]),
        TimeLimit(quotas=[Quota("90s", per=per)]),
        ToolCallLimit(name="trial", quotas=[Quota(1, per=per)], enforce=False),
    ]
    script = [paid(1234, "search"), paid(1), paid(10, "search", "search"), paid(2)]
    prices = {"m": Price(input=Decimal("0.123456"), output=1)}
    options: Any = {"script": script, "prices": prices, "store": MemoryStore(clock=clock)}
    api = Api(signals, *limits, kind=kind, **options)
    api.scene.model.model = "m"
    expected: dict[str, tuple[str, dict[str, Any]]] = {
        "tool:search/user_id": ("tool:search", {"qu": "calls", "w": 86_400}),
        's%C3%B8k "5" \\ 100%25/in_all': (odd, {"qu": "calls"}),
        "model/user_id": ("model", {"qu": "calls", "w": 60}),
        "tokens/user_id": ("tokens", {"qu": "tokens", "w": 31 * 86_400}),
        "cost/user_id": ("cost", {"qu": "nanodollars", "w": 3600}),
        "cost/far": ("cost", {"qu": "nanodollars"}),
        "time/user_id": ("time", {"qu": "milliseconds"}),
    }
    for user, granted in (("ada", 0), ("bob", 2)):
        if granted:
            api.quota.grant("tool:search", granted, user_id=user, quota=per)
        response = await api.get("/run", user)
        policies, left = field(response, "ratelimit-policy"), field(response)
        shown = {each.pop("policy"): each for each in await api.shown(user)}
        assert policies.keys() == left.keys() == shown.keys() == expected.keys()
        for policy, (limit, parameters) in expected.items():
            balance = api.quota.left(limit, user_id=user, quota=policy.rpartition("/")[2])
            scale = {"nanodollars": 10**9, "milliseconds": 1000}.get(parameters["qu"], 1)
            most, rest = (Fraction(each) * scale for each in (balance.limit, balance.left))
            rate = 60 if policy == "model/user_id" else min(10**15 - 1, most)
            assert policies[policy] == {"q": rate, **parameters}
            ends = balance.resets_at
            until = {"t": ceil(ends.timestamp() - clock.now)} if ends else {}
            assert left[policy] == {"r": min(10**15 - 1, rest), **until}
            more = {"unit": balance.unit, "resets_at": ends and ends.isoformat()}
            amounts = {name: float(getattr(balance, name)) for name in ("used", "limit", "left")}
            assert shown[policy] == {**amounts, **more}
        assert left["tool:search/user_id"]["r"] < 9 + granted


async def test_users_see_their_own(signals: Signals) -> None:
    """Requests at once of many users, and of nobody: everybody sees what they have used alone."""
    api = Api(signals, ModelCallLimit(quotas=[Quota(9, per="user_id")]))
    users = {f"user-{number}": number for number in range(9)}
    await asyncio.gather(*(api.get("/run", user) for user, n in users.items() for _ in range(n)))
    answers = await asyncio.gather(*map(api.shown, users))
    assert [[each["used"] for each in answer] for answer in answers] == [[n] for n in range(9)]
    assert "ratelimit" not in (await api.get("/none", "")).headers


@both_kinds
@pytest.mark.parametrize("how", ["awaited", "task", "thread", "sync handler"])
@pytest.mark.parametrize("ends", ["end", "error"])
async def test_a_refused_run(signals: Signals, ends: Any, how: str, kind: Any) -> None:
    """However the handler runs the agent, a run that a user's quota ended is answered with 429."""
    limit = ModelCallLimit(quotas=[DAILY], exit_behavior=ends)
    api = Api(signals, limit, how=how, kind=kind, store=MemoryStore(clock=Clock(NOON - 0.5)))
    assert [(await api.get()).status_code for _ in range(2)] == [200, 200]
    response = await api.get()
    assert violated(response) == ["model/user_id"]
    assert field(response) == {"model/user_id": {"r": 0, "t": 43_201}}
    assert response.headers["retry-after"] == "43201"
    assert (await api.get(user="bob")).status_code == 200
    assert violated(await api.get("/run?status=201")) == ["model/user_id"]
    kept = await api.get("/run?status=402")
    assert kept.status_code == (402 if ends == "end" else 429)


async def test_several_refused_runs(signals: Signals) -> None:
    """Retry-After is when none of the limits refuses any more."""
    windows = {"search": "1d", "calc": "hour"}
    limits = [
        ToolCallLimit(tool, quotas=[Quota(0, per="user_id", window=window)], exit_behavior="end")
        for tool, window in windows.items()
    ]
    store = MemoryStore(clock=Clock(NOON - 0.5))
    api = Api(signals, *limits, script=[["search"], ["calc"]], how="twice", store=store)
    assert (await api.get()).headers["retry-after"] == "43201"


async def test_a_run_limit_that_raises(signals: Signals) -> None:
    """An exception of a limit would be 500: it becomes 429, but names no time to wait for."""
    response = await Api(signals, ModelCallLimit(run_limit=0, exit_behavior="error"), WIDE).get()
    assert violated(response) == ["model/run"]
    assert "retry-after" not in response.headers


@pytest.mark.parametrize(
    ("limit", "text", "options"),
    [
        (ToolCallLimit("search", quotas=[NONE]), "done", {}),
        (ModelCallLimit(quotas=[Quota(1, per="user_id")], exit_behavior="finalize"), "limit", {}),
        (ModelCallLimit(run_limit=1), "limit", {"items": [TRIAL]}),
        (ModelCallLimit(quotas=[Quota(1, per="root_run", name="turn")]), "limit", {}),
        (ModelCallLimit(quotas=[NONE], enforce=False), "done", {}),
        (ModelCallLimit(quotas=[NONE]), "limit", {"replace_answers": False}),
    ],
    ids=["continue", "finalize", "run", "root run", "dry run", "kept"],
)
async def test_an_answer_that_stays(signals: Signals, limit: Any, text: str, options: Any) -> None:
    """Where the model went on, or to try again does not help, the app's own answer is sent."""
    items = [limit, WIDE, *options.pop("items", ())]
    response = await Api(signals, *items, script=asking("search"), **options).get()
    assert response.status_code == 200
    assert text in response.json()["text"]
    assert field(response)["tool:calc/user_id"] == {"r": 9}


async def test_headers_that_are_sent_already(signals: Signals) -> None:
    """Once a stream has begun, a refusal changes nothing: the text is sent, or the stream fails."""
    response = await Api(signals, ModelCallLimit(quotas=[NONE])).get("/late")
    assert response.status_code == 200
    assert "limit" in response.json()["text"]
    raising = ModelCallLimit(quotas=[NONE], exit_behavior="error")
    with pytest.raises(ModelCallLimitExceededError):
        await Api(signals, raising).get("/late")


async def test_behind_other_middlewares(signals: Signals) -> None:
    """A stream has what was left before its run; pages of other origins may read it, and a 429."""
    api = Api(signals, ModelCallLimit(quotas=[DAILY]))
    api.app.add_middleware(BaseHTTPMiddleware, dispatch=lambda request, go_on: go_on(request))
    api.app.add_middleware(CORSMiddleware, allow_origins=["*"], expose_headers=["RateLimit"])
    origin: Any = {"headers": {"origin": "https://elsewhere.example.org"}}
    first, late, refused = [await api.get(path, **origin) for path in ("/run", "/late", "/run")]
    assert [field(each)["model/user_id"]["r"] for each in (first, late, refused)] == [1, 1, 0]
    assert (late.json(), violated(refused)) == ({"text": "done"}, ["model/user_id"])
    exposed = {each.headers["access-control-expose-headers"] for each in (first, late, refused)}
    assert exposed == {"RateLimit"}


async def test_a_sub_agent_that_is_refused(signals: Signals) -> None:
    """Where a limit ends a sub-agent's run alone, its parent goes on and answers."""
    options: Any = {"thread_id": None, "checkpointer": None, "store": MemoryStore()}
    child = Scene(signals, [], [ModelCallLimit(quotas=[NONE])], **options)
    tool = delegate(child.agent, context={"user_id": "ada"})
    response = await Api(signals, WIDE, script=asking("delegate"), tools=[tool]).get()
    assert (response.status_code, response.json()) == (200, {"text": "done"})
    assert child.metric("model", "blocked", "user_id") == 1


async def test_a_person_who_ends_a_run(signals: Signals) -> None:
    """A run that a person has ended at a limit is no refusal."""
    limit = ToolCallLimit("search", quotas=[NONE], exit_behavior="ask")
    saved: Any = {"checkpointer": InMemorySaver(), "thread_id": "7"}
    api = Api(signals, limit, script=asking("search"), **saved)
    responses = [await api.get(), await api.get("/run?resume")]
    assert [response.status_code for response in responses] == [200, 200]
    assert responses[1].json()["text"] == "Enough."


async def test_paths(signals: Signals) -> None:
    """One path answers, of the app alone and below another one; only to GET and who is known."""
    api = Api(signals, ModelCallLimit(quotas=[DAILY]), path="/me")
    below = Starlette(routes=[Mount("/api", api.app)])
    for path, app in (("/me", None), ("/api/me", below)):
        assert (await api.get(path, app=app)).json()["limits"][0]["left"] == 2
        head = await api.get(path, method="HEAD", app=app)
        assert (head.status_code, head.content, len(field(head))) == (200, b"", 1)
    for path, method, status in (("/quota/me", "GET", 404), ("/me", "POST", 404)):
        response = await api.get(path, method=method)
        assert (response.status_code, "ratelimit" in response.headers) == (status, True)
    assert "ratelimit" not in (await api.get("/moved")).headers
    unknown = await api.get("/me", "")
    assert (unknown.status_code, unknown.headers["www-authenticate"]) == (401, "Bearer")
    assert unknown.json() == {"title": "Unauthorized", "status": 401}


async def test_an_unavailable_store(signals: Signals) -> None:
    """There are no headers, and the run goes on or fails as without them; it is no 429."""
    store, limit = FickleStore(MemoryStore()), ModelCallLimit(quotas=[DAILY])
    store.down = True
    api = Api(signals, limit, store=store, on_store_error="allow")
    response = await api.get()
    assert (response.status_code, response.json()) == (200, {"text": "done"})
    assert "ratelimit" not in response.headers
    limits = await api.get("/quota/me")
    assert (limits.status_code, limits.json()["status"]) == (503, 503)
    assert (await Api(signals, limit, store=store).get()).status_code == 200
    raising = ModelCallLimit(quotas=[DAILY], exit_behavior="error")
    with pytest.raises(ModelCallLimitExceededError):
        await Api(signals, raising, store=store).get()


async def test_reads_of_the_store(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """All limits are read at once, and for a second once for a user, but for what runs use."""
    api = Api(signals, ModelCallLimit(quotas=[DAILY]), WIDE)
    count = partial(signals.samples, "langchain_quota_store_seconds_count", operation="peek")
    await api.get("/none", "bob")
    assert sum(count(outcome="ok").values()) == 1
    await asyncio.gather(*(api.get("/none") for _ in range(200)))
    assert sum(count(outcome="ok").values()) < 100
    # After a run, the headers show what it has used.
    left = [field(await api.get(path))["model/user_id"]["r"] for path in ("/run", "/none", "/run")]
    assert left == [1, 1, 0]
    api.quota.grant("model", 5, user_id="ada")
    later = time.monotonic() + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert field(await api.get("/none"))["model/user_id"]["r"] == 5


async def test_another_subjects_refusal(signals: Signals) -> None:
    """A request answers for its own subject: what a limit refuses another one leaves it alone."""
    daily = ModelCallLimit(quotas=[Quota(0, per="user_id", window="1d")])
    for user, status in (("ada", 429), ("bob", 200)):
        api = Api(signals, daily, subject=lambda scope, user=user: {"user_id": user})
        assert (await api.get(user="ada")).status_code == status


async def test_added_twice(signals: Signals, caplog: pytest.LogCaptureFixture) -> None:
    """The same limits would be in the headers twice: one line says so; other limits are right."""
    api, other = (Api(signals, ModelCallLimit(quotas=[DAILY])) for _ in range(2))
    for quota in (other.quota, api.quota):
        api.app.middleware_stack = None
        api.app.add_middleware(QuotaHeadersMiddleware, quota=quota, subject=user_of)
        await api.get("/none")
        await api.get("/none")
        assert caplog.text.count("added twice for one quota") == (quota is api.quota)


class Prefixed(MemoryStore):
    """A store whose prefix is the user's name."""

    prefix = staticmethod(lambda _, runtime: runtime.context["user_id"])


async def test_limits_that_functions_decide(signals: Signals) -> None:
    """A plan's number is that of the last call; the prefix comes with the subject, as in `left`."""
    plan = ModelCallLimit(quotas=[Quota(lambda state, runtime: 5, per="user_id")])
    even = Quota(lambda state, runtime: 5, per="user_id", window="1m", smooth=True)
    subject: Any = lambda scope: {"user_id": scope["user"], "prefix": scope["user"]}  # noqa: E731
    api = Api(signals, plan, ToolCallLimit(quotas=[even]), store=Prefixed(), subject=subject)
    assert await api.shown("ada") == []
    await api.get(user="bob")
    (shown,) = await api.shown("bob")
    balance = api.quota.left("model", user_id="bob", prefix="bob", limit=5)
    assert (shown["policy"], shown["left"]) == ("model/user_id", balance.left)
