"""The middlewares' arguments are checked once, when one is made."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from langchain_core.messages import AIMessage, ToolCall

from langchain_quota import (
    Decision,
    GraphQuota,
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    Price,
    Quota,
    QuotaMiddleware,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.middleware._base import Limiter
from tests.signals import Signals, needs_inline

SEARCH = ToolCallLimit("search", run_limit=3)


def make(limits: Any, signals: Signals, **arguments: Any) -> QuotaMiddleware[Any, Any]:
    return QuotaMiddleware(limits, telemetry=signals.telemetry, **arguments)


def observer(decision: Decision) -> None:
    """Takes a decision."""


class Counting:
    """A store of the user's own, which counts and cannot grant."""

    _store = MemoryStore()
    acquire, aacquire = _store.acquire, _store.aacquire
    peek, apeek, reset, areset = _store.peek, _store.apeek, _store.reset, _store.areset


class HalfAStore:
    """It has no async methods."""

    def acquire(self, request: object) -> None:
        """Acquires."""

    def peek(self, keys: object) -> None:
        """Peeks."""

    def reset(self, keys: object) -> None:
        """Resets."""


@pytest.mark.parametrize("value", [[SEARCH, "calc"], [SEARCH, None], [ToolCallLimit]])
def test_limits_are_limits(value: Sequence[object], signals: Signals) -> None:
    """What is no limit is a TypeError that names it."""
    with pytest.raises(TypeError, match="CostLimit or RepeatLimit") as caught:
        make(value, signals)
    culprit = next(each for each in value if not isinstance(each, ToolCallLimit))
    assert repr(culprit) in str(caught.value)


def test_there_is_a_limit(signals: Signals) -> None:
    """Without a limit there is nothing to hold to."""
    with pytest.raises(ValueError, match="at least one limit"):
        make([], signals)


def tools(thread: Any = None, run: Any = None, **arguments: Any) -> ToolCallLimit:
    return ToolCallLimit("search", thread_limit=thread, run_limit=run, **arguments)


def model(thread: Any = None, run: Any = None, **arguments: Any) -> ModelCallLimit:
    return ModelCallLimit(thread_limit=thread, run_limit=run, **arguments)


class OwnQuota(QuotaMiddleware[Any, Any]):
    """A class of the user's."""


@pytest.mark.parametrize("kind", [QuotaMiddleware, InlineQuotaMiddleware, GraphQuota, OwnQuota])
def test_limits_without_a_list(kind: Any) -> None:
    """Several limits without a list, and one, are refused by the class that the user has named."""
    with pytest.raises(TypeError) as caught:
        kind(SEARCH, SEARCH)
    assert str(caught.value) == (
        f"{kind.__name__} takes the limits in one list, and all else by name: "
        f"{kind.__name__}([ToolCallLimit(…), ToolCallLimit(…)])"
    )
    with pytest.raises(TypeError, match=r"such as \[ToolCallLimit\(…\)\], not ToolCallLimit\(…\)$"):
        kind(SEARCH)


@pytest.mark.parametrize(
    ("argument", "value", "error", "said"),
    [
        ("tell_model", 1, TypeError, "tell_model must be True or False"),
        ("hide_exhausted", None, TypeError, "hide_exhausted must be True or False"),
        ("charge_all_models", 1, TypeError, "charge_all_models must be True or False, not 1"),
        ("charge_all_models", True, ValueError, "needs a budget to charge: add a TokenLimit"),
        ("prices", {"x": 3}, TypeError, r"a Price for the name of each model, not 3 for 'x'"),
        ("prices", 3, TypeError, "prices must be a table of Price by model, a function or None"),
        ("unknown_price", "ignore", ValueError, "Invalid unknown_price"),
        ("unknown_price", "allow", ValueError, "needs a limit of costs: add a CostLimit"),
        ("on_decision", None, TypeError, "on_decision must be a function or several"),
        ("on_decision", [observer, "log"], TypeError, "on_decision must be a function or several"),
        ("on_decision", {observer}, TypeError, "on_decision must be a function or several"),
        ("store", 5, TypeError, "store must be a QuotaStore or None"),
        ("store", HalfAStore(), TypeError, "store must be a QuotaStore or None"),
        ("store", MemoryStore, TypeError, "store must be a QuotaStore or None"),
        ("on_store_error", None, ValueError, "Invalid on_store_error"),
        ("on_store_error", "DENY", ValueError, "Invalid on_store_error"),
    ],
)
def test_an_argument_that_will_not_do(
    argument: str, value: Any, error: type[Exception], said: str, signals: Signals
) -> None:
    """The error names the argument and the value."""
    with pytest.raises(error, match=said) as caught:
        make([SEARCH], signals, **{argument: value})
    shown = value["x"] if isinstance(value, dict) else value
    assert repr(shown) in str(caught.value)


@pytest.mark.parametrize("prices", [{"gpt-9": Price(input=1, output=2)}, {}, lambda _: None])
@pytest.mark.parametrize("limits", [[SEARCH], [TokenLimit(run_limit=9)]])
@pytest.mark.parametrize("kind", [QuotaMiddleware, GraphQuota])
def test_prices_are_for_costs(
    kind: Any, limits: list[Limit], prices: Any, signals: Signals
) -> None:
    """Without a limit of costs, prices would be in vain: the limit is forgotten, or they are."""
    with pytest.raises(ValueError, match="prices= needs a limit of costs: add a CostLimit"):
        kind(limits, prices=prices, telemetry=signals.telemetry)


@needs_inline
def test_an_inline_middleware_asks_nobody(signals: Signals) -> None:
    """The error names the limit and what to use instead."""
    limits = [SEARCH, ToolCallLimit(run_limit=1, exit_behavior="ask", name="asks")]
    with pytest.raises(ValueError, match=r"limit 'asks' has exit_behavior='ask'.*QuotaMiddleware:"):
        InlineQuotaMiddleware(limits, telemetry=signals.telemetry)


@pytest.mark.parametrize("kind", [QuotaMiddleware, GraphQuota])
def test_what_asks_needs_a_store_that_grants(kind: Any, signals: Signals) -> None:
    """A store of the user's own that cannot grant is refused; a limit on trial asks nobody."""
    limit = ToolCallLimit(run_limit=1, exit_behavior="ask")
    with pytest.raises(TypeError, match=r"needs a store that can grant more, .* not <.*Counting"):
        kind([limit], store=Counting(), telemetry=signals.telemetry)
    kind([limit], store=MemoryStore(), telemetry=signals.telemetry)
    kind([replace(limit, enforce=False)], store=Counting(), telemetry=signals.telemetry)


@pytest.mark.parametrize("limit", [tools(quotas=[Quota(5)]), model(quotas=[Quota(5)])])
def test_quotas_need_a_store(limit: Limit, signals: Signals) -> None:
    """Without one nobody would count them: the error names the limit."""
    with pytest.raises(ValueError, match="has quotas: give a store") as caught:
        make([ToolCallLimit(run_limit=9), limit], signals)
    assert repr(limit.name) in str(caught.value)
    assert make([ToolCallLimit(run_limit=9), limit], signals, store=MemoryStore())


def search(middleware: Limiter[Any, Any, Any]) -> dict[str, Any]:
    """What a middleware writes when the model has called the tool."""
    made = ToolCall(name="search", args={}, id="a", type="tool_call")
    state = {"messages": [AIMessage("", tool_calls=[made])]}
    update = middleware.after_model(state, None)  # type: ignore[arg-type]  # called directly
    return update or {}


def decided(signals: Signals, decision: str) -> float | None:
    labels = {"agent": "unnamed", "kind": "tool", "tool": "search", "decision": decision}
    return signals.value("langchain_quota_calls_total", **labels)


def test_a_copy_asks_the_same_store(signals: Signals) -> None:
    """A copied middleware charges what the original does, and not a store of its own."""
    limit = ToolCallLimit("search", quotas=[Quota(1, per="global")])
    original = make([limit], signals, store=MemoryStore())
    for each in (original, copy.deepcopy(original)):
        search(each)
    assert (decided(signals, "allowed"), decided(signals, "blocked")) == (1, 1)
