"""A real Prometheus scrapes the demo while it runs."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from langchain_quota.exposition import ADDR_VARIABLE
from tests.servers.conftest import StartPrometheus
from tests.servers.prometheus import (
    Prometheus,
    check_metrics,
    eventually,
    parse_openmetrics,
    series_of,
)

COMMAND = "import sys; from langchain_quota.cli import main; sys.exit(main())"
THREADS = {f"customer-{number}" for number in range(1, 5)}
ADDRESS = re.compile(r"http://(127\.0\.0\.1:\d+)/metrics")
END = re.compile(r"^scrape http://", re.MULTILINE)


@dataclass(frozen=True)
class Demo:
    """A demo whose traffic is over, still serving, and the Prometheus that saw it."""

    url: str
    prometheus: Prometheus


@pytest.fixture(scope="module")
def demo(
    start_prometheus: StartPrometheus, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Demo]:
    """The demo as a process of its own, scraped from its beginning until after its traffic."""
    output = tmp_path_factory.mktemp("demo") / "output"
    options = ["--threads", str(len(THREADS)), "--seconds", "5", "--port", "0", "--serve"]
    command = [sys.executable, "-u", "-c", COMMAND, "demo", *options]
    # No collector and no address from outside.
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("OTEL_") and key != ADDR_VARIABLE
    }
    with (
        output.open("wb") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=environment) as process,
    ):
        try:
            address = _wait_for(ADDRESS, output, process).group(1)
            prometheus = start_prometheus({"demo": address})
            prometheus.wait_for_scrape("demo")
            _wait_for(END, output, process)
            prometheus.wait_for_scrape("demo")
            yield Demo(f"http://{address}/metrics", prometheus)
        finally:
            process.terminate()


def _wait_for(
    pattern: re.Pattern[str], output: Path, process: subprocess.Popen[bytes]
) -> re.Match[str]:
    def found() -> re.Match[str] | None:
        text = output.read_text()
        assert process.poll() is None, text
        return pattern.search(text)

    return eventually(found)


@pytest.mark.parametrize(
    ("metric", "labels"),
    [
        ("langchain_quota_calls_total", {"agent", "kind", "tool", "decision"}),
        ("langchain_quota_limit_decisions_total", {"agent", "limit", "scope", "decision"}),
        ("langchain_quota_near_limit_total", {"agent", "limit", "scope"}),
        ("langchain_quota_exhausted_total", {"agent", "limit", "scope"}),
        ("langchain_quota_limit", {"agent", "limit", "scope"}),
        ("langchain_quota_subjects", {"agent", "limit", "scope", "state"}),
        ("langchain_quota_thread_used", {"agent", "limit", "thread_id"}),
        ("langchain_quota_thread_limit", {"agent", "limit", "thread_id"}),
        ("langchain_quota_thread_blocked_total", {"agent", "limit", "thread_id"}),
        ("langchain_quota_thread_last_decision_timestamp_seconds", {"agent", "thread_id"}),
        ("langchain_quota_threads_hidden", {"state"}),
        ("langchain_quota_build_info", {"version"}),
    ],
)
def test_every_metric_is_queried_back(demo: Demo, metric: str, labels: set[str]) -> None:
    """Every metric of the demo is in Prometheus, with its labels."""
    samples = demo.prometheus.query(metric)
    assert samples
    for sample in samples:
        assert set(sample.labels) == labels


def test_values_are_those_of_the_demo(demo: Demo) -> None:
    """What Prometheus has is what the demo's address says, series by series."""
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    response = httpx.get(demo.url, headers=accept, trust_env=False)
    exposed = series_of(parse_openmetrics(response.text))
    stored = demo.prometheus.series('{__name__=~"langchain_quota_.+"}')
    ours = {key: value for key, value in exposed.items() if key[0].startswith("langchain_quota_")}
    assert stored == ours


def test_the_demo_shows_what_limits_do(demo: Demo) -> None:
    """Calls are allowed and blocked, and its threads reach all three states."""
    query = demo.prometheus.query
    decided = query("sum by (decision) (langchain_quota_calls_total) > 0")
    assert {sample.labels["decision"] for sample in decided} >= {"allowed", "blocked"}
    used = query("langchain_quota_thread_used")
    assert {sample.labels["thread_id"] for sample in used} == THREADS
    states = query("sum by (state) (langchain_quota_subjects) > 0")
    assert {sample.labels["state"] for sample in states} == {"ok", "near", "exhausted"}


def test_nothing_failed_in_the_demo(demo: Demo) -> None:
    """The counter of failures is known to Prometheus, and has no series."""
    assert demo.prometheus.metadata()["langchain_quota_errors"] == "counter"
    assert demo.prometheus.query("langchain_quota_errors_total") == []


def test_the_demo_has_exemplars(demo: Demo) -> None:
    """Refused calls of the demo lead to traces."""
    selector = 'langchain_quota_calls_total{decision="blocked"}'
    for exemplar in eventually(lambda: demo.prometheus.exemplars(selector)):
        assert set(exemplar.labels) == {"trace_id", "span_id"}


def test_promtool_has_nothing_to_say(demo: Demo) -> None:
    """The demo's metrics pass promtool's checks, those of the Python process included."""
    text = httpx.get(demo.url, headers={"accept": "text/plain"}, trust_env=False).text
    assert check_metrics(text) == (0, [])
