"""The middlewares' arguments are checked once, when one is made."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from langchain_core.messages import AIMessage, ToolCall

from langchain_quota import (
    Call,
    Decision,
    GraphQuota,
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitMiddleware,
    Outcome,
    Price,
    Quota,
    QuotaMiddleware,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitMiddleware,
)
from langchain_quota.arguments import shown
from langchain_quota.limits import Limit
from langchain_quota.middleware._base import Limiter
from tests.signals import Signals, needs_inline

SEARCH = ToolCallLimit("search", run_limit=3)


def make(limits: Any, signals: Signals, **arguments: Any) -> QuotaMiddleware[Any, Any]:
    return QuotaMiddleware(limits, telemetry=signals.telemetry, **arguments)


def observer(decision: Decision) -> None:
    """Takes a decision."""


async def async_observer(decision: Decision) -> None:
    """Takes a decision, and may wait."""


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


@pytest.mark.parametrize(
    "value",
    [SEARCH, None, "search", {SEARCH}, (limit for limit in [SEARCH])],
    ids=["a limit", "None", "a string", "a set", "a generator"],
)
def test_limits_are_a_sequence(value: object, signals: Signals) -> None:
    """What is no sequence, a limit alone too, is a TypeError that names the value."""
    with pytest.raises(TypeError, match="limits must be a sequence") as caught:
        make(value, signals)
    assert shown(value) in str(caught.value)


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


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ([SEARCH, SEARCH], "tool:search"),
        ([ToolCallLimit(run_limit=3), ToolCallLimit(thread_limit=9)], "tool:*"),
        ([ModelCallLimit(run_limit=3), ModelCallLimit(thread_limit=9)], "model"),
        ([SEARCH, ModelCallLimit(run_limit=3, name="tool:search")], "tool:search"),
    ],
)
def test_every_limit_has_a_name_of_its_own(
    limits: list[Limit], name: str, signals: Signals
) -> None:
    """Two limits of one name would be one in metrics: the error says which name."""
    with pytest.raises(ValueError, match="2 limits are named") as caught:
        make(limits, signals)
    assert repr(name) in str(caught.value)


def tools(thread: Any = None, run: Any = None, **arguments: Any) -> ToolCallLimit:
    return ToolCallLimit("search", thread_limit=thread, run_limit=run, **arguments)


def model(thread: Any = None, run: Any = None, **arguments: Any) -> ModelCallLimit:
    return ModelCallLimit(thread_limit=thread, run_limit=run, **arguments)


@pytest.mark.parametrize(
    ("dead", "other"),
    [
        (tools(run=5, name="dead"), tools(run=3, exit_behavior="error")),
        (tools(thread=5, name="dead"), tools(thread=3)),
        (tools(thread=9, run=5, name="dead"), tools(thread=8, run=4)),
        (tools(thread=9, name="dead"), tools(thread=8, run=1)),
        (model(run=5, name="dead"), model(run=3, exit_behavior="finalize")),
        # A run is part of a thread.
        (tools(run=5, name="dead"), tools(thread=3)),
        (tools(thread=9, run=5, name="dead"), tools(thread=3)),
    ],
)
def test_a_limit_that_is_never_reached(dead: Limit, other: Limit, signals: Signals) -> None:
    """A limit that another one of the same calls always refuses before is an error naming both."""
    for order in ([dead, other], [other, dead]):
        with pytest.raises(ValueError, match="'dead' can never be reached") as caught:
            make(order, signals)
        assert repr(other.name) in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (tools(run=3, name="a"), tools(run=3, name="b")),
        (tools(thread=9, run=3, name="a"), tools(thread=8, run=4, name="b")),
        (tools(run=3, name="a"), tools(thread=9, name="b")),
        (tools(thread=3, name="a"), tools(run=3, name="b")),
        (tools(thread=9, run=3, name="a"), tools(run=2, name="b")),
        (tools(run=5, name="a"), tools(run=3, name="b", enforce=False)),
        (tools(run=5, name="a", enforce=False), tools(run=3, name="b")),
        (tools(run=5, name="a"), tools(run=lambda *_: 3, name="b")),
        (tools(run=lambda *_: 5, name="a"), tools(run=3, name="b")),
        (ToolCallLimit("model", run_limit=5), model(run=3)),
        (tools(run=5), ToolCallLimit("calc", run_limit=3)),
        (tools(run=5), ToolCallLimit(["search", "calc"], run_limit=6)),
        (ToolCallLimit(run_limit=5), ToolCallLimit(exclude=["calc"], run_limit=3)),
    ],
)
def test_limits_that_can_all_be_reached(first: Limit, second: Limit, signals: Signals) -> None:
    """Equal ones, of other scopes or calls, on trial or computed do not contradict each other."""
    assert make([first, second], signals)
    assert make([second, first], signals)


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


@pytest.mark.parametrize("kind", [QuotaMiddleware, InlineQuotaMiddleware, GraphQuota])
def test_the_arguments_can_be_listed(kind: Any) -> None:
    """Help and editors list the arguments by name."""
    assert list(inspect.signature(kind).parameters)[:2] == ["limits", "tell_model"]


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


@pytest.mark.parametrize("value", [[], observer, async_observer, (observer, async_observer)])
def test_one_observer_or_several(value: Any, signals: Signals) -> None:
    """One function, sync or async, is given directly; several are given as a sequence."""
    assert make([SEARCH], signals, on_decision=value)


@pytest.mark.parametrize("value", ["x", 0, False])
@pytest.mark.parametrize(
    "made",
    [
        lambda telemetry: ToolCallLimitMiddleware(run_limit=1, telemetry=telemetry),
        lambda telemetry: ModelCallLimitMiddleware(run_limit=1, telemetry=telemetry),
        lambda telemetry: QuotaMiddleware([SEARCH], telemetry=telemetry),
    ],
    ids=["tools", "model", "quota"],
)
def test_the_telemetry_is_one(made: Any, value: object) -> None:
    """What is no Telemetry, an empty value too, is a TypeError with the argument and the value."""
    with pytest.raises(TypeError, match="telemetry must be a Telemetry") as caught:
        made(value)
    assert repr(value) in str(caught.value)


DROP_INS = pytest.mark.parametrize("made", [ToolCallLimitMiddleware, ModelCallLimitMiddleware])


@pytest.mark.parametrize("value", [0, b"mine"])
@DROP_INS
def test_a_limit_name_is_a_string(made: Any, value: object, signals: Signals) -> None:
    """A name that is no string, an empty value of another type too, is a TypeError with it."""
    with pytest.raises(TypeError, match="name must be a string") as caught:
        made(run_limit=1, limit_name=value, telemetry=signals.telemetry)
    assert repr(value) in str(caught.value)


@DROP_INS
def test_drop_ins_have_no_quotas(made: Any) -> None:
    """LangChain's arguments are theirs: quotas and stores are QuotaMiddleware's."""
    for argument in ("quotas", "store"):
        with pytest.raises(TypeError, match=argument):
            made(run_limit=1, **{argument: ()})


@DROP_INS
def test_drop_ins_ask_nobody(made: Any) -> None:
    """They behave as LangChain's do: what asks is QuotaMiddleware."""
    with pytest.raises(ValueError, match=r"^Invalid exit_behavior: 'ask'. Choose one of"):
        made(run_limit=1, exit_behavior="ask")
    with pytest.raises(TypeError, match="grant"):
        made(run_limit=1, grant=1)


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


@pytest.mark.parametrize("made", ["drop-in", "quota"])
def test_a_copy_counts_in_the_same_telemetry(made: str, signals: Signals) -> None:
    """A middleware can be copied, as frameworks copy agents; both count in one place."""
    original: Limiter[Any, Any, Any] = make([SEARCH], signals)
    if made == "drop-in":
        original = ToolCallLimitMiddleware(
            tool_name="search", run_limit=3, telemetry=signals.telemetry
        )
    copied = copy.deepcopy(original)
    assert copied is not original
    for number, each in enumerate((original, copied), start=1):
        search(each)
        assert decided(signals, "allowed") == number


def test_a_copy_asks_the_same_store(signals: Signals) -> None:
    """A copied middleware charges what the original does, and not a store of its own."""
    limit = ToolCallLimit("search", quotas=[Quota(1, per="global")])
    original = make([limit], signals, store=MemoryStore())
    for each in (original, copy.deepcopy(original)):
        search(each)
    assert (decided(signals, "allowed"), decided(signals, "blocked")) == (1, 1)


def test_nothing_is_known_of_an_error(signals: Signals) -> None:
    """A middleware that could not be made leaves no trace in the metrics' tool names."""
    invented = [ToolCallLimit("x" * 80, run_limit=1), ToolCallLimit("x" * 80, run_limit=2)]
    with pytest.raises(ValueError, match="2 limits are named"):
        make(invented, signals)
    call = Call("tool", "x" * 80, agent="boss")
    signals.recorder.record([Decision(call, Outcome.ALLOWED)], started=0)
    labels = {"agent": "boss", "kind": "tool", "tool": "_other", "decision": "allowed"}
    assert signals.value("langchain_quota_calls_total", **labels) == 1


def test_limits_are_taken_as_they_are(signals: Signals) -> None:
    """A list that its owner changes later changes nothing."""
    limits: list[Limit] = [SEARCH]
    middleware = make(limits, signals)
    limits.clear()
    assert middleware._limits == (SEARCH,)


def test_the_name_in_the_graph(signals: Signals) -> None:
    """One middleware for all limits: its nodes are named after the class, whatever it limits."""
    assert make([SEARCH, ModelCallLimit(run_limit=1)], signals).name == "QuotaMiddleware"
    assert type("Mine", (QuotaMiddleware,), {})([SEARCH]).name == "Mine"
