"""More threads than may have series of their own, as a real Prometheus sees them."""

import asyncio
from collections.abc import Iterator

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from prometheus_client import CollectorRegistry

from langchain_quota import Telemetry, ToolCallLimitMiddleware, start_metrics_server
from tests.servers.agents import arun, build_agent
from tests.servers.conftest import StartPrometheus
from tests.servers.prometheus import Prometheus

EXPORTED = 50
NEAR = 8
EXHAUSTED = 6
THREADS = 65

USED = "langchain_quota_thread_used"


def searches(number: int) -> int:
    """How often a thread searches: the first ones come near their limit of 5, or use it up."""
    if number < NEAR:
        return 4
    return 6 if number < NEAR + EXHAUSTED else 1


async def _search_on_all_threads(telemetry: Telemetry) -> None:
    limiter = ToolCallLimitMiddleware(tool_name="search", thread_limit=5, telemetry=telemetry)
    saver = InMemorySaver()
    for number in range(THREADS):
        script = [["search"] * searches(number), "done"]
        await arun(
            build_agent(script, [limiter], name="researcher", saver=saver), f"thread-{number}"
        )


@pytest.fixture(scope="module")
def prometheus(start_prometheus: StartPrometheus) -> Iterator[Prometheus]:
    """A Prometheus that has scraped an agent with many threads."""
    registry = CollectorRegistry()
    with start_metrics_server(port=0, registry=registry) as server:
        prometheus = start_prometheus({"agents": f"{server.addr}:{server.port}"})
        asyncio.run(
            _search_on_all_threads(Telemetry(registry=registry, max_exported_threads=EXPORTED))
        )
        prometheus.wait_for_scrape("agents")
        yield prometheus


def test_threads_with_series_are_bounded(prometheus: Prometheus) -> None:
    """Exactly as many threads as may be have series: the near, the exhausted, the most recent."""
    exported = {sample.labels["thread_id"] for sample in prometheus.query(USED)}
    urgent = range(NEAR + EXHAUSTED)
    recent = range(THREADS - (EXPORTED - len(urgent)), THREADS)
    assert exported == {f"thread-{number}" for number in (*urgent, *recent)}
    assert len(exported) == EXPORTED


def test_the_others_are_counted_as_hidden(prometheus: Prometheus) -> None:
    """What has no series is counted by state, so that nothing disappears unseen."""
    hidden = prometheus.query("langchain_quota_threads_hidden")
    assert {sample.labels["state"]: sample.value for sample in hidden} == {
        "ok": THREADS - EXPORTED,
        "near": 0,
        "exhausted": 0,
    }


def test_subjects_count_all_threads(prometheus: Prometheus) -> None:
    """The counts by state are over all threads, exported and hidden."""
    subjects = prometheus.query('langchain_quota_subjects{limit="tool:search"}')
    assert {sample.labels["state"]: sample.value for sample in subjects} == {
        "ok": THREADS - NEAR - EXHAUSTED,
        "near": NEAR,
        "exhausted": EXHAUSTED,
    }
