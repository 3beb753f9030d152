"""A real Prometheus scrapes real agents, some with hostile names, and gives back all they tell."""

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from langchain_quota import ModelCallLimit, ToolCallLimit, start_metrics_server
from langchain_quota.limits import Limit
from tests.scene import Scene
from tests.server.prometheus import (
    Prometheus,
    Series,
    StartPrometheus,
    check_metrics,
    parse_openmetrics,
    series_of,
)
from tests.telemetry import Signals, telling

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
FORGED = 'a"} 1\nlangchain_quota_calls_total{tool="forged"} 1\n\\'
THREADS: list[object] = ["good", 7, "", "x" * 10_000, FORGED, "\ud800", "süß"]


class Scraped(NamedTuple):
    """Where agents tell their metrics, and a Prometheus that has scraped it since."""

    url: str
    prometheus: Prometheus

    def text(self, accept: str = "text/plain") -> str:
        """The metrics as the server gives them now."""
        response = httpx.get(self.url, headers={"accept": accept}, trust_env=False)
        assert response.headers["content-type"].startswith(accept)
        return response.text


async def play(signals: Signals) -> None:
    limits: list[Limit] = [
        ModelCallLimit(thread_limit=20, run_limit=3),
        ToolCallLimit("search", thread_limit=3, run_limit=1),
    ]
    script = [["search"], ["search", f"{FORGED}-1", "invented"], "done"] * len(THREADS) * 2
    for name in ("researcher", FORGED):
        scene = Scene(signals, script, limits, name=name)
        for thread in THREADS:
            await scene.play(thread_id=thread)
    invented = [f"tool_{number}" for number in range(300)]
    await Scene(signals, [invented, "done"], limits, name="inventor").play()


@pytest.fixture(scope="module")
def scraped(start_prometheus: StartPrometheus) -> Iterator[Scraped]:
    """More threads than may have series, and more tools than may have labels."""
    signals = telling(max_exported_threads=9)
    with start_metrics_server(0, registry=signals.registry) as server:
        prometheus = start_prometheus({"agents": f"{server.addr}:{server.port}"})
        asyncio.run(play(signals))
        prometheus.wait_for_scrape("agents")
        yield Scraped(server.url, prometheus)


def own(series: Series) -> Series:
    """The series of this library."""
    return {
        (name, labels): value
        for (name, labels), value in series.items()
        if name.startswith("langchain_quota_")
    }


def test_every_series_is_queried_back(scraped: Scraped) -> None:
    """Prometheus has exactly the series, labels and values that the process tells."""
    told = own(series_of(text_string_to_metric_families(scraped.text())))
    assert len(told) > 300
    assert own(scraped.prometheus.series('{job="agents"}')) == told
    values = {value for _, labels in told for _, value in labels}
    assert all(value.isprintable() and 0 < len(value) <= 64 for value in values)


def test_both_formats_are_valid(scraped: Scraped) -> None:
    """Promtool has nothing to say of the text, and OpenMetrics tells the same."""
    text, openmetrics = scraped.text(), scraped.text(OPENMETRICS)
    assert check_metrics(text) == (0, [])
    assert openmetrics.endswith("# EOF\n")
    families = parse_openmetrics(openmetrics)
    assert series_of(families) == series_of(text_string_to_metric_families(text))
