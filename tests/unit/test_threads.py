"""The table of threads: what a scrape exports, in which order, and what is forgotten."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from langchain_quota import Call, Decision, Level, Outcome, Standing, ToolCallLimit
from langchain_quota.decision import QuotaUse
from langchain_quota.engine import Outage, Used, plan
from langchain_quota.limits import Quota, QuotaTerms, Terms
from langchain_quota.reservation import admit
from langchain_quota.telemetry.threads import LimitUse, QuotaCount, Snapshot, ThreadTable, rate
from tests.clock import Clock

STANDING = Standing(
    limit="search",
    exit_behavior="continue",
    thread_before=0,
    thread_used=0,
    thread_limit=10,
    run_before=0,
    run_used=0,
    run_limit=None,
)


@dataclass
class Bench:
    """A table with a clock of its own, and what it reported."""

    clock: Clock = field(default_factory=Clock)
    errors: list[Exception] = field(default_factory=list)

    def table(
        self, *, near: float = 0.8, max_exported: int = 100, max_tracked: int = 100
    ) -> ThreadTable:
        return ThreadTable(
            near=near,
            max_exported=max_exported,
            ttl=3600,
            on_error=self.errors.append,
            max_tracked=max_tracked,
            clock=self.clock,
        )


@pytest.fixture
def bench() -> Bench:
    return Bench()


def allowed(used: int, limit: int | None = 10, name: str = "search") -> Decision:
    standing = replace(STANDING, limit=name, thread_used=used, thread_limit=limit, charged=True)
    return Decision(Call("tool", "search", "a"), Outcome.ALLOWED, (standing,))


def blocked(used: int, limit: int | None = 10, name: str = "search") -> Decision:
    standing = replace(
        STANDING,
        limit=name,
        thread_before=used,
        thread_used=used,
        thread_limit=limit,
        refused=True,
        scope="thread",
    )
    return Decision(Call("tool", "search", "a"), Outcome.BLOCKED, (standing,))


def names(snapshot: Snapshot) -> list[str]:
    return [use.thread for use in snapshot.threads]


def samples(table: ThreadTable, name: str) -> dict[tuple[str, ...], float]:
    """The samples of one family by the values of their labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in table.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_an_empty_table_renders() -> None:
    """Before the first decision nothing is exported but that nothing is hidden."""
    table = Bench().table()
    assert table.snapshot() == Snapshot([], {}, dict.fromkeys(Level, 0))
    assert samples(table, "langchain_quota_thread_used") == {}
    assert samples(table, "langchain_quota_threads_hidden") == {
        ("ok",): 0,
        ("near",): 0,
        ("exhausted",): 0,
    }


def test_a_thread_is_rendered(bench: Bench) -> None:
    """A thread has its use, limit and refusals of each limit, and the time of its last call."""
    table = bench.table()
    table.record("boss", "t1", [allowed(9), allowed(10), blocked(10), blocked(10)])
    table.record("boss", "t1", [allowed(1, 50, "all")])
    assert samples(table, "langchain_quota_thread_used") == {
        ("boss", "search", "t1"): 10,
        ("boss", "all", "t1"): 1,
    }
    assert samples(table, "langchain_quota_thread_limit") == {
        ("boss", "search", "t1"): 10,
        ("boss", "all", "t1"): 50,
    }
    assert samples(table, "langchain_quota_thread_blocked_total") == {
        ("boss", "search", "t1"): 2,
        ("boss", "all", "t1"): 0,
    }
    assert samples(table, "langchain_quota_thread_last_decision_timestamp_seconds") == {
        ("boss", "t1"): 1000
    }
    assert samples(table, "langchain_quota_subjects") == {
        ("boss", "search", "thread", "ok"): 0,
        ("boss", "search", "thread", "near"): 0,
        ("boss", "search", "thread", "exhausted"): 1,
        ("boss", "all", "thread", "ok"): 1,
        ("boss", "all", "thread", "near"): 0,
        ("boss", "all", "thread", "exhausted"): 0,
    }


@pytest.mark.parametrize("limit", [None, 0])
def test_only_limits_above_0_have_a_use(bench: Bench, limit: int | None) -> None:
    """A limit for runs only, or one that forbids, has refusals of a thread but no use of it."""
    table = bench.table()
    table.record("boss", "t1", [blocked(0, limit)])
    assert samples(table, "langchain_quota_thread_used") == {}
    assert samples(table, "langchain_quota_thread_limit") == {}
    assert samples(table, "langchain_quota_thread_blocked_total") == {("boss", "search", "t1"): 1}
    assert samples(table, "langchain_quota_subjects") == {}


def test_what_was_not_blocked_is_not_counted_as_blocked(bench: Bench) -> None:
    """Skipped calls, and calls that a limit on trial would refuse, are no refusals."""
    table = bench.table()
    on_trial = replace(blocked(3).standings[0], enforced=False)
    trial = Decision(Call("tool", "search", "a"), Outcome.WOULD_BLOCK, (on_trial,))
    skipped = Decision(Call("tool", "search", "a"), Outcome.SKIPPED, allowed(3).standings)
    table.record("boss", "t1", [trial, skipped])
    assert samples(table, "langchain_quota_thread_blocked_total") == {("boss", "search", "t1"): 0}


def on_trial(used: int, *, refused: bool = False, name: str = "trial") -> Decision:
    """A call that runs under a limit of 10 that is not enforced."""
    standing = replace(
        STANDING,
        limit=name,
        thread_before=used - 1,
        thread_used=used,
        charged=not refused,
        refused=refused,
        scope="thread" if refused else None,
        enforced=False,
    )
    outcome = Outcome.WOULD_BLOCK if refused else Outcome.ALLOWED
    return Decision(Call("tool", "search", "a"), outcome, (standing,))


def test_a_limit_on_trial_has_no_subjects(bench: Bench) -> None:
    """Threads are neither near nor exhausted by it, and rank as if it were not there."""
    table = bench.table()
    table.record("boss", "busy", [on_trial(9), on_trial(10), on_trial(11, refused=True)])
    bench.clock.now += 1
    table.record("boss", "newer", [allowed(1, 50)])
    snapshot = table.snapshot()
    assert [(use.thread, use.level, use.share) for use in snapshot.threads] == [
        ("newer", Level.OK, 0.02),
        ("busy", Level.OK, 0.0),
    ]
    assert {limit for _, limit in snapshot.subjects} == {"search"}


def test_a_limit_on_trial_shows_its_use(bench: Bench) -> None:
    """What a thread uses of it is seen, past the limit too, and nothing of it is blocked."""
    table = bench.table()
    table.record("boss", "t1", [on_trial(10), on_trial(11, refused=True)])
    assert samples(table, "langchain_quota_thread_used") == {("boss", "trial", "t1"): 11}
    assert samples(table, "langchain_quota_thread_limit") == {("boss", "trial", "t1"): 10}
    assert samples(table, "langchain_quota_thread_blocked_total") == {("boss", "trial", "t1"): 0}


def test_a_limit_that_is_enforced_now(bench: Bench) -> None:
    """A limit that was on trial, and is enforced since a restart of its agent, counts subjects."""
    table = bench.table()
    table.record("boss", "t1", [on_trial(9, name="search")])
    assert table.snapshot().subjects == {}
    table.record("boss", "t1", [allowed(10)])
    assert table.snapshot().subjects["boss", "search"][Level.EXHAUSTED] == 1
    table.record("boss", "t1", [on_trial(11, name="search")])
    assert not any(table.snapshot().subjects["boss", "search"].values())


def test_a_refusal_on_trial_is_no_refusal(bench: Bench) -> None:
    """What would block does not make an exhausted thread the most recently refused."""
    table = bench.table()
    for thread, decision in (
        ("first", blocked(10)),
        ("second", blocked(10)),
        ("first", on_trial(11, refused=True)),
    ):
        bench.clock.now += 1
        table.record("boss", thread, [decision])
    assert names(table.snapshot()) == ["second", "first"]


def test_a_limits_own_near_makes_the_level(bench: Bench) -> None:
    """A thread is near a limit from that limit's own share on, if it has one."""
    table = bench.table(near=0.8)
    early = replace(allowed(5).standings[0], near=0.5)
    table.record("boss", "early", [Decision(Call("model"), Outcome.ALLOWED, (early,))])
    late = replace(allowed(9).standings[0], near=1.0)
    table.record("boss", "late", [Decision(Call("model"), Outcome.ALLOWED, (late,))])
    assert {use.thread: use.level for use in table.snapshot().threads} == {
        "early": Level.NEAR,
        "late": Level.OK,
    }


@pytest.mark.parametrize(
    ("use", "level", "share"),
    [
        (LimitUse(0, 10, near=0.8), Level.OK, 0.0),
        (LimitUse(8, 10, near=0.8), Level.NEAR, 0.8),
        (LimitUse(10, 10, near=0.8), Level.EXHAUSTED, 1.0),
        (LimitUse(10, 10, near=0.8, enforced=False), None, 0.0),
        (LimitUse(10, None, near=0.8), None, 0.0),
    ],
)
def test_the_use_of_a_limit(use: LimitUse, level: Level | None, share: float) -> None:
    """Only an enforced limit with a number says how much of it is used."""
    assert use.level is level
    assert rate([use]) == (level or Level.OK, share)


@pytest.mark.parametrize("limit", [10, 0, None])
def test_each_decision_is_the_latest_word(bench: Bench, limit: int | None) -> None:
    """When a limit was last told is known of one without a number, too: other workers go by it."""
    table = bench.table()
    for used in (1, 2):
        bench.clock.now += 1
        table.record("boss", "t1", [allowed(used, limit)])
    (use,) = table.contents().threads
    assert use.limits["search"].decided == use.last_decision == 1002


def test_a_limit_that_comes_and_goes(bench: Bench) -> None:
    """A limit that is computed, none, on trial or 0 counts a thread only while it says a number."""
    table = bench.table()
    moved = []
    for decision in (
        allowed(9, None),
        allowed(9),
        allowed(9, 0),
        allowed(10),
        allowed(10, None),
        on_trial(10, name="search"),
        allowed(1),
        blocked(1, None),
        allowed(9),
    ):
        table.record("boss", "t1", [decision, allowed(1, 50, "all")])
        moved.append(states(table, "search"))
    near, exhausted, ok = ({level: 1} for level in (Level.NEAR, Level.EXHAUSTED, Level.OK))
    assert moved == [{}, near, {}, exhausted, {}, {}, ok, {}, near]
    assert states(table, "all") == {Level.OK: 1}
    assert shown(table, "search") == {"t1": (9, 10, 1)}


def test_a_computed_limit_may_move(bench: Bench) -> None:
    """A limit that is computed anew at each call shows its newest number, and its level."""
    table = bench.table()
    table.record("boss", "t1", [allowed(8, 10)])
    table.record("boss", "t1", [allowed(9, 100)])
    (use,) = table.snapshot().threads
    assert (use.level, use.limits["search"].limit) == (Level.OK, 100)
    table.record("boss", "t1", [allowed(10, None)])
    assert samples(table, "langchain_quota_thread_limit") == {}
    assert not any(table.snapshot().subjects["boss", "search"].values())


def test_a_call_that_is_not_charged_yet_is_not_used(bench: Bench) -> None:
    """A model call is let through first and charged when it returned: until then it is not used."""
    table = bench.table()
    standing = replace(STANDING, thread_before=3, thread_used=4, deferred=True)
    table.record("boss", "t1", [Decision(Call("model"), Outcome.ALLOWED, (standing,))])
    assert samples(table, "langchain_quota_thread_used") == {("boss", "search", "t1"): 3}


def test_agents_do_not_share_threads(bench: Bench) -> None:
    """Two agents on one thread id are two subjects."""
    table = bench.table()
    table.record("boss", "t1", [allowed(1)])
    table.record("clerk", "t1", [allowed(9)])
    assert samples(table, "langchain_quota_thread_used") == {
        ("boss", "search", "t1"): 1,
        ("clerk", "search", "t1"): 9,
    }


def fill(bench: Bench, table: ThreadTable) -> None:
    """Two threads of each level, one second apart, in an order unlike that of the export."""
    rows: list[tuple[str, Decision]] = [
        ("exhausted, refused last", allowed(10)),
        ("ok, older", allowed(1)),
        ("near, most", allowed(9)),
        ("exhausted, refused first", blocked(10)),
        ("near, least", allowed(8)),
        ("ok, newer", allowed(2)),
        ("exhausted, refused last", blocked(10)),
    ]
    for thread, decision in rows:
        bench.clock.now += 1
        table.record("boss", thread, [decision])


ORDER = [
    "near, most",
    "near, least",
    "exhausted, refused last",
    "exhausted, refused first",
    "ok, newer",
    "ok, older",
]


@pytest.mark.parametrize("exported", range(8))
def test_which_threads_are_exported(bench: Bench, exported: int) -> None:
    """The near by share, then the exhausted by last refusal, then the rest by last call."""
    table = bench.table(max_exported=exported)
    fill(bench, table)
    assert names(table.snapshot()) == ORDER[:exported]


@pytest.mark.parametrize(
    ("exported", "hidden"),
    [
        (6, {"ok": 0, "near": 0, "exhausted": 0}),
        (3, {"ok": 2, "near": 0, "exhausted": 1}),
        (1, {"ok": 2, "near": 1, "exhausted": 2}),
        (0, {"ok": 2, "near": 2, "exhausted": 2}),
    ],
)
def test_hidden_threads_are_counted(bench: Bench, exported: int, hidden: dict[str, int]) -> None:
    """What is not exported is counted by state; subjects are counted whether exported or not."""
    table = bench.table(max_exported=exported)
    fill(bench, table)
    assert table.snapshot().hidden == hidden
    assert table.snapshot().subjects == {("boss", "search"): {"ok": 2, "near": 2, "exhausted": 2}}


def test_an_exhausted_thread_keeps_its_place_without_a_refusal(bench: Bench) -> None:
    """Calls of other tools on an exhausted thread do not make it the most recently refused."""
    table = bench.table()
    for thread, decision in (
        ("first", blocked(10)),
        ("second", blocked(10)),
        ("first", allowed(1, 50, "all")),
    ):
        bench.clock.now += 1
        table.record("boss", thread, [decision])
    assert names(table.snapshot()) == ["second", "first"]


def test_0_exported_threads(bench: Bench) -> None:
    """With a bound of 0 no thread has series, and the counts of subjects stay."""
    table = bench.table(max_exported=0)
    table.record("boss", "t1", [allowed(9), blocked(9)])
    rendered = {sample.name for family in table.collect() for sample in family.samples}
    assert rendered == {"langchain_quota_subjects", "langchain_quota_threads_hidden"}


def test_all_limits_of_a_thread_are_exported(bench: Bench) -> None:
    """The bound is on threads: a chosen thread is shown whole."""
    table = bench.table(max_exported=1)
    table.record("boss", "t1", [allowed(1), allowed(1, 20, "all"), allowed(1, 30, "model")])
    table.record("boss", "t2", [allowed(9)])
    table.record("boss", "t1", [allowed(2)])
    assert len(samples(table, "langchain_quota_thread_used")) == 1
    table.record("boss", "t1", [allowed(27, 30, "model"), allowed(10, 10, "search")])
    table.record("boss", "t2", [allowed(1)])
    assert {key[2] for key in samples(table, "langchain_quota_thread_used")} == {"t1"}
    assert len(samples(table, "langchain_quota_thread_used")) == 3


def test_an_idle_thread_is_forgotten(bench: Bench) -> None:
    """After its time a thread has no series and is no subject; until then it has."""
    table = bench.table()
    table.record("boss", "t1", [allowed(9)])
    bench.clock.now += 3600
    assert names(table.snapshot()) == ["t1"]
    bench.clock.now += 1
    assert names(table.snapshot()) == []
    assert table.snapshot().subjects == {("boss", "search"): dict.fromkeys(Level, 0)}


def test_a_call_keeps_a_thread(bench: Bench) -> None:
    """The time of a thread begins anew with each decision."""
    table = bench.table()
    table.record("boss", "t1", [allowed(1)])
    table.record("boss", "t2", [allowed(1)])
    bench.clock.now += 3000
    table.record("boss", "t1", [allowed(2)])
    bench.clock.now += 3000
    assert names(table.snapshot()) == ["t1"]


def test_recording_forgets_idle_threads_too(bench: Bench) -> None:
    """A process that is never scraped does not keep what is idle."""
    table = bench.table()
    for index in range(10):
        table.record("boss", f"old-{index}", [allowed(1)])
    bench.clock.now += 3601
    for _ in range(10):
        table.record("boss", "new", [allowed(1)])
    assert len(table._threads) == 1


def test_a_forgotten_thread_begins_anew(bench: Bench) -> None:
    """A thread that comes back after it was forgotten has no refusals from before."""
    table = bench.table()
    table.record("boss", "t1", [blocked(10)])
    bench.clock.now += 3601
    table.snapshot()
    table.record("boss", "t1", [allowed(10)])
    assert samples(table, "langchain_quota_thread_blocked_total") == {("boss", "search", "t1"): 0}


def test_the_longest_idle_is_dropped_first(bench: Bench) -> None:
    """Beyond the bound on tracked threads the one without a call for longest goes."""
    table = bench.table(max_tracked=2)
    for thread in ("t1", "t2", "t1", "t3"):
        bench.clock.now += 1
        table.record("boss", thread, [allowed(1)])
    assert names(table.snapshot()) == ["t3", "t1"]
    assert table.snapshot().subjects["boss", "search"][Level.OK] == 2


def test_a_refund_lowers_what_is_used(bench: Bench) -> None:
    """A charge taken back frees the thread's quota, and its level follows."""
    table = bench.table()
    table.record("boss", "t1", [allowed(10), blocked(10)])
    table.refund("boss", "t1", "search", 1)
    (use,) = table.snapshot().threads
    assert use.limits["search"] == LimitUse(9, 10, 1, near=0.8)
    assert use.level is Level.NEAR
    table.refund("boss", "t1", "search", 100)
    assert table.snapshot().threads[0].limits["search"].used == 0


@pytest.mark.parametrize(("thread", "limit"), [("other", "search"), ("t1", "other")])
def test_a_refund_of_what_is_not_known_is_nothing(bench: Bench, thread: str, limit: str) -> None:
    """A refund on a thread that was forgotten, or of another limit, changes nothing."""
    table = bench.table()
    table.record("boss", "t1", [allowed(5)])
    before = table.snapshot()
    table.refund("boss", thread, limit, 1)
    assert table.snapshot() == before


def test_a_refunded_thread_is_forgotten_in_time(bench: Bench) -> None:
    """A refund does not keep an idle thread's series behind those of a busier one."""
    table = bench.table()
    table.record("boss", "idle", [allowed(5)])
    bench.clock.now += 1800
    table.record("boss", "busy", [allowed(5)])
    table.refund("boss", "idle", "search", 1)
    stamps = {use.thread: use.last_decision for use in table.snapshot().threads}
    bench.clock.now = stamps["idle"] + 3601
    assert "idle" not in names(table.snapshot())


def test_a_bad_entry_is_left_out(bench: Bench) -> None:
    """An entry that cannot be rendered is reported, and the rest of the scrape stays whole."""
    table = bench.table()
    no_float = 10**400
    table.record("boss", "good", [allowed(1)])
    table.record("boss", "bad", [allowed(1), allowed(no_float, no_float, "huge")])
    table.record("boss", "good too", [allowed(2)])
    registry = CollectorRegistry()
    registry.register(table)
    text = generate_latest(registry).decode()
    assert {key[2] for key in samples(table, "langchain_quota_thread_used")} == {
        "good",
        "good too",
    }
    assert 'thread_id="bad"' not in text
    assert 'langchain_quota_threads_hidden{state="ok"} 0.0' in text
    assert {type(error) for error in bench.errors} == {OverflowError}


def test_a_second_registration_is_refused(bench: Bench) -> None:
    """The table describes its metrics, so a registry does not take them twice."""
    registry = CollectorRegistry()
    registry.register(bench.table())
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(bench.table())


def test_a_restricted_scrape_finds_the_table(bench: Bench) -> None:
    """A scrape of one metric by name works, since the table describes its metrics."""
    table, registry = bench.table(), CollectorRegistry()
    registry.register(table)
    table.record("boss", "t1", [allowed(1)])
    found = registry.restricted_registry(["langchain_quota_thread_used"]).collect()
    assert [family.name for family in found] == ["langchain_quota_thread_used"]


def test_describing_reads_no_thread(bench: Bench) -> None:
    """Registration sees the names of the metrics, without samples."""
    table = bench.table()
    table.record("boss", "t1", [allowed(1)])
    described = list(table.describe())
    assert [family.name for family in described] == [family.name for family in table.collect()]
    assert all(not family.samples for family in described)


def test_a_scrape_sees_one_moment(bench: Bench) -> None:
    """What a snapshot holds does not change while agents go on."""
    table = bench.table()
    table.record("boss", "t1", [allowed(1)])
    snapshot = table.snapshot()
    table.record("boss", "t1", [allowed(9)])
    table.record("boss", "t2", [allowed(9)])
    assert [(use.thread, use.limits["search"].used) for use in snapshot.threads] == [("t1", 1)]
    assert snapshot.subjects == {("boss", "search"): {"ok": 1, "near": 0, "exhausted": 0}}


def utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def hourly(limit: int = 10, until: float = 9000, scope: str = "hourly") -> QuotaTerms:
    """The terms of a quota per thread; `until` is the end of its window."""
    return QuotaTerms(scope, limit, "t1", f"{scope}:t1", utc(until), per_thread=True)


def stored(
    *quotas: QuotaTerms,
    used: Sequence[int] = (),
    thread: tuple[int, int] | None = None,
    mirror: int = 0,
    calls: int = 1,
    outage: Outage | None = None,
) -> Sequence[Decision]:
    """What is decided about calls by a limit, `tool:search`, that a store counts.

    `used` are its counts of the quotas, `thread` its count and the limit of the thread; `mirror`
    is what the state has of the thread.
    """
    limit = ToolCallLimit(
        "search",
        thread_limit=None if thread is None else thread[1],
        quotas=[Quota(each.limit, per="thread", name=each.scope) for each in quotas],
    )
    terms = Terms.of(limit, thread_key="thread", quotas=quotas)
    counts = dict(zip((quota.key for quota in quotas), used, strict=True)) if used else {}
    if thread is not None:
        counts["thread"] = thread[0]
    batch = [Call("tool", "search", str(index), agent="boss") for index in range(calls)]
    asked = plan([terms], {"search": Used(mirror)}, batch, outage=outage)
    slots = asked.reservation.slots
    known = [slot.used if slot.key is None else counts.get(slot.key, 0) for slot in slots]
    return asked.verdict(admit(asked.reservation, known)).decisions


def shown(
    table: ThreadTable, limit: str | None = None
) -> dict[str, tuple[float | None, float | None, float]]:
    """What the threads have used of their limit, of how much, and how often it refused."""
    used = samples(table, "langchain_quota_thread_used")
    limits = samples(table, "langchain_quota_thread_limit")
    return {
        key[2]: (used.get(key), limits.get(key), count)
        for key, count in samples(table, "langchain_quota_thread_blocked_total").items()
        if limit in {None, key[1]}
    }


def states(table: ThreadTable, limit: str = "tool:search") -> dict[Level, int]:
    """How many threads there are in each state, where there are any."""
    counts = table.snapshot().subjects.get(("boss", limit), {})
    return {level: count for level, count in counts.items() if count}


def test_a_stores_count_of_the_thread_is_shown(bench: Bench) -> None:
    """What the store counts of the thread is its use, not what the state remembers."""
    table = bench.table()
    table.record("boss", "t1", stored(thread=(7, 10), mirror=2))
    assert shown(table) == {"t1": (8, 10, 0)}
    assert states(table) == {Level.NEAR: 1}


def test_a_quota_per_thread_is_the_threads_use(bench: Bench) -> None:
    """A limit that has no thread limit, but a quota per thread, shows that."""
    table = bench.table()
    quota = QuotaTerms("thread", 5, "t1", "t1", per_thread=True)
    table.record("boss", "t1", stored(quota, used=[3], calls=3))
    assert shown(table) == {"t1": (5, 5, 1)}
    assert states(table) == {Level.EXHAUSTED: 1}
    assert table.snapshot().threads[0].share == 1.0


@pytest.mark.parametrize(
    ("thread", "used", "expected"),
    [
        ((7, 10), [1, 0], (8, 10, 0)),
        ((1, 10), [3, 0], (4, 5, 0)),
        ((1, 10), [0, 15], (16, 20, 0)),
        (None, [1, 15], (16, 20, 0)),
        (None, [1, 0], (2, 5, 0)),
        ((4, 10), [1, 9], (5, 10, 0)),
    ],
)
def test_the_highest_share_is_shown(
    bench: Bench,
    thread: tuple[int, int] | None,
    used: Sequence[int],
    expected: tuple[int, int, int],
) -> None:
    """Of a thread limit and quotas per thread, the one that is used most; if even, the former."""
    table = bench.table()
    quotas = [hourly(5), hourly(20, scope="daily")]
    table.record("boss", "t1", stored(*quotas, used=used, thread=thread))
    assert shown(table) == {"t1": expected}


def test_a_quota_of_0_is_not_shown(bench: Bench) -> None:
    """A quota per thread that forbids has refusals but no use, like a thread limit of 0."""
    table = bench.table()
    table.record("boss", "t1", stored(hourly(0), used=[0]))
    assert shown(table) == {"t1": (None, None, 1)}
    assert table.snapshot().subjects == {}


def test_a_users_quota_is_not_the_threads_use(bench: Bench) -> None:
    """What a user has used is nothing that the thread has; refusals on the thread are."""
    table = bench.table()
    user = QuotaTerms("user_id", 5, "ada", "user:ada")
    table.record("boss", "t1", stored(user, used=[5]))
    assert shown(table) == {"t1": (None, None, 1)}
    assert table.snapshot().subjects == {}


def test_a_run_in_the_store_is_nothing_of_the_threads(bench: Bench) -> None:
    """A limit whose runs alone the store counts shows no use, nor what it was when it had some."""
    table = bench.table()
    table.record("boss", "t1", stored(thread=(7, 10)))
    limit = ToolCallLimit("search", run_limit=3)
    asked = plan([Terms.of(limit, run_key="run")], {}, [Call("tool", "search", agent="boss")])
    (decision,) = asked.verdict(asked.own_grant()).decisions
    assert decision.standings[0].shared
    table.record("boss", "t1", [decision])
    assert shown(table) == {"t1": (None, None, 0)}


def test_a_run_beside_a_quota_that_has_no_answer(bench: Bench) -> None:
    """Let through in an outage, a limit of runs and of a quota shows the quota's last use."""
    table = bench.table()
    limit = ToolCallLimit("search", run_limit=3, quotas=[Quota(5, name="hourly")])
    terms = Terms.of(limit, run_key="run", quotas=(hourly(5),))
    outages: list[Outage | None] = [None, "allow"]
    for outage in outages:
        asked = plan([terms], {}, [Call("tool", "search", agent="boss")], outage=outage)
        used = [4 if slot.key == "hourly:t1" else 0 for slot in asked.reservation.slots]
        table.record("boss", "t1", asked.verdict(admit(asked.reservation, used)).decisions)
        assert shown(table) == {"t1": (5, 5, 0)}


def test_a_call_that_is_not_charged_yet_is_not_used_of_a_quota(bench: Bench) -> None:
    """A call that is counted when it returns is not used of a quota per thread before."""
    table = bench.table()
    use = QuotaUse("thread", "t1", 4, 5, 10, per_thread=True)
    standing = replace(STANDING, thread_limit=None, deferred=True, quotas=(use,), shared=True)
    table.record("boss", "t1", [Decision(Call("model"), Outcome.ALLOWED, (standing,))])
    assert shown(table) == {"t1": (4, 10, 0)}


def test_nothing_is_used_of_a_new_window(bench: Bench) -> None:
    """When the window has passed the use is 0, and the thread is tracked until it is idle."""
    table = bench.table()
    table.record("boss", "t1", stored(hourly(5, 1050), used=[5]))
    bench.clock.now = 1049.9
    assert shown(table) == {"t1": (5, 5, 1)}
    assert states(table) == {Level.EXHAUSTED: 1}
    bench.clock.now = 1050
    assert shown(table) == {"t1": (0, 5, 1)}
    assert states(table) == {Level.OK: 1}
    assert table.snapshot().threads[0].last_decision == 1000
    bench.clock.now = 1000 + 3600 + 1
    assert shown(table) == {}
    assert states(table) == {}


def test_a_passed_window_leaves_what_has_none(bench: Bench) -> None:
    """When a quota's window has passed the thread limit beside it is shown as it is."""
    table = bench.table()
    decisions = stored(hourly(5, 1050), used=[5], thread=(8, 10))
    table.record("boss", "t1", decisions)
    bench.clock.now = 1050
    assert shown(table) == {"t1": (8, 10, 1)}
    assert states(table) == {Level.NEAR: 1}


def test_a_decision_in_the_new_window_counts(bench: Bench) -> None:
    """The end of the old window takes nothing from what is used of the new one."""
    table = bench.table()
    table.record("boss", "t1", stored(hourly(5, 1050), used=[5]))
    bench.clock.now = 1050
    table.record("boss", "t1", stored(hourly(5, 1100), used=[3]))
    assert shown(table) == {"t1": (4, 5, 1)}
    bench.clock.now = 1100
    assert shown(table) == {"t1": (0, 5, 1)}


def test_a_window_that_is_another_now(bench: Bench) -> None:
    """A quota whose window was lengthened, or that is gone, is not reset at the former end."""
    table = bench.table()
    table.record("boss", "longer", stored(hourly(5, 1050), used=[3]))
    table.record("boss", "longer", stored(hourly(5, 2000), used=[4]))
    table.record("boss", "gone", stored(hourly(5, 1050), used=[3]))
    table.record("boss", "gone", [allowed(4, 5, "tool:search")])
    table.record(
        "boss", "one of two", stored(hourly(5, 1050), hourly(9, 2000, "daily"), used=[3] * 2)
    )
    assert windows(table) == {
        1050: {("boss", "one of two")},
        2000: {("boss", "longer"), ("boss", "one of two")},
    }
    bench.clock.now = 1050
    assert shown(table) == {"longer": (5, 5, 0), "gone": (4, 5, 0), "one of two": (4, 9, 0)}
    assert windows(table) == {2000: {("boss", "longer"), ("boss", "one of two")}}


def test_a_decision_that_is_told_too_late(bench: Bench) -> None:
    """Of a window that has passed before its decision is told, nothing counts."""
    table = bench.table()
    table.record("boss", "t1", stored(hourly(5, 999), used=[5]))
    assert shown(table) == {"t1": (0, 5, 1)}
    assert states(table) == {Level.OK: 1}


def test_a_passed_window_does_not_make_a_thread_recent(bench: Bench) -> None:
    """A thousand exhausted threads whose day ends do not push out those that are in use."""
    table = bench.table(max_exported=2)
    for thread in ("old", "older"):
        table.record("boss", thread, stored(hourly(5, 1050), used=[5]))
    for thread in ("busy", "busier"):
        table.record("boss", thread, [allowed(1)])
    assert names(table.snapshot()) == ["older", "old"]
    bench.clock.now = 1050
    assert names(table.snapshot()) == ["busier", "busy"]
    assert table.snapshot().hidden == {Level.OK: 2, Level.NEAR: 0, Level.EXHAUSTED: 0}
    table.record("boss", "old", stored(hourly(5, 1100), used=[0]))
    assert names(table.snapshot()) == ["old", "busier"]


def test_exhausted_again_in_a_new_window_is_news(bench: Bench) -> None:
    """A thread that uses up the new window, too, comes before one that did so earlier."""
    table = bench.table()
    table.record("boss", "t1", stored(hourly(1, 1050), used=[0]))
    table.record("boss", "t2", stored(hourly(1, 2000), used=[0]))
    bench.clock.now = 1050
    table.record("boss", "t1", stored(hourly(1, 1100), used=[0]))
    assert names(table.snapshot()) == ["t1", "t2"]


def test_an_update_takes_in_few_passed_windows(bench: Bench) -> None:
    """When the window of many threads passes, no call pays for all of them; a scrape sees all."""
    table = bench.table()
    for index in range(20):
        table.record("boss", f"t{index}", stored(hourly(5, 1050), used=[5]))
    bench.clock.now = 1050
    left = []
    for _ in range(3):
        table.record("boss", "new", [allowed(1)])
        left.append(len(table._by_level[Level.EXHAUSTED]))
    assert left == [18, 16, 14]
    assert states(table) == {Level.OK: 20}


def test_a_forgotten_thread_leaves_no_window(bench: Bench) -> None:
    """What is forgotten, for any reason, takes no memory until the end of its window."""
    table = bench.table(max_tracked=2)
    for thread in ("pushed out", "asked for", "idle"):
        table.record("boss", thread, stored(hourly(5, 10**9), used=[1]))
    assert len(table._windows._keys[10**9]) == 2
    table.forget("boss", "asked for")
    assert list(table._windows._keys[10**9]) == [("boss", "idle")]
    bench.clock.now += 3601
    table.snapshot()
    assert table._windows._keys == {10**9: {}}


def test_a_refund_in_a_new_window(bench: Bench) -> None:
    """A charge taken back after its window has passed takes nothing from the new one."""
    table = bench.table()
    table.record("boss", "t1", stored(hourly(5, 1050), used=[3], thread=(7, 10)))
    bench.clock.now = 1050
    table.refund("boss", "t1", "tool:search", 1)
    (use,) = table.snapshot().threads
    assert use.limits["tool:search"] == LimitUse(7, 10, 0, 0.8, True, (QuotaCount(0, 5),))
    assert (states(table), windows(table)) == ({Level.OK: 1}, {})


def test_a_refund_lowers_quotas_too(bench: Bench) -> None:
    """A charge taken back is taken from the thread limit and from each quota per thread."""
    table = bench.table()
    table.record("boss", "t1", stored(hourly(5), used=[4], thread=(8, 10)))
    table.refund("boss", "t1", "tool:search", 3)
    (use,) = table.snapshot().threads
    assert use.limits["tool:search"] == LimitUse(6, 10, 0, 0.8, True, (QuotaCount(2, 5, 9000),))
    table.refund("boss", "t1", "tool:search", 9)
    (use,) = table.snapshot().threads
    assert use.limits["tool:search"].quotas == (QuotaCount(0, 5, 9000),)


def test_an_outage_hides_no_use(bench: Bench) -> None:
    """Where an outage refuses, the use is what the store told last, and the refusals count."""
    table = bench.table()
    for decisions in (
        stored(thread=(8, 10), mirror=2),
        stored(thread=(0, 10), mirror=3, outage="deny", calls=2),
    ):
        table.record("boss", "limited", decisions)
    for decisions in (stored(hourly(5), used=[4]), stored(hourly(5), outage="deny")):
        table.record("boss", "quota", decisions)
    assert shown(table) == {"limited": (9, 10, 2), "quota": (5, 5, 1)}
    assert states(table) == {Level.NEAR: 1, Level.EXHAUSTED: 1}


def test_an_unknown_use_is_not_0(bench: Bench) -> None:
    """A thread that is first met in an outage has refusals; a use when the store answers."""
    table = bench.table()
    table.record("boss", "t1", stored(thread=(0, 10), mirror=3, outage="deny"))
    assert shown(table) == {"t1": (None, None, 1)}
    assert states(table) == {}
    table.record("boss", "t1", stored(thread=(8, 10), mirror=3))
    assert shown(table) == {"t1": (9, 10, 1)}
    assert states(table) == {Level.NEAR: 1}


def test_what_an_outage_lets_through(bench: Bench) -> None:
    """By its own count a thread is shown and judged; of a quota the store's last word stays."""
    table = bench.table()
    table.record("boss", "limited", stored(thread=(8, 10), mirror=2))
    table.record("boss", "limited", stored(thread=(0, 10), mirror=3, outage="allow"))
    table.record("boss", "quota", stored(hourly(5), used=[3]))
    table.record("boss", "quota", stored(hourly(5), mirror=9, outage="allow"))
    assert shown(table) == {"limited": (4, 10, 0), "quota": (4, 5, 0)}


NEAR = 0.8
TTL = 100
MAX_TRACKED = 4
Key = tuple[str, str]


@dataclass
class Entry:
    limits: dict[str, LimitUse]
    last: float
    ranked: float
    """When it was last refused, or became exhausted."""
    lapsed: float = 0.0
    """The end, negative, of the window whose passing made it ok; 0 after a call."""

    @property
    def level(self) -> Level:
        levels = [level_of(use) for use in self.limits.values()]
        return max(levels, key=list(Level).index, default=Level.OK)

    @property
    def share(self) -> float:
        return max(
            (
                used / limit
                for use in self.limits.values()
                if use.enforced
                for used, limit in counts_of(use)
            ),
            default=0.0,
        )


def counts_of(use: LimitUse) -> list[tuple[int, int]]:
    quotas = [(each.used, each.limit) for each in use.quotas]
    return [*quotas, (use.used, use.limit)] if use.limit else quotas


def level_of(use: LimitUse) -> Level:
    """The worst level of all counts, each for itself."""
    levels = [Level.OK]
    for used, limit in counts_of(use) if use.enforced else ():
        if used >= ceil(round(NEAR * limit, 9)):
            levels.append(Level.EXHAUSTED if used >= limit else Level.NEAR)
    return max(levels, key=list(Level).index)


class Model:
    """What the table should hold: all threads in one dict, everything recounted every time."""

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}

    def record(self, key: Key, decision: Decision, now: float) -> None:
        standing = decision.standings[0]
        refused = decision.outcome is Outcome.BLOCKED
        self.pass_windows(now, [key])
        old = self.entries.get(key)
        limits = dict(old.limits) if old else {}
        known = limits.get(standing.limit, LimitUse(0, None))
        use = LimitUse(
            standing.thread_used,
            standing.thread_limit or None,
            quotas=tuple(
                QuotaCount(0, each.limit)
                if each.resets_at is not None and each.resets_at <= utc(now)
                else QuotaCount(each.used, each.limit, ends(each))
                for each in standing.quotas
                if each.limit
            ),
        )
        limits[standing.limit] = replace(
            known if standing.scope == "store" else use,
            blocked=known.blocked + refused,
            near=NEAR,
            enforced=standing.enforced,
        )
        entry = Entry(limits, now, now)
        if old and not refused and old.level is entry.level is Level.EXHAUSTED:
            entry.ranked = old.ranked
        self.entries[key] = entry
        if len(self.entries) > MAX_TRACKED:
            del self.entries[min(self.entries, key=lambda each: self.entries[each].last)]

    def pass_windows(self, now: float, keys: Sequence[Key]) -> None:
        for entry in (self.entries[key] for key in keys if key in self.entries):
            before = entry.level
            passed = []
            for name, use in entry.limits.items():
                quotas = list(use.quotas)
                for index, each in enumerate(quotas):
                    if each.resets_at is not None and each.resets_at <= now:
                        quotas[index] = QuotaCount(0, each.limit)
                        passed.append(each.resets_at)
                entry.limits[name] = replace(use, quotas=tuple(quotas))
            if entry.level is not before:
                entry.lapsed = -min(passed)

    def refund(self, key: Key, limit: str, amount: int) -> None:
        entry = self.entries.get(key)
        if entry and limit in entry.limits:
            use = entry.limits[limit]
            entry.limits[limit] = replace(
                use,
                used=max(0, use.used - amount),
                quotas=tuple(replace(each, used=max(0, each.used - amount)) for each in use.quotas),
            )
            entry.lapsed = 0.0

    def expire(self, now: float) -> None:
        for key in [key for key, entry in self.entries.items() if now - entry.last > TTL]:
            del self.entries[key]
        self.pass_windows(now, list(self.entries))

    def rank(self, key: Key) -> tuple[float, ...]:
        """Where a thread comes in the order; the highest comes first."""
        entry = self.entries[key]
        if entry.level is Level.NEAR:
            return (2, entry.share, entry.last)
        if entry.level is Level.EXHAUSTED:
            return (1, entry.ranked)
        # Threads whose windows ended together come in any order.
        return (0, entry.lapsed, 0 if entry.lapsed else entry.last)

    def order(self) -> list[Key]:
        return sorted(self.entries, key=self.rank, reverse=True)

    def subjects(self) -> dict[Key, dict[Level, int]]:
        found: dict[Key, dict[Level, int]] = {}
        for (agent, _), entry in self.entries.items():
            for limit, use in entry.limits.items():
                if counts_of(use) and use.enforced:
                    counts = found.setdefault((agent, limit), dict.fromkeys(Level, 0))
                    counts[level_of(use)] += 1
        return found

    def windows(self) -> dict[float, set[Key]]:
        found: dict[float, set[Key]] = {}
        for key, entry in self.entries.items():
            for quota in (each for use in entry.limits.values() for each in use.quotas):
                if quota.resets_at is not None:
                    found.setdefault(quota.resets_at, set()).add(key)
        return found


def windows(table: ThreadTable) -> dict[float, set[Key]]:
    """The threads that a table looks at when a window ends."""
    return {end: set(keys) for end, keys in table._windows._keys.items() if keys}


THREADS = st.tuples(st.sampled_from(["boss", "clerk"]), st.sampled_from(["t1", "t2", "t3"]))
LIMITS = st.sampled_from(["search", "all"])
USES = st.tuples(st.integers(0, 6), st.sampled_from([None, 0, 2, 5]))
QUOTAS = st.lists(
    st.tuples(st.integers(0, 6), st.sampled_from([0, 2, 5]), st.sampled_from([None, 0, 30, 90])),
    max_size=2,
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("quotas"), THREADS, LIMITS, USES, QUOTAS),
        st.tuples(st.just("outage"), THREADS, LIMITS),
        st.tuples(st.just("allowed"), THREADS, LIMITS, USES),
        st.tuples(st.just("blocked"), THREADS, LIMITS, USES),
        st.tuples(st.just("would_block"), THREADS, LIMITS, USES),
        st.tuples(st.just("refund"), THREADS, LIMITS, st.integers(1, 3)),
        st.tuples(st.just("forget"), THREADS),
        st.tuples(st.just("wait"), st.sampled_from([10, 60, 101])),
    ),
    max_size=30,
)


def would_block(used: int, limit: int | None, name: str) -> Decision:
    """A call that runs although a limit that is not enforced refuses it."""
    refused = blocked(used, limit, name)
    standing = replace(refused.standings[0], enforced=False)
    return Decision(refused.call, Outcome.WOULD_BLOCK, (standing,))


def ends(use: QuotaUse) -> float | None:
    return None if use.resets_at is None else use.resets_at.timestamp()


def by_quotas(decision: Decision, quotas: Sequence[Any], now: float) -> Decision:
    """The decision by a limit with quotas per thread, each with its use, number and window."""
    uses = []
    for index, (used, limit, window) in enumerate(quotas):
        until = None if window is None else utc(now // (window or 1) * (window or 1) + window)
        uses.append(QuotaUse(f"quota_{index}", "t", used, used, limit, until, per_thread=True))
    standing = replace(decision.standings[0], quotas=tuple(uses))
    return replace(decision, standings=(standing,))


def unanswered(name: str) -> Decision:
    """A refusal, because the store could not be asked, with what the state counts."""
    refused = blocked(1, 50, name)
    standing = replace(refused.standings[0], scope="store", shared=True)
    return replace(refused, standings=(standing,))


MAKE = {"allowed": allowed, "blocked": blocked, "would_block": would_block}


def moments(
    table: ThreadTable, model: Model, clock: Clock, steps: Sequence[tuple[object, ...]]
) -> Iterator[Snapshot]:
    """Take each step in the table and in the model, and give what a scrape then shows."""
    for step in steps:
        clock.now += 1
        match step:
            case ("wait", int(seconds)):
                clock.now += seconds
            case ("refund", (str(agent), str(thread)), str(limit), int(amount)):
                table.refund(agent, thread, limit, amount)
                model.pass_windows(clock.now, [(agent, thread)])
                model.refund((agent, thread), limit, amount)
                if (agent, thread) in model.entries:
                    # Whether a refund counts as activity is the table's to say.
                    entry = model.entries[agent, thread]
                    assert table._threads[agent, thread].last_decision in {entry.last, clock.now}
                    entry.last = table._threads[agent, thread].last_decision
            case ("forget", (str(agent), str(thread))):
                table.forget(agent, thread)
                model.entries.pop((agent, thread), None)
            case ("quotas", (str(agent), str(thread)), str(limit), (int(used), number), [*quotas]):
                decision = allowed(used, number if isinstance(number, int) else None, limit)
                decision = by_quotas(decision, quotas, clock.now)
                table.record(agent, thread, [decision])
                model.record((agent, thread), decision, clock.now)
            case ("outage", (str(agent), str(thread)), str(limit)):
                table.record(agent, thread, [unanswered(limit)])
                model.record((agent, thread), unanswered(limit), clock.now)
            case (outcome, (str(agent), str(thread)), str(limit), (int(used), threshold)):
                make = MAKE[str(outcome)]
                decision = make(used, threshold if isinstance(threshold, int) else None, limit)
                table.record(agent, thread, [decision])
                model.record((agent, thread), decision, clock.now)
        model.expire(clock.now)
        yield table.snapshot()


@given(steps=STEPS, exported=st.integers(0, 5))
def test_the_table_is_what_a_recount_gives(
    steps: Sequence[tuple[object, ...]], exported: int
) -> None:
    """After any calls, refunds and waits: the same threads, order, values, subjects and hidden."""
    clock, model, errors = Clock(), Model(), list[Exception]()
    table = ThreadTable(
        near=NEAR,
        max_exported=exported,
        ttl=TTL,
        on_error=errors.append,
        max_tracked=MAX_TRACKED,
        clock=clock,
    )
    for snapshot in moments(table, model, clock, steps):
        order = model.order()
        keys = [(use.agent, use.thread) for use in snapshot.threads]
        assert [model.rank(key) for key in keys] == [model.rank(key) for key in order[:exported]]
        assert len(set(keys)) == len(keys)
        for use in snapshot.threads:
            entry = model.entries[use.agent, use.thread]
            assert (use.limits, use.last_decision) == (entry.limits, entry.last)
        tracked = {key: counts for key, counts in snapshot.subjects.items() if any(counts.values())}
        assert tracked == model.subjects()
        hidden = dict.fromkeys(Level, 0)
        for key in order[exported:]:
            hidden[model.entries[key].level] += 1
        assert snapshot.hidden == hidden
        assert windows(table) == model.windows()
    assert errors == []


def test_a_thread_forgotten_on_request_has_no_series(bench: Bench) -> None:
    """Its series, its place among the subjects and its refusals end; all others stay."""
    table = bench.table()
    for agent, thread in (("boss", "t1"), ("boss", "t2"), ("clerk", "t1")):
        table.record(agent, thread, [allowed(10), blocked(10)])
    table.forget("boss", "t1")
    assert samples(table, "langchain_quota_thread_used") == {
        ("boss", "search", "t2"): 10,
        ("clerk", "search", "t1"): 10,
    }
    subjects = samples(table, "langchain_quota_subjects")
    assert subjects["boss", "search", "thread", "exhausted"] == 1
    assert subjects["clerk", "search", "thread", "exhausted"] == 1


def test_a_thread_forgotten_on_request_begins_anew(bench: Bench) -> None:
    """Its next call makes it a thread like one that was never seen."""
    table = bench.table()
    table.record("boss", "t1", [allowed(10), blocked(10)])
    table.forget("boss", "t1")
    table.record("boss", "t1", [allowed(1)])
    assert samples(table, "langchain_quota_thread_used") == {("boss", "search", "t1"): 1}
    assert samples(table, "langchain_quota_thread_blocked_total") == {("boss", "search", "t1"): 0}
    assert table.snapshot().subjects == {
        ("boss", "search"): {Level.OK: 1, Level.NEAR: 0, Level.EXHAUSTED: 0}
    }


def test_a_thread_that_is_not_tracked_is_forgotten_already(bench: Bench) -> None:
    """Forgetting an unknown thread, or one twice, changes nothing."""
    table = bench.table()
    table.record("boss", "t1", [allowed(1)])
    table.record("boss", "t2", [allowed(1)])
    for agent, thread in (("boss", "t3"), ("clerk", "t1"), ("boss", "t2"), ("boss", "t2")):
        table.forget(agent, thread)
    assert names(table.snapshot()) == ["t1"]
    assert table.snapshot().subjects["boss", "search"][Level.OK] == 1
