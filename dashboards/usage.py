"""What threads, and the subjects of shared quotas, have used of their limits.

Several replicas may serve one thread. They do not add up, and the highest is not the right one:
usage falls when a window ends or a thread is reset. So for each thread and limit the replica counts
that decided last.

All values are the last ones of a short time: one scrape that fails takes no thread away.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dashboards import settings
from dashboards.queries import AGENT, LIMIT, select
from langchain_quota.telemetry import names
from langchain_quota.telemetry.names import MetricSpec
from langchain_quota.units import Unit

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
        """What is used."""
        return self._now(0)

    @property
    def limit(self) -> str:
        """What is allowed."""
        return self._now(1)

    @property
    def share(self) -> str:
        """The used share. A limit of 0 has no series, so nothing is divided by it."""
        return f"{self.used} / {self.limit}"

    @property
    def rank(self) -> str:
        """The share of what has something left; 0 for what has nothing."""
        return f"clamp_max({self.share}, 1) % 1"

    @property
    def remaining(self) -> str:
        """What is left."""
        return f"clamp_min({self.limit} - {self.used}, 0)"

    @property
    def state(self) -> str:
        """0 with something left, 1 near the limit, 2 exhausted."""
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
        """What will be used if it goes on like this, up to the limit."""
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

    def dearest(self, expression: str) -> str:
        """Of those who have used most only."""
        dearest = f"topk({settings.TOP}, {self.freshest(self.used)})"
        return f"{self.freshest(expression)} and on ({self.by}) {dearest}"

    @property
    def decided_last(self) -> str:
        """What narrows an expression to the replica that decided last."""
        on = f"on (job, instance, agent, limit, {self.who})"
        return f"{on} topk by ({self.by}) (1, {self._now(2)})"

    def _now(self, metric: int) -> str:
        return f"last_over_time({self._select(metric)}[{settings.RATE}])"

    def _select(self, metric: int) -> str:
        return select(self.metrics[metric].name, AGENT, LIMIT, *self.only)


def of_threads(*only: str, unit: Unit = "calls") -> Usage:
    """The use of threads, of the limits that count one unit."""
    used, limit = names.THREAD_USED[unit], names.THREAD_LIMIT[unit]
    return Usage("thread_id", (used, limit, names.THREAD_DECIDED, names.THREAD_RESETS), only)


def of_subjects(*only: str, unit: Unit = "calls") -> Usage:
    """The use of shared quotas that count one unit."""
    used, limit = names.SUBJECT_USED[unit], names.SUBJECT_LIMIT[unit]
    metrics = (used, limit, names.SUBJECT_DECIDED, names.SUBJECT_RESETS)
    return Usage("scope, subject", metrics, only)


def in_any_unit(
    ask: Callable[[Usage], str], *only: str, of: Callable[..., Usage] = of_threads
) -> str:
    """The use of all limits: what has no unit, such as a share or a time.

    Args:
        ask: What is asked of each unit.
        only: Matchers that narrow it.
        of: Whose use it is.
    """
    units: tuple[Unit, ...] = ("calls", "tokens", "microdollars")
    # What has no unit of its own, such as when a window ends, is asked once.
    asked = dict.fromkeys(ask(of(*only, unit=unit)) for unit in units)
    return " or ".join(asked)


def threads_by_state() -> str:
    """How many threads are near a limit, and how many have used one up.

    A thread counts once, however many limits and replicas it has. Those without series of their own
    are counted by each process.
    """
    share = in_any_unit(lambda threads: threads.share)
    reached = f"floor(clamp_max(({share}) >= {_OF_LIMIT} {_near()}, 1))"
    levels = f"max by (job, agent, thread_id) ({reached} and {of_threads().decided_last})"
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
