"""Export to a Collector: what it receives is what /metrics shows."""

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary
from prometheus_client.parser import text_string_to_metric_families

from langchain_quota import TokenLimit, ToolCallLimit, export_metrics, start_metrics_server
from langchain_quota.limits import Limit
from tests.forked import run_python, without
from tests.scene import Scene, asking
from tests.telemetry import telling
from tests.web import Request, serving

proto = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
otlp = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
sdk = pytest.importorskip("opentelemetry.sdk.metrics.export")

ROOT = Path(__file__).parents[2]
Series = tuple[str, frozenset[tuple[str, str]]]
PATIENCE = 60


class Collector:
    """An OTLP receiver: what each request had, and whether it fails."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.arrived = threading.Event()
        self.status = 200
        self.url = ""

    @property
    def newest(self) -> Any:
        [resource] = self.requests[-1].resource_metrics
        return resource

    def samples(self) -> dict[Series, float]:
        """What the newest request had, as Prometheus names it."""
        found: dict[Series, float] = {}
        for metric in self.newest.scope_metrics[0].metrics:
            kind = metric.WhichOneof("data")
            for point in getattr(metric, kind).data_points:
                labels = {(each.key, each.value.string_value) for each in point.attributes}
                if kind != "histogram":
                    found[metric.name, frozenset(labels)] = point.as_double
                    continue
                total = 0
                bounds = [*point.explicit_bounds, math.inf]
                for bound, count in zip(bounds, point.bucket_counts, strict=True):
                    total += count
                    found[f"{metric.name}_bucket", frozenset({*labels, ("le", str(bound))})] = total
                found[f"{metric.name}_count", frozenset(labels)] = point.count
                found[f"{metric.name}_sum", frozenset(labels)] = point.sum
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()

    def collect(request: Request) -> None:
        found.requests.append(proto.ExportMetricsServiceRequest.FromString(request.body))
        request.reply(found.status)
        found.arrived.set()

    with serving(collect) as url:
        found.url = f"{url}/v1/metrics"
        yield found


def scraped(text: str) -> dict[Series, float]:
    """The samples of a scrape; bounds as Python writes floats."""
    found = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            labels = {**each.labels}
            if "le" in labels:
                labels["le"] = str(float(labels["le"]))
            # When a series was created is no number of it.
            if not each.name.endswith("_created"):
                found[each.name, frozenset(labels.items())] = each.value
    return found


@contextmanager
def exporting(registry: CollectorRegistry, exporter: Any, every: Any = 3600) -> Iterator[Any]:
    export = export_metrics(exporter, every, registry)
    try:
        yield export
    finally:
        export.shutdown()


async def test_a_collector_receives_what_metrics_shows(collector: Collector) -> None:
    """All names, labels and numbers, cumulative, from the start of the process on."""
    signals = telling(run_histograms=True)
    Summary("pears", "Pears.", registry=signals.registry).observe(2)
    Counter("cherries", "Cherries.", registry=signals.registry).inc(4)
    Gauge("apples", "Apples.", registry=signals.registry).set(-1.5)
    Histogram("plums", "Plums.", ["kind"], registry=signals.registry).labels("blue").observe(0.3)
    limits: list[Limit] = [ToolCallLimit("search", thread_limit=1), TokenLimit(run_limit=99)]
    await Scene(signals, asking("search", "search"), limits).play()
    with exporting(signals.registry, otlp.OTLPMetricExporter(collector.url)) as export:
        export.flush()
        with start_metrics_server(0, registry=signals.registry) as server:
            text = urlopen(server.url).read().decode()  # noqa: S310, ASYNC210 - ours
    expected = scraped(text)
    found = collector.samples()
    assert found == expected
    assert len(found) > 100
    began = signals.value("langchain_quota_start_time_seconds")
    for metric in collector.newest.scope_metrics[0].metrics:
        kind = metric.WhichOneof("data")
        if kind != "gauge":
            data = getattr(metric, kind)
            assert data.aggregation_temporality == 2
            for point in data.data_points:
                assert point.start_time_unix_nano == int((began or 0) * 1e9)
                assert point.time_unix_nano > point.start_time_unix_nano
        assert kind != "sum" or metric.sum.is_monotonic
        if metric.name.endswith("_total"):
            assert kind == "sum"
    assert len(collector.requests) == 2  # the last one is that of `shutdown`


JOB = """
import asyncio, multiprocessing, os, sys
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from prometheus_client import REGISTRY, generate_latest
from langchain_quota import ToolCallLimit, export_metrics
from tests.scene import Scene, asking
from tests.telemetry import telling
def job():
    export_metrics(OTLPMetricExporter(sys.argv[1]))
    limits = [ToolCallLimit("search", run_limit=3)]
    asyncio.run(Scene(telling(registry=REGISTRY), asking("search"), limits).play())
    os.wait() if os.fork() else sys.exit()
    print("\\n".join(line for line in generate_latest().decode().splitlines() if "quota" in line))
process = multiprocessing.get_context("fork").Process(target=job)
process.start() if sys.argv[2] == "worker" else process.run()
"""


@pytest.mark.parametrize("kind", ["program", "worker"])
def test_a_job_that_ends_at_once_is_seen(collector: Collector, kind: str) -> None:
    """Its counts arrive once, when it exits, under its service; a forked child exports nothing."""
    env = os.environ | {"OTEL_SERVICE_NAME": "nightly"}
    done = run_python(JOB, collector.url, kind, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    [_] = collector.requests
    found = {key: value for key, value in collector.samples().items() if "quota" in key[0]}
    assert found == scraped(done.stdout)
    assert [value for (name, _), value in found.items() if name == "langchain_quota_runs_total"]
    resource = {each.key: each.value.string_value for each in collector.newest.resource.attributes}
    assert resource["service.name"] == "nightly"
    assert resource["service.instance.id"]


def test_it_exports_again_and_again(collector: Collector) -> None:
    """Every so often, until it is shut down."""
    with exporting(CollectorRegistry(), otlp.OTLPMetricExporter(collector.url), "1s"):
        for _ in range(2):
            assert collector.arrived.wait(PATIENCE)
            collector.arrived.clear()


def test_failures_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """An exporter that raises or refuses, and a collector of metrics that raises, break nothing."""
    ends: list[str] = []
    outcomes = iter([RuntimeError("down"), "FAILURE", "SUCCESS", "FAILURE", "FAILURE"])

    class Exporter(sdk.MetricExporter):  # type: ignore[misc, name-defined]
        def export(self, data: Any, timeout_millis: float = 0, **_: Any) -> Any:
            outcome = next(outcomes)
            if isinstance(outcome, Exception):
                raise outcome
            return sdk.MetricExportResult[outcome]

        def force_flush(self, timeout_millis: float = 0) -> bool:
            return True

        def shutdown(self, timeout_millis: float = 0, **_: Any) -> None:
            ends.append("shut down")

    with exporting(CollectorRegistry(), Exporter()) as export:
        for _ in range(4):
            export.flush()
        logged = [each.exc_info and each.exc_info[1] for each in caplog.records]
        assert [str(each) for each in logged] == ["down", "None"]
    export.shutdown()
    export.flush()
    assert ends == ["shut down"]
    assert len(caplog.records) == 2
    assert next(outcomes, None) is None


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("exporter", print, TypeError),
        ("every", 0, ValueError),
        ("every", "soon", ValueError),
        ("registry", None, TypeError),
    ],
)
def test_what_is_refused(argument: str, value: Any, error: type[Exception]) -> None:
    """The error names the argument and the value."""
    given: Any = {"exporter": sdk.ConsoleMetricExporter(), argument: value}
    with pytest.raises(error, match=argument):
        export_metrics(**given)


def test_without_the_sdk() -> None:
    """The error says what to install."""
    program = without("opentelemetry.sdk") + "import langchain_quota as a; a.export_metrics(None)"
    done = run_python(program)
    assert done.stderr.strip().endswith(
        'export_metrics needs the SDK: pip install "langchain-quota[otlp]"'
    )
