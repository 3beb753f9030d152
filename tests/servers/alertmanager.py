"""A real Alertmanager, a Prometheus that sends it alerts, and a webhook that it calls."""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

from langchain_quota.monitoring import exports
from tests.servers.programs import required_program
from tests.servers.prometheus import SCRAPE_INTERVAL, Prometheus, eventually

_LISTENING = re.compile(r'msg="?Listening on"? address=(127\.0\.0\.1:\d+)')
_STOPS_WITHIN = 10
_DURATION = re.compile(r"(?<![\w.])(\d+)(ms|s|m|h)\b")
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}


@dataclass(frozen=True)
class Notification:
    """An alert as a webhook was told of it.

    Attributes:
        path: The path that was called: the receiver's.
        status: `firing` or `resolved`.
        labels: The alert's labels.
        annotations: Its annotations.
        group: The labels that it was grouped by.
    """

    path: str
    status: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    group: Mapping[str, str]


class Webhook(ThreadingHTTPServer):
    """A server that keeps what Alertmanager tells it.

    Attributes:
        notifications: Every alert that it was told of, as often as it was told.
        messages: The same, by the message that told of them.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.notifications: list[Notification] = []
        self.messages: list[list[Notification]] = []

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self.server_port}"

    def wait_for(self, alertname: str, status: str, **labels: str) -> Notification:
        """The first notification of an alert with this status and these labels."""
        wanted = {"alertname": alertname, **labels}.items()

        def told() -> Notification | None:
            for notification in list(self.notifications):
                if notification.status == status and wanted <= notification.labels.items():
                    return notification
            return None

        return eventually(told)


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        """Keep what is told."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = [
            Notification(
                path=self.path,
                status=alert["status"],
                labels=alert["labels"],
                annotations=alert["annotations"],
                group=body["groupLabels"],
            )
            for alert in body["alerts"]
        ]
        self.server.messages.append(message)
        self.server.notifications += message
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def hurried(text: str, speed: float) -> str:
    """Rules, or Alertmanager's configuration, for a time that passes so many times faster.

    Durations become shorter, and so do numbers of minutes and hours in expressions. The export has
    no option for it: nobody else wants an hour to last a minute.

    Args:
        text: The rules, or the configuration.
        speed: How many of their seconds pass in a second.
    """

    def shorter(found: re.Match[str]) -> str:
        return f"{round(int(found[1]) * _MILLISECONDS[found[2]] / speed)}ms"

    return text if speed == 1 else _DURATION.sub(shorter, text.replace(" * 60", f" * {60 / speed}"))


def example(webhook: Webhook, speed: float) -> Any:
    """The example of Alertmanager's configuration, hurried; the webhook has all receivers."""
    [text] = exports.alertmanager().values()
    config = yaml.safe_load(hurried(text, speed))
    for receiver in config["receivers"]:
        [receives] = receiver["webhook_configs"]
        receives["url"] = f"{webhook.url}/{receiver['name']}"
    return config


@contextmanager
def running_webhook() -> Iterator[Webhook]:
    """Run a webhook on a free port."""
    with Webhook() as webhook:
        thread = Thread(target=webhook.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield webhook
        finally:
            webhook.shutdown()
            thread.join()


@contextmanager
def running_alertmanager(directory: Path, config: Mapping[str, Any]) -> Iterator[str]:
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
    with _running(command, directory / "alertmanager.log") as address:
        yield address


@contextmanager
def alerting_prometheus(
    directory: Path,
    targets: Mapping[str, str | Sequence[str]],
    *,
    rules: str,
    alertmanager: str,
    interval: str = SCRAPE_INTERVAL,
) -> Iterator[Prometheus]:
    """Run a Prometheus with rules that scrapes targets (`host:port` by job) and sends alerts."""
    (directory / "rules.yaml").write_text(rules, encoding="utf-8")
    scraped = [
        {
            "job_name": job,
            "static_configs": [{"targets": [each] if isinstance(each, str) else [*each]}],
        }
        for job, each in targets.items()
    ]
    config = {
        "global": {
            "scrape_interval": interval,
            "scrape_timeout": interval,
            "evaluation_interval": interval,
        },
        "scrape_configs": scraped,
        "rule_files": ["rules.yaml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
    }
    file = directory / "prometheus.yml"
    file.write_text(json.dumps(config))
    command = [
        required_program("prometheus", "prometheus"),
        f"--config.file={file}",
        f"--storage.tsdb.path={directory / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        "--web.external-url=http://localhost",
        # What is sent before the Alertmanager is discovered is lost: send it again soon.
        "--rules.alert.resend-delay=2s",
    ]
    with ExitStack() as stack:
        address = stack.enter_context(_running(command, directory / "prometheus.log"))
        client = Prometheus(f"http://{address}")
        stack.callback(client.close)
        eventually(client.ready)
        yield client


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[str]:
    """Run a server until it is left; gives the address on which it says that it listens."""
    with log.open("wb") as output, subprocess.Popen(command, stderr=output) as process:

        def listening() -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()
            return _LISTENING.search(log.read_text())

        try:
            yield eventually(listening).group(1)
        finally:
            process.terminate()
            try:
                process.wait(timeout=_STOPS_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
