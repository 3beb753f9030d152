"""How the usage table becomes metrics: its subjects are rated by use, and rendered."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from langchain_quota.limits.call import THREAD
from langchain_quota.runtime.units import Level, in_base_unit, level
from langchain_quota.telemetry import names
from langchain_quota.telemetry.labels import limit_label
from langchain_quota.telemetry.reading import Row, Series, current_numbers
from langchain_quota.telemetry.workers import Number, Subject, Use

UseCount = tuple[str, Use, Number | None, Level | None]
"""A limit, its use, the number with the highest used share, and the level of an enforced limit."""

SortKey = tuple[int, float, float]

Rated = tuple[SortKey, Subject, list[UseCount]]
"""The sort key of a subject for the export, the subject, and its counts."""

_METRICS = {
    True: (names.THREAD_USED, names.THREAD_LIMIT, names.THREAD_TIMES, names.THREAD_BLOCKED),
    False: (names.SUBJECT_USED, names.SUBJECT_LIMIT, names.SUBJECT_TIMES, names.SUBJECT_BLOCKED),
}
"""The metrics of use, limit, times and refusals, for threads (`True`) and other subjects."""


class Families(dict[str, Metric]):
    """The families of the table, by name, with their samples."""

    def __init__(self) -> None:
        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        super().__init__(
            (spec.name, kinds[spec.kind](spec.name, spec.help, labels=spec.labels))
            for spec in names.METRICS
            if spec.is_of_table
        )

    def add(self, spec: names.MetricSpec, labels: dict[str, str], value: float) -> None:
        """Add a sample."""
        # The metrics of a thread share a dict of labels. `add_metric` would copy it for each.
        self[spec.name].samples.append(Sample(spec.name, labels, value))

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Add the samples of rows."""
        for row in rows:
            is_thread = row.scope == THREAD
            for limit, (use, number, _, blocked) in row.counts.items():
                labels = {"agent": row.agent, "limit": limit_label(limit)}
                if is_thread:
                    labels["thread_id"] = row.label
                    self._add_thread(use, labels)
                else:
                    labels |= {"scope": row.scope, "subject": row.label}
                used_specs, limit_specs, times, blocked_spec = _METRICS[is_thread]
                if number is not None:
                    used, maximum, ends, _ = number
                    self.add(used_specs[use.unit], labels, in_base_unit(used, use.unit))
                    self.add(limit_specs[use.unit], labels, in_base_unit(maximum, use.unit))
                    self._add_time(times, labels, "reset", ends)
                if number is not None or is_thread:
                    self._add_time(times, labels, "decision", use.decided)
                if blocked:
                    self.add(blocked_spec, labels, blocked)

    def _add_thread(self, use: Use, labels: dict[str, str]) -> None:
        """Add the samples that only threads have."""
        self._add_time(names.THREAD_TIMES, labels, "refusal", use.refused)
        # Export from 0 on, because `increase()` does not see the first value of a series.
        if use.unit != "calls":
            self.add(names.THREAD_SPENT[use.unit], labels, in_base_unit(use.spent, use.unit))

    def _add_time(
        self, spec: names.MetricSpec, labels: dict[str, str], event: str, when: float | None
    ) -> None:
        # Round to milliseconds, because a tenth of what a scrape transfers is times.
        if when:
            self.add(spec, {**labels, "event": event}, round(when, 3))


def _highest(numbers: Sequence[Number], now: float, *, is_thread: bool) -> Number | None:
    """Return the number with the highest used share; an ended window of a thread has used 0."""
    if len(numbers) == 1 and numbers[0][2] is None:
        return numbers[0] if numbers[0][1] else None
    running = current_numbers(numbers, now, is_thread=is_thread)
    return max(running, key=lambda number: number[0] / number[1], default=None)


STATES: dict[int, str] = {2: Level.NEAR, 1: Level.EXHAUSTED}
"""The states of subjects, by the first part of their sort key."""


def rate(subject: Subject, now: float) -> tuple[SortKey, float, list[UseCount]]:
    """Return a subject's sort key, its last refusal, and its counts.

    Near subjects come first, then exhausted ones.
    """
    is_thread = subject.key[1] == THREAD
    counts: list[UseCount] = []
    highest = refused = 0.0
    # Copy, because a concurrent decision may add a limit.
    for limit, use in list(subject.uses.items()):
        number = _highest(use.numbers, now, is_thread=is_thread)
        reached = None
        if number is not None and use.near is not None:
            reached = level(number[0], number[1], use.near)
            # It fails here if a limit is too large for a metric, not where samples are rendered.
            highest = max(highest, number[0] / float(number[1]))
        refused = max(refused, use.refused or 0.0)
        counts.append((limit, use, number, reached))
    reached_levels = {reached for _, _, _, reached in counts}
    if Level.EXHAUSTED in reached_levels:
        return (1, refused, subject.last), refused, counts
    if Level.NEAR in reached_levels:
        return (2, highest, subject.last), refused, counts
    return (0, subject.last, subject.last), refused, counts


def levels(subject: Subject, counts: list[UseCount]) -> list[Series]:
    """Return the agent's label, the limit, the scope and the level, for each limit with a level."""
    agent, scope, _ = subject.key
    return [(agent, limit, scope, reached) for limit, _, _, reached in counts if reached]
