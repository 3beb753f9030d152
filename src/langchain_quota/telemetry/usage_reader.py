"""Reads what a scrape exports from the database of usage."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from langchain_quota.stores import Occupancy
from langchain_quota.telemetry import names
from langchain_quota.telemetry.database import LEVELS, Parts, UsageDatabase
from langchain_quota.telemetry.labels import label
from langchain_quota.telemetry.names import MetricSpec
from langchain_quota.telemetry.stores import fullest
from langchain_quota.units import in_base_unit

Families = dict[MetricSpec, GaugeMetricFamily | CounterMetricFamily]
Sample = tuple[MetricSpec, float]
_THREADS = "SELECT id, agent, name, level FROM subject WHERE (scope = 'thread') = 1 AND level = ?"
_SUBJECTS = "SELECT id, agent, label, level FROM subject WHERE label > '' AND level = ?"
_BOUNDED = "SELECT id, agent, label, level FROM subject WHERE label = ''"

OnError = Callable[[Exception], None]


def families() -> Families:
    """The families, without samples."""
    specs = (
        *names.THREAD_USED.values(),
        *names.THREAD_LIMIT.values(),
        *names.THREAD_SPENT.values(),
        names.THREAD_BLOCKED,
        names.THREAD_DECIDED,
        names.THREAD_RESETS,
        names.THREAD_REFUSED,
        names.THREAD_REFUSED_SINCE,
        *names.SUBJECT_USED.values(),
        *names.SUBJECT_LIMIT.values(),
        names.SUBJECT_DECIDED,
        names.SUBJECT_RESETS,
        names.SUBJECTS,
        names.THREADS_HIDDEN,
        names.STORE_KEYS,
        names.STORE_MAX_KEYS,
        names.START_TIME,
    )
    made = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    return {spec: made[spec.kind](spec.name, spec.help, labels=spec.labels) for spec in specs}


def read(database: UsageDatabase, found: Families, *, on_error: OnError) -> None:
    """Add what is known to the families; the settings bound the number of threads."""
    settings = database.settings()
    found[names.START_TIME].add_metric([], settings["started"])
    hidden = dict.fromkeys(LEVELS, 0)
    query = "SELECT level, count(*) FROM subject WHERE scope = 'thread' GROUP BY level"
    for rated, count in database.execute(query):
        hidden[LEVELS[rated]] += count
    query = "SELECT id, agent, lim, scope FROM series"
    series = {number: tuple(labels) for number, *labels in database.execute(query)}
    limits = {number: label(limit) for number, (_, limit, _) in series.items()}
    for subject, agent, thread, rated in _chosen(database, _THREADS, settings["max_exported"]):
        try:
            samples = [
                (metric, [agent, limits[number], thread], value)
                for number, parts in database.uses(subject).items()
                for metric, value in _of_thread(parts)
            ]
        except Exception as error:
            on_error(error)
            continue
        hidden[LEVELS[rated]] -= 1
        for metric, labels, value in samples:
            found[metric].add_metric(labels, value)
    _read_subjects(database, found, settings["max_subjects"], series, limits)
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


def _read_subjects(
    database: UsageDatabase,
    found: Families,
    most: float,
    series: Mapping[int, tuple[str, ...]],
    limits: Mapping[int, str],
) -> None:
    """Add what subjects with labels have used of their quotas."""
    shown = set()
    bounded = database.execute(_BOUNDED).fetchall()
    for subject, agent, name, _ in (*bounded, *_chosen(database, _SUBJECTS, most)):
        for number, parts in database.uses(subject).items():
            labels = (agent, limits[number], series[number][2], name)
            use = parts[""]
            # The user's function may give two subjects the same label.
            if use.cap is None or labels in shown:
                continue
            shown.add(labels)
            unit = use.unit
            found[names.SUBJECT_USED[unit]].add_metric(labels, in_base_unit(use.used, unit))
            found[names.SUBJECT_LIMIT[unit]].add_metric(labels, in_base_unit(use.cap, unit))
            found[names.SUBJECT_DECIDED].add_metric(labels, use.decided)
            if use.resets_at is not None:
                found[names.SUBJECT_RESETS].add_metric(labels, use.resets_at)


def _chosen(database: UsageDatabase, query: str, most: float) -> list[tuple[int, str, str, int]]:
    """The subjects that are exported: near ones by share, then the others by their places."""
    chosen: list[tuple[int, str, str, int]] = []
    for rated, place in ((1, "share"), (2, "since"), (0, "since")):
        chosen += database.execute(
            f"{query} ORDER BY {place} DESC, decided DESC, id DESC LIMIT ?",
            (rated, int(most) - len(chosen)),
        ).fetchall()
    return chosen


def _of_thread(parts: Parts) -> Iterator[Sample]:
    """What is exported of a thread's use of a limit."""
    limited = [use for use in parts.values() if use.cap is not None]
    if limited:
        fullest = max(limited, key=lambda use: use.used / (use.cap or 1))
        unit = fullest.unit
        yield names.THREAD_USED[unit], in_base_unit(fullest.used, unit)
        yield names.THREAD_LIMIT[unit], in_base_unit(fullest.cap or 0, unit)
        if fullest.resets_at is not None:
            yield names.THREAD_RESETS, fullest.resets_at
    own = parts[""]
    if own.spent:
        yield names.THREAD_SPENT[own.unit], in_base_unit(own.spent, own.unit)
    if own.decided:
        yield names.THREAD_DECIDED, own.decided
    if own.blocked:
        yield names.THREAD_BLOCKED, float(own.blocked)
    if own.refused is not None:
        yield names.THREAD_REFUSED, own.refused
    if own.refused_since is not None:
        yield names.THREAD_REFUSED_SINCE, own.refused_since


def _counts(database: UsageDatabase) -> dict[int, dict[int, int]]:
    """How many subjects have used how much, by the number of the series."""
    query = "SELECT id FROM series WHERE is_shown"
    counts: dict[int, dict[int, int]] = {series: {} for (series,) in database.execute(query)}
    query = "SELECT series, level, count(*) FROM usage WHERE level IS NOT NULL GROUP BY 1, 2"
    for series, rated, count in database.execute(query):
        counts[series][rated] = count
    return counts
