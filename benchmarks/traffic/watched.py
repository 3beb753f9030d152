"""A Prometheus with the project's rules watches traffic, and a webhook hears of the alerts."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.traffic.running import Traffic
from langchain_quota.cli import export
from langchain_quota.limits.call import STORE
from langchain_quota.runtime.units import NANODOLLARS
from tests.server.alertmanager import (
    Webhook,
    alerting_prometheus,
    example,
    hurried,
    running_alertmanager,
    running_webhook,
)
from tests.server.prometheus import Prometheus, eventually

JOB = "agents"

_EXHAUSTED = """
(
  langchain_quota_thread_used >= langchain_quota_thread_limit
  or langchain_quota_thread_used_tokens >= langchain_quota_thread_limit_tokens
  or langchain_quota_thread_used_dollars >= langchain_quota_thread_limit_dollars
)
and on (job, instance, agent, limit, thread_id)
topk by (job, agent, limit, thread_id) (
  1, langchain_quota_thread_timestamp_seconds{event="decision"}
)
"""

Counts = Counter[tuple[str, ...]]


@dataclass(frozen=True)
class Watch:
    """Traffic, and the servers that watch it.

    Attributes:
        prometheus: The server that scrapes the replicas.
        webhook: All receivers of Alertmanager.
    """

    traffic: Traffic
    prometheus: Prometheus
    webhook: Webhook

    def wait_for_scrape(self) -> None:
        """Wait until all replicas were scraped, by scrapes that began after now."""
        moment = time.time()
        scraped = f'timestamp(up{{job="{JOB}"}}) * up{{job="{JOB}"}}'

        def done() -> bool:
            times = [sample.value for sample in self.prometheus.query(scraped)]
            return len(times) == len(self.traffic.targets) and min(times) > moment

        eventually(done)

    def totals(self, selector: str, *labels: str, parts: int = 1) -> Counts:
        """What counters have counted in all processes, restarted ones included, by labels.

        It is in whole parts of the counter's unit: `parts` of them are one.

        From the samples themselves, with the process that each is of: a counter that has begun anew
        and is not below its old value when it is scraped looks as if nothing had happened.
        """
        counted = self._samples(selector)
        # Asked for last: each scrape that counted has one.
        processes = {
            (series["metric"]["instance"], at): start
            for series in self._samples("langchain_quota_start_time_seconds")
            for at, start in series["values"]
        }
        last: dict[tuple[str, ...], float] = {}
        for series in counted:
            metric = series["metric"]
            for at, value in series["values"]:
                process = processes[metric["instance"], at]
                last[json.dumps(metric), process] = float(value)
        totals: Counts = Counter()
        for (metric, _), value in last.items():
            totals[tuple(json.loads(metric).get(label, "") for label in labels)] += round(
                value * parts
            )
        return +totals

    def _samples(self, selector: str) -> Any:
        """All samples of series."""
        return self.prometheus._get("/api/v1/query", query=f"{selector}[10y]")["result"]

    def exhausted(self) -> Counts:
        """How many threads have used up a limit, by agent, by the freshest replica."""
        query = f"count by (agent) (count by (agent, thread_id) ({_EXHAUSTED}))"
        return Counter(
            {(each.labels["agent"],): int(each.value) for each in self.prometheus.query(query)}
        )

    def compared(self) -> Iterator[tuple[str, tuple[str, ...], int, int]]:
        """What was counted, by what, in truth, and by Prometheus."""
        truth = self.traffic.truth()
        threads = Counter((agent,) for agent, _ in truth.exhausted())
        for what, true, told in (
            (
                "calls",
                truth.calls("agent", "decision"),
                self.totals("langchain_quota_calls_total", "agent", "decision"),
            ),
            (
                "refusals",
                # Where the store could not be asked, no limit refuses.
                Counter(
                    {
                        key: count
                        for key, count in truth.refusals("agent", "limit", "scope").items()
                        if key[2] != STORE
                    }
                ),
                self.totals(
                    'langchain_quota_limit_decisions_total{decision="blocked"}',
                    *("agent", "limit", "scope"),
                ),
            ),
            ("threads exhausted", threads, self.exhausted()),
            (
                "tokens",
                truth.spent("tokens"),
                self.totals("langchain_quota_spent_tokens_total", "agent"),
            ),
            (
                "billionths of a dollar",
                truth.spent("nanodollars"),
                self.totals(
                    'langchain_quota_spent_dollars_total{limit="cost"}',
                    "agent",
                    parts=NANODOLLARS,
                ),
            ),
        ):
            for key in sorted({*true, *told}):
                yield what, key, true[key], told[key]


@contextmanager
def watching(
    traffic: Traffic, directory: Path, *, speed: float, scrape_interval: str
) -> Iterator[Watch]:
    """Watch traffic from now on; from its graceful restarts nothing is lost.

    Args:
        traffic: The traffic, which has not begun.
        directory: Where the servers write.
        speed: How many simulated seconds pass in a real one: durations are as much shorter.
        scrape_interval: In simulated time, as Prometheus writes it.
    """
    directory.mkdir()
    [rules] = export.rules().values()
    with ExitStack() as running:
        webhook = running.enter_context(running_webhook())
        alertmanager = running.enter_context(
            running_alertmanager(directory, example(webhook, speed))
        )
        prometheus = running.enter_context(
            alerting_prometheus(
                directory,
                {JOB: traffic.discovery},
                rules=hurried(rules, speed),
                alertmanager=alertmanager,
                interval=hurried(scrape_interval, speed),
            )
        )
        watch = Watch(traffic, prometheus, webhook)
        traffic.scrape = watch.wait_for_scrape
        watch.wait_for_scrape()
        yield watch
