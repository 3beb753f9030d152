"""Label values are bounded, printable and safe to render, whatever they are made from."""

import hashlib
import logging
import re
from typing import Any

import pytest
from opentelemetry.trace import NoOpTracerProvider
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from langchain_quota import ModelCallLimit, ToolCallLimit, hmac_label
from langchain_quota.limits import Limit
from tests.scene import Scene, asking
from tests.telemetry import Signals, attributes, telling

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
        scene = Scene(signals, asking(*called), limits, name=agent)
        await scene.play()
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
