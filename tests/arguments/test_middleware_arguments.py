"""What the middlewares and GraphQuota refuse when they are made."""

import copy
import re
from dataclasses import replace
from typing import Any

import pytest

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
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitMiddleware,
)
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
        scene = Scene(signals, [["search"], "done"], [each])
        await scene.play()
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
