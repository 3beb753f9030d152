"""What the dashboards' queries say of a past that is known to the last call.

The past is written into a real Prometheus as scrapes would have left it, at several intervals.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from tests.grafana import ALL, Query, Values, boards, interpolate
from tests.servers.conftest import StartPrometheus
from tests.servers.prometheus import Prometheus
from tests.servers.remote_write import Labels, Points, write

OVERVIEW = "langchain-quota-overview"

HOUR = 3600
SCRAPES = (5, 15, 60)
STEPS = (5, 15, 60, 600)
ANYTHING: Values = dict.fromkeys(("job", "instance", "agent", "limit"), ALL)


@dataclass(frozen=True)
class Life:
    """A process that refuses calls; all times are seconds after the beginning.

    Attributes:
        instance: The target that is scraped.
        began: When it began.
        ends: When it ends.
        refusals: When it refuses a call, by the limit.
        lost: From when to when its target cannot be scraped.
    """

    instance: str
    began: float
    ends: float
    refusals: dict[str, Sequence[float]] = field(default_factory=dict)
    lost: tuple[float, float] = (0, 0)

    def counted(self, limit: str, at: float) -> int:
        """How many calls the limit has refused."""
        return sum(each <= at for each in self.refusals.get(limit, ()))

    def scraped(self, at: float) -> bool:
        """Whether a scrape finds it."""
        return self.began <= at <= self.ends and not self.lost[0] <= at <= self.lost[1]


LIVES = [
    # Refuses before it is scraped for the first time; another process takes its place.
    Life("a", 101, 1501, {"search": range(102, 1490, 7)}),
    Life("a", 1502, HOUR, {"search": range(1600, 3400, 31)}),
    # Is lost for ten minutes; a limit refuses for the first time late, five times at once.
    Life("b", 60, HOUR, {"search": range(70, 3500, 11), "model": [2001] * 5}, lost=(901, 1499)),
    # Has been at work for long when it is scraped for the first time.
    Life("c", -9000, HOUR, {"search": range(-9000, 3000, 13)}, lost=(-9000, 1196)),
    # Goes, and does not come back.
    Life("d", 1000, 2534, {"search": range(1000, 2400, 5)}),
    # The next process never refuses for the model, and is lost for a moment, later or at once.
    Life("e", 300, 900, {"search": range(310, 890, 20), "model": [400, 500]}),
    Life("e", 903, HOUR, {"search": range(950, 3400, 40)}, lost=(1150, 1250)),
    Life("f", 10, 1990, {"search": range(20, 1980, 15), "model": [100] * 5 + [1900] * 2}),
    Life("f", 1993, HOUR, {"search": range(2000, 3400, 45)}, lost=(2390, 2410)),
    # Refuses for the model just before another process takes its place.
    Life("g", 10, 1990, {"search": range(20, 1980, 15), "model": [1950] * 3}),
    Life("g", 1993, HOUR, {"search": range(2000, 3400, 45)}),
]


def labels_of(name: str, job: str, instance: str, **labels: str) -> Labels:
    return {"__name__": name, "job": job, "instance": instance, **labels}


def scraped(lives: Sequence[Life], began: float, interval: int) -> Iterator[tuple[Labels, Points]]:
    """What scrapes at an interval leave of processes."""
    job = f"every-{interval}"
    times = range(0, HOUR + 1, interval)
    for instance in sorted({life.instance for life in lives}):
        here = [life for life in lives if life.instance == instance]
        found = [(at, next((life for life in here if life.scraped(at)), None)) for at in times]
        yield (
            labels_of("langchain_quota_start_time_seconds", job, instance),
            tuple((began + at, None if life is None else began + life.began) for at, life in found),
        )
        for limit in sorted({limit for life in here for limit in life.refusals}):
            yield (
                labels_of(
                    "langchain_quota_limit_decisions_total",
                    job,
                    instance,
                    agent="boss",
                    limit=limit,
                    scope="run",
                    decision="blocked",
                ),
                tuple(
                    # Exported from the first refusal on.
                    (began + at, (life and life.counted(limit, at)) or None)
                    for at, life in found
                ),
            )


def truth(limit: str, interval: int) -> int:
    """How many refusals scrapes at an interval can know of."""
    known = 0
    for life in LIVES:
        if limit in life.refusals:
            seen = [at for at in range(0, HOUR + 1, interval) if life.scraped(at)]
            # Of a process that has been at work for long nobody knows when it refused what.
            before = life.counted(limit, seen[0]) if life.began < 0 else 0
            known += life.counted(limit, seen[-1]) - before
    return known


@pytest.fixture(scope="module")
def began() -> float:
    """When the past begins."""
    return (time.time() // 600) * 600 - HOUR


@pytest.fixture(scope="module")
def prometheus(start_prometheus: StartPrometheus, began: float) -> Prometheus:
    """A Prometheus that knows the past."""
    found = start_prometheus({})
    write(found.url, (each for every in SCRAPES for each in scraped(LIVES, began, every)))
    return found


def query(where: str) -> Query:
    """A query of a dashboard."""
    [found] = [each for board in boards() for each in board.queries if each.where == where]
    return found


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("interval", SCRAPES)
def test_bars_add_up(prometheus: Prometheus, began: float, interval: int, step: int) -> None:
    """The bars are the truth: with restarts, first and late refusals, lost and new targets."""
    values = {**ANYTHING, "job": [f"every-{interval}"], "__interval_ms": str(step * 1000)}
    expr = interpolate(query(f"{OVERVIEW} 9 A").expr, values)
    parameters = {"start": began - step, "end": began + HOUR, "step": step}
    found = prometheus.result("query_range", query=expr, **parameters)
    drawn = {
        series["metric"]["limit"]: sum(float(value) for _, value in series["values"])
        for series in found
    }
    assert drawn == {limit: truth(limit, interval) for limit in ("search", "model")}


@pytest.mark.parametrize("interval", SCRAPES)
def test_totals_of_a_range(prometheus: Prometheus, began: float, interval: int) -> None:
    """The number of refusals is the truth, less what increase() has to guess: two in a hundred."""
    values = {**ANYTHING, "job": [f"every-{interval}"], "__range": "3700s", "__range_s": "3700"}
    expr = interpolate(query(f"{OVERVIEW} 1 A").expr, values)
    [found] = prometheus.result("query", query=expr, time=began + HOUR)
    known = sum(truth(limit, interval) for limit in ("search", "model"))
    assert float(found["value"][1]) == pytest.approx(known, rel=0.02)


NOW = "now"
"""The job whose processes have just been scraped."""
LAST_SCRAPES = (45, 30, 15, 0)
"""How many seconds ago they were."""
GONE = (1845, 1830, 1815, 1800)
"""The same for a process that has ended."""


@dataclass(frozen=True)
class Use:
    """What a process says of a thread and a limit.

    Attributes:
        instance: The process.
        thread: The thread.
        limit: The limit.
        used: How many calls are used.
        allowed: How many may be used.
        decided: How many seconds ago it decided last.
        refused: How many seconds ago it last refused a call, if it did.
        since: For how long it has refused all.
    """

    instance: str
    thread: str
    limit: str
    used: int
    allowed: int
    decided: int
    refused: int | None = None
    since: int | None = None

    def metrics(self, now: float) -> dict[str, float]:
        """What it exports, by the ends of the metrics' names."""
        found: dict[str, float] = {"last_decision_timestamp_seconds": now - self.decided}
        if self.allowed:
            found |= {"used": self.used, "limit": self.allowed}
        if self.refused is not None:
            found["last_refusal_timestamp_seconds"] = now - self.refused
            found["blocked_total"] = 4
        if self.since is not None:
            found["refused_since_timestamp_seconds"] = now - self.since
        return found


USES = [
    # A judges three searches, B two more, then A only a call of the model.
    Use("a", "two replicas", "tool:search", 3, 5, decided=30),
    Use("b", "two replicas", "tool:search", 5, 5, decided=20),
    Use("a", "two replicas", "model", 1, 9, decided=10),
    # A saw it exhausted; then it was reset, which B knows.
    Use("a", "reset", "tool:search", 5, 5, decided=30, refused=31, since=40),
    Use("b", "reset", "tool:search", 0, 5, decided=20),
    # Two limits are used up, on two processes.
    Use("a", "twice", "tool:search", 5, 5, decided=20, refused=20, since=300),
    Use("b", "twice", "tool:search", 5, 5, decided=25),
    Use("a", "twice", "model", 9, 9, decided=20),
    # Nine tenths are near only where the limit says so.
    Use("a", "near", "tool:fetch", 9, 10, decided=20),
    Use("a", "not near", "tool:other", 9, 10, decided=20),
    # A limit of runs refuses; it has no use of a thread.
    Use("b", "run", "tool:run", 0, 0, decided=5, refused=5, since=200),
    # The last scrape of this process failed.
    Use("c", "lost", "tool:search", 5, 5, decided=20),
    # This process ended half an hour ago.
    Use("d", "gone", "tool:search", 5, 5, decided=1810, refused=1810, since=1900),
]
NEAR = {"tool:search": 0.8, "model": 0.8, "tool:fetch": 0.9, "tool:other": 0.95, "tool:run": 0.8}
HIDDEN = {"ok": 7, "near": 2, "exhausted": 3}


def processes(now: float) -> Iterator[tuple[Labels, Points]]:
    """What the last scrapes found of the processes of `USES`."""

    def points(instance: str, value: float) -> Points:
        scrapes = GONE if instance == "d" else LAST_SCRAPES
        failed = scrapes[-1] if instance in "cd" else None
        return tuple((now - ago, None if ago == failed else value) for ago in scrapes)

    for instance in "abcd":
        name = "langchain_quota_start_time_seconds"
        began = now - (1860 if instance == "d" else 60)
        yield labels_of(name, NOW, instance), points(instance, began)
        for limit, share in NEAR.items():
            name = "langchain_quota_limit_near_ratio"
            labels = labels_of(name, NOW, instance, agent="boss", limit=limit)
            yield labels, points(instance, share)
    for state, count in HIDDEN.items():
        name = "langchain_quota_threads_hidden"
        yield labels_of(name, NOW, "a", state=state), points("a", count)
    for use in USES:
        ids = {"agent": "boss", "limit": use.limit, "thread_id": use.thread}
        for metric, value in use.metrics(now).items():
            name = f"langchain_quota_thread_{metric}"
            yield labels_of(name, NOW, use.instance, **ids), points(use.instance, value)
    alert = {"alertname": "LangChainQuotaThreadKeepsHitting", "agent": "boss", "severity": "info"}
    for instance, state in (("x", "firing"), ("y", "pending")):
        labels = {**alert, "job": NOW, "thread_id": instance}
        yield {**labels, "__name__": "ALERTS", "alertstate": state}, points("a", 1)
        yield {**labels, "__name__": "ALERTS_FOR_STATE"}, points("a", now - 120)


@pytest.fixture(scope="module")
def now(prometheus: Prometheus) -> float:
    """When the processes were scraped last."""
    found = time.time()
    write(prometheus.url, processes(found))
    return found


def shown(prometheus: Prometheus, where: str, now: float) -> dict[tuple[str, ...], float]:
    """The values of a query, by thread or state, and limit, if there are such labels."""
    values: dict[str, str | list[str]] = {**ANYTHING, "job": [NOW], "__rate_interval": "60s"}
    [board] = [each for each in boards() if each.uid == OVERVIEW]
    for variable in board.variables:
        if variable.expr:
            found = prometheus.result("query", query=interpolate(variable.expr, values), time=now)
            values[variable.name] = [each["metric"]["thread_id"] for each in found]
    expr = interpolate(query(where).expr, values)
    return {
        tuple(
            each["metric"][label]
            for label in ("state", "thread_id", "limit")
            if label in each["metric"]
        ): float(each["value"][1])
        for each in prometheus.result("query", query=expr, time=now)
    }


def test_the_replica_that_decided_last_counts_for_each_limit(
    prometheus: Prometheus, now: float
) -> None:
    """Five of five are used, though another replica judged a call of another limit later."""
    used = shown(prometheus, f"{OVERVIEW} 6 C", now)
    assert used["two replicas", "tool:search"] == 5
    assert used["two replicas", "model"] == 1
    assert used["reset", "tool:search"] == 0


def test_the_share_from_which_a_limit_is_near_is_its_own(
    prometheus: Prometheus, now: float
) -> None:
    """Nine tenths are near with near=0.9, and are not with near=0.95."""
    states = shown(prometheus, f"{OVERVIEW} 6 A", now)
    assert states["near", "tool:fetch"] == 1
    assert states["not near", "tool:other"] == 0
    assert states["twice", "model"] == 2


def test_threads_are_counted_once(prometheus: Prometheus, now: float) -> None:
    """A thread counts once for all limits and replicas; a failed scrape takes none away."""
    exhausted = {"two replicas", "twice", "lost"}
    assert shown(prometheus, f"{OVERVIEW} 27 A", now) == {
        ("exhausted",): len(exhausted) + HIDDEN["exhausted"],
        ("near",): len({"near"}) + HIDDEN["near"],
    }


def test_who_is_refused(prometheus: Prometheus, now: float) -> None:
    """Refused threads are shown for all limits, also if their process is gone.

    `since` ends with the process, or once another replica admits a call.
    """
    last = shown(prometheus, f"{OVERVIEW} 23 B", now)
    assert {who: round((now * 1000 - at) / 1000) for who, at in last.items()} == {
        ("run", "tool:run"): 5,
        ("twice", "tool:search"): 20,
        ("reset", "tool:search"): 31,
        ("gone", "tool:search"): 1810,
    }
    assert shown(prometheus, f"{OVERVIEW} 23 A", now) == dict.fromkeys(last, 4)
    since = shown(prometheus, f"{OVERVIEW} 23 C", now)
    assert {who: round((now * 1000 - at) / 1000) for who, at in since.items()} == {
        ("run", "tool:run"): 200,
        ("twice", "tool:search"): 300,
    }


QUIET = "quiet"
"""The job with a limit that is meant to be hit."""
DECIDED = {("loud", "blocked"): 3, ("loud", "allowed"): 7, ("hit", "blocked"): 50}
"""What its limits decided: `hit` has alert=False."""


def quiet_limit(now: float) -> Iterator[tuple[Labels, Points]]:
    """What the last scrapes found of a process with such a limit."""

    def found(metric: str, value: float, **labels: str) -> tuple[Labels, Points]:
        times = tuple((now - ago, value) for ago in LAST_SCRAPES)
        return labels_of(f"langchain_quota_{metric}", QUIET, "a", **labels), times

    yield found("start_time_seconds", now - 60)
    for limit, alert in (("loud", 1), ("hit", 0)):
        yield found("limit_alert", alert, agent="boss", limit=limit)
    for (limit, decision), count in DECIDED.items():
        ids = {"agent": "boss", "limit": limit}
        yield found("limit_decisions_total", count, **ids, scope="run", decision=decision)
        if decision == "blocked":
            yield found("thread_blocked_total", count, **ids, thread_id="anna")


def test_a_limit_that_is_meant_to_be_hit_alarms_nobody(prometheus: Prometheus) -> None:
    """A limit with alert=False is not in the refused share, and not marked; it is counted."""
    now = time.time()
    write(prometheus.url, quiet_limit(now))
    values = {**ANYTHING, "job": [QUIET], "thread": "anna"}

    def asked(where: str) -> dict[str, float]:
        expr = interpolate(query(where).expr, values)
        return {
            each["metric"].get("limit", ""): float(each["value"][1])
            for each in prometheus.result("query", query=expr, time=now)
        }

    assert asked(f"{OVERVIEW} 2 A") == pytest.approx({"": 3 / 10})
    assert asked(f"{OVERVIEW} Breaches") == {"loud": 3}
    assert asked("langchain-quota-thread Breaches") == {"loud": 3}
    assert asked(f"{OVERVIEW} 1 A") == {"": 53}


FLEET = "fleet"
"""The job whose processes come and go."""


def test_which_processes_have_metrics(prometheus: Prometheus) -> None:
    """A process that lost its metrics differs from one that is gone, and from a restarted one."""
    now = time.time()

    def scraped(metric: str, instance: str, **labels: str) -> Labels:
        return labels_of(metric, FLEET, instance, **labels)

    here = tuple((now - ago, 1.0) for ago in LAST_SCRAPES)
    past = (*((now - ago, 1.0) for ago in GONE), (now - GONE[-1] + 15, None))
    build, tried = "langchain_quota_build_info", "scrape_duration_seconds"
    write(
        prometheus.url,
        [
            (scraped(build, "well", version="2"), here),
            (scraped(build, "well", version="1"), past),
            (scraped(build, "lost", version="1"), past),
            (scraped(build, "gone", version="1"), past),
            (scraped(tried, "well"), here),
            (scraped(tried, "lost"), here),
            (scraped(tried, "other"), here),
        ],
    )
    expr = interpolate(query(f"{OVERVIEW} 21 A").expr, {**ANYTHING, "job": [FLEET]})
    assert {
        (each["metric"]["instance"], each["metric"]["version"]): each["value"][1]
        for each in prometheus.result("query", query=expr, time=now)
    } == {("well", "2"): "0", ("gone", "1"): "1", ("lost", "1"): "2"}


def test_alerts_that_fire(prometheus: Prometheus, now: float) -> None:
    """Alerts that fire are shown with the time since when; pending ones are not."""
    [(who, since)] = shown(prometheus, f"{OVERVIEW} 24 A", now).items()
    assert who == ("x",)
    assert round(now - since / 1000) == 120
