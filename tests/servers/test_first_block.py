"""The first refusal is seen, however quiet it was before: asked of a real Prometheus."""

import pytest
from prometheus_client import CollectorRegistry

from langchain_quota import Telemetry, ToolCallLimitMiddleware, start_metrics_server
from tests.servers.agents import build_agent, run
from tests.servers.conftest import StartPrometheus
from tests.servers.prometheus import eventually

# Counts of refusals, and when to alert on them: the first part sees a series that is born with
# a refusal already counted, the second a series that was there before.
BLOCKED = 'langchain_quota_limit_decisions_total{decision="blocked"}'
ALERT = f"""
sum by (job, agent, limit, scope) (
  ({BLOCKED} unless last_over_time({BLOCKED}[1h] offset 5m)) or increase({BLOCKED}[5m])
) > 0
"""


def search(registry: CollectorRegistry, *, times: int) -> None:
    """Run an agent that may search twice."""
    limiter = ToolCallLimitMiddleware(
        tool_name="search", run_limit=2, telemetry=Telemetry(registry=registry)
    )
    run(build_agent([["search"] * times, "done"], [limiter], name="researcher"))


def test_first_block_after_a_quiet_start(start_prometheus: StartPrometheus) -> None:
    """The series of refusals is there at 0 from the first call, so increase() sees the first."""
    registry = CollectorRegistry()
    with start_metrics_server(port=0, registry=registry) as server:
        prometheus = start_prometheus({"agents": f"{server.addr}:{server.port}"})
        search(registry, times=2)
        prometheus.wait_for_scrapes("agents", 3)
        assert [sample.value for sample in prometheus.query(BLOCKED)] == [0]
        assert prometheus.query(f"increase({BLOCKED}[1m]) > 0") == []
        assert prometheus.query(ALERT) == []

        search(registry, times=3)
        [increase] = eventually(lambda: prometheus.query(f"increase({BLOCKED}[1m]) > 0"))
        assert increase.labels == {
            "agent": "researcher",
            "limit": "tool:search",
            "scope": "run",
            "decision": "blocked",
        }
        [alert] = prometheus.query(ALERT)
        assert (alert.job, alert.labels) == (
            "agents",
            {"agent": "researcher", "limit": "tool:search", "scope": "run"},
        )


@pytest.mark.parametrize(("refused", "alerts"), [(1, 1), (0, 0)])
def test_refused_before_the_first_scrape(
    start_prometheus: StartPrometheus, refused: int, alerts: int
) -> None:
    """Of what a process refused before its first scrape increase() sees nothing; the alert does."""
    registry = CollectorRegistry()
    search(registry, times=2 + refused)
    with start_metrics_server(port=0, registry=registry) as server:
        prometheus = start_prometheus({"agents": f"{server.addr}:{server.port}"})
        prometheus.wait_for_scrapes("agents", 3)
        assert [sample.value for sample in prometheus.query(BLOCKED)] == [refused]
        assert prometheus.query(f"increase({BLOCKED}[5m]) > 0") == []
        assert len(prometheus.query(ALERT)) == alerts
