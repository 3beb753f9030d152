"""Whatever a model or a caller puts into a name: the scrape stays whole, valid and bounded."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

import httpx
import pytest
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families as parse_text

from langchain_quota import (
    MetricsServer,
    Telemetry,
    ToolCallLimitMiddleware,
    start_metrics_server,
)
from tests.servers.agents import build_agent, run
from tests.servers.conftest import StartPrometheus
from tests.servers.prometheus import Prometheus, check_metrics, parse_openmetrics, series_of

NUMBER = 7
IDENTIFIER = UUID("12345678-1234-5678-1234-567812345678")
LONG = "x" * 10_000
FORGED = 'a"} 1\nlangchain_quota_calls_total{tool="forged"} 1\n\\'
SURROGATE = "\ud800"
HOSTILE = (NUMBER, IDENTIFIER, "", LONG, FORGED, SURROGATE)
GOOD = ("good-1", "good-2")

INVENTED = 3_000
MAX_TOOLS = 100  # the default

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TIMESTAMP = "langchain_quota_thread_last_decision_timestamp_seconds"


def shortened(text: str) -> str:
    """The documented label of a text that cannot be one itself."""
    kept = "".join(char for char in text if char.isprintable())[:40]
    return f"{kept}~{hashlib.sha256(text.encode()).hexdigest()[:12]}"


LABELS = {"7", str(IDENTIFIER), shortened(""), shortened(LONG), shortened(FORGED), *GOOD}


def is_label_of_surrogate(label: str) -> bool:
    """Whether a label stands for the lone surrogate: nothing of it is printable."""
    return re.fullmatch("~[0-9a-f]{12}", label) is not None and label != shortened("")


@dataclass(frozen=True)
class Scraped:
    """A metrics server, and the Prometheus that has scraped it."""

    server: MetricsServer
    prometheus: Prometheus

    def text(self, accept: str = "text/plain") -> str:
        """The metrics as the server gives them now."""
        response = httpx.get(self.server.url, headers={"accept": accept}, trust_env=False)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(accept)
        return response.text


def _search_on_every_thread(telemetry: Telemetry, agent: str) -> None:
    limiter = ToolCallLimitMiddleware(tool_name="search", thread_limit=2, telemetry=telemetry)
    for thread in (*GOOD, *HOSTILE):
        saver = InMemorySaver()
        run(build_agent([["search"], "done"], [limiter], name=agent, saver=saver), thread)


def _invent_tools(telemetry: Telemetry) -> None:
    names = [f"tool_{number}" for number in range(INVENTED)]
    names += [f"tool {number}\n" for number in range(INVENTED)]
    batches = [names[start : start + 1_000] for start in range(0, len(names), 1_000)]
    limiters = [
        ToolCallLimitMiddleware(run_limit=10, telemetry=telemetry),
        ToolCallLimitMiddleware(tool_name="search", run_limit=5, telemetry=telemetry),
    ]
    # The tool that a limit names comes last, when all room for names is taken.
    run(build_agent([*batches, ["search"], "done"], limiters, name="inventor"))


@pytest.fixture(scope="module")
def scraped(start_prometheus: StartPrometheus) -> Iterator[Scraped]:
    """Agents with hostile names, on hostile threads, that call invented tools; scraped."""
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, tracer_provider=TracerProvider())
    with start_metrics_server(port=0, registry=registry) as server:
        prometheus = start_prometheus({"agents": f"{server.addr}:{server.port}"})
        for agent in ("good", "", LONG, FORGED, SURROGATE):
            _search_on_every_thread(telemetry, agent)
        _invent_tools(telemetry)
        prometheus.wait_for_scrape("agents")
        yield Scraped(server, prometheus)


def test_the_scrape_is_whole(scraped: Scraped) -> None:
    """Prometheus takes the scrape, with every series that the server has."""
    assert scraped.prometheus.value("up") == 1
    exposed = series_of(parse_openmetrics(scraped.text(OPENMETRICS)))
    assert scraped.prometheus.series('{__name__=~"langchain_quota_.+"}') == exposed
    assert scraped.prometheus.value("sum(langchain_quota_errors_total)") is None


def test_good_threads_keep_their_series(scraped: Scraped) -> None:
    """The threads of the well-behaved agent are there, hostile ones beside them, each once."""
    used = scraped.prometheus.query('langchain_quota_thread_used{agent="good"}')
    assert [sample.value for sample in used] == [1] * len(used)
    threads = [sample.labels["thread_id"] for sample in used]
    [surrogate] = set(threads) - LABELS
    assert is_label_of_surrogate(surrogate)
    assert sorted(threads) == sorted({*LABELS, surrogate})


def test_hostile_agents_have_safe_names(scraped: Scraped) -> None:
    """Each agent has a label of its own that fits into the bounds; one without is unnamed."""
    agents = {sample.labels["agent"] for sample in scraped.prometheus.query(TIMESTAMP)}
    [surrogate] = agents - {"good", "unnamed", shortened(LONG), shortened(FORGED)}
    assert is_label_of_surrogate(surrogate)


def test_no_label_is_out_of_bounds(scraped: Scraped) -> None:
    """Every label value is printable, not empty, and at most 64 characters long."""
    for _, labels in series_of(parse_text(scraped.text())):
        for _, value in labels:
            assert value.isprintable()
            assert 1 <= len(value) <= 64


def test_invented_tools_are_bounded(scraped: Scraped) -> None:
    """Of thousands of invented names a hundred are labels; the rest is counted as `_other`."""
    calls = scraped.prometheus.query('langchain_quota_calls_total{agent="inventor"}')
    by_tool: dict[str, float] = {}
    for sample in calls:
        tool = sample.labels["tool"]
        by_tool[tool] = by_tool.get(tool, 0) + sample.value
    invented = {tool for tool in by_tool if tool.startswith("tool_")}
    assert set(by_tool) - invented == {"search", "_other"}
    assert len(invented) == MAX_TOOLS
    assert by_tool["_other"] == 2 * INVENTED - MAX_TOOLS
    outcomes = {sample.labels["decision"] for sample in calls}
    assert len(calls) == len(by_tool) * len(outcomes)


def test_a_limited_tool_keeps_its_name(scraped: Scraped) -> None:
    """A tool that a limit names is labelled by its name, though all room for names is taken."""
    calls = 'langchain_quota_calls_total{agent="inventor",tool="search"}'
    # It is judged twice: by the limiter on all tools, which has nothing left, and by its own.
    assert scraped.prometheus.value(f"sum({calls})") == 2


def test_text_format_is_valid(scraped: Scraped) -> None:
    """The text format is parsed by prometheus_client, and promtool has nothing to say of it."""
    text = scraped.text()
    assert series_of(parse_text(text))
    assert check_metrics(text) == (0, [])


def test_openmetrics_is_valid(scraped: Scraped) -> None:
    """OpenMetrics is parsed by prometheus_client's strict parser, and tells the same series."""
    text = scraped.text(OPENMETRICS)
    assert text.endswith("# EOF\n")
    families = parse_openmetrics(text)
    assert series_of(families) == series_of(parse_text(scraped.text()))


def test_openmetrics_has_exemplars(scraped: Scraped) -> None:
    """Every series of judged calls that has counted one has an exemplar with the span's ids."""
    counted = [
        sample
        for family in parse_openmetrics(scraped.text(OPENMETRICS))
        for sample in family.samples
        if sample.name == "langchain_quota_calls_total" and sample.value > 0
    ]
    assert counted
    for sample in counted:
        assert sample.exemplar is not None
        assert re.fullmatch("[0-9a-f]{32}", sample.exemplar.labels["trace_id"])
        assert re.fullmatch("[0-9a-f]{16}", sample.exemplar.labels["span_id"])
