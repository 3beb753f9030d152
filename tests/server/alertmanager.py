"""A real Alertmanager, a Prometheus that sends it alerts, and a webhook that it calls."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from langchain_quota.cli import export
from tests.server.programs import required_program
from tests.server.prometheus import (
    SCRAPE_INTERVAL,
    Prometheus,
    eventually,
    running_prometheus,
    running_server,
)
from tests.web import Request, serving

_DURATION = re.compile(r"(?<![\w.])(\d+)(ms|s|m|h)\b")
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}


@dataclass(frozen=True)
class Notification:
    """An alert as a webhook was told of it, at the path of a receiver and at a time."""

    at: float
    path: str
    status: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    group: Mapping[str, str]


@dataclass
class Webhook:
    """A server that keeps what Alertmanager tells it, also by the message that told of it."""

    url: str = ""
    notifications: list[Notification] = field(default_factory=list)
    messages: list[list[Notification]] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)

    def wait_for(self, alertname: str, status: str, **labels: str) -> Notification:
        """The first notification of an alert with this status and these labels."""
        wanted = {"alertname": alertname, **labels}.items()

        def told() -> Notification | None:
            for notification in list(self.notifications):
                if notification.status == status and wanted <= notification.labels.items():
                    return notification
            return None

        return eventually(told)

    def keep(self, request: Request) -> None:
        """Keep what is told."""
        body = json.loads(request.body)
        self.bodies.append(body)
        message = [
            Notification(
                at=time.time(),
                path=request.path,
                status=alert["status"],
                labels=alert["labels"],
                annotations=alert["annotations"],
                group=body["groupLabels"],
            )
            for alert in body.get("alerts", [])
        ]
        self.messages.append(message)
        self.notifications.extend(message)
        request.reply()


def hurried(text: str, speed: float) -> str:
    """Rules, or Alertmanager's configuration, for a time that passes so many times faster.

    Durations become shorter, and so do numbers of minutes and hours in expressions. The export has
    no option for it: nobody else wants an hour to last a minute.
    """

    def shorter(found: re.Match[str]) -> str:
        return f"{round(int(found[1]) * _MILLISECONDS[found[2]] / speed)}ms"

    return text if speed == 1 else _DURATION.sub(shorter, text.replace(" * 60", f" * {60 / speed}"))


def example(webhook: Webhook, speed: float) -> Any:
    """A configuration with the exported route, hurried; the webhook has all receivers."""
    [text] = export.alertmanager().values()
    config = yaml.safe_load(hurried(text, speed))
    config["route"]["receiver"] = "chat"
    config["receivers"] = [
        {"name": name, "webhook_configs": [{"url": f"{webhook.url}/{name}"}]}
        for name in ("pager", "chat")
    ]
    return config


@contextmanager
def running_webhook() -> Iterator[Webhook]:
    """Run a webhook on a free port."""
    webhook = Webhook()
    with serving(webhook.keep) as webhook.url:
        yield webhook


def running_alertmanager(directory: Path, config: Mapping[str, Any]) -> AbstractContextManager[str]:
    """Run an Alertmanager on a free port; gives its `host:port`."""
    file = directory / "alertmanager.yml"
    file.write_text(json.dumps(config))  # JSON is YAML
    command = [
        required_program("prometheus-alertmanager", "prometheus-alertmanager"),
        f"--config.file={file}",
        f"--storage.path={directory / 'alertmanager'}",
        "--web.listen-address=127.0.0.1:0",
        "--web.external-url=http://localhost",
        # Empty: no gossip with others.
        "--cluster.listen-address=",
    ]
    return running_server(command, directory / "alertmanager.log")


def alerting_prometheus(
    directory: Path,
    targets: Mapping[str, str | Sequence[str] | Path],
    *,
    rules: str,
    alertmanager: str,
    interval: str = SCRAPE_INTERVAL,
) -> AbstractContextManager[Prometheus]:
    """Run a Prometheus with rules that scrapes targets (`host:port` by job) and sends alerts."""
    (directory / "rules.yaml").write_text(rules, encoding="utf-8")
    alerting = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    return running_prometheus(
        directory,
        targets,
        interval=interval,
        # What is sent before the Alertmanager is discovered is lost: send it again soon.
        options=("--rules.alert.resend-delay=2s",),
        rule_files=["rules.yaml"],
        alerting=alerting,
    )
