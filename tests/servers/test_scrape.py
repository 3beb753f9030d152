"""A real Prometheus scrapes real agents, and gives back every metric and its exemplars."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_span_id, format_trace_id
from prometheus_client import CollectorRegistry

from langchain_quota import (
    ModelCallLimitMiddleware,
    Telemetry,
    ToolCallLimitMiddleware,
    __version__,
    start_metrics_server,
)
from langchain_quota.testing import Turn
from tests.servers.agents import build_agent, run
from tests.servers.conftest import StartPrometheus
from tests.servers.prometheus import Prometheus, eventually

Series = dict[tuple[str, ...], float]


class BrokenProcessor(SpanProcessor):
    """A tracer that fails whenever a span begins."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        raise RuntimeError("this tracer is broken")


@dataclass(frozen=True)
class Scraped:
    """A Prometheus that has scraped the agents after their last run."""

    prometheus: Prometheus
    spans: dict[tuple[str, str], ReadableSpan]
    began: float
    ended: float


def _run_researcher(telemetry: Telemetry) -> None:
    """Four threads: near its limit (carl), exhausted (anna), and two with room (dora, bob)."""
    by_thread: dict[str, list[Turn]] = {
        "dora": [["search"], ["search"]],  # the third model call of the run is refused
        "bob": [["search"] * 4, "done"],  # the fourth search is over the run's limit
        "carl": [["search"] * 3, "done", ["search"], "done"],
        "anna": [["search"] * 2, "done", ["search"] * 4, "done"],  # the last: over the thread's
    }
    saver = InMemorySaver()
    for thread, script in by_thread.items():
        agent = build_agent(
            script,
            [
                ModelCallLimitMiddleware(thread_limit=20, run_limit=2, telemetry=telemetry),
                ToolCallLimitMiddleware(
                    tool_name="search", thread_limit=5, run_limit=3, telemetry=telemetry
                ),
            ],
            name="researcher",
            saver=saver,
        )
        for _ in range(len(script) // 2):
            run(agent, thread)


def _run_writer(telemetry: Telemetry) -> None:
    """A batch that is stopped: one call is refused, two are not run."""
    limiter = ToolCallLimitMiddleware(
        tool_name="publish", run_limit=1, exit_behavior="end", telemetry=telemetry
    )
    run(build_agent([["publish", "publish", "search"]], [limiter], name="writer"))


def _run_stacked(telemetry: Telemetry) -> None:
    """Two limiters: what one charged is taken back when the other refuses the call."""
    limiters = [
        ToolCallLimitMiddleware(tool_name="search", run_limit=0, telemetry=telemetry),
        ToolCallLimitMiddleware(run_limit=10, telemetry=telemetry),
    ]
    run(build_agent([["search"], "done"], limiters, name="stacked"))


def _run_untraceable(registry: CollectorRegistry) -> None:
    """An agent without a name whose tracer fails at both of its calls."""
    provider = TracerProvider()
    provider.add_span_processor(BrokenProcessor())
    telemetry = Telemetry(registry=registry, tracer_provider=provider, max_exported_threads=3)
    limiter = ModelCallLimitMiddleware(run_limit=5, telemetry=telemetry)
    run(build_agent([["search"], "done"], [limiter]))


@pytest.fixture(scope="module")
def scraped(start_prometheus: StartPrometheus) -> Iterator[Scraped]:
    """Agents whose every metric has a known value, as a Prometheus has seen them."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, tracer_provider=provider, max_exported_threads=3)
    with start_metrics_server(port=0, registry=registry) as server:
        prometheus = start_prometheus({"agents": f"{server.addr}:{server.port}"})
        began = time.time()
        _run_researcher(telemetry)
        _run_writer(telemetry)
        _run_stacked(telemetry)
        _run_untraceable(registry)
        ended = time.time()
        prometheus.wait_for_scrape("agents")
        spans = {
            (format_trace_id(span.context.trace_id), format_span_id(span.context.span_id)): span
            for span in exporter.get_finished_spans()
            if span.context is not None
        }
        yield Scraped(prometheus, spans, began, ended)


def series(prometheus: Prometheus, selector: str, *labels: str) -> Series:
    """The values of a metric's series by these labels, which must be all that it has."""
    samples = prometheus.query(selector)
    for sample in samples:
        assert set(sample.labels) == set(labels), sample
    return {tuple(sample.labels[each] for each in labels): sample.value for sample in samples}


CALLS: Series = {
    ("researcher", "tool", "search", "allowed"): 14,
    ("researcher", "tool", "search", "blocked"): 2,
    ("researcher", "tool", "search", "skipped"): 0,
    ("researcher", "tool", "search", "would_block"): 0,
    ("researcher", "model", "none", "allowed"): 12,
    ("researcher", "model", "none", "blocked"): 1,
    ("researcher", "model", "none", "skipped"): 0,
    ("researcher", "model", "none", "would_block"): 0,
    ("writer", "tool", "publish", "allowed"): 0,
    ("writer", "tool", "publish", "blocked"): 1,
    ("writer", "tool", "publish", "skipped"): 1,
    ("writer", "tool", "publish", "would_block"): 0,
    ("writer", "tool", "search", "allowed"): 0,
    ("writer", "tool", "search", "blocked"): 0,
    ("writer", "tool", "search", "skipped"): 1,
    ("writer", "tool", "search", "would_block"): 0,
    # Stacked limiters judge separately, and each judgement counts.
    ("stacked", "tool", "search", "allowed"): 1,
    ("stacked", "tool", "search", "blocked"): 1,
    ("stacked", "tool", "search", "skipped"): 0,
    ("stacked", "tool", "search", "would_block"): 0,
    ("unnamed", "model", "none", "allowed"): 2,
    ("unnamed", "model", "none", "blocked"): 0,
    ("unnamed", "model", "none", "skipped"): 0,
    ("unnamed", "model", "none", "would_block"): 0,
}

LIMIT_DECISIONS: Series = {
    ("researcher", "tool:search", "none", "allowed"): 14,
    ("researcher", "tool:search", "none", "refunded"): 0,
    ("researcher", "tool:search", "thread", "blocked"): 1,
    ("researcher", "tool:search", "thread", "would_block"): 0,
    ("researcher", "tool:search", "run", "blocked"): 1,
    ("researcher", "tool:search", "run", "would_block"): 0,
    ("researcher", "model", "none", "allowed"): 12,
    ("researcher", "model", "none", "refunded"): 0,
    ("researcher", "model", "thread", "blocked"): 0,
    ("researcher", "model", "thread", "would_block"): 0,
    ("researcher", "model", "run", "blocked"): 1,
    ("researcher", "model", "run", "would_block"): 0,
    ("writer", "tool:publish", "none", "allowed"): 0,
    ("writer", "tool:publish", "none", "refunded"): 0,
    ("writer", "tool:publish", "run", "blocked"): 1,
    ("writer", "tool:publish", "run", "would_block"): 0,
    ("stacked", "tool:*", "none", "allowed"): 1,
    ("stacked", "tool:*", "none", "refunded"): 1,
    ("stacked", "tool:*", "run", "blocked"): 0,
    ("stacked", "tool:*", "run", "would_block"): 0,
    ("stacked", "tool:search", "none", "allowed"): 0,
    ("stacked", "tool:search", "none", "refunded"): 0,
    ("stacked", "tool:search", "run", "blocked"): 1,
    ("stacked", "tool:search", "run", "would_block"): 0,
    ("unnamed", "model", "none", "allowed"): 2,
    ("unnamed", "model", "none", "refunded"): 0,
    ("unnamed", "model", "run", "blocked"): 0,
    ("unnamed", "model", "run", "would_block"): 0,
}

NEAR: Series = {
    ("researcher", "tool:search", "thread"): 2,  # anna and carl at 4 of 5
    ("researcher", "tool:search", "run"): 0,
    ("researcher", "model", "thread"): 0,
    ("researcher", "model", "run"): 0,
    ("writer", "tool:publish", "run"): 0,
    ("stacked", "tool:*", "run"): 0,
    ("stacked", "tool:search", "run"): 0,
    ("unnamed", "model", "run"): 0,
}

EXHAUSTED: Series = {
    **NEAR,
    ("researcher", "tool:search", "thread"): 1,  # anna
    ("researcher", "tool:search", "run"): 3,  # one run of bob, of carl and of anna
    ("researcher", "model", "run"): 6,  # every run
}

LIMIT: Series = {
    ("researcher", "tool:search", "thread"): 5,
    ("researcher", "tool:search", "run"): 3,
    ("researcher", "model", "thread"): 20,
    ("researcher", "model", "run"): 2,
    ("writer", "tool:publish", "run"): 1,
    ("stacked", "tool:*", "run"): 10,
    ("stacked", "tool:search", "run"): 0,
    ("unnamed", "model", "run"): 5,
}

SUBJECTS: Series = {
    ("researcher", "tool:search", "thread", "ok"): 2,
    ("researcher", "tool:search", "thread", "near"): 1,
    ("researcher", "tool:search", "thread", "exhausted"): 1,
    ("researcher", "model", "thread", "ok"): 4,
    ("researcher", "model", "thread", "near"): 0,
    ("researcher", "model", "thread", "exhausted"): 0,
}

THREAD_USED: Series = {
    ("researcher", "tool:search", "anna"): 5,
    ("researcher", "tool:search", "bob"): 3,
    ("researcher", "tool:search", "carl"): 4,
    ("researcher", "model", "anna"): 4,
    ("researcher", "model", "bob"): 2,
    ("researcher", "model", "carl"): 4,
}

THREAD_LIMIT: Series = {
    (agent, limit, thread): 5 if limit == "tool:search" else 20
    for agent, limit, thread in THREAD_USED
}

THREAD_BLOCKED: Series = {
    ("researcher", "tool:search", "anna"): 1,
    ("researcher", "tool:search", "bob"): 1,
}

RUNS: Series = {("researcher",): 6, ("writer",): 1, ("stacked",): 1, ("unnamed",): 1}

RUNS_ENDED: Series = {
    **{(agent, limit): 0 for agent, limit, _ in NEAR},
    ("researcher", "model"): 1,  # dora
    ("writer", "tool:publish"): 1,
}

AFTER_REFUSAL: Series = {
    **{
        (agent, kind, decision): 0
        for (agent,) in RUNS
        for kind in ("model", "tool")
        for decision in ("allowed", "blocked", "skipped", "would_block")
    },
    ("researcher", "model", "allowed"): 2,  # bob and anna
}

HIDDEN: Series = {("ok",): 1, ("near",): 0, ("exhausted",): 0}  # dora

EXPECTED: dict[str, tuple[tuple[str, ...], Series]] = {
    "langchain_quota_calls_total": (("agent", "kind", "tool", "decision"), CALLS),
    "langchain_quota_limit_decisions_total": (
        ("agent", "limit", "scope", "decision"),
        LIMIT_DECISIONS,
    ),
    "langchain_quota_near_limit_total": (("agent", "limit", "scope"), NEAR),
    "langchain_quota_exhausted_total": (("agent", "limit", "scope"), EXHAUSTED),
    "langchain_quota_limit": (("agent", "limit", "scope"), LIMIT),
    "langchain_quota_limit_near_ratio": (
        ("agent", "limit"),
        dict.fromkeys(RUNS_ENDED, 0.8),
    ),
    "langchain_quota_limit_alert": (("agent", "limit"), dict.fromkeys(RUNS_ENDED, 1)),
    "langchain_quota_runs_total": (("agent",), RUNS),
    "langchain_quota_runs_ended_total": (("agent", "limit"), RUNS_ENDED),
    "langchain_quota_calls_after_refusal_total": (("agent", "kind", "decision"), AFTER_REFUSAL),
    "langchain_quota_subjects": (("agent", "limit", "scope", "state"), SUBJECTS),
    "langchain_quota_thread_used": (("agent", "limit", "thread_id"), THREAD_USED),
    "langchain_quota_thread_limit": (("agent", "limit", "thread_id"), THREAD_LIMIT),
    "langchain_quota_thread_blocked_total": (("agent", "limit", "thread_id"), THREAD_BLOCKED),
    "langchain_quota_threads_hidden": (("state",), HIDDEN),
    "langchain_quota_errors_total": (
        ("component", "error_type"),
        {("tracing", "RuntimeError"): 2},
    ),
    "langchain_quota_build_info": (("version",), {(__version__,): 1}),
}
TIMESTAMP = "langchain_quota_thread_last_decision_timestamp_seconds"
TIMES = {
    TIMESTAMP,
    "langchain_quota_thread_last_refusal_timestamp_seconds",
    "langchain_quota_thread_refused_since_timestamp_seconds",
    "langchain_quota_start_time_seconds",
    *(f"langchain_quota_decision_seconds_{part}" for part in ("bucket", "count", "sum")),
}
"""Metrics whose values are times."""


@pytest.mark.parametrize("metric", EXPECTED)
def test_every_series_is_queried_back(scraped: Scraped, metric: str) -> None:
    """Each metric has, in Prometheus, exactly the series, labels and values of what happened."""
    labels, expected = EXPECTED[metric]
    assert series(scraped.prometheus, metric, *labels) == expected


def test_threads_tell_when_they_were_last_judged(scraped: Scraped) -> None:
    """The exported threads' timestamps lie within the time in which the agents ran, in order."""
    times = series(scraped.prometheus, TIMESTAMP, "agent", "limit", "thread_id")
    assert set(times) == set(THREAD_USED)
    in_order = [times["researcher", "model", thread] for thread in ("bob", "carl", "anna")]
    # Prometheus' API gives values with full precision.
    assert in_order == sorted(in_order)
    assert scraped.began <= in_order[0]
    assert in_order[-1] <= scraped.ended


def test_there_are_no_other_metrics(scraped: Scraped) -> None:
    """Prometheus holds exactly the documented names, and the counters' creation times."""
    names = {sample.name for sample in scraped.prometheus.query('{job="agents"}')}
    ours = {name for name in names if name.startswith("langchain_quota_")}
    assert {name for name in ours if not name.endswith("_created")} == {*EXPECTED, *TIMES}


def test_types(scraped: Scraped) -> None:
    """Prometheus knows each metric as a counter or a gauge, as its name says."""
    told = scraped.prometheus.metadata()
    for name in (*EXPECTED, TIMESTAMP):
        family = name.removesuffix("_total")
        assert told[family] == ("gauge" if family == name else "counter")


@pytest.mark.parametrize(
    ("selector", "attributes"),
    [
        (
            'langchain_quota_calls_total{agent="researcher",tool="search",decision="blocked"}',
            {"langchain_quota.decision": "blocked", "gen_ai.tool.name": "search"},
        ),
        (
            'langchain_quota_calls_total{agent="researcher",kind="model",decision="allowed"}',
            {"langchain_quota.decision": "allowed", "langchain_quota.kind": "model"},
        ),
        (
            'langchain_quota_limit_decisions_total{agent="researcher",scope="run",limit="tool:search"}',
            {"langchain_quota.limit": "tool:search", "langchain_quota.scope": "run"},
        ),
    ],
)
def test_exemplars_lead_to_spans(
    scraped: Scraped, selector: str, attributes: dict[str, str]
) -> None:
    """An exemplar from Prometheus' API names a recorded span, and it is one of that very kind."""
    found = eventually(lambda: scraped.prometheus.exemplars(selector))
    for exemplar in found:
        assert set(exemplar.labels) == {"trace_id", "span_id"}
        span = scraped.spans[exemplar.labels["trace_id"], exemplar.labels["span_id"]]
        assert span.attributes is not None
        assert attributes.items() <= span.attributes.items()
        assert span.attributes["gen_ai.agent.name"] == "researcher"
