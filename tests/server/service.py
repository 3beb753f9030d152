"""The example service as a process of its own, and questions to its API."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from tests.forked import Program, as_module, start_python
from tests.server.prometheus import DEADLINE, Series, parse_openmetrics, said, series_of

AGENT = Path(__file__).parents[2] / "docker" / "agent"
TOKEN = "a-token-for-tests"  # noqa: S105 - opens nothing but the service of a test

IMPORTED = (
    "fastapi",
    "langgraph.checkpoint.postgres.aio",
    "langgraph.checkpoint.sqlite.aio",
    "psycopg_pool",
    "uvicorn",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
)
"""Of what the service imports, what takes long and reads no settings."""

_RUNNING = r"Uvicorn running on (http://127\.0\.0\.1:\d+)"
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR")


@dataclass(frozen=True)
class Event:
    """A server-sent event."""

    name: str
    data: Any


class Service:
    """A running service, and the file that it writes to."""

    def __init__(self, process: Program, log: Path) -> None:
        self._process = process
        self._log = log
        self.pid = process.pid
        self.url = said(process, log, _RUNNING)[1]
        self.client = httpx.Client(
            base_url=self.url,
            timeout=DEADLINE,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=1),  # none idle, for who counts them
        )

    @property
    def log(self) -> str:
        """What it has written."""
        return self._log.read_text()

    def ask(self, thread_id: str, text: str, user_id: str = "") -> httpx.Response:
        """Ask the agent, by default as somebody who never asked before."""
        return self.client.post(f"/threads/{thread_id}/messages", **question(text, user_id))

    @contextmanager
    def asking(self, thread_id: str, text: str, user_id: str = "") -> Iterator[httpx.Response]:
        """Ask for a stream."""
        path = f"/threads/{thread_id}/messages/stream"
        with self.client.stream("POST", path, **question(text, user_id)) as response:
            yield response

    def stream(self, thread_id: str, text: str, user_id: str = "") -> list[Event]:
        """Ask for a stream, and read it to its end."""
        with self.asking(thread_id, text, user_id) as response:
            assert response.status_code == 200, response.read()
            return list(events(response))

    def usage(self, thread_id: str) -> Any:
        """What a thread has used."""
        response = self.client.get(f"/threads/{thread_id}/usage")
        assert response.status_code == 200, response.text
        return response.json()

    def series(self) -> Series:
        """Its metrics."""
        response = self.client.get(
            "/metrics",
            headers={
                "authorization": f"Bearer {TOKEN}",
                "accept": "application/openmetrics-text; version=1.0.0",
            },
        )
        assert response.status_code == 200, response.text
        return series_of(parse_openmetrics(response.text))

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self._process.terminate()

    def ended(self) -> int:
        """Wait for its end: the exit code."""
        return self._process.wait(DEADLINE)

    def stop(self) -> int:
        """Stop it as a container is stopped: the exit code."""
        self.client.close()
        self.terminate()
        return self.ended()


def question(text: str, user_id: str = "") -> dict[str, Any]:
    """The body of a question, and the header that names who asks it."""
    headers = {"x-forwarded-user": user_id or f"user-{uuid4().hex}"}
    return {"json": {"text": text}, "headers": headers}


def events(response: httpx.Response) -> Iterator[Event]:
    """The events of a stream, as they arrive."""
    name = ""
    for line in response.iter_lines():
        key, _, value = line.partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            yield Event(name, json.loads(value))


def environment(settings: Mapping[str, object]) -> dict[str, str]:
    """What a process of the service gets to see: nothing of the tests' own settings."""
    kept = {key: os.environ[key] for key in _KEPT if key in os.environ}
    return {
        **kept,
        "PYTHONPATH": str(AGENT),
        "PYTHONUNBUFFERED": "1",
        "METRICS_TOKEN": TOKEN,
        "PORT": "0",
        "TOOL_SECONDS": "0",
        **{name: str(value) for name, value in settings.items()},
    }


@contextmanager
def running_service(
    directory: Path, program: str = as_module("service"), /, **settings: object
) -> Iterator[Service]:
    """Run the service on a free port; its files, if it has any, are in the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / f"service-{uuid4().hex}.log"
    with (
        log.open("wb") as output,
        start_python(
            program,
            cwd=directory,
            env=environment(settings),
            stdout=output.fileno(),
            stderr=output.fileno(),
            imported=IMPORTED,
        ) as process,
    ):
        service = Service(process, log)
        try:
            yield service
        finally:
            service.client.close()
