"""An agent breaches a limit, and a webhook hears of it: by real servers, as they are configured."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from langchain_quota import Telemetry, ToolCallLimitMiddleware, start_metrics_server
from langchain_quota.monitoring import exports
from tests.servers.agents import build_agent, run
from tests.servers.alertmanager import (
    Webhook,
    alerting_prometheus,
    example,
    hurried,
    running_alertmanager,
    running_webhook,
)
from tests.servers.prometheus import Prometheus, eventually

HOSTILE = '"}} {{ $value }} @channel <!here> &var-job=x'
SPEED = 60
"""How many seconds of the rules and of the example pass in a second here."""


@dataclass(frozen=True)
class World:
    """Agents' metrics, the servers that watch them, and the receivers of alerts."""

    registry: CollectorRegistry
    prometheus: Prometheus
    webhook: Webhook

    def search(self, agent: str, *, times: int, limit: int, thread: str = "ann") -> None:
        """Run an agent that wants to search so many times and may do so up to the limit."""
        telemetry = Telemetry(registry=self.registry, tracer_provider=TracerProvider())
        limiter = ToolCallLimitMiddleware(tool_name="search", run_limit=limit, telemetry=telemetry)
        script = [["search"] * times, "done"]
        run(build_agent(script, [limiter], name=agent, saver=InMemorySaver()), thread)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A metrics server, Prometheus with the rules, Alertmanager with the example, a webhook."""
    registry = CollectorRegistry()
    [rules] = exports.rules(selector='job="agents"').values()
    with ExitStack() as running:
        server = running.enter_context(start_metrics_server(port=0, registry=registry))
        webhook = running.enter_context(running_webhook())
        address = running.enter_context(running_alertmanager(tmp_path, example(webhook, SPEED)))
        prometheus = running.enter_context(
            alerting_prometheus(
                tmp_path,
                {"agents": f"{server.addr}:{server.port}"},
                rules=hurried(rules, SPEED),
                alertmanager=address,
            )
        )
        yield World(registry, prometheus, webhook)


def test_a_breach_is_told_and_resolved(world: World) -> None:
    """A refused call reaches the chat, which hears the end; a thread that keeps on, the log."""
    world.search("researcher", times=1, limit=2, thread=HOSTILE)
    quiet = "count_over_time(langchain_quota_build_info[1m]) >= 3"
    eventually(lambda: world.prometheus.query(quiet))
    assert world.webhook.notifications == []

    world.search("researcher", times=17, limit=2, thread=HOSTILE)
    breach = world.webhook.wait_for("LangChainQuotaLimitBreached", "firing")
    assert breach.path == "/chat"
    assert breach.labels == {
        "alertname": "LangChainQuotaLimitBreached",
        "job": "agents",
        "agent": "researcher",
        "limit": "tool:search",
        "severity": "warning",
    }
    assert breach.group == {"job": "agents", "agent": "researcher"}
    assert breach.annotations["summary"] == (
        'Limit "tool:search" of agent "researcher" refuses calls on 1 thread'
    )
    assert 'Thresholds: "run" 2.' in breach.annotations["description"]
    assert breach.annotations["runbook_url"].endswith("/runbooks/LangChainQuotaLimitBreached.md")

    hitting = world.webhook.wait_for("LangChainQuotaThreadKeepsHitting", "firing")
    assert hitting.path == "/log"
    assert hitting.annotations["summary"] == (
        '1 thread keeps hitting limit "tool:search" of agent "researcher"'
    )

    world.webhook.wait_for("LangChainQuotaLimitBreached", "resolved")
    assert {told.path for told in world.webhook.notifications} == {"/chat", "/log"}
    assert HOSTILE not in str(world.webhook.notifications)


def test_a_first_decision_that_is_a_block_is_told(world: World) -> None:
    """An agent that may not search at all is refused its first call, and an alert says so."""
    world.search("newcomer", times=1, limit=0)
    breach = world.webhook.wait_for("LangChainQuotaLimitBreached", "firing", agent="newcomer")
    assert breach.annotations["summary"].endswith("refuses calls on 1 thread")
