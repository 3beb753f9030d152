"""Export of the metrics by an exporter of OpenTelemetry, where Prometheus cannot scrape."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from prometheus_client import REGISTRY, CollectorRegistry, Metric

from langchain_quota.ops.exposition import resolve_registry
from langchain_quota.runtime.arguments import validate_type
from langchain_quota.runtime.process_end import call_at_end, cancel_at_end
from langchain_quota.runtime.units import Time, parse_milliseconds
from langchain_quota.telemetry.logs import logger

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import export as sdk
    from opentelemetry.sdk.resources import Resource

_START_TIMES = ("process_start_time_seconds", "langchain_quota_start_time_seconds")


class MetricsExport:
    """A running export of the metrics; `export_metrics` makes it.

    Examples:
        >>> import io
        >>> from langchain_quota import export_metrics
        >>> from opentelemetry.sdk.metrics.export import ConsoleMetricExporter
        >>> export = export_metrics(ConsoleMetricExporter(out=io.StringIO()))
        >>> export.flush()
        >>> export.shutdown()
    """

    def __init__(
        self, exporter: "sdk.MetricExporter", every: Time, registry: CollectorRegistry
    ) -> None:
        try:
            from opentelemetry.sdk.metrics import export  # noqa: PLC0415 - an extra
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - the same
        except ModuleNotFoundError as missing:
            hint = 'export_metrics needs the SDK: pip install "langchain-quota[otlp]"'
            raise ModuleNotFoundError(hint, name=missing.name) from missing
        validate_type("exporter", exporter, export.MetricExporter, "a MetricExporter of the SDK")
        seconds = parse_milliseconds("every", every) / 1000
        if not seconds:
            raise ValueError(f"every must be above 0, not {every!r}")
        self._exporter, self._registry = exporter, resolve_registry(registry)
        instance = Resource({"service.instance.id": str(uuid4())})
        self._resource = instance.merge(Resource.create())
        self._began, self._pid = time.time(), os.getpid()
        self._has_failed, self._stopped = False, Event()
        self._lock = Lock()  # exporters need not be safe for several threads
        Thread(target=self._run, args=(seconds,), daemon=True).start()
        call_at_end(self.shutdown)

    def flush(self) -> None:
        """Export the metrics now, and wait until they are sent; failures are only logged.

        It blocks: in async code, await `asyncio.to_thread(export.flush)`.
        """
        # A forked child has the counts of its parent, which exports them itself.
        if self._pid == os.getpid():
            with self._lock:
                self._export()

    def shutdown(self) -> None:
        """Export the metrics for the last time, and shut the exporter down."""
        cancel_at_end(self.shutdown)
        self.flush()
        if self._pid == os.getpid():
            with self._lock:
                if not self._stopped.is_set():
                    self._stopped.set()
                    self._exporter.shutdown()

    def _run(self, seconds: float) -> None:
        while not self._stopped.wait(seconds):
            self.flush()

    def _export(self) -> None:
        """Export once; log the first failure, and the first one after a success."""
        if self._stopped.is_set():
            return
        error: Exception | None = None
        try:
            families = list(self._registry.collect())
            result = self._exporter.export(_data(families, self._resource, self._began))
            failed = result.name != "SUCCESS"
        except Exception as raised:
            failed, error = True, raised
        if failed and not self._has_failed:
            logger.error(
                "metrics cannot be exported: not logged again until it works", exc_info=error
            )
        self._has_failed = failed


def _data(families: list[Metric], resource: "Resource", began: float) -> "sdk.MetricsData":
    """Return families as metrics of the SDK, under the names that Prometheus has for them."""
    from opentelemetry.sdk.metrics import export as sdk  # noqa: PLC0415 - an extra
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415

    # Counters may have counted before the export began.
    samples = [sample for family in families for sample in family.samples]
    starts = [sample.value for sample in samples if sample.name in _START_TIMES]
    start, now = int(min([began, *starts]) * 1e9), time.time_ns()
    extremes: Any = (None, None)  # Prometheus does not have the lowest and the highest value
    cumulative, metrics = sdk.AggregationTemporality.CUMULATIVE, list[sdk.Metric]()
    for family in families:
        data: dict[str, Any] = {}
        bars = [
            sdk.HistogramDataPoint(
                labels, start, now, sum(counts), total, counts, bounds, *extremes
            )
            for labels, total, counts, bounds in _histograms(family)
        ]
        if bars:
            data[family.name] = sdk.Histogram(bars, cumulative)
        points: defaultdict[str, list[sdk.NumberDataPoint]] = defaultdict(list)
        for sample in family.samples if not bars else ():
            if sample.name != f"{family.name}_created":
                point = sdk.NumberDataPoint(sample.labels, start, now, float(sample.value))
                points[sample.name].append(point)
        for name, numbers in points.items():
            is_count = family.type == "counter" and name == f"{family.name}_total"
            data[name] = sdk.Sum(numbers, cumulative, True) if is_count else sdk.Gauge(numbers)
        # With a unit, a Collector would change the name.
        metrics += [sdk.Metric(name, family.documentation, "", data[name]) for name in data]
    in_scope = sdk.ScopeMetrics(InstrumentationScope("langchain_quota"), metrics, "")
    return sdk.MetricsData([sdk.ResourceMetrics(resource, [in_scope], "")])


def _histograms(family: Metric) -> Iterator[tuple[dict[str, str], float, list[int], list[float]]]:
    """Return the labels, sum, counts and upper bounds of each histogram of a family."""
    bars = defaultdict[frozenset[tuple[str, str]], list[tuple[float, int]]](list)
    sums: dict[frozenset[tuple[str, str]], float] = {}
    for sample in family.samples:
        labels = {**sample.labels}
        bound = labels.pop("le", None)
        if bound is not None:
            bars[frozenset(labels.items())].append((float(bound), int(sample.value)))
        elif sample.name == f"{family.name}_sum":
            sums[frozenset(labels.items())] = sample.value
    for key, bar in bars.items():
        bounds, totals = zip(*bar, strict=True)
        counts = [total - below for total, below in zip(totals, (0, *totals), strict=False)]
        yield dict(key), sums[key], counts, [*bounds[:-1]]


def export_metrics(
    exporter: "sdk.MetricExporter", every: Time = 60, registry: CollectorRegistry = REGISTRY
) -> MetricsExport:
    """Export the metrics by an exporter of OpenTelemetry, in a daemon thread, and at exit.

    The exporter gets what a scrape of /metrics gets, under the same names. All is cumulative and
    has no exemplars. The resource is that of `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`,
    with a random `service.instance.id`. A failure is logged once, and does not reach the agent. A
    forked child exports nothing until it calls this function itself. In prometheus_client's
    multi-process mode one process exports the metrics of all workers: call it only there.

    Args:
        exporter: A `MetricExporter`, such as the SDK's `OTLPMetricExporter`.
        every: The time between exports, above 0: a `timedelta`, `"30s"`, or a number of seconds.
        registry: The metrics.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `every` is out of bounds; or, in multi-process mode, there is no directory.
        ModuleNotFoundError: The extra `otlp` is not installed.

    Examples:
        >>> import io
        >>> from langchain_quota import export_metrics
        >>> from opentelemetry.sdk.metrics.export import ConsoleMetricExporter
        >>> export = export_metrics(ConsoleMetricExporter(out=io.StringIO()), every="30s")
        >>> export.shutdown()
    """
    return MetricsExport(exporter, every, registry)
