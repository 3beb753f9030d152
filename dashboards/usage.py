"""What threads, and the subjects of shared quotas, have used of their limits.

Several replicas may serve one thread. They do not add up, and the highest is not the right one:
usage falls when a window ends or a thread is reset. So for each thread and limit the replica counts
that decided last.

All values are the last ones of a short time: one scrape that fails takes no thread away.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dashboards import settings
from dashboards.queries import AGENT, LIMIT, select
from langchain_quota.telemetry import names
from langchain_quota.telemetry.names import MetricSpec

_OF_LIMIT = "on (job, instance, agent, limit) group_left ()"


@dataclass(frozen=True, slots=True)
class Usage:
    """Expressions over the use of limits, one value for each user and limit.

    Attributes:
        who: The labels that say whose use it is.
        metrics: What is used, what may be used, when that was last decided, when it is reset.
        only: Matchers that narrow it.
    """

    who: str
    metrics: tuple[MetricSpec, MetricSpec, MetricSpec, MetricSpec]
    only: Sequence[str] = ()

    @property
    def by(self) -> str:
        """The labels of each value."""
        return f"job, agent, limit, {self.who}"

    def freshest(self, expression: str) -> str:
        """Of what several replicas say, that which was decided last."""
        return f"max by ({self.by}) (({expression}) and {self.decided_last})"

    @property
    def decided(self) -> str:
        """When it was last decided."""
        return f"max by ({self.by}) ({self._now(2)})"

    @property
    def used(self) -> str:
        """Calls used."""
        return self._now(0)

    @property
    def limit(self) -> str:
        """Calls allowed."""
        return self._now(1)

    @property
    def share(self) -> str:
        """The used share. A limit of 0 has no series, so nothing is divided by it."""
        return f"{self.used} / {self.limit}"

    @property
    def rank(self) -> str:
        """The share of what has calls left; 0 for what has none."""
        return f"clamp_max({self.share}, 1) % 1"

    @property
    def remaining(self) -> str:
        """Calls left."""
        return f"clamp_min({self.limit} - {self.used}, 0)"

    @property
    def state(self) -> str:
        """0 with calls left, 1 near the limit, 2 exhausted."""
        near = f"({self.share} >= bool {_OF_LIMIT} {_near()})"
        return f"{near} + ({self.share} >= bool 1)"

    @property
    def seconds_left(self) -> str:
        """Seconds until the limit is used up, for those who are using it at this moment."""
        used = self._select(0)
        pace = f"deriv({used}[{settings.PACE_WINDOW}]) > 0"
        active = f"delta({used}[{settings.ACTIVE_WINDOW}]) > 0"
        return f"({self.limit} - {self.used} > 0) / ({pace}) and {active}"

    @property
    def predicted(self) -> str:
        """Calls that will be used if it goes on like this, up to the limit."""
        used = self._select(0)
        line = f"predict_linear({used}[{settings.PACE_WINDOW}], {settings.PREDICTED_SECONDS})"
        later = f"clamp_min({line}, 0)"
        return f"{later} < {self.limit} or {self.limit} and {later}"

    @property
    def resets(self) -> str:
        """When the window ends, in milliseconds."""
        return f"({self._now(3)} > time()) * 1000"

    @property
    def nearest(self) -> str:
        """Who is nearest to a limit: of several replicas, by what each says.

        It stands in a variable, in which Grafana knows no $__rate_interval.
        """
        return f"topk({settings.TOP}, {self._select(0)} / {self._select(1)} % 1)"

    def top(self, expression: str) -> str:
        """Of those who are nearest to a limit only."""
        nearest = f"topk({settings.TOP}, {self.freshest(self.rank)})"
        return f"{self.freshest(expression)} and on ({self.by}) {nearest}"

    @property
    def decided_last(self) -> str:
        """What narrows an expression to the replica that decided last."""
        on = f"on (job, instance, agent, limit, {self.who})"
        return f"{on} topk by ({self.by}) (1, {self._now(2)})"

    def _now(self, metric: int) -> str:
        return f"last_over_time({self._select(metric)}[{settings.RATE}])"

    def _select(self, metric: int) -> str:
        return select(self.metrics[metric].name, AGENT, LIMIT, *self.only)


def of_threads(*only: str) -> Usage:
    """The use of threads."""
    return Usage(
        "thread_id",
        (names.THREAD_USED, names.THREAD_LIMIT, names.THREAD_DECIDED, names.THREAD_RESETS),
        only,
    )


def of_subjects(*only: str) -> Usage:
    """The use of shared quotas."""
    return Usage(
        "scope, subject",
        (names.SUBJECT_USED, names.SUBJECT_LIMIT, names.SUBJECT_DECIDED, names.SUBJECT_RESETS),
        only,
    )


def threads_by_state() -> str:
    """How many threads are near a limit, and how many have used one up.

    A thread counts once, however many limits and replicas it has. Those without series of their own
    are counted by each process.
    """
    threads = of_threads()
    reached = f"floor(clamp_max({threads.share} >= {_OF_LIMIT} {_near()}, 1))"
    levels = f"max by (job, agent, thread_id) ({reached} and {threads.decided_last})"
    listed = f'count_values("state", {levels})'
    for level, state in (("0", "near"), ("1", "exhausted")):
        listed = f'label_replace({listed}, "state", "{state}", "state", "{level}")'
    hidden = select(names.THREADS_HIDDEN.name, 'state=~"near|exhausted"')
    return f"sum by (state) ({listed} or last_over_time({hidden}[{settings.RATE}]))"


def latest_refusals() -> str:
    """When a limit last refused a call of a thread, in the chosen time: the latest ones."""
    return f"topk({settings.TOP}, {_last_refusal()} > time() - {settings.RANGE_SECONDS})"


def refused_threads() -> str:
    """The threads that were refused last in the chosen time, which a variable may use too."""
    return f"topk({settings.TOP}, {_last_refusal()})"


def refused_since(*only: str) -> str:
    """When the latest refusals of a limit on a thread began."""
    since = select(names.THREAD_REFUSED_SINCE.name, AGENT, LIMIT, *only)
    return of_threads(*only).freshest(f"last_over_time({since}[{settings.RATE}])")


def _last_refusal() -> str:
    """When a limit last refused a call of a thread, by processes that are gone as well."""
    refused = f"last_over_time({select(names.THREAD_REFUSED.name, AGENT, LIMIT)}[{settings.RANGE}])"
    return f"max by (job, agent, limit, thread_id) ({refused})"


def _near() -> str:
    """From which share on limits are near."""
    return f"last_over_time({select(names.LIMIT_NEAR.name, AGENT, LIMIT)}[{settings.RATE}])"
