"""Limits at one moment: their numbers, which of them match a call, and what it asks of counts."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota import Call, ModelCallLimit, Quota, ToolCallLimit
from langchain_quota.admission import Counter, Hits, Threshold
from langchain_quota.batches import hits_of
from langchain_quota.limits import Limit
from langchain_quota.middleware._calls import Request, counters_of
from langchain_quota.middleware._context import CallContext
from langchain_quota.resolved import (
    Asked,
    Outage,
    ResolvedLimit,
    ResolvedLimits,
    ResolvedQuota,
    stored_as,
)

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
USER = ResolvedQuota("user_id", 5, "ann", "search:user:ann")
EVERYBODY = ResolvedQuota("global", 9, "", "search:all")
THREAD = ResolvedQuota("thread", 3, "7", "search:thread:7", per="thread")
HOURLY = ResolvedQuota("hourly", 1, "7", "search:thread:7:noon", NOON, per="thread")
QUOTA = Quota(9, per="user_id")


def number(state: object, runtime: object) -> int:
    raise AssertionError


def search(*quotas: ResolvedQuota, name: str = "", **arguments: Any) -> ResolvedLimit:
    """A limit on searches; arguments of `ResolvedLimit.of` by their names, others are its own."""
    keys = {key: arguments.pop(key, None) for key in ("thread_key", "run_key")}
    remembers = arguments.pop("remembers", False)
    limit = ToolCallLimit("search", quotas=[QUOTA] if quotas else (), name=name, **arguments)
    return ResolvedLimit.of(limit, quotas=quotas, remembers=remembers, **keys)


def calls(*tools: str) -> list[Call]:
    return [Call("tool", tool, f"call-{index}") for index, tool in enumerate(tools)]


def ask(limits: ResolvedLimits | Sequence[ResolvedLimit], batch: Sequence[Call]) -> list[Asked]:
    resolved = limits if isinstance(limits, ResolvedLimits) else ResolvedLimits(limits)
    return [resolved.asked(call) for call in batch]


def names(asked: Asked) -> list[str]:
    return [each.limit.name for each, _ in asked.limits]


@pytest.mark.parametrize(
    "limit",
    [
        ToolCallLimit("search", thread_limit=3, run_limit=1, exit_behavior="end"),
        ToolCallLimit(thread_limit=3),
        ModelCallLimit(run_limit=0, exit_behavior="finalize"),
    ],
)
def test_fixed_numbers_are_the_limits_own(limit: Limit) -> None:
    """Where nothing is a function, the numbers at any moment are those that the user set."""
    assert ResolvedLimit.of(limit) == ResolvedLimit(limit, limit.thread_limit, limit.run_limit)  # type: ignore[arg-type]  # no functions


@pytest.mark.parametrize("value", [0, 7, None])
def test_a_computed_number_stands_for_its_function(value: int | None) -> None:
    """A number, or none, takes the function's place, and the scope is known to be computed."""
    limit = ToolCallLimit(thread_limit=number, run_limit=2)
    resolved = ResolvedLimit.of(limit, thread_limit=value)
    assert resolved == ResolvedLimit(limit, value, 2, computed=("thread",))


def test_computed_scopes_are_named_in_their_order() -> None:
    """Thread, run, and the quotas whose numbers are functions."""
    limit = ToolCallLimit(thread_limit=number, run_limit=number, quotas=[QUOTA])
    quotas = (EVERYBODY, replace(USER, computed=True))
    resolved = ResolvedLimit.of(limit, thread_limit=3, run_limit=2, quotas=quotas)
    assert resolved.computed == ("thread", "run", "user_id")


def test_every_number_is_needed() -> None:
    """A function that was not computed is a TypeError that names the argument and the limit."""
    with pytest.raises(TypeError, match=r"run_limit of limit 'tool:\*'"):
        ResolvedLimit.of(ToolCallLimit(run_limit=number))


@pytest.mark.parametrize("value", [True, 2.5, "3"])
def test_a_computed_number_of_a_wrong_type_is_refused(value: Any) -> None:
    """What a function gives is checked like what a user gives; the error names the limit."""
    with pytest.raises(TypeError, match="run_limit of limit 'mine'") as caught:
        ResolvedLimit.of(ToolCallLimit(run_limit=number, name="mine"), run_limit=value)
    assert repr(value) in str(caught.value)


def test_a_negative_computed_number_is_refused() -> None:
    """A function that gives less than 0 is a ValueError that names the limit and the value."""
    with pytest.raises(ValueError, match=r"thread_limit of limit 'model' .*-1"):
        ResolvedLimit.of(ModelCallLimit(thread_limit=number), thread_limit=-1)


@pytest.mark.parametrize(
    ("limit", "keys", "counts_thread"),
    [
        (search(run_limit=9, thread_limit=9), set(), False),
        (search(thread_limit=9, thread_key="thread"), {"thread"}, True),
        (search(run_limit=9, run_key="run"), {"run"}, False),
        (search(run_limit=9, thread_key="thread"), set(), False),
        (search(thread_limit=9, run_key="run"), set(), False),
        (search(USER, EVERYBODY), {USER.key, EVERYBODY.key}, False),
        (search(THREAD), {THREAD.key}, True),
        (search(HOURLY, run_limit=9, run_key="run"), {"run", HOURLY.key}, False),
    ],
)
def test_what_a_store_counts_of_a_limit(
    limit: ResolvedLimit,
    keys: set[str],
    counts_thread: bool,  # noqa: FBT001 - a row of the table
) -> None:
    """It counts quotas, and threads and runs that are limited; a limit with such is shared."""
    assert (limit.keys, limit.shared) == (keys, bool(keys))
    assert limit.counts_thread == counts_thread
    resolved = ResolvedLimits([search(run_limit=1, name="other"), limit])
    assert resolved.keys() == sorted(keys)
    assert ask(resolved, calls("search", "calc"))[0].shared == bool(keys)


def test_a_thread_without_a_number_now_is_not_counted() -> None:
    """Where a function says that there is no limit, no store is asked about the thread."""
    limit = ToolCallLimit(thread_limit=number)
    assert not ResolvedLimit.of(limit, thread_key="thread", thread_limit=None).shared


def test_matching_limits_keep_their_order() -> None:
    """The limits that match a call come in the order in which they were given."""
    limits = [
        ResolvedLimit.of(ToolCallLimit(run_limit=9, name="last by name")),
        search(run_limit=9, name="b"),
        ResolvedLimit.of(ToolCallLimit(["calc", "search"], run_limit=9, name="a")),
    ]
    for order in (limits, limits[::-1]):
        (asked,) = ask(order, calls("search"))
        assert names(asked) == [each.limit.name for each in order]


def test_no_invented_name_is_remembered() -> None:
    """A model may invent any number of names: those that no limit names are kept as one."""
    resolved = ResolvedLimits([search(run_limit=9)])
    invented = calls(*(f"invented-{index}" for index in range(100)))
    assert all(each.limits == () for each in ask(resolved, [*invented, *calls("search")])[:-1])
    assert len(resolved._asked) == 2


def test_a_limit_of_ones_own_matches_by_what_it_likes() -> None:
    """A limit that overrides what it matches is asked about each call."""

    class Databases(ToolCallLimit):
        __slots__ = ()

        def matches(self, call: Call) -> bool:
            return str(call.tool).startswith("db_")

    resolved = ResolvedLimits([ResolvedLimit.of(Databases(run_limit=1, name="databases"))])
    found = [names(each) for each in ask(resolved, calls("web", "db_x", "web", "db_y"))]
    assert found == [[], ["databases"], [], ["databases"]]


def test_without_limits_nothing_is_asked() -> None:
    """Where nothing is limited no count is touched, and no store is needed."""
    resolved = ResolvedLimits([])
    assert (resolved.keys(), resolved.stops) == ([], {})
    assert ask(resolved, [Call("model")]) == [Asked((), Hits({}), shared=False)]


def test_two_limits_on_one_tool_are_two_thresholds_over_its_counts() -> None:
    """A call adds to the thread's and to the run's count once; each limit has its own numbers."""
    limits = [
        search(thread_limit=9, run_limit=4, name="hard"),
        search(run_limit=2, name="trial", enforce=False),
    ]
    (asked,) = ask(limits, calls("search"))
    assert asked.hits == Hits(
        {"search/thread": 1, "search/run": 1},
        (
            Threshold("hard", "thread", "search/thread", 9),
            Threshold("hard", "run", "search/run", 4),
            Threshold("trial", "run", "search/run", 2, enforced=False),
        ),
    )


def test_quotas_come_behind_thread_and_run() -> None:
    """So a refusal is attributed to the thread first, and to quotas last, in their order."""
    (asked,) = ask([search(EVERYBODY, USER, thread_limit=2, run_limit=1)], calls("search"))
    assert [each.scope for each in asked.hits.thresholds] == ["thread", "run", "global", "user_id"]


def test_quotas_with_one_key_are_one_count() -> None:
    """A call adds to a key once, whichever limits, or quotas of one limit, look at it."""
    again = replace(USER, scope="again", limit=2)
    (asked,) = ask([search(USER, again, name="two"), search(USER, name="one")], calls("search"))
    assert asked.hits.amounts == {"search/thread": 1, "search/run": 1, USER.key: 1}
    assert {(each.limit, each.most) for each in asked.hits.thresholds} == {
        ("two", 5),
        ("two", 2),
        ("one", 5),
    }


def test_a_thread_has_one_count() -> None:
    """Thread limits, and a quota per thread without a window, are numbers for one count."""
    limits = [
        search(thread_limit=9, thread_key=THREAD.key, name="high"),
        search(THREAD, name="quota"),
        search(thread_limit=5, thread_key=THREAD.key, name="low"),
    ]
    for order in (limits, limits[::-1], [*limits[1:], limits[0]]):
        (asked,) = ask(order, calls("search"))
        assert asked.hits.amounts == {"search/thread": 1, "search/run": 1}
        numbers = {(each.limit, each.counter, each.most) for each in asked.hits.thresholds}
        assert numbers == {
            (name, "search/thread", n)
            for name, n in zip(("high", "quota", "low"), (9, 3, 5), strict=True)
        }
        assert counters_of([asked], {"search/thread": 4})["search/thread"] == Counter(THREAD.key, 4)


def test_a_run_has_one_count() -> None:
    """It is kept under the run's key if one of its limits has it, and begins at the state's."""
    limits = [
        search(run_limit=9, run_key="run", name="high"),
        search(thread_limit=9, run_key="run", name="thread"),
        search(run_limit=5, run_key="run", name="low"),
    ]
    for order in (limits, limits[1:] + limits[:1]):
        (asked,) = ask(order, calls("search"))
        counters = counters_of([asked], {"search/thread": 7, "search/run": 1})
        assert counters == {
            "search/thread": Counter(None, 7),
            "search/run": Counter("run", 1, mirrored=True),
        }
        assert {each.most for each in asked.hits.thresholds if each.scope == "run"} == {5, 9}


def test_a_window_has_a_count_of_its_own() -> None:
    """A quota per thread and hour counts beside the thread, from 0, until the window ends."""
    limit = search(HOURLY, thread_limit=9, thread_key="thread")
    counters = counters_of(ask([limit], calls("search")), {"search/thread": 4})
    assert counters["search/thread"] == Counter("thread", 4)
    assert counters[HOURLY.key] == Counter(HOURLY.key, 0, NOON.timestamp())


@pytest.mark.parametrize("remembers", [True, False])
def test_which_counts_the_state_has_too(remembers: bool) -> None:  # noqa: FBT001 - both
    """It has the run's always, the thread's if it outlives the run, and those of quotas never."""
    limit = search(
        USER,
        thread_limit=9,
        run_limit=9,
        thread_key="thread",
        run_key="run",
        remembers=remembers,
    )
    counters = counters_of(ask([limit], calls("search")), {})
    mirrored = {each.key: each.mirrored for each in counters.values()}
    assert mirrored == {"thread": remembers, "run": True, USER.key: False}


def test_calls_ask_for_the_counts_of_their_own_limits() -> None:
    """Each call adds its amount to the counts of the limits that match it, and to no others."""
    limits = [search(USER), ResolvedLimit.of(ToolCallLimit("calc", run_limit=9))]
    batch = [Call("tool", tool, tool, 2) for tool in ("search", "calc", "fetch")]
    hits, index_of = hits_of(batch, ask(limits, batch))
    assert index_of == [0, 1, 2]
    assert [each.amounts for each in hits] == [
        {"search/thread": 2, "search/run": 2, USER.key: 2},
        {"calc/thread": 2, "calc/run": 2},
        {},
    ]


def test_calls_that_share_an_id_ask_together() -> None:
    """They are one call to the agent: their amounts add up, and all their limits are asked."""
    limits = [search(run_limit=1), ResolvedLimit.of(ToolCallLimit("calc", run_limit=2))]
    batch = [
        Call("tool", "search", "twin"),
        Call("tool", "calc", "single"),
        Call("tool", "calc", "twin"),
        Call("tool", "search", "twin", 2),
    ]
    hits, index_of = hits_of(batch, ask(limits, batch))
    assert index_of == [0, 1, 0, 0]
    assert hits[0] == Hits(
        {"search/thread": 3, "search/run": 3, "calc/thread": 1, "calc/run": 1},
        (
            Threshold("tool:search", "run", "search/run", 1),
            Threshold("tool:calc", "run", "calc/run", 2),
        ),
    )
    assert hits[1].amounts == {"calc/thread": 1, "calc/run": 1}


def test_calls_without_an_id_ask_each_for_itself() -> None:
    """A missing id is no id that they could share."""
    batch = [Call("tool", "search"), Call("tool", "search")]
    asked = ask([search(run_limit=1)], batch)
    assert hits_of(batch, asked) == ([asked[0].hits] * 2, [0, 1])


def test_what_stops_a_batch() -> None:
    """A refusal stops it that ends the run or raises, at once; one that gives up, after some."""
    limits: list[Limit] = [
        ToolCallLimit(run_limit=0, name="continue"),
        ToolCallLimit(run_limit=0, name="give up", give_up_after=3),
        ToolCallLimit(run_limit=0, name="end", exit_behavior="end"),
        ToolCallLimit(run_limit=0, name="error", exit_behavior="error"),
        ToolCallLimit(run_limit=0, name="trial", exit_behavior="error", enforce=False),
        ModelCallLimit(run_limit=0, name="finalize", exit_behavior="finalize"),
    ]
    stops = ResolvedLimits(map(ResolvedLimit.of, limits)).stops
    assert stops == {"give up": 3, "end": 1, "error": 1, "finalize": 1}


def test_an_outage_refuses_what_needs_the_store() -> None:
    """A limit that a store counts has a threshold before all others that nothing meets."""
    limits = ResolvedLimits(
        [
            search(USER, thread_limit=9, thread_key="thread", name="shared"),
            search(USER, name="trial", enforce=False),
            search(run_limit=4, name="own"),
        ]
    )
    (asked,) = ask(limits.without_store("deny"), calls("search"))
    assert not asked.shared
    assert asked.hits == Hits(
        {"search/thread": 1, "search/run": 1},
        (
            Threshold("shared", "store", "search/run", -1),
            Threshold("shared", "thread", "search/thread", 9),
            Threshold("trial", "store", "search/run", -1, enforced=False),
            Threshold("own", "run", "search/run", 4),
        ),
    )


def test_an_outage_that_allows_leaves_the_states_thresholds() -> None:
    """Thread and run limits hold by the state's own counts, and quotas cannot."""
    limits = ResolvedLimits([search(USER, thread_limit=9, run_limit=4, thread_key="thread")])
    (asked,) = ask(limits.without_store("allow"), calls("search"))
    assert [each.scope for each in asked.hits.thresholds] == ["thread", "run"]
    assert (set(asked.hits.amounts), asked.shared) == ({"search/thread", "search/run"}, False)


@pytest.mark.parametrize("outage", ["deny", "allow"])
def test_an_outage_changes_no_limit(outage: Outage) -> None:
    """The limits, what stops, and where the store keeps their counts are as before."""
    limits = ResolvedLimits([search(USER, thread_limit=9, exit_behavior="end")])
    without = limits.without_store(outage)
    assert without.limits == limits.limits
    assert (without.stops, without.keys()) == (limits.stops, limits.keys())


def request(
    limits: Sequence[ResolvedLimit], batch: Sequence[Call], *, task: str | None = "task"
) -> Request:
    """Calls that wait, in a hook that refunds are due in."""
    resolved = ResolvedLimits(limits)
    return Request(
        state={},
        known={"pending_refunds": {"refund": {USER.key: 2}}},
        context=CallContext(task_id=task),
        task="quota",
        limits=resolved,
        calls=batch,
        asked=ask(resolved, batch),
        used={},
    )


def test_a_store_is_asked_for_the_same_under_the_same_key() -> None:
    """A hook that runs again sends the same request, as another attempt to make it."""
    first, again = (request([search(USER)], calls("search")).to_store() for _ in range(2))
    assert first == replace(again, attempt_id=first.attempt_id)
    assert first.attempt_id != again.attempt_id
    assert [(each.id, each.amounts) for each in first.compensations] == [("refund", {USER.key: -2})]
    assert first.keyed(first.hits[0].amounts) == {USER.key: 1}


def test_other_requests_have_keys_of_their_own() -> None:
    """An answer to other hits would not fit; and outside of a graph no hook runs again."""
    other = ResolvedLimit.of(ToolCallLimit(run_limit=1))
    requests = [
        request([search(USER)], calls("search")),
        request([search(USER)], calls("search", "search")),
        request([search(USER), other], calls("search")),
        request([search(USER)], calls("search"), task=None),
        request([search(USER)], calls("search"), task=None),
    ]
    assert len({each.to_store().idempotency_key for each in requests}) == len(requests)


TOOLS = ("search", "calc", "fetch", "model", "invented")
SOME_TOOLS = st.lists(st.sampled_from(TOOLS[:-1]), max_size=2)
SOME_LIMITS = st.lists(
    st.builds(lambda tools: ToolCallLimit(tools or None, run_limit=1), SOME_TOOLS)
    | st.builds(lambda tools: ToolCallLimit(exclude=tools, run_limit=1), SOME_TOOLS)
    | st.just(ModelCallLimit(run_limit=1)),
    max_size=4,
)
SOME_CALLS = st.lists(
    st.just(Call("model")) | st.builds(Call, st.just("tool"), st.none() | st.sampled_from(TOOLS)),
    min_size=2,
)


@given(limits=SOME_LIMITS, batch=SOME_CALLS)
def test_a_call_asks_what_its_limits_ask(limits: list[Limit], batch: list[Call]) -> None:
    """Whatever was asked for before, it asks of each limit that matches it, and of no other."""
    resolved = ResolvedLimits(map(ResolvedLimit.of, limits))
    for call in [*batch, *batch]:
        asked = resolved.asked(call)
        matching = [each for each in resolved.limits if each.limit.matches(call)]
        assert [each for each, _ in asked.limits] == matching
        counters = {stored_as(each.limit) for each in matching}
        assert asked.hits.amounts == {
            f"{counter}/{scope}": 1 for counter in counters for scope in ("thread", "run")
        }
        assert [each.limit for each in asked.hits.thresholds] == names(asked)
