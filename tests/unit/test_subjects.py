"""The table of users, tenants and other subjects: what is counted, and what is forgotten."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from langchain_quota import Call, Decision, Level, Outcome, ToolCallLimit
from langchain_quota.engine import Outage, judge, plan
from langchain_quota.limits import Quota, QuotaTerms, Terms
from langchain_quota.reservation import admit
from langchain_quota.telemetry.subjects import SubjectTable
from langchain_quota.telemetry.threads import ThreadTable
from langchain_quota.telemetry.windows import Windows
from tests.clock import Clock

NAME = "langchain_quota_subjects"
TTL = 100
USER = "ada@example.org"


@dataclass
class Bench:
    """A table with a clock of its own."""

    clock: Clock = field(default_factory=Clock)

    def table(self, *, near: float = 0.8, max_tracked: int = 100) -> SubjectTable:
        return SubjectTable(near=near, ttl=TTL, max_tracked=max_tracked, clock=self.clock)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def quota(
    subject: str = USER,
    *,
    limit: int = 10,
    scope: str = "user_id",
    until: float | None = None,
    per_thread: bool = False,
) -> QuotaTerms:
    """The terms of a quota; `until` is the end of its window."""
    resets_at = None if until is None else datetime.fromtimestamp(until, UTC)
    key = f"{scope}:{subject}"
    return QuotaTerms(scope, limit, subject, key, resets_at, per_thread=per_thread)


def decide(
    used: int,
    *quotas: QuotaTerms,
    calls: int = 1,
    name: str = "search",
    near: float | None = None,
    enforce: bool = True,
    outage: Outage | None = None,
) -> Sequence[Decision]:
    """What is decided about calls whose quotas a store has counted up to so much."""
    limit = ToolCallLimit(
        "search",
        name=name,
        near=near,
        enforce=enforce,
        quotas=[Quota(each.limit, per=each.scope) for each in quotas],
    )
    batch = [Call("tool", "search", str(index), agent="boss") for index in range(calls)]
    asked = plan([Terms.of(limit, quotas=quotas)], {}, batch, outage=outage)
    slots = asked.reservation.slots
    counts = [used if slot.key is not None else slot.used for slot in slots]
    return asked.verdict(admit(asked.reservation, counts)).decisions


def told(table: SubjectTable) -> dict[tuple[str, ...], dict[str, int]]:
    """The counts that are not 0, by agent, limit and scope."""
    found = {
        tuple(series): {str(state): count for state, count in counts.items() if count}
        for series, counts in table.counts().items()
    }
    return {series: counts for series, counts in found.items() if counts}


SEARCH = ("boss", "search", "user_id")


def test_an_empty_table() -> None:
    """Before the first decision nothing is counted."""
    assert Bench().table().counts() == {}


@pytest.mark.parametrize(
    ("used", "state"), [(0, "ok"), (6, "ok"), (7, "near"), (8, "near"), (9, "exhausted")]
)
def test_a_subject_is_counted_by_state(bench: Bench, used: int, state: str) -> None:
    """A user is ok, near or exhausted by the store's count after the call."""
    table = bench.table()
    table.record("boss", decide(used, quota()))
    assert told(table) == {SEARCH: {state: 1}}


def test_all_states_are_there_from_the_first(bench: Bench) -> None:
    """With its first subject a quota has a count of each state."""
    table = bench.table()
    table.record("boss", decide(0, quota()))
    assert table.counts() == {SEARCH: {Level.OK: 1, Level.NEAR: 0, Level.EXHAUSTED: 0}}


def test_a_subject_moves(bench: Bench) -> None:
    """A user is in one state at a time, that of the newest decision, of a batch the last."""
    table = bench.table()
    seen = []
    for used, calls in ((0, 1), (0, 8), (8, 1), (8, 5), (2, 1)):
        table.record("boss", decide(used, quota(), calls=calls))
        seen.append(told(table)[SEARCH])
    assert seen == [{"ok": 1}, {"near": 1}, {"near": 1}, {"exhausted": 1}, {"ok": 1}]


def test_subjects_are_told_apart(bench: Bench) -> None:
    """Each user, scope, limit and agent has a count of its own."""
    table = bench.table()
    table.record("boss", decide(9, quota("ada"), quota("acme", scope="tenant", limit=50)))
    table.record("boss", decide(9, quota("bob")))
    table.record("boss", decide(9, quota("ada"), name="other"))
    table.record("clerk", decide(0, quota("ada")))
    assert told(table) == {
        ("boss", "search", "user_id"): {"exhausted": 2},
        ("boss", "search", "tenant"): {"ok": 1},
        ("boss", "other", "user_id"): {"exhausted": 1},
        ("clerk", "search", "user_id"): {"ok": 1},
    }


def test_only_the_limits_with_quotas_have_subjects(bench: Bench) -> None:
    """Limits without quotas, and calls without limits, before and after count nobody."""
    table = bench.table()
    call = Call("tool", "search", "a", agent="boss")
    plain = judge([ToolCallLimit("search", run_limit=5, name="plain")], {}, [call]).decisions
    (decision,) = decide(9, quota())
    mixed = replace(
        decision,
        standings=(*plain[0].standings, *decision.standings, *plain[0].standings),
    )
    free = Decision(call, Outcome.ALLOWED)
    table.record("boss", [free, *plain])
    assert table.counts() == {}
    table.record("boss", [free, mixed, *plain])
    assert told(table) == {SEARCH: {"exhausted": 1}}


def test_what_all_share_is_one_subject(bench: Bench) -> None:
    """A quota for all, whose subject is empty, counts as one."""
    table = bench.table()
    for used in (0, 8):
        table.record("boss", decide(used, quota("", scope="global")))
    assert told(table) == {("boss", "search", "global"): {"near": 1}}


def test_threads_are_not_counted_here(bench: Bench) -> None:
    """A quota per thread is the thread table's."""
    table = bench.table()
    table.record("boss", decide(9, quota("t1", scope="thread", per_thread=True)))
    table.record("boss", decide(9, quota("t1", scope="hourly", per_thread=True)))
    assert table.counts() == {}


def test_only_enforced_limits_have_subjects(bench: Bench) -> None:
    """By a limit on trial nobody is exhausted, and no more by one that is tried out again."""
    table = bench.table()
    table.record("boss", decide(9, quota(), enforce=False))
    assert table.counts() == {}
    table.record("boss", decide(9, quota()))
    assert told(table) == {SEARCH: {"exhausted": 1}}
    table.record("boss", decide(9, quota(), enforce=False))
    assert told(table) == {}


def test_a_quota_of_0_has_no_subjects(bench: Bench) -> None:
    """Whom a plan forbids a tool has not used it up."""
    table = bench.table()
    table.record("boss", decide(9, quota()))
    table.record("boss", decide(0, quota(limit=0)))
    assert told(table) == {}


def test_a_limits_own_near_makes_the_state(bench: Bench) -> None:
    """A user is near from the limit's own share on, if it has one."""
    table = bench.table(near=0.8)
    table.record("boss", decide(4, quota("early"), near=0.5))
    table.record("boss", decide(8, quota("late"), near=1.0))
    assert told(table) == {SEARCH: {"near": 1, "ok": 1}}


@pytest.mark.parametrize("outage", ["deny", "allow"])
def test_an_outage_changes_no_count(bench: Bench, outage: Outage) -> None:
    """While the store cannot be asked a user stays as the store last told."""
    table = bench.table()
    table.record("boss", decide(9, quota()))
    table.record("boss", decide(0, quota(), outage=outage))
    table.record("boss", decide(0, quota("bob"), outage=outage))
    assert told(table) == {SEARCH: {"exhausted": 1}}


def test_an_idle_subject_is_forgotten(bench: Bench) -> None:
    """A user without decisions for longer than the thread TTL is no longer counted."""
    table = bench.table()
    table.record("boss", decide(9, quota("ada")))
    bench.clock.now += TTL
    assert told(table) == {SEARCH: {"exhausted": 1}}
    table.record("boss", decide(0, quota("bob")))
    bench.clock.now += 1
    assert told(table) == {SEARCH: {"ok": 1}}


def test_a_call_keeps_a_subject(bench: Bench) -> None:
    """A user who goes on is counted on, a refused one too."""
    table = bench.table()
    for _ in range(3):
        table.record("boss", decide(10, quota()))
        bench.clock.now += TTL
    assert told(table) == {SEARCH: {"exhausted": 1}}


def test_a_passed_window_is_forgotten(bench: Bench) -> None:
    """At the end of the window a user is no longer counted, until the next call."""
    table = bench.table()
    table.record("boss", decide(9, quota("ada", until=1050)))
    table.record("boss", decide(9, quota("bob")))
    bench.clock.now = 1049.9
    assert told(table) == {SEARCH: {"exhausted": 2}}
    bench.clock.now = 1050
    assert told(table) == {SEARCH: {"exhausted": 1}}
    table.record("boss", decide(0, quota("ada", until=1100)))
    assert told(table) == {SEARCH: {"exhausted": 1, "ok": 1}}


def test_a_new_window_replaces_the_old(bench: Bench) -> None:
    """A user with a call in the new window is not forgotten for the old one."""
    table = bench.table()
    table.record("boss", decide(9, quota(until=1050)))
    bench.clock.now = 1050
    table.record("boss", decide(0, quota(until=1100)))
    assert told(table) == {SEARCH: {"ok": 1}}
    bench.clock.now = 1100
    assert told(table) == {}


def test_a_decision_of_a_passed_window(bench: Bench) -> None:
    """What was decided just before the end, and is told after it, does not stay."""
    table = bench.table()
    table.record("boss", decide(9, quota(until=999)))
    assert told(table) == {}


def test_the_longest_idle_goes_first(bench: Bench) -> None:
    """Beyond the bound, over all agents and limits, the least recent is forgotten."""
    table = bench.table(max_tracked=2)
    table.record("boss", decide(9, quota("ada")))
    table.record("boss", decide(7, quota("bob")))
    table.record("boss", decide(9, quota("ada")))
    table.record("clerk", decide(0, quota("eve")))
    assert told(table) == {
        ("boss", "search", "user_id"): {"exhausted": 1},
        ("clerk", "search", "user_id"): {"ok": 1},
    }


def test_one_batch_may_name_more_than_there_is_room_for(bench: Bench) -> None:
    """The bound holds within a batch whose limits have many quotas."""
    table = bench.table(max_tracked=2)
    table.record("boss", decide(0, *(quota(scope=f"tenant_{each}") for each in "abcd")))
    assert set(told(table)) == {("boss", "search", "tenant_c"), ("boss", "search", "tenant_d")}
    assert len(table._entries) == 2


def test_an_update_does_little(bench: Bench) -> None:
    """When a window of many users passes, no call pays for all of them."""
    table = bench.table()
    for index in range(20):
        table.record("boss", decide(9, quota(str(index), until=1050)))
    bench.clock.now = 1050
    left = []
    for _ in range(3):
        table.record("boss", decide(0, quota("new")))
        left.append(len(table._entries))
    assert left == [19, 17, 15]
    assert told(table) == {SEARCH: {"ok": 1}}


def test_forgotten_subjects_leave_nothing(bench: Bench) -> None:
    """Idle users with a window of a year take no memory until its end."""
    table = bench.table(max_tracked=5)
    for index in range(50):
        table.record("boss", decide(0, quota(str(index), until=10**9)))
    assert [len(keys) for keys in table._windows._keys.values()] == [5]
    bench.clock.now += TTL + 1
    table.counts()
    assert [len(keys) for keys in table._windows._keys.values()] == [0]
    assert table._windows._ends == [10**9]


@pytest.mark.parametrize("subject", [USER, "\ud800", "x" * 10_000, ""])
def test_names_are_not_kept(bench: Bench, subject: str) -> None:
    """Of a subject, whatever it is, the table remembers 16 bytes."""
    table = bench.table()
    table.record("boss", decide(0, quota(subject)))
    assert [len(key.digest) for key in table._entries] == [16]
    assert USER not in repr(vars(table))


def samples(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if sample.name == NAME
    }


def collected(bench: Bench, subjects: SubjectTable, errors: list[Exception]) -> CollectorRegistry:
    """A registry with a thread, t1, and the subjects."""
    threads = ThreadTable(
        near=0.8,
        max_exported=5,
        ttl=TTL,
        on_error=errors.append,
        subjects=subjects,
        clock=bench.clock,
    )
    threads.record("boss", "t1", decide(9, quota("t1", scope="hourly", per_thread=True)))
    registry = CollectorRegistry()
    registry.register(threads)
    return registry


def test_threads_and_subjects_are_one_family(bench: Bench) -> None:
    """One family has the rows of both, and a thread's have the scope `thread`."""
    table = bench.table()
    table.record("boss", decide(8, quota()))
    registry = collected(bench, table, [])
    assert samples(registry) == {
        ("boss", "search", "thread", "ok"): 0,
        ("boss", "search", "thread", "near"): 0,
        ("boss", "search", "thread", "exhausted"): 1,
        ("boss", "search", "user_id", "ok"): 0,
        ("boss", "search", "user_id", "near"): 1,
        ("boss", "search", "user_id", "exhausted"): 0,
    }
    assert [family.name for family in registry.collect()].count(NAME) == 1


def test_broken_subjects_leave_the_threads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the subjects cannot be counted, the threads are told, and the failure is reported."""

    def broken() -> None:
        raise MemoryError

    table, errors = bench.table(), list[Exception]()
    registry = collected(bench, table, errors)
    monkeypatch.setattr(table, "counts", broken)
    assert {key[2] for key in samples(registry)} == {"thread"}
    assert [type(error) for error in errors] == [MemoryError]


MAX_TRACKED = 4
STEPS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 30, 101]),
        st.sampled_from(["boss", "clerk"]),
        st.sampled_from(["user_id", "tenant"]),
        st.sampled_from(["ada", "bob", "eve"]),
        st.integers(0, 5),
        st.sampled_from([0, 2, 5]),
        st.sampled_from([None, 0, 40, 90]),
        st.booleans(),
    ),
    max_size=30,
)
Step = tuple[float, str, str, str, int, int, int | None, bool]


def moments(
    table: SubjectTable, clock: Clock, steps: Sequence[Step]
) -> Iterator[dict[tuple[str, ...], dict[str, int]]]:
    """Take each step in the table, and give a recount of what it should then tell."""
    known: dict[tuple[str, str, str], tuple[str, float | None, float]] = {}
    for wait, agent, scope, subject, used, limit, window, enforce in steps:
        clock.now += wait
        until = None if window is None else clock.now // (window or 1) * (window or 1) + window
        terms = quota(subject, scope=scope, limit=limit, until=until)
        table.record(agent, decide(used, terms, enforce=enforce))
        known.pop((agent, scope, subject), None)
        if limit and enforce:
            after = used + 1 if used < limit else used
            near = {2: 2, 5: 4}[limit]
            state = "exhausted" if after >= limit else "near" if after >= near else "ok"
            known[agent, scope, subject] = (state, until, clock.now)
        known = {
            key: entry
            for key, entry in known.items()
            if clock.now - entry[2] <= TTL and (entry[1] is None or entry[1] > clock.now)
        }
        if len(known) > MAX_TRACKED:
            del known[next(iter(known))]
        expected: dict[tuple[str, ...], dict[str, int]] = {}
        for (who, what, _), (state, _, _) in known.items():
            counts = expected.setdefault((who, "search", what), {})
            counts[state] = counts.get(state, 0) + 1
        yield expected


@given(steps=STEPS)
def test_the_counts_are_what_a_recount_gives(steps: Sequence[Step]) -> None:
    """After any calls, waits and windows each subject that should be is counted once, as it is."""
    clock = Clock()
    table = SubjectTable(near=0.8, ttl=TTL, max_tracked=MAX_TRACKED, clock=clock)
    for expected in moments(table, clock, steps):
        assert told(table) == expected


def test_windows_give_each_key_once() -> None:
    """A key is given when one of its windows has passed, the earliest window first."""
    windows = Windows[str]()
    windows.add("a", [10, 30])
    windows.add("b", [20])
    windows.add("c", [20])
    windows.discard("c", [20, 99])
    given = [windows.pop_passed(now) for now in (9.9, 10, 10, 29, 29, 30, 30)]
    assert given == [None, "a", None, "b", None, "a", None]


def test_windows_remember_no_passed_time() -> None:
    """Of a time that has passed nothing is left; it may come again."""
    windows = Windows[str]()
    for _ in range(3):
        windows.add("a", [10])
        windows.discard("a", [10])
        windows.add("a", [10])
        assert windows._ends == [10]
        assert [windows.pop_passed(10), windows.pop_passed(10)] == ["a", None]
        assert (windows._ends, windows._keys) == ([], {})
