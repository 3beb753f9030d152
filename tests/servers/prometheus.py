"""A real Prometheus server of a test's own, and questions to its HTTP API."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.servers.programs import required_program

DEADLINE = 60.0
"""Seconds after which what a test waits for will not come any more."""

SCRAPE_INTERVAL = "500ms"

_PAUSE = 0.05
_LISTENING = re.compile(r'msg="Listening on" address=(127\.0\.0\.1:\d+)')
_ADDED_BY_PROMETHEUS = {"__name__", "job", "instance"}

T = TypeVar("T")

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""Values by a series' name and labels."""


@dataclass(frozen=True)
class Sample:
    """A series of an instant query's result.

    Attributes:
        name: The metric's name; empty where an expression drops it.
        job: The job that was scraped.
        labels: The labels that the process itself exported.
        value: The value.
    """

    name: str
    job: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Exemplar:
    """An exemplar of a series.

    Attributes:
        series: The series' labels, with its name as `__name__`.
        labels: The exemplar's own.
        value: Its value.
    """

    series: Mapping[str, str]
    labels: Mapping[str, str]
    value: float


def eventually(probe: Callable[[], T | None], *, seconds: float = DEADLINE) -> T:
    """The first true result of a probe, asked again and again until a deadline."""
    deadline = time.monotonic() + seconds
    while True:
        result = probe()
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"not in {seconds} seconds; the last answer was {result!r}")
        time.sleep(_PAUSE)


class Prometheus:
    """A client of a running server.

    Args:
        url: The server's address.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=30, trust_env=False)  # no proxy

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def ready(self) -> bool:
        """Whether the server answers queries."""
        return self._http.get("/-/ready").is_success

    def query(self, expression: str) -> list[Sample]:
        """The result of an instant query, now."""
        data = self._get("/api/v1/query", query=expression)
        return [
            Sample(
                name=series["metric"].get("__name__", ""),
                job=series["metric"].get("job", ""),
                labels={
                    key: value
                    for key, value in series["metric"].items()
                    if key not in _ADDED_BY_PROMETHEUS
                },
                value=float(series["value"][1]),
            )
            for series in data["result"]
        ]

    def value(self, expression: str) -> float | None:
        """The value of an expression that gives at most one series."""
        samples = self.query(expression)
        assert len(samples) <= 1, samples
        return samples[0].value if samples else None

    def series(self, selector: str) -> Series:
        """The series that are selected, without the labels that Prometheus adds."""
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for sample in self.query(selector)
        }

    def exemplars(self, selector: str) -> list[Exemplar]:
        """The exemplars of the last hour of the series that are selected."""
        now = time.time()
        data = self._get("/api/v1/query_exemplars", query=selector, start=now - 3600, end=now + 60)
        return [
            Exemplar(found["seriesLabels"], exemplar["labels"], float(exemplar["value"]))
            for found in data
            for exemplar in found["exemplars"]
        ]

    def metadata(self) -> Mapping[str, str]:
        """The type of every metric that any target has told of, with series or without."""
        data = self._get("/api/v1/metadata")
        return {name: told[0]["type"] for name, told in data.items()}

    def wait_for_scrape(self, job: str) -> None:
        """Wait until a job's target was scraped, by a scrape that began after now."""
        moment = time.time()
        # Of a plain selector it is the sample's own time, of anything else that of the query.
        scraped = f'timestamp(up{{job="{job}"}}) and up{{job="{job}"}} == 1'
        eventually(lambda: (self.value(scraped) or 0) > moment)

    def wait_for_scrapes(self, job: str, count: int) -> None:
        """Wait until a job's target was scraped so many times more."""
        for _ in range(count):
            self.wait_for_scrape(job)

    def result(self, path: str, **parameters: Any) -> list[Any]:
        """The series in what the API answers to a query; asked as Grafana does."""
        return series_in(self.answer(path, **parameters))

    def answer(self, path: str, **parameters: Any) -> bytes:
        """What the API answers to a query, as it is; asked as Grafana does."""
        response = self._http.post(f"/api/v1/{path}", data=parameters)
        assert response.is_success, response.text
        return response.content

    def _get(self, path: str, **parameters: Any) -> Any:
        response = self._http.get(path, params=parameters)
        body = response.json()
        assert body["status"] == "success", body
        return body["data"]


@contextmanager
def running_prometheus(directory: Path, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """Run a server on a free port that scrapes targets (`host:port` by job)."""
    program = required_program("prometheus", "prometheus")
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "prometheus.yml"
    config.write_text(json.dumps(_config(targets)))  # JSON is YAML
    log = directory / "prometheus.log"
    command = [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        "--enable-feature=exemplar-storage",
        "--web.enable-remote-write-receiver",
    ]
    with log.open("wb") as output, subprocess.Popen(command, stderr=output) as process:
        try:
            client = Prometheus(f"http://{_address(process, log)}")
            try:
                eventually(client.ready)
                yield client
            finally:
                client.close()
        finally:
            _stop(process)


def check_metrics(text: str) -> tuple[int, list[str]]:
    """What `promtool check metrics` says of metrics in the text format: its code and lines."""
    program = required_program("promtool", "prometheus")
    result = subprocess.run(
        [program, "check", "metrics"],
        input=text.encode(),
        capture_output=True,
        timeout=DEADLINE,
        check=False,
    )
    return result.returncode, (result.stdout + result.stderr).decode().splitlines()


def series_in(answer: bytes) -> list[Any]:
    """The series in an answer of the API."""
    found: list[Any] = json.loads(answer)["data"]["result"]
    return found


def parse_openmetrics(text: str) -> list[Metric]:
    """What a text in the OpenMetrics format says; raises where it breaks the format."""
    return list(text_string_to_metric_families(text))  # type: ignore[no-untyped-call]  # so there


def series_of(families: Iterable[Metric]) -> Series:
    """The series of parsed metrics."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def _config(targets: Mapping[str, str]) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": SCRAPE_INTERVAL, "scrape_timeout": SCRAPE_INTERVAL},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [target]}]}
            for job, target in targets.items()
        ],
    }


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    def listening() -> re.Match[str] | None:
        assert process.poll() is None, log.read_text()
        return _LISTENING.search(log.read_text())

    return eventually(listening).group(1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
