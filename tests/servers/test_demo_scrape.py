"""A real Prometheus scrapes the demo while it runs."""

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.servers.conftest import StartPrometheus
from tests.servers.demo import running_demo
from tests.servers.prometheus import (
    Prometheus,
    check_metrics,
    eventually,
    parse_openmetrics,
    series_of,
)

THREADS = {f"customer-{number}" for number in range(1, 5)}


@dataclass(frozen=True)
class Scraped:
    """A demo whose traffic is over, still serving, and the Prometheus that saw it."""

    url: str
    prometheus: Prometheus


@pytest.fixture(scope="module")
def demo(
    start_prometheus: StartPrometheus, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scraped]:
    """The demo, scraped from its beginning until after its traffic."""
    log = tmp_path_factory.mktemp("demo") / "output"
    with running_demo(log, threads=len(THREADS)) as running:
        prometheus = start_prometheus({"demo": running.address})
        prometheus.wait_for_scrape("demo")
        running.wait_for_end_of_traffic()
        prometheus.wait_for_scrape("demo")
        yield Scraped(f"http://{running.address}/metrics", prometheus)


@pytest.mark.parametrize(
    ("metric", "labels"),
    [
        ("langchain_quota_calls_total", {"agent", "kind", "tool", "decision"}),
        ("langchain_quota_limit_decisions_total", {"agent", "limit", "scope", "decision"}),
        ("langchain_quota_near_limit_total", {"agent", "limit", "scope"}),
        ("langchain_quota_exhausted_total", {"agent", "limit", "scope"}),
        ("langchain_quota_limit", {"agent", "limit", "scope"}),
        ("langchain_quota_granted_total", {"agent", "limit", "scope"}),
        ("langchain_quota_wait_seconds_count", {"agent", "limit", "decision"}),
        ("langchain_quota_subjects", {"agent", "limit", "scope", "state"}),
        ("langchain_quota_limit_tokens", {"agent", "limit", "scope"}),
        ("langchain_quota_spent_tokens_total", {"agent", "limit", "model"}),
        ("langchain_quota_model_runs_total", {"agent", "model", "usage"}),
        ("langchain_quota_thread_used", {"agent", "limit", "thread_id"}),
        ("langchain_quota_thread_limit", {"agent", "limit", "thread_id"}),
        ("langchain_quota_thread_used_tokens", {"agent", "limit", "thread_id"}),
        ("langchain_quota_thread_limit_tokens", {"agent", "limit", "thread_id"}),
        ("langchain_quota_thread_spent_tokens_total", {"agent", "limit", "thread_id"}),
        ("langchain_quota_thread_blocked_total", {"agent", "limit", "thread_id"}),
        (
            "langchain_quota_thread_last_decision_timestamp_seconds",
            {"agent", "limit", "thread_id"},
        ),
        ("langchain_quota_limit_near_ratio", {"agent", "limit"}),
        ("langchain_quota_runs_total", {"agent"}),
        ("langchain_quota_start_time_seconds", set()),
        ("langchain_quota_threads_hidden", {"state"}),
        ("langchain_quota_build_info", {"version"}),
    ],
)
def test_every_metric_is_queried_back(demo: Scraped, metric: str, labels: set[str]) -> None:
    """Every metric of the demo is in Prometheus, with its labels."""
    samples = demo.prometheus.query(metric)
    assert samples
    for sample in samples:
        assert set(sample.labels) == labels


def test_values_are_those_of_the_demo(demo: Scraped) -> None:
    """What Prometheus has is what the demo's address says, series by series."""
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    response = httpx.get(demo.url, headers=accept, trust_env=False)
    exposed = series_of(parse_openmetrics(response.text))
    stored = demo.prometheus.series('{__name__=~"langchain_quota_.+"}')
    ours = {key: value for key, value in exposed.items() if key[0].startswith("langchain_quota_")}
    assert stored == ours


def test_the_demo_shows_what_limits_do(demo: Scraped) -> None:
    """Calls are allowed and blocked, and its threads reach all three states."""
    query = demo.prometheus.query
    decided = query("sum by (decision) (langchain_quota_calls_total) > 0")
    assert {sample.labels["decision"] for sample in decided} >= {"allowed", "blocked"}
    used = query("langchain_quota_thread_used")
    assert {sample.labels["thread_id"] for sample in used} == THREADS
    refused = query(
        'sum by (limit) (langchain_quota_limit_decisions_total{decision="blocked"}) > 0'
    )
    assert {sample.labels["limit"] for sample in refused} == {
        *("tool:search", "model", "tokens", "repeats"),
    }
    states = query("sum by (state) (langchain_quota_subjects) > 0")
    assert {sample.labels["state"] for sample in states} == {"ok", "near", "exhausted"}


def test_the_demo_waits_and_grants(demo: Scraped) -> None:
    """The panels about waits and grants have data: searches had to wait, and one was granted."""
    query = demo.prometheus.query
    (waited,) = query("sum(langchain_quota_wait_seconds_sum)")
    assert waited.value > 0
    (granted,) = query("langchain_quota_granted_total > 0")
    assert (granted.labels["limit"], granted.value) == ("tool:search", 1)


def test_nothing_failed_in_the_demo(demo: Scraped) -> None:
    """The counter of failures is known to Prometheus, and has no series."""
    assert demo.prometheus.metadata()["langchain_quota_errors"] == "counter"
    assert demo.prometheus.query("langchain_quota_errors_total") == []


def test_the_demo_has_exemplars(demo: Scraped) -> None:
    """Refused calls of the demo lead to traces."""
    selector = 'langchain_quota_calls_total{decision="blocked"}'
    for exemplar in eventually(lambda: demo.prometheus.exemplars(selector)):
        assert set(exemplar.labels) == {"trace_id", "span_id"}


def test_promtool_has_nothing_to_say(demo: Scraped) -> None:
    """The demo's metrics pass promtool's checks, those of the Python process included."""
    text = httpx.get(demo.url, headers={"accept": "text/plain"}, trust_env=False).text
    assert check_metrics(text) == (0, [])
