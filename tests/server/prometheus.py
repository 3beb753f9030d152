"""A real Prometheus server of a test's own, and questions to its HTTP API."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.forked import Program
from tests.server.programs import required_program

DEADLINE = 60.0
"""Seconds after which what a test waits for will not come any more."""

SCRAPE_INTERVAL = "500ms"

_PAUSE = 0.05
_LISTENING = r'msg="?Listening on"? address=(127\.0\.0\.1:\d+)'

T = TypeVar("T")

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""Values by a series' name and labels."""


@dataclass(frozen=True)
class Sample:
    """A series of an instant query's result; of its labels those that the process exported."""

    name: str
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


def said(process: subprocess.Popen[bytes] | Program, log: Path, pattern: str) -> re.Match[str]:
    """What a process that runs writes to its log, once it has written it."""

    def found() -> re.Match[str] | None:
        text = log.read_text()
        assert process.poll() is None, text
        return re.search(pattern, text)

    return eventually(found)


class Prometheus:
    """A client of a running server."""

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
        found = []
        for series in self._get("/api/v1/query", query=expression)["result"]:
            labels = series["metric"]
            name = labels.pop("__name__", "")
            for added in ("job", "instance"):
                labels.pop(added, None)
            found.append(Sample(name, labels, float(series["value"][1])))
        return found

    def value(self, expression: str) -> float | None:
        """The value of an expression that gives at most one series."""
        samples = self.query(expression)
        assert len(samples) <= 1, samples
        return samples[0].value if samples else None

    def exemplars(self, selector: str) -> list[dict[str, str]]:
        """The labels of the last hour's exemplars of the series that are selected."""
        now = time.time()
        data = self._get("/api/v1/query_exemplars", query=selector, start=now - 3600, end=now + 60)
        return [exemplar["labels"] for found in data for exemplar in found["exemplars"]]

    def wait_for_scrape(self, job: str) -> None:
        """Wait until a job's target was scraped, by a scrape that began after now."""
        moment = time.time()
        # Of a plain selector it is the sample's own time, of anything else that of the query.
        scraped = f'timestamp(up{{job="{job}"}}) and up{{job="{job}"}} == 1'
        eventually(lambda: (self.value(scraped) or 0) > moment)

    def result(self, path: str, **parameters: Any) -> list[Any]:
        """The series in what the API answers to a query; asked as Grafana does."""
        response = self._http.post(f"/api/v1/{path}", data=parameters)
        assert response.is_success, response.text
        found: list[Any] = response.json()["data"]["result"]
        return found

    def _get(self, path: str, **parameters: Any) -> Any:
        response = self._http.get(path, params=parameters)
        body = response.json()
        assert body["status"] == "success", body
        return body["data"]


@contextmanager
def running_prometheus(
    directory: Path,
    targets: Mapping[str, str | Sequence[str] | Path],
    *,
    interval: str = SCRAPE_INTERVAL,
    options: Sequence[str] = ("--enable-feature=exemplar-storage",),
    **config: Any,
) -> Iterator[Prometheus]:
    """Run a server on a free port that scrapes targets by job.

    A target is `host:port`; a job has one, several, or those that a file lists, now and later.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "prometheus.yml"
    every = ("scrape_interval", "scrape_timeout", "evaluation_interval")
    config |= {
        "global": dict.fromkeys(every, interval),
        "scrape_configs": [
            {"job_name": job, "file_sd_configs": [{"files": [str(each)]}]}
            if isinstance(each, Path)
            else {
                "job_name": job,
                "static_configs": [{"targets": [each] if isinstance(each, str) else [*each]}],
            }
            for job, each in targets.items()
        ],
    }
    file.write_text(json.dumps(config))  # JSON is YAML
    command = [
        required_program("prometheus", "prometheus"),
        f"--config.file={file}",
        f"--storage.tsdb.path={directory / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        "--web.external-url=http://localhost",
        *options,
    ]
    with (
        running_server(command, directory / "prometheus.log") as address,
        closing(Prometheus(f"http://{address}")) as client,
    ):
        eventually(client.ready)
        yield client


@contextmanager
def running_server(command: Sequence[str], log: Path) -> Iterator[str]:
    """Run a server until it is left; gives the address on which it says that it listens."""
    with log.open("wb") as output, subprocess.Popen(command, stderr=output) as process:
        try:
            yield said(process, log, _LISTENING)[1]
        finally:
            process.kill()


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
