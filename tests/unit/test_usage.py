"""The table of usage: what a scrape exports of threads and others, and what is forgotten."""

import json
import os
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

from langchain_quota import Call, Decision, LimitStatus, Outcome
from langchain_quota.decision import QuotaStatus
from langchain_quota.telemetry.usage import UsageTable
from tests.clock import Clock

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
REFUSED = "langchain_quota_thread_last_refusal_timestamp_seconds"
REFUSED_SINCE = "langchain_quota_thread_refused_since_timestamp_seconds"
SUBJECT_USED = "langchain_quota_subject_used"
SUBJECT_LIMIT = "langchain_quota_subject_limit"
SUBJECT_RESETS = "langchain_quota_subject_reset_timestamp_seconds"
SUBJECT_LAST = "langchain_quota_subject_last_decision_timestamp_seconds"
STARTED = "langchain_quota_start_time_seconds"
SUBJECTS = "langchain_quota_subjects"


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


class TestThreads:
    """What is exported of threads."""

    @pytest.mark.parametrize(("thread", "limit"), [("other", "search"), ("t1", "other")])
    def test_a_refund_of_what_is_not_known(self, bench: Bench, thread: str, limit: str) -> None:
        """A refund on a thread that was forgotten, or of another limit, changes nothing."""
        table = bench.table()
        table.record("boss", "t1", [decide(5)])
        before = [family.samples for family in table.collect()]
        table.refund("boss", thread, limit, 1)
        assert [family.samples for family in table.collect()] == before

    def test_what_an_outage_lets_through(self, bench: Bench) -> None:
        """By its own count a thread is shown; of a quota the store's last word stays."""
        table = bench.table()
        table.record("boss", "t1", [decide(0, None, "search", hourly(4))])
        table.record("boss", "t1", [decide(9, None, shared=True)])
        assert used(table) == {"t1": (4, 10)}

    def test_a_run_beside_a_quota(self, bench: Bench) -> None:
        """Let through in an outage, a limit of runs and of a quota shows the quota's last use."""
        table = bench.table()
        for quotas in ((hourly(4),), ()):
            decision = decide(0, None, "search", *quotas, run_limit=3, shared=True)
            table.record("boss", "t1", [decision])
            assert used(table) == {"t1": (4, 10)}


class TestSubjects:
    """Users, tenants and other subjects of quotas."""

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

    def test_a_bound(self, bench: Bench) -> None:
        """Beyond the bound those without a call for longest go, threads and others each."""
        table = bench.table(max_tracked=2)
        for name in ("t1", "t2", "t1", "t3"):
            bench.clock.now += 1
            table.record("boss", name, [decide(1, 10, "search", users(1, user=name))])
        assert threads(table) == ["t3", "t1"]
        assert (states(table), states(table, scope="user_id")) == ({"ok": 2}, {"ok": 2})


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


class TestWorkers:
    """Several processes with one directory; here several tables."""

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

    def test_the_others_keep_a_thread(self, bench: Bench, tmp_path: Path) -> None:
        """While another worker is called, what this one has refused stays counted."""
        one, two = bench.table(tmp_path), bench.table(tmp_path)
        one.record("boss", "t1", [refuse(10)])
        for _ in range(3):
            bench.clock.now += TTL
            two.record("boss", "t1", [decide(10)])
            two.write()
            assert blocked(one) == {"t1": 1}

    def test_what_is_forgotten_leaves_the_file(self, bench: Bench, tmp_path: Path) -> None:
        """The file is no longer than what the worker remembers."""
        table = bench.table(tmp_path, max_tracked=2)
        for thread in ("t1", "t2", "t3"):
            table.record("boss", thread, [decide(1)])
            table.write()
        (file,) = tmp_path.iterdir()
        assert len(file.read_text("ascii").splitlines()) == 1 + 2

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
