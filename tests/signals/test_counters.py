"""What agents do, as the counters and gauges say it.

Label values are bounded, printable and safe to render, whatever they are made from.
"""

import hashlib
import logging
import re
from collections.abc import Mapping
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry.trace import NoOpTracerProvider
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    Quota,
    ToolCallLimit,
    ToolCallLimitExceededError,
    __version__,
    hmac_label,
)
from langchain_quota.limits import Limit
from tests.scene import Scene, asking
from tests.telemetry import Signals, attributes, telling

Series = Mapping[tuple[str, ...], float]

DECISIONS = "langchain_quota_limit_decisions_total"
CROSSINGS = "langchain_quota_crossings_total"
LIMIT = "langchain_quota_limit"
OUTCOMES = ("allowed", "blocked", "skipped", "would_block")


async def play_agents(signals: Signals) -> None:
    """Agents whose every counter has a known value."""

    async def play(name: str, script: Any, limits: list[Limit], threads: str, **given: Any) -> None:
        scene = Scene(signals, script, limits, kind="drop-in", name=name, **given)
        for thread in threads.split():
            await scene.play(thread_id=thread)

    of_researcher: list[Limit] = [
        ModelCallLimit(thread_limit=20, run_limit=2),
        ToolCallLimit("search", thread_limit=5, run_limit=3),
    ]
    script = [
        *(["search"], ["search"]),  # dora: the third model call of the run is refused
        *(["search"] * 4, "done"),  # bob: the fourth search is over the run's limit
        *(["search"] * 3, "done", ["search"], "done"),  # carl
        *(["search"] * 2, "done", ["search"] * 4, "done"),  # anna: the last is over the thread's
    ]
    await play("researcher", script, of_researcher, "dora bob carl carl anna anna")
    # A batch that is stopped: one call is refused, two are not run.
    stopping = ToolCallLimit("publish", run_limit=1, exit_behavior="end")
    await play("writer", [["publish", "publish", "search"]], [stopping], "w")


MADE = {
    ("researcher", "tool", "search"): (14, 2, 0, 0),
    ("researcher", "model", "none"): (12, 1, 0, 0),
    ("writer", "tool", "publish"): (0, 1, 1, 0),
    ("writer", "tool", "search"): (0, 0, 1, 0),
}
"""What was decided about calls, in the order of the outcomes."""
LIMITS: Series = {
    ("researcher", "tool:search", "thread"): 5,
    ("researcher", "tool:search", "run"): 3,
    ("researcher", "model", "thread"): 20,
    ("researcher", "model", "run"): 2,
    ("writer", "tool:publish", "run"): 1,
}
NAMES = {(agent, limit) for agent, limit, _ in LIMITS}

EXPECTED: dict[str, Series] = {
    "langchain_quota_calls_total": {
        (*call, outcome): count
        for call, counts in MADE.items()
        for outcome, count in zip(OUTCOMES, counts, strict=True)
    },
    CROSSINGS: {
        **{(*each, level): 0 for each in LIMITS for level in ("near", "exhausted")},
        ("researcher", "tool:search", "thread", "near"): 2,  # anna and carl at 4 of 5
        ("researcher", "tool:search", "thread", "exhausted"): 1,  # anna
        ("researcher", "tool:search", "run", "exhausted"): 3,  # one run of bob, carl and anna
        ("researcher", "model", "run", "exhausted"): 6,  # every run
    },
    LIMIT: {(*each, "calls"): most for each, most in LIMITS.items()},
    "langchain_quota_limit_near_ratio": {(*each, "true"): 0.8 for each in NAMES},
    "langchain_quota_runs_total": {("researcher",): 6, ("writer",): 1},
    "langchain_quota_runs_ended_total": {
        **dict.fromkeys(NAMES, 0),
        ("researcher", "model"): 1,  # dora
        ("writer", "tool:publish"): 1,
    },
    "langchain_quota_build_info": {(__version__,): 1},
    "langchain_quota_errors_total": {},
}


async def test_every_series(signals: Signals) -> None:
    """Each metric has exactly the series and values of what happened, zeros included."""
    await play_agents(signals)
    found = {name: signals.samples(name) for name in EXPECTED}
    assert found == EXPECTED


LIMITS_OF_RUNS: list[Limit] = [ToolCallLimit("search", run_limit=1), ModelCallLimit(run_limit=3)]


async def test_a_restart_may_begin_with_a_refund(signals: Signals) -> None:
    """Then what was charged is there, at 0, so that dashboards can subtract the refund."""
    saver = InMemorySaver()
    limits = [
        ToolCallLimit("calc", run_limit=0, exit_behavior="error"),
        ToolCallLimit("search", thread_limit=5),
    ]

    def process(signals: Signals, script: Any) -> Scene:
        return Scene(signals, script, limits, kind="drop-in", checkpointer=saver)

    with pytest.raises(ToolCallLimitExceededError):
        await process(telling(), [["search", "calc"]]).play()
    await process(signals, ["done"]).play()
    found = signals.samples(DECISIONS, agent="unnamed", limit="tool:search", scope="none")
    assert found == {("refunded",): 1, ("allowed",): 0}


async def test_checking_is_timed(signals: Signals) -> None:
    """Once for the calls of a step, by where the counts are."""
    script = [["search", "search"], "done"]
    await Scene(signals, script, LIMITS_OF_RUNS).play()
    shared = ToolCallLimit("search", quotas=[Quota(5, per="global")])
    await Scene(signals, script, [shared], store=MemoryStore()).play()
    assert signals.samples("langchain_quota_decision_seconds_count") == {
        ("model", "state"): 2,
        ("model", "store"): 0,
        ("tool", "state"): 1,
        ("tool", "store"): 1,
    }
    taken = signals.samples("langchain_quota_decision_seconds_sum", kind="tool")
    assert all(0 < seconds < 60 for seconds in taken.values())


async def test_no_series_has_the_time_of_creation(signals: Signals) -> None:
    """Neither Prometheus' text nor OpenMetrics has `_created`, which would double counters."""
    await play_agents(signals)
    for generate in (generate_latest, generate_openmetrics):
        assert b"_created" not in generate(signals.registry)


def test_without_a_decision_there_is_build_info(signals: Signals) -> None:
    """A process that has decided nothing yet is seen to be up; every family has a help text."""
    assert signals.samples("langchain_quota_build_info") == {(__version__,): 1}
    helps = [family.documentation for family in signals.registry.collect()]
    assert len({*helps} - {""}) == len(helps)


KEY = "0123456789abcdef"
CALLS = "langchain_quota_calls_total"
LONG = "x" * 10_000
FORGED = 'a"} 1\nlangchain_quota_calls_total{tool="forged"} 1\n\\'


def shortened(text: str) -> str:
    """The documented label of a text that cannot be one itself."""
    kept = "".join(char for char in text[:256] if char.isprintable())[:40]
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{kept}~{digest[:12]}"


def labels(signals: Signals, name: str) -> set[str]:
    """All values of a label in a scrape, each of which is safe, in both formats."""
    rendered: bytes = generate_openmetrics(signals.registry)  # type: ignore[no-untyped-call]
    assert rendered.endswith(b"# EOF\n")
    families = text_string_to_metric_families(generate_latest(signals.registry).decode())
    samples = [each for family in families for each in family.samples]
    values = {value for each in samples for value in each.labels.values()}
    assert all(value.isprintable() and 0 < len(value) <= 64 for value in values)
    assert not any(each.name == "langchain_quota_errors_total" for each in samples)
    return {each.labels[name] for each in samples if name in each.labels}


SHOWN: list[tuple[object, str]] = [
    ("a" * 64, "a" * 64),
    ("~", "~"),
    ("süß 😀", "süß 😀"),
    (7, "7"),
    ("a" * 65, shortened("a" * 65)),
    (LONG + "2", shortened(LONG + "2")),
    ("", shortened("")),
    (FORGED, shortened(FORGED)),
    ("\ud800", shortened("\ud800")),
    ("\n" * 300 + "far behind", shortened("\n" * 300 + "far behind")),
]


@pytest.mark.parametrize(("thread", "label"), SHOWN, ids=[ascii(row[0])[:20] for row in SHOWN])
async def test_the_label_of_a_thread(thread: object, label: str, signals: Signals) -> None:
    """Short printable text is its own label; else 40 characters, `~` and a part of the SHA-256."""
    limits = [ModelCallLimit(thread_limit=9)]
    await Scene(signals, ["done"], limits, thread_id=thread).play()
    assert labels(signals, "thread_id") == {label}
    assert len({row[1] for row in SHOWN}) == len(SHOWN)


ODD = ["s" * 65, "two words", "a\n", "süß", "\ud800", "a/b"]


async def test_tools_are_bounded_by_agent() -> None:
    """Names in limits always have labels; of others, the first do, invented or not."""
    signals = telling(max_tools=4)
    limits: list[Limit] = [
        ToolCallLimit("limited", run_limit=99),
        ToolCallLimit(exclude=["left_out"], run_limit=9999),
    ]
    for agent in ("boss", "clerk"):
        invented = [*ODD, *(f"invented-{index}-{agent}" for index in range(100))]
        called = ["search", "calc", *invented, "limited", "left_out"]
        await Scene(signals, asking(*called), limits, name=agent).play()
    calls = signals.samples(CALLS, kind="tool", decision="allowed")
    assert {tool for _, tool in calls} == {
        *("search", "calc", "limited", "left_out", "_other"),
        *(f"invented-{index}-{agent}" for index in (0, 1) for agent in ("boss", "clerk")),
    }
    assert calls["boss", "_other"] == len(ODD) + 100 - 2


async def test_agents_are_bounded() -> None:
    """Agents that are named anew for each request make no more series than the bound."""
    signals = telling(max_agents=2, max_exported_threads=0, tracer_provider=NoOpTracerProvider())
    sizes = []
    for index in range(8):
        limits: list[Limit] = [ToolCallLimit("search", run_limit=1), ModelCallLimit(run_limit=2)]
        script = [["search", f"own-{index}"], "done"]
        await Scene(signals, script, limits, name=f"agent-{index}").play()
        sizes.append(sum(len(each.samples) for each in signals.registry.collect()))
    assert labels(signals, "agent") == {"agent-0", "agent-1", "_other"}
    # The tools of all others share the bound of one agent.
    assert sizes[-1] - sizes[3] == 4 * (sizes[4] - sizes[3])
    assert sum(signals.samples("langchain_quota_runs_total").values()) == 8


async def test_a_thread_label_hides_ids(caplog: pytest.LogCaptureFixture) -> None:
    """Who has the key finds series, spans and log lines of an id, which is seen nowhere."""
    caplog.set_level(logging.DEBUG, logger="langchain_quota")
    signals, label = telling(thread_label=hmac_label(KEY)), hmac_label(KEY)("ada@example.org")
    limits = [ModelCallLimit(thread_limit=1)]
    await Scene(signals, ["done"], limits, thread_id="ada@example.org").play()
    assert labels(signals, "thread_id") == {label}
    assert {vars(each)["quota_thread"] for each in caplog.records} == {label}
    (span,) = signals.decision_spans()
    assert attributes(span)["thread.id"] == label
    assert "gen_ai.conversation.id" not in attributes(span)
    told = [generate_latest(signals.registry).decode(), *map(repr, map(vars, caplog.records))]
    told.append(span.to_json())
    assert not any("ada@" in each for each in told)


def test_hmac_label() -> None:
    """It is 20 digits of a keyed hash of any id's text; its key is not in its own text."""
    label = hmac_label(KEY)
    assert re.fullmatch("[0-9a-f]{20}", label("\ud800"))
    assert label(7) == label("7") == hmac_label(KEY.encode())(7)
    assert label(7) != hmac_label("f" * 16)(7)
    assert label == hmac_label(KEY) != hmac_label("f" * 16)
    assert KEY not in repr(label)  # as errors about two Telemetry show it
    assert hmac_label("ü" * 8)("a")


@pytest.mark.parametrize("key", ["", "k" * 15, b"k" * 15, 32, None])
def test_a_key_that_is_refused(key: Any) -> None:
    """A key that can be guessed, or is neither text nor bytes, is refused and not shown."""
    error = ValueError if isinstance(key, str | bytes) else TypeError
    with pytest.raises(error, match="key must") as caught:
        hmac_label(key)
    assert "kk" not in str(caught.value)
