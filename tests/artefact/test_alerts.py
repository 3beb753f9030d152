"""The page on alerts, followed with a real Alertmanager; test_rules.py proves what alerts say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.server.alertmanager import hurried, running_alertmanager
from tests.server.listener import listening
from tests.server.programs import required_program
from tests.server.prometheus import DEADLINE, eventually

ROOT = Path(__file__).parents[2]
SPEED = 60
"""How many seconds of the route pass in a second here."""


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

    bodies: list[Any] = []

    def hear(_: str, body: bytes) -> int:
        bodies.append(json.loads(body))
        return 200

    with listening(hear) as webhook:
        (tmp_path / "alertmanager.yml").write_text(receivers)
        (tmp_path / "slack-webhook").write_text(f"{webhook}/slack")
        (tmp_path / "pagerduty-key").write_text("key")
        follow("\n".join(preparing))
        merged = yaml.safe_load(hurried((tmp_path / "merged.yml").read_text(), SPEED))
        merged["receivers"][1]["pagerduty_configs"][0]["url"] = f"{webhook}/pagerduty"
        with running_alertmanager(tmp_path, merged) as address:
            follow(trying.replace("localhost:9093", address))
            eventually(lambda: len(bodies) >= 2)
    slack, pager = sorted(bodies, key=lambda body: "payload" in body)
    assert slack["attachments"][0]["text"].startswith("A test, warning\n")
    assert pager["payload"]["summary"] == "A test, critical "
