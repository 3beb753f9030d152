"""An agent breaches a limit, and a webhook hears of it: by real servers, as they are configured."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from langchain_quota import ToolCallLimit, start_metrics_server
from langchain_quota.cli import export
from tests.scene import Scene
from tests.server.alertmanager import (
    alerting_prometheus,
    example,
    hurried,
    running_alertmanager,
    running_webhook,
)
from tests.server.programs import required_program
from tests.server.prometheus import DEADLINE, eventually
from tests.telemetry import Signals

ROOT = Path(__file__).parents[2]
HOSTILE = '"}} {{ $value }} @channel <!here> &var-job=x'
SPEED = 60
"""How many seconds of the rules and of the example pass in a second here."""


def test_a_breach_is_told_and_resolved(tmp_path: Path, signals: Signals) -> None:
    """A blocked call reaches the chat, which hears the end. So does an agent's very first call."""

    def search(agent: str, *, times: int, limit: int) -> None:
        """Run an agent that wants to search so many times and may do so up to the limit."""
        limits = [ToolCallLimit("search", run_limit=limit)]
        options: Any = {"kind": "drop-in", "name": agent, "thread_id": HOSTILE}
        asyncio.run(Scene(signals, [["search"] * times, "done"], limits, **options).play())

    [rules] = export.rules(selector='job="agents"').values()
    with (
        start_metrics_server(port=0, registry=signals.registry) as server,
        running_webhook() as webhook,
        running_alertmanager(tmp_path, example(webhook, SPEED)) as address,
        alerting_prometheus(
            tmp_path,
            {"agents": f"{server.addr}:{server.port}"},
            rules=hurried(rules, SPEED),
            alertmanager=address,
        ) as prometheus,
    ):
        search("researcher", times=1, limit=2)
        quiet = "count_over_time(langchain_quota_build_info[1m]) >= 3"
        eventually(lambda: prometheus.query(quiet))
        assert webhook.notifications == []

        search("researcher", times=17, limit=2)
        breach = webhook.wait_for("LangChainQuotaLimitBreached", "firing")
        assert breach.path == "/chat"
        group = {"alertname": "LangChainQuotaLimitBreached", "agent": "researcher"}
        group["limit"] = "tool:search"
        assert breach.group == group
        assert breach.labels == {**group, "job": "agents", "severity": "warning"}
        refuses = 'Limit "tool:search" of agent "researcher" refuses calls on 1 thread'
        assert breach.annotations["summary"] == refuses
        told = 'Thresholds: "run" 2 calls. Calls refused within 15 minutes, by thread:'
        assert told in breach.annotations["description"]

        search("newcomer", times=1, limit=0)
        breach = webhook.wait_for("LangChainQuotaLimitBreached", "firing", agent="newcomer")
        assert breach.annotations["summary"].endswith("refuses calls on 1 thread")
        webhook.wait_for("LangChainQuotaLimitBreached", "resolved", agent="researcher")
    assert {told.path for told in webhook.notifications} == {"/chat"}
    assert HOSTILE not in str(webhook.notifications)


def test_the_page_is_followed(tmp_path: Path) -> None:
    """Every command of the page on alerts runs; what it tries reaches Slack, and the pager."""
    page = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    *preparing, trying = re.findall(r"```shell\n(.*?)```", page, re.DOTALL)
    (receivers,) = re.findall(r"```yaml\n(route:.*?)```", page, re.DOTALL)
    receivers = receivers.replace("/etc/alertmanager", str(tmp_path))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    required_program("amtool", "prometheus-alertmanager")

    def follow(commands: str) -> None:
        options: Any = {"cwd": tmp_path, "env": {**os.environ, "PATH": path}, "timeout": DEADLINE}
        subprocess.run(["bash", "-euo", "pipefail", "-c", commands], check=True, **options)

    with running_webhook() as webhook:
        (tmp_path / "alertmanager.yml").write_text(receivers)
        (tmp_path / "slack-webhook").write_text(f"{webhook.url}/slack")
        (tmp_path / "pagerduty-key").write_text("key")
        follow("\n".join(preparing))
        merged = yaml.safe_load(hurried((tmp_path / "merged.yml").read_text(), SPEED))
        merged["receivers"][1]["pagerduty_configs"][0]["url"] = f"{webhook.url}/pagerduty"
        with running_alertmanager(tmp_path, merged) as address:
            follow(trying.replace("localhost:9093", address))
            eventually(lambda: len(webhook.bodies) >= 2)
    slack, pager = sorted(webhook.bodies, key=lambda body: "payload" in body)
    assert slack["attachments"][0]["text"].startswith("A test, warning\n")
    assert pager["payload"]["summary"] == "A test, critical "
