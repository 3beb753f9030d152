"""An agent breaches a limit, and a webhook hears of it: by real servers, as they are configured."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from langchain_quota import Telemetry, ToolCallLimitMiddleware, start_metrics_server
from langchain_quota.monitoring import exports
from tests.servers.agents import build_agent, run
from tests.servers.alertmanager import (
    Webhook,
    alerting_prometheus,
    running_alertmanager,
    running_webhook,
)
from tests.servers.prometheus import Prometheus, eventually

DURATION = re.compile(r"(?<![\w.])(\d+)([mh])\b")
HOSTILE = '"}} {{ $value }} @channel <!here> &var-job=x'


def hurried(text: str) -> str:
    """The rules with a second for each minute.

    Only durations are replaced: in ranges, offsets, `for`, `keep_firing_for` and `interval`. The
    export has no option for them, since nobody else wants an hour to last a minute.
    """
    return DURATION.sub(lambda found: f"{int(found[1]) * {'m': 1, 'h': 60}[found[2]]}s", text)


def example(webhook: Webhook) -> Any:
    """The example's configuration; only addresses and timings are the test's."""
    [text] = exports.alertmanager().values()
    config = yaml.safe_load(text)
    for receiver in config["receivers"]:
        receiver["webhook_configs"] = [{"url": f"{webhook.url}/{receiver['name']}"}]
    [ours] = config["route"]["routes"]
    for route in (ours, *ours["routes"]):
        route |= {"group_wait": "0s", "group_interval": "1s", "repeat_interval": "1h"}
    return config


@dataclass(frozen=True)
class World:
    """Agents' metrics, the servers that watch them, and who is told."""

    telemetry: Telemetry
    prometheus: Prometheus
    webhook: Webhook

    def search(self, agent: str, *, times: int, limit: int, thread: str = "ann") -> None:
        """Run an agent that wants to search so many times and may do so up to the limit."""
        limiter = ToolCallLimitMiddleware(
            tool_name="search", run_limit=limit, telemetry=self.telemetry
        )
        script = [["search"] * times, "done"]
        run(build_agent(script, [limiter], name=agent, saver=InMemorySaver()), thread)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A metrics server, Prometheus with the rules, Alertmanager with the example, a webhook."""
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, tracer_provider=TracerProvider())
    [rules] = exports.rules(selector='job="agents"').values()
    with ExitStack() as running:
        server = running.enter_context(start_metrics_server(port=0, registry=registry))
        webhook = running.enter_context(running_webhook())
        address = running.enter_context(running_alertmanager(tmp_path, example(webhook)))
        prometheus = running.enter_context(
            alerting_prometheus(
                tmp_path,
                {"agents": f"{server.addr}:{server.port}"},
                rules=hurried(rules),
                alertmanager=address,
            )
        )
        yield World(telemetry, prometheus, webhook)


def test_a_breach_is_told_and_resolved(world: World) -> None:
    """A refused call reaches the chat, a thread that keeps trying the log; both resolve after."""
    world.search("researcher", times=1, limit=2, thread=HOSTILE)
    quiet = "count_over_time(langchain_quota_thread_blocked_total[1m]) >= 3"
    eventually(lambda: world.prometheus.query(quiet))
    assert world.webhook.notifications == []

    world.search("researcher", times=17, limit=2, thread=HOSTILE)
    breach = world.webhook.wait_for("LangChainQuotaLimitBreached", "firing")
    group = {
        "alertname": "LangChainQuotaLimitBreached",
        "job": "agents",
        "agent": "researcher",
        "limit": "tool:search",
    }
    assert breach.path == "/chat"
    assert breach.labels == {**group, "scope": "run", "severity": "warning"}
    assert breach.group == group
    assert (
        breach.annotations["summary"] == 'Limit "tool:search" of agent "researcher" refuses calls'
    )
    assert breach.annotations["runbook_url"].endswith("/runbooks/LangChainQuotaLimitBreached")

    hitting = world.webhook.wait_for("LangChainQuotaThreadKeepsHitting", "firing")
    assert hitting.path == "/log"
    assert hitting.labels["thread_id"] == HOSTILE
    assert hitting.annotations["summary"] == (
        r'Thread "\"}} {{ $value }} ?channel ?!here> &var-job=x" keeps hitting limit "tool:search"'
    )
    assert hitting.annotations["dashboard_url"].endswith(
        "&var-limit=tool%3Asearch"
        "&var-thread=%22%7D%7D+%7B%7B+%24value+%7D%7D+%40channel+%3C%21here%3E+%26var-job%3Dx"
    )

    world.webhook.wait_for("LangChainQuotaLimitBreached", "resolved")
    world.webhook.wait_for("LangChainQuotaThreadKeepsHitting", "resolved")
    assert "/pager" not in {told.path for told in world.webhook.notifications}


def test_a_first_decision_that_is_a_block_is_told(world: World) -> None:
    """An agent that may not search at all is refused its first call, and that is told."""
    world.search("newcomer", times=1, limit=0)
    breach = world.webhook.wait_for("LangChainQuotaLimitBreached", "firing", agent="newcomer")
    assert breach.labels["scope"] == "run"
