"""How much the overview asks of Prometheus, with many replicas of 500 threads and 5 limits.

The suite does with three replicas. With twenty, and the time that a refresh takes:
`REPLICAS=20 pytest -s tests/servers/test_dashboard_size.py`.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import pytest

from tests.grafana import ALL, Board, Query, Values, boards, interpolate
from tests.servers.conftest import StartPrometheus
from tests.servers.prometheus import Prometheus, series_in
from tests.servers.remote_write import Labels, Points, write

REPLICAS, THREADS, LIMITS = int(os.environ.get("REPLICAS", "3")), 500, 5
SCRAPES, INTERVAL = 8, 15
REFUSED = 10
"""Of so many threads one has been refused calls."""
SHARED = 10
"""Of so many threads one is served by two replicas."""
OLD, OLD_INTERVAL = 12, 240
"""How many scrapes there are before the last ones. Prometheus takes none older than an hour."""
USERS = 50
"""Each replica knows so many users of a quota that is listed by user."""
MAX_BYTES = 1_000_000
TOP = 100
REFRESHES = 1 if REPLICAS < 20 else 3

AT_ONCE = 6
"""How many queries a browser has under way."""
RANGE = 3 * 3600
SPAN: Values = {"__range": f"{RANGE}s", "__range_s": str(RANGE), "__rate_interval": "60s"}
BAR = 120
"""How long a bar is if a hundred of them fill the range."""
WIDTH = 600
"""How many points a panel draws."""


@dataclass(frozen=True)
class Scrapes:
    """The times of some scrapes, and what they find."""

    times: Sequence[float]

    @classmethod
    def until(cls, now: float, *, old: int) -> Self:
        """The last ones, and some long before them."""
        last = [now - INTERVAL * each for each in reversed(range(SCRAPES))]
        return cls([last[0] - OLD_INTERVAL * each for each in range(old, 0, -1)] + last)

    def points(self, *values: float) -> Points:
        """A value for each scrape, or one for all."""
        every = values if len(values) > 1 else values * len(self.times)
        return tuple(zip(self.times, every, strict=True))

    def ago(self, seconds: float) -> Points:
        """A time that is always so long ago."""
        return self.points(*[each - seconds for each in self.times])

    @property
    def counted(self) -> Points:
        """A counter that grows by one."""
        return self.points(*range(len(self.times)))

    def replica(self, here: Labels) -> Iterator[tuple[Labels, Points]]:
        """What they find of a process."""
        start = self.points(self.times[-1] - 7200)
        yield {**here, "__name__": "langchain_quota_start_time_seconds"}, start
        yield {**here, "__name__": "langchain_quota_build_info", "version": "1"}, self.points(1)
        for state in ("ok", "near", "exhausted"):
            name = "langchain_quota_threads_hidden"
            yield {**here, "__name__": name, "state": state}, self.points(0)
        for kind in ("model", "tool"):
            for decision in ("allowed", "blocked"):
                of_agent = {**here, "agent": "support", "kind": kind, "decision": decision}
                for name in (
                    "langchain_quota_calls_total",
                    "langchain_quota_calls_after_refusal_total",
                ):
                    tool = {"tool": kind} if name.endswith("calls_total") else {}
                    yield {**of_agent, **tool, "__name__": name}, self.counted
        yield {**here, "__name__": "langchain_quota_runs_total", "agent": "support"}, self.counted

    def limit(self, limit: Labels) -> Iterator[tuple[Labels, Points]]:
        """What they find of a limit of a process."""
        yield {**limit, "__name__": "langchain_quota_limit_near_ratio"}, self.points(0.8)
        yield {**limit, "__name__": "langchain_quota_limit_alert"}, self.points(1)
        yield {**limit, "__name__": "langchain_quota_runs_ended_total"}, self.counted
        for scope in ("global", "user_id"):
            for number in range(USERS if scope == "user_id" else 1):
                subject = f"user-{number:03}" if scope == "user_id" else ""
                of_subject = {**limit, "scope": scope, "subject": subject}
                for metric, points in (
                    ("used", self.counted),
                    ("limit", self.points(100)),
                    ("last_decision_timestamp_seconds", self.ago(number)),
                    ("reset_timestamp_seconds", self.points(self.times[-1] + 600)),
                ):
                    yield {**of_subject, "__name__": f"langchain_quota_subject_{metric}"}, points
        for scope in ("thread", "run"):
            of_scope = {**limit, "scope": scope}
            yield {**of_scope, "__name__": "langchain_quota_limit"}, self.points(100)
            for state in ("ok", "near", "exhausted"):
                name = "langchain_quota_subjects"
                yield {**of_scope, "__name__": name, "state": state}, self.points(7)
            for metric in ("near_limit_total", "exhausted_total"):
                yield {**of_scope, "__name__": f"langchain_quota_{metric}"}, self.counted
            for decision in ("blocked", "would_block"):
                name = "langchain_quota_limit_decisions_total"
                yield {**of_scope, "__name__": name, "decision": decision}, self.counted

    def thread(self, share: int, *, refused: bool) -> Iterator[tuple[str, Points]]:
        """What they find of a thread's use of a limit, by the ends of the metrics' names."""
        most = len(self.times)
        yield "used", self.points(*[share * number // most for number in range(1, most + 1)])
        yield "limit", self.points(100)
        yield "last_decision_timestamp_seconds", self.ago(share)
        if refused:
            yield "blocked_total", self.counted
            yield "last_refusal_timestamp_seconds", self.ago(share)
            yield "refused_since_timestamp_seconds", self.ago(300)


def series(now: float) -> Iterator[tuple[Labels, Points]]:
    """What the scrapes of all replicas find."""
    scrapes, few = Scrapes.until(now, old=OLD), Scrapes.until(now, old=0)
    threads = {
        # Those that are refused have been there for long.
        (share, refused): list((scrapes if refused else few).thread(share, refused=refused))
        for share in range(101)
        for refused in (True, False)
    }
    for replica in range(REPLICAS):
        here = {"job": "agents", "instance": f"10.0.0.{replica}:9464"}
        yield from scrapes.replica(here)
        for number in range(LIMITS):
            limit = {**here, "agent": "support", "limit": f"tool:tool-{number}"}
            yield from scrapes.limit(limit)
            for thread in range(THREADS):
                home = replica - replica % 2 if thread % SHARED == 1 else replica
                of_thread = {**limit, "thread_id": f"conversation-{home:03}-{thread:04}"}
                share = (thread * 7 + number * 13) % 101
                for metric, points in threads[share, thread % REFUSED == 0]:
                    yield {**of_thread, "__name__": f"langchain_quota_thread_{metric}"}, points


@dataclass(frozen=True)
class Fleet:
    """A Prometheus that knows many replicas, and when they were scraped last."""

    prometheus: Prometheus
    now: float

    def chosen(self, values: Values) -> Values:
        """The values of the variables that a query finds."""
        found: dict[str, list[str]] = {}
        for variable in overview().variables:
            if variable.expr:
                expr = interpolate(variable.expr, {**values, **SPAN})
                result = self.prometheus.result("query", query=expr, time=self.now)
                found[variable.name] = [each["metric"][variable.label] for each in result]
        return {**values, **found}

    def ask(self, values: Values, query: Query) -> bytes:
        """The answer to a query, as Grafana would ask it."""
        step = BAR if "__interval_ms" in query.expr else RANGE // WIDTH
        expr = interpolate(query.expr, {**values, **SPAN, "__interval_ms": str(step * 1000)})
        if not query.over_time:
            return self.prometheus.answer("query", query=expr, time=self.now)
        times = {"start": self.now - RANGE, "end": self.now, "step": step}
        return self.prometheus.answer("query_range", query=expr, **times)

    def refresh(self) -> dict[str, bytes]:
        """The answers to all queries, asked as soon as their variables are known."""
        everything: Values = dict.fromkeys(("job", "instance", "agent", "limit"), ALL)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            chosen = pool.submit(self.chosen, everything)
            first = {
                query.where: pool.submit(self.ask, everything, query)
                for query in overview().queries
                if ":regex}" not in query.expr
            }
            then = {
                query.where: pool.submit(self.ask, chosen.result(), query)
                for query in overview().queries
                if query.where not in first
            }
            return {where: answer.result() for where, answer in {**first, **then}.items()}


def overview() -> Board:
    """The dashboard with the tables."""
    [found] = [board for board in boards() if board.uid == "langchain-quota-overview"]
    return found


@pytest.fixture(scope="module")
def fleet(start_prometheus: StartPrometheus) -> Fleet:
    """What a scrape finds of the replicas, and what a few scrapes before it found."""
    now = time.time() // INTERVAL * INTERVAL
    prometheus = start_prometheus({})
    write(prometheus.url, series(now))
    return Fleet(prometheus, now)


def test_a_refresh_is_small(fleet: Fleet) -> None:
    """All queries of a refresh together answer less than a megabyte, with few rows each."""
    [counted] = fleet.prometheus.result(
        "query", query="count(langchain_quota_thread_used)", time=fleet.now
    )
    assert int(counted["value"][1]) == REPLICAS * THREADS * LIMITS
    seconds = []
    for _ in range(REFRESHES):
        began = time.monotonic()
        answers = fleet.refresh()
        seconds.append(time.monotonic() - began)
    size = sum(map(len, answers.values()))
    sys.stdout.write(
        f"\n{len(answers)} queries, {size / 1000:.0f} kB; seconds: "
        f"{', '.join(f'{each:.2f}' for each in sorted(seconds))}\n"
    )
    rows = {where: len(series_in(each)) for where, each in answers.items()}
    assert rows["langchain-quota-overview 23 A"] == TOP
    # The threads are chosen, and each comes with all of its limits.
    assert TOP < rows["langchain-quota-overview 6 B"] <= TOP * LIMITS
    few = {where: count for where, count in rows.items() if " 6 " not in where}
    assert max(few.values()) <= TOP
    assert size < MAX_BYTES
