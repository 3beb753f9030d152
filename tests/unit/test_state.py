"""The counts in the graph state: merging, reading, charging and taking back."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota.middleware._tool_counts import ToolCounts
from langchain_quota.state import (
    LEDGER,
    NEW_RUN,
    Abandoned,
    Batch,
    Charges,
    Ledger,
    latest,
    ledger,
    merge_ledgers,
    run_model,
    run_tools,
    thread_model,
    thread_tools,
    usage,
)

CHARGES: Charges = {"a": {"search": {"Quota": {"tool:search": 1}}}}


def counts_of_a_full_batch() -> ToolCounts:
    counts = ToolCounts({"search": 2}, {"search": 1}, {})
    counts.charge("a", "search", ("Quota", "tool:search"), 1)
    counts.charge("a", "__all__", ("Quota", "tool:*"), 1)
    return counts


def test_merging_replaces_what_is_written() -> None:
    """Fields that a hook writes replace the old ones, with `None` too; all others stay."""
    batch = Batch(message="m", charges={}, passed=[])
    old = Ledger(run_tools={"search": 1}, run_model=2, batch=batch)
    before = dict(old)
    assert merge_ledgers(old, Ledger(run_tools={"calc": 1}, batch=None)) == {
        "run_tools": {"calc": 1},
        "run_model": 2,
        "batch": None,
    }
    assert old == before


def test_two_writers_of_one_step_are_merged() -> None:
    """Tool and model limiters that write in one superstep do not lose each other's fields."""
    tools, model = Ledger(run_tools={"search": 1}), Ledger(run_model=1, model_counted=True)
    start = merge_ledgers(Ledger(), NEW_RUN)
    either = merge_ledgers(merge_ledgers(start, tools), model)
    assert either == merge_ledgers(merge_ledgers(start, model), tools)
    assert either.get("run_tools") == {"search": 1}
    assert either.get("run_model") == 1


def test_the_last_writer_of_a_count_stands() -> None:
    """Several middlewares may write a model count in one superstep."""
    assert latest(3, 4) == 4


def test_a_new_run_has_a_new_budget() -> None:
    """What a run begins with clears all of the run before but what a store has to take back."""
    used = Ledger(
        run_tools={"search": 3},
        run_model=2,
        model_counted=True,
        refusals={"Quota": {"tool:search": 4}},
        final="That was all.",
        batch=Batch(message="m", charges=CHARGES, passed=[]),
        pending_refunds={"earlier": {"user": 2}},
    )
    state = {LEDGER: merge_ledgers(used, NEW_RUN)}
    assert run_tools(state) == {}
    assert run_model(state) == 0
    assert ToolCounts.of(state, "m").charges == {}
    assert not ledger(state)["model_counted"]
    assert not ledger(state)["final"]
    assert ledger(state)["refusals"] == {}
    assert ToolCounts.of(state, "another").pending_refunds == {"earlier": {"user": 2}}


@pytest.mark.parametrize(
    ("known", "tools", "model"),
    [
        ({}, {"search": 2}, 3),
        ({LEDGER: None}, {"search": 2}, 3),
        ({LEDGER: Ledger(run_model=1)}, {"search": 2}, 1),
        ({LEDGER: Ledger(run_tools={})}, {}, 3),
        ({LEDGER: Ledger(run_tools={}, run_model=0)}, {}, 0),
    ],
)
def test_a_runs_count_is_langchains_where_ours_is_missing(
    known: dict[str, Any], tools: dict[str, int], model: int
) -> None:
    """A run begun under LangChain's limiter goes on; where ours is there, even at 0, it holds."""
    state = {**known, "run_tool_call_count": {"search": 2}, "run_model_call_count": 3}
    assert run_tools(state) == tools
    assert run_model(state) == model


@pytest.mark.parametrize(
    "state", [{}, {"thread_tool_call_count": None, "thread_model_call_count": None}]
)
def test_a_thread_without_counts_has_used_nothing(state: dict[str, Any]) -> None:
    """Missing counts are 0, not errors."""
    assert thread_tools(state) == {}
    assert thread_model(state) == 0
    assert ledger(state) == {}
    assert ToolCounts.of(state, "m").used("search", []) == (0, 0)


@pytest.mark.parametrize(
    ("message", "asked", "known"),
    [("m", "m", True), ("m", "other", False), ("m", None, False), ("", None, False)],
)
def test_a_batch_is_known_by_its_message(message: str, asked: str | None, *, known: bool) -> None:
    """Charges, and who has let them pass, are read for one AIMessage only, and it has an id."""
    batch = Batch(message=message, charges=CHARGES, passed=["Quota"])
    state = {LEDGER: Ledger(batch=batch)}
    counts = ToolCounts.of(state, asked)
    assert counts.passed == (["Quota"] if known else [])
    assert counts.charges == (CHARGES if known else {})


def test_a_charge_counts_in_thread_and_run() -> None:
    """A charge raises both counts of its counter and of no other."""
    counts = counts_of_a_full_batch()
    assert counts.thread == {"search": 3, "__all__": 1}
    assert counts.run == {"search": 2, "__all__": 1}


def test_a_counter_counts_a_call_once() -> None:
    """Whichever limits charge it, of one middleware or two, under one name or two, and again."""
    counts = ToolCounts({}, {}, {})
    for limit in [("Quota", "soft"), ("Quota", "hard"), ("Other", "hard"), ("Quota", "soft")]:
        counts.charge("a", "search", limit, 1)
    assert counts.thread == counts.run == {"search": 1}
    assert counts.charges == {
        "a": {"search": {"Quota": {"soft": 1, "hard": 1}, "Other": {"hard": 1}}}
    }
    assert counts.take_back("a") == [("soft", 1), ("hard", 1), ("hard", 1)]
    assert counts.thread == counts.run == {"search": 0}


def test_taking_back_undoes_every_charge_of_a_call_once() -> None:
    """A refund covers all limits and counters of the call; a call without charges has none."""
    counts = counts_of_a_full_batch()
    assert counts.take_back("a") == [("tool:search", 1), ("tool:*", 1)]
    assert counts.take_back("a") == counts.take_back("never charged") == []
    assert counts.thread == {"search": 2, "__all__": 0}
    assert counts.run == {"search": 1, "__all__": 0}
    assert counts.charges == {}


def test_used_leaves_out_the_calls_that_are_judged() -> None:
    """A call charged by another limiter of its tool does not stand in its own way."""
    counts = counts_of_a_full_batch()
    assert counts.used("search", ["a"]) == (2, 1)
    assert counts.used("search", ["b"]) == (3, 2)
    assert counts.used("calc", ["a"]) == (0, 0)


def test_counts_that_were_reset_stay_at_0() -> None:
    """After counts are reset from outside, refunds and reads of old charges go no lower than 0."""
    counts = ToolCounts({}, {}, {"a": {"search": {"Quota": {"tool:search": 1}}}})
    assert counts.used("search", ["a"]) == (0, 0)
    counts.take_back("a")
    assert counts.thread == counts.run == {"search": 0}


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from([None, ("search", "soft"), ("search", "hard"), ("__all__", "all")]),
    )
)


@given(operations=OPERATIONS)
def test_counts_equal_what_is_charged(operations: list[tuple[str, tuple[str, str] | None]]) -> None:
    """However calls are charged and taken back, each counts once per counter while charged."""
    counts = ToolCounts({"search": 4}, {"search": 2}, {})
    charged: dict[str, set[str]] = {}
    for call_id, charge in operations:
        if charge is None:
            counts.take_back(call_id)
            charged.pop(call_id, None)
        else:
            counter, limit = charge
            counts.charge(call_id, counter, ("Quota", limit), 1)
            charged.setdefault(call_id, set()).add(counter)
    expected = Counter(counter for counters in charged.values() for counter in counters)
    for counter, thread, run in (("search", 4, 2), ("__all__", 0, 0)):
        now = expected[counter]
        assert counts.used(counter, []) == (thread + now, run + now)
        assert counts.used(counter, charged) == (thread, run)


def test_the_ledger_is_plain_json() -> None:
    """A checkpoint written with any serializer reads back as it was."""
    counts = counts_of_a_full_batch()
    written = Ledger(
        run_tools=counts.run,
        run_model=1,
        model_counted=False,
        refusals={"Quota": {"tool:search": 1}},
        final="That was all.",
        turn="m",
        begun_by=["Quota"],
        batch=Batch(
            message="m",
            charges=counts.charges,
            passed=["Quota"],
            acquired={"a": {"QuotaMiddleware": {"search:user_id:ann": 1}}},
        ),
        pending_refunds={"refund": {"search:user_id:ann": 1}},
        abandoned=Abandoned(
            calls=[["search", "a", "search"]],
            charges=counts.charges,
            held_by=["Other"],
        ),
    )
    for value in (written, dict(NEW_RUN), counts.thread):
        assert json.loads(json.dumps(value)) == value


def acquired_counts() -> ToolCounts:
    """Two calls, one that two middlewares had a store charge, and a refund that waits."""
    return ToolCounts(
        {"search": 2},
        {"search": 2},
        {call_id: {"search": {"Quota": {"tool:search": 1}}} for call_id in ("a", "b")},
        {
            "a": {"Quota": {"user": 1, "all": 1}, "Other": {"user": 1, "tenant": 1}},
            "b": {"Quota": {"user": 1}},
        },
        {"earlier": {"user": 2}},
    )


def test_a_store_is_to_take_back_what_it_charged() -> None:
    """A call's charges in the store wait for their refund once, each under a new name."""
    counts = acquired_counts()
    counts.take_back("a")
    assert counts.acquired == {"b": {"Quota": {"user": 1}}}
    counts.take_back("b")
    before = dict(counts.pending_refunds)
    counts.take_back("a")
    counts.take_back("never charged")
    assert counts.pending_refunds == before
    assert before.pop("earlier") == {"user": 2}
    assert list(before.values()) == [
        {"user": 1, "all": 1},
        {"user": 1, "tenant": 1},
        {"user": 1},
    ]


def test_a_call_that_is_judged_again_is_charged_anew() -> None:
    """Its old charge is forgotten and returned; others keep what is not under the same keys."""
    counts = acquired_counts()
    assert counts.renew("a", "Quota", {"user", "all"}) == {"user": 2, "all": 1}
    assert counts.acquired["a"] == {"Other": {"tenant": 1}}
    assert counts.renew("a", "Quota", {"user", "all"}) == {}
    assert counts.renew("never charged", "Quota", {"user"}) == {}
    assert counts.pending_refunds == {"earlier": {"user": 2}}


def test_reading_copies() -> None:
    """What a hook changes in its counts does not change the state that it was given."""
    batch = Batch(
        message="m",
        charges=CHARGES,
        passed=[],
        acquired={"a": {"Quota": {"user": 1}, "Other": {"user": 1}}},
    )
    refunds = {"earlier": {"user": 2}}
    state = {
        "thread_tool_call_count": {"search": 1},
        LEDGER: Ledger(run_tools={"search": 1}, batch=batch, pending_refunds=refunds),
    }
    before = json.dumps(state)
    counts = ToolCounts.of(state, "m")
    assert counts.acquired == batch["acquired"]
    assert counts.pending_refunds == refunds
    counts.charge("a", "search", ("Quota", "other"), 5)
    counts.charge("b", "calc", ("Quota", "tool:calc"), 1)
    counts.renew("a", "Quota", {"user"})
    counts.take_back("a")
    counts.pending_refunds.clear()
    assert json.dumps(state) == before


@pytest.mark.parametrize("given", [None, 5, {"messages": []}, "thread-1"], ids=repr)
def test_usage_is_read_from_a_state(given: Any) -> None:
    """What a run gives, and what is no state, is a TypeError that says where a state is from."""
    with pytest.raises(TypeError, match=r"agent\.get_state\(config\) gives, not ") as caught:
        usage(given)
    assert str(caught.value).endswith(repr(given))
