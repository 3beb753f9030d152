"""A webhook receiver for Alertmanager: logs every alert as a line of JSON, and shows the last ones.

It stands where a chat or a pager would: `POST /<receiver>` takes a notification, `GET /` shows the
latest. Python's standard library is all it needs.
"""
# ruff: noqa: INP001, T201 - a program whose output is its purpose

import argparse
import json
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_BODY = 1_000_000
"""Bytes; Alertmanager's notifications are far smaller."""

latest: deque[str] = deque(maxlen=200)
"""The lines that `GET /` shows."""


def lines(path: str, notification: dict[str, Any]) -> Iterator[str]:
    """One line per alert; JSON, so that no label can forge another line."""
    for alert in notification["alerts"]:
        yield json.dumps(
            {
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                "receiver": path.lstrip("/"),
                "status": alert["status"],
                "labels": alert["labels"],
                "annotations": alert["annotations"],
            }
        )


class Receiver(BaseHTTPRequestHandler):
    """Answers Alertmanager, and people."""

    timeout = 10  # of a connection that sends nothing

    def do_POST(self) -> None:
        """Log a notification."""
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self._answer(413, f"a notification has a length of at most {MAX_BODY} bytes")
            return
        try:
            new = list(lines(self.path, json.loads(self.rfile.read(int(length)))))
        except (ValueError, TypeError, KeyError) as error:
            self._answer(400, f"not a notification of Alertmanager: {error!r}")
            return
        for line in new:
            print(line, flush=True)
        latest.extend(new)
        self._answer(200, "taken")

    def do_GET(self) -> None:
        """Show the latest alerts."""
        self._answer(200, "\n".join(latest) or "no alert yet")

    def _answer(self, status: int, text: str) -> None:
        body = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("content-type", "text/plain; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Requests are not logged: the alerts are."""


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--addr", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5001)
    arguments = parser.parse_args()
    with ThreadingHTTPServer((arguments.addr, arguments.port), Receiver) as server:
        print(f"listening on {arguments.addr}:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
