"""Limits are validated once, when they are made."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import combinations, product
from typing import Any

import pytest
from langchain_core.tools import StructuredTool
from prometheus_client import CollectorRegistry

from langchain_quota import (
    CostLimit,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    RepeatLimit,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.limits import Limit, check_together

BOTH = pytest.mark.parametrize("make", [ToolCallLimit, ModelCallLimit])

Make = Callable[..., Limit]


OPTIONS = [
    (make, option)
    for make in (ToolCallLimit, ModelCallLimit, TokenLimit, CostLimit, RepeatLimit)
    for option in inspect.signature(make).parameters
]


@pytest.mark.parametrize(("make", "option"), OPTIONS)
def test_no_option_takes_anything(make: Make, option: str) -> None:
    """Each option of each limit refuses what it cannot mean, by its name and the value."""
    nonsense = object()
    with pytest.raises((TypeError, ValueError)) as caught:
        make(**{"run_limit": 3, option: nonsense})
    assert option in str(caught.value)
    assert repr(nonsense) in str(caught.value)


@BOTH
def test_a_limit_needs_a_threshold(make: Make) -> None:
    """Without a thread limit and a run limit there is nothing to hold to."""
    with pytest.raises(ValueError, match="At least one limit must be specified") as caught:
        make()
    for argument in ("thread_limit", "run_limit", "quotas"):
        assert argument in str(caught.value)
    assert ("at_once" in str(caught.value)) == (make is ToolCallLimit)


@pytest.mark.parametrize("make", [ToolCallLimit, ModelCallLimit, TokenLimit, CostLimit])
def test_a_number_has_a_name(make: Any) -> None:
    """A number without one is refused with the names that it may have."""
    tool = ("search",) if make is ToolCallLimit else ()
    with pytest.raises(TypeError) as caught:
        make(*tool, 3)
    assert str(caught.value) == (
        f"{make.__name__} takes numbers by name: thread_limit=3 for all runs of a thread, or "
        "run_limit=3 for each run"
    )


def _middleware(**options: Any) -> QuotaMiddleware[Any, Any]:
    telemetry = Telemetry(registry=CollectorRegistry())
    return QuotaMiddleware([CostLimit(run_limit=1)], telemetry=telemetry, **options)


class _OfThree:
    def __call__(self, state: Any, runtime: Any, more: Any) -> int:
        return 3


@pytest.mark.parametrize(
    ("make", "argument", "parameters"),
    [
        (ToolCallLimit, "thread_limit", "state, runtime"),
        (ModelCallLimit, "run_limit", "state, runtime"),
        (partial(ToolCallLimit, run_limit=1), "message", "decision"),
        (partial(TokenLimit, run_limit=1), "reserve", "request"),
        (partial(RepeatLimit, 3), "key", "call"),
        (Quota, "limit", "state, runtime"),
        (partial(Quota, 3, name="team"), "per", "state, runtime"),
        (Telemetry, "thread_label", "thread_id"),
        (_middleware, "on_decision", "decision"),
        (_middleware, "prices", "usage"),
    ],
)
@pytest.mark.parametrize("function", [lambda: 3, _OfThree()], ids=["of none", "of three"])
def test_a_function_takes_what_it_is_given(
    make: Any, argument: str, parameters: str, function: Any
) -> None:
    """One that takes less or needs more is refused when it is given, not in the first run."""
    with pytest.raises(TypeError) as caught:
        make(**{argument: function})
    text = str(caught.value)
    given = parameters.replace(", ", " and ")
    assert f"{argument} must be a function of {given}, as in lambda {parameters}: …" in text
    assert re.search(r"not (<lambda>\(\)|_OfThree\(state: .*)$", text)


async def _async(given: Any) -> str:
    return "no"


class _Async:
    async def __call__(self, given: Any) -> str:
        return "no"


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (partial(ToolCallLimit, run_limit=1), "message"),
        (partial(TokenLimit, run_limit=1), "reserve"),
        (partial(RepeatLimit, 3), "key"),
        (Telemetry, "thread_label"),
        (lambda subject_label: Telemetry(subject_label={"team": subject_label}), "subject_label"),
        (_middleware, "prices"),
    ],
)
@pytest.mark.parametrize("function", [_async, _Async()], ids=["function", "object"])
def test_a_function_whose_result_is_needed_at_once_is_not_async(
    make: Any, argument: str, function: Any
) -> None:
    """It is refused when it is given, not at the first call that needs it."""
    with pytest.raises(TypeError, match=f"{argument}.* must be a function that is not async, not"):
        make(**{argument: function})


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


def test_a_tool_in_place_of_its_name_is_refused_with_the_name() -> None:
    """A function or a LangChain tool where its name belongs: the message says the name to write."""
    for given in (search, StructuredTool.from_function(search)):
        with pytest.raises(TypeError, match=r"tool_name must be .*: write 'search'$") as caught:
            ToolCallLimit(given, run_limit=1)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 150


def search(query: str) -> str:
    """Search the web."""
    return query


@pytest.mark.parametrize("value", ["", "__all__", "__all__-calc", "a,b", ","])
def test_a_tool_name_that_names_no_tool_is_refused(value: str) -> None:
    """The empty name, and what reads like the counter of several tools, name no tool."""
    with pytest.raises(ValueError, match=f"tool_name .*'{value}'"):
        ToolCallLimit(value, run_limit=1)
    with pytest.raises(ValueError, match=f"tool_name .*'{value}'"):
        ToolCallLimit(["search", value], run_limit=1)
    with pytest.raises(ValueError, match=f"exclude .*'{value}'"):
        ToolCallLimit(exclude=["search", value], run_limit=1)


@pytest.mark.parametrize("value", [[], ()])
def test_no_tools_are_not_all_tools(value: Any) -> None:
    """An empty list of tools, which a setting may turn out to be, does not limit all of them."""
    with pytest.raises(ValueError, match="tool_name must name a tool"):
        ToolCallLimit(value, run_limit=1)


@pytest.mark.parametrize("tools", ["search", ["search", "calc"]])
def test_what_is_named_excludes_nothing(tools: Any) -> None:
    """Tools can be excluded from all tools only; the error names what was excluded."""
    with pytest.raises(ValueError, match=r"exclude=.*'fetch'"):
        ToolCallLimit(tools, exclude=["fetch"], run_limit=1)


@BOTH
@pytest.mark.parametrize("value", [0, -0.1, 1.1, float("nan")])
def test_a_near_out_of_bounds_is_refused(make: Make, value: float) -> None:
    """A share is above 0 and at most 1; the error names the value."""
    with pytest.raises(ValueError, match="near") as caught:
        make(run_limit=1, near=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "others", [{"exit_behavior": "end"}, {"exit_behavior": "error"}, {"enforce": False}], ids=str
)
def test_only_what_continues_gives_up(others: dict[str, Any]) -> None:
    """A limit that ends at its first refusal, or that refuses nothing, cannot give up."""
    with pytest.raises(ValueError, match="give_up_after=3 needs exit_behavior='continue'"):
        ToolCallLimit(run_limit=1, give_up_after=3, **others)


def test_only_what_holds_finalizes() -> None:
    """A model limit on trial cannot tell a call that it is the last."""
    with pytest.raises(ValueError, match="exit_behavior='finalize' needs enforce=True"):
        ModelCallLimit(run_limit=1, exit_behavior="finalize", enforce=False)
    assert ModelCallLimit(run_limit=1, exit_behavior="finalize").exit_behavior == "finalize"


def number(state: object, runtime: object) -> int:
    return 5


@BOTH
def test_arguments_are_given_by_name(make: Make) -> None:
    """Only the tool goes without a name: two numbers in a row could be swapped unseen."""
    with pytest.raises(TypeError):
        make("search", 3)


@BOTH
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"grant": 2}, ValueError, "grant=2 needs exit_behavior='ask'"),
        ({"grant": 0, "exit_behavior": "ask"}, ValueError, "grant must be above 0, not 0"),
        ({"grant": -1, "exit_behavior": "ask"}, ValueError, "grant must be 0 or more, not -1"),
        (
            {"grant": 2.0, "exit_behavior": "ask"},
            TypeError,
            r"grant must be a whole number or None, not 2\.0",
        ),
        (
            {"grant": True, "exit_behavior": "ask"},
            TypeError,
            "grant must be a whole number or None, not True",
        ),
    ],
)
def test_bad_grants_are_refused(
    make: Make, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """What an approval grants is a whole number from 1, of a limit that asks."""
    with pytest.raises(error, match=message):
        make(run_limit=5, **options)


@BOTH
@pytest.mark.parametrize("value", ["n" * 65, "two\nlines", "\ud800", "\x00"])
def test_a_name_that_cannot_be_a_label_is_refused(make: Make, value: str) -> None:
    """A name is a metric label unchanged: long or unprintable ones are a ValueError."""
    with pytest.raises(ValueError, match="name must have 1 to 64 printable") as caught:
        make(run_limit=1, name=value)
    assert repr(value) in str(caught.value)


DAY = timedelta(days=1)


def tenant(state: object, runtime: object) -> str:
    return "acme"


@pytest.mark.parametrize("value", [True, 2.5, None, [3]])
def test_a_quota_of_a_wrong_type_is_refused(value: Any) -> None:
    """A quota without a number, or with what is none, is a TypeError that names the value."""
    with pytest.raises(TypeError, match="limit must be a whole number") as caught:
        Quota(value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [60, 1.5, "1d", True])
def test_a_window_is_a_timedelta(value: Any) -> None:
    """A bare number has no unit: it is a TypeError that names it."""
    with pytest.raises(TypeError, match="window must be a timedelta") as caught:
        Quota(5, window=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "value", [timedelta(0), -DAY, timedelta(milliseconds=999), timedelta(seconds=1.5)], ids=str
)
def test_a_window_is_whole_seconds(value: timedelta) -> None:
    """Less than a second, and parts of one, are a ValueError that names the window."""
    with pytest.raises(ValueError, match="window must be whole seconds, from 1") as caught:
        Quota(5, window=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", ["User", "user id", "user-id", "user1", "ü", "x" * 33, "a\n"])
def test_a_quotas_name_is_a_label(value: str) -> None:
    """A scope is `[a-z_]{1,32}`, whether it is given as name or as what the quota is per."""
    with pytest.raises(ValueError, match=r"name must match \[a-z_\]\{1,32\}") as caught:
        Quota(5, name=value)
    assert repr(value) in str(caught.value)
    with pytest.raises(ValueError, match="per, without a name, must match") as caught:
        Quota(5, per=value)
    assert repr(value) in str(caught.value)
    assert Quota(5, per=value, name="own").per == value


def test_a_quota_is_per_something() -> None:
    """The empty name is none."""
    with pytest.raises(ValueError, match="per, without a name, must match"):
        Quota(5, per="")


def test_a_function_needs_a_name() -> None:
    """What a function says has no name of its own to be shown by."""
    with pytest.raises(ValueError, match="give the quota a name"):
        Quota(5, per=tenant)
    assert Quota(5, per=tenant, name="tenant").name == "tenant"


@pytest.mark.parametrize("value", ["run", "store", "none"])
def test_reserved_names_are_refused(value: str) -> None:
    """The scopes that mean something else cannot be a quota's, in either way."""
    for per, name in (("thread", value), (value, "")):
        with pytest.raises(ValueError, match=f"name must not be '{value}'"):
            Quota(5, per=per, name=name)


def test_a_quota_per_root_run_has_no_window() -> None:
    """A root run's count ends with the run, and so no window of time goes with it."""
    assert Quota(5, per="root_run").name == "root_run"
    with pytest.raises(ValueError, match=r"window=.* cannot be used with per='root_run'"):
        Quota(5, per="root_run", window=timedelta(days=1))


def test_a_quota_cannot_share_the_counts_of_runs() -> None:
    """A value of the context called `run` would be kept where runs are counted."""
    with pytest.raises(ValueError, match="per must not be 'run'"):
        Quota(5, per="run", name="job")


@BOTH
@pytest.mark.parametrize("value", [Quota(5), [5], "quota", None, {Quota(5)}], ids=str)
def test_quotas_are_a_sequence_of_them(make: Make, value: object) -> None:
    """One alone, and what is none, are a TypeError that names the value."""
    with pytest.raises(TypeError, match="quotas must be a sequence of Quota") as caught:
        make(run_limit=1, quotas=value)
    assert repr(value) in str(caught.value)


@BOTH
def test_a_limits_scopes_are_its_own(make: Make) -> None:
    """Two thresholds of one scope could not be told apart in metrics: a name does it."""
    hour = Quota(1, window=timedelta(hours=1))
    for arguments in (
        {"quotas": [Quota(5, per="user_id"), Quota(9, per="user_id", window=DAY)]},
        {"quotas": [hour], "thread_limit": 9},
    ):
        with pytest.raises(ValueError, match="2 thresholds of a limit have the scope"):
            make(**arguments)
    named = dataclasses.replace(hour, name="hourly")
    assert make(quotas=[named], thread_limit=9).quotas == (named,)


NUMBERS = (None, 1, 2, 3)


def refuses(limit: Limit, thread: int, run: int) -> bool:
    """Whether a limit refuses one more call."""
    return any(
        isinstance(most, int) and used + 1 > most
        for most, used in ((limit.thread_limit, thread), (limit.run_limit, run))
    )


def is_reached(limit: Limit, other: Limit) -> bool:
    """Whether, behind the other limit, counts exist at which a limit refuses a call."""
    counts = {(0, 0)}
    for thread, run in sorted(product(range(5), repeat=2)):
        # A call, or the start of a run.
        if (thread, run) in counts and not refuses(other, thread, run):
            counts |= {(thread + 1, run + 1), (thread + 1, 0)}
    return any(refuses(limit, *each) for each in counts)


def test_limits_go_together_exactly_if_each_can_be_reached() -> None:
    """Of limits that forbid nothing, none is given that another one always refuses before."""
    limits = [
        ModelCallLimit(thread_limit=thread, run_limit=run, name=f"{thread}, {run}")
        for thread, run in product(NUMBERS, repeat=2)
        if (thread, run) != (None, None)
    ]
    for first, second in combinations(limits, 2):
        dead = [
            limit
            for limit, other in ((first, second), (second, first))
            if not is_reached(limit, other)
        ]
        if dead:
            with pytest.raises(ValueError, match=f"'{dead[0].name}' can never be reached"):
                check_together([first, second])
        else:
            check_together([first, second])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"at_once": 0}, ValueError, "at_once must be 1 or more, not 0"),
        ({"at_once": 2.0}, TypeError, r"at_once must be a whole number or None, not 2\.0"),
        ({"at_once": True}, TypeError, "at_once must be a whole number or None, not True"),
        ({"at_once": 2, "wait": -1}, ValueError, "wait must be 0 or more seconds, .* not -1"),
        ({"at_once": 2, "wait": float("inf")}, ValueError, "wait must be .* finite, not inf"),
        ({"at_once": 2, "wait": 10**400}, ValueError, "wait must be .* finite, not 1000"),
        ({"at_once": 2, "wait": float("nan")}, ValueError, "wait must be .* finite, not nan"),
        ({"at_once": 2, "wait": "30"}, TypeError, "wait must be a number of seconds, not '30'"),
        ({"at_once": 2, "wait": False}, TypeError, "wait must be a number of seconds, not False"),
        ({"run_limit": 2, "wait": 3}, ValueError, "wait=3 needs at_once"),
        ({"at_once": 2, "exit_behavior": "end"}, ValueError, "exit_behavior='end' needs"),
        ({"at_once": 2, "exit_behavior": "ask"}, ValueError, "exit_behavior='ask' needs"),
        ({"at_once": 2, "give_up_after": 2}, ValueError, "give_up_after=2 needs"),
    ],
)
def test_bad_options_of_calls_at_once(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Each is refused when the limit is made, with the argument, the value and what to do."""
    with pytest.raises(error, match=message):
        ToolCallLimit("browser", **options)


def test_a_quota_may_not_be_named_like_a_cap() -> None:
    """The scope of a cap is told from that of a quota."""
    with pytest.raises(ValueError, match="name must not be 'at_once'"):
        Quota(5, per="at_once")
