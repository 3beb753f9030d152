"""How much counters grew: over a range, from bar to bar, and per minute.

The first value of a counter is lost on `increase()`: a process that begins with a refusal exports
1, and never 0. So what was not there before counts with its value, but only where its process is
young: to a Prometheus that was away for long, every counter is new.
"""

from dashboards import settings
from dashboards.queries import AGENT, LIMIT, LIMIT_ALERT, STARTED, select, sum_by

_PROCESS = "on (job, instance)"


def total(
    by: str,
    selector: str,
    window: str,
    seconds: str,
    *,
    alerting: bool = False,
) -> str:
    """By how much counters grew in a window.

    Args:
        by: The labels that are kept.
        selector: The counters.
        window: How far back.
        seconds: The same, in seconds.
        alerting: Whether to leave out limits whose refusals are not worth an alert.
    """
    started = select(STARTED)
    before = f"[{settings.LOOKBACK}] offset {window}"
    born = (
        f"last_over_time({selector}[{window}]) unless last_over_time({selector}{before}) "
        f"unless resets({selector}[{window}]) > 0"
    )
    young = f"max_over_time({started}[{window}]) > time() - {_first_seen(seconds)}"
    grown = (
        f"({born} and {_PROCESS} ({young} or last_over_time({started}{before}))) "
        f"or increase({selector}[{window}])"
    )
    if alerting:
        quiet = f"last_over_time({select(LIMIT_ALERT, AGENT, LIMIT)}[{window}]) == 0"
        grown = f"({grown}) unless on (job, instance, agent, limit) {quiet}"
    return sum_by(by, grown)


def bars(by: str, selector: str) -> str:
    """By how much counters grew since the bar before: the bars add up to what was counted.

    A bar is the difference of two values. It is not `increase()`, whose windows overlap or leave
    gaps, and which guesses what happened at their edges. What is subtracted depends on the process:

    1. The process of the bar before still runs: the value of then. If its target was lost then, its
       last value. If it is lost now, its last value within the bar counts.
    2. The process is new: nothing.
    3. It has taken the place of another one: nothing, and what that one counted after the bar
       before is added. This is known if it had counted more in all than the new one has.
    4. It has taken the place of another one, and is lost already: a counter may still be that of
       the former process. So the value of then is subtracted, and nothing counts twice.

    A value of then that is higher than the one now is always that of a former process.
    """
    bar, started = settings.BAR, select(STARTED)
    began = f"last_over_time({started}[{settings.LOOKBACK}])"
    began_before = f"last_over_time({started}[{settings.LOOKBACK}] offset {bar})"
    now, before = _known(selector, bar), _known(selector, settings.LOOKBACK, f" offset {bar}")
    same = f"{began} == {began_before}"
    lost = f"{began} unless {started}"
    young = f"{began} > time() - {_first_seen(settings.BAR_SECONDS)}"
    last = f"max_over_time({selector}[{bar}])"
    rest = f"({last} unless {last} <= {now}) - ({before} or 0 * {last})"
    grown = sum_by(
        by,
        f"{now} - ({before} <= {now} and {_PROCESS} ({same} or {lost}) or 0 * {now}) "
        f"and {_PROCESS} ({young} or {same}) "
        f"or label_replace({rest} and {_PROCESS} ({began} != {began_before}), "
        '"life", "former", "", "")',
    )
    return f"{grown} > 0"


def per_minute(by: str, selector: str) -> str:
    """How fast counters grow."""
    return f"{sum_by(by, f'rate({selector}[{settings.RATE}])')} * 60"


def share(by: str, part: str, whole: str, *, wider: str = "") -> str:
    """How much of what is counted is a part of it.

    Args:
        by: The labels that are kept.
        part: The counters of the part.
        whole: The counters of all.
        wider: The labels of all, if they are fewer.
    """
    parts, all_of = (
        sum_by(labels, f"rate({selector}[{settings.RATE}])")
        for labels, selector in ((by, part), (wider or by, whole))
    )
    matching = f" on ({wider}) group_left ()" if wider else ""
    return f"{parts} /{matching} ({all_of} > 0)"


def quantile(share: float, histogram: str, by: str, *matchers: str) -> str:
    """A quantile of what a histogram of the chosen processes observed."""
    buckets = select(f"{histogram}_bucket", *matchers)
    return (
        f"histogram_quantile({share}, {sum_by(f'le, {by}', f'rate({buckets}[{settings.RATE}])')})"
    )


def _known(selector: str, window: str, offset: str = "") -> str:
    """The values at a time; of a target that is lost, the last ones of a window."""
    last = f"last_over_time({selector}[{window}]{offset})"
    alive = select(STARTED) + offset
    return f"({selector}{offset} or {last} unless {_PROCESS} {alive})"


def _first_seen(seconds: str) -> str:
    return f"{seconds} - {settings.FIRST_SCRAPE_SECONDS}"
