"""The ledger in the graph state: merging, reading, charging and taking back."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota.engine import Used
from langchain_quota.state import (
    LEDGER,
    NEW_RUN,
    Abandoned,
    Batch,
    Ledger,
    ToolCounts,
    batch_of,
    latest,
    ledger,
    merge_ledgers,
    run_model,
    run_tools,
    thread_model,
    thread_tools,
)


def counts_of_a_full_batch() -> ToolCounts:
    counts = ToolCounts({"search": 2}, {"search": 1}, {})
    counts.charge("a", "search", ("Quota", "tool:search"), 1)
    counts.charge("a", "__all__", ("Quota", "tool:*"), 1)
    return counts


def test_merging_replaces_what_is_written() -> None:
    """Fields that a hook writes replace the old ones, all others stay."""
    old = Ledger(run_tools={"search": 1}, run_model=2, model_counted=True)
    assert merge_ledgers(old, Ledger(run_tools={"calc": 1})) == {
        "run_tools": {"calc": 1},
        "run_model": 2,
        "model_counted": True,
    }
    assert old == {"run_tools": {"search": 1}, "run_model": 2, "model_counted": True}


def test_two_writers_of_one_step_are_merged() -> None:
    """Tool and model limiters that write in one superstep do not lose each other's fields."""
    tools, model = Ledger(run_tools={"search": 1}), Ledger(run_model=1, model_counted=True)
    start = merge_ledgers(Ledger(), NEW_RUN)
    either = merge_ledgers(merge_ledgers(start, tools), model)
    assert either == merge_ledgers(merge_ledgers(start, model), tools)
    assert either.get("run_tools") == {"search": 1}
    assert either.get("run_model") == 1


def test_a_field_can_be_cleared() -> None:
    """A field set to None is None afterwards, not left as it was."""
    batch = Batch(message="m", charges={}, passed=[])
    assert merge_ledgers(Ledger(batch=batch), Ledger(batch=None))["batch"] is None


def test_latest_keeps_the_newest() -> None:
    """Of two equal-minded writers of a count the last one stands."""
    assert latest(3, 4) == 4


def test_a_new_run_has_a_new_budget() -> None:
    """What a run begins with clears every count of the run before."""
    used = Ledger(
        run_tools={"search": 3},
        run_model=2,
        model_counted=True,
        refusals={"Quota": {"tool:search": 4}},
        final="That was all.",
        batch=Batch(
            message="m", charges={"a": {"search": {"Quota": {"tool:search": 1}}}}, passed=[]
        ),
    )
    state = {LEDGER: merge_ledgers(used, NEW_RUN)}
    assert run_tools(state) == {}
    assert run_model(state) == 0
    assert ToolCounts.of(state, "m").charges == {}
    assert not ledger(state)["model_counted"]
    assert not ledger(state)["final"]
    assert ledger(state)["refusals"] == {}


@pytest.mark.parametrize("empty", [{}, {LEDGER: None}])
def test_langchains_mirror_is_read_where_ours_is_missing(empty: dict[str, Any]) -> None:
    """A thread begun under LangChain's limiter goes on with its counts."""
    state = {**empty, "run_tool_call_count": {"search": 2}, "run_model_call_count": 3}
    assert run_tools(state) == {"search": 2}
    assert run_model(state) == 3


def test_ours_goes_before_the_mirror() -> None:
    """The mirror includes refused calls; where ours is there, even at 0, it is what counts."""
    state = {
        LEDGER: Ledger(run_tools={}, run_model=0),
        "run_tool_call_count": {"search": 5},
        "run_model_call_count": 5,
    }
    assert run_tools(state) == {}
    assert run_model(state) == 0


def test_each_mirror_is_read_on_its_own() -> None:
    """A ledger that has only the model's count does not hide the mirror of the tools."""
    state = {LEDGER: Ledger(run_model=1), "run_tool_call_count": {"search": 2}}
    assert run_tools(state) == {"search": 2}
    assert run_model(state) == 1


@pytest.mark.parametrize(
    "state", [{}, {"thread_tool_call_count": None, "thread_model_call_count": None}]
)
def test_a_thread_without_counts_has_used_nothing(state: dict[str, Any]) -> None:
    """Missing counts are 0, not errors."""
    assert thread_tools(state) == {}
    assert thread_model(state) == 0
    assert ledger(state) == {}
    assert ToolCounts.of(state, "m").used("search", []) == Used(0, 0)


def test_reading_copies() -> None:
    """What a hook changes in its counts does not change the state that it was given."""
    state = {
        "thread_tool_call_count": {"search": 1},
        LEDGER: Ledger(
            run_tools={"search": 1},
            batch=Batch(
                message="m", charges={"a": {"search": {"Quota": {"tool:search": 1}}}}, passed=[]
            ),
        ),
    }
    before = json.dumps(state)
    counts = ToolCounts.of(state, "m")
    counts.charge("a", "search", ("Quota", "other"), 5)
    counts.charge("b", "calc", ("Quota", "tool:calc"), 1)
    counts.take_back("a")
    assert json.dumps(state) == before


def test_charges_belong_to_one_message() -> None:
    """The charges of a batch are read for its AIMessage only."""
    charges = {"a": {"search": {"Quota": {"tool:search": 1}}}}
    state = {LEDGER: Ledger(batch=Batch(message="m", charges=charges, passed=["Quota"]))}
    assert ToolCounts.of(state, "m").charges == charges
    assert ToolCounts.of(state, "other").charges == {}
    assert ToolCounts.of(state, None).charges == {}


def test_a_batch_is_known_by_its_message() -> None:
    """What is known of a batch, and who has let it pass, is read for its message only."""
    batch = Batch(message="m", charges={}, passed=["Quota"])
    state = {LEDGER: Ledger(batch=batch)}
    assert batch_of(state, "m") == batch
    assert batch_of(state, "other") is None
    assert batch_of(state, None) is None
    assert batch_of({LEDGER: NEW_RUN}, "m") is None
    assert batch_of({}, "m") is None


def test_messages_without_an_id_share_no_charges() -> None:
    """A batch of a message without an id is not taken for that of another one."""
    batch = Batch(message="", charges={"a": {"search": {"Quota": {"tool:search": 1}}}}, passed=[])
    assert ToolCounts.of({LEDGER: Ledger(batch=batch)}, None).charges == {}
    assert batch_of({LEDGER: Ledger(batch=batch)}, None) is None


def test_a_charge_counts_in_thread_and_run() -> None:
    """A charge raises both counts of its counter and of no other."""
    counts = counts_of_a_full_batch()
    assert counts.thread == {"search": 3, "__all__": 1}
    assert counts.run == {"search": 2, "__all__": 1}


def test_two_limits_on_one_counter_count_a_call_once() -> None:
    """Two stacked limiters of one tool charge the call to both limits and count it once."""
    counts = ToolCounts({}, {}, {})
    counts.charge("a", "search", ("Quota", "soft"), 1)
    counts.charge("a", "search", ("Quota", "hard"), 1)
    assert counts.thread == {"search": 1}
    assert counts.charges == {"a": {"search": {"Quota": {"soft": 1, "hard": 1}}}}
    assert counts.take_back("a") == [("soft", 1), ("hard", 1)]
    assert counts.thread == {"search": 0}
    assert counts.run == {"search": 0}


def test_limits_of_one_name_are_told_apart_by_their_middlewares() -> None:
    """Two middlewares whose limits have one name each have their charge, and their refund."""
    counts = ToolCounts({}, {}, {})
    counts.charge("a", "search", ("Quota", "tool:search"), 1)
    counts.charge("a", "search", ("Other", "tool:search"), 1)
    assert counts.thread == {"search": 1}
    assert counts.take_back("a") == [("tool:search", 1), ("tool:search", 1)]
    assert counts.thread == {"search": 0}


def test_charging_again_charges_once() -> None:
    """A re-run hook that charges the same call to the same limit changes nothing."""
    counts = ToolCounts({}, {}, {})
    counts.charge("a", "search", ("Quota", "tool:search"), 2)
    counts.charge("a", "search", ("Quota", "tool:search"), 2)
    assert counts.thread == {"search": 2}


def test_taking_back_undoes_every_charge_of_a_call() -> None:
    """A refund covers all limits and counters of the call, and is told by limit."""
    counts = counts_of_a_full_batch()
    assert counts.take_back("a") == [("tool:search", 1), ("tool:*", 1)]
    assert counts.thread == {"search": 2, "__all__": 0}
    assert counts.run == {"search": 1, "__all__": 0}
    assert counts.charges == {}


def test_taking_back_twice_takes_back_once() -> None:
    """A call without charges, or one refunded already, is refunded nothing."""
    counts = counts_of_a_full_batch()
    counts.take_back("a")
    assert counts.take_back("a") == []
    assert counts.take_back("never charged") == []
    assert counts.thread == {"search": 2, "__all__": 0}


def test_used_leaves_out_the_calls_that_are_judged() -> None:
    """A call charged by another limiter of its tool does not stand in its own way."""
    counts = counts_of_a_full_batch()
    assert counts.used("search", ["a"]) == Used(2, 1)
    assert counts.used("search", ["b"]) == Used(3, 2)
    assert counts.used("search", ["a", "a"]) == Used(2, 1)
    assert counts.used("calc", ["a"]) == Used(0, 0)


def test_counts_that_were_reset_stay_at_0() -> None:
    """After counts are reset from outside, refunds and reads of old charges go no lower than 0."""
    counts = ToolCounts({}, {}, {"a": {"search": {"Quota": {"tool:search": 1}}}})
    assert counts.used("search", ["a"]) == Used(0, 0)
    counts.take_back("a")
    assert counts.thread == {"search": 0}
    assert counts.run == {"search": 0}


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
    for counter in ("search", "__all__"):
        start = Used(4, 2) if counter == "search" else Used(0, 0)
        assert counts.used(counter, []) == start.plus(expected[counter])
        assert counts.used(counter, charged) == start


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
            reserved={"a": {"QuotaMiddleware": {"search:user_id:ann": 1}}},
        ),
        owed={"refund": {"search:user_id:ann": 1}},
        abandoned=Abandoned(
            calls=[["search", "a", "search"]],
            charges=counts.charges,
            held_by=["Other"],
        ),
    )
    for value in (written, dict(NEW_RUN), counts.thread):
        assert json.loads(json.dumps(value)) == value


def reserved_counts() -> ToolCounts:
    """Two calls, one that two middlewares have had a store charge, and something owed."""
    return ToolCounts(
        {"search": 2},
        {"search": 2},
        {call_id: {"search": {"Quota": {"tool:search": 1}}} for call_id in ("a", "b")},
        {
            "a": {"Quota": {"user": 1, "all": 1}, "Other": {"tenant": 1}},
            "b": {"Quota": {"user": 1}},
        },
        {"earlier": {"user": 2}},
    )


def test_what_a_store_charged_is_owed_when_it_is_taken_back() -> None:
    """A refunded call's charges in the store wait to be taken back, each under a new name."""
    counts = reserved_counts()
    counts.take_back("a")
    assert counts.reserved == {"b": {"Quota": {"user": 1}}}
    assert counts.owed.pop("earlier") == {"user": 2}
    assert sorted(counts.owed.values(), key=str) == [{"tenant": 1}, {"user": 1, "all": 1}]


def test_what_is_owed_once_is_not_owed_twice() -> None:
    """A call that was taken back, or that no store charged, adds nothing to what is owed."""
    counts = reserved_counts()
    counts.take_back("a")
    owed = dict(counts.owed)
    counts.take_back("a")
    counts.take_back("never charged")
    assert counts.owed == owed


def test_two_refunds_have_names_of_their_own() -> None:
    """A store makes each correction once by its name: two calls' refunds are two."""
    counts = reserved_counts()
    counts.take_back("a")
    counts.take_back("b")
    assert len(counts.owed) == 4


def test_a_call_that_is_judged_again_is_reserved_anew() -> None:
    """Its middleware's old charge is forgotten, and returned to be taken back; others' stay."""
    counts = reserved_counts()
    assert counts.renew("a", "Quota", {"user", "all"}) == {"user": 1, "all": 1}
    assert counts.reserved["a"] == {"Other": {"tenant": 1}}
    assert counts.renew("a", "Quota", {"user", "all"}) == {}
    assert counts.owed == {"earlier": {"user": 2}}


def test_a_key_counts_a_call_once() -> None:
    """What another middleware charged to the same key is renewed with it, the rest of it stays."""
    counts = ToolCounts(
        {}, {}, {}, {"a": {"Quota": {"user": 1}, "Other": {"user": 1, "tenant": 1}}}
    )
    assert counts.renew("a", "Third", {"user"}) == {"user": 2}
    assert counts.reserved["a"]["Other"] == {"tenant": 1}


def test_renewing_what_nobody_reserved() -> None:
    """A call that no store has charged has nothing to take back."""
    counts = ToolCounts({}, {}, {})
    assert counts.renew("a", "Quota", {"user"}) == {}


def test_reading_copies_what_a_store_charged() -> None:
    """What a hook renews or takes back does not change the state that it was given."""
    batch = Batch(
        message="m",
        charges={"a": {"search": {"Quota": {"tool:search": 1}}}},
        passed=[],
        reserved={"a": {"Quota": {"user": 1}, "Other": {"user": 1}}},
    )
    state = {LEDGER: Ledger(batch=batch, owed={"earlier": {"user": 2}})}
    before = json.dumps(state)
    counts = ToolCounts.of(state, "m")
    assert counts.reserved == batch["reserved"]
    assert counts.owed == {"earlier": {"user": 2}}
    counts.renew("a", "Quota", {"user"})
    counts.take_back("a")
    counts.owed.clear()
    assert json.dumps(state) == before


def test_what_is_owed_outlives_the_batch() -> None:
    """A refund that a store has not made yet is read with whatever batch is judged next."""
    state = {LEDGER: merge_ledgers(Ledger(owed={"earlier": {"user": 2}}), NEW_RUN)}
    assert ToolCounts.of(state, "another").owed == {"earlier": {"user": 2}}
