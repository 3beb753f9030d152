"""The picture of an alert as it arrives: the mail that Alertmanager sends when a limit refuses.

`make picture` writes docs/images/alert.png, within a minute. An agent is refused, a Prometheus with
the project's rules scrapes it, and an Alertmanager with its own template sends a mail to a server
of this tool. Chromium draws the mail, and `pngquant` makes the picture small.
"""

import email
import email.policy
import logging
from pathlib import Path
from queue import Queue
from socketserver import StreamRequestHandler, ThreadingTCPServer
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import yaml
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver
from prometheus_client import CollectorRegistry

from langchain_quota import QuotaMiddleware, Telemetry, ToolCallLimit, start_metrics_server
from langchain_quota.monitoring import exports
from langchain_quota.testing import ScriptedChatModel
from tests.servers.alertmanager import alerting_prometheus, running_alertmanager
from tools.picture import IMAGES
from tools.screenshot import screenshot

PICTURE = IMAGES / "alert.png"
WIDTH, HEIGHT = 500, 860
"""In pixels; Chromium makes no window that is narrower."""
FOR_PHONES = "<style>html { zoom: 1.2; overflow-wrap: anywhere }</style>"
"""Letters that are large enough, and addresses that are broken at the margin."""


class Inbox(ThreadingTCPServer):
    """A mail server for one sender, which keeps the HTML of what it gets."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Session)
        self.mails: Queue[str] = Queue()


class _Session(StreamRequestHandler):
    server: Inbox

    def handle(self) -> None:
        """Accept a mail: every command is answered with success."""
        self._say("220 ready")
        for line in self.rfile:
            command = line[:4].upper()
            if command == b"DATA":
                self._say("354 go on")
                lines = iter(self.rfile.readline, b".\r\n")
                mail = email.message_from_bytes(b"".join(lines), policy=email.policy.default)
                html = next(each for each in mail.walk() if each.get_content_type() == "text/html")
                self.server.mails.put(html.get_content())
            self._say("221 bye" if command == b"QUIT" else "250 ok")

    def _say(self, answer: str) -> None:
        self.wfile.write(f"{answer}\r\n".encode())


def search() -> str:
    """Search the web."""
    return "nothing found"


def refused(registry: CollectorRegistry) -> None:
    """Let an agent ask for three searches, of which it may make two."""
    limits = [ToolCallLimit("search", thread_limit=2)]
    agent: Any = create_agent(
        ScriptedChatModel(script=[["search"] * 3, "Sorry."]),
        [search],
        middleware=[QuotaMiddleware(limits, telemetry=Telemetry(registry=registry))],
        checkpointer=InMemorySaver(),
        name="researcher",
    )
    question = {"messages": [("user", "Find it!")]}
    agent.invoke(question, {"configurable": {"thread_id": "customer-7"}})


def mail(directory: Path) -> str:
    """The HTML of the mail about the refusal."""
    registry = CollectorRegistry()
    refused(registry)
    with Inbox() as inbox, start_metrics_server(0, registry=registry) as metrics:
        Thread(target=inbox.serve_forever, daemon=True).start()
        [text] = exports.alertmanager().values()
        config = yaml.safe_load(text)
        receiver = {
            "to": "oncall@example.org",
            "from": "alertmanager@example.org",
            "smarthost": f"127.0.0.1:{inbox.server_address[1]}",
            "hello": "localhost",
            "require_tls": False,
        }
        config["receivers"] = [
            {"name": each["name"], "email_configs": [receiver]} for each in config["receivers"]
        ]
        rules = "".join(exports.rules(selector='job="agents"').values())
        target = metrics.url.split("/")[2]
        with (
            running_alertmanager(directory, config) as alertmanager,
            alerting_prometheus(
                directory, {"agents": target}, rules=rules, alertmanager=alertmanager, interval="5s"
            ),
        ):
            try:
                return inbox.mails.get(timeout=90)
            finally:
                inbox.shutdown()


def main() -> None:
    """Wait for the mail, and draw it."""
    logging.getLogger("langchain_quota").setLevel(logging.ERROR)
    with TemporaryDirectory() as directory:
        page = Path(directory, "mail.html")
        page.write_text(mail(Path(directory)) + FOR_PHONES, encoding="utf-8")
        screenshot(page, PICTURE, width=WIDTH, height=HEIGHT)


if __name__ == "__main__":
    main()
