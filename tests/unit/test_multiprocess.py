"""What several workers know as one: written, read, merged, and forgotten with its worker."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from blockbuster import BlockingError, blockbuster_ctx
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Metric

from langchain_quota import Call, Decision, Outcome, Standing, Telemetry
from langchain_quota.decision import QuotaUse
from langchain_quota.telemetry import multiprocess
from langchain_quota.telemetry.merging import (
    CorruptTablesError,
    Tables,
    merge,
    read_tables,
    write_tables,
)
from langchain_quota.telemetry.multiprocess import Worker, WorkerTables, read_others, worker_of
from langchain_quota.telemetry.subjects import SubjectTable
from langchain_quota.telemetry.threads import ThreadTable
from tests.clock import Clock
from tests.servers.prometheus import Series, eventually, series_of

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
ENOUGH = 60.0
"""Seconds until something that should happen counts as not happening."""
TTL = 3600.0
USED = "langchain_quota_thread_used"
BLOCKED = "langchain_quota_thread_blocked_total"
LAST = "langchain_quota_thread_last_decision_timestamp_seconds"
SUBJECTS = "langchain_quota_subjects"
HIDDEN = "langchain_quota_threads_hidden"


@dataclass
class Desk:
    """The tables of one worker, and what it does with decisions."""

    clock: Callable[[], float]
    errors: list[Exception] = field(default_factory=list)
    max_exported: int = 100

    def __post_init__(self) -> None:
        self.subjects = SubjectTable(near=0.8, ttl=TTL, clock=self.clock)
        self.threads = ThreadTable(
            near=0.8,
            max_exported=self.max_exported,
            ttl=TTL,
            on_error=self.errors.append,
            subjects=self.subjects,
            clock=self.clock,
        )

    def record(self, thread: str, *decisions: Decision, agent: str = "boss") -> None:
        self.threads.record(agent, thread, decisions)
        self.subjects.record(agent, decisions)

    def tables(self) -> Tables:
        return Tables.of(self.threads, self.subjects)

    def told(self) -> Tables:
        """What another process reads of it."""
        return read_tables(b"".join(self.written()))

    def written(self) -> list[bytes]:
        lines: list[bytes] = []
        write_tables(self.tables(), lines.append, self.errors.append)
        return lines

    def samples(self) -> Series:
        return series_of(self.threads.collect())


@dataclass
class Bench:
    """Workers that have the time from one clock."""

    clock: Clock = field(default_factory=Clock)
    errors: list[Exception] = field(default_factory=list)

    def desk(self, *, max_exported: int = 100) -> Desk:
        return Desk(self.clock, self.errors, max_exported)

    def merged(self, own: Desk, *others: Desk) -> Series:
        """What a scrape of the first worker gives."""
        tables = [own.tables(), *(other.told() for other in others)]
        return series_of(merge(tables, self.clock.now, self.errors.append))


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Fails if anything was reported as an error and not looked at."""
    bench = Bench()
    yield bench
    assert bench.errors == []


def decide(
    used: int, limit: int | None = 10, name: str = "search", *quotas: QuotaUse, **changes: Any
) -> Decision:
    """A call that is let through."""
    standing = replace(
        STANDING, limit=name, thread_used=used, thread_limit=limit, charged=True, quotas=quotas
    )
    return Decision(Call("tool", "search"), Outcome.ALLOWED, (replace(standing, **changes),))


def refuse(used: int, limit: int | None = 10, name: str = "search", *quotas: QuotaUse) -> Decision:
    """A call that is refused by the thread's limit."""
    changes = {"thread_before": used, "refused": True, "scope": "thread", "charged": False}
    standing = decide(used, limit, name, *quotas, **changes).standings[0]
    return Decision(Call("tool", "search"), Outcome.BLOCKED, (standing,))


def unanswered(name: str = "search") -> Decision:
    """A call that is refused because the store could not be asked."""
    changes = {"refused": True, "scope": "store", "charged": False, "shared": True}
    standing = decide(0, None, name, **changes).standings[0]
    return Decision(Call("tool", "search"), Outcome.BLOCKED, (standing,))


def utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def quota(used: int, limit: int = 10, *, until: float | None = None, subject: str = "") -> QuotaUse:
    """The use of a quota, per thread unless it has a subject."""
    resets_at = None if until is None else utc(until)
    scope = "user_id" if subject else "hourly"
    return QuotaUse(scope, subject, used, used, limit, resets_at, per_thread=not subject)


def of(samples: Series, name: str) -> dict[tuple[str, ...], float]:
    """The samples of one family that are not 0, by the sorted values of their labels."""
    return {
        tuple(value for _, value in sorted(labels)): value
        for (found, labels), value in samples.items()
        if found == name and value
    }


class TestMerging:
    """merge()."""

    def test_the_latest_decision_wins(self, bench: Bench) -> None:
        """What a thread has used is what the worker says that judged it last, whoever is asked."""
        one, two = bench.desk(), bench.desk()
        one.record("t1", decide(9))
        bench.clock.now += 1
        two.record("t1", decide(3))
        for order in ((one, two), (two, one)):
            merged = bench.merged(*order)
            assert of(merged, USED) == {("boss", "search", "t1"): 3}
            assert of(merged, LAST) == {("boss", "t1"): 1001}

    def test_each_limit_has_its_latest_decision(self, bench: Bench) -> None:
        """A decision about one limit does not bring back what a worker knew of another."""
        one, two = bench.desk(), bench.desk()
        one.record("t1", decide(1), decide(1, name="all"))
        bench.clock.now += 1
        two.record("t1", decide(5), decide(5, name="all"))
        bench.clock.now += 1
        one.record("t1", decide(6, name="all"))
        assert of(bench.merged(two, one), USED) == {
            ("boss", "search", "t1"): 5,
            ("boss", "all", "t1"): 6,
        }

    def test_a_limit_that_one_worker_knows_stays(self, bench: Bench) -> None:
        """What only another worker has judged is told."""
        one, two = bench.desk(), bench.desk()
        one.record("t1", decide(7))
        bench.clock.now += 1
        two.record("t1", decide(2, name="all"))
        assert of(bench.merged(two, one), USED) == {
            ("boss", "search", "t1"): 7,
            ("boss", "all", "t1"): 2,
        }

    def test_refusals_are_summed(self, bench: Bench) -> None:
        """Each worker has counted its own refusals."""
        one, two, three = bench.desk(), bench.desk(), bench.desk()
        one.record("t1", refuse(10), refuse(10))
        two.record("t1", refuse(10))
        three.record("t1", decide(10))
        merged = bench.merged(one, two, three)
        assert of(merged, BLOCKED) == {("boss", "search", "t1"): 3}

    def test_an_outage_at_one_worker_hides_no_use(self, bench: Bench) -> None:
        """A worker that could not ask the store does not know better than one that could."""
        one, two = bench.desk(), bench.desk()
        one.record("t1", decide(0, None, "search", quota(7, until=9000)))
        bench.clock.now += 1
        two.record("t1", unanswered())
        merged = bench.merged(two, one)
        assert of(merged, USED) == {("boss", "search", "t1"): 7}
        assert of(merged, BLOCKED) == {("boss", "search", "t1"): 1}

    def test_a_refund_is_no_later_decision(self, bench: Bench) -> None:
        """A charge taken back where an old count is known does not hide the newer count."""
        one, two = bench.desk(), bench.desk()
        one.record("t1", decide(2))
        bench.clock.now += 1
        two.record("t1", decide(8))
        bench.clock.now += 1
        one.threads.refund("boss", "t1", "search", 1)
        assert of(bench.merged(one, two), USED) == {("boss", "search", "t1"): 8}

    def test_subjects_and_hidden_threads_are_counted_once(self, bench: Bench) -> None:
        """A thread that two workers served is one thread, at one level."""
        one, two = bench.desk(max_exported=1), bench.desk()
        for desk in (one, two):
            desk.record("both", decide(9))
        one.record("one", decide(10))
        two.record("two", decide(1))
        merged = bench.merged(one, two)
        assert of(merged, SUBJECTS) == {
            ("boss", "search", "thread", "near"): 1,
            ("boss", "search", "thread", "exhausted"): 1,
            ("boss", "search", "thread", "ok"): 1,
        }
        assert of(merged, HIDDEN) == {("exhausted",): 1, ("ok",): 1}
        assert of(merged, USED) == {("boss", "search", "both"): 9}

    @pytest.mark.parametrize("exported", [0, 1, 2, 3, 4, 5, 6, 9])
    def test_which_threads_are_exported(self, bench: Bench, exported: int) -> None:
        """The near ones by share, the exhausted by refusal, the rest by recency: of all workers."""
        one, two = bench.desk(max_exported=exported), bench.desk()
        for number, (desk, thread, decision) in enumerate(
            (
                (one, "e1", decide(10)),
                (two, "e2", decide(10)),
                (two, "o1", decide(1)),
                (one, "n1", decide(9)),
                (two, "n2", decide(8)),
                (one, "o2", decide(2)),
                (two, "e1", refuse(10)),
                (one, "e2", decide(10)),
            )
        ):
            bench.clock.now = 1000.0 + number
            desk.record(thread, decision)
        order = ["n1", "n2", "e2", "e1", "o2", "o1"]
        # Seen by another worker for the first time, a thread is new among the exhausted.
        shown = {thread for _, thread in of(bench.merged(one, two), LAST)}
        assert shown == set(order[:exported])

    def test_an_idle_thread_is_left_out(self, bench: Bench) -> None:
        """What a quiet worker's file says of threads ends when they have been idle for long."""
        one, two = bench.desk(), bench.desk()
        one.record("old", decide(9))
        one.record("new", decide(9))
        bench.clock.now += TTL
        two.record("new", decide(1))
        bench.clock.now += 1
        merged = bench.merged(two, one)
        assert of(merged, USED) == {("boss", "search", "new"): 1}
        assert of(merged, SUBJECTS) == {("boss", "search", "thread", "ok"): 1}

    def test_a_passed_window_is_seen_in_a_file(self, bench: Bench) -> None:
        """Nothing is used of a window that began after the file was written."""
        one, two = bench.desk(), bench.desk()
        one.record("t1", decide(0, None, "search", quota(10, until=1500)))
        told = one.told()
        bench.clock.now = 1500
        merged = series_of(merge([two.tables(), told], bench.clock.now, bench.errors.append))
        assert of(merged, USED) == {}
        assert (
            merged[USED, frozenset({("agent", "boss"), ("limit", "search"), ("thread_id", "t1")})]
            == 0
        )
        assert of(merged, SUBJECTS) == {("boss", "search", "thread", "ok"): 1}

    def test_users_have_the_state_of_the_latest_decision(self, bench: Bench) -> None:
        """A user whom two workers served is one user."""
        one, two = bench.desk(), bench.desk()
        one.record("t1", decide(0, None, "search", quota(9, subject="ada")))
        one.record("t1", decide(0, None, "search", quota(1, subject="bob")))
        bench.clock.now += 1
        two.record("t2", decide(0, None, "search", quota(10, subject="ada")))
        for order in ((one, two), (two, one)):
            assert of(bench.merged(*order), SUBJECTS) == {
                ("boss", "search", "user_id", "exhausted"): 1,
                ("boss", "search", "user_id", "ok"): 1,
            }

    @pytest.mark.parametrize(("until", "passed"), [(1500.0, 500), (None, TTL + 1)])
    def test_users_are_left_out_in_time(
        self, bench: Bench, until: float | None, passed: float
    ) -> None:
        """One whose window has passed, or without calls for long, is not counted."""
        one, two = bench.desk(), bench.desk()
        one.record("t1", decide(0, None, "search", quota(9, until=until, subject="ada")))
        told = one.told()
        bench.clock.now += passed
        merged = series_of(merge([two.tables(), told], bench.clock.now, bench.errors.append))
        assert of(merged, SUBJECTS) == {}

    def test_a_thread_forgotten_at_one_worker(self, bench: Bench) -> None:
        """What others knew of it before is forgotten, too, and what they learn later is not."""
        one, two = bench.desk(), bench.desk()
        two.record("t1", decide(9), decide(9, name="all"))
        bench.clock.now += 1
        one.threads.forget("boss", "t1")
        assert of(bench.merged(one, two), LAST) == of(bench.merged(two, one), LAST) == {}
        bench.clock.now += 1
        two.record("t1", decide(1))
        for order in ((one, two), (two, one)):
            assert of(bench.merged(*order), USED) == {("boss", "search", "t1"): 1}

    def test_forgotten_threads_are_not_remembered_for_ever(self, bench: Bench) -> None:
        """That a thread was forgotten matters only for as long as others may remember it."""
        desk = bench.desk()
        desk.threads.forget("boss", "t1")
        bench.clock.now += TTL + 1
        desk.threads.forget("boss", "t2")
        assert set(desk.threads.contents().forgotten) == {("boss", "t2")}

    def test_all_that_was_ever_counted_is_told(self, bench: Bench) -> None:
        """A limit whose threads are forgotten counts 0, as in a single process."""
        one, two = bench.desk(), bench.desk()
        one.record("t1", decide(9, None, "search", quota(9), quota(9, subject="ada")))
        bench.clock.now += 2 * TTL
        merged = bench.merged(two, one)
        assert merged == one.samples()
        assert len([name for name, _ in merged if name == SUBJECTS]) == 6

    def test_a_bad_entry_is_left_out(self, bench: Bench) -> None:
        """An entry that cannot be merged is reported; the others are told."""
        one, two = bench.desk(), bench.desk()
        one.record("good", decide(1))
        tables = one.tables()
        tables.threads['["boss","bad"]'] = '["nonsense"]'
        tables.subjects['["boss"]'] = '["nonsense"]'
        merged = series_of(merge([two.tables(), tables], bench.clock.now, bench.errors.append))
        assert of(merged, USED) == {("boss", "search", "good"): 1}
        assert [type(error) for error in bench.errors] == [ValueError, ValueError]
        bench.errors.clear()


@dataclass(frozen=True)
class Step:
    """A call that one of three workers judges, and how long after it the next one comes."""

    worker: int
    thread: str
    limit: str
    used: int
    user: str
    refused: bool
    pause: float

    def decision(self, now: float) -> Decision:
        """Limits differ in what they count, and always count the same."""
        until = (now // 5 + 1) * 5
        used, user = self.used, quota(self.used, 3, subject=self.user)
        kinds: dict[str, tuple[tuple[QuotaUse, ...], dict[str, Any]]] = {
            "plain": ((), {}),
            "near": ((quota(used, 5),), {"near": 0.5}),
            "trial": ((quota(used), user), {"enforced": False}),
            "users": ((user, quota(used, 5)), {}),
            "windows": ((replace(user, resets_at=utc(until)), quota(used, until=until)), {}),
        }
        if self.limit == "outage":
            return unanswered("windows")
        quotas, changes = kinds[self.limit]
        limit = None if self.limit == "windows" else 4
        made = (refuse if self.refused else decide)(used, limit, self.limit, *quotas)
        return replace(made, standings=(replace(made.standings[0], **changes),))


STEPS = st.builds(
    Step,
    worker=st.integers(0, 2),
    thread=st.sampled_from(["t1", "t2", "t3"]),
    limit=st.sampled_from(["plain", "near", "trial", "users", "windows", "outage"]),
    used=st.integers(0, 5),
    user=st.sampled_from(["ada", "bob"]),
    refused=st.booleans(),
    pause=st.sampled_from([0.25, 1.0, 6.0]),
)


@given(st.lists(STEPS, max_size=30))
def test_many_workers_are_as_one(steps: Sequence[Step]) -> None:
    """Decisions spread over three workers give what one table would that has seen them all."""
    bench = Bench()
    alone, workers = bench.desk(), [bench.desk() for _ in range(3)]
    for step in steps:
        decision = step.decision(bench.clock.now)
        alone.record(step.thread, decision)
        workers[step.worker].record(step.thread, decision)
        bench.clock.now += step.pause
    assert bench.merged(*workers) == alone.samples()
    assert bench.errors == []


class TestWriting:
    """write_tables() and read_tables()."""

    def test_what_is_read_is_what_was_written(self, bench: Bench) -> None:
        """All that a table holds survives the way through a file, odd names too."""
        desk = bench.desk()
        quotas = (quota(3, until=2000), quota(1), quota(9, until=3000.5, subject="ada"))
        for thread in ("t1", "two words", "\N{SNOWMAN}", 'a"b\\c', "tab~"):
            desk.record(thread, decide(4, 9, 'a\tb\n"\ud800', *quotas), agent="b\\oss")
            desk.record(thread, refuse(9, None, "all", *quotas))
        desk.threads.forget("boss", "t1")
        again = desk.told()
        assert series_of(merge([again], 1000, bench.errors.append)) == desk.samples()
        assert again.forgotten == {'["boss","t1"]': 1000.0}
        assert (len(again.threads), len(again.subjects)) == (9, 2)

    def test_subjects_are_written_as_hashes(self, bench: Bench) -> None:
        """The name of a user is in no file."""
        desk = bench.desk()
        desk.record("t1", decide(0, None, "search", quota(9, subject="ada@example.org")))
        assert len(desk.told().subjects) == 1
        assert b"ada" not in b"".join(desk.written())

    def test_every_truncation_is_found(self, bench: Bench) -> None:
        """However much of a file is there, half a file is never taken for a whole one."""
        desk = bench.desk()
        desk.record("t1", decide(4), refuse(9, name="all"))
        data = b"".join(desk.written())
        assert read_tables(data).threads
        for length in range(len(data)):
            with pytest.raises(CorruptTablesError):
                read_tables(data[:length])

    @pytest.mark.parametrize("position", [0, 30, 60, -1])
    def test_a_changed_byte_is_found(self, bench: Bench, position: int) -> None:
        """What is not exactly what was written is not read."""
        desk = bench.desk()
        desk.record("t1", decide(4))
        data = bytearray(b"".join(desk.written()))
        data[position] ^= 1
        with pytest.raises(CorruptTablesError):
            read_tables(bytes(data))

    def test_another_version_is_refused(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A whole file in another format is not read as if it were ours."""
        monkeypatch.setattr("langchain_quota.telemetry.merging._FORMAT", "tables of tomorrow")
        data = b"".join(bench.desk().written())
        monkeypatch.undo()
        with pytest.raises(CorruptTablesError, match="unknown format"):
            read_tables(data)

    def test_a_bad_entry_is_left_out(self, bench: Bench) -> None:
        """An entry that cannot be written is reported; the others are told."""
        desk = bench.desk()
        desk.record("bad", decide(1))
        desk.record("good", decide(1))
        use = desk.threads._threads["boss", "bad"]
        desk.threads._threads["boss", "bad"] = replace(use, limits={"search": None})  # type: ignore[dict-item]  # on purpose
        assert set(desk.told().threads) == {'["boss","good"]'}
        [error] = bench.errors
        assert isinstance(error, AttributeError)
        bench.errors.clear()


@dataclass
class Office:
    """Workers of one process that meet in a directory, each with a thread that is its own."""

    directory: Path
    closing: ExitStack
    errors: list[Exception] = field(default_factory=list)

    def worker(self, *, by_itself: bool = False) -> tuple[Desk, Worker]:
        """A worker; it writes when it is told to, or else by itself."""
        desk = Desk(time.time, self.errors)
        worker = Worker(self.directory, desk.threads, desk.subjects, self.errors.append)
        self.closing.callback(worker.close)
        if not by_itself:
            desk.threads.listen(lambda: None)
            desk.subjects.listen(lambda: None)
        return desk, worker

    def files(self, suffix: str = "") -> list[Path]:
        return sorted(self.directory.glob(f"*{suffix}"))

    def scrape(self, worker: Worker) -> Series:
        return series_of(worker.collect())


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    """Fails if anything was reported as an error and not looked at."""
    with ExitStack() as closing:
        office = Office(tmp_path, closing)
        yield office
    assert office.errors == []


def die(worker: Worker) -> None:
    """What the operating system does for a process that ends, however it ends."""
    worker._closed = True
    assert worker._held is not None
    os.close(worker._held)
    worker._held = None


class TestWorker:
    """Worker."""

    def test_workers_know_each_other(self, office: Office) -> None:
        """A scrape of any worker tells what all have written, and what it knows itself."""
        (desk, one), (other, two) = office.worker(), office.worker()
        desk.record("t1", decide(1))
        other.record("t2", decide(2))
        one.flush()
        two.flush()
        desk.record("t3", decide(3))
        assert of(office.scrape(one), USED) == {
            ("boss", "search", "t1"): 1,
            ("boss", "search", "t2"): 2,
            ("boss", "search", "t3"): 3,
        }

    def test_own_file_is_not_counted(self, office: Office) -> None:
        """What a worker has written itself is not summed with what it knows."""
        desk, worker = office.worker()
        desk.record("t1", refuse(10))
        worker.flush()
        assert of(office.scrape(worker), BLOCKED) == {("boss", "search", "t1"): 1}

    def test_files_are_private_and_no_metrics(self, office: Office) -> None:
        """Others cannot read ids of threads, and prometheus_client takes no file for its own."""
        desk, worker = office.worker()
        desk.record("t1", decide(1))
        worker.flush()
        assert {path.suffix for path in office.files()} == {".tables", ".lock"}
        assert {path.stat().st_mode & 0o777 for path in office.files()} == {0o600}
        assert office.files(".db") == []

    def test_nothing_is_done_before_the_first_decision(self, office: Office) -> None:
        """A worker that has nothing to tell has no thread and no file."""
        before = set(threading.enumerate())
        _, worker = office.worker(by_itself=True)
        assert office.scrape(worker)
        assert set(threading.enumerate()) == before
        assert office.files() == []

    def test_a_decision_is_written_by_itself(self, office: Office) -> None:
        """The first decision starts one daemon thread, which writes."""
        before = set(threading.enumerate())
        desk, _ = office.worker(by_itself=True)
        desk.record("t1", decide(1))
        [thread] = set(threading.enumerate()) - before
        assert thread.daemon
        eventually(lambda: office.files(".tables"))
        desk.record("t1", decide(1))
        assert set(threading.enumerate()) - before == {thread}

    @pytest.mark.parametrize("what", ["subject", "refund", "forget"])
    def test_every_change_is_news(self, office: Office, what: str) -> None:
        """Users, refunds and threads forgotten are written as decisions are."""
        desk, _ = office.worker()
        desk.record("t1", decide(1))
        news: list[str] = []
        desk.threads.listen(lambda: news.append("threads"))
        desk.subjects.listen(lambda: news.append("subjects"))
        if what == "subject":
            desk.subjects.record("boss", [decide(0, None, "search", quota(1, subject="ada"))])
        elif what == "refund":
            desk.threads.refund("boss", "t1", "search", 1)
        else:
            desk.threads.forget("boss", "t1")
        assert news == ["subjects" if what == "subject" else "threads"]

    @pytest.mark.parametrize(("took", "pause"), [(0.0, 1.0), (0.1, 1.0), (0.5, 4.5), (20, 180)])
    def test_writing_is_seldom(
        self, office: Office, monkeypatch: pytest.MonkeyPatch, took: float, pause: float
    ) -> None:
        """At most once a second, and at most a tenth of the time; not at all without news."""
        pauses: SimpleQueue[float] = SimpleQueue()
        wakes: SimpleQueue[None] = SimpleQueue()
        times = iter((0.0, took, 1000.0, 1000.0 + took))

        def sleep(seconds: float) -> None:
            pauses.put(seconds)
            wakes.get()

        fake = SimpleNamespace(sleep=sleep, monotonic=lambda: next(times), time=time.time)
        monkeypatch.setattr(multiprocess, "time", fake)
        desk, worker = office.worker(by_itself=True)
        desk.record("t1", decide(1))
        assert pauses.get(timeout=ENOUGH) == pytest.approx(pause)
        [path] = office.files(".tables")
        desk.record("t2", decide(2))
        # It is in its pause: nothing is written, however much there is to tell.
        assert set(read_tables(path.read_bytes()).threads) == {'["boss","t1"]'}
        wakes.put(None)
        assert pauses.get(timeout=ENOUGH) == pytest.approx(pause)
        assert set(read_tables(path.read_bytes()).threads) == {'["boss","t1"]', '["boss","t2"]'}
        # Without news it waits for news, and comes to no pause.
        wakes.put(None)
        eventually(lambda: worker._news._cond._waiters)  # type: ignore[attr-defined]  # who waits
        assert pauses.empty()

    async def test_decisions_do_not_wait_for_files(self, office: Office) -> None:
        """On an event loop a decision starts the thread that writes, and writes nothing itself."""
        with blockbuster_ctx():
            for number in range(10):
                desk, _ = office.worker(by_itself=True)
                desk.record(f"t{number}", decide(1))
        await asyncio.to_thread(eventually, lambda: len(office.files(".tables")) == 10)

    async def test_writing_on_the_loop_would_be_seen(self, office: Office) -> None:
        """The test above can fail: the same file written on the loop is caught."""
        desk, worker = office.worker()
        worker._on_error = _raise
        with blockbuster_ctx(), pytest.raises(BlockingError):
            worker.flush()
        assert desk.errors == []

    def test_a_reader_never_sees_half_a_file(self, office: Office) -> None:
        """While a worker writes without pause, each file that another reads is whole."""
        (desk, one), (_, two) = office.worker(), office.worker()
        for number in range(300):
            desk.record(f"t{number}", decide(1))
        one.flush()
        done = threading.Event()

        def write() -> None:
            while not done.is_set():
                one.flush()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(30):
                assert len(of(office.scrape(two), LAST)) == 100
                assert sum(of(office.scrape(two), HIDDEN).values()) == 200
        finally:
            done.set()
            writer.join()

    def test_a_worker_that_ends_takes_its_files_along(self, office: Office) -> None:
        """A closed worker leaves nothing, and writes nothing more."""
        desk, worker = office.worker(by_itself=True)
        desk.record("t1", decide(1))
        worker.flush()
        assert office.files()
        worker.close()
        worker.close()
        desk.record("t2", decide(1))
        worker.flush()
        assert office.files() == []
        assert worker._thread is not None
        worker._thread.join(timeout=ENOUGH)
        assert not worker._thread.is_alive()

    def test_a_dead_worker_is_forgotten(self, office: Office) -> None:
        """What a killed worker left is removed by a scrape; what lives is told."""
        (desk, one), (other, two), (_, three) = office.worker(), office.worker(), office.worker()
        for each, worker in ((desk, one), (other, two)):
            each.record("t1", refuse(10))
            worker.flush()
        (office.directory / f"{one._path.name}.tables.tmp").write_bytes(b"half a fi")
        assert of(office.scrape(three), BLOCKED) == {("boss", "search", "t1"): 2}
        die(one)
        assert of(office.scrape(three), BLOCKED) == {("boss", "search", "t1"): 1}
        assert {path.stem for path in office.files()} == {two._path.name}

    def test_a_dead_worker_that_wrote_nothing(self, office: Office) -> None:
        """A worker killed before its first table is there is forgotten, too."""
        (desk, one), (_, two) = office.worker(), office.worker()
        desk.record("t1", decide(1))
        one.flush()
        (office.directory / f"{one._path.name}.tables").unlink()
        assert of(office.scrape(two), USED) == {}
        assert len(office.files()) == 1
        die(one)
        office.scrape(two)
        assert office.files() == []

    def test_a_used_again_process_id_keeps_nothing_alive(self, office: Office) -> None:
        """All workers here have one process id, and one of them is dead."""
        (desk, one), (_, two) = office.worker(), office.worker()
        desk.record("t1", decide(1))
        one.flush()
        assert str(os.getpid()) in one._path.name
        die(one)
        assert of(office.scrape(two), USED) == {}

    @pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff\x00\n123", b'{"a": 1}\n{}'])
    def test_a_corrupt_file_is_left_out(self, office: Office, content: bytes) -> None:
        """What a living worker's file should not contain is counted each time, and left there."""
        (desk, one), (other, two) = office.worker(), office.worker()
        desk.record("t1", decide(1))
        one.flush()
        other.record("t2", decide(2))
        [path] = office.files(".tables")
        path.write_bytes(content)
        for _ in range(2):
            assert of(office.scrape(two), USED) == {("boss", "search", "t2"): 2}
        assert [type(error) for error in office.errors] == [CorruptTablesError] * 2
        assert path.exists()
        office.errors.clear()

    def test_a_foreign_file_is_left_alone(self, office: Office) -> None:
        """A file that no worker ever held is counted as an error, and not removed."""
        desk, worker = office.worker()
        desk.record("t1", decide(1))
        foreign = office.directory / "langchain_quota_notes.tables"
        foreign.write_text("my notes")
        (office.directory / "counter_1.db").write_text("not ours")
        assert of(office.scrape(worker), USED) == {("boss", "search", "t1"): 1}
        assert foreign.read_text() == "my notes"
        [error] = office.errors
        assert isinstance(error, FileNotFoundError)
        office.errors.clear()

    def test_a_directory_in_the_way(self, office: Office) -> None:
        """Nothing in the directory breaks a scrape."""
        desk, worker = office.worker()
        desk.record("t1", decide(1))
        for name in ("langchain_quota_1.tables", "langchain_quota_1.lock"):
            (office.directory / name).mkdir()
        assert of(office.scrape(worker), USED) == {("boss", "search", "t1"): 1}
        assert len(office.errors) == 1
        office.errors.clear()

    def test_a_directory_that_is_gone(self, office: Office) -> None:
        """Where nothing can be written that is told, and tried again; the own table is shown."""
        desk, worker = office.worker()
        worker._directory = office.directory / "gone"
        worker._path = worker._directory / "langchain_quota_1"
        desk.record("t1", decide(1))
        worker.flush()
        assert {type(error) for error in office.errors} == {FileNotFoundError}
        assert worker._news.is_set()
        assert of(office.scrape(worker), USED) == {("boss", "search", "t1"): 1}
        office.errors.clear()

    def test_what_breaks_merging_leaves_the_own_table(
        self, office: Office, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If merging fails as a whole, a scrape tells what the worker itself knows."""

        def fail(*_: object) -> Iterator[Metric]:
            raise LookupError("no such thing")

        monkeypatch.setattr(multiprocess, "merge", fail)
        desk, worker = office.worker()
        desk.record("t1", decide(1))
        assert of(office.scrape(worker), USED) == {("boss", "search", "t1"): 1}
        [error] = office.errors
        assert isinstance(error, LookupError)
        office.errors.clear()

    def test_a_new_beginning_after_a_fork(self, office: Office) -> None:
        """What a forked process inherits is its parent's: the child has empty tables of its own."""
        desk, worker = office.worker()
        desk.record("t1", decide(1, 10, "search", quota(1, subject="ada")))
        worker.flush()
        name = worker._path.name
        worker.begin_anew()
        assert worker._path.name != name
        assert of(office.scrape(worker), USED) == {}
        desk.record("t2", decide(2))
        worker.flush()
        assert of(office.scrape(worker), USED) == {("boss", "search", "t2"): 2}


def _raise(error: Exception) -> None:
    raise error


class TestWithout:
    """A process whose prometheus_client is not in multi-process mode: this one."""

    def test_the_mode_is_that_of_prometheus_client(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The variable changes nothing after the import of prometheus_client, there nor here."""
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
        assert multiprocess.multiprocess_directory() is None
        registry, before = CollectorRegistry(), set(threading.enumerate())
        telemetry = Telemetry(registry=registry)
        telemetry.emit([decide(1)], started=0)
        assert worker_of(registry) is None
        assert set(threading.enumerate()) == before
        assert list(tmp_path.iterdir()) == []


class TestWorkerTables:
    """WorkerTables: what is served for a registry."""

    def test_with_telemetry_of_its_own(
        self, office: Office, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the registry's telemetry knows is merged with the others', by its settings."""
        monkeypatch.setattr(multiprocess, "multiprocess_directory", lambda: office.directory)
        registry = CollectorRegistry()
        tables = WorkerTables(registry, office.directory)
        desk, worker = office.worker()
        for thread in ("t1", "t2"):
            desk.record(thread, decide(1))
        worker.flush()
        assert len(of(series_of(tables.collect()), LAST)) == 2
        telemetry = Telemetry(registry=registry, max_exported_threads=1)
        office.closing.callback(multiprocess._workers[registry].close)
        call = Call("tool", "search", agent="boss", thread_id="t3")
        telemetry.emit([replace(decide(9), call=call)], started=0)
        assert of(series_of(tables.collect()), LAST).keys() == {("boss", "t3")}

    def test_its_errors_are_counted(self, office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
        """What cannot be read is in langchain_quota_errors_total."""
        monkeypatch.setattr(multiprocess, "multiprocess_directory", lambda: office.directory)
        registry = CollectorRegistry()
        Telemetry(registry=registry)
        (office.directory / "langchain_quota_1.tables").write_text("nonsense")
        series_of(WorkerTables(registry, office.directory).collect())
        labels = {"component": "threads", "error_type": "FileNotFoundError"}
        assert registry.get_sample_value("langchain_quota_errors_total", labels) == 1

    def test_without_telemetry_of_its_own(
        self, office: Office, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A process that has judged nothing tells what others know; what fails is logged."""
        tables = WorkerTables(CollectorRegistry(), office.directory)
        assert list(tables.collect()) == []
        desk, worker = office.worker()
        desk.record("t1", decide(1))
        worker.flush()
        (office.directory / "langchain_quota_1.tables").write_text("nonsense")
        assert of(series_of(tables.collect()), USED) == {("boss", "search", "t1"): 1}
        [record] = caplog.records
        assert record.levelname == "ERROR"

    def test_describing_reads_no_file(self, office: Office) -> None:
        """Registering it reads nothing."""
        (office.directory / "langchain_quota_1.tables").write_text("nonsense")
        registry = CollectorRegistry(auto_describe=True)
        registry.register(WorkerTables(registry, office.directory))
        assert office.errors == []

    def test_others_are_read_in_order(self, office: Office) -> None:
        """All living workers are read, but the one that asks."""
        made = [office.worker() for _ in range(3)]
        for number, (desk, worker) in enumerate(made):
            desk.record(f"t{number}", decide(1))
            worker.flush()
        own = made[0][1]._path.name
        told = read_others(office.directory, office.errors.append, own=own)
        assert {key for each in told for key in each.threads} == {'["boss","t1"]', '["boss","t2"]'}
