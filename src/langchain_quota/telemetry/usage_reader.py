"""What a scrape exports of the database of usage."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from langchain_quota.stores import Occupancy
from langchain_quota.telemetry import names
from langchain_quota.telemetry.database import LEVELS, Parts, UsageDatabase
from langchain_quota.telemetry.labels import label
from langchain_quota.telemetry.names import MetricSpec
from langchain_quota.telemetry.stores import fullest

Families = dict[MetricSpec, GaugeMetricFamily | CounterMetricFamily]
_CHOSEN = (
    "SELECT id, agent, name, decided, level FROM subject WHERE (scope = 'thread') = 1 AND level = ?"
)

OnError = Callable[[Exception], None]


def families() -> Families:
    """The families, without samples."""
    specs = (
        names.THREAD_USED,
        names.THREAD_LIMIT,
        names.THREAD_BLOCKED,
        names.THREAD_SEEN,
        names.SUBJECTS,
        names.THREADS_HIDDEN,
        names.STORE_KEYS,
        names.STORE_MAX_KEYS,
    )
    made = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    return {spec: made[spec.kind](spec.name, spec.help, labels=spec.labels) for spec in specs}


def read(database: UsageDatabase, found: Families, *, max_exported: int, on_error: OnError) -> None:
    """Add what is known to the families, with the series of so many threads at most."""
    hidden = dict.fromkeys(LEVELS, 0)
    query = "SELECT level, count(*) FROM subject WHERE scope = 'thread' GROUP BY level"
    for rated, count in database.execute(query):
        hidden[LEVELS[rated]] += count
    query = "SELECT id, agent, lim, scope FROM series"
    series = {number: tuple(labels) for number, *labels in database.execute(query)}
    limits = {number: label(limit) for number, (_, limit, _) in series.items()}
    for subject, agent, thread, decided, rated in _chosen(database, max_exported):
        try:
            samples = list(_samples(database.uses(subject), limits, agent, thread))
        except Exception as error:
            on_error(error)
            continue
        hidden[LEVELS[rated]] -= 1
        found[names.THREAD_SEEN].add_metric([agent, thread], decided)
        for metric, labels, value in samples:
            found[metric].add_metric(labels, value)
    for number, counts in _counts(database).items():
        agent, _, scope = series[number]
        for rated, each in enumerate(LEVELS):
            labels = [agent, limits[number], scope, each]
            found[names.SUBJECTS].add_metric(labels, counts.get(rated, 0))
    for each, count in hidden.items():
        found[names.THREADS_HIDDEN].add_metric([each], count)
    query = "SELECT keys, droppable, max_keys FROM store"
    store = fullest(Occupancy(*row) for row in database.execute(query))
    if store is not None:
        found[names.STORE_KEYS].add_metric(["true"], store.droppable)
        found[names.STORE_KEYS].add_metric(["false"], store.keys - store.droppable)
        found[names.STORE_MAX_KEYS].add_metric([], store.max_keys)


def _chosen(database: UsageDatabase, max_exported: int) -> list[tuple[int, str, str, float, int]]:
    """The threads that are exported: near ones by share, then the others by their places."""
    chosen: list[tuple[int, str, str, float, int]] = []
    for rated, place in ((1, "share"), (2, "since"), (0, "since")):
        chosen += database.execute(
            f"{_CHOSEN} ORDER BY {place} DESC, decided DESC, id DESC LIMIT ?",
            (rated, max_exported - len(chosen)),
        ).fetchall()
    return chosen


def _samples(
    uses: Mapping[int, Parts], limits: Mapping[int, str], agent: str, thread: str
) -> Iterator[tuple[MetricSpec, list[str], float]]:
    """What is exported of the limits of a thread."""
    for series, parts in uses.items():
        labels = [agent, limits[series], thread]
        limited = [(use.used, use.cap) for use in parts.values() if use.cap is not None]
        if limited:
            used, cap = max(limited, key=lambda each: each[0] / each[1])
            yield names.THREAD_USED, labels, float(used)
            yield names.THREAD_LIMIT, labels, float(cap)
        yield names.THREAD_BLOCKED, labels, float(parts[""].blocked)


def _counts(database: UsageDatabase) -> dict[int, dict[int, int]]:
    """How many subjects have used how much, by the number of the series."""
    query = "SELECT id FROM series WHERE is_shown"
    counts: dict[int, dict[int, int]] = {series: {} for (series,) in database.execute(query)}
    query = "SELECT series, level, count(*) FROM usage WHERE level IS NOT NULL GROUP BY 1, 2"
    for series, rated, count in database.execute(query):
        counts[series][rated] = count
    return counts
