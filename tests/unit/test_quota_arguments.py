"""QuotaMiddleware's arguments are checked once, when it is made."""

import copy
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.messages import AIMessage, ToolCall

from langchain_quota import (
    Call,
    Decision,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitMiddleware,
    Outcome,
    Quota,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitMiddleware,
)
from langchain_quota.limits import Limit
from langchain_quota.middleware.limiter import Limiter
from langchain_quota.middleware.resetting import thread_keys
from tests.conftest import Signals

SEARCH = ToolCallLimit("search", run_limit=3)


def make(limits: Any, signals: Signals, **arguments: Any) -> QuotaMiddleware[Any, Any]:
    return QuotaMiddleware(limits, telemetry=signals.telemetry, **arguments)


def observer(decision: Decision) -> None:
    """Takes a decision."""


async def async_observer(decision: Decision) -> None:
    """Takes a decision, and may wait."""


@pytest.mark.parametrize(
    "value",
    [SEARCH, None, 5, "search", {SEARCH}, (limit for limit in [SEARCH])],
    ids=["a limit", "None", "a number", "a string", "a set", "a generator"],
)
def test_limits_are_a_sequence(value: object, signals: Signals) -> None:
    """What is no sequence, a limit alone too, is a TypeError that names the value."""
    with pytest.raises(TypeError, match="limits must be a sequence") as caught:
        make(value, signals)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [[SEARCH, "calc"], [SEARCH, None], [ToolCallLimit]])
def test_limits_are_limits(value: Sequence[object], signals: Signals) -> None:
    """What is no limit is a TypeError that names it."""
    with pytest.raises(TypeError, match="ToolCallLimit or ModelCallLimit") as caught:
        make(value, signals)
    culprit = next(each for each in value if not isinstance(each, ToolCallLimit))
    assert repr(culprit) in str(caught.value)


@pytest.mark.parametrize("value", [[], ()])
def test_there_is_a_limit(value: object, signals: Signals) -> None:
    """Without a limit there is nothing to hold to."""
    with pytest.raises(ValueError, match="at least one limit"):
        make(value, signals)


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ([SEARCH, ToolCallLimit("search", thread_limit=9)], "tool:search"),
        ([ToolCallLimit(run_limit=3), ToolCallLimit(thread_limit=9)], "tool:*"),
        ([ModelCallLimit(run_limit=3), ModelCallLimit(thread_limit=9)], "model"),
        ([SEARCH, ModelCallLimit(run_limit=3, name="tool:search")], "tool:search"),
        ([SEARCH, SEARCH], "tool:search"),
    ],
)
def test_every_limit_has_a_name_of_its_own(
    limits: list[Limit], name: str, signals: Signals
) -> None:
    """Two limits of one name could not be told apart in metrics: the error says which."""
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
        (tools(run=5, name="dead"), tools(run=3)),
        (tools(thread=5, name="dead"), tools(thread=3)),
        (tools(thread=9, run=5, name="dead"), tools(thread=8, run=4)),
        (tools(thread=9, name="dead"), tools(thread=8, run=1)),
        (tools(run=5, name="dead"), tools(run=3, exit_behavior="error")),
        (model(run=5, name="dead"), model(run=3)),
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
        (tools(run=5), model(run=3)),
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


@pytest.mark.parametrize("argument", ["tell_model", "hide_exhausted"])
@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_a_switch_is_on_or_off(argument: str, value: object, signals: Signals) -> None:
    """What is neither True nor False is a TypeError that names the argument and the value."""
    with pytest.raises(TypeError, match=argument) as caught:
        make([SEARCH], signals, **{argument: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "value", [None, 5, "log", [observer, "log"], {observer}], ids=lambda value: type(value).__name__
)
def test_observers_are_functions(value: object, signals: Signals) -> None:
    """What is neither a function nor several is a TypeError that names the argument and value."""
    with pytest.raises(TypeError, match="on_decision") as caught:
        make([SEARCH], signals, on_decision=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [(), [], observer, async_observer, [observer], (observer, async_observer)],
    ids=["none", "an empty list", "one", "an async one", "a list", "several"],
)
def test_one_observer_or_several(value: Any, signals: Signals) -> None:
    """A function, sync or async, stands for itself; several are given as a sequence."""
    assert make([SEARCH], signals, on_decision=value)


DROP_INS = pytest.mark.parametrize("make", [ToolCallLimitMiddleware, ModelCallLimitMiddleware])


@pytest.mark.parametrize("value", ["x", 0, False, object()], ids=lambda value: type(value).__name__)
@DROP_INS
def test_the_telemetry_of_a_drop_in_is_one(make: Any, value: object) -> None:
    """What is no Telemetry is a TypeError that names the argument and the value."""
    with pytest.raises(TypeError, match="telemetry must be a Telemetry") as caught:
        make(run_limit=1, telemetry=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", ["x", 0, False, object()], ids=lambda value: type(value).__name__)
def test_the_telemetry_is_one(value: Any) -> None:
    """What is no Telemetry is a TypeError that names the argument and the value."""
    with pytest.raises(TypeError, match="telemetry must be a Telemetry") as caught:
        QuotaMiddleware([SEARCH], telemetry=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [0, False, b"mine"])
@DROP_INS
def test_a_limit_name_is_a_string(make: Any, value: object, signals: Signals) -> None:
    """A name that is no string, an empty value of another type too, is a TypeError with it."""
    with pytest.raises(TypeError, match="name must be a string") as caught:
        make(run_limit=1, limit_name=value, telemetry=signals.telemetry)
    assert repr(value) in str(caught.value)


def called(signals: Signals) -> float | None:
    labels = {"agent": "unnamed", "kind": "tool", "tool": "search", "decision": "allowed"}
    return signals.value("langchain_quota_calls_total", **labels)


@pytest.mark.parametrize(
    "make",
    [
        lambda telemetry: ToolCallLimitMiddleware(
            tool_name="search", run_limit=3, telemetry=telemetry
        ),
        lambda telemetry: QuotaMiddleware([SEARCH], telemetry=telemetry),
    ],
    ids=["drop-in", "quota"],
)
def test_a_copy_tells_the_same_telemetry(make: Any, signals: Signals) -> None:
    """A middleware can be copied, as frameworks copy agents; both count in one place."""
    original: Limiter[Any, Any, Any] = make(signals.telemetry)
    copied = copy.deepcopy(original)
    assert copied is not original
    search = ToolCall(name="search", args={}, id="a", type="tool_call")
    for number, each in enumerate((original, copied), start=1):
        message = AIMessage("", tool_calls=[search])
        each.after_model({"messages": [message]}, None)  # type: ignore[arg-type]  # called directly
        assert called(signals) == number


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


class OnlySync:
    """Half of a store."""

    def reserve(self, reservation: object) -> None:
        """Reserves."""

    def peek(self, keys: object) -> None:
        """Peeks."""

    def reset(self, keys: object) -> None:
        """Resets."""


@pytest.mark.parametrize(
    "value", [5, {}, OnlySync(), MemoryStore], ids=["a number", "a dict", "half a store", "a class"]
)
def test_the_store_is_one(value: Any, signals: Signals) -> None:
    """What has not all of a store's methods, a class too, is a TypeError that names it."""
    with pytest.raises(TypeError, match="store must be a QuotaStore or None") as caught:
        make([SEARCH], signals, store=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("limit", [tools(quotas=[Quota(5)]), model(quotas=[Quota(5)])])
def test_quotas_need_a_store(limit: Limit, signals: Signals) -> None:
    """Without one nobody would count them: the error names the limit."""
    with pytest.raises(ValueError, match="has quotas: give a store") as caught:
        make([ToolCallLimit(run_limit=9), limit], signals)
    assert repr(limit.name) in str(caught.value)
    assert make([ToolCallLimit(run_limit=9), limit], signals, store=MemoryStore())


@pytest.mark.parametrize("value", ["ignore", None, True, "DENY"])
def test_what_an_outage_does_is_known(value: object, signals: Signals) -> None:
    """What is neither deny nor allow is a ValueError that names the argument and the value."""
    with pytest.raises(ValueError, match="Invalid on_store_error") as caught:
        make([SEARCH], signals, on_store_error=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("drop_in", "expected"),
    [(ToolCallLimitMiddleware, TypeError), (ModelCallLimitMiddleware, TypeError)],
)
def test_drop_ins_have_no_quotas(drop_in: Any, expected: type[Exception]) -> None:
    """LangChain's arguments are theirs: quotas and stores are QuotaMiddleware's."""
    for argument in ("quotas", "store"):
        with pytest.raises(expected, match=argument):
            drop_in(run_limit=1, **{argument: ()})


def test_a_copy_asks_the_same_store(signals: Signals) -> None:
    """A copied middleware charges what the original does, and not a store of its own."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[Quota(1, per="global")])
    original = make([limit], signals, store=store)
    copied = copy.deepcopy(original)
    state = {
        "messages": [
            AIMessage("", tool_calls=[ToolCall(name="search", args={}, id="a", type="tool_call")])
        ]
    }
    updates = [
        each.after_model(state, None)  # type: ignore[arg-type]  # called directly
        for each in (original, copied)
    ]
    assert ["messages" in (update or {}) for update in updates] == [False, True]
    assert [each.used for each in store.usages()] == [1]


@pytest.mark.parametrize("tool", ["search", "model"])
def test_a_reset_finds_what_is_counted(tool: str, signals: Signals) -> None:
    """A thread's reset names the very keys under which its calls are counted, and no others."""
    day = timedelta(days=1)
    limit = ToolCallLimit(
        tool,
        thread_limit=9,
        quotas=[Quota(5, window=day, name="daily"), Quota(5, per="global", window=day)],
    )
    middleware = make([limit], signals, store=MemoryStore())
    middleware._clock = lambda: 0.0
    info = SimpleNamespace(thread_id="7", checkpoint_ns="node:task", task_id="task")
    runtime = SimpleNamespace(execution_info=info, context=None)
    (terms,) = middleware._terms_now(limit.kind, {}, runtime).terms
    per_thread = [quota.key for quota in terms.quotas if quota.per_thread]
    found = thread_keys([limit], {"configurable": {"thread_id": "7"}}, 0.0)
    assert found == sorted([str(terms.thread_key), *per_thread])
