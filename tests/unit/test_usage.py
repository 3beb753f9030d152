"""The table of usage: what a scrape exports of threads and others, and what is forgotten."""

import asyncio
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockingError, blockbuster_ctx
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from langchain_quota import Call, Decision, LimitStatus, Outcome, Telemetry
from langchain_quota.decision import QuotaStatus
from langchain_quota.telemetry import multiprocess, recorder_of
from langchain_quota.telemetry.usage import UsageTable
from langchain_quota.telemetry.usage_reader import UsageReader
from tests.clock import Clock
from tests.servers.prometheus import eventually

STANDING = LimitStatus(
    limit="search",
    exit_behavior="continue",
    thread_before=0,
    thread_used=0,
    thread_limit=10,
    run_before=0,
    run_used=0,
    run_limit=None,
)
TTL = 3600
USED = "langchain_quota_thread_used"
LIMIT = "langchain_quota_thread_limit"
SPENT = "langchain_quota_thread_spent"
BLOCKED = "langchain_quota_thread_blocked_total"
LAST = "langchain_quota_thread_last_decision_timestamp_seconds"
RESETS = "langchain_quota_thread_reset_timestamp_seconds"
REFUSED = "langchain_quota_thread_last_refusal_timestamp_seconds"
REFUSED_SINCE = "langchain_quota_thread_refused_since_timestamp_seconds"
SUBJECT_USED = "langchain_quota_subject_used"
SUBJECT_LIMIT = "langchain_quota_subject_limit"
SUBJECT_RESETS = "langchain_quota_subject_reset_timestamp_seconds"
SUBJECT_LAST = "langchain_quota_subject_last_decision_timestamp_seconds"
STARTED = "langchain_quota_start_time_seconds"
SUBJECTS = "langchain_quota_subjects"
HIDDEN = "langchain_quota_threads_hidden"


@dataclass
class Bench:
    """Tables that have the time from one clock, and what they reported."""

    clock: Clock = field(default_factory=Clock)
    errors: list[Exception] = field(default_factory=list)
    tables: list[UsageTable] = field(default_factory=list)

    def table(self, directory: Path | None = None, **settings: Any) -> UsageTable:
        """A table; in a directory it is one of several workers'."""
        given = {"near": 0.8, "max_exported": 100, "ttl": TTL, **settings}
        on_error = self.errors.append
        made = UsageTable(**given, on_error=on_error, directory=directory, clock=self.clock)
        self.tables.append(made)
        return made


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Fails if anything was reported as an error and not looked at."""
    bench = Bench()
    yield bench
    for table in bench.tables:
        table.end()
    assert bench.errors == []


def decide(
    used: int, limit: int | None = 10, name: str = "search", *quotas: QuotaStatus, **changes: Any
) -> Decision:
    """A call that is let through."""
    values = {"thread_used": used, "thread_limit": limit, "charged": True, "quotas": quotas}
    status = replace(STANDING, limit=name, **{**values, **changes})
    return Decision(Call("tool", "search"), Outcome.ALLOWED, (status,))


def refuse(
    used: int, limit: int | None = 10, name: str = "search", *quotas: QuotaStatus, **changes: Any
) -> Decision:
    """A call that is refused."""
    values = {"thread_before": used, "reason": "exhausted", "scope": "thread", "charged": False}
    refused = decide(used, limit, name, *quotas, **{**values, **changes})
    return replace(refused, outcome=Outcome.BLOCKED)


def unanswered(name: str = "search") -> Decision:
    """A call that is refused because the store could not be asked."""
    return refuse(0, None, name, reason="store", scope=None, shared=True)


def utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def hourly(
    used: int, limit: int = 10, until: float | None = 9000, name: str = "hourly"
) -> QuotaStatus:
    """The use of a quota per thread."""
    resets_at = None if until is None else utc(until)
    return QuotaStatus(name, "t", used, used, limit, resets_at, per="thread")


def users(used: int, limit: int = 10, until: float | None = None, user: str = "ada") -> QuotaStatus:
    """The use of a quota per user."""
    return QuotaStatus("user_id", user, used, used, limit, None if until is None else utc(until))


def samples(table: UsageTable, name: str) -> dict[tuple[str, ...], float]:
    """The samples of one family by the values of their labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in table.collect()
        for sample in family.samples
        if sample.name == name
    }


def threads(table: UsageTable) -> list[str]:
    """The threads that are exported, in their order."""
    return list(dict.fromkeys(thread for _, _, thread in samples(table, LAST)))


def used(table: UsageTable, limit: str = "search") -> dict[str, tuple[float, float]]:
    """What threads have used, of how much."""
    found = samples(table, USED)
    # Read last: another thread may write between the two.
    limits = samples(table, LIMIT)
    return {key[2]: (value, limits[key]) for key, value in found.items() if key[1] == limit}


def blocked(table: UsageTable) -> dict[str, float]:
    return {key[2]: value for key, value in samples(table, BLOCKED).items()}


def states(table: UsageTable, limit: str = "search", scope: str = "thread") -> dict[str, float]:
    """How many subjects of a limit are in which state, without those that nobody is in."""
    found = samples(table, SUBJECTS).items()
    return {key[3]: value for key, value in found if key[1:3] == (limit, scope) and value}


def hidden(table: UsageTable) -> dict[str, float]:
    return {state: value for (state,), value in samples(table, HIDDEN).items()}


class TestThreads:
    """What is exported of threads."""

    def test_an_empty_table(self, bench: Bench) -> None:
        """Before the first decision it exports when it began, and that nothing is hidden."""
        table = bench.table()
        bench.clock.now += 10
        rendered = [sample for family in table.collect() for sample in family.samples]
        assert {(sample.name, sample.value) for sample in rendered} == {
            (HIDDEN, 0),
            (STARTED, 1000),
        }

    def test_a_thread(self, bench: Bench) -> None:
        """A thread has the use of each limit and the time of its last decision; its refusals."""
        table = bench.table()
        table.record("boss", "t1", [decide(9), decide(10), refuse(10), refuse(10)])
        bench.clock.now += 1
        table.record("boss", "t1", [decide(1, 50, "all")])
        assert samples(table, USED) == {("boss", "search", "t1"): 10, ("boss", "all", "t1"): 1}
        assert samples(table, LIMIT) == {("boss", "search", "t1"): 10, ("boss", "all", "t1"): 50}
        assert samples(table, BLOCKED) == {("boss", "search", "t1"): 2}
        assert samples(table, LAST) == {("boss", "search", "t1"): 1000, ("boss", "all", "t1"): 1001}
        zero = dict.fromkeys(("ok", "near", "exhausted"), 0.0)
        assert samples(table, SUBJECTS) == {
            ("boss", limit, "thread", state): value
            for limit, level in (("search", "exhausted"), ("all", "ok"))
            for state, value in (zero | {level: 1.0}).items()
        }

    def test_a_budget_of_a_thread(self, bench: Bench) -> None:
        """Tokens and dollars are exported in base units, and never under the names of calls."""
        table = bench.table()
        money = decide(1_500_000, 2_000_000, "cost", unit="microdollars")
        table.record("boss", "t1", [decide(3), decide(900, 1000, "model", unit="tokens"), money])
        assert samples(table, USED) == {("boss", "search", "t1"): 3}
        assert samples(table, f"{USED}_tokens") == {("boss", "model", "t1"): 900}
        assert samples(table, f"{LIMIT}_tokens") == {("boss", "model", "t1"): 1000}
        assert samples(table, f"{USED}_dollars") == {("boss", "cost", "t1"): 1.5}
        assert samples(table, f"{LIMIT}_dollars") == {("boss", "cost", "t1"): 2.0}
        assert states(table, "model") == {"near": 1}

    def test_what_a_thread_spends_adds_up(self, bench: Bench) -> None:
        """It outlasts decisions and resets, and is there for a limit without a thread's number."""
        table = bench.table()
        table.spend("boss", "t1", [("cost", "microdollars", 1_000_000)])
        table.record("boss", "t1", [decide(1, 10, "cost", unit="microdollars")])
        table.spend("boss", "t1", [("cost", "microdollars", 500_000), ("run", "tokens", 40)])
        table.reset("boss", "t1", [])
        assert samples(table, f"{SPENT}_dollars_total") == {("boss", "cost", "t1"): 1.5}
        assert samples(table, f"{SPENT}_tokens_total") == {("boss", "run", "t1"): 40}

    def test_a_name_that_is_given_to_another_unit(self, bench: Bench) -> None:
        """Amounts of two units are never added, and never exported together."""
        table = bench.table()
        table.record("boss", "t1", [decide(3)])
        table.spend("boss", "t1", [("search", "tokens", 40)])
        table.record("boss", "t1", [decide(40, 100, unit="tokens")])
        table.spend("boss", "t1", [("search", "microdollars", 7)])
        table.record("boss", "t1", [decide(7, 100, unit="microdollars")])
        table.spend("boss", "t2", [("search", "tokens", 40)])
        table.record("boss", "t2", [decide(7, 100)])
        assert samples(table, f"{USED}_tokens") == {}
        assert samples(table, USED) == {("boss", "search", "t2"): 7}
        assert samples(table, f"{USED}_dollars") == {("boss", "search", "t1"): 7e-06}
        assert samples(table, f"{SPENT}_tokens_total") == {}
        assert samples(table, f"{SPENT}_dollars_total") == {("boss", "search", "t1"): 7e-06}

    def test_calls_are_not_taken_back_from_a_budget(self, bench: Bench) -> None:
        """A call that did not run gives back a call: what tokens it held is settled apart."""
        table = bench.table()
        table.record("boss", "t1", [decide(40, 100, unit="tokens")])
        table.refund("boss", "t1", "search", 1)
        assert samples(table, f"{USED}_tokens") == {("boss", "search", "t1"): 40}

    def test_agents_do_not_share_threads(self, bench: Bench) -> None:
        """Two agents on one thread id are two subjects."""
        table = bench.table()
        table.record("boss", "t1", [decide(1)])
        table.record("clerk", "t1", [decide(9)])
        assert samples(table, USED) == {("boss", "search", "t1"): 1, ("clerk", "search", "t1"): 9}

    @pytest.mark.parametrize("limit", [None, 0])
    def test_only_limits_above_0_have_a_use(self, bench: Bench, limit: int | None) -> None:
        """A limit for runs only, or one that forbids, has refusals of a thread but no use of it."""
        table = bench.table()
        table.record("boss", "t1", [refuse(0, limit)])
        assert used(table) == {}
        assert blocked(table) == {"t1": 1}
        assert samples(table, SUBJECTS) == {}

    def test_a_call_without_limits(self, bench: Bench) -> None:
        """A thread whose calls match no limit has no series."""
        table = bench.table()
        table.record("boss", "t1", [Decision(Call("tool", "search"), Outcome.ALLOWED)])
        assert threads(table) == []

    def test_a_limit_on_trial(self, bench: Bench) -> None:
        """Its use is shown, past the limit too; it blocks, counts and ranks nobody."""
        table = bench.table()
        refused = refuse(11, thread_used=11, enforced=False)
        table.record("boss", "busy", [decide(10, enforced=False), refused])
        bench.clock.now += 1
        table.record("boss", "newer", [decide(1, 50, "all")])
        assert used(table) == {"busy": (11, 10)}
        assert blocked(table) == {}
        assert states(table) == {}
        assert threads(table) == ["newer", "busy"]

    def test_a_limit_that_comes_and_goes(self, bench: Bench) -> None:
        """A limit that is computed, on trial or 0 counts a thread only while it says a number."""
        table = bench.table()
        seen = []
        for decision in (
            decide(9, None),
            decide(9),
            decide(9, 0),
            decide(10),
            decide(10, enforced=False),
            decide(1),
            refuse(1, None),
            decide(9, 100),
        ):
            table.record("boss", "t1", [decision])
            seen.append([*states(table)])
        assert seen == [[], ["near"], [], ["exhausted"], [], ["ok"], [], ["ok"]]
        assert used(table) == {"t1": (9, 100)}
        assert blocked(table) == {"t1": 1}

    def test_a_limits_own_near(self, bench: Bench) -> None:
        """A thread is near a limit from that limit's own share on, if it has one."""
        table = bench.table()
        table.record("boss", "early", [decide(5, near=0.5)])
        table.record("boss", "late", [decide(9, near=1.0)])
        assert states(table) == {"near": 1, "ok": 1}

    def test_a_call_that_is_not_charged_yet(self, bench: Bench) -> None:
        """A model call that is charged when it has returned is not used before."""
        table = bench.table()
        table.record("boss", "t1", [decide(4, thread_before=3, deferred=True)])
        assert used(table) == {"t1": (3, 10)}

    def test_skipped_calls_are_no_refusals(self, bench: Bench) -> None:
        """A call that is skipped because its batch was stopped was refused by no limit."""
        table = bench.table()
        table.record("boss", "t1", [replace(decide(3), outcome=Outcome.SKIPPED)])
        assert blocked(table) == {}

    def test_since_when_it_is_refused(self, bench: Bench) -> None:
        """Since the first of refusals of which none is more than ten minutes after another."""
        table = bench.table()
        seen = []
        for later, decisions in (
            (1, [decide(9)]),
            (1, [refuse(10), refuse(10)]),
            (1, [decide(1), refuse(10)]),
            (600, [refuse(10)]),
            (601, [refuse(10)]),
            (1, [decide(10)]),
        ):
            bench.clock.now += later
            table.record("boss", "t1", decisions)
            seen.append(
                tuple(
                    samples(table, name).get(("boss", "search", "t1"))
                    for name in (REFUSED, REFUSED_SINCE)
                )
            )
        assert seen == [
            (None, None),
            (1002, 1002),
            (1003, 1002),
            (1603, 1002),
            (2204, 2204),
            (2204, 2204),
        ]

    @pytest.mark.parametrize("exported", range(8))
    def test_the_order(self, bench: Bench, exported: int) -> None:
        """The near by share, the exhausted by last refusal, the rest; others are hidden."""
        table = bench.table(max_exported=exported)
        for thread, decision in (
            ("exhausted, refused last", decide(10)),
            ("ok, older", decide(1)),
            ("near, most", decide(9)),
            ("exhausted, refused first", refuse(10)),
            ("near, least", decide(8)),
            ("ok, newer", decide(2)),
            ("exhausted, refused last", refuse(10)),
            # Calls of other tools do not make it the most recently refused.
            ("exhausted, refused first", decide(1, 50, "all")),
        ):
            bench.clock.now += 1
            table.record("boss", thread, [decision])
        order = [
            ("near, most", "near"),
            ("near, least", "near"),
            ("exhausted, refused last", "exhausted"),
            ("exhausted, refused first", "exhausted"),
            ("ok, newer", "ok"),
            ("ok, older", "ok"),
        ]
        assert threads(table) == [thread for thread, _ in order[:exported]]
        left = [state for _, state in order[exported:]]
        assert hidden(table) == {state: left.count(state) for state in ("ok", "near", "exhausted")}
        assert states(table) == {"ok": 2, "near": 2, "exhausted": 2}

    def test_a_thread_is_shown_whole(self, bench: Bench) -> None:
        """The bound is on threads: a chosen one has all its limits."""
        table = bench.table(max_exported=1)
        table.record("boss", "t1", [decide(1), decide(1, 20, "all"), decide(27, 30, "model")])
        table.record("boss", "t2", [decide(1)])
        assert {key[2] for key in samples(table, USED)} == {"t1"}
        assert len(samples(table, USED)) == 3

    def test_a_refund(self, bench: Bench) -> None:
        """A charge taken back frees the thread's quota, never below 0, and its level follows."""
        table = bench.table()
        table.record("boss", "t1", [decide(10, 10, "search", hourly(10))])
        table.refund("boss", "t1", "search", 1)
        assert (used(table), states(table)) == ({"t1": (9, 10)}, {"near": 1})
        table.refund("boss", "t1", "search", 100)
        assert (used(table), states(table)) == ({"t1": (0, 10)}, {"ok": 1})

    @pytest.mark.parametrize(("thread", "limit"), [("other", "search"), ("t1", "other")])
    def test_a_refund_of_what_is_not_known(self, bench: Bench, thread: str, limit: str) -> None:
        """A refund on a thread that was forgotten, or of another limit, changes nothing."""
        table = bench.table()
        table.record("boss", "t1", [decide(5)])
        before = [family.samples for family in table.collect()]
        table.refund("boss", thread, limit, 1)
        assert [family.samples for family in table.collect()] == before

    def test_an_outage(self, bench: Bench) -> None:
        """After a refusal in an outage, the table keeps what the store said last."""
        table = bench.table()
        table.record("boss", "known", [decide(9)])
        for thread in ("known", "new"):
            table.record("boss", thread, [unanswered()])
        assert used(table) == {"known": (9, 10)}
        assert blocked(table) == {"known": 1, "new": 1}
        assert states(table) == {"near": 1}
        table.record("boss", "new", [decide(4)])
        assert used(table)["new"] == (4, 10)

    def test_what_an_outage_lets_through(self, bench: Bench) -> None:
        """By its own count a thread is shown; of a quota the store's last word stays."""
        table = bench.table()
        table.record("boss", "t1", [decide(0, None, "search", hourly(4))])
        table.record("boss", "t1", [decide(9, None, shared=True)])
        assert used(table) == {"t1": (4, 10)}

    def test_a_run_in_the_store(self, bench: Bench) -> None:
        """A limit whose runs alone the store counts shows no use of the thread."""
        table = bench.table()
        table.record("boss", "t1", [decide(7)])
        table.record("boss", "t1", [decide(0, None, run_limit=3, shared=True)])
        assert used(table) == {}

    def test_a_run_beside_a_quota(self, bench: Bench) -> None:
        """Let through in an outage, a limit of runs and of a quota shows the quota's last use."""
        table = bench.table()
        for quotas in ((hourly(4),), ()):
            decision = decide(0, None, "search", *quotas, run_limit=3, shared=True)
            table.record("boss", "t1", [decision])
            assert used(table) == {"t1": (4, 10)}

    def test_a_large_number(self, bench: Bench) -> None:
        """A number of any size is shown: Python's have no bound."""
        table = bench.table()
        table.record("boss", "t1", [decide(10**30, 10**30)])
        assert used(table) == {"t1": (10**30, 10**30)}


class TestQuotasPerThread:
    """Several numbers of one limit, some with windows."""

    def test_the_highest_share_is_shown(self, bench: Bench) -> None:
        """Of a thread limit and its quotas per thread the one with the highest share is shown."""
        table = bench.table()
        quotas = (hourly(4, 5), hourly(1, 0, name="none"))
        table.record("boss", "t1", [decide(7, 10, "search", *quotas)])
        table.record("boss", "t2", [decide(9, 10, "search", *quotas)])
        assert used(table) == {"t1": (4, 5), "t2": (9, 10)}
        assert samples(table, RESETS) == {("boss", "search", "t1"): 9000}
        assert states(table) == {"near": 2}

    def test_when_the_window_has_passed(self, bench: Bench) -> None:
        """The use is 0, the thread is tracked until it is idle, and a refund takes nothing."""
        table = bench.table()
        table.record("boss", "t1", [decide(0, None, "search", hourly(10, until=2000))])
        bench.clock.now = 1999
        assert (used(table), states(table)) == ({"t1": (10, 10)}, {"exhausted": 1})
        bench.clock.now = 2000
        assert (used(table), states(table)) == ({"t1": (0, 10)}, {"ok": 1})
        assert samples(table, RESETS) == {}
        table.record("boss", "t1", [decide(0, None, "search", hourly(2, until=3000))])
        bench.clock.now = 3001
        table.refund("boss", "t1", "search", 1)
        assert used(table) == {"t1": (0, 10)}

    def test_a_quota_that_is_gone(self, bench: Bench) -> None:
        """A quota that a limit no longer has is not shown, and its end resets nothing."""
        table = bench.table()
        table.record("boss", "t1", [decide(3, 10, "search", hourly(10, until=2000))])
        table.record("boss", "t1", [decide(4)])
        assert used(table) == {"t1": (4, 10)}
        bench.clock.now = 2001
        assert used(table) == {"t1": (4, 10)}

    def test_a_window_that_has_passed_before_it_is_told(self, bench: Bench) -> None:
        """A decision that is written after its window has ended counts nothing."""
        table = bench.table()
        table.record("boss", "t1", [decide(0, None, "search", hourly(10, until=999))])
        assert used(table) == {"t1": (0, 10)}

    def test_passed_windows_push_nobody_out(self, bench: Bench) -> None:
        """Exhausted threads whose day ends come behind those that had a call at their level."""
        table = bench.table(max_exported=2)
        table.record("boss", "in use", [decide(1)])
        bench.clock.now += 1
        for number in range(5):
            quota = hourly(10, until=2000)
            table.record("boss", f"idle {number}", [refuse(0, None, "search", quota)])
        bench.clock.now = 2001
        assert threads(table)[0] == "in use"

    def test_who_uses_up_the_new_window(self, bench: Bench) -> None:
        """A thread that uses up the new window, too, comes before one that did so earlier."""
        table = bench.table()
        for now, thread, until in ((1000, "again", 2000), (2100, "once", 9000)):
            bench.clock.now = now
            table.record("boss", thread, [decide(0, None, "search", hourly(10, until=until))])
        bench.clock.now = 2200
        table.record("boss", "again", [decide(0, None, "search", hourly(10, until=9000))])
        assert threads(table) == ["again", "once"]


class TestSubjects:
    """Users, tenants and other subjects of quotas."""

    def test_a_user(self, bench: Bench) -> None:
        """A user is in one state at a time: that of the newest decision, in a batch the last."""
        table = bench.table()
        moved = []
        for batch in ([1], [2, 8], [9, 10], [3]):
            decisions = [decide(0, None, "search", users(each)) for each in batch]
            table.record("boss", None, decisions)
            moved.append(states(table, scope="user_id"))
        assert moved == [{"ok": 1}, {"near": 1}, {"exhausted": 1}, {"ok": 1}]
        assert threads(table) == []

    def test_each_for_itself(self, bench: Bench) -> None:
        """Each user, scope, limit and agent has a count of its own."""
        table = bench.table()
        tenant = QuotaStatus("tenant", "", 1, 1, 10)
        for agent, name, quotas in (
            ("boss", "search", (users(1), tenant)),
            ("boss", "search", (users(9, user="bob"),)),
            ("boss", "all", (users(10),)),
            ("clerk", "search", (users(10),)),
        ):
            table.record(agent, "t1", [decide(0, None, name, *quotas)])
        found = {key: value for key, value in samples(table, SUBJECTS).items() if value}
        assert found == {
            ("boss", "search", "user_id", "ok"): 1,
            ("boss", "search", "user_id", "near"): 1,
            ("boss", "search", "tenant", "ok"): 1,
            ("boss", "all", "user_id", "exhausted"): 1,
            ("clerk", "search", "user_id", "exhausted"): 1,
        }

    @pytest.mark.parametrize(
        "decision",
        [
            decide(0, None, "search", users(10), enforced=False),
            decide(0, None, "search", users(5, 0)),
            decide(0, None, "search", hourly(5)),
        ],
        ids=["on trial", "forbidden", "per thread"],
    )
    def test_who_is_not_counted(self, bench: Bench, decision: Decision) -> None:
        """Nobody is by a limit on trial, or one that forbids; threads are counted apart."""
        table = bench.table()
        table.record("boss", "t1", [decide(0, None, "search", users(10))])
        table.record("boss", "t1", [decision])
        table.record("boss", "t2", [decide(0, None, "all", users(10))])
        kept = {"exhausted": 1} if decision.limits[0].quotas[0].per == "thread" else {}
        assert states(table, scope="user_id") == kept
        assert states(table, "all", "user_id") == {"exhausted": 1}

    def test_an_outage(self, bench: Bench) -> None:
        """While the store cannot be asked, a user's count stays as the store last said."""
        table = bench.table()
        table.record("boss", "t1", [decide(0, None, "search", users(8))])
        table.record("boss", "t1", [unanswered()])
        assert states(table, scope="user_id") == {"near": 1}

    def test_the_end_of_a_window(self, bench: Bench) -> None:
        """At the end of the window a user is no longer counted, until the next call."""
        table = bench.table()
        for until in (2000, 3000):
            table.record("boss", "t1", [decide(0, None, "search", users(8, until=until))])
            bench.clock.now = until - 1
            assert states(table, scope="user_id") == {"near": 1}
            bench.clock.now = until
            assert states(table, scope="user_id") == {}

    def test_what_all_share(self, bench: Bench) -> None:
        """The use of a quota per agent, or of all, has series; a user's has none."""
        table = bench.table()
        shared = QuotaStatus("company", "", 8, 8, 10, utc(2000), per="global")
        own = QuotaStatus("agent", "boss", 3, 3, 5, per="agent")
        table.record("boss", "t1", [decide(0, None, "search", shared, own, users(1))])
        company, agent = ("boss", "search", "company", ""), ("boss", "search", "agent", "")
        assert samples(table, SUBJECT_USED) == {company: 8, agent: 3}
        assert samples(table, SUBJECT_LIMIT) == {company: 10, agent: 5}
        assert samples(table, SUBJECT_RESETS) == {company: 2000}
        assert samples(table, SUBJECT_LAST) == {company: 1000, agent: 1000}
        bench.clock.now = 2000
        assert samples(table, SUBJECT_USED) == {agent: 3}

    def test_users_with_labels(self, bench: Bench) -> None:
        """Where a label is made of them, the near come first, then the exhausted; a label once."""

        def shown(quota: str, subject: str) -> str | None:
            return subject[:3] if quota == "user_id" else None

        table = bench.table(subject_label=shown, max_subjects=3)
        for user, count in (("ok", 1), ("near", 8), ("full", 10), ("next", 9), ("nearby", 8)):
            bench.clock.now += 1
            table.record("boss", "t1", [decide(0, None, "search", users(count, user=user))])
        table.record("boss", "t1", [decide(0, None, "search", replace(users(9), scope="tenant"))])
        found = {key[3]: value for key, value in samples(table, SUBJECT_USED).items()}
        assert found == {"nex": 9, "nea": 8}

    def test_names_are_not_kept(self, bench: Bench, tmp_path: Path) -> None:
        """Of a user a worker's file has a hash, which is no name."""
        table = bench.table(tmp_path)
        user = "ada@example.org" * 5
        table.record("boss", "t1", [decide(0, None, "search", users(1, user=user))])
        table.write()
        (file,) = tmp_path.iterdir()
        assert "ada@example" not in file.read_text("ascii")
        (name,) = [
            name
            for (_, scope, name), *_ in map(json.loads, file.read_text("ascii").splitlines()[1:])
            if scope == "user_id"
        ]
        assert len(bytes.fromhex(name)) == 16

    def test_a_label_outlives_an_idle_time(self, bench: Bench) -> None:
        """A user who comes back after the time to live has series again."""
        table = bench.table(subject_label=lambda _, subject: subject, max_subjects=9)
        for _ in range(2):
            table.record("boss", "t1", [decide(0, None, "search", users(1))])
            assert samples(table, SUBJECT_USED) == {("boss", "search", "user_id", "ada"): 1}
            bench.clock.now += TTL + 1


class TestForgetting:
    """What the table forgets, and when."""

    def test_the_idle(self, bench: Bench) -> None:
        """After the time to live nobody has series; the counts of their limits stay, at 0."""
        table = bench.table()
        table.record("boss", "idle", [decide(9, 10, "search", users(9))])
        bench.clock.now += 1800
        table.record("boss", "busy", [decide(9, 10, "search", users(9, user="bob"))])
        bench.clock.now += 1800
        assert threads(table) == ["busy", "idle"]
        bench.clock.now += 1
        assert threads(table) == ["busy"]
        assert (states(table), states(table, scope="user_id")) == ({"near": 1}, {"near": 1})
        bench.clock.now += 3600
        assert set(samples(table, SUBJECTS).values()) == {0}
        assert len(samples(table, SUBJECTS)) == 6

    def test_one_that_comes_back(self, bench: Bench) -> None:
        """A thread that comes back after it was idle for too long has no refusals from before."""
        table = bench.table()
        table.record("boss", "t1", [refuse(10)])
        bench.clock.now += TTL + 1
        table.record("boss", "t1", [decide(10)])
        assert blocked(table) == {}

    def test_a_bound(self, bench: Bench) -> None:
        """Beyond the bound those without a call for longest go, threads and others each."""
        table = bench.table(max_tracked=2)
        for name in ("t1", "t2", "t1", "t3"):
            bench.clock.now += 1
            table.record("boss", name, [decide(1, 10, "search", users(1, user=name))])
        assert threads(table) == ["t3", "t1"]
        assert (states(table), states(table, scope="user_id")) == ({"ok": 2}, {"ok": 2})


class TestReset:
    """A thread whose use is set back to nothing."""

    def test_it_has_used_nothing(self, bench: Bench) -> None:
        """It has used nothing, from now on; its refusals stay counted, and others as they are."""
        table = bench.table()
        for agent, thread in (("boss", "t1"), ("boss", "t2"), ("clerk", "t1")):
            table.record(agent, thread, [decide(10, 10, "search", hourly(9)), refuse(10)])
        bench.clock.now += 1
        for _ in range(2):
            table.reset("boss", "t1", [])
        key = ("boss", "search", "t1")
        assert samples(table, USED) == {
            key: 0,
            ("boss", "search", "t2"): 10,
            ("clerk", "search", "t1"): 10,
        }
        assert samples(table, LAST)[key] == 1001
        assert samples(table, BLOCKED)[key] == 1
        assert key not in samples(table, REFUSED_SINCE)
        assert samples(table, SUBJECTS)["boss", "search", "thread", "exhausted"] == 1
        table.record("boss", "t1", [decide(1)])
        assert samples(table, USED)[key] == 1

    def test_one_that_another_process_serves(self, bench: Bench) -> None:
        """A process that did not know the thread exports 0 of its limits."""
        table = bench.table()
        table.reset("boss", "t1", [replace(STANDING, quotas=(hourly(0, 5, until=None),))])
        assert used(table) == {"t1": (0, 10)}
        assert samples(table, LAST) == {("boss", "search", "t1"): 1000}

    def test_limits_without_a_number(self, bench: Bench) -> None:
        """Where the number is computed, the time of the reset alone is exported."""
        table = bench.table()
        table.reset("boss", "t1", [replace(STANDING, thread_limit=None)])
        assert (used(table), threads(table)) == ({}, ["t1"])


@dataclass
class Entry:
    """What a naive table knows of a thread."""

    last: float = 0
    refused: float = 0
    limits: dict[str, dict[str, Any]] = field(default_factory=dict)

    def rated(self, now: float) -> Iterator[tuple[str, int, float, float]]:
        """Limit, level, share and time of the numbers that count."""
        for limit, row in self.limits.items():
            for count, most, until, full in row["numbers"]:
                passed = until is not None and until <= now
                count_now = 0 if passed else count
                if most and row["enforced"]:
                    level = 2 if count_now >= most else 1 if count_now >= 0.8 * most else 0
                    yield limit, level, count_now / most, 0 if passed else full

    def level(self, now: float) -> int:
        return max((level for _, level, _, _ in self.rated(now)), default=0)


class Naive:
    """What the table should hold: everything in one dict, and recounted each time."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def record(self, thread: str, decision: Decision, now: float) -> None:
        (status,) = decision.limits
        entry = self.entries.setdefault(thread, Entry())
        entry.last = now
        new = {"numbers": [], "blocked": 0, "decided": 0.0, "since": None}
        row = entry.limits.setdefault(status.limit, new)
        row["enforced"] = status.enforced
        if status.refused and status.enforced:
            row["blocked"] += 1
            entry.refused = now
            if status.reason != "store":
                if row["since"] is None or now - row["refused"] > 600:
                    row["since"] = now
                row["refused"] = now
        if status.reason == "store":
            return
        row["decided"] = now
        numbers: list[tuple[int, int, float | None]]
        numbers = [(status.thread_used, status.thread_limit or 0, None)]
        numbers += [
            (each.used, each.limit, each.resets_at.timestamp() if each.resets_at else None)
            for each in status.quotas
        ]
        row["numbers"] = [
            (0 if end is not None and end <= now else count, most, end, now)
            for count, most, end in numbers
        ]

    def refund(self, thread: str, limit: str, amount: int, now: float) -> None:
        entry = self.entries.get(thread)
        if entry is not None and limit in entry.limits:
            entry.last = now
            row = entry.limits[limit]
            row["numbers"] = [
                (max(0, count - amount), most, end, full)
                for count, most, end, full in row["numbers"]
            ]

    def reset(self, thread: str, now: float) -> None:
        entry = self.entries.setdefault(thread, Entry())
        entry.last = now
        for row in entry.limits.values():
            row["numbers"] = [(0, most, None, now) for _, most, _, _ in row["numbers"]]
            row["decided"], row["since"] = now, None

    def expire(self, now: float, ttl: float) -> None:
        for thread in [each for each, entry in self.entries.items() if now - entry.last > ttl]:
            del self.entries[thread]


LIMITS = st.sampled_from(["search", "all"])
NAMES = st.sampled_from(["t1", "t2", "t3", "t4"])
QUOTAS = st.lists(
    st.tuples(st.integers(0, 6), st.sampled_from([2, 5]), st.sampled_from([None, 30, 90])),
    max_size=2,
)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["decide", "refuse", "trial", "store"]),
            NAMES,
            LIMITS,
            st.integers(0, 6),
            st.sampled_from([None, 0, 2, 5]),
            QUOTAS,
        ),
        st.tuples(st.just("refund"), NAMES, LIMITS, st.integers(1, 3)),
        st.tuples(st.just("reset"), NAMES),
        st.tuples(st.just("wait"), st.sampled_from([10, 60, 101])),
    ),
    max_size=25,
)


def made(step: Sequence[Any], now: float) -> Decision:
    """A decision of a step."""
    what, _, limit, count, most, quotas = step
    uses = tuple(
        hourly(each, cap, None if window is None else now // window * window + window, f"q{index}")
        for index, (each, cap, window) in enumerate(quotas)
    )
    if what == "store":
        return unanswered(limit)
    changes: Mapping[str, bool] = {"enforced": False} if what == "trial" else {}
    make = refuse if what == "refuse" else decide
    return make(count, most, limit, *uses, **changes)


def take(table: UsageTable, naive: Naive, step: Sequence[Any], now: float) -> None:
    """Take a step in the table and in the model."""
    what, *rest = step
    if what == "refund":
        thread, limit, amount = rest
        table.refund("boss", thread, limit, amount)
        naive.refund(thread, limit, amount, now)
    elif what == "reset":
        table.reset("boss", rest[0], [])
        naive.reset(rest[0], now)
    elif what != "wait":
        decision = made(step, now)
        table.record("boss", rest[0], [decision])
        naive.record(rest[0], decision, now)


@given(steps=STEPS)
def test_the_table_is_what_a_recount_gives(steps: Sequence[Sequence[Any]]) -> None:
    """After any steps, waits and resets: the threads, levels, values and counts."""
    clock, naive, errors = Clock(), Naive(), list[Exception]()
    on_error = errors.append
    table = UsageTable(near=0.8, max_exported=9, ttl=100, on_error=on_error, clock=clock)
    for step in steps:
        clock.now += step[1] if step[0] == "wait" else 1
        take(table, naive, step, clock.now)
        now = clock.now
        naive.expire(now, 100)
        levels = {thread: entry.level(now) for thread, entry in naive.entries.items()}
        order = [[1, 2, 0].index(levels[thread]) for thread in threads(table)]
        assert order == sorted(order)
        for name, column in (
            (BLOCKED, "blocked"),
            (LAST, "decided"),
            (REFUSED, "refused"),
            (REFUSED_SINCE, "since"),
        ):
            assert samples(table, name) == {
                ("boss", limit, thread): row[column]
                for thread, entry in naive.entries.items()
                for limit, row in entry.limits.items()
                if row.get(column)
            }
        for limit in ("search", "all"):
            counted: dict[str, float] = {}
            for entry in naive.entries.values():
                found = [level for name, level, _, _ in entry.rated(now) if name == limit]
                if found:
                    state = ("ok", "near", "exhausted")[max(found)]
                    counted[state] = counted.get(state, 0) + 1
            assert states(table, limit) == counted
    assert errors == []


class TestRegistry:
    """The table as a collector."""

    def test_a_second_registration_is_refused(self, bench: Bench) -> None:
        """The table describes its metrics, so a registry does not take them twice."""
        registry = CollectorRegistry()
        registry.register(bench.table())
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            registry.register(bench.table())

    def test_a_restricted_scrape(self, bench: Bench) -> None:
        """A scrape of one metric by name works, since the table describes its metrics."""
        table, registry = bench.table(), CollectorRegistry()
        registry.register(table)
        table.record("boss", "t1", [decide(1)])
        found = registry.restricted_registry([USED]).collect()
        assert [family.name for family in found] == [USED]

    def test_describing_reads_nothing(self, bench: Bench) -> None:
        """Registration sees the names of the metrics, without samples."""
        table = bench.table()
        table.record("boss", "t1", [decide(1)])
        described = list(table.describe())
        assert [family.name for family in described] == [each.name for each in table.collect()]
        assert all(not family.samples for family in described)


class TestWorkers:
    """Several processes with one directory; here several tables."""

    async def test_deciding_does_not_wait(self, bench: Bench, tmp_path: Path) -> None:
        """On an event loop a decision is only remembered; another thread writes it, by itself."""
        table, other = bench.table(tmp_path), bench.table(tmp_path)
        with blockbuster_ctx():
            table.record("boss", "t1", [decide(1)])
        await asyncio.to_thread(eventually, lambda: used(other))

    async def test_writing_on_the_loop_would_be_seen(self, bench: Bench, tmp_path: Path) -> None:
        """The test above can fail: the same file written on the loop is caught."""
        table = bench.table(tmp_path)
        with blockbuster_ctx():
            table.write()
        assert {type(error) for error in bench.errors} == {BlockingError}
        bench.errors.clear()

    def test_all_are_told_by_any(self, bench: Bench, tmp_path: Path) -> None:
        """A scrape of any worker tells what all have decided; refusals are summed."""
        one, two = bench.table(tmp_path), bench.table(tmp_path)
        one.record("boss", "t1", [decide(1), refuse(10)])
        two.record("boss", "t1", [refuse(10)])
        two.record("boss", "t2", [decide(2)])
        for table in (one, two):
            table.write()
        for table in (one, two):
            assert used(table) == {"t1": (10, 10), "t2": (2, 10)}
            assert blocked(table) == {"t1": 2}
            assert states(table) == {"ok": 1, "exhausted": 1}

    def test_what_all_spend_adds_up(self, bench: Bench, tmp_path: Path) -> None:
        """Workers spend on one thread at the same time, and nothing of it is lost."""
        one, two = bench.table(tmp_path), bench.table(tmp_path)
        for table in (one, two, one):
            table.spend("boss", "t1", [("cost", "microdollars", 250_000)])
        two.write()
        assert samples(one, f"{SPENT}_dollars_total") == {("boss", "cost", "t1"): 0.75}

    def test_the_latest_decision_holds(self, bench: Bench, tmp_path: Path) -> None:
        """What a worker writes late hides nothing that was decided since."""
        one, two = bench.table(tmp_path), bench.table(tmp_path)
        one.record("boss", "t1", [refuse(3), decide(1, 50, "all")])
        bench.clock.now += 1
        two.record("boss", "t1", [decide(5)])
        two.write()
        one.write()
        for table in (one, two):
            assert used(table) == {"t1": (5, 10)}
            assert used(table, "all") == {"t1": (1, 50)}
            assert blocked(table) == {"t1": 1}

    def test_a_user_whom_two_serve(self, bench: Bench, tmp_path: Path) -> None:
        """A user is counted once, in the state of the newest decision of all workers."""
        one, two = bench.table(tmp_path), bench.table(tmp_path)
        for table, count in ((one, 1), (two, 9)):
            bench.clock.now += 1
            table.record("boss", None, [decide(0, None, "search", users(count))])
            table.write()
        for table in (one, two):
            assert states(table, scope="user_id") == {"near": 1}

    def test_since_when_all_refuse(self, bench: Bench, tmp_path: Path) -> None:
        """The refusals of two workers are one row if they are at most ten minutes apart."""
        one, two = bench.table(tmp_path), bench.table(tmp_path)
        seen = []
        for table, later in ((one, 0), (two, 600), (one, 601)):
            bench.clock.now += later
            table.record("boss", "t1", [refuse(10)])
            table.write()
            found = [samples(each, REFUSED_SINCE)["boss", "search", "t1"] for each in (one, two)]
            assert found[0] == found[1]
            seen.append(found[0])
        assert seen == [1000, 1000, 2201]

    def test_a_late_refund(self, bench: Bench, tmp_path: Path) -> None:
        """A charge taken back before a later decision, which knows of it, is not taken twice."""
        one, two = bench.table(tmp_path), bench.table(tmp_path)
        one.record("boss", "t1", [decide(5)])
        one.refund("boss", "t1", "search", 1)
        bench.clock.now += 1
        two.record("boss", "t1", [decide(5)])
        two.write()
        one.write()
        assert used(one) == used(two) == {"t1": (5, 10)}

    def test_reset_by_one(self, bench: Bench, tmp_path: Path) -> None:
        """What others decided before a reset is not taken in after it; what comes later is."""
        one, two = bench.table(tmp_path), bench.table(tmp_path)
        for table in (one, two):
            table.record("boss", "t1", [refuse(10)])
            table.write()
        bench.clock.now += 1
        one.reset("boss", "t1", [])
        one.write()
        assert used(two) == {"t1": (0, 10)}
        assert samples(two, REFUSED_SINCE) == {}
        bench.clock.now += 1
        two.record("boss", "t1", [decide(1)])
        two.write()
        assert (used(one), used(two), blocked(one)) == ({"t1": (1, 10)}, {"t1": (1, 10)}, {"t1": 2})

    def test_a_late_reset_undoes_nothing_newer(self, bench: Bench, tmp_path: Path) -> None:
        """A reset that is written after a later decision of another process leaves it alone."""
        one, two = bench.table(tmp_path), bench.table(tmp_path)
        one.record("boss", "t1", [decide(5)])
        one.reset("boss", "t1", [])
        bench.clock.now += 1
        two.record("boss", "t1", [decide(1)])
        two.write()
        one.write()
        assert used(two) == {"t1": (1, 10)}
        assert samples(two, LAST) == {("boss", "search", "t1"): 1001}

    def test_the_others_keep_a_thread(self, bench: Bench, tmp_path: Path) -> None:
        """While another worker is called, what this one has refused stays counted."""
        one, two = bench.table(tmp_path), bench.table(tmp_path)
        one.record("boss", "t1", [refuse(10)])
        for _ in range(3):
            bench.clock.now += TTL
            two.record("boss", "t1", [decide(10)])
            two.write()
            assert blocked(one) == {"t1": 1}

    def test_when_the_first_began(self, bench: Bench, tmp_path: Path) -> None:
        """All export when the first of them began to count."""
        one = bench.table(tmp_path)
        one.write()
        bench.clock.now += 50
        two = bench.table(tmp_path)
        assert samples(two, STARTED) == samples(one, STARTED) == {(): 1000}

    def test_a_worker_that_ends(self, bench: Bench, tmp_path: Path) -> None:
        """A worker writes what waits when it ends, and what it has written stays."""
        one, two = bench.table(tmp_path), bench.table(tmp_path)
        one.record("boss", "t1", [refuse(10)])
        one.end()
        assert blocked(two) == {"t1": 1}

    def test_what_is_forgotten_leaves_the_file(self, bench: Bench, tmp_path: Path) -> None:
        """The file is no longer than what the worker remembers."""
        table = bench.table(tmp_path, max_tracked=2)
        for thread in ("t1", "t2", "t3"):
            table.record("boss", thread, [decide(1)])
            table.write()
        (file,) = tmp_path.iterdir()
        assert len(file.read_text("ascii").splitlines()) == 1 + 2

    def test_a_process_that_decides_nothing(self, bench: Bench, tmp_path: Path) -> None:
        """It tells what others have written, as their settings say; nothing where there is none."""
        registry = CollectorRegistry()
        registry.register(UsageReader(tmp_path, None, bench.errors.append))
        assert list(registry.collect()) == []
        # It has the system's time, as its files have.
        bench.clock.now = time.time()
        writer = bench.table(tmp_path, max_exported=1)
        for thread in ("t1", "t2"):
            writer.record("boss", thread, [decide(1)])
            bench.clock.now += 1
        writer.write()
        shown = [
            sample.labels["thread_id"]
            for family in registry.collect()
            for sample in family.samples
            if sample.name == USED
        ]
        assert shown == ["t2"]

    def test_what_a_worker_has_told_is_forgotten(self, bench: Bench, tmp_path: Path) -> None:
        """Of a worker that has ended nothing is told after the time to live, but its start."""
        one = bench.table(tmp_path)
        one.record("boss", "t1", [refuse(10)])
        one.end()
        (file,) = tmp_path.iterdir()
        os.utime(file, (time.time() - TTL - 60,) * 2)
        bench.clock.now += 1
        two = bench.table(tmp_path)
        assert blocked(two) == {}
        assert samples(two, STARTED) == {(): 1000}

    def test_the_file_is_private(self, bench: Bench, tmp_path: Path) -> None:
        """Others cannot read ids of threads, and prometheus_client takes no file for its own."""
        table = bench.table(tmp_path)
        table.record("boss", "t1", [decide(1)])
        table.write()
        (file,) = tmp_path.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.suffix != ".db"

    def test_a_corrupt_file(self, bench: Bench, tmp_path: Path) -> None:
        """What no worker has written is counted as an error at each scrape, and left there."""
        one, two = bench.table(tmp_path), bench.table(tmp_path)
        one.record("boss", "t1", [decide(1)])
        one.write()
        (file,) = tmp_path.iterdir()
        file.write_bytes(b"nonsense" * 1000)
        two.record("boss", "t2", [decide(1)])
        for _ in range(2):
            assert threads(two) == ["t2"]
        assert [type(error) for error in bench.errors] == [json.JSONDecodeError] * 2
        assert file.read_bytes().startswith(b"nonsense")
        bench.errors.clear()

    def test_what_cannot_be_written_waits(self, bench: Bench, tmp_path: Path) -> None:
        """If a file cannot be written, that is reported, and all of it is written later."""
        later = tmp_path / "later"
        table, other = bench.table(later), bench.table(later)
        table.record("boss", "t1", [refuse(10)])
        table.write()
        assert {type(error) for error in bench.errors} == {FileNotFoundError}
        later.mkdir()
        table.write()
        assert blocked(other) == {"t1": 1}
        bench.errors.clear()

    def test_a_fork(self, bench: Bench, tmp_path: Path) -> None:
        """A forked process begins with an empty table and a file of its own."""
        table = bench.table(tmp_path)
        table.record("boss", "t1", [refuse(10)])
        table.write()
        child = os.fork()
        if child == 0:  # pragma: no cover - another process
            table.record("boss", "t2", [decide(1)])
            table.write()
            is_right = blocked(table) == {"t1": 1} and not bench.errors
            os._exit(0 if is_right else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert {*threads(table)} == {"t1", "t2"}
        assert blocked(table) == {"t1": 1}

    def test_the_mode_is_that_of_prometheus_client(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The variable changes nothing after the import of prometheus_client, there nor here."""
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
        assert multiprocess.multiprocess_directory() is None
        recorder_of(Telemetry(registry=CollectorRegistry())).record([decide(1)], started=0)
        assert list(tmp_path.iterdir()) == []
