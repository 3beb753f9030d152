"""What the middlewares, GraphQuota, stores and telemetry refuse when they are made."""

import copy
import re
import traceback
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from langchain_quota import (
    Decision,
    GraphQuota,
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitMiddleware,
    Price,
    Quota,
    QuotaHeadersMiddleware,
    QuotaMiddleware,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitMiddleware,
)
from langchain_quota.stores.redis import RedisStore
from tests.scene import Scene
from tests.stores import counts
from tests.telemetry import Signals, needs_inline

SEARCH = ToolCallLimit("search", run_limit=3)
TOKENS = TokenLimit(run_limit=9)
SHARED = ToolCallLimit("calc", quotas=[Quota(5, per="thread")])
URL = "redis://:secret@127.0.0.1/0"
ASKS = ToolCallLimit(run_limit=1, exit_behavior="ask", name="asks")
PRICE = {"gpt-9": Price(input=1, output=2)}
OBSERVERS = "on_decision must be a function or several"
STORE = "store must be a QuotaStore or None"
OF_AGENTS = ("tell_model", "hide_exhausted", "charge_all_models")
PRICES = "prices= needs a limit of costs: add a CostLimit"


def observer(decision: Decision) -> None:
    """Takes a decision."""


async def copy_scope(scope: Any) -> Any:
    """Take a scope, and wait."""


class Counting:
    """A store of the user's own, which counts and cannot grant."""

    _store = MemoryStore()
    acquire, aacquire = _store.acquire, _store.aacquire
    peek, apeek, reset, areset = _store.peek, _store.apeek, _store.reset, _store.areset


class HalfAStore:
    """It has no async methods."""

    acquire = peek = reset = print


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ([], {}, ValueError, "limits must have at least one limit"),
    (SEARCH, {}, TypeError, "limits must be a sequence of limits, such as [ToolCallLimit(…)], not"),
    ("search", {}, TypeError, "such as [ToolCallLimit(…)], not 'search'"),
    *(
        ([SEARCH, each], {}, TypeError, f"such as [ToolCallLimit(…)], not {each!r}")
        for each in ("calc", None, ToolCallLimit)
    ),
    *(([SEARCH], {x: 1}, TypeError, f"{x} must be True or False, not 1") for x in OF_AGENTS),
    ([SEARCH], {"charge_all_models": True}, ValueError, "charge_all_models=True needs a budget"),
    ([SEARCH], {"prices": {"x": 3}}, TypeError, "a Price for the name of each model, not 3 for"),
    ([SEARCH], {"prices": 3}, TypeError, "prices must be a table of Price by model, a function"),
    *(
        (limits, {"prices": prices}, ValueError, PRICES)
        for limits in ([SEARCH], [TOKENS])
        for prices in (PRICE, {}, lambda _: None)
    ),
    ([SEARCH], {"unknown_price": "ignore"}, ValueError, "Invalid unknown_price: 'ignore'"),
    ([SEARCH], {"unknown_price": "allow"}, ValueError, "needs a limit of costs: add a CostLimit"),
    *(
        ([SEARCH], {"on_decision": each}, TypeError, OBSERVERS)
        for each in (None, [observer, "log"], {observer})
    ),
    ([SEARCH], {"on_near": [observer]}, TypeError, "on_near must be a function or None"),
    *(([SEARCH], {"store": x}, TypeError, f"{STORE}, not") for x in (5, HalfAStore(), MemoryStore)),
    ([SEARCH], {"store": URL}, TypeError, f"{STORE}, not a string: RedisStore(url) is one"),
    ([SEARCH], {"on_store_error": "DENY"}, ValueError, "Invalid on_store_error: 'DENY'"),
    ([SEARCH, SHARED], {}, ValueError, "limit 'tool:calc' has quotas: give a store"),
    ([ASKS], {"store": Counting()}, TypeError, "needs a store that can grant more, "),
    (
        [SEARCH, ToolCallLimit("search", thread_limit=9)],
        {},
        ValueError,
        "2 limits are named 'tool:s",
    ),
]


@pytest.mark.parametrize(("limits", "options", "error", "said"), REFUSED)
def test_an_argument_that_will_not_do(
    limits: Any, options: dict[str, Any], error: type[Exception], said: str, signals: Signals
) -> None:
    """The error names the argument and the value; both kinds say the same."""
    kinds: list[Any] = [QuotaMiddleware, GraphQuota]
    # A graph asks nobody.
    only_agents = limits == [ASKS] or options.keys() & {*OF_AGENTS}
    for kind in kinds[: 1 if only_agents else 2]:
        with pytest.raises(error, match=re.escape(said)):
            kind(limits, telemetry=signals.telemetry, **options)


def test_what_is_taken(signals: Signals) -> None:
    """One observer or several; two limits of one number; a dry-run limit asks nobody."""
    some: list[Any] = [[], observer, (observer, observer)]
    for observers in some:
        assert QuotaMiddleware([SEARCH], on_decision=observers, telemetry=signals.telemetry)
    assert QuotaMiddleware([SEARCH, replace(SEARCH, name="same")], telemetry=signals.telemetry)
    for limit, store in ((replace(ASKS, enforce=False), Counting()), (ASKS, MemoryStore())):
        assert QuotaMiddleware([limit], store=store, telemetry=signals.telemetry)


@needs_inline
def test_an_inline_middleware_asks_nobody(signals: Signals) -> None:
    """The error names the limit and what to use instead."""
    with pytest.raises(ValueError, match=r"limit 'asks' has exit_behavior='ask'.*QuotaMiddleware:"):
        InlineQuotaMiddleware([SEARCH, ASKS], telemetry=signals.telemetry)


@pytest.mark.parametrize("made", [ToolCallLimitMiddleware, ModelCallLimitMiddleware])
def test_drop_ins_have_langchains_arguments(made: Any, signals: Signals) -> None:
    """Quotas, stores and grants are QuotaMiddleware's; a name and telemetry are checked."""
    for argument in ("quotas", "store", "grant"):
        with pytest.raises(TypeError, match=argument):
            made(run_limit=1, **{argument: 1})
    with pytest.raises(ValueError, match=r"^Invalid exit_behavior: 'ask'. Choose one of"):
        made(run_limit=1, exit_behavior="ask")
    for value in (0, b"mine"):
        with pytest.raises(TypeError, match=f"name must be a string, not {value!r}"):
            made(run_limit=1, limit_name=value, telemetry=signals.telemetry)
        with pytest.raises(TypeError, match=f"telemetry must be a Telemetry.* not {value!r}"):
            made(run_limit=1, telemetry=value)


class Calling(QuotaMiddleware[Any, Any]):
    """Says which middleware is called."""

    called: list[Any] = []  # noqa: RUF012 - of the test

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        self.called.append(self)
        return await super().awrap_model_call(request, handler)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
async def test_a_copy_calls_itself(copied: Any, signals: Signals) -> None:
    """A copy calls no hook of its original, and charges the same store and telemetry."""
    limit, store = ToolCallLimit("search", quotas=[Quota(1, per="global")]), MemoryStore()
    original = Calling([limit], store=store, telemetry=signals.telemetry)
    for each, outcome in ((original, "allowed"), (copied(original), "blocked")):
        Calling.called = []
        scene = await Scene(signals, [["search"], "done"], [each]).played()
        assert (Calling.called, scene.calls(outcome, "search")) == ([each] * 2, 1)
    assert counts(store) == {"search:global:": 1}


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"quota": SHARED}, TypeError, "quota must be a QuotaMiddleware or a GraphQuota, not Tool"),
        ({"quota": QuotaMiddleware([SEARCH])}, ValueError, "quota must have a store, and a limit"),
        ({"quota": GraphQuota([SEARCH])}, ValueError, "quota must have a store, and a limit"),
        ({"subject": "user_id"}, TypeError, "subject must be a function of the ASGI scope, not"),
        ({"subject": lambda: None}, TypeError, "subject must be a function of scope, as in lambda"),
        ({"subject": copy_scope}, TypeError, "subject must be a function that is not async, not"),
        ({"path": 3}, TypeError, "path must be a path, not 3"),
        ({"path": "me"}, ValueError, "path must begin with a slash, as"),
        ({"replace_answers": 1}, TypeError, "replace_answers must be True or False, not 1"),
        ({"header": 1}, TypeError, "QuotaHeadersMiddleware has no argument 'header': write"),
    ],
)
def test_headers(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    """What an app gives to the middleware of its headers is checked when the app starts."""
    quota = QuotaMiddleware([SHARED], store=MemoryStore())
    given: Any = {"quota": quota, "subject": lambda scope: None, **options}
    with pytest.raises(kind, match=f"^{re.escape(text)}"):
        QuotaHeadersMiddleware(lambda *_: None, **given)  # type: ignore[arg-type]


def by_plan(state: object, runtime: object) -> int:
    return 5


def monthly(limit: Any = 5, **options: Any) -> Quota:
    return Quota(limit, **{"per": "tenant", "window": "month", **options})


PLAIN, ROLLS, NINE = monthly(), monthly(rollover=5), monthly(9, rollover=5)
BY_PLAN = monthly(by_plan, rollover=5)
SMOOTH = monthly(window="1d", smooth=True)
DIFFER = ([ROLLS, PLAIN], [PLAIN, ROLLS], [ROLLS, monthly(rollover=4)], [NINE, ROLLS])
AGREE = (
    *([BY_PLAN, BY_PLAN], [ROLLS, monthly(rollover=5, name="also")], [PLAIN, monthly(9)]),
    *([ROLLS, monthly(per="agent")], [ROLLS, SMOOTH], [monthly(window="1d", rollover=5), SMOOTH]),
)


@pytest.mark.parametrize("make", [QuotaMiddleware, GraphQuota])
@pytest.mark.parametrize("quotas", [*DIFFER, [BY_PLAN, ROLLS], *AGREE])
def test_limits_on_one_count(make: Any, quotas: Any) -> None:
    """A hard limit beside one that rolls over would let through what the other one left."""
    for kind in (ToolCallLimit, TokenLimit, ModelCallLimit):
        others = [ModelCallLimit(quotas=quotas[:1]), kind(quotas=quotas[1:], name="hard")]
        if kind is not ModelCallLimit or quotas in AGREE:
            make(others, store=MemoryStore())
            continue
        with pytest.raises(ValueError, match="give both the same limit and rollover"):
            make(others, store=MemoryStore())


KEY = "search:user_id:ada"
PREFIX = "prefix must match [A-Za-z0-9_.-]{1,64}, not"
IDLE, MOST = "idle_ttl must be a second or more", "timeout must be above 0 and at most 86400, not"
NO_DURATION, KEYS = "idle_ttl must be a timedelta, not 60", "max_keys must be a whole"

MADE: list[tuple[type[Any], dict[str, Any], type[Exception], str]] = [
    (MemoryStore, {"max_keys": 0}, ValueError, "max_keys must be 1 or more, not 0"),
    *((MemoryStore, {"max_keys": x}, TypeError, f"{KEYS} number, not {x}") for x in (1.5, True)),
    (MemoryStore, {"clock": 5}, TypeError, "clock must be a function that returns seconds, not 5"),
    (MemoryStore, {"idle_ttl": timedelta(seconds=0.5)}, ValueError, IDLE),
    *((kind, {"idle_ttl": 60}, TypeError, NO_DURATION) for kind in (MemoryStore, RedisStore)),
    (RedisStore, {"idle_ttl": timedelta(0)}, ValueError, IDLE),
    (RedisStore, {"source": 5}, TypeError, "source must be a URL"),
    (RedisStore, {"source": b"redis://"}, TypeError, "not a bytes"),
    *(
        (RedisStore, {"prefix": each}, ValueError, f"{PREFIX} {each!r}")
        for each in ("", "a" * 65, "a:b", "{a}", "a\n")
    ),
    (RedisStore, {"prefix": None}, TypeError, "prefix must be a string or a function, not None"),
    *(
        (RedisStore, {"timeout": each}, ValueError, f"{MOST} {each!r}")
        for each in (0, -1, 86_401, 1e300, float("nan"), float("inf"))
    ),
    *(
        (RedisStore, {"timeout": each}, TypeError, f"timeout must be a number, not {each!r}")
        for each in (None, True)
    ),
]


@pytest.mark.parametrize(("kind", "options", "error", "said"), MADE)
def test_a_store_that_cannot_be_made(
    kind: type[Any], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    """The message names the argument and the value."""
    given = {"source": "redis://127.0.0.1"} if kind is RedisStore else {}
    with pytest.raises(error, match=re.escape(said)):
        kind(**{**given, **options})


def test_redis_is_named() -> None:
    """The repr has server and prefix, and no user."""
    said = repr(RedisStore("redis://worker:pw@example.org:1234/5"))
    assert said == "RedisStore(redis://example.org:1234/5, prefix='langchain_quota')"


def test_a_url_that_is_wrong_is_not_quoted() -> None:
    """It may hold a password, and most often one that was not percent-encoded."""
    at = "127.0.0.1"
    for url in (
        *(f"redis://:s3cr3t/p@ss@{at}:6379/0", f"redis://s3cr3t/p@{at}:6379/0"),
        *(f"redis://worker:s3cr3t{end}p@{at}:6379/0" for end in "#?"),
        *(f"redis://worker:12345{end}s3cr3t@{at}" for end in "/?"),
        *("redis://:12345", f"worker:s3cr3t@{at}", "s3cr3t", "unix://worker:s3cr3t/p@/run/x.sock"),
        *(
            f"redis://worker:s3cr3t@{end}"
            for end in (f"{at}:s3cr3t/0", f"[{at}/0", f"{at}:99999/0")
        ),
        *(f"redis://worker:s3cr3t@{at}/{end}" for end in ("zero", "0?socket_timeout=s3cr3t")),
        *(f"redis://worker:s3cr3t@{at}/0?s3cr3t=1", f"http://worker:s3cr3t@{at}:6379/0"),
    ):
        with pytest.raises(ValueError, match="the URL of Redis must be") as refused:
            RedisStore(url)
        assert ("knows, not http://…;" in str(refused.value)) == url.startswith("http:")
        told = "".join(traceback.format_exception(refused.value))
        assert "s3cr3t" not in told.split("Error: ", 1)[1], url
        assert refused.value.__context__ is None, url


STORES = pytest.mark.parametrize(
    "store", [MemoryStore(), RedisStore("redis://127.0.0.1:1")], ids=["memory", "redis"]
)


@STORES
async def test_what_is_no_request(store: Any) -> None:
    """What is no request, and a string in place of keys, is a TypeError."""
    said = "request must be an AcquireRequest, not 'search'"
    asks: list[tuple[Any, Any, Any, str]] = [(store.acquire, store.aacquire, "search", said)]
    for wrong in ("search", [1], None):
        for ask, aask in ((store.peek, store.apeek), (store.reset, store.areset)):
            asks.append((ask, aask, wrong, "keys must be a sequence of strings"))
    for ask, aask, wrong, said in asks:
        with pytest.raises(TypeError, match=said):
            ask(wrong)
        with pytest.raises(TypeError, match=said):
            await aask(wrong)


NO_TIME_ZONE = datetime(2100, 1, 1)  # noqa: DTZ001 - the mistake
GRANTS: list[tuple[dict[str, Any], str]] = [
    ({"amount": 0}, "amount must be above 0, not 0"),
    ({"amount": 9 * 10**15 + 1}, "at most 9000000000000000"),
    ({"amount": -1}, "amount must be 0 or more"),
    ({"amount": "1"}, "amount must be a whole number"),
    ({"amount": 1.0}, "amount must be a whole number"),
    ({"key": 7}, "key must be a string"),
    ({"key": "email:ada"}, "key must be the key of a count, such as 'email:user_id:ada'"),
    ({"until": 7}, "until must be a datetime or None"),
    ({"until": NO_TIME_ZONE}, "until must have a time zone"),
    ({"window": 86_400}, 'window must be a time such as "1h", a timedelta or None, not 86400'),
    ({"window": "1 day"}, "or a time such as"),
    ({"reason": None}, "reason must be a string"),
    ({"by": "x" * 1001}, "by must have at most 1000 characters"),
    ({"id": ""}, "id must not be empty"),
]


@STORES
def test_a_grant_that_cannot_be_given(store: Any) -> None:
    """What cannot be given, or kept, is refused, and named, before a server is asked."""
    for ask in (store.reset, lambda keys: store.revoke(keys[0], "4711")):
        with pytest.raises(ValueError, match=r"key must be the key of a count, .* not 'email:ada'"):
            ask(["email:ada"])
    for options, said in GRANTS:
        with pytest.raises((TypeError, ValueError), match=re.escape(said)):
            store.grant(**{"key": KEY, "amount": 1, **options})


HOUR = timedelta(hours=1)
BOUNDS = ("max_exported_threads", "max_exported_subjects", "max_tools", "max_agents")
WRONG: list[tuple[str, object, type[Exception]]] = [
    *[("near", value, ValueError) for value in (0, 1.1, float("nan"))],
    *[("near", value, TypeError) for value in ("0.8", True)],
    *[("spans", value, ValueError) for value in ("some", None)],
    ("thread_ttl", timedelta(0), ValueError),
    ("thread_ttl", 3600, TypeError),
    *[(bound, -1, ValueError) for bound in BOUNDS],
    *[(bound, True, TypeError) for bound in BOUNDS],
    ("registry", CollectorRegistry, TypeError),
    ("tracer_provider", TracerProvider, TypeError),
    ("thread_label", "hidden", TypeError),
    *[("subject_label", x, TypeError) for x in (str, {"tenant": "hidden"}, {7: str})],
    ("count_unchecked_calls", 1, TypeError),
    ("run_histograms", 1, TypeError),
]


@pytest.mark.parametrize(("argument", "value", "error"), WRONG, ids=lambda value: str(value)[:24])
def test_what_is_refused(argument: str, value: Any, error: type[Exception]) -> None:
    """The error names the argument and the value, and leaves the registry to another Telemetry."""
    registry = CollectorRegistry()
    with pytest.raises(error, match=rf"^(Invalid )?{argument}\b") as caught:
        Telemetry(**{"registry": registry, argument: value})
    shown = f"{next(iter(value))!r} is mapped to" if isinstance(value, dict) else repr(value)
    assert shown in str(caught.value)
    assert list(registry.collect()) == []
    # The ends of the bounds are allowed.
    ends: Any = {"near": 1, "thread_ttl": timedelta(microseconds=1), **dict.fromkeys(BOUNDS, 0)}
    Telemetry(registry=registry, **ends)


def later(thread_id: object) -> str:
    return str(thread_id)


@pytest.mark.parametrize(
    ("argument", "ours", "theirs"),
    [
        ("near", 0.9, 0.8),
        ("thread_label", later, None),
        ("subject_label", {"tenant": later}, {}),
        ("max_exported_threads", 5, 500),
        ("max_exported_subjects", 5, 100),
        ("thread_ttl", HOUR / 2, HOUR),
        ("max_tools", 7, 100),
        ("max_agents", 7, 1000),
    ],
)
def test_what_shapes_shared_metrics_must_agree(argument: str, ours: Any, theirs: Any) -> None:
    """Of two Telemetry on one registry; the error names the argument and both values."""
    registry = CollectorRegistry()
    Telemetry(registry=registry)
    Telemetry(registry=registry, spans="off", count_unchecked_calls=True, run_histograms=True)
    with pytest.raises(ValueError, match=argument) as caught:
        Telemetry(**{"registry": registry, argument: ours})
    assert f"{argument}={ours!r}" in str(caught.value)
    assert f"{argument}={theirs!r}" in str(caught.value)
