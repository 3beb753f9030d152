"""What limits refuse when they are made: the argument, the value, and what to write instead."""

import inspect
import math
import re
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from functools import partial
from itertools import chain
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ToolCallLimitMiddleware as LangChainsLimiter
from langchain.messages import HumanMessage
from langchain_core.tools import StructuredTool
from prometheus_client import CollectorRegistry

from langchain_quota import (
    ConcurrencyLimit,
    CostLimit,
    GraphQuota,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitMiddleware,
    Price,
    Quota,
    QuotaMiddleware,
    RepeatLimit,
    Telemetry,
    TimeLimit,
    TokenLimit,
    ToolCallLimit,
    metrics_app,
)
from langchain_quota.testing import ScriptedChatModel

Make = Callable[..., Any]
Rows = list[tuple[type[Exception], str, dict[str, Any]]]
EACH = pytest.mark.parametrize(
    "make", [ToolCallLimit, ModelCallLimit, TokenLimit, CostLimit, RepeatLimit, TimeLimit]
)


def search(query: str) -> str:
    """Search the web."""
    return query


A_TOOL = StructuredTool.from_function(search)


@EACH
def test_no_option_takes_anything(make: Make) -> None:
    """Each option of each limit refuses what it cannot mean, by its name and the value."""
    nonsense = object()
    for option in inspect.signature(make).parameters:
        with pytest.raises((TypeError, ValueError)) as caught:
            make(**{"run_limit": 3, option: nonsense})
        assert option in str(caught.value)
        assert repr(nonsense) in str(caught.value)


NUMBERS = ("thread_limit", "run_limit")
RUN, TOOLS = {"run_limit": 5}, {"tool_name": "search"}
ASKS, LAST = {**RUN, "exit_behavior": "ask"}, {**RUN, "exit_behavior": "finalize"}
OF_USER, OF_THREAD = Quota(3, per="user_id"), Quota(5, per="thread")
USERS = {"quotas": [OF_USER]}
NO_NAMES = ("", "__all__", "__all__-calc", "a,b", ",")
QUOTAS = 'quotas must be a sequence of Quota, such as [Quota(5, per="user_id")], not'
GIVES_UP = "give_up_after=3 needs exit_behavior='continue' and enforce=True"
WAIT = "wait must be from 0 to 1000000000 seconds, not"
NO_TIME = "wait must be a time, such as"
DAILY = {"quotas": [Quota(3, per="user_id", window="1d")]}
SMOOTH = Quota(3, per="user_id", window="1d", smooth=True)
NOTHING = Quota(3, per="team", window="1d", rollover=0)
SMALL = Quota(9, per="user_id", window="1d", smooth=True, burst=2)
IN_DOLLARS: dict[str, Any] = {"quotas": [Quota("1.50", per="global")]}
CHEAP = ScriptedChatModel(script=[])
KEEP, AMOUNTS = {"keep": 1}, (*NUMBERS, "reserve", "keep")
WHOLE = "must be a whole number, not"
DAY, SECOND, WAITS = timedelta(days=1), timedelta(seconds=1), {"wait": 5}
TWO = {"quotas": [Quota(5, per="team"), Quota(9, per="team")]}
TOO_MUCH = "9000000.000000001"
MONEY = "run_limit must be from 0 to 9,000,000 dollars"
TIMES = 'a time such as "30s", "5m" or "1h", not {!r}'
SPANS = 'such as "30s", "10m", "1h" or "7d", not {!r}'
WHOLE_SECONDS = "window must be whole seconds, from 1, not {!r}"
NO_ZONE, NO_START = '"Europe/Berlin", not {!r}. If this', "={!r} does not fit window={window!r}"
NO_LABEL = "must match [a-z_]{{1,32}}, not {!r}"
NO_LABELS = ("User", "user id", "user-id", "user1", "ü", "x" * 33, "a\n")
TAKEN = "name must not be {!r}: it has a meaning of its own"
TAKEN_NAMES = ("run", "store", "none", "concurrency")


def number(state: object, runtime: object) -> int:
    return 1


def each(error: type[Exception], said: str, option: str, *values: Any, **more: Any) -> Rows:
    """A row for each value of an option, which is what is said."""
    return [(error, said.format(value, **more), {**more, option: value}) for value in values]


OF_BOTH: Rows = [
    (ValueError, "At least one limit must be specified: thread_limit, run_limit", {}),
    *((TypeError, f"{x} {WHOLE} {n!r}", {x: n}) for x in NUMBERS for n in (True, 2.0, [3])),
    *((ValueError, f"{x} must be 0 or more, not -1: leave it out", {x: -1}) for x in NUMBERS),
    (TypeError, f"run_limit {WHOLE} '5': write 5", {"run_limit": "5"}),
    (TypeError, "near must be a number, not '0.5'", {**RUN, "near": "0.5"}),
    *each(ValueError, "above 0 and at most 1, not {!r}", "near", 0, -0.1, 1.1, math.nan),
    (ValueError, "near must be above 0 and at most 1, not 50", {**RUN, "near": (0.5, 50)}),
    *((TypeError, f"near must be a number, not {x!r}", {**RUN, "near": x}) for x in ((), [0.5])),
    (TypeError, "enforce must be True or False, not 1", {**RUN, "enforce": 1}),
    (TypeError, "name must be a string, not 5", {**RUN, "name": 5}),
    *each(ValueError, "printable characters, not {!r}", "name", "n" * 65, "a\nb", "\ud800", "\x00"),
    *((TypeError, QUOTAS, {**RUN, "quotas": x}) for x in (OF_USER, "quota", None, {OF_USER})),
    (TypeError, "quotas must be a sequence of Quota", {**RUN, "quotas": [5]}),
    (ValueError, "2 thresholds of a limit have the scope 'team': give quotas names", TWO),
    (ValueError, "2 thresholds of a limit have", {"quotas": [OF_THREAD], "thread_limit": 9}),
    (ValueError, "grant=2 needs exit_behavior='ask'", {**RUN, "grant": 2}),
    (ValueError, "grant must be above 0, not 0", {**ASKS, "grant": 0}),
    (ValueError, "grant must be 0 or more, not -1", {**ASKS, "grant": -1}),
    *each(TypeError, f"grant {WHOLE} {{}}", "grant", 2.0, True, **ASKS),
    (ValueError, "Invalid exit_behavior: 'stop'. Choose", {**RUN, "exit_behavior": "stop"}),
    (ValueError, "wait=5 needs a quota with a window: Quota(…, window=", {**RUN, "wait": 5}),
    (ValueError, "wait=5 needs a quota with a window", {**USERS, "wait": 5}),
    *each(ValueError, f"{WAIT} {{}}", "wait", -1, math.inf, math.nan, **DAILY),
    (TypeError, NO_TIME, {**DAILY, "wait": True}),
    (ValueError, "wait must be a time such as", {**DAILY, "wait": "5"}),
    (ValueError, "cannot be used with a smooth quota: use wait", {**ASKS, "quotas": [SMOOTH]}),
]
OF_MODELS: Rows = [
    (ValueError, "wait=5 cannot be used with exit_behavior='finalize'", {**LAST, **DAILY, **WAITS}),
    # In a dry run no call is known to be the last.
    (ValueError, "exit_behavior='finalize' needs enforce=True", {**LAST, "enforce": False}),
]
OF_TOOLS: Rows = [
    (TypeError, ">: write 'search'", {"tool_name": search}),
    (TypeError, "not StructuredTool(…): write 'search'", {"tool_name": A_TOOL}),
    (TypeError, "tool_name", {"tool_name": ["search", 5]}),
    *each(ValueError, "tool_name must name a tool, not {}", "tool_name", [], ()),
    *each(ValueError, "{!r}", "tool_name", *NO_NAMES),
    *((ValueError, repr(x), {of: ["x", x]}) for x in NO_NAMES for of in ("tool_name", "exclude")),
    (ValueError, "exclude=['fetch'] needs all tools", {**TOOLS, "exclude": ["fetch"]}),
    (ValueError, "run_limit (5) cannot exceed thread_limit (3)", {**RUN, "thread_limit": 3}),
    (ValueError, "give_up_after must be 1 or more, not 0", {"give_up_after": 0}),
    *each(ValueError, GIVES_UP, "exit_behavior", "end", "error", give_up_after=3),
    (ValueError, GIVES_UP, {"give_up_after": 3, "enforce": False}),
    (ValueError, "Invalid exit_behavior: 'finalize'", LAST),
]
OF_CAPS: Rows = [
    (ValueError, "max_concurrency must be 1 or more, not 0", {"max_concurrency": 0}),
    *each(TypeError, "y must be a whole number, not {}", "max_concurrency", 2.0, None),
    *each(ValueError, WAIT, "wait", -1, -DAY, math.inf, 10**400, math.nan),
    *each(TypeError, NO_TIME, "wait", None, False),
    (TypeError, "has no argument 'exit_behavior'", {"exit_behavior": "end"}),
    (ValueError, "exclude=['fetch'] needs all tools", {**TOOLS, "exclude": ["fetch"]}),
]
OF_BUDGETS: Rows = [
    (ValueError, "run_limit must be", {"run_limit": -1}),
    (ValueError, "reserve must be above 0", {**RUN, "reserve": 0}),
    (ValueError, "rollover of quota 'team' must be above 0, not 0", {"quotas": [NOTHING]}),
    (ValueError, "keep must be above 0, not 0", {**LAST, "keep": 0}),
    (ValueError, "Invalid exit_behavior", {**RUN, "exit_behavior": "continue"}),
    (ValueError, "exit_behavior='finalize' needs keep=: ", LAST),
    (ValueError, "keep=1 needs exit_behavior='finalize'", {**RUN, **KEEP}),
    (ValueError, "keep=1 needs exit_behavior='finalize'", {**ASKS, **KEEP}),
    (ValueError, "grant must be above 0, not 0", {**ASKS, "grant": 0}),
    (ValueError, "reserve=2 cannot be used with exit_behavior='ask'", {**ASKS, "reserve": 2}),
    (ValueError, "must be at least reserve=2: ", {**LAST, **KEEP, "reserve": 2}),
    (ValueError, "less than thread_limit=5", {**LAST, **dict.fromkeys(AMOUNTS[::3], 5)}),
    (ValueError, "limit=3 of quota 'user_id'", {**LAST, **USERS, "keep": 4}),
    (ValueError, "reserve=6 must be at most run_limit", {**RUN, "reserve": 6}),
    (ValueError, "must be at most limit=3 of quota 'user_id'", {**USERS, "reserve": 4}),
    (ValueError, "needs enforce=True", {**LAST, **KEEP, "enforce": False}),
    (ValueError, "min_output_tokens=5 needs a function", {**RUN, "min_output_tokens": 5}),
    (ValueError, "min_output_tokens must be 1 or more", {**RUN, "min_output_tokens": 0}),
    (TypeError, "downgrade_to must be a chat model", {**RUN, "downgrade_to": "gpt"}),
    (ValueError, "downgrade_at must be above 0", {**RUN, "downgrade_at": 0}),
    (ValueError, "needs enforce=True", {**RUN, "downgrade_to": CHEAP, "enforce": False}),
]
OF_DOLLARS: Rows = [
    (ValueError, "quota 'user_id' is smooth, and counts dollars: only", {"quotas": [SMOOTH]}),
    (TypeError, "has no argument 'wait'", {**RUN, "wait": 5}),
    (TypeError, "run_limit must be dollars, such as 0.50, not True", {"run_limit": True}),
    *each(ValueError, "in digits", "run_limit", "$5", ""),
    *each(ValueError, f"{MONEY}, not {{!r}}", "run_limit", "-1", -0.5, "Infinity", TOO_MUCH),
    *each(ValueError, f"{MONEY}, not {{!r}}", "run_limit", Decimal("NaN"), math.nan, math.inf),
    *each(ValueError, "at most nine decimal places", "run_limit", 1e-10, 0.1 + 0.2, "0.0000000001"),
    (ValueError, "tool_prices['search'] must be from 0", {**RUN, "tool_prices": {"search": -1}}),
    (ValueError, "at most nine decimal", {**RUN, "tool_prices": {"search": "0.0000000001"}}),
    (ValueError, "tool_prices must be the name of a tool, not ''", {**RUN, "tool_prices": {"": 1}}),
    (TypeError, "tool_prices must be a table of prices by tool", {**RUN, "tool_prices": ["a"]}),
    (TypeError, "tool_prices['search']", {**RUN, "tool_prices": {"search": lambda: 1}}),
]
ONE_CALL = {"call_limit": 9, "tokens": "input"}
OF_TOKENS: Rows = [
    (ValueError, "reserve=3 must be at most burst=2 of", {"quotas": [SMALL], "reserve": 3}),
    *((TypeError, f"{x} must be a whole number", {**LAST, **KEEP, x: "5"}) for x in AMOUNTS),
    (TypeError, "limit of quota 'global' must be a whole number", IN_DOLLARS),
    (ValueError, "limit of quota 'x' must be 0 or more, not -1", {"quotas": [Quota(-1, per="x")]}),
    (ValueError, "Invalid tokens: 'cached'", {**RUN, "tokens": "cached"}),
    (ValueError, "call_limit=9 needs tokens='input'", {"call_limit": 9}),
    (ValueError, "call_limit must be 1 or more, not 0", {**ONE_CALL, "call_limit": 0}),
    (ValueError, "cannot be used with exit", {**ASKS, **ONE_CALL}),
    (ValueError, "needs a number beside call_limit=", {**ONE_CALL, "exit_behavior": "finalize"}),
]
# A price may be finer than what is counted, and is exact.
OF_PRICES: Rows = [
    (ValueError, "cache_read must be from 0 to 9,000,000 dollars", {"cache_read": math.nan}),
    (ValueError, "output must be from 0 to", {"output": "-1"}),
    (TypeError, "input must be dollars, such as 0.50, not None", {"input": None}),
    (ValueError, "reasoning must be dollars in digits", {"reasoning": "a lot"}),
]
OF_REPEATS: Rows = [
    (ValueError, "run_limit must be 1 or more, not 0", {"run_limit": 0}),
    (ValueError, "run_limit must be 100 or less", {"run_limit": 101}),
    *each(TypeError, "run_limit must be a whole", "run_limit", None, True, 2.5, "3"),
    (ValueError, "Invalid exit_behavior: 'finalize'", {"exit_behavior": "finalize"}),
    (ValueError, "Invalid exit_behavior: 'ask'. Choose one of continue", {"exit_behavior": "ask"}),
    (ValueError, "needs all tools: leave tools out", {"tools": "a", "exclude": "b"}),
    (ValueError, "tools must be the name of a tool, not ''", {"tools": ""}),
]
OF_TIME: Rows = [
    (TypeError, "has no argument 'wait'", {**RUN, "wait": 5}),
    *chain(*(each(ValueError, TIMES, of, "", "soon", "1.5h") for of in ("keep", "call_limit"))),
    *each(ValueError, TIMES, "run_limit", "", "soon", "1.5h"),
    (TypeError, 'a time, such as "5m", or seconds, not True', {"call_limit": True}),
    *each(ValueError, "must be from 0 to", "run_limit", -1, math.nan, math.inf),
    (ValueError, "call_limit must be above 0, not 0.0001", {"call_limit": 0.0001}),
    (ValueError, "exit_behavior='finalize' needs keep=", {"exit_behavior": "finalize"}),
    (ValueError, "keep='1m' needs exit_behavior='finalize'", {"keep": "1m"}),
    (ValueError, "less than run_limit='5m'", {"exit_behavior": "finalize", "keep": "5m"}),
    (ValueError, "add one of these", {"run_limit": None, "call_limit": 9, "keep": 1}),
    (TypeError, "has no argument 'reserve'", {"reserve": 5}),
    (ValueError, "At least one limit must be specified", {"run_limit": None}),
]
OF_QUOTAS: Rows = [
    (TypeError, "limit must be an amount or a function, not None", {"limit": None}),
    *each(TypeError, "it gives the same value), not {!r}", "per", 5, None, ["user_id"], b"user_id"),
    *each(TypeError, "or None, not {}", "window", 60, True),
    *each(ValueError, SPANS, "window", "", "1", "1 d", "0d", "1.5h", "1y", "d", "-1d", "999999d"),
    *each(ValueError, WHOLE_SECONDS, "window", timedelta(0), -DAY, 0.999 * SECOND, 1.5 * SECOND),
    *each(ValueError, "tz={!r} needs a window of hour, day, week, month", "tz", "UTC"),
    *each(ValueError, "tz={!r} needs a window of hour", "tz", "UTC", window="1d"),
    *each(ValueError, "starts={!r} needs a window of hour", "starts", "monday"),
    *each(ValueError, "starts={!r} needs a window of hour", "starts", "monday", window="1d"),
    (TypeError, "tz must be a string, such as", {"window": "day", "tz": 1}),
    *each(ValueError, NO_ZONE, "tz", "", "Europe/Bonn", "Europe", "/etc/passwd", window="day"),
    *each(ValueError, NO_ZONE, "tz", "CEST", "a\0b", "ü", "x" * 999, window="day"),
    *each(ValueError, NO_START, "starts", "00:00", 1, window="hour"),
    *each(ValueError, NO_START, "starts", "", "09:00", "monday", 9, True, window="day"),
    *each(ValueError, NO_START, "starts", "", "Monday", "mon", "monday ", 1, window="week"),
    *each(ValueError, NO_START, "starts", "monday 09:00", ["monday"], window="week"),
    *each(ValueError, NO_START, "starts", "", 0, 32, -1, True, 1.0, "01", "1 ", window="month"),
    *each(ValueError, NO_START, "starts", "1 09:00", "1st", "monday", window="month"),
    *each(ValueError, "write a day from 1 to 31, such as 15", "starts", 32, window="month"),
    *each(ValueError, 'the name of a day, such as "monday"', "starts", "mon", window="week"),
    (ValueError, "a run's count ends with the run", {"per": "root_run", "window": "day"}),
    *chain(*(each(ValueError, NO_LABEL, of, *NO_LABELS) for of in ("name", "per"))),
    (ValueError, "per, without a name, must match [a-z_]{1,32}, not ''", {"per": ""}),
    (TypeError, "name must be a string, not 5", {"name": 5}),
    (ValueError, "is a function: give the quota a name", {"per": number}),
    *chain(*(each(ValueError, TAKEN, of, *TAKEN_NAMES) for of in ("name", "per"))),
    *each(ValueError, "name must not be {!r}", "name", "thread", per="user_id"),
    *each(ValueError, "name must not be {!r}", "name", "global", per=number),
    *each(ValueError, "name must not be {!r}", "name", "agent", per="global"),
    (ValueError, "a run's count ends with the run", {"per": "root_run", "window": DAY}),
    (ValueError, "per must not be 'run', under which", {"per": "run", "name": "job"}),
    (TypeError, "smooth must be True or False, not 1", {"smooth": 1}),
    (ValueError, "smooth=True needs a window", {"smooth": True}),
    (ValueError, "window='day' cannot be smooth", {"smooth": True, "window": "day"}),
    (ValueError, "burst=2 needs smooth=True", {"burst": 2, "window": DAY}),
    (ValueError, "burst must be 1 or more", {"burst": 0, "window": DAY, "smooth": True}),
    (ValueError, "at most the limit, 5, not 6", {"burst": 6, "window": DAY, "smooth": True}),
    (ValueError, "rollover=2 needs windows that end: write window=", {"rollover": 2}),
    (ValueError, "leave smooth out", {"rollover": 2, "window": DAY, "smooth": True}),
]


@pytest.mark.parametrize(
    ("make", "rows", "given"),
    [
        (ToolCallLimit, OF_BOTH, {}),
        (ToolCallLimit, [(TypeError, "limit of quota 'global' must be", IN_DOLLARS)], {}),
        (ModelCallLimit, OF_BOTH + OF_MODELS, {}),
        (ToolCallLimit, OF_TOOLS, {"run_limit": 9}),
        (ConcurrencyLimit, OF_CAPS, {"max_concurrency": 2}),
        (TokenLimit, OF_BUDGETS + OF_TOKENS, {}),
        (CostLimit, OF_BUDGETS + OF_DOLLARS, {}),
        (TimeLimit, OF_TIME, {"run_limit": "5m"}),
        (Price, OF_PRICES, {"input": "0.00000012", "output": "10"}),
        (RepeatLimit, OF_REPEATS, {"run_limit": 3}),
        (Quota, OF_QUOTAS, {"limit": 5, "per": "team"}),
    ],
)
def test_an_option_that_will_not_do(make: Make, rows: Rows, given: dict[str, Any]) -> None:
    """The error names the option and the value, and what it must be."""
    for error, said, options in rows:
        with pytest.raises(error, match=re.escape(said)):
            print(make(**{**given, **options}))  # noqa: T201 - shown if it is made


def test_a_quota_says_whose_calls_count_together() -> None:
    """Without `per` the error has all choices, and what each means: none is the default."""
    without: Any = Quota
    with pytest.raises(TypeError, match="per must be one of") as caught:
        without(60, window="1m", smooth=True)
    for choice in ("thread", "root_run", "agent", "global", "user_id"):
        assert re.search(rf'"{choice}" \(.+?\)', str(caught.value))


def test_what_is_taken() -> None:
    """Numbers from 0, a function uncalled, names of 64 characters; a list may change later."""
    named = ["search", "calc"]
    limit = ToolCallLimit(named, run_limit=0, thread_limit=10**30, name="n" * 64, near=1)
    named.append("fetch")
    assert (limit.tool_name, limit.run_limit, limit.thread_limit) == (("calc", "search"), 0, 10**30)
    assert ConcurrencyLimit(max_concurrency=1).wait == 30
    assert ModelCallLimit(quotas=[SMOOTH], wait=timedelta(minutes=1)).seconds == 60
    assert ConcurrencyLimit(max_concurrency=1, wait=DAY).seconds == 86_400
    assert ConcurrencyLimit(max_concurrency=1, wait="2m").seconds == 120
    assert ModelCallLimit(thread_limit=3, run_limit=5).run_limit == 5  # as LangChain's
    assert ToolCallLimit(thread_limit=2, run_limit=2).run_limit == 2
    assert ToolCallLimit(run_limit=5, exit_behavior="ask", grant=9).grant == 9
    of_ann = partial(Quota, 5, per="user_id")
    daily = of_ann(window="1d")
    assert daily == of_ann(window=DAY)
    assert [of_ann(window=x).period for x in ("30s", "10m", "1h", "2w")] == [
        timedelta(seconds=30),
        timedelta(minutes=10),
        timedelta(hours=1),
        timedelta(weeks=2),
    ]
    assert of_ann(window="day") == of_ann(window="day", tz="UTC") != daily
    assert of_ann(window="week") == of_ann(window="week", starts="monday")
    assert of_ann(window="month", starts="15") == of_ann(window="month", starts=15)
    assert CostLimit(**IN_DOLLARS).quotas == (*IN_DOLLARS["quotas"],)
    quota = Quota(0, per="thread")
    assert (quota.limit, quota.per, quota.window, quota.name) == (0, "thread", None, "thread")
    assert Quota(5, per=number, name="tenant", window=timedelta(seconds=1)).name == "tenant"
    assert CostLimit(run_limit=9_000_000, thread_limit=9e6).run_limit == 9_000_000
    for given in ("90m", 5400, 5400.0, timedelta(minutes=90)):
        times = TimeLimit(call_limit=given, quotas=[Quota(given, per="global")])
        assert times.call_milliseconds == 5_400_000


@pytest.mark.parametrize("make", [TokenLimit, CostLimit])
@pytest.mark.parametrize(
    "options",
    [
        {"reserve": 5},
        {"thread_limit": 0, "reserve": 5},
        {**LAST, "thread_limit": 0, "keep": 4},
        {"reserve": 6, "enforce": False},
        {"run_limit": number, "reserve": 6},
        {"reserve": lambda _: 6},
    ],
)
def test_a_reserve_that_fits_once_is_taken(make: Make, options: dict[str, Any]) -> None:
    """A reserve of a whole limit admits one call; 0 forbids all; a trial or a function may be."""
    make(**{**RUN, **options})


def _middleware(**options: Any) -> QuotaMiddleware[Any, Any]:
    telemetry = Telemetry(registry=CollectorRegistry())
    return QuotaMiddleware([CostLimit(run_limit=1)], telemetry=telemetry, **options)


def _labelled(**given: Any) -> Telemetry:
    [function] = given.values()
    return Telemetry(registry=CollectorRegistry(), subject_label={"team": function})


class _OfThree:
    def __call__(self, state: Any, runtime: Any, more: Any) -> int:
        return 3


async def _async(given: Any) -> str:
    return "no"


class _Async:
    async def __call__(self, given: Any) -> str:
        return "no"


FUNCTIONS = [
    (ToolCallLimit, "thread_limit", "state, runtime"),
    (ModelCallLimit, "run_limit", "state, runtime"),
    (partial(ToolCallLimit, run_limit=1), "message", "decision"),
    (partial(TokenLimit, run_limit=1), "reserve", "request"),
    (partial(RepeatLimit, 3), "key", "call"),
    (partial(Quota, per="thread"), "limit", "state, runtime"),
    (partial(Quota, 3, name="team"), "per", "state, runtime"),
    (Telemetry, "thread_label", "thread_id"),
    (_labelled, "subject_label of 'team'", "subject"),
    (_middleware, "on_decision", "decision"),
    (_middleware, "on_near", "event"),
    (_middleware, "prices", "usage"),
]
AT_ONCE = {"message", "reserve", "key", "thread_label", "subject_label of 'team'", "prices"}
"""Arguments of which the result is needed at once."""


@pytest.mark.parametrize(("make", "argument", "parameters"), FUNCTIONS)
def test_a_function_takes_what_it_is_given(make: Any, argument: str, parameters: str) -> None:
    """One that takes less, needs more, or is async where its result is needed now is refused."""
    for function in (lambda: 3, _OfThree()):
        with pytest.raises(TypeError) as caught:
            make(**{argument: function})
        text, given = str(caught.value), parameters.replace(", ", " and ")
        assert f"{argument} must be a function of {given}, as in lambda {parameters}: …" in text
        assert re.search(r"not (<lambda>\(\)|_OfThree\(state: .*)$", text)
    for late in (_async, _Async()) if argument in AT_ONCE else ():
        with pytest.raises(TypeError, match=f"^{argument} must be a function that is not async"):
            make(**{argument: late})


@pytest.mark.parametrize(
    "function",
    [
        lambda *_: 3,
        lambda state, runtime, more=1: 3,
        partial(lambda more, state, runtime: 3, 1),
        max,  # has no signature
        type("Given", (), {"__call__": lambda self, state, runtime: 3})(),
    ],
)
def test_a_function_may_take_more(function: Any) -> None:
    """What can be called with what it is given is taken, however it is written."""
    assert ToolCallLimit(thread_limit=function).thread_limit is function


SEARCH = ToolCallLimit("search", run_limit=5)
QUOTA = Quota(5, per="user_id")
TOOL = 'write ToolCallLimit("search", run_limit=5)'
MONTHLY = 'write Quota(500, per="user_id", window="month")'
AGENT: Any = QuotaMiddleware([SEARCH])
PRICES = {"another-model": Price(input=1, output=1)}
NO_MIDDLEWARE = "is no middleware: write middleware=[QuotaMiddleware("
QUOTED = ModelCallLimit(run_limit=9)
DROP_IN = ModelCallLimitMiddleware[Any, Any](run_limit=2)
FREE = QuotaMiddleware([CostLimit(run_limit=1)], prices=PRICES)
PRICED = 'give QuotaMiddleware prices= as a function, such as prices=lambda usage: Decimal("0.01")'


def agent(*middleware: Any) -> object:
    model = ScriptedChatModel(script=["done"])
    return create_agent(model, middleware=middleware).invoke({"messages": [HumanMessage("hi")]})


ROWS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (ToolCallLimit, ("search", 5), {}, f"arguments but 3 were given: {TOOL}"),
    (ToolCallLimit, (5,), {}, "not 5: to limit the calls of a run, write run_limit=5"),
    *(
        (ToolCallLimit, (), {name: 5}, f"'{name}' (did you mean {meant}?): {TOOL}")
        for name, meant in {
            "limit": "run_limit",
            "max_calls": "run_limit",
            "tool": "tool_name",
            "exit_behaviour": "exit_behavior",
        }.items()
    ),
    (ModelCallLimit, (5,), {}, "but 2 were given: write ModelCallLimit(run_limit=10)"),
    (ModelCallLimitMiddleware, (5,), {}, "write ModelCallLimitMiddleware(run_limit=10)"),
    (TokenLimit, (), {"max_tokens": 9}, "(did you mean run_limit?): write TokenLimit(run_limit="),
    (CostLimit, (0.5,), {}, 'write CostLimit(run_limit="0.50")'),
    (TimeLimit, (), {"timeout": 9}, '(did you mean run_limit?): write TimeLimit(run_limit="5m")'),
    (RepeatLimit, (), {}, "argument: 'run_limit': write RepeatLimit(3)"),
    (RepeatLimit, (0,), {}, "must be 1 or more, not 0: write 1 to block every repetition"),
    (ConcurrencyLimit, (), {"limit": 2}, "(did you mean max_concurrency?): write Concurrency"),
    (metrics_app, ("/metrics",), {}, "registry must be a CollectorRegistry, not '/metrics'"),
    (GraphQuota, ([SEARCH],), {"name": 5}, "name must be a string or None, not 5"),
    (Price, (), {"prompt": 1, "output": 2}, "'prompt' (did you mean input?): write Price(input="),
    (Quota, (), {"timezone": "UTC"}, f"'timezone' (did you mean tz?): {MONTHLY}"),
    (Quota, (5,), {"per": "team", "window": 60}, 'or None, not 60: write "60s"'),
    (Quota, (5,), {"per": "team", "window": "monthly"}, "not 'monthly': write \"month\""),
    (Quota, (5,), {"per": "team", "window": "1 day"}, "not '1 day': write \"day\""),
    (QuotaMiddleware, ([QUOTA],), {}, 'write ToolCallLimit("search", quotas=[Quota(…)])'),
    (QuotaMiddleware, ([LangChainsLimiter(run_limit=1)],), {}, "list it in middleware= of create"),
    (QuotaMiddleware, (SEARCH, SEARCH), {}, f"{TOOL[:6]}QuotaMiddleware([{TOOL[6:]}])"),
    (QuotaMiddleware, ([SEARCH, SEARCH],), {}, "'tool:search': of two numbers for the same calls"),
    (QuotaMiddleware, ([SEARCH],), {"store": MemoryStore}, "the class: write store=MemoryStore()"),
    (QuotaMiddleware, ([SEARCH],), {"on_store_error": "allow"}, "'allow' needs a store: add store"),
    (agent, (GraphQuota([SEARCH]),), {}, "GraphQuota is no middleware: write middleware=[Quota"),
    (agent, (SEARCH,), {}, f"ToolCallLimit {NO_MIDDLEWARE}[ToolCallLimit(…)])]"),
    (agent, (QUOTA,), {}, f"Quota {NO_MIDDLEWARE}[ToolCallLimit(quotas=[Quota(…)])])]"),
    (agent, (FREE,), {}, PRICED),
    (agent, (AGENT, QuotaMiddleware([QUOTED])), {}, "two of the name 'QuotaMiddleware': put their"),
    (agent, (AGENT, AGENT), {}, "two of the name 'QuotaMiddleware': put their limits into one"),
    (agent, (DROP_IN, ModelCallLimitMiddleware(run_limit=9)), {}, "a limit_name= of its own"),
    (AGENT.reset, (), {}, "reset() missing 1 required positional argument: 'agent"),
    (AGENT.agrant, (), {}, "agrant() missing 2 required positional arguments: 'name"),
]


@pytest.mark.parametrize(("call", "args", "options", "said"), ROWS)
def test_a_mistake_says_what_to_write(
    call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], said: str
) -> None:
    """The error is one line, with the call or the argument to write instead."""
    errors = (TypeError, ValueError, LookupError, AttributeError)
    with pytest.raises(errors, match=re.escape(said)) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
